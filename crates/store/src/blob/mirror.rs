//! Several addresses of one store. The first is the one that is written to, listed, and believed;
//! the others are copies for reading when it cannot be reached or has lost an object.
//!
//! A copy may be behind. So what can change (references, channels and the like) is read from a
//! copy only while the first cannot answer, "there is none" is believed of the first alone, and
//! what a writer or a collection steers by (lists, leases, claims, collections) never comes from a
//! copy. Objects that are named by their content are the same everywhere: they are read from
//! whoever has them.
//!
//! An address that fails is asked last for a while: a second at first, twice as long after each
//! further failure, a minute at most.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::{
    BlobStore, BlobWriter, Disagreement, Leftovers, ObjectInfo, PutMode, PutOutcome, Span,
};
use crate::error::{Result, StoreError};
use crate::key::Key;
use crate::layer::again::is_wrong;

const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// How an address did lately.
#[derive(Debug, Clone, Copy, Default)]
struct Health {
    /// Failures in a row.
    failures: u32,
    /// Until when it is asked last.
    paused_until: Option<Instant>,
}

#[derive(Debug)]
struct Address {
    store: Arc<dyn BlobStore>,
    health: Mutex<Health>,
}

impl Address {
    fn health(&self) -> MutexGuard<'_, Health> {
        // Replaced as a whole: no panic leaves half of it.
        self.health.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_paused(&self, now: Instant) -> bool {
        self.health().paused_until.is_some_and(|until| until > now)
    }

    fn note(&self, failed: bool) {
        let mut health = self.health();
        if !failed {
            *health = Health::default();
            return;
        }
        let failures = health.failures.saturating_add(1);
        let pause = FIRST_PAUSE
            .saturating_mul(2_u32.saturating_pow(failures - 1))
            .min(LONGEST_PAUSE);
        *health = Health {
            failures,
            paused_until: Instant::now().checked_add(pause),
        };
    }
}

/// What is wrong, without the object's name.
fn words_of(error: &StoreError) -> String {
    match error {
        StoreError::Corrupt { what, .. } => what.clone(),
        other => other.to_string(),
    }
}

/// What kind of object a key is for, as far as copies go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trust {
    /// The same wherever it is.
    Content,
    /// May change: a copy is better than nothing.
    Changing,
    /// What writers and collections agree by: the first address or none.
    Agreement,
}

impl Trust {
    fn of(key: &Key) -> Self {
        match key.as_str().split('/').next() {
            Some("manifests" | "meta" | "maps" | "locators" | "packs" | "index") => Self::Content,
            Some("leases" | "claims" | "gc") => Self::Agreement,
            _ => Self::Changing,
        }
    }
}

/// A store with several addresses.
#[derive(Debug)]
pub struct MirrorStore {
    first: Address,
    copies: Vec<Address>,
    disagreements: Mutex<BTreeSet<Disagreement>>,
}

/// What is wrong with an object that an address does not have.
pub(crate) const ABSENT: &str = "it is missing there";
/// Most disagreements that are remembered.
const MAX_DISAGREEMENTS: usize = 4096;

impl MirrorStore {
    /// `first` and copies of it, in the order in which they are asked.
    #[must_use]
    pub fn new(first: Arc<dyn BlobStore>, copies: Vec<Arc<dyn BlobStore>>) -> Self {
        let address = |store| Address {
            store,
            health: Mutex::default(),
        };
        Self {
            first: address(first),
            copies: copies.into_iter().map(address).collect(),
            disagreements: Mutex::default(),
        }
    }

    /// The addresses in the order in which they are asked now, and whether each is the first.
    fn order(&self) -> Vec<(bool, &Address)> {
        let now = Instant::now();
        let mut order: Vec<(bool, &Address)> = std::iter::once((true, &self.first))
            .chain(self.copies.iter().map(|copy| (false, copy)))
            .collect();
        order.sort_by_key(|(_, address)| address.is_paused(now)); // stable: the order stays
        order
    }

    fn disagreements(&self) -> MutexGuard<'_, BTreeSet<Disagreement>> {
        // Facts, each whole.
        self.disagreements
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// What some addresses had wrong (each with its words) and `good` has right.
    fn disagree(
        &self,
        key: &Key,
        range: Option<Range<u64>>,
        wrong: Vec<(String, String)>,
        good: &str,
    ) {
        for (bad, what) in wrong {
            let disagreement = Disagreement {
                key: key.to_string(),
                // Of an object that is not there, no part is.
                range: (what != ABSENT)
                    .then(|| range.as_ref().map(|r| (r.start, r.end)))
                    .flatten(),
                bad,
                good: good.to_owned(),
                what,
            };
            let mut known = self.disagreements();
            if known.len() >= MAX_DISAGREEMENTS || known.contains(&disagreement) {
                continue;
            }
            let Disagreement { bad, what, .. } = &disagreement;
            // A store that was seeded lacks objects by purpose.
            if what == ABSENT {
                tracing::debug!(%key, bad, good, "read from a copy: {what}");
            } else {
                tracing::warn!(%key, bad, good, "read from another address of the store: {what}");
            }
            known.insert(disagreement);
        }
    }

