//! A whole filesystem by FUSE: a stack of layers, merged and served by this process.
//!
//! For where the kernel must not, or cannot, mount EROFS: no privilege is needed beyond
//! `fusermount3`, no daemon, and no particular filesystem under the cache. The tree is read from
//! the layers' metadata and merged here; contents come through the same cache and the same
//! verified fetches as a node's.
//!
//! It is slower than the kernel's own EROFS wherever the kernel has nothing cached yet, and the
//! tree takes memory in this process. What it has cached, the kernel serves at its own speed.

mod attach;
mod layers;
mod merge;
mod server;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use fuser::{Config, SessionACL};
use layerpack_store::{Digest, LayerId, LayerStore, Manifest, NodeLease, StoreError, at_once};

use crate::StoreOpener;
use crate::cache::BootId;
use crate::error::{IoContext, LayerfsError, Result};
use crate::fetch::{Cancel, FetchConfig, Fetcher};
use crate::node::{PrefetchMode, PrefetchSpec, PrefetchTask};

pub use attach::unmount;

use attach::Connection;
use merge::Merged;
use server::{Server, Shared};

/// What the mount table shows after `fuse.`: tells these mounts from a node's own.
pub const SUBTYPE: &str = "layerpack-tree";

/// Layers that are opened at once.
const LAYERS_AT_ONCE: usize = 4;
/// How long a lease in the store outlives its mount.
const TTL: Duration = Duration::from_secs(24 * 60 * 60);
/// How long a mount waits for a collector that deletes the layer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time between two rounds of what is due from time to time.
const HOUSEKEEPING: Duration = Duration::from_secs(15);
/// Longest wait for threads at the end.
const END_LIMIT: Duration = Duration::from_secs(10);

/// How a stack is served.
#[derive(Clone)]
pub struct WholeConfig {
    /// Directory for cached metadata and data. It is created for the caller alone; several
    /// mounts, in several processes, may share it.
    pub cache: PathBuf,
    /// Limits of fetching.
    pub fetch: FetchConfig,
    /// Threads that answer the kernel; 0: as many as there are processors, within reason.
    pub threads: usize,
    /// Threads that wait for the store, at most; they exist only while there is work.
    pub wait_threads: usize,
    /// Let other users in; the kernel then checks modes, owners and ACLs. Without it only the
    /// mounting user sees the mount, and may read everything in it.
    pub allow_other: bool,
    /// What to fetch before it is read.
    pub prefetch: PrefetchSpec,
    /// Bytes a second that a fill of whole layers fetches, at most.
    pub fill_bytes_per_second: Option<u64>,
    /// Opens stores by address.
    pub open_store: StoreOpener,
}

impl std::fmt::Debug for WholeConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WholeConfig")
            .field("cache", &self.cache)
            .field("threads", &self.threads)
            .field("allow_other", &self.allow_other)
            .finish_non_exhaustive()
    }
}

impl WholeConfig {
    /// Settings that suit a machine of a few cores.
    #[must_use]
    pub fn recommended(cache: PathBuf) -> Self {
        Self {
            cache,
            fetch: FetchConfig::RECOMMENDED,
            threads: 0,
            wait_threads: 32,
            allow_other: false,
            prefetch: PrefetchSpec::default(),
            fill_bytes_per_second: Some(64 << 20),
            open_store: Arc::new(|url| layerpack_store::open_url(url).map(LayerStore::new)),
        }
    }
}

/// A stack that is ready to be mounted.
#[derive(Debug)]
pub struct Whole {
    shared: Arc<Shared>,
    config: WholeConfig,
    fetcher: Arc<Fetcher>,
    places: Vec<layers::Place>,
    lease: Option<NodeLease>,
    /// Why there is none.
    unleased: Option<Unleased>,
    manifests: BTreeSet<Digest>,
    store: LayerStore,
    /// Bottom first.
    layers: Vec<LayerId>,
}

