//! The fetching side: takes claimed frames to the store and lands their flights.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use layerpack_store::peer::{MAX_ASKED, MAX_RANGES, PeerAnswer, PeerAsk};
use layerpack_store::{Delivery, Digest, FrameLoc, LayerStore, ReadLimits, StoreError};

use super::ReadError;
use super::blob::{Blob, Source};
use super::copies;
use super::flight::{Flight, Outcome};
use super::joint::{Entered, Own, Place};
use crate::peers::{Asked, MAX_ANSWER, Member, PART, Peers};
use crate::sync::Ordering;

/// Shortest time between two looks for a newer locator of a blob.
const REFRESH_PAUSE: Duration = Duration::from_secs(5);

/// Frames of one batch that lie apart are asked for at once. Their memory is in the readers' budget
/// already.
const BATCH_LIMITS: ReadLimits = ReadLimits {
    requests: 4,
    bytes: 32 << 20,
};

/// Frames to fetch, with the duty to land their flights: whatever is left when it is dropped
/// (queue closed, panic) fails, and nobody waits for ever.
pub(super) struct Batch {
    pub(super) blob: Arc<Blob>,
    pub(super) source: Source,
    pub(super) frames: Vec<(u32, Arc<Flight>)>,
}

impl Batch {
    /// Takes a flight out of the batch and ends it.
    pub(super) fn land(&mut self, frame: u32, outcome: Outcome) {
        if let Some(at) = self.frames.iter().position(|(number, _)| *number == frame) {
            let (_, flight) = self.frames.swap_remove(at);
            self.blob
                .flights
                .land(self.source.generation, frame, &flight, outcome);
        }
    }

    /// Notes that a frame was had without anybody being asked for it.
    pub(super) fn copied(&self, frame: u32) {
        if let Some((_, flight)) = self.frames.iter().find(|(number, _)| *number == frame) {
            flight.set_copied();
        }
    }

    /// Says in the log what could not be fetched.
    fn report(&self, error: &StoreError) {
        let (from, to) = self.span();
        tracing::warn!(layer = %self.blob.layer, store = %self.blob.store_url,
            frames = self.frames.len(), offset = from, end = to, error = %error,
            "frames cannot be fetched");
    }

    /// Says in the log what a panic took along.
    fn tell_panic(&self) {
        let (from, to) = self.span();
        tracing::error!(layer = %self.blob.layer, store = %self.blob.store_url,
            frames = self.frames.len(), offset = from, end = to,
            "a fetch panicked; its readers get an error");
    }

    /// Where in the layer's data the frames begin and end.
    fn span(&self) -> (Option<u64>, Option<u64>) {
        let map = self.blob.map.extents();
        let extents = self
            .frames
            .iter()
            .flat_map(|(frame, _)| self.source.locator.extents_of_frame(*frame))
            .filter_map(|index| map.get(usize::try_from(*index).ok()?));
        let from = extents.clone().map(|e| e.data_offset).min();
        (from, extents.map(layerpack_store::Extent::end).max())
    }

    /// Leaves out what was asked for anew while this batch waited for its turn.
    fn leave_out_replaced(&mut self) {
        let (blob, generation) = (Arc::clone(&self.blob), self.source.generation);
        let (ours, replaced) = std::mem::take(&mut self.frames)
            .into_iter()
            .partition(|(frame, flight)| blob.flights.is_current(generation, *frame, flight));
        let others = Batch {
            blob,
            source: self.source.clone(),
            frames: replaced,
        };
        self.frames = ours;
        drop(others);
    }

    fn land_rest(&mut self, outcome: &Outcome) {
        for (frame, flight) in std::mem::take(&mut self.frames) {
            self.blob
                .flights
                .land(self.source.generation, frame, &flight, outcome.clone());
        }
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.tell_panic();
        }
        self.land_rest(&Outcome::Failed(Arc::new(ReadError::Abandoned)));
    }
}

/// Where a frame came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    Store,
    Peer,
    /// Another layer of this node.
    Layer,
}

