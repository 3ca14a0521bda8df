//! Halting a sandbox without a freezer: every process of its pid namespace is stopped.
//!
//! This is the way where no control group hierarchy can freeze. It is not the same: processes see
//! that they were stopped (their parents are told, waits are interrupted), and a process that was
//! stopped before is left as it is. New processes are looked for until there are none.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

use crate::error::Result;

/// Processes that were stopped.
#[derive(Debug, Default)]
pub(crate) struct Stopped {
    processes: Vec<OwnedFd>,
}

impl Stopped {
    /// Leaves them stopped.
    pub(crate) fn abandon(mut self) {
        self.processes.clear();
    }

    /// Lets them go on, the last one stopped first.
    pub(crate) fn resume(&mut self) {
        while let Some(process) = self.processes.pop() {
            let _ = rustix::process::pidfd_send_signal(&process, Signal::CONT);
        }
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        self.resume();
    }
}

/// Stops all processes of the namespace that `init` is PID 1 of; `None` if some did not come to
/// rest in time: they go on then.
pub(crate) fn all(init: Pid, timeout: Duration) -> Result<Option<Stopped>> {
    let deadline = Instant::now() + timeout;
    let mut stopped = Stopped::default();
    let mut seen: BTreeSet<i32> = BTreeSet::new();
    loop {
        let mut new = false;
        let found = processes(init)?;
        for pid in &found {
            if seen.contains(pid) {
                continue;
            }
            new = true;
            seen.insert(*pid);
            // One that its user stopped must stay so.
            if is_stopped(*pid) {
                continue;
            }
            if let Some(fd) =
                Pid::from_raw(*pid).and_then(|p| layerpack_sys::ns::pidfd_open(p).ok())
                && rustix::process::pidfd_send_signal(&fd, Signal::STOP).is_ok()
            {
                stopped.processes.push(fd);
            }
        }
        if !new && found.iter().all(|pid| is_stopped(*pid)) {
            return Ok(Some(stopped));
        }
        if Instant::now() >= deadline {
            return Ok(None);
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Lets all processes of the namespace go on whom a stopper that has died left behind.
pub(crate) fn resume_all(init: Pid) -> Result<()> {
    for pid in processes(init)? {
        if is_stopped(pid)
            && let Some(pid) = Pid::from_raw(pid)
        {
            let _ = rustix::process::kill_process(pid, Signal::CONT);
        }
    }
    Ok(())
}

/// The processes of the namespace that `init` is PID 1 of.
pub(crate) fn processes(init: Pid) -> Result<Vec<i32>> {
    let namespace = |pid: i32| fs_err::read_link(format!("/proc/{pid}/ns/pid")).ok();
    let Some(own) = namespace(init.as_raw_nonzero().get()) else {
        return Ok(Vec::new());
    };
    let mut found = Vec::new();
    for entry in fs_err::read_dir("/proc")? {
        let name = entry?.file_name();
        if let Some(pid) = name.to_str().and_then(|name| name.parse::<i32>().ok())
            && namespace(pid).as_ref() == Some(&own)
        {
            found.push(pid);
        }
    }
    Ok(found)
}

/// Whether no thread of a process runs; one that is gone does not.
fn is_stopped(pid: i32) -> bool {
    let Ok(threads) = fs_err::read_dir(format!("/proc/{pid}/task")) else {
        return true;
    };
    let stats: Vec<PathBuf> = threads
        .filter_map(|thread| Some(thread.ok()?.path().join("stat")))
        .collect();
    stats.iter().all(|path| {
        let Ok(stat) = fs_err::read_to_string(path) else {
            return true;
        };
        let state = stat
            .rsplit_once(')')
            .and_then(|(_, rest)| rest.trim_start().chars().next());
        matches!(state, Some('T' | 't' | 'Z' | 'X' | 'x') | None)
    })
}