impl Whole {
    /// Reads and verifies the metadata of the layers given, bottom first, merges it, and opens
    /// their data. No file contents are read.
    ///
    /// # Errors
    /// When a layer cannot be had or is damaged, the cache cannot be used, or a collector is
    /// deleting one of the layers just now.
    pub fn open(
        store: &LayerStore,
        layers: &[(Digest, Manifest)],
        config: WholeConfig,
    ) -> Result<Self> {
        if layers.is_empty() || layers.len() > usize::from(u16::MAX) {
            return Err(LayerfsError::Stack {
                what: format!("there are {} of them", layers.len()),
            });
        }
        layers::private_dir(&config.cache)?;
        let manifests: BTreeSet<Digest> = layers.iter().map(|(digest, _)| *digest).collect();
        let (lease, unleased) = match protect(store, &manifests)? {
            Ok(lease) => (Some(lease), None),
            Err(unleased) => (None, Some(unleased)),
        };
        let boot = BootId::current()?;
        let fetcher = Fetcher::new(config.fetch);
        let mut trees = Vec::with_capacity(layers.len());
        let mut blobs = Vec::with_capacity(layers.len());
        let mut places = Vec::with_capacity(layers.len());
        let opened = at_once(layers, LAYERS_AT_ONCE, |(_, manifest)| {
            layers::open(
                store,
                manifest,
                &config.cache,
                boot,
                &fetcher,
                &config.open_store,
            )
        })?;
        for opened in opened {
            trees.push(opened.tree);
            blobs.push(opened.blob);
            places.push(opened.place);
        }
        let merged = Merged::new(&trees).map_err(|e| LayerfsError::Stack {
            what: format!("{e}; verify the layers in their store"),
        })?;
        drop(trees);
        Ok(Self {
            shared: Arc::new(Shared::new(
                merged,
                blobs,
                config.wait_threads,
                config.allow_other,
            )),
            config,
            fetcher,
            places,
            lease,
            unleased,
            manifests,
            store: store.clone(),
            layers: layers.iter().map(|(_, m)| m.layer_id()).collect(),
        })
    }

    /// Begins to fetch ahead, if anything is to be.
    fn prefetch(&self, directory: &Path) -> Result<Option<Prefetching>> {
        let spec = self.config.prefetch.clone();
        if matches!(spec.mode, PrefetchMode::None | PrefetchMode::Meta) {
            return Ok(None);
        }
        let cancel = Arc::new(Cancel::default());
        let blobs = self.shared.blobs();
        let task = PrefetchTask {
            store: self.store.clone(),
            lease: directory.display().to_string(),
            spec,
            layers: self.layers.clone(),
            blobs: blobs.map(|b| (b.layer(), Arc::clone(b))).collect(),
            rate: self.config.fill_bytes_per_second,
            learnt: None,
            cancel: Arc::clone(&cancel),
        };
        let thread = std::thread::Builder::new()
            .name("prefetch".to_owned())
            .spawn(move || task.run())
            .at("start a thread for", directory)?;
        Ok(Some(Prefetching {
            cancel,
            _thread: thread,
        }))
    }

    /// Mounts it on a directory. When this returns, the mount is there and served.
    ///
    /// # Errors
    /// [`LayerfsError::Unsupported`] if FUSE or `fusermount3` is missing or refuses.
    pub fn mount(self, directory: &Path) -> Result<WholeSession> {
        let acl = if self.config.allow_other {
            SessionACL::All
        } else {
            SessionACL::Owner
        };
        let mut options = Config::default();
        options.acl = acl;
        let processors = std::thread::available_parallelism().map_or(2, usize::from);
        options.n_threads = Some(match self.config.threads {
            0 => processors.clamp(2, 8),
            given => given,
        });
        // Where only fusermount3 may open the device, the threads share one descriptor.
        options.clone_fd = fs_err::OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/fuse")
            .is_ok();
        let mut connection = Connection::mount(directory, self.config.allow_other)?;
        let device = connection
            .device
            .try_clone()
            .at("use the connection of", directory)?;
        let server = Server(Arc::clone(&self.shared));
        let started = fuser::Session::from_fd(server, device, acl, options)
            .and_then(fuser::Session::spawn)
            .at("serve", directory)
            .and_then(|session| connection.attach(directory).map(|()| session));
        let session = match started {
            Ok(session) => session,
            Err(e) => {
                connection.abandon(directory);
                return Err(e);
            }
        };
        // The session has its own descriptor.
        drop(connection);
        let prefetching = self.prefetch(directory)?;
        let (end, ended) = mpsc::channel();
        let keeper = Keeper {
            shared: Arc::clone(&self.shared),
            lease: self.lease,
            manifests: self.manifests,
        };
        let housekeeper = std::thread::Builder::new()
            .name("housekeeping".to_owned())
            .spawn(move || keeper.run(&ended))
            .at("start a thread for", directory)?;
        Ok(WholeSession {
            session: Some(session),
            directory: directory.to_owned(),
            shared: self.shared,
            fetcher: self.fetcher,
            _places: self.places,
            unleased: self.unleased,
            prefetching,
            end: Some(end),
            housekeeper: Some(housekeeper),
        })
    }
}

