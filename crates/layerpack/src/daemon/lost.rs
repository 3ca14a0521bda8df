//! What the node's users are told of leases that lost their layers (see
//! [`layerpack_layerfs::LeaseInfo::lost`]): a line for each in the status's `problems`, with what to
//! do. The line goes with the lease, so that an alert on it ends.

use std::path::Path;

use layerpack_layerfs::LeaseInfo;

use crate::launch::sandboxes;
use crate::mounts::Place;

/// What is the matter with all of them.
const WHY: &str = "is on layers of a daemon that died with its holder: what was not cached in the kernel then cannot be read (EIO)";

/// A line for each lost lease.
pub(super) fn lines(root: &Path, leases: &[LeaseInfo]) -> Vec<String> {
    let lost = leases.iter().filter(|lease| lease.lost);
    lost.map(|lease| line(root, lease)).collect()
}

fn line(root: &Path, lease: &LeaseInfo) -> String {
    let id = &lease.spec.id;
    match (lease.spec.owner.as_str(), lease.spec.pid) {
        ("mount", _) => match Place::of_lease(root, id).record() {
            Ok(Some(record)) => {
                let directory = record.directory.display();
                let written = match record.writable {
                    true => ", which forgets what was written there: copy that first",
                    false => "",
                };
                format!(
                    "the mount on {directory} {WHY}: `layerpack umount {directory}`{written}; then mount it again"
                )
            }
            _ => format!("mount {id} {WHY}: unmount it and mount it again"),
        },
        ("sandbox", _) => {
            let name = sandboxes(root)
                .ok()
                .and_then(|all| all.get(id).ok())
                .and_then(|sandbox| sandbox.spec.name)
                .map_or_else(|| id.clone(), |name| name.to_string());
            format!(
                "sandbox {name} {WHY}: save its changes with `layerpack pack-diff {name} --name NAME --version VERSION` if they are wanted, then `layerpack sandbox rm --force {name}` and create it again"
            )
        }
        (owner, Some(pid)) => {
            format!("process {pid} ({owner}) {WHY}: end it and start it again")
        }
        (owner, None) => format!(
            "lease {id} ({owner}) {WHY}: unmount what was made of it, release it and ask for it again"
        ),
    }
}
