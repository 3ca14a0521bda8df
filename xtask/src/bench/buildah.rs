//! `buildah commit` of a change, where buildah is installed: its storage driver overlay, storage of
//! its own, an image of the same layers.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use super::measure;
use crate::process;

/// Containers storage in a directory. On drop all in it is removed, mounts included.
pub(super) struct Storage {
    root: PathBuf,
    run: PathBuf,
    policy: PathBuf,
}

impl Storage {
    /// Makes an empty one below `directory`.
    ///
    /// # Errors
    /// When its files cannot be written.
    pub(super) fn new(directory: &Path) -> Result<Self> {
        fs_err::create_dir_all(directory)?;
        let policy = directory.join("policy.json");
        fs_err::write(
            &policy,
            r#"{"default":[{"type":"insecureAcceptAnything"}]}"#,
        )?;
        Ok(Self {
            root: directory.join("root"),
            run: directory.join("run"),
            policy,
        })
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("buildah");
        command.args(["--storage-driver", "overlay", "--root"]);
        command.arg(&self.root).arg("--runroot").arg(&self.run);
        command.args(arguments);
        command
    }

    fn output(&self, arguments: &[&str]) -> Result<String> {
        Ok(process::output(&mut self.command(arguments))?
            .trim()
            .to_owned())
    }

    /// Bytes of all that it holds.
    fn size(&self) -> Result<u64> {
        measure::size(&self.root)
    }

    /// Takes an image of an OCI layout in; its id.
    ///
    /// # Errors
    /// What buildah says.
    pub(super) fn pull(&self, image: &str) -> Result<String> {
        let policy = self.policy.to_str().context("a path is not UTF-8")?;
        let from = format!("oci:{image}");
        self.output(&["pull", "-q", "--signature-policy", policy, &from])
    }

    /// Has `change` write to a container of the image, and commits that: milliseconds, and bytes that
    /// the storage grew by.
    ///
    /// # Errors
    /// What buildah says, or `change`.
    pub(super) fn commit(
        &self,
        image: &str,
        change: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<(f64, u64)> {
        let container = self.output(&["from", "--pull-never", image])?;
        let tree = PathBuf::from(self.output(&["mount", &container])?);
        change(&tree)?;
        let before = self.size()?;
        let command = self.command(&["commit", "-q", "--disable-compression", &container]);
        let wall = measure::run(&command)?.wall * 1e3;
        let grown = self.size()?.saturating_sub(before);
        self.output(&["rm", &container])?;
        Ok((wall, grown))
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        for arguments in [["rm", "-a"], ["rmi", "-a"]] {
            let _ = self.output(&arguments);
        }
    }
}
