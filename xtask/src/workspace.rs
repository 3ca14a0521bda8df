//! Where things are: the workspace, its target directory, its files.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::process;

/// The workspace's root directory.
///
/// # Errors
/// When this binary was moved away from the workspace that built it.
pub(crate) fn root() -> Result<PathBuf> {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = manifest.parent().context("xtask lies in no workspace")?;
    fs_err::canonicalize(root).context("the workspace that built this task is gone")
}

/// The cargo that runs this task, so that its toolchain is kept.
pub(crate) fn cargo() -> Command {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    Command::new(cargo)
}

/// What `cargo metadata` says about the workspace's own packages.
///
/// # Errors
/// When a manifest is broken.
pub(crate) fn metadata() -> Result<Value> {
    let mut command = cargo();
    command
        .args(["metadata", "--format-version", "1", "--no-deps"])
        .current_dir(root()?);
    let text = process::output(&mut command)?;
    serde_json::from_str(&text).context("cargo metadata printed no JSON")
}

/// Where cargo puts what it builds.
///
/// # Errors
/// As [`metadata`].
pub(crate) fn target_dir() -> Result<PathBuf> {
    let metadata = metadata()?;
    let path = metadata
        .pointer("/target_directory")
        .and_then(Value::as_str);
    Ok(PathBuf::from(
        path.context("cargo metadata names no target directory")?,
    ))
}

/// Files of the repository, relative to its root: tracked ones and new ones that are not ignored.
///
/// # Errors
/// When git is missing or this is no repository.
pub(crate) fn files() -> Result<Vec<PathBuf>> {
    let root = root()?;
    let mut command = Command::new("git");
    command
        .args([
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ])
        .current_dir(&root);
    let text = process::output(&mut command)?;
    let mut files: Vec<PathBuf> = text
        .split('\0')
        .filter(|name| !name.is_empty())
        .map(PathBuf::from)
        // Deleted but not yet committed.
        .filter(|path| root.join(path).is_file())
        .collect();
    files.sort();
    files.dedup();
    Ok(files)
}
