//! `cargo xtask quickstart`: the whole product, driven from outside, on a real system and project.
//!
//! Everything lies in one folder (`.quickstart` in the repository, or `--dir`), which a marker
//! file makes ours to delete:
//!
//! | folder | what | on the next run |
//! |---|---|---|
//! | `inputs` | Debian root filesystem, Python project, toolkit, downloads | used again |
//! | `store` | the published layers | used again: builds find their data there |
//! | `node` | `LAYERPACK_ROOT`: cache, mounts, sandboxes, daemon | made anew: the node starts cold |
//! | `mnt` | mount points | made anew |
//!
//! A run first takes down what an interrupted one may have left, and takes its own mounts,
//! sandboxes and daemon down whether it succeeds or fails.

mod inputs;
mod node;
mod report;
mod show;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::steps::{self, Steps, say};
use crate::{process, setup, workspace};
use node::Node;

/// Marks a folder as made by the quickstart; its text is for whoever finds the folder.
const MARKER: &str = "MADE-BY-QUICKSTART";
const MARKER_TEXT: &str =
    "Made by `cargo xtask quickstart`; `cargo xtask quickstart --clean` removes it.\n";
/// Disk space that a first run takes, in bytes, with some to spare.
const SPACE: u64 = 2 << 30;
/// `statfs` type of overlayfs.
const OVERLAYFS: i64 = 0x794c_7630;
/// Longest path of the work folder: sockets in it must have names below 108 bytes.
const LONGEST_DIR: usize = 80;

/// The folder's parts.
#[derive(Debug, Clone)]
struct Places {
    work: PathBuf,
}

impl Places {
    fn inputs(&self) -> PathBuf {
        self.work.join("inputs")
    }

    fn logs(&self) -> PathBuf {
        self.work.join("logs")
    }

    fn store(&self) -> PathBuf {
        self.work.join("store")
    }

    fn second_store(&self) -> PathBuf {
        self.work.join("store-of-the-second-build")
    }

    fn node(&self) -> PathBuf {
        self.work.join("node")
    }

    fn mounts(&self) -> PathBuf {
        self.work.join("mnt")
    }
}

/// Shows everything.
///
/// # Errors
/// When any step fails; nothing stays mounted or running.
pub(crate) fn run(dir: Option<PathBuf>, prebuilt: bool) -> Result<()> {
    let mut steps = Steps::new(10);
    steps.begin("tools and the release binary");
    setup::for_quickstart()?;
    let binary = if prebuilt { binary_path()? } else { build()? };
    if !layerpack_fixtures::is_root() {
        return as_root("--prebuilt", dir.as_deref());
    }
    let places = prepare(dir)?;
    let node = Node::new(binary, &places);
    node.teardown()
        .context("what an earlier run left cannot be taken down")?;
    node.reset()?;
    steps.done();

    let shown = show::everything(&mut steps, &places, &node);
    // Also after a failure, whose cause is what the user must see.
    let down = node.teardown();
    let table = shown?;
    down.context("the quickstart's mounts and processes cannot be taken down")?;
    table.print(steps.elapsed());
    println!(
        "\nLayers and inputs stay in {}; `cargo xtask quickstart --clean` removes them.",
        places.work.display()
    );
    Ok(())
}

/// Removes everything that [`run`] made.
///
/// # Errors
/// When something is still in use, or the folder is not the quickstart's.
pub(crate) fn clean(dir: Option<PathBuf>) -> Result<()> {
    let work = work_dir(dir)?;
    if !work.exists() {
        println!("nothing to remove: {} does not exist", work.display());
        return Ok(());
    }
    if !work.join(MARKER).is_file() {
        bail!(
            "{} was not made by the quickstart ({MARKER} is missing in it)",
            work.display()
        );
    }
    if !layerpack_fixtures::is_root() {
        return as_root("--clean", Some(&work));
    }
    let places = Places { work };
    let node = Node::new(binary_path()?, &places);
    node.teardown()?;
    // The marker goes last, so that an interrupted removal can be taken up again.
    for entry in fs_err::read_dir(&places.work)? {
        let entry = entry?;
        if entry.file_name() == MARKER {
            continue;
        }
        if entry.file_type()?.is_dir() {
            fs_err::remove_dir_all(entry.path())?;
        } else {
            fs_err::remove_file(entry.path())?;
        }
    }
    fs_err::remove_dir_all(&places.work)?;
    node::remove_empty_cgroups()?;
    println!("removed {}", places.work.display());
    Ok(())
}