/// Queues the fetch of claimed frames: from the peers that are their homes, else from the store.
pub(super) fn submit(blob: &Arc<Blob>, source: &Source, claimed: Vec<(u32, Arc<Flight>)>) {
    let Some(peers) = blob.fetcher.peers() else {
        return submit_direct(blob, source, claimed);
    };
    let mut direct = Vec::new();
    // By the homes' addresses.
    let mut homes: BTreeMap<_, (Arc<Member>, Vec<_>)> = BTreeMap::new();
    for (frame, flight) in claimed {
        let home = part_of(blob, source, frame).and_then(|part| peers.home(&blob.layer, part));
        match home {
            None => direct.push((frame, flight)),
            Some(home) => homes
                .entry(home.client.address())
                .or_insert_with(|| (home, Vec::new()))
                .1
                .push((frame, flight)),
        }
    }
    submit_direct(blob, source, direct);
    for (home, frames) in homes.into_values() {
        for batch in batches(blob, source, frames, true) {
            let (peers, home) = (Arc::clone(&peers), Arc::clone(&home));
            let job = Box::new(move || {
                let mut batch = batch;
                batch.copy_joined();
                if batch.frames.is_empty() {
                    return;
                }
                batch.ask(&peers, &home);
                if !batch.frames.is_empty() {
                    let blob = Arc::clone(&batch.blob);
                    drop(blob.lane.pool.submit(Box::new(move || run(batch))));
                }
            });
            drop(blob.fetcher.asking.submit(job));
        }
    }
}

/// Queues the fetch of claimed frames from the store, in batches of neighbours.
pub(super) fn submit_direct(blob: &Arc<Blob>, source: &Source, claimed: Vec<(u32, Arc<Flight>)>) {
    for batch in batches(blob, source, claimed, false) {
        for (_, flight) in &batch.frames {
            flight.go_direct();
        }
        // A pool that is closed hands the job back; dropping it fails its flights.
        drop(blob.lane.pool.submit(Box::new(move || run(batch))));
    }
}

pub(super) fn frame_of(source: &Source, frame: u32) -> Option<&FrameLoc> {
    let at = usize::try_from(frame).ok()?;
    source.locator.frames().get(at)
}

/// The part of the layer's data that a frame is counted to; `None` if no peer is to be asked for it.
fn part_of(blob: &Blob, source: &Source, frame: u32) -> Option<u64> {
    let raw = frame_of(source, frame)?.raw_len;
    let first = source.locator.extents_of_frame(frame).first()?;
    let extent = blob.map.extents().get(usize::try_from(*first).ok()?)?;
    (u64::from(raw) <= MAX_ANSWER).then_some(extent.data_offset / PART)
}

/// Claimed frames in groups of neighbours: what one request to the store may bring, or one answer
/// of a peer (whose bytes are not compressed).
fn batches(
    blob: &Arc<Blob>,
    source: &Source,
    mut claimed: Vec<(u32, Arc<Flight>)>,
    for_peer: bool,
) -> Vec<Batch> {
    let place = |frame: u32| frame_of(source, frame).map_or((u32::MAX, 0), |f| (f.pack, f.offset));
    claimed.sort_by_key(|(frame, _)| place(*frame));
    let limit = if for_peer {
        PART
    } else {
        blob.fetcher.config.batch_bytes
    };
    let mut batches: Vec<Batch> = Vec::new();
    let (mut bytes, mut extents) = (0_u64, 0_usize);
    for (frame, flight) in claimed {
        let len = frame_of(source, frame).map_or(0, |f| {
            u64::from(if for_peer { f.raw_len } else { f.stored_len })
        });
        let more = source.locator.extents_of_frame(frame).len();
        let joins =
            bytes.saturating_add(len) <= limit && !(for_peer && extents + more > MAX_RANGES);
        match batches.last_mut() {
            Some(batch) if joins => batch.frames.push((frame, flight)),
            _ => {
                (bytes, extents) = (0, 0);
                batches.push(Batch {
                    blob: Arc::clone(blob),
                    source: source.clone(),
                    frames: vec![(frame, flight)],
                });
            }
        }
        bytes += len;
        extents += more;
    }
    batches
}

