//! Taking over what another process of the node served, while it is mounted and in use.
//!
//! In this order, so that readers wait for as little as possible:
//!
//! 1. the lock, whose holder never let go of it;
//! 2. the directory as it was, from `ROOT/served` and the mount table, blobs unopened;
//! 3. the connection: from here on reads are answered, and blobs opened as they are read;
//! 4. what is mounted, leases, and at last the blobs that nobody has read yet.
//!
//! What the process before had in memory only is lost: counters, what it fetched ahead, recordings.
//! Files that it was writing when it died stay until a node begins without a predecessor: readers write
//! such files, too, and are served already.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use layerpack_store::{Digest, LayerId};
use layerpack_sys::{mount, mountinfo};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use serde::{Deserialize, Serialize};

use super::layer::{StoreRef, Up};
use super::lease::Record as LeaseRecord;
use super::served::Record;
use super::{Node, lock, sweep};
use crate::cache::ConnectionId;
use crate::error::{IoContext, Result};
use crate::fetch::Blob;
use crate::fuse::{Negotiated, Session};
use crate::holder::{FUSE, Keeper, Set};
use crate::sync::Ordering;

const FORMAT: u32 = 1;
/// How long the kernel may take to open the conversation.
const INIT_LIMIT: Duration = Duration::from_secs(10);
/// How long a process that leaves waits for reads that wait for a store.
const LEAVE_LIMIT: Duration = Duration::from_millis(500);

/// What is to be known of a connection besides its descriptors.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Connection {
    format: u32,
    negotiated: Negotiated,
    /// Device number of the directory's mount.
    device: (u32, u32),
    /// Names it; earlier versions named none.
    #[serde(default)]
    id: Option<ConnectionId>,
}

/// A connection that lives.
pub(super) struct Living {
    connection: Connection,
    channels: Vec<OwnedFd>,
    mounts: Vec<mountinfo::MountEntry>,
}

/// The node's lock as the process before had it; `None` if it is another file's by now.
pub(super) fn inherit_lock(root: &Path, set: Set) -> Result<Option<fs_err::File>> {
    let path = root.join("node.lock");
    let Some(fd) = set.fds.into_iter().next() else {
        return Ok(None);
    };
    let file = fs_err::File::from_parts(std::fs::File::from(fd), &path);
    let (had, there) = (
        file.metadata().at("stat", &path)?,
        fs_err::metadata(&path).ok(),
    );
    let same = there.is_some_and(|t| (t.dev(), t.ino()) == (had.dev(), had.ino()));
    if !same {
        return Ok(None);
    }
    lock::sign(file).map(Some)
}

/// The connection in a set, if it can be served on: it is mounted where it belongs, was not aborted,
/// and the kernel sends again what was read and not answered.
pub(super) fn living(root: &Path, set: Set, problems: &mut Vec<String>) -> Result<Option<Living>> {
    let mut lost = |why: &str| {
        problems.push(format!(
            "what an earlier daemon had mounted cannot be taken over: {why}; it is mounted anew"
        ));
        Ok(None)
    };
    let connection = match serde_json::from_value::<Connection>(set.state) {
        Ok(connection) if connection.format == FORMAT => connection,
        _ => return lost("its state is of another version"),
    };
    if !connection.negotiated.can_resend() {
        return lost("this kernel does not send requests again (Linux 6.9 does)");
    }
    let Some(first) = set.fds.first() else {
        return lost("no descriptors came with it");
    };
    let mut fds = [PollFd::new(first, PollFlags::IN)];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    poll(&mut fds, Some(&now)).at("look at the connection of", root)?;
    let aborted = fds
        .first()
        .is_some_and(|fd| fd.revents().contains(PollFlags::ERR));
    if aborted {
        return lost("the kernel has ended the connection");
    }
    let mounts = mountinfo::read()?;
    let blobs = root.join("blobs");
    let top = mounts.iter().rev().find(|entry| entry.target == blobs);
    if top.is_none_or(|entry| entry.device != connection.device) {
        return lost("its directory is not mounted");
    }
    for fd in &set.fds {
        let flags = fcntl_getfl(fd).at("look at the connection of", root)?;
        if flags.contains(OFlags::NONBLOCK) {
            fcntl_setfl(fd, flags.difference(OFlags::NONBLOCK))
                .at("look at the connection of", root)?;
        }
    }
    Ok(Some(Living {
        connection,
        channels: set.fds,
        mounts,
    }))
}