fn work_dir(dir: Option<PathBuf>) -> Result<PathBuf> {
    match dir {
        Some(dir) => std::path::absolute(&dir).context("no such --dir"),
        None => Ok(workspace::root()?.join(".quickstart")),
    }
}

/// Makes the work folder, or checks the one that is there.
fn prepare(dir: Option<PathBuf>) -> Result<Places> {
    let work = work_dir(dir)?;
    if !work.exists() {
        fs_err::create_dir_all(&work)?;
        fs_err::write(work.join(MARKER), MARKER_TEXT)?;
    }
    // Mount tables show resolved paths.
    let work = fs_err::canonicalize(&work)?;
    if !work.join(MARKER).is_file() {
        bail!(
            "{} exists and was not made by the quickstart: name another folder with --dir",
            work.display()
        );
    }
    if layerpack_fixtures::guards::filesystem_type(&work)? == OVERLAYFS {
        bail!(
            "{} lies on overlayfs, where neither EROFS images nor the upper directories of \
             sandboxes can lie: name a folder on a disk filesystem with --dir (a volume, if this \
             is a container)",
            work.display()
        );
    }
    if work.as_os_str().len() > LONGEST_DIR {
        bail!(
            "the path {} is over {LONGEST_DIR} bytes, too long for the sockets in it: name a \
             shorter folder with --dir",
            work.display()
        );
    }
    let disk = rustix::fs::statvfs(&work)?;
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    if free < SPACE {
        bail!(
            "{} has {} free, the quickstart takes up to {}: name a folder on a larger disk with \
             --dir",
            work.display(),
            steps::bytes(free),
            steps::bytes(SPACE)
        );
    }
    let places = Places { work };
    for folder in [places.inputs(), places.logs(), places.store()] {
        fs_err::create_dir_all(folder)?;
    }
    Ok(places)
}

fn binary_path() -> Result<PathBuf> {
    Ok(workspace::target_dir()?.join("release").join("layerpack"))
}

fn build() -> Result<PathBuf> {
    say("building the release binary");
    let mut command = workspace::cargo();
    command
        .args([
            "build",
            "--release",
            "--locked",
            "--package",
            "layerpack",
            "--bins",
        ])
        .current_dir(workspace::root()?);
    process::run(&mut command)?;
    binary_path()
}

/// Runs the rest of the quickstart as root, with what this user has built; `mode` is the option
/// that says which part.
fn as_root(mode: &str, dir: Option<&Path>) -> Result<()> {
    if layerpack_fixtures::find_tool("sudo").is_none() {
        bail!("mounting and starting sandboxes needs root, and there is no sudo: run it as root");
    }
    say("mounting and starting sandboxes needs root: going on through sudo");
    let mut command = Command::new("sudo");
    for variable in [
        "PATH",
        "HOME",
        "CARGO",
        "CARGO_HOME",
        "RUSTUP_HOME",
        "CARGO_TARGET_DIR",
    ] {
        if let Some(value) = std::env::var_os(variable) {
            let mut setting = std::ffi::OsString::from(format!("{variable}="));
            setting.push(value);
            command.arg(setting);
        }
    }
    command
        .arg(std::env::current_exe()?)
        .args(["quickstart", mode]);
    if let Some(dir) = dir {
        command.arg("--dir").arg(dir);
    }
    process::run(&mut command)
}
