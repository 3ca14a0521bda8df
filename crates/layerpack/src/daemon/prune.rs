//! Ends leases whose holders are gone without saying so: `umount(8)` in place of
//! `layerpack umount`, `layerpack umount` while no daemon ran, sandboxes that died.
//!
//! The library itself ends leases of dead processes and of earlier boots; what a lease without a
//! process belongs to is known only here. In doubt a lease stays.

use std::path::Path;
use std::time::Duration;

use layerpack_layerfs::Node;
use layerpack_runtime::{RuntimeError, SandboxState};
use layerpack_sys::mount::is_mounted;

use crate::launch::sandboxes;
use crate::mounts::Place;

/// A `layerpack mount` that is under way has its record but not its mount for this long at most.
const MOUNTING: Duration = Duration::from_secs(60);

/// What holds a lease without a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Holder {
    There,
    Gone,
}

/// At the daemon's start. `took_over`: from a daemon that was there until just now.
pub(super) fn at_start(node: &Node, root: &Path, took_over: bool) {
    sweep(node, root);
    // No command can have taken a lease from this daemon yet: those there are from before. But a
    // command that got one from the process before may be about to use it.
    prune(node, root, !took_over);
}

/// Before the daemon stops: leases that nobody holds are no reason to stay.
pub(super) fn at_stop(node: &Node, root: &Path) {
    sweep(node, root);
    node.tidy();
    prune(node, root, false);
}

/// Removes what dead launchers left: half-made and one-shot sandboxes, with their leases.
fn sweep(node: &Node, root: &Path) {
    let report = match sandboxes(root).and_then(|all| Ok(all.sweep()?)) {
        Ok(report) => report,
        Err(error) => {
            tracing::warn!(error = %format!("{error:#}"), "cannot sweep left-overs of sandboxes");
            return;
        }
    };
    for what in report.removed {
        node.note_swept(format!("removed what a dead launcher left: {what}"));
    }
    for (what, why) in report.failed {
        tracing::warn!(%what, %why, "a left-over cannot be removed");
    }
    for lease in report.leases {
        if let Err(error) = node.release(&lease) {
            tracing::debug!(%lease, %error, "the lease was gone");
        }
    }
}

fn prune(node: &Node, root: &Path, at_start: bool) {
    for lease in node.leases() {
        let id = lease.spec.id;
        let holder = match lease.spec.owner.as_str() {
            "mount" => mount(root, &id, at_start),
            "sandbox" => sandbox(root, &id, at_start),
            _ => Holder::There,
        };
        if holder == Holder::There {
            continue;
        }
        node.note_swept(format!("lease {id}: whom it was for is gone"));
        if let Err(error) = node.release(&id) {
            tracing::warn!(lease = %id, %error, "cannot be released");
        }
    }
}

fn mount(root: &Path, id: &str, at_start: bool) -> Holder {
    let place = Place::of_lease(root, id);
    let Ok(record) = place.record() else {
        return Holder::There;
    };
    // `mount` writes the record before it takes the lease.
    let Some(record) = record else {
        return Holder::Gone;
    };
    match is_mounted(&record.directory) {
        Ok(true) => Holder::There,
        Ok(false) if at_start || place.age().is_some_and(|age| age > MOUNTING) => Holder::Gone,
        Ok(false) => Holder::There,
        Err(error) if error.to_io().kind() == std::io::ErrorKind::NotFound => Holder::Gone,
        Err(_) => Holder::There,
    }
}

fn sandbox(root: &Path, id: &str, at_start: bool) -> Holder {
    let found = sandboxes(root).map(|all| all.get(id));
    match found {
        Ok(Ok(sandbox)) if sandbox.state == SandboxState::Dead => Holder::Gone,
        // `sandbox create` takes the lease before it makes the record.
        Ok(Err(RuntimeError::NotFound(_))) if at_start => Holder::Gone,
        _ => Holder::There,
    }
}
