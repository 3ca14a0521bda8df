//! What nobody comes back for: left by commands of a former life that died, or by a reboot.
//!
//! | what | rule |
//! |---|---|
//! | processes and uppers of one-shot and half-made sandboxes | ended and removed (`prune`) |
//! | mounts in `ROOT/blobs`, `layers`, `stacks` | adopted from a holder, else unmounted (`layerpack_layerfs`) |
//! | record and upper of a `mount` that is not mounted | removed, as `umount` does |
//! | `ROOT/doctor-PID` of a dead process | unmounted and removed |
//! | caches of layers that the node has no manifest of | kept: their layer may come back; evicted like others |
//!
//! Each is listed in the log and in the daemon's status. What is younger than a minute may be in the
//! hands of a command, and stays.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use layerpack_layerfs::Node;
use layerpack_sys::mount::{is_mounted, unmount};
use layerpack_sys::mountinfo;

use crate::mounts::Place;

/// How long a command may take between what it makes and what it makes it for.
const YOUNG: Duration = Duration::from_secs(60);

/// Looks for it in a thread: nobody waits for that.
pub(super) fn begin(node: &Arc<Node>, root: &Path) {
    let (node, root) = (Arc::clone(node), root.to_owned());
    let begun = std::thread::Builder::new()
        .name("orphans".to_owned())
        .spawn(move || sweep(&node, &root));
    if let Err(error) = begun {
        tracing::warn!(%error, "nobody looks for what was left behind");
    }
}

/// Removes what has been left, and lists it.
fn sweep(node: &Node, root: &Path) {
    for line in node.unknown_caches() {
        node.note_swept(line);
    }
    for (lease, path) in entries(&root.join("mounts")) {
        let place = Place::of_lease(root, &lease);
        if place.age().is_none_or(|age| age < YOUNG) || !mounts_in(&path).is_empty() {
            continue;
        }
        let what = match place.record() {
            // Damaged, or of another version: not ours to judge.
            Err(_) => continue,
            Ok(None) => "a mount that was never made".to_owned(),
            Ok(Some(record)) => match is_mounted(&record.directory) {
                Ok(false) => format!("the mount on {}", record.directory.display()),
                Err(e) if e.to_io().kind() == std::io::ErrorKind::NotFound => {
                    format!("the mount on {}", record.directory.display())
                }
                Ok(true) | Err(_) => continue,
            },
        };
        let _ = node.release(&lease);
        match place.remove() {
            Ok(()) => node.note_swept(format!("removed what {what} left in {}", path.display())),
            Err(error) => tracing::warn!(path = %path.display(), %error, "cannot be removed"),
        }
    }
    for (name, path) in entries(root) {
        let pid: Option<u32> = name.strip_prefix("doctor-").and_then(|n| n.parse().ok());
        if pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            doctor(node, &path);
        }
    }
}

/// The scratch directory of a trial that was killed, with a node of its own in it.
fn doctor(node: &Node, path: &Path) {
    for mounted in mounts_in(path).iter().rev() {
        if let Err(error) = unmount(mounted, true) {
            tracing::warn!(%error, "a mount stays behind");
        }
    }
    if !mounts_in(path).is_empty() {
        return;
    }
    match fs_err::remove_dir_all(path) {
        Ok(()) => node.note_swept(format!(
            "removed {}, left by a killed trial",
            path.display()
        )),
        Err(error) => tracing::warn!(%error, "cannot be removed"),
    }
}

fn entries(directory: &Path) -> Vec<(String, PathBuf)> {
    let entries = fs_err::read_dir(directory).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.path())))
        .collect()
}

/// Mount points in a directory. A table that cannot be read counts as one: nothing is deleted then.
fn mounts_in(directory: &Path) -> Vec<PathBuf> {
    let resolved = fs_err::canonicalize(directory).unwrap_or_else(|_| directory.to_owned());
    match mountinfo::read() {
        Ok(mounts) => mounts
            .into_iter()
            .map(|mount| mount.target)
            .filter(|target| target.starts_with(&resolved))
            .collect(),
        Err(_) => vec![resolved],
    }
}
