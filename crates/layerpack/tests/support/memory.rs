//! A control group whose memory runs out when a test wants it to.

#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "tests")]

use std::path::{Path, PathBuf};
use std::process::Command;

use layerpack_fixtures::ChildGuard;

use super::wait_until;

/// Tells [`take_memory`] the group's directory.
const GROUP: &str = "LAYERPACK_TEST_MEMORY_GROUP";
/// What [`take_memory`] takes at most, in MiB.
const MOST: usize = 1024;

/// A group of the memory controller, of either version. Deleted on drop.
#[derive(Debug)]
pub(crate) struct Group {
    dir: PathBuf,
    limit: &'static str,
    usage: &'static str,
    counts: &'static str,
    none: &'static str,
}

impl Group {
    /// Makes one.
    ///
    /// # Errors
    /// The reason why that cannot be done here.
    pub(crate) fn new(label: &str) -> Result<Self, String> {
        let name = format!("layerpack-test-{label}-{}", std::process::id());
        let (two, one) = (
            Path::new("/sys/fs/cgroup"),
            Path::new("/sys/fs/cgroup/memory"),
        );
        let controllers = fs_err::read_to_string(two.join("cgroup.controllers"));
        let group = if one.join("memory.limit_in_bytes").exists() {
            Self {
                dir: one.join(name),
                limit: "memory.limit_in_bytes",
                usage: "memory.usage_in_bytes",
                counts: "memory.oom_control",
                none: "-1",
            }
        } else if controllers.is_ok_and(|found| found.split_whitespace().any(|c| c == "memory")) {
            // Said already where a service manager runs.
            let _ = fs_err::write(two.join("cgroup.subtree_control"), "+memory");
            Self {
                dir: two.join(name),
                limit: "memory.max",
                usage: "memory.current",
                counts: "memory.events",
                none: "max",
            }
        } else {
            return Err("no memory controller is mounted on /sys/fs/cgroup".to_owned());
        };
        fs_err::create_dir(&group.dir).map_err(|e| format!("no control group can be made: {e}"))?;
        if !group.dir.join(group.limit).exists() {
            return Err("the memory controller is not handed down to new groups".to_owned());
        }
        if group.kills() != 0 {
            return Err("the kernel does not count what it kills for want of memory".to_owned());
        }
        Ok(group)
    }

    /// Takes a process in. What it has already counts elsewhere.
    pub(crate) fn add(&self, pid: i32) {
        fs_err::write(self.dir.join("cgroup.procs"), pid.to_string()).unwrap();
    }

    /// What it takes up, in bytes.
    pub(crate) fn usage(&self) -> u64 {
        self.number(self.usage)
    }

    fn number(&self, file: &str) -> u64 {
        let text = fs_err::read_to_string(self.dir.join(file)).unwrap();
        text.trim().parse().unwrap()
    }

    /// Processes that the kernel killed in it for want of memory.
    pub(crate) fn kills(&self) -> u64 {
        kills(&self.dir.join(self.counts))
    }

    /// Limits it. `false` if the kernel refuses, since more is in use.
    pub(crate) fn set_limit(&self, bytes: u64) -> bool {
        fs_err::write(self.dir.join(self.limit), bytes.to_string()).is_ok()
    }

    /// Takes the limit away.
    pub(crate) fn lift(&self) {
        let _ = fs_err::write(self.dir.join(self.limit), self.none);
    }

    /// Takes up what is left of it by a process that is not the first to be killed, until one was.
    /// `child`: name of a test of the same binary that calls [`take_memory`].
    /// `meanwhile` is called until then.
    pub(crate) fn exhaust(&self, child: &str, meanwhile: impl Fn()) {
        let before = self.kills();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--ignored", "--exact", "--nocapture", child])
            .env(GROUP, &self.dir)
            .stdout(std::process::Stdio::null());
        let mut hog = ChildGuard::spawn(&mut command).unwrap();
        assert!(
            wait_until(|| {
                meanwhile();
                self.kills() > before
            }),
            "nothing was killed: {} of memory in use",
            self.usage()
        );
        // It ends when it sees that, or is killed as well.
        hog.child().wait().unwrap();
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.lift();
        let parent = self.dir.parent().unwrap_or(&self.dir).join("cgroup.procs");
        for pid in fs_err::read_to_string(self.dir.join("cgroup.procs"))
            .unwrap_or_default()
            .lines()
        {
            let _ = fs_err::write(&parent, pid);
        }
        wait_until(|| fs_err::remove_dir(&self.dir).is_ok());
    }
}

/// Takes the limit away whatever a test does, before its node is stopped.
#[derive(Debug)]
pub(crate) struct Lifted<'a>(pub(crate) &'a Group);

impl Drop for Lifted<'_> {
    fn drop(&mut self) {
        self.0.lift();
    }
}

fn kills(counts: &Path) -> u64 {
    let text = fs_err::read_to_string(counts).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
    line.and_then(|n| n.trim().parse().ok()).unwrap_or(u64::MAX)
}

/// The process that takes memory: does nothing if it was not started for that.
pub(crate) fn take_memory() {
    let Some(dir) = std::env::var_os(GROUP).map(PathBuf::from) else {
        return;
    };
    let counts = ["memory.events", "memory.oom_control"].map(|name| dir.join(name));
    let counts = counts.iter().find(|path| path.exists()).unwrap();
    fs_err::write(dir.join("cgroup.procs"), std::process::id().to_string()).unwrap();
    let before = kills(counts);
    let mut taken = Vec::new();
    while kills(counts) == before && taken.len() < MOST {
        // Written to, so that it is really there.
        taken.push(vec![u8::try_from(taken.len() % 251).unwrap() + 1; 1 << 20]);
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    assert!(
        kills(counts) > before,
        "{} MiB were not enough",
        taken.len()
    );
}
