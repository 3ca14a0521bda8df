//! Inputs of the scenarios that serve: a Debian root to work in, a workspace, and layers of
//! generated files.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use layerpack_fixtures::find_tool;
use layerpack_fixtures::rng::Rng;

use super::{Bench, inputs};
use crate::{apt, process, workspace};

/// Debian packages of the root to work in.
const PACKAGES: &str = "python3,python3-numpy,python3-pandas,python3-sklearn,python3-pytest,git,\
                        ca-certificates,gcc,libc6-dev,nodejs,node-typescript";
/// Those of the quick one.
const FEW_PACKAGES: &str = "python3,python3-pytest,git";
/// The project whose tests are run: its source distribution holds them, and it is all Python.
const PROJECT: &str = "click";
const PROJECT_VERSION: &str = "8.1.8";

/// A Debian root with Python, git, a compiler and Node, as the mirrors have them.
///
/// # Errors
/// When it cannot be made.
pub(super) fn tools(bench: &Bench) -> Result<PathBuf> {
    let (name, packages) = match bench.quick {
        true => ("debian-tools-few", FEW_PACKAGES),
        false => ("debian-tools", PACKAGES),
    };
    let codename = apt::codename()?;
    let recipe = format!("mmdebstrap {codename} minbase {packages}\n");
    inputs::cached(bench, name, &recipe, |partial| {
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

/// A workspace: a Python project with its tests, a clone of this repository with its history, and
/// programs in C and TypeScript.
///
/// # Errors
/// When it cannot be made.
pub(super) fn work(bench: &Bench) -> Result<PathBuf> {
    // Whatever commit it was of: newer ones would make figures of different days differ.
    let recipe = format!("{PROJECT} {PROJECT_VERSION}, a clone, hello in C and TypeScript\n");
    inputs::cached(bench, "workspace", &recipe, |partial| {
        fs_err::create_dir_all(partial)?;
        let downloads = bench.work.join("inputs/downloads");
        fs_err::create_dir_all(&downloads)?;
        let archive = downloads.join(format!("{PROJECT}-{PROJECT_VERSION}.tar.gz"));
        if !archive.is_file() {
            let mut pip = Command::new("python3");
            pip.args(["-m", "pip", "download", "--quiet", "--no-deps"])
                .args(["--no-binary", PROJECT, "--dest"])
                .arg(&downloads)
                .arg(format!("{PROJECT}=={PROJECT_VERSION}"));
            process::logged(&mut pip, &bench.work.join("pip.log"))?;
        }
        let project = partial.join("project");
        fs_err::create_dir_all(&project)?;
        let mut tar = Command::new("tar");
        tar.args(["--extract", "--no-same-owner", "--strip-components=1"])
            .arg("--file")
            .arg(&archive)
            .arg("--directory")
            .arg(&project);
        process::quietly(&mut tar)?;
        let mut clone = Command::new("git");
        clone
            .args(["clone", "--quiet", "--no-local", "--single-branch"])
            .arg(workspace::root()?)
            .arg(partial.join("clone"));
        for variable in ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"] {
            clone.env_remove(variable);
        }
        process::quietly(&mut clone)?;
        fs_err::write(
            partial.join("hello.c"),
            "#include <stdio.h>\n#include <stdlib.h>\n\
             int main(void) { puts(\"hello\"); return EXIT_SUCCESS; }\n",
        )?;
        fs_err::write(
            partial.join("hello.ts"),
            "const who: string = \"world\";\nconsole.log(`hello ${who}`);\n",
        )?;
        Ok(())
    })
}

/// A root of one static program, with directories to work in.
///
/// # Errors
/// When busybox is missing.
pub(super) fn small(bench: &Bench) -> Result<PathBuf> {
    let busybox = find_tool("busybox").context("needs a static busybox (busybox-static)")?;
    inputs::cached(bench, "smallest-root", "busybox, sh, true\n", |partial| {
        for directory in ["bin", "etc", "tmp", "dev", "proc", "data"] {
            fs_err::create_dir_all(partial.join(directory))?;
        }
        fs_err::copy(&busybox, partial.join("bin/busybox"))?;
        for program in ["sh", "true", "echo", "sleep"] {
            std::os::unix::fs::symlink("busybox", partial.join("bin").join(program))?;
        }
        Ok(())
    })
}

/// Fills `directory` with files of many sizes, noise and text, `bytes` in all or somewhat more;
/// the same for the same seed.
///
/// # Errors
/// When they cannot be written.
pub(super) fn files(directory: &Path, bytes: u64, seed: u64) -> Result<()> {
    /// Sizes from less than a block to some frames.
    const SIZES: [usize; 8] = [100, 3000, 5000, 20_000, 70_000, 150_000, 600_000, 3_000_000];
    let mut rng = Rng::new(seed);
    let (mut written, mut number) = (0_u64, 0_u32);
    while written < bytes {
        let size = SIZES.get(rng.below_usize(SIZES.len())).copied();
        let size = size.unwrap_or(1).max(2) / 2;
        let size = size + rng.below_usize(size);
        let contents = match rng.one_in(3) {
            true => rng.bytes(size),
            false => rng.text(size),
        };
        let inside = directory.join(format!("directory-{:03}", number / 64));
        if number % 64 == 0 {
            fs_err::create_dir_all(&inside)?;
        }
        fs_err::write(inside.join(format!("file-{number:05}")), &contents)?;
        written += u64::try_from(contents.len())?;
        number += 1;
    }
    Ok(())
}

/// All files below a directory that are plain, in order.
///
/// # Errors
/// When a directory cannot be read.
pub(super) fn plain_files(directory: &Path) -> Result<Vec<PathBuf>> {
    let (mut pending, mut found) = (vec![directory.to_owned()], Vec::new());
    while let Some(directory) = pending.pop() {
        for entry in fs_err::read_dir(&directory)? {
            let entry = entry?;
            let kind = entry.file_type()?;
            if kind.is_dir() {
                pending.push(entry.path());
            } else if kind.is_file() {
                found.push(entry.path());
            }
        }
    }
    found.sort();
    Ok(found)
}
