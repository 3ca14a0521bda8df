//! Sandboxes that nobody answers for: left by a killed launcher, or with a
//! record that cannot be read.
//!
//! The lock of a one-shot sandbox is held by its launcher all its life, so a
//! record with a free lock is one whose launcher is dead. What the sandbox's
//! own processes do does not matter then: they are on their way out.

use std::collections::BTreeMap;
use std::time::{Duration, Instant, UNIX_EPOCH};

use rustix::fs::FlockOperation;

use crate::cgroup::Group;
use crate::error::{Result, RuntimeError};
use crate::record::Record;
use crate::sandboxes::{Sandbox, SandboxState, Sandboxes};
use crate::spec::{IdMap, Limits, Network, SandboxId, SandboxSpec};

/// How long the processes of a sandbox with a damaged record may take to end.
const END_WAIT: Duration = Duration::from_secs(20);

impl Sandboxes {
    /// Removes the sandbox that has a name somebody else asks for, if it was
    /// to go away with its launcher and that is dead. `true`: try again.
    pub(crate) fn reclaim_owner(&self, owner: &str) -> bool {
        let Ok(id) = owner.parse::<SandboxId>() else {
            return false;
        };
        match self.layout.read(&id) {
            Ok(Some(record)) => self.reclaim(&record),
            // It has just gone, is being made, or is damaged.
            _ => !self.layout.dir(&id).exists(),
        }
    }

    /// Removes a one-shot sandbox whose launcher is dead; `false` if it is
    /// none, or cannot be removed (which is logged). Its lease is the caller's
    /// or, as that of a dead process, nobody's.
    pub(crate) fn reclaim(&self, record: &Record) -> bool {
        if !record.goes_with_launcher() {
            return false;
        }
        let id = &record.spec.id;
        let _lock = match self.layout.lock(id) {
            Ok(Some(lock)) => lock,
            Ok(None) => return false,
            Err(_) => return !self.layout.dir(id).exists(),
        };
        // The launcher may have ended in good order between reading and locking.
        let record = match self.layout.read(id) {
            Ok(Some(record)) if record.goes_with_launcher() => record,
            _ => return !self.layout.dir(id).exists(),
        };
        let group = self.hierarchies.group(id, &record.spec.limits);
        match self.destroy(id, Some(&record), &group) {
            Ok(()) => true,
            Err(e) => {
                tracing::warn!(sandbox = %id, "what a dead launcher left cannot be removed: {e}");
                false
            }
        }
    }

    /// Makes a dead sandbox of one that was run with its files to be kept, and
    /// whose launcher (the caller has its lock) died before it could.
    pub(crate) fn settle(&self, record: &Record, group: &Group) -> Result<()> {
        group.kill();
        group.remove()?;
        let mut record = record.clone();
        record.one_shot = false;
        record.keep = false;
        self.layout.write(&record)
    }

    /// Whether `error`, of reading a record, means that it is damaged or lost,
    /// and not just that somebody is making the sandbox.
    pub(crate) fn is_damaged(&self, id: &SandboxId, error: &RuntimeError) -> Result<bool> {
        if !matches!(error, RuntimeError::Busy { .. }) {
            return Ok(true);
        }
        let _alone = self.layout.lock_all(FlockOperation::LockExclusive)?;
        Ok(self.layout.lock(id)?.is_some() && self.layout.read(id)?.is_none())
    }

    /// Ends a sandbox of which no more is known than its id, and deletes its files.
    pub(crate) fn remove_damaged(&self, id: &SandboxId) -> Result<Sandbox> {
        let group = self.hierarchies.all_groups(id);
        let busy = |by| RuntimeError::Busy { id: id.clone(), by };
        let deadline = Instant::now() + END_WAIT;
        let Some(_freeze) = self.layout.freeze_lock(id)? else {
            return Err(busy("it is frozen for a snapshot"));
        };
        // A launcher that still holds it cleans up behind its command, maybe
        // before its lock can be taken here.
        let lock = loop {
            group.kill();
            match self.layout.lock(id) {
                Ok(Some(lock)) => break Some(lock),
                Err(_) if !self.layout.dir(id).exists() => break None,
                Err(e) => return Err(e),
                Ok(None) if Instant::now() >= deadline => {
                    return Err(busy("it is being made, run or removed"));
                }
                Ok(None) => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        if lock.is_some() {
            // Again and again: what forks can escape a list of processes.
            while group.is_populated() {
                if Instant::now() >= deadline {
                    return Err(busy("a killed process does not end"));
                }
                group.kill();
                std::thread::sleep(Duration::from_millis(1));
            }
            self.destroy(id, None, &group)?;
        }
        Ok(self.unknown(id))
    }

    /// What can be said of a sandbox without a record.
    fn unknown(&self, id: &SandboxId) -> Sandbox {
        Sandbox {
            spec: SandboxSpec {
                id: id.clone(),
                name: None,
                stack: Vec::new(),
                lowers: Vec::new(),
                hostname: None,
                limits: Limits::default(),
                network: Network::default(),
                id_map: IdMap { base: 0, count: 0 },
                read_only: false,
                no_new_privileges: false,
                env: Vec::new(),
                channel: false,
                lease: Some(id.to_string()),
                labels: BTreeMap::new(),
            },
            state: SandboxState::Dead,
            pid: None,
            created: UNIX_EPOCH,
            upper: self.layout.directories(id).upper,
            channel: self.layout.directories(id).channel,
            one_shot: false,
        }
    }
}
