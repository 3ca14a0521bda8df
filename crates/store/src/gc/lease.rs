//! Leases: objects by which the users of a store tell collectors what they rely on.
//!
//! A *session* is a writer's: it says which condemned lists the writer knows, and which condemned
//! objects it claims back. A *node*'s lease names the manifests that it has mounted. A lease lives
//! as long as its holder renews it; its age is told by the store's clock where the store has one.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::sealed::{seal, unseal};
use super::session::SESSION_TTL;
use crate::blob::{BlobStore, ObjectInfo, PutMode, Span};
use crate::digest::Digest;
use crate::error::{FormatError, Result, StoreError};
use crate::holder::Holder;
use crate::key::Key;
use crate::layer::again::read_checked;

pub(super) const NAME: &str = "lease";
/// Largest lease in bytes.
const MAX_LEASE: u64 = 16 << 20;
/// No lease lasts longer without being renewed, whatever it says.
const MAX_TTL: Duration = Duration::from_secs(2 * 24 * 60 * 60);
/// Age of a lease whose holder is dead at which no request of it is under way any more.
const ABANDONED: Duration = Duration::from_secs(SESSION_TTL.as_secs() / 5);
/// Where the store has no clock, the holder's and the reader's clocks may differ by this much.
const SKEW: Duration = Duration::from_secs(24 * 60 * 60);

/// What holds a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LeaseKind {
    /// A node that has layers mounted.
    Node,
    /// A writer: of a layer, a copy, a repack.
    Session,
    /// A collector. Protects nothing; its age is the store's time.
    Collector,
}

/// A lease as stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// 1.
    format: u32,
    /// What holds it.
    pub kind: LeaseKind,
    /// Who holds it, for people.
    pub who: String,
    /// When it was taken: seconds since 1970 by the holder's clock.
    pub started: u64,
    /// When it was renewed last, by the same clock.
    pub renewed: u64,
    /// Seconds that it lasts without being renewed.
    pub ttl: u64,
    /// Which process holds a session's or a collector's: FORMAT.md, "Lease".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    holder: Option<String>,
    /// Digests of the manifests that it keeps, with all that they name.
    #[serde(default)]
    pub manifests: BTreeSet<Digest>,
    /// Condemned lists that a session has read.
    #[serde(default)]
    pub(super) knows: BTreeSet<String>,
    /// Condemned objects that a session relies on all the same.
    #[serde(default)]
    pub(super) claims: BTreeSet<String>,
}

impl Lease {
    pub(super) fn new(kind: LeaseKind, who: String, ttl: Duration) -> Self {
        let now = unix_now();
        Self {
            format: 1,
            kind,
            who,
            started: now,
            renewed: now,
            ttl: ttl.as_secs().max(1),
            holder: match kind {
                LeaseKind::Node => None, // its mounts outlive the process
                LeaseKind::Session | LeaseKind::Collector => {
                    Holder::own().map(|holder| holder.to_string())
                }
            },
            manifests: BTreeSet::new(),
            knows: BTreeSet::new(),
            claims: BTreeSet::new(),
        }
    }

    pub(super) fn ttl(&self) -> Duration {
        Duration::from_secs(self.ttl).min(MAX_TTL)
    }

    /// Writes it with the present time. A node's outlives a crash of its machine, since the node's
    /// mounts come back. Nobody is left who needs a session after a crash, so that it costs no
    /// waiting for the disk.
    pub(super) fn put(&mut self, blobs: &dyn BlobStore, key: &Key) -> Result<()> {
        self.renewed = unix_now();
        let bytes = seal(NAME, self)?;
        match self.kind {
            LeaseKind::Node => blobs.put(key, &bytes, PutMode::Overwrite).map(|_| ()),
            LeaseKind::Session | LeaseKind::Collector => blobs.put_volatile(key, &bytes),
        }
    }

    fn parse(bytes: &[u8]) -> Result<Self, FormatError> {
        let lease: Self = unseal(NAME, bytes)?;
        if lease.format != 1 {
            let what = format!("its format is {}, known is 1", lease.format);
            return Err(FormatError::newer(NAME, what));
        }
        Ok(lease)
    }

