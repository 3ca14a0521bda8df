//! Several addresses of one store. The first is the one that is written to, listed, and believed;
//! the others are copies for reading when it cannot be reached or has lost an object.
//!
//! An address where there is no store (no marker and no layers: an empty directory, a filesystem
//! that is not mounted, a typing error) cannot speak for one. It is passed over, and the next
//! address that is a store is believed and listed in its place. Nothing is written then: a second
//! store would begin at the first address, or a copy would get what the store itself has not.
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
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::{
    BlobStore, BlobWriter, Disagreement, Leftovers, ObjectInfo, PutMode, PutOutcome, Span,
};
use crate::error::{Result, StoreError};
use crate::key::Key;
use crate::layer::MAX_SMALL;
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

    /// Whether there is a store: its marker, or layers that lost it. Of an address that cannot be
    /// listed the marker alone tells.
    fn is_store(&self) -> Result<bool> {
        let looked = self.look();
        self.note(looked.is_err());
        looked
    }

    fn look(&self) -> Result<bool> {
        match self.store.get(&Key::marker(), MAX_SMALL) {
            Ok(None) => {}
            Ok(Some(_)) => return Ok(true),
            Err(error) if error.is_damage() => return Ok(true), // whoever reads it says so
            Err(error) => return Err(error),
        }
        for family in ["refs/", "packs/"] {
            match self.store.list(family) {
                Ok(listed) if listed.is_empty() => {}
                Ok(_) => return Ok(true),
                Err(StoreError::NotSupported { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(false)
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
    /// What writers and collections agree by: the address that is believed or none.
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
    /// At least one.
    addresses: Vec<Address>,
    /// The number of the address that is believed, once it is certain.
    head: OnceLock<usize>,
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
        let addresses = std::iter::once(first).chain(copies);
        Self {
            addresses: addresses
                .map(|store| Address {
                    store,
                    health: Mutex::default(),
                })
                .collect(),
            head: OnceLock::new(),
            disagreements: Mutex::default(),
        }
    }

    /// The number of the address that is believed: the first one that is a store. One that cannot
    /// be asked may be it, and stays in its place until it can. Where none is a store, the first.
    fn head(&self) -> usize {
        if let Some(head) = self.head.get() {
            return *head;
        }
        let now = Instant::now();
        for (number, address) in self.addresses.iter().enumerate() {
            // One that rests has just failed.
            if address.is_paused(now) {
                return number;
            }
            match address.is_store() {
                Ok(true) => return self.decide(number),
                Ok(false) => {}
                Err(error) => {
                    tracing::debug!("an address of the store failed: {error}");
                    return number;
                }
            }
        }
        0
    }

    /// Takes this address for the one that is believed. All before it were asked and are no stores.
    fn decide(&self, number: usize) -> usize {
        let mut fresh = false;
        let head = *self.head.get_or_init(|| {
            fresh = true;
            number
        });
        if fresh {
            for line in self.passed_over() {
                tracing::warn!("{line}");
            }
        }
        head
    }

    fn address(&self, number: usize) -> Result<&Address> {
        self.addresses.get(number).ok_or_else(|| self.no_address())
    }

    fn no_address(&self) -> StoreError {
        StoreError::InvalidUrl {
            url: self.url(),
            why: "it has no address".to_owned(),
        }
    }

    /// The address that is believed.
    fn believed(&self) -> Result<&dyn BlobStore> {
        Ok(&*self.address(self.head())?.store)
    }

    /// The address to write to: the first one. `node_lease`: what is written only keeps the layers
    /// of the store that is read from being collected, and goes where those are.
    fn written(&self, node_lease: bool) -> Result<&dyn BlobStore> {
        let head = match self.head.get() {
            Some(head) => *head,
            None => {
                // Asked again, also those that rest: a guess could make a second store.
                let mut found = None;
                for (number, address) in self.addresses.iter().enumerate() {
                    if address.is_store()? {
                        found = Some(number);
                        break;
                    }
                }
                self.decide(found.unwrap_or(0)) // without any store, this write begins one
            }
        };
        let target = &*self.address(head)?.store;
        if head == 0 || node_lease {
            return Ok(target);
        }
        let (first, other) = (self.address(0)?.store.url(), target.url());
        Err(StoreError::InvalidUrl {
            url: self.url(),
            why: format!(
                "the first address is the one that is written to, and {first} is no store (it has no layerpack.json and no layers), while {other} is one; put {other} first, or make {first} a store by itself (layerpack --store {first} pull REF --from {other})"
            ),
        })
    }

    /// The addresses in the order in which they are asked now, and whether each is the one that is
    /// believed.
    fn order(&self) -> Vec<(bool, &Address)> {
        let head = self.head();
        let now = Instant::now();
        let mut order: Vec<(usize, &Address)> = self.addresses.iter().enumerate().collect();
        // Stable: the order stays. What is before the head is no store.
        order.sort_by_key(|(number, address)| (*number < head, address.is_paused(now)));
        order
            .into_iter()
            .map(|(number, address)| (number == head, address))
            .collect()
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
            return Self::ask(self.address(self.head())?, &act);
        }
        let mut failure = None;
        let mut none_at_head = false;
        let mut wrong = Vec::new();
        for (is_head, address) in self.order() {
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
                Ok(None) if is_head && trust == Trust::Changing => return Ok(None),
                Ok(None) => {
                    none_at_head |= is_head;
                    if is_head {
                        wrong.push((address.store.url(), ABSENT.to_owned()));
                    }
                }
                Err(error) => {
                    if error.is_damage() {
                        wrong.push((address.store.url(), words_of(&error)));
                    }
                    // The words of the one that is believed, else what came first.
                    if is_head || failure.is_none() {
                        failure = Some(error);
                    }
                }
            }
        }
        match failure {
            // Nobody has it, and the one who is believed said so.
            _ if none_at_head => Ok(None),
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
            return self.believed()?.reread(key, span, accept);
        }
        let mut failure = None;
        let mut wrong = Vec::new();
        for (is_head, address) in self.order() {
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
                    if is_head {
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

    fn passed_over(&self) -> Vec<String> {
        let head = self.head();
        if self.head.get() != Some(&head) {
            return Vec::new(); // not certain
        }
        let believed = self.first_url();
        self.addresses
            .iter()
            .take(head)
            .map(|address| {
                format!(
                    "{} is passed over: there is no store (no layerpack.json and no layers); {believed} is read in its place, and nothing can be written",
                    address.store.url()
                )
            })
            .collect()
    }

    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<PutOutcome> {
        self.written(is_node_lease(key))?.put(key, bytes, mode)
    }

    fn put_stream(&self) -> Result<Box<dyn BlobWriter + '_>> {
        self.written(false)?.put_stream()
    }

    /// Of the address that is believed alone: a writer leaves out what the store has, not what a
    /// copy has.
    fn size(&self, key: &Key) -> Result<Option<u64>> {
        self.believed()?.size(key)
    }

    fn list(&self, prefix: &str) -> Result<Vec<ObjectInfo>> {
        self.believed()?.list(prefix)
    }

    fn delete(&self, key: &Key) -> Result<bool> {
        self.written(is_node_lease(key))?.delete(key)
    }

    fn put_volatile(&self, key: &Key, bytes: &[u8]) -> Result<()> {
        self.written(is_node_lease(key))?.put_volatile(key, bytes)
    }

    fn delete_volatile(&self, key: &Key) -> Result<bool> {
        self.written(is_node_lease(key))?.delete_volatile(key)
    }

    fn leftovers(&self, remove: bool) -> Result<Leftovers> {
        match remove {
            true => self.written(false)?.leftovers(true),
            false => self.believed()?.leftovers(false),
        }
    }

    fn reserve(&self, keep: bool) -> Result<bool> {
        self.written(false)?.reserve(keep)
    }

    fn url(&self) -> String {
        let urls: Vec<String> = self.addresses.iter().map(|a| a.store.url()).collect();
        urls.join(",")
    }

    /// As far as it is known: nothing is asked.
    fn first_url(&self) -> String {
        let head = self.head.get().copied().unwrap_or(0);
        self.addresses
            .get(head)
            .map_or_else(String::new, |address| address.store.url())
    }

    /// Of the address that a node's lease is written to, as far as it is known.
    fn is_away(&self) -> bool {
        let head = self.head.get().and_then(|head| self.addresses.get(*head));
        head.is_some_and(|address| address.store.is_away())
    }

    /// Only the first address is written to.
    fn decides_races(&self) -> bool {
        let first = self.addresses.first();
        first.is_some_and(|address| address.store.decides_races())
    }
}

/// Whether the object only says what a node has mounted.
fn is_node_lease(key: &Key) -> bool {
    key.as_str().starts_with("leases/node-")
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

    const MARKER: (&str, &str) = ("layerpack.json", "a marker");

    #[test]
    fn a_copy_that_is_behind_does_not_speak_for_the_first() {
        let copy = || holding(&[MARKER, ("refs/base/old/_1", "old"), ("leases/x", "x")]);
        let store = MirrorStore::new(holding(&[MARKER]), vec![copy()]);
        assert_eq!(
            store.get(&key("refs/base/old/_1"), 9).unwrap(),
            None,
            "it was removed"
        );
        assert_eq!(store.list("").unwrap().len(), 1);
        assert_eq!(store.size(&key("refs/base/old/_1")).unwrap(), None);
        assert!(store.passed_over().is_empty());

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
        assert!(store.passed_over().is_empty(), "it may be the store");
    }

    #[test]
    fn an_address_without_a_store_is_passed_over() {
        let none = holding(&[("leases/x", "not of a store")]);
        let good = holding(&[MARKER, ("refs/base/a/_1", "a"), ("leases/x", "x")]);
        let behind = holding(&[MARKER, ("refs/base/b/_1", "b")]);
        let store = MirrorStore::new(
            Arc::clone(&none),
            vec![Arc::clone(&good), Arc::clone(&behind)],
        );
        assert_eq!(store.get(&key("refs/base/a/_1"), 9).unwrap().unwrap(), b"a");
        // The next one that is a store is believed as the first would be.
        assert_eq!(store.get(&key("refs/base/b/_1"), 9).unwrap(), None);
        assert_eq!(store.get(&key("leases/x"), 9).unwrap().unwrap(), b"x");
        assert_eq!(store.list("refs/").unwrap().len(), 1);
        assert_eq!(store.passed_over().len(), 1);

        // Nothing is written, to neither, but that somebody uses what is read.
        for error in [
            store
                .put(&key("a/b"), b"", PutMode::IfAbsent)
                .map(drop)
                .unwrap_err(),
            store.put_stream().map(drop).unwrap_err(),
            store.put_volatile(&key("leases/y"), b"").unwrap_err(),
            store.delete(&key("refs/base/a/_1")).map(drop).unwrap_err(),
            store.leftovers(true).map(drop).unwrap_err(),
        ] {
            assert!(error.to_string().contains("is no store"), "{error}");
        }
        store
            .put(&key("leases/node-1"), b"", PutMode::Overwrite)
            .unwrap();
        assert_eq!(none.list("").unwrap().len(), 1);
        assert!(good.size(&key("leases/node-1")).unwrap().is_some());
        assert!(store.delete_volatile(&key("leases/node-1")).unwrap());

        // Layers that lost their marker are a store all the same.
        let lost = holding(&[("refs/base/c/_1", "c")]);
        let store = MirrorStore::new(lost, vec![good]);
        assert_eq!(store.get(&key("refs/base/a/_1"), 9).unwrap(), None);
        assert!(store.passed_over().is_empty());
    }

    #[test]
    fn what_cannot_be_asked_is_not_passed_over() {
        let good = || holding(&[MARKER, ("refs/base/a/_1", "a")]);
        let store = MirrorStore::new(holding(&[]), vec![down(), good()]);
        assert_eq!(store.get(&key("refs/base/a/_1"), 9).unwrap().unwrap(), b"a");
        store.get(&key("refs/base/b/_1"), 9).unwrap_err();
        store.list("").unwrap_err();
        store.put(&key("a/b"), b"", PutMode::Overwrite).unwrap_err();
        assert!(store.passed_over().is_empty());

        // Without any store the first write begins one, at the first address.
        let (first, second) = (holding(&[]), holding(&[]));
        let store = MirrorStore::new(Arc::clone(&first), vec![Arc::clone(&second)]);
        assert_eq!(store.get(&key("refs/base/a/_1"), 9).unwrap(), None);
        store.put(&key("a/b"), b"", PutMode::Overwrite).unwrap();
        assert_eq!(first.list("").unwrap().len(), 1);
        assert!(second.list("").unwrap().is_empty());
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
        assert!(!store.addresses[0].is_paused(Instant::now() + LONGEST_PAUSE));
    }
}
