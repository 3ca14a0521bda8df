//! A layer's map on its way into the store: in memory, or its extents in an unnamed temporary file, so
//! that a layer of a million files can be published in little memory.

use std::cell::RefCell;
use std::io;
use std::path::Path;
use std::sync::Arc;

use crate::digest::Digest;
use crate::error::{FormatError, Result, StoreError};
use crate::format::map::{
    Extent, ExtentCheck, LayerMap, MAX_DATA_SIZE, MapBuilder, Parts, check_data_size, normal,
};
use crate::manifest::Blob;
use crate::spool::Spool;

/// Bytes of an extent in the file: offset, length, digest.
const RECORD: usize = 8 + 4 + Digest::LEN;

/// A map that is to be published.
#[derive(Debug, Clone)]
pub struct MapImage(Kind);

#[derive(Debug, Clone)]
enum Kind {
    Held(LayerMap),
    Spooled(Arc<Spooled>),
}

/// A map whose extents are in a file.
#[derive(Debug)]
struct Spooled {
    extents: Spool<RECORD>,
    data_size: u64,
    implicit: Vec<Vec<u8>>,
    blob: Blob,
}

impl From<LayerMap> for MapImage {
    fn from(map: LayerMap) -> Self {
        Self(Kind::Held(map))
    }
}

impl MapImage {
    /// Digest and size of the raw bytes.
    #[must_use]
    pub fn blob(&self) -> Blob {
        match &self.0 {
            Kind::Held(map) => map.blob(),
            Kind::Spooled(map) => map.blob,
        }
    }

    /// See [`LayerMap::data_size`].
    #[must_use]
    pub fn data_size(&self) -> u64 {
        match &self.0 {
            Kind::Held(map) => map.data_size(),
            Kind::Spooled(map) => map.data_size,
        }
    }

    /// The map, in memory.
    ///
    /// # Errors
    /// If the temporary file cannot be read.
    pub fn load(&self) -> Result<LayerMap> {
        let spooled = match &self.0 {
            Kind::Held(map) => return Ok(map.clone()),
            Kind::Spooled(spooled) => spooled,
        };
        let mut map = MapBuilder::new(spooled.data_size);
        self.each(&mut |extent| {
            map.push(*extent);
            Ok(())
        })?;
        for path in &spooled.implicit {
            map.implicit(path);
        }
        Ok(map.build()?)
    }
}

/// What publishing asks of a map.
pub(super) trait MapSource: Sync {
    /// Digest and size of the raw bytes.
    fn blob(&self) -> Blob;

    /// Number of extents.
    fn count(&self) -> usize;

    /// Hands over the extents in their order.
    fn each(&self, act: &mut dyn FnMut(&Extent) -> Result<()>) -> Result<()>;

    /// Hands over the raw bytes piece by piece.
    fn emit(&self, out: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()>;
}

impl MapSource for LayerMap {
    fn blob(&self) -> Blob {
        Self::blob(self)
    }

    fn count(&self) -> usize {
        self.extents().len()
    }

    fn each(&self, act: &mut dyn FnMut(&Extent) -> Result<()>) -> Result<()> {
        self.extents().iter().try_for_each(act)
    }

    fn emit(&self, out: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        Self::emit(self, out)
    }
}

impl MapSource for MapImage {
    fn blob(&self) -> Blob {
        Self::blob(self)
    }

    fn count(&self) -> usize {
        match &self.0 {
            Kind::Held(map) => map.count(),
            Kind::Spooled(map) => map.extents.len(),
        }
    }

    fn each(&self, act: &mut dyn FnMut(&Extent) -> Result<()>) -> Result<()> {
        match &self.0 {
            Kind::Held(map) => map.each(act),
            Kind::Spooled(map) => {
                let failed = RefCell::default();
                let mut extents = Reading::new(&map.extents, &failed);
                extents.try_for_each(|extent| act(&extent))?;
                tell(&map.extents, failed)
            }
        }
    }

