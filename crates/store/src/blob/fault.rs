//! A wrapper that makes the nth call fail. A sweep over n is how callers are tested: fail call 1,
//! then 2, until a run ends without the fault having fired. Calls are counted over all methods, or
//! of one method alone.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use super::{
    BlobStore, BlobWriter, Disagreement, Leftovers, ObjectInfo, PutMode, PutOutcome, Span,
};
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
    /// The call takes a while longer ([`FaultStore::delay`]) and is as it is.
    Delay,
    /// The call arrives twice, as a request that a connection sent again: it has its effect
    /// twice, and the caller sees the second answer. Streams, whose calls cannot be repeated, are
    /// as they are.
    Duplicate,
    /// The call and all that follow fail: the process was killed at this point.
    Crash,
}

impl Fault {
    /// Every fault.
    pub const ALL: [Self; 9] = [
        Self::Error,
        Self::LostReply,
        Self::NoSpace,
        Self::Truncate,
        Self::Corrupt,
        Self::Missing,
        Self::Delay,
        Self::Duplicate,
        Self::Crash,
    ];
}

/// The methods of a store and its writers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    /// [`BlobStore::get`].
    Get,
    /// [`BlobStore::get_range`].
    GetRange,
    /// [`BlobStore::size`].
    Size,
    /// [`BlobStore::list`].
    List,
    /// [`BlobStore::put`].
    Put,
    /// [`BlobStore::put_stream`].
    PutStream,
    /// [`BlobWriter::write`].
    Write,
    /// [`BlobWriter::commit`].
    Commit,
    /// [`BlobStore::delete`].
    Delete,
}

impl Operation {
    /// Every operation.
    pub const ALL: [Self; 9] = [
        Self::Get,
        Self::GetRange,
        Self::Size,
        Self::List,
        Self::Put,
        Self::PutStream,
        Self::Write,
        Self::Commit,
        Self::Delete,
    ];

    const fn reads(self) -> bool {
        matches!(self, Self::Get | Self::GetRange | Self::Size | Self::List)
    }

    const fn verb(self) -> &'static str {
        match self {
            Self::Get | Self::GetRange | Self::Size => "read",
            Self::List => "list",
            Self::Put | Self::PutStream | Self::Write | Self::Commit => "write",
            Self::Delete => "delete",
        }
    }
}

/// A store whose nth call, counted from 1 over all methods and writers or over one method, suffers
/// a fault.
#[derive(Debug)]
pub struct FaultStore {
    inner: Arc<dyn BlobStore>,
    fault: Fault,
    /// Which calls are counted; `None`: all.
    only: Option<Operation>,
    nth: u64,
    delay: Duration,
    calls: AtomicU64,
    fired: AtomicBool,
}

impl FaultStore {
    /// Makes call `nth` (from 1) of the wrapped store suffer `fault`.
    #[must_use]
    pub fn fail_nth(inner: Arc<dyn BlobStore>, nth: u64, fault: Fault) -> Self {
        Self {
            inner,
            fault,
            only: None,
            nth,
            delay: Duration::from_millis(20),
            calls: AtomicU64::new(0),
            fired: AtomicBool::new(false),
        }
    }

    /// Makes call `nth` (from 1) of `operation` suffer `fault`. After [`Fault::Crash`] the calls of
    /// every operation fail.
    #[must_use]
    pub fn fail_nth_of(
        inner: Arc<dyn BlobStore>,
        operation: Operation,
        nth: u64,
        fault: Fault,
    ) -> Self {
        Self {
            only: Some(operation),
            ..Self::fail_nth(inner, nth, fault)
        }
    }

    /// Makes [`Fault::Delay`] last `delay`.
    #[must_use]
    pub fn delay(self, delay: Duration) -> Self {
        Self { delay, ..self }
    }

    /// True once the fault happened to a call.
    #[must_use]
    pub fn fired(&self) -> bool {
        self.fired.load(Ordering::SeqCst)
    }

    /// Calls so far, of those that are counted.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::SeqCst)
    }

    fn injected(&self, key: &str, operation: Operation) -> StoreError {
        StoreError::Io {
            operation: operation.verb(),
            store: self.inner.url(),
            key: key.to_owned(),
            source: io::Error::other("injected fault"),
        }
    }

    /// Whether the fault happens to this call.
    fn hits(&self, operation: Operation) -> bool {
        if self.fault == Fault::Crash && self.fired() {
            return true;
        }
        if self.only.is_some_and(|only| only != operation) {
            return false;
        }
        self.calls.fetch_add(1, Ordering::SeqCst) + 1 == self.nth
    }

    /// Counts a call and lets the fault act on it. `act` is the call, `bend` changes its answer.
    fn call<T>(
        &self,
        operation: Operation,
        key: &str,
        mut act: impl FnMut() -> Result<T>,
        bend: impl FnOnce(T, Fault) -> Result<T>,
    ) -> Result<T> {
        if !self.hits(operation) {
            return act();
        }
        let fire = || self.fired.store(true, Ordering::SeqCst);
        match self.fault {
            Fault::Error | Fault::Crash => {
                fire();
                Err(self.injected(key, operation))
            }
            Fault::LostReply => {
                fire();
                act().and_then(|_| Err(self.injected(key, operation)))
            }
            Fault::NoSpace if !operation.reads() => {
                fire();
                Err(StoreError::NoSpace {
                    store: self.inner.url(),
                    key: key.to_owned(),
                    source: io::Error::from(io::ErrorKind::StorageFull),
                })
            }
            Fault::Truncate | Fault::Corrupt | Fault::Missing if operation.reads() => {
                let value = act()?;
                fire();
                bend(value, self.fault)
            }
            Fault::Delay => {
                fire();
                std::thread::sleep(self.delay);
                act()
            }
            Fault::Duplicate
                if !matches!(
                    operation,
                    Operation::PutStream | Operation::Write | Operation::Commit
                ) =>
            {
                fire();
                act()?;
                act()
            }
            Fault::NoSpace
            | Fault::Truncate
            | Fault::Corrupt
            | Fault::Missing
            | Fault::Duplicate => act(),
        }
    }
}

