//! Objects in memory, for tests.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::SystemTime;

use super::{BlobStore, BlobWriter, ObjectInfo, PutMode, PutOutcome};
use crate::error::{Result, StoreError};
use crate::key::Key;

type Objects = BTreeMap<Key, Object>;

#[derive(Debug, Clone)]
struct Object {
    bytes: Arc<[u8]>,
    modified: SystemTime,
}

/// A store in memory. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct MemStore {
    objects: Arc<RwLock<Objects>>,
    name: String,
}

impl MemStore {
    /// An empty store.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The store called `name` of this process: equal names share one store, which lives as long
    /// as the process.
    #[must_use]
    pub fn named(name: &str) -> Self {
        static NAMED: Mutex<BTreeMap<String, MemStore>> = Mutex::new(BTreeMap::new());
        let mut named = NAMED.lock().unwrap_or_else(PoisonError::into_inner);
        let store = named.entry(name.to_owned()).or_insert_with(|| Self {
            objects: Arc::default(),
            name: name.to_owned(),
        });
        store.clone()
    }

    // Every change of the map is a single call, so a panic elsewhere leaves nothing half done.
    fn read(&self) -> RwLockReadGuard<'_, Objects> {
        self.objects.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Objects> {
        self.objects.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn insert(&self, key: &Key, bytes: Arc<[u8]>, mode: PutMode) -> PutOutcome {
        let mut objects = self.write();
        if mode == PutMode::IfAbsent && objects.contains_key(key) {
            return PutOutcome::Exists;
        }
        let modified = SystemTime::now();
        objects.insert(key.clone(), Object { bytes, modified });
        PutOutcome::Created
    }
}

impl BlobStore for MemStore {
    fn get(&self, key: &Key, max_len: u64) -> Result<Option<Vec<u8>>> {
        let Some(Object { bytes, .. }) = self.read().get(key).cloned() else {
            return Ok(None);
        };
        if bytes.len() as u64 > max_len {
            return Err(StoreError::TooLarge {
                store: self.url(),
                key: key.to_string(),
                size: bytes.len() as u64,
                limit: max_len,
            });
        }
        Ok(Some(bytes.to_vec()))
    }

    fn get_range(&self, key: &Key, range: Range<u64>) -> Result<Vec<u8>> {
        let Object { bytes, .. } =
            self.read()
                .get(key)
                .cloned()
                .ok_or_else(|| StoreError::Missing {
                    store: self.url(),
                    key: key.to_string(),
                })?;
        let part = usize::try_from(range.start)
            .ok()
            .zip(usize::try_from(range.end).ok())
            .and_then(|(start, end)| bytes.get(start..end));
        part.map(<[u8]>::to_vec).ok_or_else(|| StoreError::Corrupt {
            store: self.url(),
            key: key.to_string(),
            range: Some(range),
            what: format!("it has only {} bytes", bytes.len()),
        })
    }

    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<PutOutcome> {
        Ok(self.insert(key, bytes.into(), mode))
    }

    fn put_stream(&self) -> Result<Box<dyn BlobWriter + '_>> {
        Ok(Box::new(MemWriter {
            store: self,
            bytes: Vec::new(),
        }))
    }

    fn size(&self, key: &Key) -> Result<Option<u64>> {
        Ok(self.read().get(key).map(|o| o.bytes.len() as u64))
    }

    fn list(&self, prefix: &str) -> Result<Vec<ObjectInfo>> {
        let objects = self.read();
        let matching = objects
            .iter()
            .filter(|(key, _)| key.as_str().starts_with(prefix));
        Ok(matching
            .map(|(key, object)| ObjectInfo {
                key: key.clone(),
                size: object.bytes.len() as u64,
                modified: Some(object.modified),
            })
            .collect())
    }

    fn delete(&self, key: &Key) -> Result<bool> {
        Ok(self.write().remove(key).is_some())
    }

    fn url(&self) -> String {
        format!("mem://{}", self.name)
    }

    fn decides_races(&self) -> bool {
        true
    }
}

struct MemWriter<'a> {
    store: &'a MemStore,
    bytes: Vec<u8>,
}

impl BlobWriter for MemWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    fn commit(self: Box<Self>, key: &Key, mode: PutMode) -> Result<PutOutcome> {
        Ok(self.store.insert(key, self.bytes.into(), mode))
    }
}