/// Why a store keeps the layers for nobody.
#[derive(Debug)]
struct Unleased {
    store: String,
    error: StoreError,
}

/// What is fetched ahead. It ends with the mount.
#[derive(Debug)]
struct Prefetching {
    cancel: Arc<Cancel>,
    /// Not waited for: a store that hangs must not keep a mount from ending.
    _thread: JoinHandle<()>,
}

impl Drop for Prefetching {
    fn drop(&mut self) {
        self.cancel.cancel();
    }
}

/// Has the store keep the layers. One that takes no lease is no error.
fn protect(
    store: &LayerStore,
    manifests: &BTreeSet<Digest>,
) -> Result<std::result::Result<NodeLease, Unleased>> {
    let random = fs_err::read_to_string("/proc/sys/kernel/random/uuid")
        .at("read", Path::new("/proc/sys/kernel/random/uuid"))?;
    let id: String = Digest::of(random.as_bytes())
        .hex()
        .chars()
        .take(32)
        .collect();
    let host = fs_err::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let who = format!(
        "mount --fuse of user {} at {}",
        rustix::process::getuid().as_raw(),
        host.trim()
    );
    let wanted: Vec<Digest> = manifests.iter().copied().collect();
    let made = NodeLease::new(store, &id, who, TTL, PATIENCE)
        .and_then(|lease| lease.hold(&wanted).map(|()| lease));
    match made {
        Ok(lease) => Ok(Ok(lease)),
        Err(error @ StoreError::Collecting { .. }) => Err(LayerfsError::Store(error)),
        Err(error) => Ok(Err(Unleased {
            store: store.url().to_owned(),
            error,
        })),
    }
}

/// Does what is due from time to time.
struct Keeper {
    shared: Arc<Shared>,
    lease: Option<NodeLease>,
    manifests: BTreeSet<Digest>,
}

impl Keeper {
    fn run(self, ended: &mpsc::Receiver<()>) {
        while let Err(mpsc::RecvTimeoutError::Timeout) = ended.recv_timeout(HOUSEKEEPING) {
            self.checkpoint();
            if let Some(lease) = &self.lease
                && let Err(e) = lease.update(self.manifests.clone())
            {
                tracing::warn!(error = %e, "the lease in the store cannot be renewed");
            }
        }
        self.checkpoint();
        if let Some(lease) = &self.lease
            && let Err(e) = lease.update(BTreeSet::new())
        {
            tracing::debug!(error = %e, "the lease in the store is left to expire");
        }
    }

    fn checkpoint(&self) {
        for blob in self.shared.blobs() {
            if let Err(e) = blob.cache().checkpoint() {
                tracing::warn!(layer = %blob.layer(), error = %e, "a cache cannot be synced");
            }
            if let Err(e) = blob.cache().remember_whole() {
                tracing::debug!(layer = %blob.layer(), error = %e, "not remembered as whole");
            }
        }
    }
}

/// A mount that is being served.
#[derive(Debug)]
pub struct WholeSession {
    session: Option<fuser::BackgroundSession>,
    directory: PathBuf,
    shared: Arc<Shared>,
    fetcher: Arc<Fetcher>,
    /// Locks of the caches, held to the end.
    _places: Vec<layers::Place>,
    unleased: Option<Unleased>,
    prefetching: Option<Prefetching>,
    end: Option<mpsc::Sender<()>>,
    housekeeper: Option<JoinHandle<()>>,
}

impl WholeSession {
    /// Waits until the mount is gone: by [`unmount`], `fusermount3 -u` or `umount`.
    ///
    /// # Errors
    /// When the descriptor of the mount failed.
    pub fn wait(mut self) -> Result<()> {
        // Said here, where a server in the background has its log: it is no news for a terminal.
        if let Some(Unleased { store, error }) = &self.unleased {
            tracing::info!(%store, %error,
                "the store takes no lease: keep its garbage collector from layers that are mounted here");
        }
        match self.session.take() {
            Some(session) => session.join().at("serve", Path::new("/dev/fuse")),
            None => Ok(()),
        }
    }
}

impl Drop for WholeSession {
    fn drop(&mut self) {
        drop(self.prefetching.take());
        if self.session.take().is_some() && unmount(&self.directory, false).is_err() {
            let _ = unmount(&self.directory, true);
        }
        self.fetcher.close(END_LIMIT);
        self.shared.close(END_LIMIT);
        drop(self.end.take());
        if let Some(thread) = self.housekeeper.take() {
            let _ = thread.join();
        }
    }
}
