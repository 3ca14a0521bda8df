//! File systems that a program serves through FUSE: started, waited for, measured and ended in
//! order.
//!
//! They can stand on each other, as squashfuse on a file that httpdirfs shows. Whatever becomes of
//! the scenario, dropping a [`Served`] takes down what was started last first, and ends the programs.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use layerpack_fixtures::find_tool;
use layerpack_fixtures::guards::{ChildGuard, MountGuard, mounts_below};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;

use super::node::Usage;
use super::remove;
use crate::process;

/// How long a program may take until it serves, and until it ends once it is unmounted.
const LIMIT: Duration = Duration::from_secs(60);

/// One mount, or a program without one.
#[derive(Debug)]
struct Stage {
    // In this order: the program may still answer while its mount goes.
    mount: Option<MountGuard>,
    program: Option<ChildGuard>,
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Served {
    /// Where logs, mount points and caches of the programs lie.
    directory: PathBuf,
    stages: Vec<Stage>,
}

impl Served {
    /// Nothing yet; `directory` is emptied.
    ///
    /// # Errors
    /// When the directory cannot be made anew.
    pub(super) fn new(directory: &Path) -> Result<Self> {
        for mounted in mounts_below(directory).into_iter().rev() {
            drop(MountGuard::new(mounted));
        }
        remove(directory)?;
        fs_err::create_dir_all(directory)?;
        Ok(Self {
            directory: directory.to_owned(),
            stages: Vec::new(),
        })
    }

    /// A directory for a program's own use; made if need be.
    ///
    /// # Errors
    /// When it cannot be made.
    pub(super) fn place(&self, name: &str) -> Result<PathBuf> {
        let path = self.directory.join(name);
        fs_err::create_dir_all(&path)?;
        Ok(path)
    }

    fn spawn(&self, command: &mut Command) -> Result<(ChildGuard, PathBuf)> {
        let program = Path::new(command.get_program()).file_name();
        let program = program.unwrap_or_default().to_string_lossy();
        let number = self.stages.len();
        let log = self.directory.join(format!("{number}-{program}.log"));
        let (out, _) = fs_err::File::create(&log)?.into_parts();
        command
            .stdin(Stdio::null())
            .stdout(out.try_clone()?)
            .stderr(out);
        Ok((ChildGuard::spawn(command)?, log))
    }

    /// Starts a program that stays in the foreground, and waits until `ready` says so.
    ///
    /// # Errors
    /// When it ends or takes too long; with the end of what it said.
    pub(super) fn program(
        &mut self,
        command: &mut Command,
        ready: impl Fn() -> bool,
    ) -> Result<()> {
        let (mut program, log) = self.spawn(command)?;
        wait(command, &mut program, &log, ready)?;
        self.stages.push(Stage {
            mount: None,
            program: Some(program),
        });
        Ok(())
    }

    /// Starts a program that mounts on `target`, and waits until it has.
    ///
    /// # Errors
    /// As [`Served::program`].
    pub(super) fn mounting(&mut self, command: &mut Command, target: &Path) -> Result<()> {
        let (mut program, log) = self.spawn(command)?;
        let up = || mounts_below(target).iter().any(|mounted| mounted == target);
        let waited = wait(command, &mut program, &log, up);
        // Also what came up too late has to go.
        self.stages.push(Stage {
            mount: Some(MountGuard::new(target)),
            program: Some(program),
        });
        waited
    }

    /// Takes charge of a mount that needs no program.
    pub(super) fn mounted(&mut self, mount: MountGuard) {
        self.stages.push(Stage {
            mount: Some(mount),
            program: None,
        });
    }

    /// What all programs have used so far. Memory is the sum of what each had at most.
    ///
    /// # Errors
    /// When one is gone.
    pub(super) fn usage(&self) -> Result<Usage> {
        let mut sum = Usage::default();
        for program in self
            .stages
            .iter()
            .filter_map(|stage| stage.program.as_ref())
        {
            let usage = Usage::of(i32::try_from(program.id())?)?;
            sum.cpu += usage.cpu;
            sum.rss += usage.rss;
            sum.peak += usage.peak;
            sum.written += usage.written;
        }
        Ok(sum)
    }

