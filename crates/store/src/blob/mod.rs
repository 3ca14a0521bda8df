//! The storage trait: a flat set of immutable objects. Every backend and wrapper passes the one
//! suite of [`contract`].
//!
//! What the answers mean:
//! * `None` or `false`: the backend looked and there is no such object. Never "could not look".
//! * An empty vector: the object exists and is empty (or nothing has the prefix, for `list`).
//! * An error: unknown. The object may or may not exist; after a failed write it either is
//!   complete or is not visible, never half of it.

mod cache;
pub mod contract;
#[cfg(test)]
mod crash;
mod disk;
mod fault;
mod file;
mod http;
mod limit;
mod mem;
mod mirror;
mod oci;
mod open;
pub mod remote;
mod retry;
mod s3;
mod span;

use std::fmt;
use std::ops::Range;
use std::time::SystemTime;

pub use cache::CachedStore;
pub use fault::{Fault, FaultStore, Operation};
pub use file::FileStore;
pub use http::HttpStore;
pub use limit::{LimitedStore, RateLimits};
pub use mem::MemStore;
pub use mirror::MirrorStore;
pub use oci::OciStore;
pub use open::{
    OpenOptions, ReadCacheOptions, S3Credentials, addresses, has_scheme, open, open_url,
};
pub use remote::Timeouts;
pub use retry::{RetryPolicy, RetryStore};
pub use s3::S3Store;
pub use span::{Disagreement, Leftovers, Span};

use crate::error::Result;
use crate::key::Key;

/// What to do if the object exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PutMode {
    /// Leave it as it is and answer [`PutOutcome::Exists`]. Of several writers one wins, if the
    /// backend [decides races](BlobStore::decides_races).
    IfAbsent,
    /// Replace it in one step: a reader sees the old bytes or the new.
    Overwrite,
}

/// What a write did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PutOutcome {
    /// The object now has the bytes given.
    Created,
    /// The object existed and was left as it is.
    Exists,
}

/// An object in a list.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ObjectInfo {
    /// The object's key.
    pub key: Key,
    /// Its size in bytes.
    pub size: u64,
    /// When it was written last, by the store's own clock; `None` where the backend does not say.
    pub modified: Option<SystemTime>,
}

/// A set of immutable objects. Methods block; a remote backend hides its own runtime.
pub trait BlobStore: Send + Sync + fmt::Debug {
    /// The whole object, or `None` if there is none.
    ///
    /// # Errors
    /// [`TooLarge`](crate::StoreError::TooLarge) if it has more than `max_len` bytes, before reading it.
    fn get(&self, key: &Key, max_len: u64) -> Result<Option<Vec<u8>>>;

    /// Exactly the bytes of `range`. An empty range is allowed within the object.
    ///
    /// # Errors
    /// [`Missing`](crate::StoreError::Missing) without the object, [`Corrupt`](crate::StoreError::Corrupt) if it ends before
    /// `range.end`.
    fn get_range(&self, key: &Key, range: Range<u64>) -> Result<Vec<u8>>;

    /// Writes an object. Durable on return, whatever the outcome: also an object that existed is.
    ///
    /// # Errors
    /// [`NoSpace`](crate::StoreError::NoSpace) if the store is full.
    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<PutOutcome>;

    /// Makes an object of at most `max_len` bytes durable that is there: its writer may not have come
    /// so far. `false`: it is not there.
    ///
    /// # Errors
    /// As [`BlobStore::get`] and [`BlobStore::put`].
    fn settle(&self, key: &Key, max_len: u64) -> Result<bool> {
        match self.get(key, max_len)? {
            Some(bytes) => self.put(key, &bytes, PutMode::IfAbsent).map(|_| true),
            None => Ok(false),
        }
    }

    /// Begins an object whose bytes and key come later.
    ///
    /// # Errors
    /// As [`BlobStore::put`].
    fn put_stream(&self) -> Result<Box<dyn BlobWriter + '_>>;

    /// Size of the object in bytes, or `None` if there is none.
    ///
    /// # Errors
    /// If the backend fails.
    fn size(&self, key: &Key) -> Result<Option<u64>>;

    /// All objects whose key begins with `prefix` (any string, also part of a segment; empty: all),
    /// sorted by key. Objects written or deleted meanwhile may or may not be listed.
    ///
    /// # Errors
    /// If the backend fails.
    fn list(&self, prefix: &str) -> Result<Vec<ObjectInfo>>;

