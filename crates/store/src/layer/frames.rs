//! Whether frames of the store are what their pack's table says, before a new layer relies on
//! them: each is read once and its digest compared, unless this machine did so lately (`trust`). A layer that was published before uses the
//! frames of a pack in order, so reads that go forward grow and take the frames that follow along;
//! a single hit costs a single frame.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use super::LayerStore;
use super::read::{MAX_GAP, MAX_REQUEST};
use super::trust::Trust;
use crate::digest::Digest;
use crate::error::{Result, StoreError};
use crate::format::index::IndexPack;
use crate::format::pack::{PackFrame, PackTable};
use crate::key::Key;

/// First read that goes forward in a pack, in bytes; each further one is twice as long.
const FIRST_WINDOW: u64 = 256 << 10;
/// Runs of reads that are followed in one pack: layers that came there together are read in turns.
const RUNS: usize = 4;

/// How far a run of reads of a pack has come.
#[derive(Debug, Clone, Copy, Default)]
struct Ahead {
    /// Bytes from the start of the pack.
    end: u64,
    /// Length of the last read that went forward, in bytes.
    window: u64,
}

impl Ahead {
    /// Whether a read at `offset` goes on with this run.
    fn leads_to(&self, offset: u64) -> bool {
        (self.end..=self.end.saturating_add(MAX_GAP)).contains(&offset)
    }
}

#[derive(Debug)]
struct Bad {
    pack: Digest,
    end: u64,
    what: String,
}

/// What is known of frames. Packs have the caller's numbers.
#[derive(Debug, Default)]
pub(super) struct FrameCheck {
    /// By pack and offset: whether the frame can be used.
    checked: HashMap<(u32, u64), bool>,
    /// By pack and offset.
    bad: BTreeMap<(u32, u64), Bad>,
    /// Runs of reads of each pack, the one that went on last at the end.
    ahead: HashMap<u32, Vec<Ahead>>,
    /// What this machine remembers of earlier builds.
    pub(super) trust: Option<Trust>,
}

/// Damaged, gone, or a place of the disk that cannot be read: not to be used, but no reason to
/// stop.
pub(super) const fn is_unusable(error: &StoreError) -> bool {
    error.is_damage() || matches!(error, StoreError::Io { .. })
}

fn end_of(frame: &PackFrame) -> u64 {
    frame.offset.saturating_add(frame.stored_len.into())
}

impl FrameCheck {
    /// Whether frame `frame` of the pack's table has the stored bytes that the table says.
    pub(super) fn is_sound(
        &mut self,
        store: &LayerStore,
        number: u32,
        pack: &IndexPack,
        table: &PackTable,
        frame: u32,
    ) -> Result<bool> {
        let rest = usize::try_from(frame)
            .ok()
            .and_then(|f| table.frames.get(f..))
            .unwrap_or_default();
        let Some(first) = rest.first() else {
            return Ok(false);
        };
        if let Some(&sound) = self.checked.get(&(number, first.offset)) {
            return Ok(sound);
        }
        if self.is_trusted(store, number, pack, table, frame)? {
            self.checked.insert((number, first.offset), true);
            return Ok(true);
        }
        let window = self.window(number, first.offset);
        let count = rest
            .iter()
            .take_while(|f| end_of(f) - first.offset <= window)
            .count()
            .max(1);
        let mut run = rest.get(..count).unwrap_or_default();
        let mut bytes = self.fetch(store, pack, run);
        if count > 1 && bytes.as_ref().is_err_and(is_unusable) {
            run = rest.get(..1).unwrap_or_default(); // the others are tried when they are needed
            bytes = self.fetch(store, pack, run);
        }
        let bytes = match bytes {
            Ok(bytes) => bytes,
            Err(error) if is_unusable(&error) => {
                self.note(number, pack, first, Err(with_source(&error)));
                return Ok(false);
            }
            Err(error) => return Err(error),
        };
        if let Some(end) = run.last().map(end_of) {
            self.went_on(number, first.offset, Ahead { end, window });
        }
        let numbers = usize::try_from(frame).unwrap_or(usize::MAX)..;
        let results = digests_of(store, pack, first.offset, &bytes, run);
        for ((index, frame), result) in numbers.zip(run).zip(results) {
            if let (Ok(()), Some(trust)) = (&result, &mut self.trust) {
                trust.note(&pack.id, index);
            }
            self.note(number, pack, frame, result);
        }
        Ok(self
            .checked
            .get(&(number, first.offset))
            .copied()
            .unwrap_or(false))
    }

