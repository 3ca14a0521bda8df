//! A store as a writer with a session sees it: a condemned object that is read or written is claimed
//! first, and references and locators are written only while the session holds.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use super::mark::places_of;
use super::session::Session;
use crate::blob::{
    BlobStore, BlobWriter, Disagreement, Leftovers, ObjectInfo, PutMode, PutOutcome, Span,
};
use crate::digest::Digest;
use crate::error::{Result, StoreError};
use crate::key::Key;
use crate::layer::LayerStore;
use crate::manifest::Manifest;

#[derive(Debug)]
pub(super) struct Guarded {
    inner: Arc<dyn BlobStore>,
    session: Session,
}

impl Guarded {
    /// Begins a session and guards `inner` by it. The session ends with the last clone.
    pub(super) fn begin(inner: Arc<dyn BlobStore>) -> Result<Self> {
        let session = Session::begin(Arc::clone(&inner))?;
        Ok(Self { inner, session })
    }

    /// Claims what is to be read. Index segments are hints: reading one relies on nothing.
    fn touch(&self, key: &Key) -> Result<()> {
        if key.as_str().starts_with("index/") {
            return Ok(());
        }
        self.session.claim(key)
    }

    /// Claims the layers that a new manifest names as its parents, and all that they use.
    fn claim_parents(&self, bytes: &[u8]) -> Result<()> {
        let store = LayerStore::new(Arc::clone(&self.inner));
        let mut open: Vec<Digest> = parents_in(bytes);
        let mut seen = BTreeSet::new();
        while let Some(parent) = open.pop() {
            if !seen.insert(parent) || !self.session.knows_condemned(&Key::manifest(&parent)) {
                continue;
            }
            self.session.claim(&Key::manifest(&parent))?;
            let manifest = match store.manifest(&parent) {
                Ok(manifest) => manifest,
                Err(StoreError::Missing { .. }) => continue, // as it was before
                Err(error) => return Err(error),
            };
            self.session.claim(&Key::meta(&manifest.meta.digest))?;
            self.session.claim(&Key::map(&manifest.map.digest))?;
            self.session.claim(&Key::locator(&manifest.map.digest))?;
            for pack in places_of(&store, &manifest)?.packs {
                self.session.claim(&Key::pack(&pack.id))?;
            }
            open.extend(manifest.parents.iter().map(|p| p.manifest));
        }
        Ok(())
    }

    fn before(&self, key: &Key) -> Result<()> {
        self.session.claim(key)?;
        if is_decisive(key) {
            self.session.check()?;
        }
        Ok(())
    }

    /// A reference that was made while the session was being lost may name what is gone.
    fn after(&self, key: &Key, outcome: PutOutcome) -> Result<()> {
        if outcome == PutOutcome::Created
            && key.as_str().starts_with("refs/")
            && let Err(error) = self.session.check()
        {
            self.inner.delete(key)?;
            return Err(error);
        }
        Ok(())
    }
}

/// Objects that make others rely on what they name.
fn is_decisive(key: &Key) -> bool {
    ["refs/", "locators/", "channels/"]
        .iter()
        .any(|family| key.as_str().starts_with(family))
}

fn parents_in(manifest: &[u8]) -> Vec<Digest> {
    let parents = Manifest::from_bytes(manifest).map(|m| m.parents);
    parents
        .unwrap_or_default()
        .iter()
        .map(|parent| parent.manifest)
        .collect()
}

impl BlobStore for Guarded {
    fn get(&self, key: &Key, max_len: u64) -> Result<Option<Vec<u8>>> {
        self.touch(key)?;
        self.inner.get(key, max_len)
    }

    fn get_range(&self, key: &Key, range: Range<u64>) -> Result<Vec<u8>> {
        self.touch(key)?;
        self.inner.get_range(key, range)
    }

    /// Once, and not from another address: what a new layer relies on, or what is to be healed, is
    /// what the address has that is written to.
    fn reread(
        &self,
        key: &Key,
        span: &Span,
        accept: &mut dyn FnMut(&[u8], &str) -> bool,
    ) -> Result<bool> {
        let found = span.read(self, key)?;
        Ok(found.is_some_and(|bytes| accept(&bytes, &self.url())))
    }

    fn take_disagreements(&self) -> Vec<Disagreement> {
        self.inner.take_disagreements()
    }

    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<PutOutcome> {
        self.before(key)?;
        if key.as_str().starts_with("manifests/") {
            self.claim_parents(bytes)?;
        }
        let outcome = self.inner.put(key, bytes, mode)?;
        self.after(key, outcome)?;
        Ok(outcome)
    }

    fn settle(&self, key: &Key, max_len: u64) -> Result<bool> {
        self.before(key)?;
        self.inner.settle(key, max_len)
    }

    fn put_volatile(&self, key: &Key, bytes: &[u8]) -> Result<()> {
        self.before(key)?;
        self.inner.put_volatile(key, bytes)
    }

    fn put_stream(&self) -> Result<Box<dyn BlobWriter + '_>> {
        Ok(Box::new(GuardedWriter {
            store: self,
            inner: self.inner.put_stream()?,
        }))
    }

    fn size(&self, key: &Key) -> Result<Option<u64>> {
        self.touch(key)?;
        self.inner.size(key)
    }

    fn list(&self, prefix: &str) -> Result<Vec<ObjectInfo>> {
        self.inner.list(prefix)
    }

    fn delete(&self, key: &Key) -> Result<bool> {
        self.inner.delete(key)
    }

    fn delete_volatile(&self, key: &Key) -> Result<bool> {
        self.inner.delete_volatile(key)
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

struct GuardedWriter<'a> {
    store: &'a Guarded,
    inner: Box<dyn BlobWriter + 'a>,
}

impl BlobWriter for GuardedWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.inner.write(bytes)
    }

    fn commit(self: Box<Self>, key: &Key, mode: PutMode) -> Result<PutOutcome> {
        self.store.before(key)?;
        let outcome = self.inner.commit(key, mode)?;
        self.store.after(key, outcome)?;
        Ok(outcome)
    }
}
