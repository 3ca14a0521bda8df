//! A node: everything that is mounted from one state directory.
//!
//! ```text
//! ROOT/node.lock            held while a process serves the directory
//! ROOT/blobs/               FUSE: one file per layer, named by its identity
//! ROOT/cache/LAYER/         meta.erofs, map, locator, data, presence files
//! ROOT/layers/LAYER/        EROFS mounts
//! ROOT/stacks/STACK/        of one with a closer look: plan.json; meta.erofs and mnt/ of a generated layer
//! ROOT/manifests/           manifests by digest
//! ROOT/leases/              who uses what
//! ROOT/profiles/            what was learnt of stacks' first reads
//! ROOT/served/              what the kernel may ask for, while the FUSE connection lives
//! ROOT/pins.json            layers that eviction leaves alone
//! ROOT/node-id              the node's name in the leases that it takes in stores
//! ```
//!
//! These directories are for root only: layers hold set-id programs that are meant for
//! sandboxes, not for the users of the host.
//!
//! Locks, in the order in which they are taken: `stacking`, one layer's slot, `generated`,
//! `leases`, the registry. Who makes room in the cache only tries for a slot. The registry's lock is never held across a system call: the kernel
//! asks the FUSE threads for the blob while it mounts a layer.

mod adopt;
mod backing;
mod book;
mod caches;
mod faces;
mod given;
mod layer;
mod learn;
mod lease;
mod lock;
mod lost;
mod prefetch;
mod promise;
mod recording;
mod registry;
mod served;
mod stack;
mod status;
mod store_lease;
mod sweep;
mod trace;
mod types;

use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use layerpack_store::{Digest, LayerId, LayerStore};
use layerpack_sys::{fusedev, mount};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;

use crate::cache::BootId;
use crate::error::{IoContext, LayerfsError, Result};
use crate::fetch::Fetcher;
use crate::fuse::Session;
use crate::holder::{self, Keeper, Sets};
use crate::peers::PeerLink;
use crate::record::Recordings;
use crate::sync::{AtomicBool, AtomicU64, Condvar, Mutex, Ordering, RwLock};

use book::Book;
use faces::Faces;
use given::{Candidate, Parsed};
use layer::{Slot, StoreRef};
use learn::Learner;
use lease::Record;
use prefetch::Prefetches;
use promise::Promise;
use registry::Registry;
use served::Served;
use store_lease::StoreLeases;

pub use backing::ErofsBacking;
pub use caches::{CacheChecked, CacheStatus, CachedLayer, Evicted};
pub use given::GivenManifests;
pub use learn::{LearntProfile, PublishedProfile};
pub use lost::is_lost;
pub(crate) use prefetch::Task as PrefetchTask;
pub use prefetch::{PrefetchMode, PrefetchSpec};
pub use recording::{Recorded, RecordingBegun};
pub use status::NodeMetrics;
pub use types::{
    LayerHandle, LayerStatus, LeaseInfo, LeaseSpec, NodeConfig, NodeStatus, Stack, StoreOpener,
    Totals,
};

/// Longest wait for threads at the end.
const END_LIMIT: Duration = Duration::from_secs(10);
/// Longest wait for the kernel to close blobs of layers that were unmounted.
const BUSY_LIMIT: Duration = Duration::from_secs(3);