    /// Deletes the object; `false` if there was none. Durable on return.
    ///
    /// # Errors
    /// If the backend fails.
    fn delete(&self, key: &Key) -> Result<bool>;

    /// Writes or replaces an object that a crash of the machine holding the store may lose: one
    /// that tells what a living process does. Visible to others on return.
    ///
    /// # Errors
    /// As [`BlobStore::put`].
    fn put_volatile(&self, key: &Key, bytes: &[u8]) -> Result<()> {
        self.put(key, bytes, PutMode::Overwrite).map(|_| ())
    }

    /// As [`BlobStore::delete`], but a crash of the machine holding the store may bring it back,
    /// and the answer may be `true` where there was none: a backend need not look.
    ///
    /// # Errors
    /// If the backend fails.
    fn delete_volatile(&self, key: &Key) -> Result<bool> {
        self.delete(key)
    }

    /// Reads again what came and was not what it must be: its digest or its checksum is wrong. Each
    /// answer goes to `accept`, with the address that it is from, until one is accepted; the
    /// answer is whether one was. A store with several addresses asks each of them, a remote one
    /// asks twice; none takes an answer from a cache. Only who knows what the bytes must be can
    /// call it, so reads do not do this by themselves.
    ///
    /// # Errors
    /// If nothing was accepted and an address failed.
    fn reread(
        &self,
        key: &Key,
        span: &Span,
        accept: &mut dyn FnMut(&[u8], &str) -> bool,
    ) -> Result<bool> {
        Ok(span
            .read(self, key)?
            .is_some_and(|bytes| accept(&bytes, &self.url())))
    }

    /// Objects that one address of the store had wrong or not at all and another had right, as far
    /// as reads came upon them since the last call. Empty for a store of one address.
    fn take_disagreements(&self) -> Vec<Disagreement> {
        Vec::new()
    }

    /// Addresses that come before the one that is believed and are no store, each in a line for
    /// people. Empty for a store of one address, and while it cannot be told.
    fn passed_over(&self) -> Vec<String> {
        Vec::new()
    }

    /// What lies in the store that was to become objects, of all processes. With `remove`, what
    /// processes of this machine left that are dead is removed, and what is older than a day.
    ///
    /// # Errors
    /// If the backend fails.
    fn leftovers(&self, remove: bool) -> Result<Leftovers> {
        let _ = remove;
        Ok(Leftovers::default())
    }

    /// Room that is kept for collecting garbage on a full disk: with `keep` it is taken if it is
    /// not there, else it is given up, for the caller to use. Whether something changed. A store
    /// whose room is not its own has none.
    ///
    /// # Errors
    /// If the backend fails.
    fn reserve(&self, keep: bool) -> Result<bool> {
        let _ = keep;
        Ok(false)
    }

    /// The store's address, for messages and for opening it again.
    fn url(&self) -> String;

    /// Of a store with several addresses the one that is believed and listed, and that sizes come
    /// from; for messages.
    fn first_url(&self) -> String {
        self.url()
    }

    /// Whether [`PutMode::IfAbsent`] decides between writers at once: exactly one is told
    /// [`PutOutcome::Created`]. Else two may be, and the last one's bytes stay; who cares makes
    /// sure of it otherwise (FORMAT.md, "Claims"). `false` is always a safe answer.
    fn decides_races(&self) -> bool {
        false
    }

    /// Whether the place has nothing of a store, so that a write would make another one there: a
    /// directory that was moved away, a filesystem that is not mounted. `false` where that costs a
    /// request, or cannot be.
    fn is_away(&self) -> bool {
        false
    }
}

/// An object being written. Dropped without [`BlobWriter::commit`], nothing of it is visible.
pub trait BlobWriter: Send {
    /// Appends bytes.
    ///
    /// # Errors
    /// As [`BlobStore::put`]; the writer is then of no use.
    fn write(&mut self, bytes: &[u8]) -> Result<()>;

    /// Makes the object visible under `key`. Durable on return.
    ///
    /// # Errors
    /// As [`BlobStore::put`].
    fn commit(self: Box<Self>, key: &Key, mode: PutMode) -> Result<PutOutcome>;
}
