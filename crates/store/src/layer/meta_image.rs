//! A layer's metadata image on its way into the store.

use std::path::Path;
use std::sync::Arc;

use crate::codec::ObjectWriter;
use crate::error::{FormatError, Result};
use crate::manifest::Blob;
use crate::spill::Spill;

/// A metadata image of so many raw bytes is not held as it is.
const SMALL_META: usize = 4 << 20;
/// Compressed bytes that are put away at once.
const PIECE: usize = 64 << 10;

/// A metadata image: raw, or as [`MetaWriter`] compressed it, so that a large one is never in
/// memory as it is. Cheap to clone once it is compressed.
#[derive(Clone)]
pub struct MetaImage(pub(super) Image);

#[derive(Clone)]
pub(super) enum Image {
    Raw { blob: Blob, raw: Vec<u8> },
    Stored { blob: Blob, stored: Arc<Spill> },
}

impl MetaImage {
    pub(super) fn blob(&self) -> Blob {
        match &self.0 {
            Image::Raw { blob, .. } | Image::Stored { blob, .. } => *blob,
        }
    }

    /// What goes into the store.
    pub(super) fn into_stored(self, level: i32) -> Result<Arc<Spill>> {
        match self.0 {
            Image::Raw { raw, .. } => Ok(Arc::new(compressed(level, &raw)?.into())),
            Image::Stored { stored, .. } => Ok(stored),
        }
    }
}

impl std::fmt::Debug for MetaImage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("MetaImage").field(&self.blob()).finish()
    }
}

impl From<Vec<u8>> for MetaImage {
    fn from(raw: Vec<u8>) -> Self {
        let blob = Blob::of(&raw);
        Self(Image::Raw { blob, raw })
    }
}

/// Takes a metadata image piece by piece. A large one is compressed as it comes; a small one only
/// when it is known that the store does not have it.
pub struct MetaWriter {
    level: i32,
    /// The image so far, while it is small.
    raw: Vec<u8>,
    large: Option<ObjectWriter>,
    /// What is compressed of a large one.
    stored: Spill,
}

impl MetaWriter {
    /// For an image that is compressed at this zstd level, -7 to 22.
    #[must_use]
    pub fn new(level: i32) -> Self {
        Self {
            level,
            raw: Vec::new(),
            large: None,
            stored: Spill::default(),
        }
    }

    /// Puts what is compressed of a large image into an unnamed temporary file in `scratch`, as far
    /// as one can be made there. To be called before the first byte.
    #[must_use]
    pub fn spilling(self, scratch: Option<&Path>) -> Self {
        Self {
            stored: Spill::new("a metadata image", scratch),
            ..self
        }
    }

    fn push(&mut self, bytes: &[u8]) -> Result<(), FormatError> {
        if let Some(object) = &mut self.large {
            object.push(bytes)?;
            if let Some(stored) = object.take_stored(PIECE) {
                self.stored.write(&stored);
            }
            return Ok(());
        }
        self.raw.extend_from_slice(bytes);
        if self.raw.len() > SMALL_META {
            let mut object = ObjectWriter::new(self.level);
            object.push(&std::mem::take(&mut self.raw))?;
            self.large = Some(object);
        }
        Ok(())
    }

    /// The image.
    ///
    /// # Errors
    /// If zstd fails.
    pub fn finish(mut self) -> Result<MetaImage> {
        let Some(object) = self.large else {
            return Ok(self.raw.into());
        };
        let object = object.finish()?;
        self.stored.write(&object.stored);
        Ok(MetaImage(Image::Stored {
            blob: Blob {
                digest: object.digest,
                size: object.size,
            },
            stored: Arc::new(self.stored),
        }))
    }
}

impl std::fmt::Debug for MetaWriter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MetaWriter").finish_non_exhaustive()
    }
}

impl std::io::Write for MetaWriter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.push(bytes).map_err(std::io::Error::other)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

pub(super) fn compressed(level: i32, raw: &[u8]) -> Result<Vec<u8>, FormatError> {
    let mut object = ObjectWriter::new(level);
    object.push(raw)?;
    Ok(object.finish()?.stored)
}

/// Bytes that an object takes in a store when it is compressed at this level.
pub(crate) fn stored_len(level: i32, raw: &[u8]) -> Result<u64> {
    Ok(compressed(level, raw)?.len() as u64)
}
