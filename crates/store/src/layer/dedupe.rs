//! What the store already has: its index, and the tables of those packs that are really hit. A hit counts only if the pack is there, has its size, and its table
//! confirms the chunk, and the stored bytes of its frame have their digest: a layer is never
//! published on an index's word alone, nor on damaged bytes. What is damaged, cannot be read or is
//! gone is passed over with a warning, and the chunk is written anew.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use super::LayerStore;
use super::frames::{FrameCheck, is_unusable};
use crate::digest::Digest;
use crate::error::{FormatError, Result, StoreError};
use crate::format::index::{IndexPack, IndexSegment, MAX_INDEX_BYTES};
use crate::format::pack::{
    FOOTER_LEN, FRAMES_START, MAX_TABLE_LEN, PackFooter, PackFrame, PackTable, check_header,
};
use crate::index::{ChunkIndex, Place, SegmentStream, segments, twice};
use crate::key::Key;
use crate::parallel::{Bounds, Order, for_each};

/// Verifying an index: requests at once, and bytes in memory.
const VERIFY: Bounds = Bounds {
    threads: 8,
    bytes: 64 << 20,
};
/// Tables of packs kept in memory, and most chunks in all but the last of them: one of a million
/// small files has as many as a hundred others.
const MAX_TABLES: usize = 64;
const MAX_TABLE_CHUNKS: usize = 96 << 10;

/// A chunk in a pack of the store.
#[derive(Debug, Clone, Copy)]
pub(super) struct StoredChunk {
    pub(super) pack: IndexPack,
    pub(super) frame: PackFrame,
    /// Bytes from the start of the frame's raw bytes.
    pub(super) offset: u32,
    pub(super) len: u32,
}

/// What there is at a place of a pack.
enum Found {
    /// The chunk.
    Usable(StoredChunk),
    /// The pack or the frame cannot be used.
    Unusable,
    /// Another chunk, or none; the pack.
    Another(Digest),
}

#[derive(Debug)]
pub(super) struct IndexSet {
    store: LayerStore,
    index: ChunkIndex,
    /// Packs that were hit; their numbers are used here only.
    packs: Vec<IndexPack>,
    numbers: HashMap<IndexPack, u32>,
    /// `None`: not usable.
    tables: HashMap<u32, Option<Arc<PackTable>>>,
    /// Tables in memory and the chunks of each, oldest first.
    loaded: VecDeque<(u32, usize)>,
    pub(super) frames: FrameCheck,
    /// The pack and index of the chunk that was found last: what is packed again comes in the order
    /// of its pack.
    last: Option<(u32, u32)>,
    /// Chunks that will be asked for soon. The first of them that the index is asked for is looked up
    /// together with the others.
    coming: Vec<Digest>,
    /// What came of that.
    looked_up: HashMap<Digest, Vec<Place>>,
    warnings: Vec<String>,
}

impl IndexSet {
    /// Opens the index of the store.
    pub(super) fn open(store: LayerStore) -> Result<Self> {
        let index = ChunkIndex::open(&store, store.index_cache())?;
        Ok(Self {
            store,
            index,
            packs: Vec::new(),
            numbers: HashMap::new(),
            tables: HashMap::new(),
            loaded: VecDeque::new(),
            frames: FrameCheck::default(),
            last: None,
            coming: Vec::new(),
            looked_up: HashMap::new(),
            warnings: Vec::new(),
        })
    }

    /// Says which chunks are about to be asked for: those of a frame, or of a piece of a file. The
    /// memory that it takes is for as many.
    pub(super) fn expect(&mut self, digests: impl Iterator<Item = Digest>) {
        self.coming.clear();
        self.looked_up.clear();
        if self.index.is_at_hand() {
            self.coming.extend(digests);
        }
    }

    /// Looks up what is expected.
    fn look_up_coming(&mut self) -> Result<()> {
        let coming = std::mem::take(&mut self.coming);
        if coming.len() < 2 {
            return Ok(());
        }
        self.looked_up
            .extend(coming.iter().map(|digest| (*digest, Vec::new())));
        let looked_up = &mut self.looked_up;
        self.index.find_many(&coming, 1, &mut |number, place| {
            let digest = coming.get(number);
            if let Some(places) = digest.and_then(|digest| looked_up.get_mut(digest))
                && !places.contains(&place)
            {
                places.push(place);
            }
        })
    }

    /// Numbers of packs, and indexes into their tables' chunks, where the chunk may be.
    fn places(&mut self, digest: &Digest) -> Result<Vec<(u32, u32)>> {
        self.look_up_coming()?;
        let places = match self.looked_up.get(digest) {
            Some(places) => places.clone(),
            None => {
                let mut places = Vec::new();
                self.index.find(digest, &mut places)?;
                places
            }
        };
        places
            .into_iter()
            .map(|place| {
                let next = u32::try_from(self.packs.len())
                    .map_err(|_| FormatError::new("index", "2^32-1 packs were hit"))?;
                let number = *self.numbers.entry(place.pack).or_insert(next);
                if number == next {
                    self.packs.push(place.pack);
                }
                Ok((number, place.chunk))
            })
            .collect()
    }