impl Batch {
    /// Asks the home of these frames; if it does not help, whoever is their home without it. What
    /// comes and is right lands; the rest stays.
    fn ask(&mut self, peers: &Peers, home: &Arc<Member>) {
        if !self.ask_one(peers, home) {
            let first = self.frames.first().map(|(frame, _)| *frame);
            let part = first.and_then(|frame| part_of(&self.blob, &self.source, frame));
            let next = part.and_then(|part| peers.home(&self.blob.layer, part));
            if let Some(next) = next.filter(|next| !Arc::ptr_eq(next, home)) {
                self.ask_one(peers, &next);
            }
        }
        for (_, flight) in &self.frames {
            flight.go_direct();
        }
    }

    /// Whether the peer answered truly.
    fn ask_one(&mut self, peers: &Peers, peer: &Arc<Member>) -> bool {
        let blob = Arc::clone(&self.blob);
        let mut extents: Vec<u32> = self
            .frames
            .iter()
            .flat_map(|(frame, _)| self.source.locator.extents_of_frame(*frame))
            .copied()
            .collect();
        extents.sort_unstable();
        extents.dedup();
        let max_bytes: u64 = extents.iter().map(|i| blob.len_of(u64::from(*i))).sum();
        if extents.len() > MAX_ASKED || max_bytes > MAX_ANSWER {
            return false;
        }
        let ask = PeerAsk {
            layer: blob.layer,
            extents,
            fill: true,
        };
        let Asked::Got(answer) = peers.ask(peer, &ask, max_bytes) else {
            return false;
        };
        let Some(parts) = cut(&blob, &answer) else {
            peers.lied(peer, &ask);
            return false;
        };
        let mut got = 0;
        let wanted: Vec<u32> = self.frames.iter().map(|(frame, _)| *frame).collect();
        for frame in wanted {
            let Some(bytes) = assemble(&self.source, frame, &parts) else {
                continue;
            };
            match blob.keep(&self.source, frame, bytes, Origin::Peer) {
                Outcome::Failed(_) => {
                    peers.lied(peer, &ask);
                    return false;
                }
                outcome => {
                    let extents = self.source.locator.extents_of_frame(frame);
                    let bytes: u64 = extents.iter().map(|i| blob.len_of(u64::from(*i))).sum();
                    blob.counters.from_peers.fetch_add(bytes, Ordering::Relaxed);
                    got += bytes;
                    self.land(frame, outcome);
                }
            }
        }
        if got > 0 {
            peers.helped(peer, got);
        }
        true
    }
}

/// A peer's answer by extents; `None` if it is not as long as they are.
fn cut<'a>(blob: &Blob, answer: &'a PeerAnswer) -> Option<BTreeMap<u32, &'a [u8]>> {
    let mut rest = answer.bytes.as_slice();
    let mut parts = BTreeMap::new();
    for extent in &answer.extents {
        let len = usize::try_from(blob.len_of(u64::from(*extent))).ok()?;
        let (this, others) = rest.split_at_checked(len)?;
        parts.insert(*extent, this);
        rest = others;
    }
    rest.is_empty().then_some(parts)
}

/// A frame as it is when it is decompressed, as far as the layer uses it; `None` if an extent is
/// missing.
fn assemble(source: &Source, frame: u32, parts: &BTreeMap<u32, &[u8]>) -> Option<Vec<u8>> {
    let raw = usize::try_from(frame_of(source, frame)?.raw_len).ok()?;
    let mut bytes = vec![0; raw];
    for extent in source.locator.extents_of_frame(frame) {
        let part = parts.get(extent)?;
        let (_, start) = source.locator.extent(usize::try_from(*extent).ok()?)?;
        let start = usize::try_from(start).ok()?;
        let target = bytes.get_mut(start..start.checked_add(part.len())?)?;
        target.copy_from_slice(part);
    }
    Some(bytes)
}

