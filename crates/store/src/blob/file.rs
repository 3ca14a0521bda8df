//! Objects as files.
use super::{BlobStore, BlobWriter, ObjectInfo, PutMode, PutOutcome};
use crate::error::Result;
use crate::key::Key;
use std::ops::Range;
use std::path::PathBuf;
/// A store in a directory.
#[derive(Debug)]
pub struct FileStore {
    root: PathBuf,
}
impl FileStore {
    /// A store in the directory `root`, which need not exist yet. Nothing is read or created here.
    ///
    /// # Errors
    /// If a relative `root` cannot be made absolute.
    pub fn new(root: impl Into<PathBuf>) -> Result<Self> {
        Ok(Self { root: root.into() })
    }
}
impl BlobStore for FileStore {
    fn get(&self, _key: &Key, _max_len: u64) -> Result<Option<Vec<u8>>> {
        todo!()
    }
    fn get_range(&self, _key: &Key, _range: Range<u64>) -> Result<Vec<u8>> {
        todo!()
    }
    fn put(&self, _key: &Key, _bytes: &[u8], _mode: PutMode) -> Result<PutOutcome> {
        todo!()
    }
    fn put_stream(&self) -> Result<Box<dyn BlobWriter + '_>> {
        todo!()
    }
    fn size(&self, _key: &Key) -> Result<Option<u64>> {
        todo!()
    }
    fn list(&self, _prefix: &str) -> Result<Vec<ObjectInfo>> {
        todo!()
    }
    fn delete(&self, _key: &Key) -> Result<bool> {
        todo!()
    }
    fn url(&self) -> String {
        self.root.display().to_string()
    }
}