/// The layer that a directory of the node is named by.
fn layer_at(path: &Path, dir: &Path) -> Option<LayerId> {
    let name = path.strip_prefix(dir).ok()?.to_str()?;
    let digest: Digest = format!("b3:{name}").parse().ok()?;
    Some(LayerId::from_digest(digest))
}

impl Node {
    /// Has the connection kept, once it is known what was agreed on.
    pub(super) fn keep_connection(
        &self,
        keeper: &dyn Keeper,
        session: &Session,
        device: (u32, u32),
        copies: &[OwnedFd],
    ) {
        let kept = match session.agreed(INIT_LIMIT) {
            None => Err(std::io::Error::other("the kernel did not begin to speak")),
            Some(negotiated) => {
                let id = ConnectionId::random().ok();
                if let Some(id) = id {
                    self.registry.set_connection(id);
                }
                let connection = Connection {
                    format: FORMAT,
                    negotiated,
                    device,
                    id,
                };
                let fds: Vec<BorrowedFd<'_>> = copies.iter().map(|fd| fd.as_fd()).collect();
                serde_json::to_value(connection)
                    .map_err(std::io::Error::other)
                    .and_then(|state| keeper.keep(FUSE, &state, &fds))
            }
        };
        if let Err(e) = kept {
            self.problem(format!(
                "the holder does not have the mounts: if this process dies, reads fail ({e})"
            ));
        }
    }

    /// Serves the connection of another process.
    pub(super) fn resume(self: &Arc<Self>, living: Living) -> Result<()> {
        let layers_dir = self.root.join("layers");
        let mounted: BTreeSet<LayerId> = living
            .mounts
            .iter()
            .filter(|entry| entry.fstype == "erofs")
            .filter_map(|entry| layer_at(&entry.target, &layers_dir))
            .collect();
        let mut problems = Vec::new();
        let records = self.served.load(&mut problems)?;
        let node = Arc::downgrade(self);
        let known: BTreeMap<LayerId, Record> = records
            .iter()
            .map(|record| (record.layer, record.clone()))
            .collect();
        self.registry.set_opener(Box::new(move |layer| {
            let node = node.upgrade().ok_or(crate::LayerfsError::Stopped {
                root: std::path::PathBuf::new(),
            })?;
            let record = known.get(&layer).ok_or(crate::LayerfsError::NotCached {
                layer: *layer.digest(),
            })?;
            node.adopt_blob(record, true).inspect_err(|e| {
                node.trouble(format!("layer {layer} cannot be served: {e}"));
            })
        }));
        for record in records.iter().filter(|record| record.size > 0) {
            if !self
                .registry
                .adopt(record, !mounted.contains(&record.layer))
            {
                problems.push(format!(
                    "layer {} cannot be adopted: its identity begins like that of another",
                    record.layer
                ));
            }
        }
        if let Some(id) = living.connection.id {
            self.registry.set_connection(id);
        }
        let session = Session::resume(
            living.channels,
            living.connection.negotiated,
            self.config.session,
            Arc::clone(&self.registry) as _,
        )
        .at("go on serving", &self.blobs_dir())?;
        *self.session.lock() = Some(session);
        // From here on reads are answered.
        for problem in problems {
            self.problem(problem);
        }
        self.adopt_mounts(&records, &mounted, &living.mounts);
        for record in records.iter().filter(|record| record.size > 0) {
            let Some(entry) = self.registry.get(record.layer) else {
                continue;
            };
            // Without asking any store: one that hangs must not hold up the others.
            let opened = entry.opened(&self.recordings, || self.adopt_blob(record, false));
            if let Err(e) = opened {
                self.trouble(format!("layer {} is not open yet: {e}", record.layer));
            }
        }
        Ok(())
    }

    /// A problem, unless it is listed already.
    fn trouble(&self, what: String) {
        if !self.problems.lock().contains(&what) {
            self.problem(what);
        }
    }

    /// Opens a blob by its record; asks the store for what is missing only if `ask` says so.
    fn adopt_blob(&self, record: &Record, ask: bool) -> Result<Arc<Blob>> {
        let away = StoreRef::Away(record.store.clone());
        let address = StoreRef::Address(record.store.clone());
        let store = if ask { &address } else { &away };
        let dir = self.root.join("cache").join(record.layer.hex());
        fs_err::create_dir_all(&dir).at("create", &dir)?;
        let manifest = self.manifest(store, &record.manifest)?;
        let map = self.ensure_map(store, &manifest, &dir, None)?;
        self.make_blob(store, &manifest, map, &dir, None)
    }