    /// Unmounts all, last first, and waits for the programs to end by themselves, which those do
    /// whose mount is gone; others are ended.
    ///
    /// # Errors
    /// When something is in use, or a program does not end.
    pub(super) fn end(mut self) -> Result<()> {
        while let Some(stage) = self.stages.pop() {
            let Some(mount) = stage.mount else {
                continue;
            };
            take_down(&mount)?;
            let Some(mut program) = stage.program else {
                continue;
            };
            let begun = Instant::now();
            while matches!(program.child().try_wait(), Ok(None)) {
                if begun.elapsed() > LIMIT {
                    bail!("process {} does not end after its mount", program.id());
                }
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        Ok(())
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        while let Some(stage) = self.stages.pop() {
            drop(stage);
        }
    }
}

/// Unmounts; while something still lets go of it, which a mount namespace that just ended does in
/// its own time, once more.
fn take_down(mount: &MountGuard) -> Result<()> {
    let begun = Instant::now();
    loop {
        match rustix::mount::unmount(mount.path(), UnmountFlags::NOFOLLOW) {
            Ok(()) => return Ok(()),
            Err(Errno::BUSY) if begun.elapsed() < LIMIT => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(error) => bail!("cannot unmount {}: {error}", mount.path().display()),
        }
    }
}

fn wait(
    command: &Command,
    program: &mut ChildGuard,
    log: &Path,
    ready: impl Fn() -> bool,
) -> Result<()> {
    let begun = Instant::now();
    while !ready() {
        let ended = matches!(program.child().try_wait(), Ok(Some(_)));
        if ended || begun.elapsed() > LIMIT {
            let said = fs_err::read_to_string(log).unwrap_or_default();
            let lines: Vec<&str> = said.lines().rev().take(3).collect();
            let lines: Vec<&str> = lines.into_iter().rev().collect();
            let what = if ended { "ended" } else { "did not get ready" };
            bail!(
                "`{}` {what}: {}",
                process::line(command),
                lines.join(" / ").trim()
            );
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// The first of these programs that is not installed.
pub(super) fn lacking(programs: &[&'static str]) -> Option<&'static str> {
    let mut programs = programs.iter().copied();
    programs.find(|program| find_tool(program).is_none())
}

/// A squashfs image of a directory, compressed as layers are.
///
/// # Errors
/// When `mksquashfs` is missing or fails.
pub(super) fn squashfs(source: &Path, image: &Path) -> Result<()> {
    remove(image)?;
    let mut command = Command::new("mksquashfs");
    command.arg(source).arg(image);
    command.args(["-comp", "zstd", "-Xcompression-level", "3"]);
    command.args(["-quiet", "-no-progress"]);
    process::quietly(&mut command).context("mksquashfs is Debian's package squashfs-tools")
}

/// `squashfuse_ll` of an image.
pub(super) fn squashfuse(image: &Path, target: &Path) -> Command {
    let mut command = Command::new("squashfuse_ll");
    command.arg("-f").arg(image).arg(target);
    command
}

/// A remote file as a local one by httpdirfs, which keeps what it fetched, in pieces of 1 MiB.
///
/// # Errors
/// As [`Served::program`].
pub(super) fn httpdirfs(served: &mut Served, url: &str) -> Result<PathBuf> {
    let (target, cache) = (served.place("remote")?, served.place("cache")?);
    let mut command = Command::new("httpdirfs");
    command
        .args(["-f", "--cache", "--cache-location"])
        .arg(cache);
    // It looks for a header that is not in replies to ranges. As the last option, before the
    // address, this one would not count.
    command.args(["--dl-seg-size", "1", "--no-range-check"]);
    command.arg("--single-file-mode").arg(url).arg(&target);
    served.mounting(&mut command, &target)?;
    Ok(target.join(last_part(url)))
}

/// The same by nbdfuse, with nbdkit's plugin for the web and its cache, in pieces of 256 KiB. Its
/// readahead does nothing with that plugin.
///
/// # Errors
/// As [`Served::program`].
pub(super) fn nbdfuse(served: &mut Served, url: &str) -> Result<PathBuf> {
    let (target, cache) = (served.place("remote")?, served.place("cache")?);
    let (socket, file) = (cache.join("socket"), target.join(last_part(url)));
    let mut nbdkit = Command::new("nbdkit");
    nbdkit
        .args(["--foreground", "--readonly", "--unix"])
        .arg(&socket)
        .args(["--filter=cache", "curl", url])
        .args(["cache-on-read=true", "cache-min-block-size=256K"])
        .env("TMPDIR", &cache);
    served.program(&mut nbdkit, || socket.exists())?;
    let mut nbdfuse = Command::new("nbdfuse");
    nbdfuse.args(["--readonly", "-o", "kernel_cache"]);
    nbdfuse.arg(&file).arg("--unix").arg(&socket);
    served.mounting(&mut nbdfuse, &target)?;
    Ok(file)
}

fn last_part(url: &str) -> &str {
    url.rsplit('/').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use layerpack_fixtures::guards::ScratchDir;

    use super::*;
    use crate::bench::origin::Origin;

    #[test]
    fn what_a_program_says_is_in_the_error_and_nothing_stays() {
        let scratch = ScratchDir::new("served").unwrap();
        let directory = scratch.join("peer");
        let mut served = Served::new(&directory).unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "echo no such image >&2; exit 3"]);
        let error = served.program(&mut command, || false).unwrap_err();
        assert!(
            error.to_string().contains("ended: no such image"),
            "{error}"
        );
        let target = served.place("mnt").unwrap();
        let error = served.mounting(&mut command, &target).unwrap_err();
        assert!(error.to_string().contains("no such image"), "{error}");
        served.end().unwrap_err();
    }

    #[test]
    fn programs_are_measured_and_ended_with_it() {
        let scratch = ScratchDir::new("served").unwrap();
        let directory = scratch.join("peer");
        let mut served = Served::new(&directory).unwrap();
        let ready = directory.join("ready");
        let mut command = Command::new("sh");
        command
            .arg("-c")
            .arg("touch \"$1\"; exec sleep 600")
            .arg("sh");
        served
            .program(command.arg(&ready), || ready.exists())
            .unwrap();
        assert!(served.usage().unwrap().peak > 0);
        let id = served.stages[0].program.as_ref().unwrap().id();
        drop(served);
        assert!(!Path::new(&format!("/proc/{id}")).exists());
    }

    /// Through the relay that benches count at. Not by httpdirfs: its own reads fail now and then.
    #[test]
    fn privileged_remote_images_are_served() {
        if !layerpack_fixtures::is_root() {
            layerpack_fixtures::skip!("needs root to mount");
        }
        let programs = ["nbdkit", "nbdfuse", "mksquashfs", "squashfuse_ll"];
        if let Some(program) = lacking(&programs) {
            layerpack_fixtures::skip!("{program} is not installed");
        }
        let scratch = ScratchDir::new("served").unwrap();
        let source = scratch.mkdir("source").unwrap();
        let contents = layerpack_fixtures::rng::Rng::new(1).bytes(5 << 20);
        fs_err::write(source.join("file"), &contents).unwrap();
        let images = scratch.mkdir("images").unwrap();
        squashfs(&source, &images.join("image.sqfs")).unwrap();
        let origin = Origin::start(&images).unwrap();
        let url = format!("{}image.sqfs", origin.url());
        origin.relay().delay(1);
        let mut served = Served::new(&scratch.join("peer")).unwrap();
        let file = nbdfuse(&mut served, &url).unwrap();
        let target = served.place("tree").unwrap();
        served
            .mounting(&mut squashfuse(&file, &target), &target)
            .unwrap();
        assert!(fs_err::read(target.join("file")).unwrap() == contents);
        let (requests, bytes) = origin.relay().counted();
        assert!(requests > 3 && bytes > 5 << 20, "{requests} {bytes}");
        assert!(served.usage().unwrap().peak > 0);
        served.end().unwrap();
    }

    #[test]
    fn privileged_a_squashfs_image_is_served() {
        if !layerpack_fixtures::is_root() {
            layerpack_fixtures::skip!("needs root to mount");
        }
        if let Some(program) = lacking(&["mksquashfs", "squashfuse_ll", "fusermount3"]) {
            layerpack_fixtures::skip!("{program} is not installed");
        }
        let scratch = ScratchDir::new("served").unwrap();
        let source = scratch.mkdir("source/inner").unwrap();
        fs_err::write(source.join("file"), "of the image").unwrap();
        let image = scratch.join("image.sqfs");
        squashfs(&scratch.join("source"), &image).unwrap();
        let mut served = Served::new(&scratch.join("peer")).unwrap();
        let target = served.place("mnt").unwrap();
        served
            .mounting(&mut squashfuse(&image, &target), &target)
            .unwrap();
        let read = fs_err::read_to_string(target.join("inner/file")).unwrap();
        assert_eq!(read, "of the image");
        assert!(served.usage().unwrap().peak > 0);
        served.end().unwrap();
        assert!(mounts_below(&target).is_empty());
    }
}