    /// Whether its holder is a process of this machine that is dead, and nothing that it asked for
    /// can take effect any more: where the store's own writes end with the process, at once, else
    /// after it must have renewed the lease. `false` in doubt.
    fn is_abandoned(
        &self,
        blobs: &dyn BlobStore,
        modified: Option<SystemTime>,
        now: Option<SystemTime>,
    ) -> bool {
        let holder = self
            .holder
            .as_deref()
            .and_then(|text| text.parse::<Holder>().ok());
        if self.kind == LeaseKind::Node || !holder.is_some_and(|holder| holder.is_dead()) {
            return false;
        }
        let age = now.zip(modified);
        let age = age.and_then(|(now, modified)| now.duration_since(modified).ok());
        blobs.decides_races() || age.is_some_and(|age| age > ABANDONED)
    }

    /// Whether its holder has not renewed it in time. `false` in doubt.
    fn has_expired(&self, modified: Option<SystemTime>, now: Option<SystemTime>) -> bool {
        let ttl = self.ttl();
        match (modified, now) {
            (Some(modified), Some(now)) => now.duration_since(modified).is_ok_and(|age| age > ttl),
            _ => unix_now().saturating_sub(self.renewed) > (ttl + SKEW).as_secs(),
        }
    }
}

/// Seconds since 1970 by this machine's clock.
pub(super) fn unix_now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_secs())
}

/// 128 bits in hexadecimal that nobody else has.
pub(super) fn random_id() -> Result<String> {
    let mut bytes = [0_u8; 16];
    getrandom::fill(&mut bytes).map_err(|e| StoreError::InvalidInput {
        object: "an identifier".to_owned(),
        what: format!("the system has no random numbers: {e}"),
    })?;
    Ok(hex::encode(bytes))
}

/// This machine and process, for people.
pub(super) fn this_process() -> String {
    let name = rustix::system::uname();
    let host = name.nodename().to_string_lossy().into_owned();
    format!("{host} process {}", std::process::id())
}

/// All leases of a store.
#[derive(Debug, Default)]
pub(super) struct Leases {
    /// By key.
    pub(super) live: BTreeMap<Key, Lease>,
    /// Not renewed in time.
    pub(super) expired: Vec<Key>,
    /// What cannot be read counts as used: one line each, with the key.
    pub(super) unknown: Vec<(Key, String)>,
}

impl Leases {
    /// Reads them; `now` is the store's time, if it has one.
    pub(super) fn read(blobs: &dyn BlobStore, now: Option<SystemTime>) -> Result<Self> {
        let mut leases = Self::default();
        for ObjectInfo { key, modified, .. } in blobs.list("leases/")? {
            let whole = Span::Whole { max_len: MAX_LEASE };
            let collector = key.as_str().starts_with("leases/collector-");
            let read = read_checked(blobs, &key, &whole, &mut |bytes| {
                // A collector on a full disk writes an empty one, for its age: it protects nothing.
                if collector && bytes.is_empty() {
                    return Ok(None);
                }
                Lease::parse(bytes)
                    .map(Some)
                    .map_err(|e| StoreError::format(&blobs.url(), key.as_str(), &e))
            });
            match read {
                Ok(None) => {} // released meanwhile
                Ok(Some(None)) => {
                    if is_too_old(&key, modified, now) {
                        leases.expired.push(key);
                    }
                }
                Ok(Some(Some(lease)))
                    if lease.has_expired(modified, now)
                        || lease.is_abandoned(blobs, modified, now) =>
                {
                    leases.expired.push(key);
                }
                Ok(Some(Some(lease))) => {
                    leases.live.insert(key, lease);
                }
                Err(error) if error.is_damage() && is_too_old(&key, modified, now) => {
                    leases.expired.push(key);
                }
                Err(error) => leases.unknown.push((key, error.to_string())),
            }
        }
        Ok(leases)
    }
}

/// Whether a lease is not written durably: a crash of the machine leaves damaged ones.
pub(super) fn is_volatile(key: &Key) -> bool {
    key.as_str().starts_with("leases/session-") || key.as_str().starts_with("leases/collector-")
}

/// Whether a lease that cannot be read would have expired whatever it says.
fn is_too_old(key: &Key, modified: Option<SystemTime>, now: Option<SystemTime>) -> bool {
    let longest = if is_volatile(key) {
        SESSION_TTL
    } else {
        MAX_TTL
    };
    modified
        .zip(now)
        .is_some_and(|(modified, now)| now.duration_since(modified).is_ok_and(|age| age > longest))
}

/// The store's time, told by an object that was written `ago`.
pub(super) fn store_time(
    blobs: &dyn BlobStore,
    key: &Key,
    ago: Duration,
) -> Result<Option<SystemTime>> {
    let listed = blobs.list(key.as_str())?;
    let own = listed.into_iter().find(|object| &object.key == key);
    Ok(own.and_then(|object| object.modified?.checked_add(ago)))
}
