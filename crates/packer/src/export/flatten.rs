//! A stack as one EROFS image that holds its data itself, for use without us.
//!
//! Metadata first, then the data as it is addressed in a layer: no device, no store, no daemon.
//! Whiteouts are applied. The file appears under its name when all of it is on disk.

use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use layerpack_store::{Digest, LayerStore};

use super::contents::Contents;
use super::{manifests, persist, temporary, write_error};
use crate::error::{PackError, Result};
use crate::layout::{self, Standalone};
use crate::merge;
use crate::options::{EntryCounts, Progress};
use crate::warnings::Warnings;

/// Which layers to flatten, to what.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct FlattenOptions {
    /// Digests of the stack's manifests, bottom first.
    pub layers: Vec<Digest>,
    /// The image's file. An existing one is replaced.
    pub file: PathBuf,
}

impl FlattenOptions {
    /// Options with everything at its default.
    #[must_use]
    pub fn new(layers: Vec<Digest>, file: PathBuf) -> Self {
        Self { layers, file }
    }
}

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlattenReport {
    /// What the image holds.
    pub counts: EntryCounts,
    /// Size of the file in bytes; holes of sparse files are holes of it too.
    pub bytes: u64,
    /// Bytes of metadata at its start.
    pub meta_bytes: u64,
    /// What should be known, in words.
    pub warnings: Vec<String>,
}

/// Writes a stack as one EROFS image.
///
/// # Errors
/// [`PackError::InvalidOption`] without layers or for a file that is no regular one,
/// [`PackError::Write`], [`PackError::Store`] for
/// data that is missing or damaged. What was there before stays as it was.
pub fn flatten(
    store: &LayerStore,
    options: &FlattenOptions,
    progress: &dyn Progress,
) -> Result<FlattenReport> {
    progress.phase("export");
    if options.file.as_os_str() == "-" {
        return Err(PackError::InvalidOption {
            option: "target -".to_owned(),
            why: "an image is not written from its start to its end; name a file".to_owned(),
        });
    }
    let stack = manifests(store, &options.layers, "flatten")?;
    let mut warnings = Warnings::default();
    let mut merged = merge::stack(store, &stack, true, &mut warnings)?;
    merge::overlay::bottom(&mut merged)?;
    let Standalone {
        meta,
        extents,
        data_bytes,
        counts,
    } = layout::standalone(merged)?;
    let mut contents = Contents::new(store, stack.iter().map(|(_, manifest)| manifest))?;
    for extent in &extents {
        contents.expect(extent.digest, extent.len);
    }
    let path = &options.file;
    let error = |source| write_error(path, source);
    let mut file = temporary(path)?;
    let meta_bytes = meta.len() as u64;
    file.write_all(&meta).map_err(error)?;
    drop(meta);
    let bytes = meta_bytes + data_bytes;
    // What no chunk covers are holes, which read as the zeros that they are.
    file.as_file().set_len(bytes).map_err(error)?;
    for extent in &extents {
        let chunk = contents.get(&extent.digest)?;
        let at = meta_bytes + extent.data_offset;
        file.as_file().write_all_at(chunk, at).map_err(error)?;
        progress.bytes(u64::from(extent.len));
    }
    persist(file, path)?;
    Ok(FlattenReport {
        counts,
        bytes,
        meta_bytes,
        warnings: warnings.into_vec(),
    })
}