    /// Knows again what is mounted, and unmounts what nobody knows.
    fn adopt_mounts(
        &self,
        records: &[Record],
        mounted: &BTreeSet<LayerId>,
        mounts: &[mountinfo::MountEntry],
    ) {
        let mut known = BTreeSet::from([self.blobs_dir()]);
        for record in records {
            if !mounted.contains(&record.layer) {
                if record.size == 0 {
                    self.served.remove(record.layer);
                }
                continue;
            }
            let mountpoint = self.root.join("layers").join(record.layer.hex());
            known.insert(mountpoint.clone());
            match self.manifest(&StoreRef::Away(record.store.clone()), &record.manifest) {
                Ok(manifest) => {
                    self.slot(record.layer).lock().up = Some(Up {
                        mountpoint,
                        manifest,
                        manifest_digest: record.manifest,
                        store: record.store.clone(),
                        idle_since: Instant::now(),
                    });
                }
                Err(e) => self.problem(format!(
                    "layer {} is mounted and not known: {e}",
                    record.layer
                )),
            }
        }
        let stacks = self.root.join("stacks");
        for entry in mounts.iter().filter(|entry| entry.fstype == "erofs") {
            let digest = entry.target.strip_prefix(&stacks).ok().and_then(|path| {
                let name = path.parent()?.to_str()?;
                let is_mount = path.file_name()? == "mnt";
                let digest: Digest = format!("b3:{name}").parse().ok()?;
                is_mount.then_some(digest)
            });
            if let Some(digest) = digest {
                known.insert(entry.target.clone());
                self.generated.lock().insert(digest, entry.target.clone());
            }
        }
        for path in sweep::ours(&self.root).unwrap_or_default() {
            if !known.contains(&path) {
                self.problem(format!(
                    "{} was mounted, and nothing is known of it: unmounted",
                    path.display()
                ));
                if let Err(e) = mount::unmount(&path, true) {
                    self.problem(format!("stale mount: {e}"));
                }
            }
        }
    }

    /// Goes on with leases whose layers are all mounted; gives back the others.
    pub(super) fn adopt_leases(&self, records: Vec<LeaseRecord>) -> Result<Vec<LeaseRecord>> {
        let mut rest = Vec::new();
        let mut there: HashSet<PathBuf> = self.generated.lock().values().cloned().collect();
        let mut up = HashSet::new();
        let slots: Vec<_> = self
            .slots
            .lock()
            .iter()
            .map(|(id, slot)| (*id, Arc::clone(slot)))
            .collect();
        for (layer, slot) in slots {
            if let Some(mounted) = &slot.lock().up {
                there.insert(mounted.mountpoint.clone());
                up.insert(layer);
            }
        }
        for record in records {
            let stack = &record.info.stack;
            let whole = stack.layers.iter().all(|layer| up.contains(layer))
                && stack.lowers.iter().all(|path| there.contains(path));
            if whole && record.is_alive(&self.boot_text) {
                self.learner.note(&record.info.stack.layers);
                self.leases.lock().insert(record);
            } else {
                rest.push(record);
            }
        }
        Ok(rest)
    }

    /// Whether the node went on with the mounts of another process.
    #[must_use]
    pub fn took_over(&self) -> bool {
        self.taken_over.load(Ordering::Acquire)
    }

    /// Whether reads in flight survive the end of this process, if its descriptors do.
    #[must_use]
    pub fn can_resend(&self) -> bool {
        let session = self.session.lock();
        let negotiated = session.as_ref().and_then(Session::negotiated);
        negotiated.is_some_and(|agreed| agreed.can_resend())
    }

    /// Leaves everything mounted for another process, which the descriptors are kept for: makes
    /// durable what is cached, takes in no more requests, and waits a moment for those that wait for
    /// a store. The process must end then, and do nothing else.
    pub fn leave(&self) {
        self.leaving.store(true, Ordering::Release);
        self.checkpoint();
        if let Some(session) = self.session.lock().as_ref() {
            session.leave(LEAVE_LIMIT);
        }
    }

    /// Has dropping the node leave everything mounted, as [`Node::leave`] does.
    pub fn abandon(&self) {
        self.leaving.store(true, Ordering::Release);
    }
}