    /// Whether the frame was verified or written by this machine lately; see [`Trust`].
    fn is_trusted(
        &mut self,
        store: &LayerStore,
        number: u32,
        pack: &IndexPack,
        table: &PackTable,
        frame: u32,
    ) -> Result<bool> {
        let Some(trust) = &mut self.trust else {
            return Ok(false);
        };
        if let Some(sample) = trust.sample(store.blobs().as_ref(), &pack.id) {
            let mut sound = true;
            for index in sample {
                let Some(frame) = table.frames.get(index) else {
                    sound = false;
                    break;
                };
                let alone = std::slice::from_ref(frame);
                let result = match self.fetch(store, pack, alone) {
                    Ok(bytes) => digests_of(store, pack, frame.offset, &bytes, alone)
                        .pop()
                        .unwrap_or(Ok(())),
                    Err(error) if is_unusable(&error) => Err(with_source(&error)),
                    Err(error) => return Err(error),
                };
                sound &= result.is_ok();
                self.note(number, pack, frame, result);
            }
            if let Some(trust) = &mut self.trust {
                trust.judge(&pack.id, sound);
            }
        }
        let index = usize::try_from(frame).unwrap_or(usize::MAX);
        Ok(self
            .trust
            .as_ref()
            .is_some_and(|trust| trust.covers(&pack.id, index)))
    }

    /// Bytes to read from `offset`; a frame is read whole in any case.
    fn window(&self, number: u32, offset: u64) -> u64 {
        // The start of a pack goes on from nothing.
        if offset <= MAX_GAP && !self.ahead.contains_key(&number) {
            return FIRST_WINDOW;
        }
        self.ahead
            .get(&number)
            .and_then(|runs| runs.iter().find(|run| run.leads_to(offset)))
            .map_or(0, |run| (run.window * 2).clamp(FIRST_WINDOW, MAX_REQUEST))
    }

    /// A read began at `offset` and came as far as `now`.
    fn went_on(&mut self, number: u32, offset: u64, now: Ahead) {
        let runs = self.ahead.entry(number).or_default();
        if let Some(place) = runs.iter().position(|run| run.leads_to(offset)) {
            runs.remove(place);
        } else if runs.len() >= RUNS {
            runs.remove(0);
        }
        runs.push(now);
    }

    fn fetch(&self, store: &LayerStore, pack: &IndexPack, run: &[PackFrame]) -> Result<Vec<u8>> {
        let start = run.first().map_or(0, |f| f.offset);
        store.fetch(&pack.id, start..run.last().map_or(start, end_of))
    }

    fn note(
        &mut self,
        number: u32,
        pack: &IndexPack,
        frame: &PackFrame,
        result: Result<(), String>,
    ) {
        let place = (number, frame.offset);
        self.checked.insert(place, result.is_ok());
        if let Err(what) = result {
            self.bad.insert(
                place,
                Bad {
                    pack: pack.id,
                    end: end_of(frame),
                    what,
                },
            );
        }
    }

    /// Why the frame at `offset` cannot be used.
    pub(super) fn damage(
        &self,
        store: &LayerStore,
        number: u32,
        offset: u64,
    ) -> Option<StoreError> {
        self.bad
            .get(&(number, offset))
            .map(|bad| StoreError::Corrupt {
                store: store.url().to_owned(),
                key: Key::pack(&bad.pack).to_string(),
                range: Some(offset..bad.end),
                what: bad.what.clone(),
            })
    }

    /// One line for each run of frames that cannot be used.
    pub(super) fn warnings(&self, store: &LayerStore) -> Vec<String> {
        let mut lines: Vec<(u32, u64, u64, u64, &Bad)> = Vec::new();
        for (&(number, offset), bad) in &self.bad {
            match lines.last_mut() {
                Some((pack, _, end, frames, _)) if (*pack, *end) == (number, offset) => {
                    *end = bad.end;
                    *frames += 1;
                }
                _ => lines.push((number, offset, bad.end, 1, bad)),
            }
        }
        lines
            .into_iter()
            .map(|(_, start, end, frames, bad)| {
                let more = match frames {
                    1 => String::new(),
                    n => format!(" (and {} frames after it)", n - 1),
                };
                format!(
                    "not reused: object {} (bytes {start}..{end}) in store {} is damaged: {}{more}; its chunks are written anew; verify other layers and publish those again that are damaged",
                    Key::pack(&bad.pack),
                    store.url(),
                    bad.what
                )
            })
            .collect()
    }
}

/// Whether each frame of a run, whose bytes begin at `start`, has its digest, or what is wrong with
/// it; one that is wrong was read again.
fn digests_of(
    store: &LayerStore,
    pack: &IndexPack,
    start: u64,
    bytes: &[u8],
    run: &[PackFrame],
) -> Vec<Result<(), String>> {
    let key = Key::pack(&pack.id);
    let parts: Vec<Range<u64>> = run.iter().map(|f| f.offset..end_of(f)).collect();
    store
        .parts_checked(&key, start, bytes, &parts, &mut |at, stored| {
            let digest = Digest::of(stored);
            match run.get(at) {
                Some(frame) if frame.digest != digest => Err(store.corrupt(
                    &key,
                    format!("the digest of this frame is {digest}, not {}", frame.digest),
                )),
                _ => Ok(()),
            }
        })
        .into_iter()
        .map(|result| {
            result.map_err(|error| match error {
                StoreError::Corrupt { what, .. } => what,
                other => other.to_string(),
            })
        })
        .collect()
}

/// An error with what caused it, on one line.
fn with_source(error: &StoreError) -> String {
    std::error::Error::source(error)
        .map_or_else(|| error.to_string(), |source| format!("{error}: {source}"))
}
