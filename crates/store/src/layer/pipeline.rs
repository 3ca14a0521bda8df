//! Compression beside the caller: a bounded queue of raw frames, a pool of threads that compress,
//! and one thread that writes the frames to packs in the order of submission, so that packs do not
//! depend on timing.
//!
//! Memory is bounded by the number of frames in flight: submitted and not yet written. Any failure
//! (also a panic) ends all threads and is what the next call of the caller answers.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle, Scope};

use super::LayerStore;
use super::pack_writer::{PackWriter, Written};
use crate::codec::{Codec, Compressor};
use crate::digest::Digest;
use crate::error::{Result, StoreError};

/// A chunk's place in a frame's raw bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct FrameChunk {
    pub(super) digest: Digest,
    pub(super) offset: u32,
    pub(super) len: u32,
}

/// A frame to compress.
#[derive(Debug, Default)]
pub(super) struct RawFrame {
    pub(super) raw: Vec<u8>,
    pub(super) chunks: Vec<FrameChunk>,
}

/// A frame to write.
#[derive(Debug)]
pub(super) struct Frame {
    pub(super) codec: Codec,
    pub(super) stored: Vec<u8>,
    pub(super) raw_len: u32,
    pub(super) digest: Digest,
    pub(super) chunks: Vec<FrameChunk>,
}

impl Frame {
    pub(super) fn stored_len(&self) -> u32 {
        u32::try_from(self.stored.len()).unwrap_or(u32::MAX) // never above raw_len
    }
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<(u64, RawFrame)>,
    compressed: BTreeMap<u64, Frame>,
    submitted: u64,
    written: u64,
    /// No more frames come: write what is there, then end.
    closed: bool,
    /// End now.
    aborted: bool,
    error: Option<StoreError>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// A frame was queued, or the end was declared.
    queued: Condvar,
    /// A frame was compressed, or the end was declared.
    compressed: Condvar,
    /// Half of the frames that may be in flight are written, or the pipeline failed.
    written: Condvar,
    max_in_flight: u64,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A panicking thread aborts the pipeline (see `Guard`); the state itself stays sound.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_crowded(&self, state: &State) -> bool {
        state.submitted - state.written > self.max_in_flight / 2
    }

    fn abort(&self, error: Option<StoreError>) {
        let mut state = self.lock();
        state.aborted = true;
        if state.error.is_none() {
            state.error = error;
        }
        drop(state);
        self.queued.notify_all();
        self.compressed.notify_all();
        self.written.notify_all();
    }
}

/// Ends the pipeline if its thread panics, so that nobody waits for ever.
struct Guard<'a>(&'a Shared);

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.abort(None);
        }
    }
}

#[derive(Debug)]
pub(super) struct Pipeline {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    writer: Option<JoinHandle<Option<Written>>>,
    store: String,
}

