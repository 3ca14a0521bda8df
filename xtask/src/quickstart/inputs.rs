//! The real things that layers are made of: a Debian system, a Python project, a toolkit.
//!
//! Each is made in a `.partial` folder and renamed when it is whole, with a recipe beside it; an
//! input whose recipe has not changed is used again.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use super::Places;
use crate::steps::say;
use crate::{apt, process};

/// Packages of the base layer beyond Debian's minimal set.
const BASE_PACKAGES: &str = "python3,git,ca-certificates";
/// The project: its source distribution holds its tests, and nothing in it needs compiling.
const PROJECT: &str = "click";
const PROJECT_VERSION: &str = "8.1.8";
/// What runs its tests.
const TEST_RUNNER: &str = "pytest==8.4.2";
/// Time of everything in the project's repository: its own release, roughly.
const PROJECT_DATE: &str = "2024-12-21T18:00:00+0000";
/// The toolkit's script.
const HARNESS: &str = include_str!("harness.sh");

/// One input: where it lies, and the version to publish it under.
#[derive(Debug)]
pub(super) struct Input {
    pub(super) path: PathBuf,
    pub(super) version: String,
}

/// Throws away all published layers.
fn empty_store(places: &Places) -> Result<()> {
    let store = places.store();
    if store.exists() {
        fs_err::remove_dir_all(&store)?;
    }
    fs_err::create_dir_all(&store)?;
    Ok(())
}

/// Makes `inputs/NAME` by `make` unless it is there, made by the same `recipe`.
fn cached(
    places: &Places,
    name: &str,
    recipe: &str,
    make: impl FnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let inputs = places.inputs();
    let (path, note) = (inputs.join(name), inputs.join(format!("{name}.recipe")));
    let known = fs_err::read_to_string(&note).unwrap_or_default();
    if path.is_dir() && known == recipe {
        say(format!("{name} is there from an earlier run"));
        return Ok(path);
    }
    let partial = inputs.join(format!("{name}.partial"));
    for old in [&partial, &path] {
        if old.exists() {
            super::node::unmount_below(old)?;
            fs_err::remove_dir_all(old)?;
        }
    }
    // Other contents under a version that is published would be a conflict, and rightly so.
    empty_store(places)?;
    make(&partial)?;
    fs_err::rename(&partial, &path)?;
    fs_err::write(&note, recipe)?;
    Ok(path)
}

/// The machine's Debian sources as a file of ours.
fn sources(places: &Places) -> Result<PathBuf> {
    let path = places.inputs().join("sources.list");
    apt::write_sources(&path)?;
    Ok(path)
}

/// A Debian root filesystem of the machine's release, from the machine's mirrors.
pub(super) fn base(places: &Places) -> Result<Input> {
    let codename = apt::codename()?;
    let sources = sources(places)?;
    let recipe = format!("mmdebstrap {codename} minbase {BASE_PACKAGES}\n");
    let log = places.logs().join("mmdebstrap.log");
    let path = cached(places, "base", &recipe, |partial| {
        let mut command = Command::new("mmdebstrap");
        command
            .args(["--mode=root", "--variant=minbase"])
            .arg(format!("--include={BASE_PACKAGES}"))
            .arg("--aptopt=Apt::Install-Recommends \"false\"")
            .arg("--aptopt=Acquire::Retries \"3\"")
            .args([codename.as_str(), path_text(partial)?, path_text(&sources)?]);
        process::logged(&mut command, &log)
    })?;
    let version = fs_err::read_to_string(path.join("etc/debian_version"))?;
    Ok(Input {
        path,
        version: version.trim().replace('/', "-"),
    })
}

/// A Python project as a git repository, with its tests and what they need.
pub(super) fn workspace(places: &Places, base: &Path) -> Result<Input> {
    let python = python_version(base)?;
    let recipe =
        format!("{PROJECT} {PROJECT_VERSION} {TEST_RUNNER} python {python} {PROJECT_DATE}\n");
    let path = cached(places, "workspace", &recipe, |partial| {
        fs_err::create_dir(partial)?;
        let archive = source_distribution(places)?;
        process::run(
            Command::new("tar")
                .args([
                    "--extract",
                    "--no-same-owner",
                    "--strip-components=1",
                    "--file",
                ])
                .arg(&archive)
                .arg("--directory")
                .arg(partial),
        )?;
        if !partial.join("tests").is_dir() {
            bail!("{} holds no tests", archive.display());
        }
        repository(partial)?;
        // Packages for the layer's Python, not for the machine's.
        let mut install = pip();
        install
            .args([
                "install",
                "--quiet",
                "--no-compile",
                "--only-binary=:all:",
                "--target",
            ])
            .arg(partial.join(".deps"))
            .args(["--python-version", &python, TEST_RUNNER]);
        process::logged(&mut install, &places.logs().join("pip-install.log"))
    })?;
    Ok(Input {
        path,
        version: PROJECT_VERSION.to_owned(),
    })
}

/// The Python of the base layer, such as `3.11`.
fn python_version(base: &Path) -> Result<String> {
    let target = fs_err::read_link(base.join("usr/bin/python3"))?;
    let name = target.to_string_lossy();
    let version = name.strip_prefix("python");
    Ok(version
        .with_context(|| format!("usr/bin/python3 of the base layer is {name}"))?
        .to_owned())
}