impl Batch {
    /// Where its frames lie. One that lies nowhere fails when it is fetched.
    fn places(&self) -> Vec<(u32, Place)> {
        let store: Arc<str> = Arc::from(self.blob.store_url.as_str());
        let frames = self.frames.iter().filter_map(|(number, _)| {
            let frame = frame_of(&self.source, *number)?;
            let packs = self.source.locator.packs();
            let place = Place {
                store: Arc::clone(&store),
                pack: packs.get(usize::try_from(frame.pack).ok()?)?.id,
                offset: frame.offset,
            };
            Some((*number, place))
        });
        frames.collect()
    }

    /// Takes these frames out, with the duty to land their flights.
    fn split(&mut self, others: &[Entered]) -> Self {
        let others: HashSet<u32> = others.iter().map(|other| other.frame).collect();
        let (theirs, own) = std::mem::take(&mut self.frames)
            .into_iter()
            .partition(|(frame, _)| others.contains(frame));
        self.frames = own;
        Self {
            blob: Arc::clone(&self.blob),
            source: self.source.clone(),
            frames: theirs,
        }
    }

    /// Lands what other layers have, or are fetching just now.
    fn copy_joined(&mut self) {
        let blob = Arc::clone(&self.blob);
        let others = blob.fetcher.joint.entered(self.places());
        if !others.is_empty() {
            let deadline = Instant::now() + blob.fetcher.config.read_timeout;
            blob.fetcher.joint.wait(&others, deadline);
        }
        copies::copy(self);
    }
}

/// Fetches one batch from the store, as far as no other layer of the node has it or is fetching it.
fn run(mut batch: Batch) {
    batch.leave_out_replaced();
    let fetcher = Arc::clone(&batch.blob.fetcher);
    let anew: HashSet<u32> = batch
        .frames
        .iter()
        .filter(|(_, flight)| flight.is_anew())
        .map(|(frame, _)| *frame)
        .collect();
    // Who has entered those waits for a request that was given up.
    let over = |frame| anew.contains(&frame);
    let (own, others) = fetcher.joint.enter(batch.places(), over);
    let rest = batch.split(&others);
    fetch(batch, own);
    if rest.frames.is_empty() {
        return;
    }
    let deadline = Instant::now() + fetcher.config.read_timeout;
    fetcher.joint.wait(&others, deadline);
    let (own, _) = fetcher.joint.enter(rest.places(), |_| false);
    fetch(rest, own);
}

/// Copies what other layers have of these frames by now, and fetches the rest from the store. `own` are
/// its frames, as far as it is the only one that fetches them.
fn fetch(mut batch: Batch, mut own: Own<'_>) {
    // After they were entered: what another layer has left since is in its cache.
    copies::copy(&mut batch);
    if batch.frames.is_empty() {
        return;
    }
    let blob = Arc::clone(&batch.blob);
    let store = match blob.store() {
        Ok(store) => store,
        Err(e) => return batch.land_rest(&Outcome::Failed(Arc::new(e))),
    };
    let wanted: Vec<u32> = batch.frames.iter().map(|(frame, _)| *frame).collect();
    let locator = Arc::clone(&batch.source.locator);
    let mut counted = 0_u64;
    let begun = Instant::now();
    let (limits, delivery) = (BATCH_LIMITS, Delivery::AsFetched);
    let result =
        store.read_frames_with(&locator, &wanted, limits, delivery, &mut |frame, bytes| {
            // Counted before its readers wake, so that what they have seen is in the counters.
            let stored = usize::try_from(frame)
                .ok()
                .and_then(|at| locator.frames().get(at))
                .map_or(0, |f| u64::from(f.stored_len));
            blob.counters
                .fetched_stored
                .fetch_add(stored, Ordering::Relaxed);
            counted += stored;
            let outcome = blob.keep(&batch.source, frame, bytes, Origin::Store);
            batch.land(frame, outcome);
            own.leave(frame);
            Ok(())
        });
    match result {
        Ok(stats) => {
            let meter = &blob.fetcher.meter;
            meter.fetched(begun.elapsed(), stats.requests, stats.bytes.max(counted));
            let counters = &blob.counters;
            counters
                .fetched_stored
                // The rest: gaps between frames that were fetched along.
                .fetch_add(stats.bytes.saturating_sub(counted), Ordering::Relaxed);
            counters
                .requests
                .fetch_add(stats.requests, Ordering::Relaxed);
            batch.land_rest(&Outcome::Failed(Arc::new(ReadError::Abandoned)));
        }
        Err(e) => {
            blob.fetcher.meter.fetched(begun.elapsed(), 1, counted);
            batch.report(&e);
            let outcome = if e.is_damage() && blob.refresh(&batch.source, &store) {
                let locator = Arc::clone(&blob.source.read().locator);
                blob.fetcher.sharers.add(&blob, &locator);
                Outcome::Moved
            } else {
                Outcome::Failed(Arc::new(ReadError::Store(Box::new(e))))
            };
            batch.land_rest(&outcome);
        }
    }
}