    /// Asks one address and notes how it did. A store that answers "no such object" is well.
    fn ask<T>(
        address: &Address,
        act: &impl Fn(&dyn BlobStore) -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        let result = act(address.store.as_ref());
        // An address that answers with a damaged object is well itself.
        let failed = result.as_ref().is_err_and(|error| !error.is_damage());
        address.note(failed);
        if let Err(error) = &result {
            tracing::debug!("an address of the store failed: {error}");
        }
        result
    }

    /// Reads from whoever can answer. `act` answers `None` for "no such object".
    fn read<T>(
        &self,
        key: &Key,
        range: Option<Range<u64>>,
        act: impl Fn(&dyn BlobStore) -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        let trust = Trust::of(key);
        if trust == Trust::Agreement {
            return Self::ask(&self.first, &act);
        }
        let mut failure = None;
        let mut none_at_first = false;
        let mut wrong = Vec::new();
        for (is_first, address) in self.order() {
            let mut answer = Self::ask(address, &act);
            if trust == Trust::Content && answer.as_ref().is_err_and(is_wrong) {
                answer = Self::ask(address, &act); // it may have been damaged on the way
            }
            match answer {
                Ok(Some(found)) => {
                    if trust == Trust::Content && !wrong.is_empty() {
                        self.disagree(key, range, wrong, &address.store.url());
                    }
                    return Ok(Some(found));
                }
                Ok(None) if is_first && trust == Trust::Changing => return Ok(None),
                Ok(None) => {
                    none_at_first |= is_first;
                    if is_first {
                        wrong.push((address.store.url(), ABSENT.to_owned()));
                    }
                }
                Err(error) => {
                    if error.is_damage() {
                        wrong.push((address.store.url(), words_of(&error)));
                    }
                    // The first address's own words, else what came first.
                    if is_first || failure.is_none() {
                        failure = Some(error);
                    }
                }
            }
        }
        match failure {
            // Nobody has it, and the one who is believed said so.
            _ if none_at_first => Ok(None),
            Some(error) => Err(error),
            None => Ok(None),
        }
    }
}

impl BlobStore for MirrorStore {
    fn get(&self, key: &Key, max_len: u64) -> Result<Option<Vec<u8>>> {
        self.read(key, None, |store| store.get(key, max_len))
    }

    fn get_range(&self, key: &Key, range: Range<u64>) -> Result<Vec<u8>> {
        let span = Span::Range(range.clone());
        let found = self.read(key, Some(range), |store| span.read(store, key))?;
        found.ok_or_else(|| StoreError::Missing {
            store: self.url(),
            key: key.to_string(),
        })
    }

    /// Content from each address in turn, the one that is asked first also: what it sent may have
    /// been damaged on the way. What can change only from the first.
    fn reread(
        &self,
        key: &Key,
        span: &Span,
        accept: &mut dyn FnMut(&[u8], &str) -> bool,
    ) -> Result<bool> {
        if Trust::of(key) != Trust::Content {
            return self.first.store.reread(key, span, accept);
        }
        let mut failure = None;
        let mut wrong = Vec::new();
        for (is_first, address) in self.order() {
            let url = address.store.url();
            let mut came = false;
            match address.store.reread(key, span, &mut |bytes, from| {
                came = true;
                accept(bytes, from)
            }) {
                Ok(true) => {
                    address.note(false);
                    self.disagree(key, span.range(), wrong, &url);
                    return Ok(true);
                }
                Ok(false) if came => {
                    address.note(false);
                    wrong.push((url, "its bytes do not have their digest".to_owned()));
                }
                Ok(false) => {
                    address.note(false);
                    if is_first {
                        wrong.push((url, ABSENT.to_owned()));
                    }
                }
                Err(error) => {
                    address.note(!error.is_damage());
                    if error.is_damage() {
                        wrong.push((url, words_of(&error)));
                    }
                    failure = failure.or(Some(error));
                }
            }
        }
        failure.map_or(Ok(false), Err)
    }

    fn take_disagreements(&self) -> Vec<Disagreement> {
        std::mem::take(&mut *self.disagreements())
            .into_iter()
            .collect()
    }

    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<PutOutcome> {
        self.first.store.put(key, bytes, mode)
    }

