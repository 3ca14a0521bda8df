//! Reading on: who goes through a layer's data in order gets what comes next in few, large requests.
//!
//! A reader that is seen to go on where it was is fetched ahead for by a share of what it has read
//! in order, up to 8 MiB. The share keeps what is fetched in vain small, wherever it stops. Where a
//! file ends (extents are not adjacent) the next one is not begun.

use std::ops::Range;
use std::sync::Arc;

use super::blob::Blob;
use super::worker;
use crate::sync::{Mutex, Ordering};

/// Readers of one blob that are told apart.
const STREAMS: usize = 8;
/// What a reader must have read in order before it is fetched ahead for.
const MIN_RUN: u64 = 1 << 20;
/// One part of so many of what was read in order is fetched ahead.
const SHARE: u64 = 6;
/// Most bytes fetched ahead for one reader.
const MAX_WINDOW: u64 = 8 << 20;
/// Extents before the one that is read among which the end of a file is looked for.
const LOOK_BACK: usize = 64;
/// The kernel has several reads under way: they may come in another order.
const SLACK: u64 = 2 << 20;

/// A reader.
#[derive(Debug, Clone, Copy, Default)]
struct Stream {
    begun: u64,
    /// The end of what it has read.
    next: u64,
    /// Bytes read.
    read: u64,
    /// The end of what was fetched for it.
    ahead: u64,
    /// When it was seen last, in reads.
    seen: u64,
}

/// The readers of one blob.
#[derive(Debug, Default)]
pub(super) struct Streams(Mutex<(u64, [Stream; STREAMS])>);

impl Streams {
    /// Somebody reads `offset..end`. What is to be fetched ahead for them, if something is, and
    /// where they began.
    fn advance(&self, offset: u64, end: u64) -> Option<(Range<u64>, u64)> {
        // It is only a matter of speed: nobody waits here.
        let mut state = self.0.try_lock()?;
        let (clock, streams) = &mut *state;
        *clock += 1;
        let follows = |s: &Stream| {
            s.seen > 0
                && offset <= s.next.saturating_add(SLACK)
                && end.saturating_add(SLACK) >= s.next
        };
        let nearest = streams
            .iter_mut()
            .filter(|s| follows(s))
            .min_by_key(|s| s.next.abs_diff(offset));
        let Some(stream) = nearest else {
            let oldest = streams.iter_mut().min_by_key(|s| s.seen)?;
            *oldest = Stream {
                begun: offset,
                next: end,
                read: end - offset,
                ahead: end,
                seen: *clock,
            };
            return None;
        };
        stream.seen = *clock;
        stream.begun = stream.begun.min(offset);
        stream.next = stream.next.max(end);
        stream.read += end - offset;
        let run = stream.next - stream.begun;
        // Who jumps about does not read in order.
        if stream.read < run / 4 * 3 {
            *stream = Stream {
                begun: offset,
                next: end,
                read: end - offset,
                ahead: end,
                seen: *clock,
            };
            return None;
        }
        stream.read = stream.read.min(run);
        if run < MIN_RUN {
            return None;
        }
        let window = (run / SHARE).min(MAX_WINDOW);
        if stream.ahead > stream.next.saturating_add(window / 2) {
            return None;
        }
        let from = stream.ahead.max(stream.next);
        stream.ahead = stream.next.saturating_add(window);
        Some((from..stream.ahead, stream.begun))
    }
}

