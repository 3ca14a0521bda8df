//! A machine that loses its power: a disk of its own that drops what is not durable, processes that
//! all end, another boot.
//!
//! It lives in a process with a mount namespace of its own ([`apart`]): nobody else holds its mounts,
//! and what the kernel says about the boot can be another thing there.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use layerpack_fixtures::find_tool;
use layerpack_fixtures::guards::mounts_below;
use layerpack_fixtures::rng::Rng;
use rustix::mount::UnmountFlags;
use rustix::process::{Pid, Signal, kill_process};

use super::{Node, processes, wait_until};

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// Tells the process with its own mount namespace that it is one.
const APART: &str = "LAYERPACK_TEST_APART";

/// The reason why this machine cannot have such disks.
pub(crate) fn capable(scratch: &Path) -> Result<(), String> {
    for tool in ["mkfs.ext4", "mount", "unshare"] {
        if find_tool(tool).is_none() {
            return Err(format!("{tool} is not installed"));
        }
    }
    // Tried: containers often have the devices and no right to them.
    let (image, at) = (scratch.join("trial"), scratch.join("trial-mnt"));
    fs_err::create_dir(&at).unwrap();
    make(&image, 8);
    let mounted = mount(&image, &at);
    if mounted.is_ok() {
        rustix::mount::unmount(&at, UnmountFlags::NOFOLLOW).unwrap();
    }
    mounted
}

/// Runs a test of this binary, marked as ignored, in a process with its own mount namespace.
pub(crate) fn apart(test: &str) {
    let status = Command::new("unshare")
        .args(["-m", "--propagation", "private", "--"])
        .arg(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "--nocapture", test])
        .env(APART, "1")
        .status()
        .unwrap();
    assert!(status.success(), "{test}: {status}");
}

/// Whether this is such a process.
pub(crate) fn is_apart() -> bool {
    std::env::var_os(APART).is_some()
}

/// Lets go of this namespace's copies of what other tests have mounted: they could not unmount it.
fn leave_others_mounts() {
    let all = fs_err::canonicalize(std::env::temp_dir()).unwrap();
    for mounted in mounts_below(&all).iter().rev() {
        let flags = UnmountFlags::DETACH | UnmountFlags::NOFOLLOW;
        if *mounted != all {
            let _ = rustix::mount::unmount(mounted, flags);
        }
    }
}

fn make(image: &Path, mib: u64) {
    let file = fs_err::File::create(image).unwrap();
    file.set_len(mib << 20).unwrap();
    let made = Command::new("mkfs.ext4")
        .args(["-q", "-F", "-m", "0"])
        .arg(image)
        .status()
        .unwrap();
    assert!(made.success());
}

/// Mounts it; the loop device goes with the mount.
fn mount(image: &Path, at: &Path) -> Result<(), String> {
    let mounted = Command::new("mount")
        .args(["-o", "loop"])
        .args([image, at])
        .output()
        .unwrap();
    match mounted.status.success() {
        true => Ok(()),
        false => Err(format!(
            "no loop devices: {}",
            String::from_utf8_lossy(&mounted.stderr).trim()
        )),
    }
}

/// Whether a loop device still has the image: its filesystem lives.
fn in_use(image: &Path) -> bool {
    let devices = fs_err::read_dir("/sys/block").unwrap().flatten();
    devices
        .filter_map(|d| fs_err::read_to_string(d.path().join("loop/backing_file")).ok())
        .any(|file| Path::new(file.trim_end()) == image)
}

/// The machine.
#[derive(Debug)]
pub(crate) struct Machine<'a> {
    node: &'a Node,
    image: PathBuf,
    at: PathBuf,
    boot_id: PathBuf,
    boots: u64,
}

impl<'a> Machine<'a> {
    /// A machine whose disk is mounted on `at`, and which runs.
    pub(crate) fn new(node: &'a Node, at: PathBuf, mib: u64) -> Self {
        leave_others_mounts();
        fs_err::create_dir_all(&at).unwrap();
        let image = node.scratch.join("disk");
        make(&image, mib);
        let boot_id = node.scratch.join("boot_id");
        let mut machine = Self {
            node,
            image,
            at,
            boot_id,
            boots: 0,
        };
        machine.boot();
        let bound = Command::new("mount")
            .arg("--bind")
            .arg(&machine.boot_id)
            .arg(BOOT_ID)
            .status()
            .unwrap();
        assert!(bound.success());
        machine
    }

    /// Another boot with the same disk.
    fn boot(&mut self) {
        self.boots += 1;
        let hex = hex(&Rng::new(self.boots + 0xb007).bytes(16));
        let id = format!(
            "{}-{}-{}-{}-{}\n",
            &hex[..8],
            &hex[8..12],
            &hex[12..16],
            &hex[16..20],
            &hex[20..]
        );
        // In place: a file is mounted on the kernel's own.
        fs_err::write(&self.boot_id, id).unwrap();
        mount(&self.image, &self.at).unwrap();
    }

    /// Makes all durable that was written so far.
    pub(crate) fn sync(&self) {
        let disk = fs_err::File::open(&self.at).unwrap();
        rustix::fs::syncfs(disk.file().as_fd()).unwrap();
    }

    /// The power goes: nothing reaches the disk any more. Processes live on until
    /// [`Machine::restart`], to be seen failing.
    pub(crate) fn cut(&self) {
        let disk = fs_err::File::open(&self.at).unwrap();
        layerpack_sys::power::cut(disk.file().as_fd()).unwrap();
    }

    /// Processes of the node, sandboxes included: those that see a mount of it.
    fn left(&self) -> Vec<i32> {
        let own = std::process::id();
        let named = processes(self.node).into_iter();
        let named = named.filter_map(|line| line.split(' ').next()?.parse().ok());
        let scratch = self.node.scratch.path().to_str().unwrap();
        let entries = fs_err::read_dir("/proc").unwrap().flatten();
        let see = entries.filter_map(|entry| {
            let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
            let mounts = fs_err::read_to_string(entry.path().join("mountinfo")).ok()?;
            let sees = pid != own && mounts.contains(scratch);
            i32::try_from(pid).ok().filter(|_| sees)
        });
        named.chain(see).collect()
    }

    /// Ends all processes of the node and takes its mounts away; nobody can look at any of it then.
    fn off(&self) {
        let gone = wait_until(|| {
            let left = self.left();
            kill_all(&left);
            left.is_empty()
        });
        assert!(gone, "processes {:?} do not end", self.left());
        let unmounted = wait_until(|| {
            for mounted in mounts_below(self.node.scratch.path()).iter().rev() {
                let _ = rustix::mount::unmount(mounted, UnmountFlags::NOFOLLOW);
            }
            mounts_below(self.node.scratch.path()).is_empty()
        });
        let left = mounts_below(self.node.scratch.path());
        assert!(unmounted, "in use: {left:?}");
        assert!(wait_until(|| !in_use(&self.image)), "the disk is in use");
    }

    /// All processes end, and the machine boots from what reached the disk.
    pub(crate) fn restart(&mut self) {
        self.off();
        self.boot();
    }
}

impl Drop for Machine<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // Also what others start meanwhile.
            wait_until(|| {
                let left = self.left();
                kill_all(&left);
                left.is_empty()
            });
            for mounted in mounts_below(self.node.scratch.path()).iter().rev() {
                let _ = rustix::mount::unmount(mounted, UnmountFlags::DETACH);
            }
            return;
        }
        self.off();
    }
}

fn kill_all(pids: &[i32]) {
    for pid in pids.iter().filter_map(|pid| Pid::from_raw(*pid)) {
        let _ = kill_process(pid, Signal::KILL);
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