fn pip() -> Command {
    let mut command = Command::new("python3");
    command
        .args(["-m", "pip", "--no-input", "--disable-pip-version-check"])
        .env("PIP_ROOT_USER_ACTION", "ignore");
    command
}

/// Fetches the project's source distribution unless it is there.
fn source_distribution(places: &Places) -> Result<PathBuf> {
    let downloads = places.inputs().join("downloads");
    fs_err::create_dir_all(&downloads)?;
    let archive = downloads.join(format!("{PROJECT}-{PROJECT_VERSION}.tar.gz"));
    if !archive.is_file() {
        let mut download = pip();
        download
            .args([
                "download",
                "--quiet",
                "--no-deps",
                "--no-binary",
                PROJECT,
                "--dest",
            ])
            .arg(&downloads)
            .arg(format!("{PROJECT}=={PROJECT_VERSION}"));
        process::logged(&mut download, &places.logs().join("pip-download.log"))?;
    }
    if !archive.is_file() {
        bail!("pip fetched no {}", archive.display());
    }
    Ok(archive)
}

/// Commits all of `path`, the same on every machine.
fn repository(path: &Path) -> Result<()> {
    let git = |arguments: &[&str]| {
        let mut command = Command::new("git");
        command
            .args(arguments)
            .current_dir(path)
            .env("GIT_CONFIG_GLOBAL", "/dev/null")
            .env("GIT_CONFIG_NOSYSTEM", "1")
            .env("GIT_AUTHOR_DATE", PROJECT_DATE)
            .env("GIT_COMMITTER_DATE", PROJECT_DATE);
        for (variable, value) in [("NAME", "quickstart"), ("EMAIL", "quickstart@localhost")] {
            command.env(format!("GIT_AUTHOR_{variable}"), value);
            command.env(format!("GIT_COMMITTER_{variable}"), value);
        }
        // A caller that runs this from a git hook must not have it commit there.
        command
            .env_remove("GIT_DIR")
            .env_remove("GIT_WORK_TREE")
            .env_remove("GIT_INDEX_FILE");
        process::run(&mut command)
    };
    git(&["init", "--quiet", "--initial-branch=main"])?;
    // Inode numbers and change times are new in every layer: with these, git still knows which
    // files it has seen and does not read all of them again.
    git(&["config", "core.checkStat", "minimal"])?;
    git(&["config", "core.trustctime", "false"])?;
    fs_err::write(path.join(".git/info/exclude"), ".deps/\n")?;
    git(&["add", "--all", "--force", ":!.deps"])?;
    git(&[
        "commit",
        "--quiet",
        "--message",
        &format!("{PROJECT} {PROJECT_VERSION}"),
    ])
}

/// ripgrep as Debian packs it, and a harness script that uses it.
pub(super) fn toolkit(places: &Places) -> Result<Input> {
    let recipe = format!("ripgrep and harness {}\n", fnv_of(HARNESS));
    let path = cached(places, "toolkit", &recipe, |partial| {
        let package = package(places, "ripgrep")?;
        let unpacked = partial.join("ripgrep");
        fs_err::create_dir_all(partial.join("bin"))?;
        process::run(
            Command::new("dpkg-deb")
                .arg("--extract")
                .arg(&package)
                .arg(&unpacked),
        )?;
        fs_err::os::unix::fs::symlink("../ripgrep/usr/bin/rg", partial.join("bin/rg"))?;
        let harness = partial.join("bin/harness");
        fs_err::write(&harness, HARNESS)?;
        rustix::fs::chmod(&harness, rustix::fs::Mode::from_raw_mode(0o755))?;
        Ok(())
    })?;
    Ok(Input {
        path,
        version: "1".to_owned(),
    })
}

/// Fetches one Debian package unless it is there.
fn package(places: &Places, name: &str) -> Result<PathBuf> {
    let downloads = places.inputs().join("downloads");
    fs_err::create_dir_all(&downloads)?;
    let find = || -> Result<Option<PathBuf>> {
        let start = format!("{name}_");
        for entry in fs_err::read_dir(&downloads)? {
            let entry = entry?;
            let file = entry.file_name();
            let file = file.to_string_lossy();
            if file.starts_with(&start) && file.ends_with(".deb") {
                return Ok(Some(entry.path()));
            }
        }
        Ok(None)
    };
    if let Some(package) = find()? {
        return Ok(package);
    }
    let sources = sources(places)?;
    let download = || {
        let mut command = apt::get(&sources);
        // The download user of apt may not enter this folder, and need not: root writes here.
        command
            .args(["-oAPT::Sandbox::User=root", "download", name])
            .current_dir(&downloads);
        command
    };
    // Without package lists, as on a fresh machine, it fails at once.
    if !process::succeeds(&mut download()) {
        process::run(apt::get(&sources).arg("update"))?;
        process::run(&mut download())?;
    }
    find()?.with_context(|| format!("apt-get fetched no package {name}"))
}

/// A short digest that changes when the text does.
fn fnv_of(text: &str) -> String {
    let sum = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    format!("{sum:016x}")
}

fn path_text(path: &Path) -> Result<&str> {
    path.to_str()
        .with_context(|| format!("{} is not UTF-8", path.display()))
}
