//! Halting sandboxes for snapshots, and letting them go on whatever happens.
//!
//! A sandbox is halted while its `freeze.lock` is held. The lock ends with its holder, so a halted
//! sandbox whose lock is free is one whose holder died, and whoever sees that lets it go on: the
//! next command in it, and the node daemon, which watches the holders.

use std::time::{Duration, Instant};

use crate::cgroup::Group;
use crate::error::{Result, RuntimeError};
use crate::record::{InitProcess, Lock};
use crate::sandboxes::Sandboxes;
use crate::spec::SandboxId;
use crate::stop::{self, Stopped};

/// By what the processes of a sandbox were halted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HaltedBy {
    /// There are no processes.
    Nothing,
    /// The freezer of control groups.
    Freezer,
    /// Signals, for want of a freezer: its processes can see it.
    Signals,
}

impl HaltedBy {
    /// In a word.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::Freezer => "freezer",
            Self::Signals => "signals",
        }
    }
}

#[derive(Debug)]
enum Halted {
    Nothing,
    Group(Group),
    Stopped {
        processes: Stopped,
        mark: std::path::PathBuf,
    },
}

/// Keeps a sandbox frozen until it is dropped.
#[derive(Debug)]
pub struct FreezeGuard {
    /// How long freezing took.
    pub froze_in: Duration,
    halted: Halted,
    _lock: Lock,
}

impl FreezeGuard {
    /// By what the sandbox was halted.
    #[must_use]
    pub fn by(&self) -> HaltedBy {
        match self.halted {
            Halted::Nothing => HaltedBy::Nothing,
            Halted::Group(_) => HaltedBy::Freezer,
            Halted::Stopped { .. } => HaltedBy::Signals,
        }
    }

    /// Lets the sandbox go on, and says if that failed.
    ///
    /// # Errors
    /// If the control group cannot be written.
    pub fn thaw(mut self) -> Result<()> {
        self.let_go()
    }

    /// Leaves the sandbox halted and gives up the right to it, as the end of this process would.
    #[doc(hidden)]
    pub fn abandon(mut self) {
        match std::mem::replace(&mut self.halted, Halted::Nothing) {
            Halted::Stopped { processes, .. } => processes.abandon(),
            Halted::Nothing | Halted::Group(_) => {}
        }
    }

    fn let_go(&mut self) -> Result<()> {
        match std::mem::replace(&mut self.halted, Halted::Nothing) {
            Halted::Nothing => Ok(()),
            Halted::Group(group) => group.thaw(),
            Halted::Stopped {
                mut processes,
                mark,
            } => {
                processes.resume();
                let _ = fs_err::remove_file(mark);
                Ok(())
            }
        }
    }
}

impl Drop for FreezeGuard {
    fn drop(&mut self) {
        let _ = self.let_go();
    }
}

/// Keeps a sandbox from being removed, and from being packed by somebody else, until it is dropped.
#[derive(Debug)]
pub struct Hold {
    _lock: Lock,
}

/// Whether a line of `/proc/PID/maps` is a file that is shared and may be written to.
fn is_shared_file(line: &str) -> bool {
    let mut fields = line.split_whitespace();
    let (access, path) = (fields.nth(1).unwrap_or_default(), fields.nth(3));
    let memory = |path: &str| {
        ["/memfd:", "/SYSV", "/dev/zero", "/dev/shm/"]
            .iter()
            .any(|start| path.starts_with(start))
    };
    access.contains('w')
        && access.ends_with('s')
        && path.is_some_and(|path| path.starts_with('/') && !memory(path))
}

impl Sandboxes {
    /// Keeps a sandbox for one who packs it. It may run meanwhile, and may end. While somebody else
    /// packs it, waits up to `limit`.
    ///
    /// # Errors
    /// [`RuntimeError::Busy`] if somebody else still packs it.
    pub fn hold(&self, name_or_id: &str, limit: Duration) -> Result<Hold> {
        let id = self.layout.find(name_or_id)?;
        match self.layout.pack_lock(&id, limit)? {
            Some(lock) => Ok(Hold { _lock: lock }),
            None => Err(RuntimeError::Busy {
                id,
                by: "another snapshot of it is being made; wait for that one",
            }),
        }
    }