    fn warn(&mut self, text: String) {
        tracing::warn!("{text}");
        self.warnings.push(text);
    }

    /// A usable place of the chunk with this digest.
    pub(super) fn locate(&mut self, digest: &Digest) -> Result<Option<StoredChunk>> {
        if let Some(found) = self.locate_next(digest)? {
            return Ok(Some(found));
        }
        for (number, chunk) in self.places(digest)? {
            match self.at(number, chunk, digest)? {
                Found::Usable(found) => return Ok(Some(found)),
                Found::Unusable => {}
                Found::Another(pack) => self.warn(format!(
                    "not used: an index says that {} has chunk {digest}",
                    Key::pack(&pack)
                )),
            }
        }
        Ok(None)
    }

    /// The same if it is the chunk after the last one in a pack whose table is at hand: then no index
    /// is asked.
    fn locate_next(&mut self, digest: &Digest) -> Result<Option<StoredChunk>> {
        let Some((number, chunk)) = self.last else {
            return Ok(None);
        };
        if !self.tables.contains_key(&number) {
            return Ok(None);
        }
        Ok(match self.at(number, chunk.saturating_add(1), digest)? {
            Found::Usable(found) => Some(found),
            Found::Unusable | Found::Another(_) => None,
        })
    }

    /// Whether the chunk with this index in the table of a pack is the one with this digest, and
    /// usable.
    fn at(&mut self, number: u32, chunk: u32, digest: &Digest) -> Result<Found> {
        let Some(table) = self.table(number)? else {
            return Ok(Found::Unusable);
        };
        let Some(&pack) = usize::try_from(number).ok().and_then(|p| self.packs.get(p)) else {
            return Ok(Found::Unusable);
        };
        let known = usize::try_from(chunk)
            .ok()
            .and_then(|c| table.chunks.get(c));
        let known = known.filter(|c| &c.digest == digest).and_then(|c| {
            let frame = usize::try_from(c.frame)
                .ok()
                .and_then(|f| table.frames.get(f))?;
            Some((c, *frame))
        });
        let Some((known, frame)) = known else {
            return Ok(Found::Another(pack.id));
        };
        let sound = self
            .frames
            .is_sound(&self.store, number, &pack, &table, known.frame)?;
        if !sound {
            return Ok(Found::Unusable);
        }
        self.last = Some((number, chunk));
        Ok(Found::Usable(StoredChunk {
            pack,
            frame,
            offset: known.offset,
            len: known.len,
        }))
    }

    /// Gives back the memory that only makes many look-ups fast.
    pub(super) fn rest(&mut self) {
        // What is not usable was said once.
        self.tables.retain(|_, table| table.is_none());
        self.loaded = VecDeque::new();
        self.last = None;
        self.coming = Vec::new();
        self.looked_up = HashMap::new();
    }

    /// Why a chunk that an index names has no usable place, if damage of its frame is the reason.
    pub(super) fn damage_of(&mut self, digest: &Digest) -> Result<Option<StoreError>> {
        for (number, chunk) in self.places(digest)? {
            let table = self.table(number)?;
            let damage = table.and_then(|table| {
                let chunk = table.chunks.get(usize::try_from(chunk).ok()?)?;
                let frame = table.frames.get(usize::try_from(chunk.frame).ok()?)?;
                self.frames.damage(&self.store, number, frame.offset)
            });
            if damage.is_some() {
                return Ok(damage);
            }
        }
        Ok(None)
    }

    /// What was passed over so far, one line each.
    pub(super) fn take_warnings(&mut self) -> Vec<String> {
        let frames = self.frames.warnings(&self.store);
        for line in &frames {
            tracing::warn!("{line}");
        }
        let mut warnings = self.index.take_warnings();
        warnings.append(&mut self.warnings);
        warnings.extend(frames);
        warnings
    }

    fn table(&mut self, number: u32) -> Result<Option<Arc<PackTable>>> {
        if let Some(table) = self.tables.get(&number) {
            return Ok(table.clone());
        }
        let Some(&pack) = usize::try_from(number).ok().and_then(|p| self.packs.get(p)) else {
            return Ok(None);
        };
        // Before the next one takes memory.
        while self.loaded.len() >= MAX_TABLES
            || self.loaded.iter().map(|(_, chunks)| chunks).sum::<usize>() > MAX_TABLE_CHUNKS
        {
            let Some((oldest, _)) = self.loaded.pop_front() else {
                break;
            };
            self.tables.remove(&oldest);
        }
        let table = match self.store.pack_table(&pack) {
            Ok(table) => Some(Arc::new(table)),
            // Collected since the index was written: no reason to speak of it.
            Err(StoreError::Missing { .. }) => None,
            Err(error) if is_unusable(&error) => {
                self.warn(format!("not used: {error}"));
                None
            }
            Err(error) => return Err(error),
        };
        if let Some(table) = &table {
            self.loaded.push_back((number, table.chunks.len()));
        }
        self.tables.insert(number, table.clone());
        Ok(table)
    }
}

