//! What the scenarios pack, made once and kept under `target/bench/inputs`.

use std::io::{Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use super::{Bench, remove};
use crate::steps::say;
use crate::{apt, process, workspace};

/// Packages of the real root beyond Debian's minimal set: about 600 MB in 17,000 files.
const PACKAGES: &str = "python3,git,ca-certificates,build-essential,python3-numpy,python3-pip,curl";
/// Those of the quick one.
const FEW_PACKAGES: &str = "python3,ca-certificates";

/// Makes `inputs/NAME` by `make` unless it is there, made by the same recipe.
pub(crate) fn cached(
    bench: &Bench,
    name: &str,
    recipe: &str,
    make: impl FnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let inputs = bench.work.join("inputs");
    fs_err::create_dir_all(&inputs)?;
    let (path, note) = (inputs.join(name), inputs.join(format!("{name}.recipe")));
    if path.exists() && fs_err::read_to_string(&note).is_ok_and(|known| known == recipe) {
        return Ok(path);
    }
    say(format!("making the input {name}"));
    let partial = inputs.join(format!("{name}.partial"));
    remove(&partial)?;
    remove(&path)?;
    make(&partial)?;
    fs_err::rename(&partial, &path)?;
    fs_err::write(&note, recipe)?;
    Ok(path)
}

/// A Debian root filesystem.
pub(crate) fn debian(bench: &Bench) -> Result<PathBuf> {
    let (name, packages) = match bench.quick {
        true => ("debian-small", FEW_PACKAGES),
        false => ("debian", PACKAGES),
    };
    let codename = apt::codename()?;
    let recipe = format!("mmdebstrap {codename} minbase {packages}\n");
    cached(bench, name, &recipe, |partial| {
        let sources = bench.work.join("inputs/sources.list");
        apt::write_sources(&sources)?;
        let mut command = Command::new("mmdebstrap");
        command
            .args(["--mode=root", "--variant=minbase"])
            .arg(format!("--include={packages}"))
            .arg("--aptopt=Apt::Install-Recommends \"false\"")
            .arg("--aptopt=Acquire::Retries \"3\"")
            .arg(codename)
            .arg(partial)
            .arg(sources);
        process::logged(&mut command, &bench.work.join("mmdebstrap.log"))
    })
}

/// `directories` directories of a thousand small files, all different.
pub(crate) fn many(bench: &Bench, directories: u32) -> Result<PathBuf> {
    let recipe = format!("{directories} directories of 1000 files\n");
    cached(bench, &format!("many-{directories}"), &recipe, |partial| {
        for directory in 0..directories {
            let path = partial.join(format!("directory-{directory:04}"));
            fs_err::create_dir_all(&path)?;
            for file in 0..1000 {
                let text = format!("contents of file {file} in directory {directory}\n");
                fs_err::write(path.join(format!("file-{file:03}.txt")), text)?;
            }
        }
        Ok(())
    })
}

/// A directory with one file of `gib` GiB: of each 64 MiB a half is noise, a quarter text, a
/// quarter a hole.
pub(crate) fn large(bench: &Bench, gib: u64) -> Result<PathBuf> {
    let recipe = format!("one file of {gib} GiB\n");
    cached(bench, &format!("large-{gib}"), &recipe, |partial| {
        fs_err::create_dir_all(partial)?;
        let mut file = fs_err::File::create(partial.join("file"))?;
        let mut state = 1_u64;
        let mut buffer = Vec::new();
        for _ in 0..gib * 16 {
            buffer.clear();
            while buffer.len() < 32 << 20 {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                buffer.extend_from_slice(&state.to_le_bytes());
            }
            while buffer.len() < 48 << 20 {
                buffer.extend_from_slice(format!("line {} of a log\n", buffer.len()).as_bytes());
            }
            buffer.truncate(48 << 20);
            file.write_all(&buffer)?;
            file.seek(SeekFrom::Current(16 << 20))?;
        }
        file.set_len(gib << 30)?;
        Ok(())
    })
}

/// Versions of a set of Python packages, each in a directory of its own.
pub(crate) fn package_sets(bench: &Bench) -> Result<Vec<PathBuf>> {
    // Versions that build nothing, run on one Python, and were made within two years.
    const VERSIONS: [&str; 5] = ["5.0.14", "5.1.8", "5.1.11", "5.2.1", "5.2.4"];
    let versions = match bench.quick {
        true => VERSIONS.get(..2).unwrap_or_default(),
        false => VERSIONS.as_slice(),
    };
    versions
        .iter()
        .map(|version| {
            let recipe = format!("django {version}\n");
            cached(bench, &format!("django-{version}"), &recipe, |partial| {
                let mut command = Command::new("python3");
                command
                    .args(["-m", "pip", "install", "--quiet", "--no-compile"])
                    .args(["--only-binary=:all:", "--python-version", "3.11"])
                    .arg("--target")
                    .arg(partial)
                    .arg(format!("django=={version}"));
                process::logged(&mut command, &bench.work.join("pip.log"))
            })
        })
        .collect()
}

/// This repository as it was at several commits, each a clone of its own with its history.
pub(crate) fn workspaces(bench: &Bench) -> Result<Vec<PathBuf>> {
    let count = if bench.quick { 2 } else { 10 };
    let root = workspace::root()?;
    let mut command = Command::new("git");
    command
        .args(["rev-list", "--first-parent", "HEAD"])
        .current_dir(&root);
    let text = process::output(&mut command)?;
    let commits: Vec<&str> = text.lines().collect();
    let step = commits.len().div_ceil(count + 1).max(1);
    commits
        .iter()
        .step_by(step)
        .take(count)
        .map(|commit| {
            let short = commit.get(..12).context("git lists something else")?;
            cached(bench, &format!("clone-{short}"), commit, |partial| {
                let git = |arguments: &[&str], directory: &Path| {
                    let mut command = Command::new("git");
                    command
                        .args(arguments)
                        .current_dir(directory)
                        .env_remove("GIT_DIR")
                        .env_remove("GIT_WORK_TREE")
                        .env_remove("GIT_INDEX_FILE");
                    process::quietly(&mut command)
                };
                fs_err::create_dir_all(partial)?;
                git(&["init", "--quiet"], partial)?;
                let from = root.display().to_string();
                git(&["fetch", "--quiet", &from, commit], partial)?;
                git(&["checkout", "--quiet", "--detach", "FETCH_HEAD"], partial)
            })
        })
        .collect()
}
