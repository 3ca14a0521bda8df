//! Watches processes that freeze sandboxes: when one ends without letting its sandbox go on, as
//! after `kill -9`, the daemon does.
//!
//! The lock on a frozen sandbox ends with its holder, so "frozen and nobody holds the lock" is all
//! there is to know. A daemon that starts looks at every sandbox in the same way, and goes on watching
//! what the one before watched: the daemon's holder keeps the descriptors of those processes.

use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;

use anyhow::{Context as _, bail};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use layerpack_layerfs::holder::Sets;

use crate::holder::Worker;
use crate::launch::sandboxes;

/// What the names begin with under which processes are kept.
const KEPT: &str = "guard:";

/// Watches process `pid` for the sandbox `id` until it ends.
pub(super) fn watch(
    root: &Path,
    id: &str,
    pid: u32,
    worker: Option<&Worker>,
) -> anyhow::Result<()> {
    // A wrong name is told to whoever asks, not to the log.
    let sandbox = sandboxes(root)?.get(id)?;
    let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
        bail!("{pid} is no process id");
    };
    let process =
        pidfd_open(pid, PidfdFlags::empty()).with_context(|| format!("cannot watch {pid:?}"))?;
    let id = sandbox.spec.id.to_string();
    let name = format!("{KEPT}{id}:{}", pid.as_raw_pid());
    if let Some(worker) = worker {
        worker.keep(
            &name,
            &serde_json::Value::from(id.as_str()),
            process.as_fd(),
        );
    }
    spawn(root, id, name, process, worker)
}

/// Waits in a thread of its own.
fn spawn(
    root: &Path,
    id: String,
    name: String,
    process: OwnedFd,
    worker: Option<&Worker>,
) -> anyhow::Result<()> {
    let (root, worker) = (root.to_owned(), worker.cloned());
    std::thread::Builder::new()
        .name("guard".to_owned())
        .spawn(move || {
            wait(&root, &id, &process);
            if let Some(worker) = worker {
                worker.forget(&name);
            }
        })
        .context("cannot watch a process")?;
    Ok(())
}

fn wait(root: &Path, id: &str, process: &OwnedFd) {
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    while let Err(errno) = poll(&mut fds, None) {
        if errno != rustix::io::Errno::INTR {
            tracing::warn!(%errno, "cannot wait for a process that froze a sandbox");
            break;
        }
    }
    thaw(root, id);
}

fn thaw(root: &Path, id: &str) {
    let thawed = sandboxes(root).and_then(|all| Ok(all.thaw_abandoned(id)?));
    match thawed {
        Ok(true) => tracing::warn!(sandbox = id, "let go on, since who froze it is gone"),
        Ok(false) => {}
        Err(error) => {
            tracing::debug!(sandbox = id, error = %format!("{error:#}"), "not looked at");
        }
    }
}

/// Lets all sandboxes go on whose freezer is gone, and watches on for the others.
pub(super) fn at_start(root: &Path, sets: &mut Sets, worker: Option<&Worker>) {
    let names: Vec<String> = sets
        .keys()
        .filter(|n| n.starts_with(KEPT))
        .cloned()
        .collect();
    for name in names {
        let Some(set) = sets.remove(&name) else {
            continue;
        };
        let process = set.fds.into_iter().next();
        if let (Some(id), Some(process)) = (set.state.as_str(), process)
            && let Err(error) = spawn(root, id.to_owned(), name, process, worker)
        {
            tracing::warn!(sandbox = id, error = %format!("{error:#}"), "not watched");
        }
    }
    let all = sandboxes(root).and_then(|all| Ok(all.list()?));
    for sandbox in all.unwrap_or_default() {
        thaw(root, sandbox.spec.id.as_str());
    }
}