impl Blob {
    /// Somebody reads `offset..end`: has fetched what they will ask for next.
    pub(super) fn read_on(self: &Arc<Self>, offset: u64, end: u64) {
        // Nothing to do for what is whole; that is the way of warm reads.
        if self.counters.cached.load(Ordering::Relaxed) >= self.whole {
            return;
        }
        let Some((range, begun)) = self.streams.advance(offset, end) else {
            return;
        };
        if !self.fetcher.has_spare_threads(&self.lane) {
            return;
        }
        let source = self.source.read().clone();
        let mut frames: Vec<u32> = Vec::new();
        let mut cost = 0;
        let indexes = self.extents(end.saturating_sub(1), range.end);
        let one_file = !self.came_from_another_file(indexes.start, begun);
        let mut before: Option<u64> = None;
        for index in indexes {
            let Some(extent) = self.map.extents().get(index) else {
                break;
            };
            // Another file begins.
            if one_file && before.is_some_and(|end| end != extent.data_offset) {
                break;
            }
            before = Some(extent.end());
            if extent.end() <= range.start || self.cache.has(index as u64) {
                continue;
            }
            let Some((frame, _)) = source.locator.extent(index) else {
                break;
            };
            if self.cache.suspect(index as u64) || frames.contains(&frame) {
                continue;
            }
            let found = usize::try_from(frame)
                .ok()
                .and_then(|at| source.locator.frames().get(at));
            cost += found.map_or(0, |f| u64::from(f.raw_len));
            frames.push(frame);
        }
        if frames.is_empty() || !self.fetcher.has_room(cost) {
            return;
        }
        let claim = self.flights.claim(source.generation, &frames, |frame| {
            source
                .locator
                .extents_of_frame(frame)
                .iter()
                .all(|index| self.cache.has(u64::from(*index)))
        });
        worker::submit(self, &source, claim.ours);
    }

    /// Whether a file ends between `begun` and an extent, as far as that is quickly seen.
    fn came_from_another_file(&self, index: usize, begun: u64) -> bool {
        let extents = self.map.extents();
        let Some(before) = extents.get(index.saturating_sub(LOOK_BACK)..=index) else {
            return false;
        };
        before
            .windows(2)
            .rev()
            .take_while(|pair| pair.first().is_some_and(|first| first.end() > begun))
            .any(|pair| match pair {
                [first, second] => first.end() != second.data_offset,
                _ => false,
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes that are fetched ahead for reads of these places, and the longest request.
    fn ahead(reads: impl Iterator<Item = (u64, u64)>) -> (u64, u64) {
        let streams = Streams::default();
        let (mut sum, mut longest) = (0, 0);
        for (offset, len) in reads {
            if let Some((range, _)) = streams.advance(offset, offset + len) {
                sum += range.end - range.start;
                longest = longest.max(range.end - range.start);
            }
        }
        (sum, longest)
    }

    #[test]
    fn windows_grow_with_what_is_read_in_order_and_stay_a_share_of_it() {
        let piece = 128 << 10;
        for mib in [1_u64, 4, 16, 64, 256] {
            let count = (mib << 20) / piece;
            let (sum, longest) = ahead((0..count).map(|i| (i * piece, piece)));
            // What was fetched beyond the end of the reads.
            let vain = (mib << 20) / SHARE;
            assert!(sum <= (mib << 20) + vain, "{mib}: {sum}");
            if mib >= 64 {
                assert!(longest >= 4 << 20, "{mib}: {longest}");
                assert!(sum >= (mib << 20) / 4 * 3, "{mib}: {sum}");
            }
        }
        // Two at a time, in turns, and pairs of reads in the wrong order.
        let far = 1 << 40;
        let two = (0..400).flat_map(|i| [(i * piece, piece), (far + i * piece, piece)]);
        assert!(ahead(two).1 >= 3 << 20);
        let swapped = (0..200).flat_map(|i| [((2 * i + 1) * piece, piece), (2 * i * piece, piece)]);
        assert!(ahead(swapped).0 > 10 << 20);
    }

    #[test]
    fn who_jumps_about_is_not_fetched_ahead_for() {
        let mut state = 1_u64;
        let mut next = |below: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) % below
        };
        let wide: Vec<_> = (0..5000).map(|_| (next(1 << 30), 4096)).collect();
        assert_eq!(ahead(wide.into_iter()).0, 0);
        let narrow: Vec<_> = (0..200).map(|_| (next(3 << 20), 4096)).collect();
        assert_eq!(ahead(narrow.into_iter()).0, 0);
        let strided = (0..1000).map(|i| (i * 65_536, 4096));
        assert_eq!(ahead(strided).0, 0);
    }
}