/// The serving side of one state directory. There is one per directory, in one process.
#[derive(Debug)]
pub struct Node {
    root: PathBuf,
    config: NodeConfig,
    backing: backing::Backing,
    boot: BootId,
    boot_text: String,
    /// Locked for as long as the node lives, or somebody keeps the lock for the next one.
    _lock: fs_err::File,
    /// Keeps what the next process needs.
    keeper: Option<Arc<dyn Keeper>>,
    /// Another process goes on with the mounts.
    leaving: AtomicBool,
    /// The connection was another process's before.
    taken_over: AtomicBool,
    served: Arc<Served>,
    registry: Arc<Registry>,
    fetcher: Arc<Fetcher>,
    session: Mutex<Option<Session>>,
    stacking: RwLock<()>,
    slots: Mutex<HashMap<LayerId, Arc<Mutex<Slot>>>>,
    generated: Mutex<HashMap<Digest, PathBuf>>,
    leases: Mutex<Book>,
    store_leases: StoreLeases,
    /// Manifests that were read not long ago.
    parsed: Mutex<Parsed>,
    /// What decides how stacks are put together.
    faces: Mutex<Faces>,
    problems: Mutex<Vec<String>>,
    /// What was found of former lives.
    swept: Mutex<Vec<String>>,
    meta_fetched: AtomicU64,
    stopped: AtomicBool,
    recordings: Arc<Recordings>,
    prefetches: Prefetches,
    learner: Learner,
    peers: Mutex<Option<PeerLink>>,
    /// Layers that eviction leaves alone.
    pins: Mutex<BTreeSet<LayerId>>,
    housekeeper: Housekeeper,
}