impl Pipeline {
    pub(super) fn new(store: LayerStore, level: i32, jobs: usize) -> Result<Self> {
        let url = store.url().to_owned();
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            queued: Condvar::new(),
            compressed: Condvar::new(),
            written: Condvar::new(),
            max_in_flight: 8 + 4 * jobs as u64,
        });
        let mut pipeline = Self {
            shared: Arc::clone(&shared),
            workers: Vec::new(),
            writer: None,
            store: url.clone(),
        };
        let failed = |source| StoreError::Io {
            operation: "start",
            store: url.clone(),
            key: "the threads that compress and write".to_owned(),
            source,
        };
        for i in 0..jobs {
            let shared = Arc::clone(&shared);
            let thread = std::thread::Builder::new().name(format!("compress-{i}"));
            pipeline.workers.push(
                thread
                    .spawn(move || compress(&shared, level))
                    .map_err(failed)?,
            );
        }
        let thread = std::thread::Builder::new().name("pack-writer".to_owned());
        pipeline.writer = Some(
            thread
                .spawn(move || write(&shared, &store))
                .map_err(failed)?,
        );
        Ok(pipeline)
    }

    /// Hands a frame over; waits while too many are in flight. Its number: frames are written in
    /// the order of their numbers.
    pub(super) fn submit(&self, frame: RawFrame) -> Result<u64> {
        let mut state = self.admit()?;
        let number = state.submitted;
        state.submitted += 1;
        state.queue.push_back((number, frame));
        drop(state);
        self.shared.queued.notify_one();
        Ok(number)
    }

    /// As [`Pipeline::submit`] for a frame that is compressed already.
    pub(super) fn submit_ready(&self, frame: Frame) -> Result<u64> {
        let mut state = self.admit()?;
        let number = state.submitted;
        state.submitted += 1;
        state.compressed.insert(number, frame);
        drop(state);
        self.shared.compressed.notify_one();
        Ok(number)
    }

    /// Waits until one more frame may be in flight. Who has to wait does so until half of them are
    /// written, so that threads do not take turns for every frame.
    fn admit(&self) -> Result<MutexGuard<'_, State>> {
        let mut state = self.shared.lock();
        if state.submitted - state.written >= self.shared.max_in_flight {
            while !state.aborted && self.shared.is_crowded(&state) {
                state = self
                    .shared
                    .written
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
            }
        }
        if state.aborted {
            return Err(self.failure(&mut state));
        }
        Ok(state)
    }

    /// No frame comes any more: the threads end when they have written what there is.
    pub(super) fn close(&self) {
        self.shared.lock().closed = true;
        self.shared.queued.notify_all();
        self.shared.compressed.notify_all();
    }

    /// Waits until every frame and its index are durable. The packs, in the order of the frames'
    /// numbers.
    pub(super) fn finish(mut self) -> Result<Written> {
        self.close();
        let packs = self.join();
        let mut state = self.shared.lock();
        match packs {
            Some(packs) if !state.aborted => Ok(packs),
            _ => Err(self.failure(&mut state)),
        }
    }

    fn failure(&self, state: &mut State) -> StoreError {
        state
            .error
            .take()
            .unwrap_or_else(|| StoreError::WriterFailed {
                store: self.store.clone(),
            })
    }

    fn join(&mut self) -> Option<Written> {
        for worker in self.workers.drain(..) {
            let _ = worker.join(); // a panic has aborted the pipeline
        }
        self.writer
            .take()
            .and_then(|writer| writer.join().ok().flatten())
    }
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        self.shared.abort(None);
        self.join();
    }
}

fn compress(shared: &Shared, level: i32) {
    let _guard = Guard(shared);
    let mut compressor = Compressor::new(level);
    loop {
        let mut state = shared.lock();
        let (number, frame) = loop {
            if state.aborted {
                return;
            }
            if let Some(job) = state.queue.pop_front() {
                break job;
            }
            if state.closed {
                return;
            }
            state = shared
                .queued
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        };
        drop(state);
        let raw_len = u32::try_from(frame.raw.len()).unwrap_or(u32::MAX); // at most MAX_FRAME_LEN
        match compressor.frame(frame.raw) {
            Ok((codec, stored)) => {
                let digest = Digest::of(&stored);
                let frame = Frame {
                    codec,
                    stored,
                    raw_len,
                    digest,
                    chunks: frame.chunks,
                };
                let mut state = shared.lock();
                state.compressed.insert(number, frame);
                // The others are found when it is their turn.
                let is_next = state.written == number;
                drop(state);
                if is_next {
                    shared.compressed.notify_one();
                }
            }
            Err(error) => return shared.abort(Some(error.into())),
        }
    }
}

/// `None`: aborted.
fn write(shared: &Shared, store: &LayerStore) -> Option<Written> {
    let _guard = Guard(shared);
    thread::scope(|scope| write_within(shared, store, scope))
}

fn write_within<'scope, 'a>(
    shared: &Shared,
    store: &'a LayerStore,
    scope: &'scope Scope<'scope, 'a>,
) -> Option<Written> {
    let mut packs = PackWriter::new(store, Some(scope));
    loop {
        let mut state = shared.lock();
        let frame = loop {
            if state.aborted {
                return None;
            }
            let next = state.written;
            if let Some(frame) = state.compressed.remove(&next) {
                break Some(frame);
            }
            if state.closed && state.written == state.submitted {
                break None;
            }
            state = shared
                .compressed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        };
        drop(state);
        let Some(frame) = frame else { break };
        if let Err(error) = packs.push(&frame) {
            shared.abort(Some(error));
            return None;
        }
        drop(frame);
        let mut state = shared.lock();
        state.written += 1;
        let crowded = shared.is_crowded(&state);
        drop(state);
        if !crowded {
            shared.written.notify_one();
        }
    }
    packs
        .finish()
        .map_err(|error| shared.abort(Some(error)))
        .ok()
}
