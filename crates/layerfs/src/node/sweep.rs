//! What a dead predecessor left: mounts and temporary files.

use std::path::{Path, PathBuf};

use layerpack_sys::{mount, mountinfo};

use crate::error::Result;

/// Directories in which only a node mounts anything.
const OURS: [&str; 3] = ["blobs", "layers", "stacks"];

/// Takes every mount out of the node's directories, the latest first. Lazily: a predecessor's
/// sandboxes may hold copies, and a mount whose FUSE server is dead must not stop us.
pub(super) fn unmount_stale(
    root: &Path,
    problems: &mut Vec<String>,
    swept: &mut Vec<String>,
) -> Result<()> {
    // Mounts can lie on top of each other; one pass takes one of each place.
    for _ in 0..16 {
        let stale: Vec<_> = mountinfo::read()?
            .into_iter()
            .filter(|entry| {
                OURS.iter()
                    .any(|name| entry.target.starts_with(root.join(name)))
            })
            .collect();
        if stale.is_empty() {
            return Ok(());
        }
        for entry in stale.iter().rev() {
            tracing::info!(target = %entry.target.display(), fstype = %entry.fstype,
                "unmounting what a former daemon left");
            swept.push(format!(
                "unmounted {} ({}), left by a former daemon",
                entry.target.display(),
                entry.fstype
            ));
            if let Err(e) = mount::unmount(&entry.target, true) {
                problems.push(format!("stale mount: {e}"));
            }
        }
    }
    Ok(())
}

/// Mount points in the node's directories, in the order of mounting.
pub(super) fn ours(root: &Path) -> Result<Vec<PathBuf>> {
    Ok(mountinfo::read()?
        .into_iter()
        .filter(|entry| {
            OURS.iter()
                .any(|name| entry.target.starts_with(root.join(name)))
        })
        .map(|entry| entry.target)
        .collect())
}

/// Removes files that were being written when the predecessor died.
pub(super) fn remove_temporaries(root: &Path) {
    let mut directories = vec![root.join("manifests"), root.join("leases")];
    for name in ["cache", "stacks"] {
        let entries = fs_err::read_dir(root.join(name)).into_iter().flatten();
        directories.extend(entries.flatten().map(|entry| entry.path()));
    }
    for directory in directories {
        for entry in fs_err::read_dir(directory).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.extension().is_some_and(|e| e == "new") {
                let _ = fs_err::remove_file(path);
            }
        }
    }
}
