//! What peers are given of a blob.

use std::sync::Arc;
use std::time::Instant;

use layerpack_store::peer::{PeerAnswer, PeerAsk};

use super::blob::{Blob, Source};
use super::flight::Outcome;
use super::worker;

/// A frame that the cache did not take: its number and bytes.
type Passed = (u32, Arc<Vec<u8>>);

impl Blob {
    /// What there is of these extents, at most `max_bytes` of them; what is not there is fetched
    /// from the store first, if that is asked for, until `deadline`. Only verified bytes.
    pub(crate) fn give(
        self: &Arc<Self>,
        ask: &PeerAsk,
        max_bytes: u64,
        deadline: Instant,
    ) -> PeerAnswer {
        let mut extents: Vec<(u32, u64, u64)> = Vec::with_capacity(ask.extents.len());
        let mut bytes = 0;
        for index in &ask.extents {
            let extent = usize::try_from(*index)
                .ok()
                .and_then(|at| self.map.extents().get(at));
            let Some(extent) = extent else { break };
            bytes += u64::from(extent.len);
            if bytes > max_bytes {
                break;
            }
            let (start, end) = (extent.data_offset, extent.end());
            // What an earlier process left is compared with its digest first.
            let _held = self.cache.hold(&(start..end));
            self.check_suspects(start, end);
            extents.push((*index, start, end));
        }
        let source = self.source.read().clone();
        let passed = if ask.fill {
            self.fill(&source, &extents, deadline)
        } else {
            Vec::new()
        };
        let mut answer = PeerAnswer::default();
        for (index, start, end) in extents {
            let from = answer.bytes.len();
            let Ok(len) = usize::try_from(end - start) else {
                continue;
            };
            let held = self.cache.hold(&(start..end));
            self.heat.touch(&(start..end));
            if self.cache.has(u64::from(index)) {
                answer.bytes.resize(from + len, 0);
                let target = answer.bytes.get_mut(from..).unwrap_or_default();
                if let Err(error) = self.cache.read(start, target) {
                    tracing::error!(layer = %self.layer, offset = start, end, error = %error,
                        "the node's cache file cannot be read");
                    answer.bytes.truncate(from);
                    continue;
                }
            } else {
                drop(held);
                let Some(found) = in_passed(&source, &passed, index, len) else {
                    continue;
                };
                answer.bytes.extend_from_slice(found);
            }
            answer.extents.push(index);
        }
        answer
    }

    /// Fetches what is missing of these extents. Frames that the cache did not take.
    fn fill(
        self: &Arc<Self>,
        source: &Source,
        extents: &[(u32, u64, u64)],
        deadline: Instant,
    ) -> Vec<Passed> {
        let mut frames: Vec<u32> = extents
            .iter()
            .filter(|(index, _, _)| !self.cache.has(u64::from(*index)))
            .filter_map(|(index, _, _)| {
                Some(source.locator.extent(usize::try_from(*index).ok()?)?.0)
            })
            .collect();
        frames.sort_unstable();
        frames.dedup();
        let claim = self.flights.claim(source.generation, &frames, |frame| {
            source
                .locator
                .extents_of_frame(frame)
                .iter()
                .all(|index| self.cache.has(u64::from(*index)))
        });
        worker::submit_direct(self, source, claim.ours);
        let mut passed = Vec::new();
        for (frame, flight) in claim.all {
            // Whoever is asked for that one may be waiting for us.
            if !flight.is_direct() {
                continue;
            }
            // A failure is this node's to report; who asks goes to the store.
            if let Some(Outcome::Passed(bytes)) = flight.wait(deadline) {
                passed.push((frame, bytes));
            }
        }
        passed
    }
}

/// An extent's bytes in a frame that is in memory only. The worker found it whole and right.
fn in_passed<'a>(
    source: &Source,
    passed: &'a [Passed],
    index: u32,
    len: usize,
) -> Option<&'a [u8]> {
    let (frame, start) = source.locator.extent(usize::try_from(index).ok()?)?;
    let (_, bytes) = passed.iter().find(|(number, _)| *number == frame)?;
    let start = usize::try_from(start).ok()?;
    bytes.get(start..start.checked_add(len)?)
}