impl Blob {
    /// The store, opened now if it was not yet.
    fn store(&self) -> Result<LayerStore, ReadError> {
        let mut store = self.store.lock();
        if let Some(store) = store.as_ref() {
            return Ok(store.clone());
        }
        let opened = (self.open_store)().map_err(|source| ReadError::NoStore {
            url: self.store_url.clone(),
            source: Box::new(source),
        })?;
        *store = Some(opened.clone());
        Ok(opened)
    }

    /// Looks whether the store has the layer's frames elsewhere by now (it was published again,
    /// or repacked). Returns whether another source than `used` is in force.
    fn refresh(&self, used: &Source, store: &LayerStore) -> bool {
        let mut refreshed = self.refreshed.lock();
        if self.source.read().generation != used.generation {
            return true;
        }
        if refreshed.is_some_and(|at| at.elapsed() < REFRESH_PAUSE) {
            return false;
        }
        *refreshed = Some(Instant::now());
        let locator = match store.locator(&self.manifest, &self.map) {
            Ok(locator) => locator,
            Err(e) => {
                tracing::warn!(layer = %self.layer, error = %e, "no newer locator to be had");
                return false;
            }
        };
        if locator == *used.locator {
            return false;
        }
        tracing::info!(layer = %self.layer, "the store has the layer's frames elsewhere now");
        *self.source.write() = Source {
            generation: used.generation + 1,
            locator: Arc::new(locator),
        };
        true
    }

    /// Verifies the extents of a frame and stores them.
    pub(super) fn keep(
        &self,
        source: &Source,
        frame: u32,
        bytes: Vec<u8>,
        origin: Origin,
    ) -> Outcome {
        let counters = &self.counters;
        if origin == Origin::Store {
            counters.frames.fetch_add(1, Ordering::Relaxed);
            counters
                .fetched_raw
                .fetch_add(bytes.len() as u64, Ordering::Relaxed);
        }
        let mut damaged = None;
        let mut good: Vec<Piece<'_>> = Vec::new();
        for index in source.locator.extents_of_frame(frame) {
            let placed = usize::try_from(*index)
                .ok()
                .and_then(|at| Some((self.map.extents().get(at)?, source.locator.extent(at)?.1)));
            let Some((extent, start)) = placed else {
                continue;
            };
            let piece = usize::try_from(start)
                .ok()
                .zip(usize::try_from(extent.len).ok())
                .and_then(|(start, len)| bytes.get(start..start.checked_add(len)?))
                .filter(|piece| Digest::of(piece) == extent.digest);
            match piece {
                Some(bytes) => good.push(Piece {
                    index: u64::from(*index),
                    offset: extent.data_offset,
                    bytes,
                }),
                None => {
                    damaged = Some(ReadError::Damaged {
                        extent: u64::from(*index),
                        offset: extent.data_offset,
                    });
                }
            }
        }
        let verified = good.iter().map(|piece| piece.bytes.len() as u64).sum();
        match origin {
            Origin::Store => self.fetcher.meter.frame(bytes.len() as u64, verified),
            Origin::Peer => self.fetcher.meter.frame(0, verified),
            Origin::Layer => {}
        }
        // What is here already, because only a part of the frame was evicted, is not written again.
        good.retain(|piece| !self.cache.has(piece.index));
        good.sort_by_key(|piece| piece.index);
        let stored = self.store_with_room(&good);
        if let Some(error) = damaged {
            return Outcome::Failed(Arc::new(error));
        }
        match stored {
            Ok(()) => {
                self.cache_full.store(false, Ordering::Relaxed);
                layerpack_store::recycle(bytes);
                Outcome::Stored
            }
            Err(e) => {
                if !self.cache_full.swap(true, Ordering::Relaxed) {
                    tracing::warn!(layer = %self.layer, error = %e,
                        "the node's cache takes nothing more; reads pass through");
                }
                Outcome::Passed(Arc::new(bytes))
            }
        }
    }