    fn emit(&self, out: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        match &self.0 {
            Kind::Held(map) => MapSource::emit(map, out),
            Kind::Spooled(map) => {
                let failed = RefCell::default();
                parts(&map.extents, &failed, map.data_size, &map.implicit).emit(out)?;
                tell(&map.extents, failed)
            }
        }
    }
}

/// Extents as a file has them, in their order; they end where it cannot be read, and `failed` says
/// why.
struct Reading<'a> {
    extents: &'a Spool<RECORD>,
    failed: &'a RefCell<Option<io::Error>>,
    at: usize,
}

impl<'a> Reading<'a> {
    const fn new(extents: &'a Spool<RECORD>, failed: &'a RefCell<Option<io::Error>>) -> Self {
        Self {
            extents,
            failed,
            at: 0,
        }
    }
}

impl Iterator for Reading<'_> {
    type Item = Extent;

    fn next(&mut self) -> Option<Extent> {
        if self.at >= self.extents.len() {
            return None;
        }
        match self.extents.get(self.at) {
            Ok(record) => {
                self.at += 1;
                Some(decode(&record))
            }
            Err(error) => {
                self.failed.borrow_mut().get_or_insert(error);
                None
            }
        }
    }
}

fn parts<'a>(
    extents: &'a Spool<RECORD>,
    failed: &'a RefCell<Option<io::Error>>,
    data_size: u64,
    implicit: &'a [Vec<u8>],
) -> Parts<'a, impl Fn() -> Reading<'a>> {
    Parts {
        data_size,
        count: extents.len(),
        extents: move || Reading::new(extents, failed),
        implicit,
    }
}

/// Whether all extents could be read.
fn tell(extents: &Spool<RECORD>, failed: RefCell<Option<io::Error>>) -> Result<()> {
    match failed.into_inner() {
        None => Ok(()),
        Some(source) => Err(StoreError::Io {
            operation: "keep",
            store: extents.place(),
            key: "the extents of a map".to_owned(),
            source,
        }),
    }
}

fn encode(extent: &Extent) -> [u8; RECORD] {
    let mut record = [0; RECORD];
    let (numbers, digest) = record.split_at_mut(RECORD - Digest::LEN);
    let (offset, len) = numbers.split_at_mut(8);
    offset.copy_from_slice(&extent.data_offset.to_le_bytes());
    len.copy_from_slice(&extent.len.to_le_bytes());
    digest.copy_from_slice(extent.digest.as_bytes());
    record
}

fn decode(record: &[u8; RECORD]) -> Extent {
    let mut digest = [0; Digest::LEN];
    let (numbers, tail) = record.split_at(RECORD - Digest::LEN);
    let (offset, len) = numbers.split_at(8);
    digest.copy_from_slice(tail);
    Extent {
        data_offset: offset.try_into().map_or(0, u64::from_le_bytes),
        len: len.try_into().map_or(0, u32::from_le_bytes),
        digest: Digest::from_bytes(digest),
    }
}

/// Collects a map whose extents come in their order. Many of them lie in an unnamed temporary file.
#[derive(Debug)]
pub struct MapWriter {
    extents: Spool<RECORD>,
    check: ExtentCheck,
}

impl MapWriter {
    /// A map without extents. Those of a large one are to be in a file of the directory `scratch`;
    /// `None`: all stay in memory.
    #[must_use]
    pub fn new(scratch: Option<&Path>) -> Self {
        Self {
            extents: Spool::new(scratch),
            check: ExtentCheck::new(MAX_DATA_SIZE),
        }
    }

    /// Adds a chunk's place.
    ///
    /// # Errors
    /// If it is not after the one before, or no place that a chunk can have.
    pub fn push(&mut self, extent: &Extent) -> Result<(), FormatError> {
        self.check.next(extent)?;
        self.extents.push(&encode(extent));
        Ok(())
    }

    /// Number of extents.
    #[must_use]
    pub fn len(&self) -> usize {
        self.extents.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.extents.is_empty()
    }

    /// The extents, in memory.
    ///
    /// # Errors
    /// If the temporary file cannot be read.
    pub fn extents(&self) -> Result<Vec<Extent>> {
        let failed = RefCell::default();
        let extents = Reading::new(&self.extents, &failed).collect();
        tell(&self.extents, failed)?;
        Ok(extents)
    }

