//! Watches processes that freeze sandboxes: when one ends without letting its sandbox go on, as
//! after `kill -9`, the daemon does.
//!
//! The lock on a frozen sandbox ends with its holder, so "frozen and nobody holds the lock" is all
//! there is to know. A daemon that starts looks at every sandbox in the same way.

use std::os::fd::OwnedFd;
use std::path::Path;

use anyhow::{Context as _, bail};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::launch::sandboxes;

/// Watches process `pid` for the sandbox `id` until it ends.
pub(super) fn watch(root: &Path, id: &str, pid: u32) -> anyhow::Result<()> {
    // A wrong name is told to whoever asks, not to the log.
    let sandbox = sandboxes(root)?.get(id)?;
    let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
        bail!("{pid} is no process id");
    };
    let process =
        pidfd_open(pid, PidfdFlags::empty()).with_context(|| format!("cannot watch {pid:?}"))?;
    let (root, id) = (root.to_owned(), sandbox.spec.id.to_string());
    std::thread::Builder::new()
        .name("guard".to_owned())
        .spawn(move || wait(&root, &id, &process))
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

/// Lets all sandboxes go on whose freezer is gone.
pub(super) fn at_start(root: &Path) {
    let all = sandboxes(root).and_then(|all| Ok(all.list()?));
    for sandbox in all.unwrap_or_default() {
        thaw(root, sandbox.spec.id.as_str());
    }
}