/// The thread that does what is due from time to time.
#[derive(Debug, Default)]
struct Housekeeper {
    end: Arc<(Mutex<bool>, Condvar)>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Node {
    /// Starts serving `config.root`: takes its lock, cleans up what a dead predecessor left
    /// mounted, mounts the blob directory, and brings up again what live leases hold. A lease
    /// that cannot be restored is a problem in [`Node::status`], not an error.
    ///
    /// # Errors
    /// [`LayerfsError::Owned`] if another process serves the directory; otherwise what stands
    /// in the way of mounting.
    pub fn start(config: NodeConfig) -> Result<Arc<Self>> {
        Self::start_with(config, &mut Sets::new(), None)
    }

    /// The same for a process with a holder, which keeps what the next one needs. With the `sets` of
    /// the process before, what that had mounted is taken over where the kernel still waits for
    /// answers: reads are served before this returns, and nothing is unmounted but what nobody knows.
    /// Takes out of `sets` what it uses.
    ///
    /// # Errors
    /// As [`Node::start`]. What was taken over then stays as it is, for another attempt.
    pub fn start_with(
        config: NodeConfig,
        sets: &mut Sets,
        keeper: Option<Arc<dyn Keeper>>,
    ) -> Result<Arc<Self>> {
        let boot = BootId::current()?;
        let boot_text = lease::boot_text()?;
        let given = &config.root;
        fs_err::create_dir_all(given).at("create", given)?;
        let root = fs_err::canonicalize(given).at("resolve", given)?;
        check_filesystem(&root)?;
        let lock = match sets.remove(holder::LOCK) {
            Some(set) => adopt::inherit_lock(&root, set)?,
            None => None,
        };
        let lock = match lock {
            Some(lock) => lock,
            None => lock::take(&root)?,
        };
        if let Some(keeper) = &keeper {
            keeper
                .keep(holder::LOCK, &serde_json::Value::Null, &[lock.as_fd()])
                .at("have the holder keep", &root.join("node.lock"))?;
        }
        let (mut problems, mut swept) = (Vec::new(), Vec::new());
        let living = match sets.remove(holder::FUSE) {
            Some(set) => adopt::living(&root, set, &mut problems)?,
            None => None,
        };
        if living.is_none() {
            if let Some(keeper) = &keeper {
                let _ = keeper.forget(holder::FUSE);
            }
            sweep::unmount_stale(&root, &mut problems, &mut swept)?;
        }
        for name in [
            "blobs",
            "cache",
            "layers",
            "stacks",
            "manifests",
            "leases",
            "profiles",
            "served",
        ] {
            if living.is_some() && name == "blobs" {
                // Mounted, and nobody there to ask what it is.
                continue;
            }
            let path = root.join(name);
            let mut builder = std::fs::DirBuilder::new();
            builder.recursive(true).mode(0o700);
            builder.create(&path).at("create", &path)?;
        }
        if living.is_none() {
            sweep::remove_temporaries(&root);
        }
        let recordings = Arc::new(Recordings::default());
        let served = Arc::new(Served::new(&root, boot));
        let registry = Arc::new(Registry::new(
            root.join("blobs"),
            config.open_mode,
            Arc::clone(&recordings),
            Arc::clone(&served),
        ));
        let fetcher = Fetcher::new(config.fetch);
        let store_leases = StoreLeases::new(&root)?;
        let learner = Learner::new(&root);
        let pins = caches::load_pins(&root, &mut problems);
        let node = Arc::new(Self {
            leases: Mutex::new(Book::new(root.join("layers"))),
            root,
            backing: backing::Backing::new(config.erofs),
            config,
            boot,
            boot_text,
            _lock: lock,
            keeper,
            leaving: AtomicBool::new(living.is_some()),
            taken_over: AtomicBool::new(living.is_some()),
            served,
            registry,
            fetcher,
            session: Mutex::new(None),
            stacking: RwLock::new(()),
            slots: Mutex::new(HashMap::new()),
            generated: Mutex::new(HashMap::new()),
            store_leases,
            parsed: Mutex::default(),
            faces: Mutex::default(),
            problems: Mutex::new(problems),
            swept: Mutex::new(swept),
            meta_fetched: AtomicU64::new(0),
            stopped: AtomicBool::new(false),
            recordings,
            prefetches: Prefetches::new(),
            learner,
            peers: Mutex::new(None),
            pins: Mutex::new(pins),
            housekeeper: Housekeeper::default(),
        });
        // From here on, dropping the node unmounts what was mounted, unless it was taken over.
        let records = match living {
            Some(living) => {
                node.resume(living)?;
                let records = node.load_leases()?;
                node.adopt_leases(records)?
            }
            None => {
                node.served.clear();
                node.begin()?;
                node.load_leases()?
            }
        };
        node.restore(records)?;
        node.leaving.store(false, Ordering::Release);
        node.fetcher
            .set_cold(Box::new(caches::Cold(Arc::downgrade(&node))));
        node.keep_house()?;
        let peers = PeerLink::start(&node.config.peers, node.store_leases.id(), &node.fetcher)?;
        *node.peers.lock() = peers;
        Ok(node)
    }

    /// The node's directory.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// How long a read waits for its bytes, at most.
    #[must_use]
    pub fn read_timeout(&self) -> Duration {
        self.fetcher.read_timeout()
    }

    /// Where peers are answered, if they are.
    #[must_use]
    pub fn peer_address(&self) -> Option<SocketAddr> {
        self.peers.lock().as_ref().and_then(PeerLink::address)
    }

    fn blobs_dir(&self) -> PathBuf {
        self.root.join("blobs")
    }

    fn slot(&self, layer: LayerId) -> Arc<Mutex<Slot>> {
        Arc::clone(self.slots.lock().entry(layer).or_default())
    }

    fn check_running(&self) -> Result<()> {
        if self.stopped.load(Ordering::Acquire) {
            return Err(LayerfsError::Stopped {
                root: self.root.clone(),
            });
        }
        Ok(())
    }

    fn problem(&self, what: String) {
        tracing::warn!(problem = %what);
        let mut problems = self.problems.lock();
        // The newest hundred say enough.
        if problems.len() >= 100 {
            problems.remove(0);
        }
        problems.push(what);
    }

    /// Lists in the status, and logs, what was found of a former life and what became of it.
    pub fn note_swept(&self, what: String) {
        tracing::info!(swept = %what);
        let mut swept = self.swept.lock();
        // The oldest say how it began.
        if swept.len() < 100 {
            swept.push(what);
        }
    }

    /// Mounts one layer without a lease: it stays until it is the longest idle of too many, or
    /// the node stops.
    ///
    /// # Errors
    /// When the layer cannot be had or mounted.
    pub fn layer_up(&self, store: &LayerStore, manifest: &Digest) -> Result<LayerHandle> {
        self.check_running()?;
        let _stacking = self.stacking.read();
        let store = StoreRef::Open(store.clone());
        self.protect(&store, &[*manifest])?;
        let parsed = self.manifest(&store, manifest)?;
        let candidate = Candidate::kept(parsed, *manifest);
        self.bring_up(&store, &candidate, &Promise::given())
    }

    fn load_leases(&self) -> Result<Vec<Record>> {
        let mut problems = Vec::new();
        let records = Record::load_all(&self.root.join("leases"), &mut problems);
        for problem in problems {
            self.problem(problem);
        }
        records
    }

    /// Mounts and serves the blob directory, and has it kept.
    fn begin(&self) -> Result<()> {
        let (session, device, copies) = serve_blobs(
            &self.config,
            &self.root,
            &self.registry,
            self.keeper.is_some(),
        )?;
        if let Some(keeper) = &self.keeper {
            self.keep_connection(keeper.as_ref(), &session, device, &copies);
        }
        *self.session.lock() = Some(session);
        Ok(())
    }

    fn restore(&self, records: Vec<Record>) -> Result<()> {
        let leases_dir = self.root.join("leases");
        for record in records {
            let id = record.spec().id.clone();
            if !record.is_alive(&self.boot_text) {
                self.note_swept(format!(
                    "lease {id} ({}): its process is dead, or the machine was restarted since",
                    record.spec().owner
                ));
                Record::remove(&leases_dir, &id)?;
                continue;
            }
            self.leases.lock().insert(record.clone());
            let restored = self.restore_lease(&record);
            if let Err(e) = &restored {
                self.problem(format!("lease {id} cannot be served: {e}"));
            }
            self.mark_lost(record, restored.is_ok());
        }
        Ok(())
    }

    fn keep_house(self: &Arc<Self>) -> Result<()> {
        let node = Arc::downgrade(self);
        let end = Arc::clone(&self.housekeeper.end);
        let pause = self.config.housekeeping;
        let thread = std::thread::Builder::new()
            .name("housekeeping".to_owned())
            .stack_size(2 << 20)
            .spawn(move || housekeeping(&node, &end, pause))
            .at("start a thread for", &self.root)?;
        *self.housekeeper.thread.lock() = Some(thread);
        Ok(())
    }

    /// One round of housekeeping: ends leases of dead processes, unmounts what is idle beyond
    /// the limit, makes the caches' state durable.
    pub fn tidy(&self) {
        let dead = self.leases.lock().dead(&self.boot_text);
        for id in dead {
            if let Err(e) = self.release(&id) {
                self.problem(format!(
                    "lease {id} of a dead process cannot be released: {e}"
                ));
            }
        }
        self.learn_due(false);
        self.end_forgotten_traces();
        if let Some(peers) = self.peers.lock().as_ref() {
            peers.listen();
        }
        self.trim_idle();
        // Not beside a stack that is on its way up: it is named already, and not mounted yet.
        if let Some(_alone) = self.stacking.try_write() {
            self.update_store_leases();
        }
        self.checkpoint();
        self.drop_pages();
    }

    /// Has the kernel let go of what it caches of blob files and cache files: the filesystem above
    /// has its own copy of what is in use.
    fn drop_pages(&self) {
        let session = self.session.lock();
        for entry in self.registry.entries() {
            match entry.blob().map(|blob| blob.cache()) {
                Some(cache) if cache.is_frozen() => cache.drop_all_pages(),
                Some(cache) => cache.drop_pages(),
                None => {}
            }
            if let Some(session) = session.as_ref()
                && entry.take_passed()
            {
                session.drop_pages(entry.ino);
            }
        }
    }

    /// Makes what the caches hold survive a crash of the machine.
    fn checkpoint(&self) {
        for entry in self.registry.entries() {
            if let Some(blob) = entry.blob()
                && let Err(e) = blob.cache().checkpoint()
            {
                self.problem(format!("cache of layer {}: {e}", entry.layer));
            }
            if let Some(blob) = entry.blob()
                && let Err(e) = blob.cache().remember_whole()
            {
                tracing::debug!(layer = %entry.layer, error = %e, "not remembered as whole");
            }
        }
    }

    /// Unmounts everything and ends. With `force`, also under the hands of users: their reads
    /// of data that is not cached by the kernel fail from then on.
    ///
    /// # Errors
    /// [`LayerfsError::InUse`] without `force` if there are leases, or if something still uses a
    /// mount; the node then goes on serving.
    pub fn stop(&self, force: bool) -> Result<()> {
        if self.stopped.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let result = self.unmount_all(force);
        if result.is_err() && !force {
            self.stopped.store(false, Ordering::Release);
            return result;
        }
        *self.housekeeper.end.0.lock() = true;
        self.housekeeper.end.1.notify_all();
        let thread = self.housekeeper.thread.lock().take();
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
        self.learn_due(true);
        self.prefetches.cancel_all();
        drop(self.peers.lock().take());
        self.fetcher.close(END_LIMIT);
        self.prefetches.close(END_LIMIT);
        self.checkpoint();
        self.update_store_leases();
        result
    }

    fn unmount_all(&self, force: bool) -> Result<()> {
        // Waits for stacks that are on their way up; new ones are refused.
        let _alone = self.stacking.write();
        if !force {
            let users: Vec<String> = self
                .leases()
                .iter()
                .map(|l| format!("{} lease {}", l.spec.owner, l.spec.id))
                .collect();
            if !users.is_empty() {
                return Err(LayerfsError::InUse {
                    what: users.join(", "),
                });
            }
        }
        let busy = |path: &Path| LayerfsError::InUse {
            what: path.display().to_string(),
        };
        let mut generated = self.generated.lock();
        let mounts: Vec<(Digest, PathBuf)> =
            generated.iter().map(|(d, p)| (*d, p.clone())).collect();
        for (digest, path) in mounts {
            if !unmount_busy(&path, force)? {
                return Err(busy(&path));
            }
            generated.remove(&digest);
        }
        drop(generated);
        let layers: Vec<LayerId> = self.slots.lock().keys().copied().collect();
        for layer in layers {
            if !self.take_down(layer, force)? {
                return Err(busy(&self.root.join("layers").join(layer.hex())));
            }
        }
        if force {
            // What nobody knew of: a layer that could not be adopted, say.
            for path in sweep::ours(&self.root)? {
                if path != self.blobs_dir() {
                    let _ = unmount_busy(&path, true);
                }
            }
        }
        let blobs = self.blobs_dir();
        if force {
            // Ends the connection: whoever still has a copy of a mount gets errors, and our
            // threads end.
            let _ = rustix::mount::unmount(&blobs, UnmountFlags::FORCE | UnmountFlags::NOFOLLOW);
        }
        // A layer's last mount may have just gone, or a new mount namespace somewhere may hold a
        // copy of it for a moment: the kernel closes the blob a little later.
        let end = Instant::now() + BUSY_LIMIT;
        while !unmount_busy(&blobs, force)? {
            if Instant::now() >= end {
                return Err(busy(&blobs));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let session = self.session.lock().take();
        let Some(session) = session else {
            return Ok(());
        };
        if !session.wait(END_LIMIT) {
            // Without force, a copy of a mount in some sandbox keeps the filesystem alive. It
            // goes on being served until this process ends.
            tracing::warn!("a mount of layer data is still in use elsewhere");
        } else if !force {
            // The filesystem is gone, and with it all open files; who aborts it cannot say that.
            self.registry.all_closed();
        }
        Ok(())
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if self.leaving.load(Ordering::Acquire) {
            return;
        }
        if let Err(e) = self.stop(true) {
            tracing::error!(root = %self.root.display(), error = %e, "node left mounts behind");
        }
    }
}

fn housekeeping(node: &Weak<Node>, end: &(Mutex<bool>, Condvar), pause: Duration) {
    loop {
        let ended = end.0.lock();
        if *ended {
            return;
        }
        let ended = end.1.wait_timeout(ended, pause);
        if *ended {
            return;
        }
        drop(ended);
        let Some(node) = node.upgrade() else { return };
        let tidied = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| node.tidy()));
        if tidied.is_err() {
            // Leases must go on being renewed.
            node.problem("a round of housekeeping panicked (a bug; see the log)".to_owned());
        }
    }
}

/// Opens, mounts and serves the blob directory. Gives its device number, and copies of its
/// descriptors if they are wanted.
fn serve_blobs(
    config: &NodeConfig,
    root: &Path,
    registry: &Arc<Registry>,
    copies: bool,
) -> Result<(Session, (u32, u32), Vec<OwnedFd>)> {
    let blobs = root.join("blobs");
    let unsupported = |e: layerpack_sys::SysError| match e.errno {
        Errno::NOENT | Errno::NODEV | Errno::NXIO => LayerfsError::Unsupported {
            feature: "FUSE",
            reason: e.to_string(),
            remedy: "load the kernel's fuse module and make /dev/fuse available",
        },
        Errno::PERM | Errno::ACCESS => LayerfsError::Unsupported {
            feature: "mounting",
            reason: e.to_string(),
            remedy: "run the daemon as root",
        },
        _ => LayerfsError::Sys(e),
    };
    let device = fusedev::open().map_err(unsupported)?;
    let source = format!("layerpack:{}", root.display());
    let source = if source.len() < 256 {
        source.as_str()
    } else {
        "layerpack"
    };
    let fd =
        mount::fuse(device.as_fd(), false, config.session.max_read, source).map_err(unsupported)?;
    let mut channels: Vec<OwnedFd> = Vec::with_capacity(config.channels.max(1));
    for _ in 1..config.channels.max(1) {
        channels.push(fusedev::clone(device.as_fd())?);
    }
    channels.push(device);
    let copies = if copies {
        channels
            .iter()
            .map(OwnedFd::try_clone)
            .collect::<std::io::Result<Vec<_>>>()
            .at("copy descriptors of", &blobs)?
    } else {
        Vec::new()
    };
    let source: Arc<dyn crate::fuse::BlobSource> = Arc::clone(registry) as _;
    let session =
        Session::start(channels, config.session, source).at("start threads for", &blobs)?;
    mount::attach(fd.as_fd(), &blobs)?;
    // A descriptor of the mount would keep it alive after unmount.
    drop(fd);
    // Asked of the mount table: the directory itself would ask us, and we may not be there.
    let device = layerpack_sys::mountinfo::read()?
        .into_iter()
        .rev()
        .find(|entry| entry.target == blobs)
        .map_or((0, 0), |entry| entry.device);
    write_read_ahead(device.0, device.1, config.read_ahead_kb);
    Ok((session, device, copies))
}

/// Sets a mount's readahead: FUSE cannot ask for more than the 128 KiB that it begins with.
fn write_read_ahead(major: u32, minor: u32, kib: u32) {
    let path = format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb");
    if let Err(e) = fs_err::write(&path, kib.to_string()) {
        // Only slower.
        tracing::debug!(error = %e, "readahead cannot be set");
    }
}

/// Unmounts; `false` if it is busy and `force` is not given. What is not mounted is fine.
fn unmount_busy(path: &Path, force: bool) -> Result<bool> {
    match mount::unmount(path, false) {
        Ok(()) => Ok(true),
        Err(e) if matches!(e.errno, Errno::INVAL | Errno::NOENT) => Ok(true),
        Err(e) if e.errno == Errno::BUSY && !force => Ok(false),
        Err(e) if e.errno == Errno::BUSY => {
            mount::unmount(path, true)?;
            Ok(true)
        }
        Err(e) => Err(e.into()),
    }
}

/// The kernel mounts no EROFS image that lies on overlayfs, EROFS or tmpfs.
fn check_filesystem(root: &Path) -> Result<()> {
    const OVERLAYFS: u64 = 0x794c_7630;
    const EROFS: u64 = 0xe0f5_e1e2;
    const TMPFS: u64 = 0x0102_1994;
    let found = rustix::fs::statfs(root).at("look at the filesystem of", root)?;
    let kind = u64::try_from(found.f_type).unwrap_or(0);
    if matches!(kind, OVERLAYFS | EROFS | TMPFS) {
        return Err(LayerfsError::Unusable {
            path: root.to_path_buf(),
            what: "it lies on overlayfs, EROFS or tmpfs, from which the kernel mounts no layers; \
                   choose a directory on a disk filesystem (ext4, xfs, btrfs)"
                .to_owned(),
        });
    }
    Ok(())
}