    fn put_stream(&self) -> Result<Box<dyn BlobWriter + '_>> {
        self.first.store.put_stream()
    }

    /// Of the first address alone: a writer leaves out what the store has, not what a copy has.
    fn size(&self, key: &Key) -> Result<Option<u64>> {
        self.first.store.size(key)
    }

    fn list(&self, prefix: &str) -> Result<Vec<ObjectInfo>> {
        self.first.store.list(prefix)
    }

    fn delete(&self, key: &Key) -> Result<bool> {
        self.first.store.delete(key)
    }

    fn put_volatile(&self, key: &Key, bytes: &[u8]) -> Result<()> {
        self.first.store.put_volatile(key, bytes)
    }

    fn delete_volatile(&self, key: &Key) -> Result<bool> {
        self.first.store.delete_volatile(key)
    }

    fn leftovers(&self, remove: bool) -> Result<Leftovers> {
        self.first.store.leftovers(remove)
    }

    fn reserve(&self, keep: bool) -> Result<bool> {
        self.first.store.reserve(keep)
    }

    fn url(&self) -> String {
        let mut url = self.first.store.url();
        for copy in &self.copies {
            url.push(',');
            url.push_str(&copy.store.url());
        }
        url
    }

    fn first_url(&self) -> String {
        self.first.store.url()
    }

    fn decides_races(&self) -> bool {
        self.first.store.decides_races()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blob::{Fault, FaultStore, MemStore};

    fn key(text: &str) -> Key {
        Key::new(text).unwrap()
    }

    fn holding(objects: &[(&str, &str)]) -> Arc<dyn BlobStore> {
        let store = MemStore::new();
        for (name, bytes) in objects {
            store
                .put(&key(name), bytes.as_bytes(), PutMode::IfAbsent)
                .unwrap();
        }
        Arc::new(store)
    }

    fn down() -> Arc<dyn BlobStore> {
        Arc::new(FaultStore::fail_nth(holding(&[]), 1, Fault::Crash))
    }

    #[test]
    fn content_comes_from_whoever_has_it() {
        let store = MirrorStore::new(
            holding(&[("packs/aa/one", "1")]),
            vec![down(), holding(&[("packs/aa/two", "2")])],
        );
        assert_eq!(store.get(&key("packs/aa/one"), 9).unwrap().unwrap(), b"1");
        assert_eq!(store.get(&key("packs/aa/two"), 9).unwrap().unwrap(), b"2");
        assert_eq!(store.get_range(&key("packs/aa/two"), 0..1).unwrap(), b"2");
        // The first says that there is none, and it is believed.
        assert_eq!(store.get(&key("packs/aa/three"), 9).unwrap(), None);
        let error = store.get_range(&key("packs/aa/three"), 0..1).unwrap_err();
        assert!(matches!(error, StoreError::Missing { .. }), "{error:?}");
    }

    #[test]
    fn a_copy_that_is_behind_does_not_speak_for_the_first() {
        let copy = || holding(&[("refs/base/old/_1", "old"), ("leases/x", "x")]);
        let store = MirrorStore::new(holding(&[]), vec![copy()]);
        assert_eq!(
            store.get(&key("refs/base/old/_1"), 9).unwrap(),
            None,
            "it was removed"
        );
        assert!(store.list("").unwrap().is_empty());
        assert_eq!(store.size(&key("refs/base/old/_1")).unwrap(), None);

        let store = MirrorStore::new(down(), vec![copy()]);
        assert_eq!(
            store.get(&key("refs/base/old/_1"), 9).unwrap().unwrap(),
            b"old"
        );
        store.get(&key("refs/base/new/_1"), 9).unwrap_err();
        store.get(&key("packs/aa/one"), 9).unwrap_err();
        store.get(&key("leases/x"), 9).unwrap_err();
        store.list("").unwrap_err();
        store.put(&key("a/b"), b"", PutMode::Overwrite).unwrap_err();
    }

    #[test]
    fn an_address_that_fails_is_asked_last() {
        let first = Arc::new(FaultStore::fail_nth(
            holding(&[("packs/aa/one", "1")]),
            1,
            Fault::Error,
        ));
        let store = MirrorStore::new(
            Arc::clone(&first) as Arc<dyn BlobStore>,
            vec![holding(&[("packs/aa/one", "1")])],
        );
        for _ in 0..5 {
            assert_eq!(store.get(&key("packs/aa/one"), 9).unwrap().unwrap(), b"1");
        }
        assert_eq!(first.calls(), 1, "it rests after its failure");
        assert!(!store.first.is_paused(Instant::now() + LONGEST_PAUSE));
    }
}