impl LayerStore {
    /// An index segment, verified; `None` if it is gone.
    pub(crate) fn index_segment(&self, key: &Key) -> Result<Option<IndexSegment>> {
        self.get_checked(key, MAX_INDEX_BYTES, &mut |bytes| {
            let digest = Digest::of(bytes);
            if key.digest() != Some(digest) {
                return Err(self.corrupt(key, format!("its digest is {digest}")));
            }
            IndexSegment::parse(bytes).map_err(|e| self.bad(key, &e))
        })
    }

    /// A pack's table, after checking that the pack has its size and its header.
    pub(super) fn pack_table(&self, pack: &IndexPack) -> Result<PackTable> {
        let key = Key::pack(&pack.id);
        let size = self.blobs().size(&key)?.ok_or_else(|| self.missing(&key))?;
        if size != pack.size {
            return Err(self.corrupt(
                &key,
                format!("it has {size} bytes, its index says {}", pack.size),
            ));
        }
        self.check_pack_header(&key, size)?;
        self.read_table(&key, pack.size, pack.table_offset)
    }

    /// That a pack of `size` bytes begins as one.
    pub(super) fn check_pack_header(&self, key: &Key, size: u64) -> Result<()> {
        self.range_checked(key, 0..FRAMES_START.min(size), &mut |head| {
            check_header(head).map_err(|e| self.bad(key, &e))
        })
    }

    /// The footer of a pack of `size` bytes.
    pub(super) fn read_footer(&self, key: &Key, size: u64) -> Result<PackFooter> {
        self.range_checked(key, size.saturating_sub(FOOTER_LEN)..size, &mut |footer| {
            PackFooter::parse(footer, size).map_err(|e| self.bad(key, &e))
        })
    }

    /// Table and footer of a pack of `size` bytes whose table begins at `table_offset`.
    pub(super) fn read_table(&self, key: &Key, size: u64, table_offset: u64) -> Result<PackTable> {
        let tail_len = size.saturating_sub(table_offset);
        if !(FOOTER_LEN..=MAX_TABLE_LEN + FOOTER_LEN).contains(&tail_len) {
            return Err(self.corrupt(key, format!("its table would have {tail_len} bytes")));
        }
        self.range_checked(key, table_offset..size, &mut |tail| {
            self.table_of(key, size, table_offset, tail)
        })
    }

    fn table_of(&self, key: &Key, size: u64, table_offset: u64, tail: &[u8]) -> Result<PackTable> {
        let short = || self.corrupt(key, "the store answered with too few bytes");
        let at = tail
            .len()
            .saturating_sub(usize::try_from(FOOTER_LEN).unwrap_or(usize::MAX));
        let (table, footer) = tail.split_at_checked(at).ok_or_else(short)?;
        let footer = PackFooter::parse(footer, size).map_err(|e| self.bad(key, &e))?;
        if footer.table_offset != table_offset {
            let what = format!(
                "its table begins at {}, not {table_offset}",
                footer.table_offset
            );
            return Err(self.corrupt(key, what));
        }
        PackTable::parse(table, &footer).map_err(|e| self.bad(key, &e))
    }

    /// Reads every index segment of the store and checks it, and that its packs are there. Several
    /// requests at once, in bounded memory.
    ///
    /// # Errors
    /// If the backend fails; what is damaged or missing is in the answer.
    pub fn verify_index(&self) -> Result<Vec<StoreError>> {
        let listed = segments(self)?;
        let mut damaged = Vec::new();
        let mut packs: Vec<IndexPack> = Vec::new();
        for_each(
            &listed,
            VERIFY,
            Order::Kept,
            |(_, _, size)| (*size).min(8 << 20),
            |(key, _, _)| self.check_segment(key),
            |_, result| match result {
                Ok(named) => {
                    packs.extend(named);
                    Ok(())
                }
                Err(error) if error.is_damage() => {
                    damaged.push(error);
                    Ok(())
                }
                Err(error) => Err(error),
            },
        )?;
        let mut seen = HashSet::new();
        packs.retain(|pack| seen.insert(*pack));
        for_each(
            &packs,
            VERIFY,
            Order::Kept,
            |pack| {
                pack.size
                    .saturating_sub(pack.table_offset)
                    .saturating_mul(3)
            },
            |pack| self.pack_table(pack).map(|_| ()),
            |_, result| match result {
                Err(error) if error.is_damage() => {
                    damaged.push(error);
                    Ok(())
                }
                other => other,
            },
        )?;
        Ok(damaged)
    }

    /// The packs of a segment, after checking all of it; none if it is gone.
    pub(super) fn check_segment(&self, key: &Key) -> Result<Vec<IndexPack>> {
        let check = || {
            let Some(stream) = SegmentStream::open(self, key)? else {
                return Ok(Vec::new());
            };
            let packs = stream.packs().to_vec();
            stream.check().map(|()| packs)
        };
        match twice(check) {
            Err(StoreError::Missing { .. }) => Ok(Vec::new()), // deleted meanwhile
            checked => checked,
        }
    }
}