/// What an object is called that has no key yet.
const NAMELESS: &str = "a new object";

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
        self.call(Operation::Get, key.as_str(), act, |value, fault| {
            Ok(match fault {
                Fault::Missing => None,
                _ => value.map(|bytes| bend_bytes(bytes, fault)),
            })
        })
    }

    fn get_range(&self, key: &Key, range: Range<u64>) -> Result<Vec<u8>> {
        let act = || self.inner.get_range(key, range.clone());
        self.call(
            Operation::GetRange,
            key.as_str(),
            act,
            |bytes, fault| match fault {
                Fault::Missing => Err(StoreError::Missing {
                    store: self.inner.url(),
                    key: key.as_str().to_owned(),
                }),
                _ => Ok(bend_bytes(bytes, fault)),
            },
        )
    }

    /// Counts as one call, whatever the store asks for in it; the fault bends its first answer.
    fn reread(
        &self,
        key: &Key,
        span: &Span,
        accept: &mut dyn FnMut(&[u8], &str) -> bool,
    ) -> Result<bool> {
        let operation = match span {
            Span::Whole { .. } => Operation::Get,
            Span::Range(_) => Operation::GetRange,
        };
        let bends = std::cell::Cell::new(false);
        let mut ask = || {
            self.inner.reread(key, span, &mut |bytes, from| {
                if bends.replace(false) {
                    accept(&bend_bytes(bytes.to_vec(), self.fault), from)
                } else {
                    accept(bytes, from)
                }
            })
        };
        let wrong = matches!(self.fault, Fault::Truncate | Fault::Corrupt);
        if wrong && self.hits(operation) {
            self.fired.store(true, Ordering::SeqCst);
            bends.set(true);
            return ask();
        }
        if wrong {
            return ask();
        }
        self.call(operation, key.as_str(), ask, |_, _| Ok(false))
    }

    fn take_disagreements(&self) -> Vec<Disagreement> {
        self.inner.take_disagreements()
    }

    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<PutOutcome> {
        let act = || self.inner.put(key, bytes, mode);
        self.call(Operation::Put, key.as_str(), act, |value, _| Ok(value))
    }

    fn put_stream(&self) -> Result<Box<dyn BlobWriter + '_>> {
        let act = || self.inner.put_stream();
        let inner = self.call(Operation::PutStream, NAMELESS, act, |value, _| Ok(value))?;
        Ok(Box::new(FaultWriter { store: self, inner }))
    }

    fn size(&self, key: &Key) -> Result<Option<u64>> {
        let act = || self.inner.size(key);
        self.call(Operation::Size, key.as_str(), act, |value, fault| {
            Ok(match fault {
                Fault::Missing => None,
                _ => value.map(|n| n.saturating_sub(1)),
            })
        })
    }

    fn list(&self, prefix: &str) -> Result<Vec<ObjectInfo>> {
        let act = || self.inner.list(prefix);
        self.call(Operation::List, prefix, act, |mut objects, fault| {
            if fault == Fault::Missing {
                objects.clear();
            } else {
                objects.pop();
            }
            Ok(objects)
        })
    }

    fn delete(&self, key: &Key) -> Result<bool> {
        let act = || self.inner.delete(key);
        self.call(Operation::Delete, key.as_str(), act, |value, _| Ok(value))
    }

    fn put_volatile(&self, key: &Key, bytes: &[u8]) -> Result<()> {
        let act = || self.inner.put_volatile(key, bytes);
        self.call(Operation::Put, key.as_str(), act, |(), _| Ok(()))
    }

    fn delete_volatile(&self, key: &Key) -> Result<bool> {
        let act = || self.inner.delete_volatile(key);
        self.call(Operation::Delete, key.as_str(), act, |value, _| Ok(value))
    }

    fn leftovers(&self, remove: bool) -> Result<Leftovers> {
        self.inner.leftovers(remove)
    }

    fn reserve(&self, keep: bool) -> Result<bool> {
        self.inner.reserve(keep)
    }

    fn url(&self) -> String {
        self.inner.url()
    }

    fn first_url(&self) -> String {
        self.inner.first_url()
    }

    fn is_away(&self) -> bool {
        self.inner.is_away()
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
        let act = || inner.write(bytes);
        self.store
            .call(Operation::Write, NAMELESS, act, |(), _| Ok(()))
    }

    fn commit(self: Box<Self>, key: &Key, mode: PutMode) -> Result<PutOutcome> {
        let Self { store, inner } = *self;
        let mut inner = Some(inner);
        let act = || match inner.take() {
            Some(inner) => inner.commit(key, mode),
            None => Err(store.injected(key.as_str(), Operation::Commit)),
        };
        store.call(Operation::Commit, key.as_str(), act, |value, _| Ok(value))
    }
}