    /// The map: of `data_size` bytes, a multiple of 4096, with these implicit directories.
    ///
    /// # Errors
    /// If an invariant of [`LayerMap`] does not hold, or the temporary file cannot be read.
    pub fn finish(self, data_size: u64, implicit: Vec<Vec<u8>>) -> Result<MapImage> {
        let Self { extents, check } = self;
        check_data_size(data_size)?;
        if check.end() > data_size {
            return Err(FormatError::new(
                "LPMAP",
                format!("its extents go beyond the data size {data_size}"),
            )
            .into());
        }
        let implicit = normal(implicit, extents.len())?;
        let failed = RefCell::default();
        let blob = parts(&extents, &failed, data_size, &implicit).blob();
        tell(&extents, failed)?;
        Ok(MapImage(Kind::Spooled(Arc::new(Spooled {
            extents,
            data_size,
            implicit,
            blob,
        }))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extents(count: u32) -> impl Iterator<Item = Extent> {
        (0..count).map(|i| Extent {
            data_offset: u64::from(i) * 8192 + u64::from(i % 7),
            len: i % 4096 + 1,
            digest: Digest::of(&i.to_le_bytes()),
        })
    }

    #[test]
    fn a_spooled_map_is_the_map() {
        let dir = tempfile::tempdir().unwrap();
        for (count, scratch) in [(0, None), (5, Some(dir.path())), (60_000, Some(dir.path()))] {
            let size = u64::from(count) * 8192;
            let mut builder = MapBuilder::new(size);
            let mut writer = MapWriter::new(scratch);
            for extent in extents(count) {
                builder.push(extent);
                writer.push(&extent).unwrap();
            }
            let implicit = [b"b/c".to_vec(), b"a".to_vec(), b"a".to_vec()];
            implicit.iter().for_each(|path| {
                builder.implicit(path);
            });
            let map = builder.build().unwrap();
            assert_eq!(writer.len(), map.extents().len());
            assert_eq!(writer.extents.is_spilled(), count == 60_000);
            assert_eq!(writer.extents().unwrap(), map.extents());
            let image = writer.finish(size, implicit.to_vec()).unwrap();
            assert_eq!((image.blob(), image.data_size()), (map.blob(), size));
            assert_eq!(image.count(), map.count());
            assert_eq!(image.load().unwrap(), map);
            let mut bytes = Vec::new();
            let mut take = |piece: &[u8]| {
                bytes.extend_from_slice(piece);
                Ok(())
            };
            MapSource::emit(&image, &mut take).unwrap();
            assert!(bytes == map.to_bytes());
            let held = MapImage::from(map.clone());
            assert_eq!((held.blob(), held.load().unwrap()), (map.blob(), map));
        }
    }

    #[test]
    fn what_breaks_a_rule_is_refused() {
        let mut writer = MapWriter::new(None);
        assert!(writer.is_empty());
        let [first, second] = [0, 1].map(|i| extents(2).nth(i).unwrap());
        writer.push(&second).unwrap();
        writer.push(&first).unwrap_err();
        let long = Extent { len: 0, ..second };
        writer.push(&long).unwrap_err();
        let finish = |size, path: &[u8]| {
            let mut writer = MapWriter::new(None);
            writer.push(&second).unwrap();
            writer.finish(size, vec![path.to_vec()])
        };
        finish(8192, b"a").unwrap_err();
        finish(16_000, b"a").unwrap_err();
        finish(16_384, b"a//b").unwrap_err();
        finish(16_384, b"a/b").unwrap();
    }

    #[test]
    fn a_file_that_cannot_be_read_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = MapWriter::new(Some(dir.path()));
        for extent in extents(60_000) {
            writer.push(&extent).unwrap();
        }
        let image = writer.finish(60_000 * 8192, Vec::new()).unwrap();
        let Kind::Spooled(spooled) = &image.0 else {
            panic!("it is in memory");
        };
        spooled.extents.cut(7);
        let mut count = 0;
        let error = image.each(&mut |_| {
            count += 1;
            Ok(())
        });
        assert!(matches!(error, Err(StoreError::Io { .. })) && count < 60_000);
        MapSource::emit(&image, &mut |_| Ok(())).unwrap_err();
        image.load().unwrap_err();
    }
}
