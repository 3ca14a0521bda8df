//! A wrapper that makes the nth call fail. A sweep over n is how callers are tested: fail call 1,
//! then 2, until a run ends without the fault having fired.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::{BlobStore, BlobWriter, ObjectInfo, PutMode, PutOutcome};
use crate::error::{Result, StoreError};
use crate::key::Key;

/// What happens to the chosen call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fault {
    /// The call fails and has no effect.
    Error,
    /// The call has its effect, its answer is lost: the caller sees an error.
    LostReply,
    /// A write fails because the store is full; other calls are as they are.
    NoSpace,
    /// A read answers with its last byte cut off; other calls are as they are.
    Truncate,
    /// A read answers with one bit changed; other calls are as they are.
    Corrupt,
    /// A read answers that there is no such object; other calls are as they are.
    Missing,
    /// The call and all that follow fail: the process was killed at this point.
    Crash,
}

impl Fault {
    /// Every fault.
    pub const ALL: [Self; 7] = [
        Self::Error,
        Self::LostReply,
        Self::NoSpace,
        Self::Truncate,
        Self::Corrupt,
        Self::Missing,
        Self::Crash,
    ];
}

/// A store whose nth call, counted from 1 over all methods and writers, suffers a fault.
#[derive(Debug)]
pub struct FaultStore {
    inner: Arc<dyn BlobStore>,
    fault: Fault,
    nth: u64,
    calls: AtomicU64,
    fired: AtomicBool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Class {
    Read,
    Write,
}

impl FaultStore {
    /// Makes call `nth` (from 1) of the wrapped store suffer `fault`.
    #[must_use]
    pub fn fail_nth(inner: Arc<dyn BlobStore>, nth: u64, fault: Fault) -> Self {
        Self {
            inner,
            fault,
            nth,
            calls: AtomicU64::new(0),
            fired: AtomicBool::new(false),
        }
    }

    /// True once the fault changed a call's result.
    #[must_use]
    pub fn fired(&self) -> bool {
        self.fired.load(Ordering::SeqCst)
    }

    /// Calls so far.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::SeqCst)
    }

    fn injected(&self, key: &str, operation: &'static str) -> StoreError {
        StoreError::Io {
            operation,
            store: self.inner.url(),
            key: key.to_owned(),
            source: io::Error::other("injected fault"),
        }
    }

    /// Counts a call and lets the fault act on it.
    fn call<T>(
        &self,
        class: Class,
        key: &str,
        operation: &'static str,
        act: impl FnOnce() -> Result<T>,
        bend: impl FnOnce(T, Fault) -> Option<Result<T>>,
    ) -> Result<T> {
        let n = self.calls.fetch_add(1, Ordering::SeqCst) + 1;
        let hit = n == self.nth || (n > self.nth && self.fault == Fault::Crash);
        if !hit {
            return act();
        }
        match (self.fault, class) {
            (Fault::Error | Fault::Crash, _) => {
                self.fired.store(true, Ordering::SeqCst);
                Err(self.injected(key, operation))
            }
            (Fault::LostReply, _) => {
                self.fired.store(true, Ordering::SeqCst);
                act().and_then(|_| Err(self.injected(key, operation)))
            }
            (Fault::NoSpace, Class::Write) => {
                self.fired.store(true, Ordering::SeqCst);
                Err(StoreError::NoSpace {
                    store: self.inner.url(),
                    key: key.to_owned(),
                    source: io::Error::from(io::ErrorKind::StorageFull),
                })
            }
            (Fault::Truncate | Fault::Corrupt | Fault::Missing, Class::Read) => {
                let value = act()?;
                match bend(value, self.fault) {
                    Some(bent) => {
                        self.fired.store(true, Ordering::SeqCst);
                        bent
                    }
                    // The fault has no meaning for this answer: nothing to bend in it.
                    None => Err(self.injected(key, operation)),
                }
            }
            (Fault::NoSpace, Class::Read)
            | (Fault::Truncate | Fault::Corrupt | Fault::Missing, Class::Write) => act(),
        }
    }
}

fn bend_bytes(mut bytes: Vec<u8>, fault: Fault) -> Vec<u8> {
    if fault == Fault::Truncate {
        bytes.pop();
    } else {
        let middle = bytes.len() / 2;
        if let Some(byte) = bytes.get_mut(middle) {
            *byte ^= 0x10;
        }
    }
    bytes
}

impl BlobStore for FaultStore {
    fn get(&self, key: &Key, max_len: u64) -> Result<Option<Vec<u8>>> {
        let act = || self.inner.get(key, max_len);
        self.call(
            Class::Read,
            key.as_str(),
            "read",
            act,
            |value, fault| match fault {
                Fault::Missing => Some(Ok(None)),
                _ => Some(Ok(value.map(|bytes| bend_bytes(bytes, fault)))),
            },
        )
    }

    fn get_range(&self, key: &Key, range: Range<u64>) -> Result<Vec<u8>> {
        let act = || self.inner.get_range(key, range.clone());
        self.call(
            Class::Read,
            key.as_str(),
            "read",
            act,
            |bytes, fault| match fault {
                Fault::Missing => Some(Err(StoreError::Missing {
                    store: self.inner.url(),
                    key: key.as_str().to_owned(),
                })),
                _ => Some(Ok(bend_bytes(bytes, fault))),
            },
        )
    }

    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<PutOutcome> {
        let act = || self.inner.put(key, bytes, mode);
        self.call(Class::Write, key.as_str(), "write", act, |_, _| None)
    }

    fn put_stream(&self) -> Result<Box<dyn BlobWriter + '_>> {
        let act = || self.inner.put_stream();
        let inner = self.call(Class::Write, "a new object", "write", act, |_, _| None)?;
        Ok(Box::new(FaultWriter { store: self, inner }))
    }

    fn size(&self, key: &Key) -> Result<Option<u64>> {
        let act = || self.inner.size(key);
        self.call(
            Class::Read,
            key.as_str(),
            "read",
            act,
            |value, fault| match fault {
                Fault::Missing => Some(Ok(None)),
                _ => Some(Ok(value.map(|n| n.saturating_sub(1)))),
            },
        )
    }

    fn list(&self, prefix: &str) -> Result<Vec<ObjectInfo>> {
        let act = || self.inner.list(prefix);
        self.call(Class::Read, prefix, "list", act, |mut objects, fault| {
            if fault == Fault::Missing {
                objects.clear();
            } else {
                objects.pop();
            }
            Some(Ok(objects))
        })
    }

    fn delete(&self, key: &Key) -> Result<bool> {
        self.call(
            Class::Write,
            key.as_str(),
            "delete",
            || self.inner.delete(key),
            |_, _| None,
        )
    }

    fn url(&self) -> String {
        self.inner.url()
    }

    fn decides_races(&self) -> bool {
        self.inner.decides_races()
    }
}

struct FaultWriter<'a> {
    store: &'a FaultStore,
    inner: Box<dyn BlobWriter + 'a>,
}

impl BlobWriter for FaultWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let inner = &mut self.inner;
        self.store.call(
            Class::Write,
            "a new object",
            "write",
            || inner.write(bytes),
            |(), _| None,
        )
    }

    fn commit(self: Box<Self>, key: &Key, mode: PutMode) -> Result<PutOutcome> {
        let Self { store, inner } = *self;
        store.call(
            Class::Write,
            key.as_str(),
            "write",
            || inner.commit(key, mode),
            |_, _| None,
        )
    }
}
