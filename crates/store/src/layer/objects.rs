//! Objects whose content their keys decide, written when a layer is published: metadata, map,
//! locator, manifest. What exists is checked before a layer relies on it; large objects never lie in
//! memory as a whole.

use super::LayerStore;
use super::map_image::MapSource;
use super::max_stored;
use super::meta_image::MetaImage;
use crate::blob::{PutMode, PutOutcome};
use crate::buffers::recycle;
use crate::codec::{ObjectWriter, RawDigest, digest_of_raw};
use crate::digest::Digest;
use crate::error::{Result, StoreError};
use crate::format::locator::{Locator, MAX_LOCATOR_BYTES};
use crate::format::map::LayerMap;
use crate::key::Key;
use crate::manifest::{Blob, Manifest};

/// A map or metadata image of so many raw bytes is not held in memory.
pub(super) const STREAMED: u64 = 4 << 20;
/// Compressed bytes that are written at once.
const STREAM_PIECE: usize = 128 << 10;
/// Compressed bytes of a large object that are read at once.
const READ_PIECE: u64 = 1 << 20;

/// Hands the bytes of an object to whoever stores them, piece by piece.
type Fill<'a> = dyn Fn(&mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> + 'a;

impl LayerStore {
    /// Writes an object whose content the key decides. If it exists it must pass `check`; if it
    /// does not, it is replaced. Bytes written.
    pub(super) fn put_checked(
        &self,
        key: &Key,
        bytes: &[u8],
        warnings: &mut Vec<String>,
        check: impl FnOnce() -> Result<()>,
    ) -> Result<u64> {
        if self.blobs().put(key, bytes, PutMode::IfAbsent)? == PutOutcome::Exists {
            match check() {
                Ok(()) => return Ok(0),
                Err(error) if error.is_damage() => {
                    tracing::warn!("replaced: {error}");
                    warnings.push(format!("replaced: {error}"));
                    self.blobs().put(key, bytes, PutMode::Overwrite)?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(bytes.len() as u64)
    }

    /// What is stored of a compressed object, which is what its key says. Its raw bytes are never held.
    fn sound_object(&self, key: &Key, blob: &Blob) -> Result<Vec<u8>> {
        self.need_checked(key, max_stored(blob.size), &mut |stored| {
            let digest = digest_of_raw(stored, blob.size).map_err(|e| self.bad(key, &e))?;
            if digest != blob.digest {
                return Err(self.corrupt(key, format!("the digest of its raw bytes is {digest}")));
            }
            Ok(stored.to_vec())
        })
    }

    /// Whether a compressed object that was likely `known` before is there and sound. It is durable
    /// then.
    fn has_object(&self, key: &Key, blob: &Blob, known: bool) -> Result<bool> {
        if !known {
            return Ok(false);
        }
        if blob.size >= STREAMED {
            return self.has_large(key, blob);
        }
        match self.sound_object(key, blob) {
            // As it is there, which costs no compressing.
            Ok(stored) => {
                self.blobs().put(key, &stored, PutMode::IfAbsent)?;
                Ok(true)
            }
            Err(StoreError::Missing { .. }) => Ok(false),
            // The usual way tells and replaces it.
            Err(error) if error.is_damage() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// A compressed object, made by `make` unless it was `known` before and is there.
    fn put_raw(
        &self,
        key: &Key,
        blob: &Blob,
        known: bool,
        make: impl FnOnce() -> Result<Vec<u8>>,
        warnings: &mut Vec<String>,
    ) -> Result<u64> {
        if self.has_object(key, blob, known)? {
            return Ok(0);
        }
        let stored = make()?;
        debug_assert!(stored.len() as u64 <= max_stored(blob.size));
        self.put_checked(key, &stored, warnings, || {
            self.sound_object(key, blob).map(drop)
        })
    }

    /// The same for an object that is not held in memory.
    fn has_large(&self, key: &Key, blob: &Blob) -> Result<bool> {
        let Some(size) = self.blobs().size(key)? else {
            return Ok(false);
        };
        if size > max_stored(blob.size) {
            return Ok(false);
        }
        let mut digest = RawDigest::new(blob.size);
        let mut at = 0;
        while at < size {
            let end = size.min(at + READ_PIECE);
            let piece = match self.blobs().get_range(key, at..end) {
                Ok(piece) => piece,
                Err(StoreError::Missing { .. }) => return Ok(false),
                Err(error) if error.is_damage() => return Ok(false),
                Err(error) => return Err(error),
            };
            if digest.push(&piece).is_err() {
                return Ok(false);
            }
            recycle(piece);
            at = end;
        }
        if digest.finish().ok() != Some((blob.digest, 0)) {
            return Ok(false);
        }
        self.blobs().settle(key, size)
    }

    /// A metadata image.
    pub(super) fn put_meta(
        &self,
        blob: &Blob,
        meta: MetaImage,
        known: bool,
        level: i32,
        warnings: &mut Vec<String>,
    ) -> Result<u64> {
        let key = Key::meta(&blob.digest);
        if self.has_object(&key, blob, known)? {
            return Ok(0);
        }
        let stored = meta.into_stored(level)?;
        match stored.in_memory() {
            Some(bytes) => self.put_checked(&key, bytes, warnings, || {
                self.sound_object(&key, blob).map(drop)
            }),
            None => self.put_streamed(&key, blob, warnings, &|out| stored.emit(out)),
        }
    }

    /// A map. A large one is compressed on its way into the store.
    pub(super) fn put_map(
        &self,
        manifest: &Manifest,
        map: &dyn MapSource,
        known: bool,
        level: i32,
        warnings: &mut Vec<String>,
    ) -> Result<u64> {
        let (key, blob) = (Key::map(&manifest.map.digest), &manifest.map);
        let ended = |object: ObjectWriter| {
            let object = object.finish()?;
            if object.digest == blob.digest {
                return Ok(object.stored);
            }
            // Its bytes were read twice.
            Err(StoreError::InvalidInput {
                object: manifest.reference().to_string(),
                what: "its map changed while it was published; build it again".to_owned(),
            })
        };
        if blob.size < STREAMED {
            let make = || {
                let mut object = ObjectWriter::new(level);
                map.emit(&mut |piece| Ok(object.push(piece)?))?;
                ended(object)
            };
            return self.put_raw(&key, blob, known, make, warnings);
        }
        if self.has_object(&key, blob, known)? {
            return Ok(0);
        }
        self.put_streamed(&key, blob, warnings, &|out| {
            let mut object = ObjectWriter::new(level);
            map.emit(&mut |piece| {
                object.push(piece)?;
                let stored = object.take_stored(STREAM_PIECE);
                stored.map_or(Ok(()), |stored| out(&stored))
            })?;
            out(&ended(object)?)
        })
    }

    /// A compressed object that `fill` hands over as it is to be stored, piece by piece. If it exists
    /// and is damaged, it is replaced. Bytes written.
    fn put_streamed(
        &self,
        key: &Key,
        blob: &Blob,
        warnings: &mut Vec<String>,
        fill: &Fill<'_>,
    ) -> Result<u64> {
        let put = |mode| -> Result<(PutOutcome, u64)> {
            let mut out = self.blobs().put_stream()?;
            let mut len = 0;
            fill(&mut |bytes| {
                len += bytes.len() as u64;
                out.write(bytes)
            })?;
            Ok((out.commit(key, mode)?, len))
        };
        let (outcome, len) = put(PutMode::IfAbsent)?;
        if outcome == PutOutcome::Created {
            return Ok(len);
        }
        if self.has_large(key, blob)? {
            return Ok(0);
        }
        // What is wrong with it.
        match self.sound_object(key, blob) {
            Ok(_) => Ok(0),
            Err(error) if error.is_damage() => {
                tracing::warn!("replaced: {error}");
                warnings.push(format!("replaced: {error}"));
                Ok(put(PutMode::Overwrite)?.1)
            }
            Err(error) => Err(error),
        }
    }

    /// An existing locator stays only if it is the same: each frame of `locator` was verified or
    /// written by this writer, and what another one points at was not. Bytes written.
    pub(crate) fn put_locator(
        &self,
        map_digest: &Digest,
        map: &LayerMap,
        locator: &Locator,
        warnings: &mut Vec<String>,
    ) -> Result<u64> {
        let sound = |old: &[u8]| Ok(Locator::parse(old, map_digest, map).map(drop)?);
        self.put_locator_bytes(map_digest, &locator.to_bytes(), &sound, warnings)
    }

    /// The same of a locator's bytes; `sound` says what is wrong with another one's.
    pub(super) fn put_locator_bytes(
        &self,
        map_digest: &Digest,
        bytes: &[u8],
        sound: &dyn Fn(&[u8]) -> Result<()>,
        warnings: &mut Vec<String>,
    ) -> Result<u64> {
        let key = Key::locator(map_digest);
        let len = bytes.len() as u64;
        if self.blobs().put(&key, bytes, PutMode::IfAbsent)? == PutOutcome::Created {
            return Ok(len);
        }
        let damage = match self.blobs().get(&key, MAX_LOCATOR_BYTES) {
            Ok(Some(old)) if old == bytes => return Ok(0),
            Ok(Some(old)) => match sound(&old) {
                Err(StoreError::Format(error)) => Some(self.bad(&key, &error)),
                other => other.map(|()| None)?,
            },
            Ok(None) => None, // deleted meanwhile
            Err(error) if error.is_damage() => Some(error),
            Err(error) => return Err(error),
        };
        if let Some(error) = damage {
            tracing::warn!("replaced: {error}");
            warnings.push(format!("replaced: {error}"));
        }
        self.blobs().put(&key, bytes, PutMode::Overwrite)?;
        Ok(len)
    }
}