    /// Halts all processes of a sandbox until the guard is dropped. A dead
    /// sandbox needs no halting, and is only kept from being removed.
    ///
    /// # Errors
    /// [`RuntimeError::FreezeTimeout`] (the sandbox goes on then),
    /// [`RuntimeError::Busy`] if somebody else keeps it frozen.
    pub fn freeze(&self, name_or_id: &str, timeout: Duration) -> Result<FreezeGuard> {
        let id = self.layout.find(name_or_id)?;
        let record = self.record(&id)?;
        let started = Instant::now();
        let Some(lock) = self.layout.freeze_lock(&id)? else {
            return Err(RuntimeError::Busy {
                id,
                by: "it is frozen for another snapshot",
            });
        };
        let mut guard = FreezeGuard {
            froze_in: Duration::ZERO,
            halted: Halted::Nothing,
            _lock: lock,
        };
        let Some(init) = record.init.as_ref().and_then(InitProcess::alive) else {
            return Ok(guard);
        };
        let group = self.hierarchies.group(&id, &record.spec.limits);
        let frozen = if group.can_freeze() && !self.stops_by_signals() {
            let frozen = group.freeze(timeout);
            // Set first: a failure half-way lets go too.
            guard.halted = Halted::Group(group);
            match frozen {
                Ok(frozen) => frozen,
                // Its processes, and with them its group, ended just now.
                Err(_) if record.init.as_ref().and_then(InitProcess::alive).is_none() => true,
                Err(error) => return Err(error),
            }
        } else {
            let mark = self.layout.dir(&id).join("stopped");
            fs_err::write(&mark, "")?;
            let processes = stop::all(init, timeout)?;
            let all = processes.is_some();
            guard.halted = Halted::Stopped {
                processes: processes.unwrap_or_default(),
                mark,
            };
            all
        };
        guard.froze_in = started.elapsed();
        if frozen {
            Ok(guard)
        } else {
            Err(RuntimeError::FreezeTimeout {
                id,
                waited_ms: timeout.as_millis(),
            })
        }
    }

    /// Whether a process of the sandbox has a file mapped that it shares and may write to. One that
    /// is dead has none.
    ///
    /// # Errors
    /// If that cannot be found out.
    pub fn maps_files(&self, name_or_id: &str) -> Result<bool> {
        let id = self.layout.find(name_or_id)?;
        let record = self.record(&id)?;
        let Some(init) = record.init.as_ref().and_then(InitProcess::alive) else {
            return Ok(false);
        };
        let group = self.hierarchies.group(&id, &record.spec.limits);
        let processes = match group.members() {
            Some(processes) => processes,
            None => stop::processes(init)?,
        };
        for pid in processes {
            match fs_err::read_to_string(format!("/proc/{pid}/maps")) {
                Ok(maps) if maps.lines().any(is_shared_file) => return Ok(true),
                Ok(_) => {}
                // It has ended.
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
                Err(e) if e.raw_os_error() == Some(libc::ESRCH) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(false)
    }

    /// Lets a sandbox go on that is halted and whose freezer has died; whether it was one.
    ///
    /// # Errors
    /// If it cannot be let go.
    pub fn thaw_abandoned(&self, name_or_id: &str) -> Result<bool> {
        let id = self.layout.find(name_or_id)?;
        let record = self.record(&id)?;
        let group = self.hierarchies.group(&id, &record.spec.limits);
        self.heal(&id, &group)
    }

    /// The same where the group is at hand.
    pub(crate) fn heal(&self, id: &SandboxId, group: &Group) -> Result<bool> {
        let mark = self.layout.dir(id).join("stopped");
        let frozen = group.is_frozen().unwrap_or(false);
        if !frozen && !mark.exists() {
            return Ok(false);
        }
        let Some(_lock) = self.layout.freeze_lock(id)? else {
            return Ok(false);
        };
        if mark.exists() {
            let record = self.layout.read(id)?;
            let init = record.as_ref().and_then(|record| record.init.as_ref());
            if let Some(init) = init.and_then(InitProcess::alive) {
                stop::resume_all(init)?;
            }
            let _ = fs_err::remove_file(&mark);
        }
        if frozen {
            group.thaw()?;
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_that_matter() {
        for (line, matters) in [
            ("7f00-7f01 rw-s 00000000 fe:00 1234 /job/data.db", true),
            (
                "7f00-7f01 rw-s 00000000 fe:00 1234 /job/a b (deleted)",
                true,
            ),
            ("7f00-7f01 r--s 00000000 fe:00 1234 /job/data.db", false),
            ("7f00-7f01 rw-p 00000000 fe:00 1234 /lib/libc.so", false),
            (
                "7f00-7f01 rw-s 00000000 00:01 1234 /memfd:x (deleted)",
                false,
            ),
            ("7f00-7f01 rw-s 00000000 00:00 0 ", false),
            ("7f00-7f01 rw-p 00000000 00:00 0 [heap]", false),
        ] {
            assert_eq!(is_shared_file(line), matters, "{line}");
        }
    }
}