    /// Writes verified extents if the cache may grow by them; on a full disk, gives some of the
    /// cache up for them first.
    fn store_with_room(&self, pieces: &[Piece<'_>]) -> io::Result<()> {
        let bytes: u64 = pieces
            .iter()
            .map(|p| (p.bytes.len() as u64).next_multiple_of(4096))
            .sum();
        if bytes == 0 {
            return Ok(());
        }
        if !self.fetcher.admit(bytes) {
            return Err(io::Error::other("the cache is at its limit"));
        }
        let full = |e: &io::Error| {
            matches!(
                e.kind(),
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
            )
        };
        let stored = match self.store_pieces(pieces) {
            Err(e) if full(&e) && self.fetcher.relieve(bytes) => self.store_pieces(pieces),
            done => done,
        };
        self.fetcher.settle(bytes);
        stored.inspect_err(|_| self.fetcher.refuse(bytes))
    }

    /// Writes verified extents and marks those that were written. Runs of extents that follow
    /// each other in the data are written with one call; nothing but their padding, which is
    /// zeros by definition, lies between them.
    fn store_pieces(&self, pieces: &[Piece<'_>]) -> io::Result<()> {
        let mut run: Vec<u8> = Vec::new();
        let mut rest = pieces;
        while let Some(first) = rest.first() {
            let mut count = 1;
            let mut previous = first;
            while let Some(next) = rest.get(count) {
                let end = previous.offset + previous.bytes.len() as u64;
                let adjacent = next.index == previous.index + 1
                    && next.offset.checked_sub(end).is_some_and(|gap| gap < 4096);
                if !adjacent {
                    break;
                }
                previous = next;
                count += 1;
            }
            let (this, others) = rest.split_at(count);
            // No hole is made between the write and the bits.
            let _held = self.cache.hold(&(first.offset..previous.offset + 1));
            let ahead = this.iter().any(|piece| self.unread.has(piece.index));
            let write = |bytes: &[u8]| match ahead {
                true => self.cache.write_ahead(first.offset, bytes),
                false => self.cache.write(first.offset, bytes),
            };
            if let [single] = this {
                write(single.bytes)?;
            } else {
                run.clear();
                for piece in this {
                    let start = usize::try_from(piece.offset - first.offset).unwrap_or(0);
                    run.resize(start, 0);
                    run.extend_from_slice(piece.bytes);
                }
                write(&run)?;
            }
            let end = previous.offset + previous.bytes.len() as u64;
            self.fetcher.meter.wrote(end - first.offset);
            let extents = self.map.extents();
            self.cache.mark(this.iter().map(|p| p.index), |index| {
                let len = usize::try_from(index)
                    .ok()
                    .and_then(|i| extents.get(i))
                    .map_or(0, |e| u64::from(e.len));
                self.counters.cached.fetch_add(len, Ordering::Relaxed);
            });
            rest = others;
        }
        Ok(())
    }
}

/// One verified extent of a frame.
struct Piece<'a> {
    index: u64,
    offset: u64,
    bytes: &'a [u8],
}
