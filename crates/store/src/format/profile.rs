//! LPPROF: which extents of a stack's layers are read, in the order of their first use. A hint for
//! what to fetch early or to take along. FORMAT.md, section "Access profile".

use std::collections::{BTreeMap, HashSet};

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::map::MAX_CHUNK_LEN;
use super::{Prelude, header_crc, split, split_slice};
use crate::digest::Digest;
use crate::error::FormatError;
use crate::manifest::LayerId;

const NAME: &str = "LPPROF";
const MAGIC: [u8; 8] = *b"LPPROF\r\n";

/// Most layers of an environment.
pub const MAX_PROFILE_LAYERS: usize = 1024;
/// Most extents in one profile.
pub const MAX_PROFILE_ENTRIES: usize = 4 << 20;
/// Longest name of a profile in bytes.
pub const MAX_PROFILE_NAME: usize = 200;
/// Largest profile in bytes.
pub const MAX_PROFILE_BYTES: u64 = 101 << 20;

#[repr(C)]
#[derive(Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
struct Header {
    prelude: Prelude,
    layer_count: U32,
    /// Recordings merged into this profile.
    recordings: U32,
    entry_count: U64,
    /// Bytes of the name, which comes last.
    name_len: U32,
    reserved: U32,
    /// crc32c of everything after the header.
    body_crc: U32,
    /// crc32c of the 52 bytes above.
    crc: U32,
}
const _: () = assert!(size_of::<Header>() == 56);

#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
struct WireLayer {
    layer: Digest,
    manifest: Digest,
}
const _: () = assert!(size_of::<WireLayer>() == 64);

#[repr(C)]
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
struct WireEntry {
    layer: U32,
    extent: U32,
    len: U32,
    count: U32,
    rank: U32,
    time_ms: U32,
}
const _: () = assert!(size_of::<WireEntry>() == 24);

/// A layer of a profile's environment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ProfileLayer {
    /// Identity of its content.
    pub layer: LayerId,
    /// Digest of a manifest with that content.
    pub manifest: Digest,
}

/// An extent that was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProfileEntry {
    /// Index into [`Profile::layers`].
    pub layer: u32,
    /// Index into the extents of that layer's map.
    pub extent: u32,
    /// The extent's length in bytes.
    pub len: u32,
    /// Recordings in which it was read: at least 1.
    pub count: u32,
    /// How many extents were read before it: the median of these recordings.
    pub rank: u32,
    /// Milliseconds from the start of the recording to its first use: the median again.
    pub time_ms: u32,
}

/// What one or more recordings of an environment read. Invariants: 1 to [`MAX_PROFILE_LAYERS`]
/// layers, bottom first; each extent once; entries ascend by rank; no count is above the number of
/// recordings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Profile {
    /// For people; may be empty.
    pub name: String,
    /// The environment: layers of the stack, bottom first.
    pub layers: Vec<ProfileLayer>,
    /// Recordings merged into this profile.
    pub recordings: u32,
    /// Extents in the order of their first use.
    pub entries: Vec<ProfileEntry>,
}

fn fail<T>(what: impl Into<String>) -> Result<T, FormatError> {
    Err(FormatError::new(NAME, what))
}

impl Profile {
    /// Parses a profile's bytes.
    ///
    /// # Errors
    /// If the bytes break the format or an invariant.
    pub fn parse(bytes: &[u8]) -> Result<Self, FormatError> {
        let (header, body) = split::<Header>(NAME, "header", bytes)?;
        header.prelude.check_start(NAME, &MAGIC)?;
        if header.crc.get() != header_crc(header) {
            return fail("the header's checksum is wrong");
        }
        header.prelude.check_features(NAME)?;
        if header.body_crc.get() != crc32c::crc32c(body) {
            return fail("the body's checksum is wrong");
        }
        let (layers, rest) =
            split_slice::<WireLayer>(NAME, "layers", body, header.layer_count.get().into())?;
        let (entries, name) =
            split_slice::<WireEntry>(NAME, "entries", rest, header.entry_count.get())?;
        if name.len() as u64 != u64::from(header.name_len.get()) {
            return fail(format!("{} bytes follow its entries", name.len()));
        }
        let name = std::str::from_utf8(name)
            .map_err(|_| FormatError::new(NAME, "its name is not UTF-8"))?;
        let profile = Self {
            name: name.to_owned(),
            layers: layers
                .iter()
                .map(|l| ProfileLayer {
                    layer: LayerId::from_digest(l.layer),
                    manifest: l.manifest,
                })
                .collect(),
            recordings: header.recordings.get(),
            entries: entries
                .iter()
                .map(|e| ProfileEntry {
                    layer: e.layer.get(),
                    extent: e.extent.get(),
                    len: e.len.get(),
                    count: e.count.get(),
                    rank: e.rank.get(),
                    time_ms: e.time_ms.get(),
                })
                .collect(),
        };
        profile.check()?;
        Ok(profile)
    }

    fn check(&self) -> Result<(), FormatError> {
        if self.layers.is_empty() || self.layers.len() > MAX_PROFILE_LAYERS {
            return fail(format!(
                "it has {} layers, 1 to {MAX_PROFILE_LAYERS} are allowed",
                self.layers.len()
            ));
        }
        if self.entries.len() > MAX_PROFILE_ENTRIES {
            return fail(format!(
                "it has {} entries, at most {MAX_PROFILE_ENTRIES} are allowed",
                self.entries.len()
            ));
        }
        if self.name.len() > MAX_PROFILE_NAME || self.name.chars().any(char::is_control) {
            return fail(format!(
                "its name is longer than {MAX_PROFILE_NAME} bytes or has control characters"
            ));
        }
        if self.recordings == 0 {
            return fail("it has no recordings");
        }
        let mut seen = HashSet::with_capacity(self.entries.len());
        let mut before = 0;
        for (i, e) in self.entries.iter().enumerate() {
            let inside = usize::try_from(e.layer).is_ok_and(|l| l < self.layers.len());
            if !inside || e.len == 0 || e.len > MAX_CHUNK_LEN {
                return fail(format!(
                    "entry {i} is of layer {} of {} and has {} bytes",
                    e.layer,
                    self.layers.len(),
                    e.len
                ));
            }
            if e.count == 0 || e.count > self.recordings {
                return fail(format!(
                    "entry {i} was read in {} of {} recordings",
                    e.count, self.recordings
                ));
            }
            if e.rank < before {
                return fail(format!("entry {i} is out of order"));
            }
            before = e.rank;
            if !seen.insert((e.layer, e.extent)) {
                return fail(format!("entry {i} is there twice"));
            }
        }
        Ok(())
    }

    /// The profile's bytes: the same for the same profile.
    ///
    /// # Errors
    /// If an invariant of [`Profile`] does not hold.
    pub fn to_bytes(&self) -> Result<Vec<u8>, FormatError> {
        self.check()?;
        let mut body = Vec::with_capacity(
            self.layers.len() * size_of::<WireLayer>()
                + self.entries.len() * size_of::<WireEntry>()
                + self.name.len(),
        );
        for l in &self.layers {
            let wire = WireLayer {
                layer: *l.layer.digest(),
                manifest: l.manifest,
            };
            body.extend_from_slice(wire.as_bytes());
        }
        for e in &self.entries {
            let wire = WireEntry {
                layer: e.layer.into(),
                extent: e.extent.into(),
                len: e.len.into(),
                count: e.count.into(),
                rank: e.rank.into(),
                time_ms: e.time_ms.into(),
            };
            body.extend_from_slice(wire.as_bytes());
        }
        body.extend_from_slice(self.name.as_bytes());
        let small = |n: usize| u32::try_from(n).unwrap_or(u32::MAX); // limits checked above
        let mut header = Header {
            prelude: Prelude::new(MAGIC),
            layer_count: small(self.layers.len()).into(),
            recordings: self.recordings.into(),
            entry_count: (self.entries.len() as u64).into(),
            name_len: small(self.name.len()).into(),
            reserved: U32::new(0),
            body_crc: crc32c::crc32c(&body).into(),
            crc: U32::new(0),
        };
        header.crc = header_crc(&header).into();
        let mut bytes = Vec::with_capacity(size_of::<Header>() + body.len());
        bytes.extend_from_slice(header.as_bytes());
        bytes.append(&mut body);
        Ok(bytes)
    }

    /// Several profiles of one environment as one: counts add up, ranks and times are the medians
    /// over the recordings (of a merged profile its own medians stand for its recordings).
    /// Extents ascend by rank, then those read more often come first.
    ///
    /// # Errors
    /// If there is none, or they are of different environments.
    pub fn merge(name: &str, profiles: &[Self]) -> Result<Self, FormatError> {
        let Some(first) = profiles.first() else {
            return fail("there is no profile to merge");
        };
        let ids = |p: &Self| p.layers.iter().map(|l| l.layer).collect::<Vec<_>>();
        if let Some(other) = profiles.iter().find(|p| ids(p) != ids(first)) {
            return fail(format!(
                "profiles {:?} and {:?} are of different stacks of layers",
                first.name, other.name
            ));
        }
        let mut recordings = 0_u32;
        // By layer and extent: length, and rank, time and count of each profile.
        type Seen = (u32, Vec<(u32, u32, u32)>);
        let mut seen: BTreeMap<(u32, u32), Seen> = BTreeMap::new();
        for profile in profiles {
            recordings = recordings.saturating_add(profile.recordings);
            for e in &profile.entries {
                let (_, list) = seen
                    .entry((e.layer, e.extent))
                    .or_insert_with(|| (e.len, Vec::new()));
                list.push((e.rank, e.time_ms, e.count));
            }
        }
        let mut entries: Vec<ProfileEntry> = seen
            .into_iter()
            .map(|((layer, extent), (len, list))| ProfileEntry {
                layer,
                extent,
                len,
                count: list
                    .iter()
                    .fold(0_u32, |sum, &(_, _, count)| sum.saturating_add(count)),
                rank: median(list.iter().map(|&(rank, _, count)| (rank, count)).collect()),
                time_ms: median(list.iter().map(|&(_, time, count)| (time, count)).collect()),
            })
            .collect();
        entries.sort_by_key(|e| (e.rank, u32::MAX - e.count, e.layer, e.extent));
        entries.truncate(MAX_PROFILE_ENTRIES);
        let merged = Self {
            name: name.to_owned(),
            layers: first.layers.clone(),
            recordings,
            entries,
        };
        merged.check()?;
        Ok(merged)
    }

    /// Sum of the extents' lengths in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.entries.iter().map(|e| u64::from(e.len)).sum()
    }
}

/// The lower median of values that each count as often as they say.
fn median(mut values: Vec<(u32, u32)>) -> u32 {
    values.sort_unstable();
    let total: u64 = values.iter().map(|&(_, count)| u64::from(count)).sum();
    let mut passed = 0;
    for &(value, count) in &values {
        passed += u64::from(count);
        if passed * 2 >= total {
            return value;
        }
    }
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(layer: u32, extent: u32, rank: u32) -> ProfileEntry {
        ProfileEntry {
            layer,
            extent,
            len: 100 + extent,
            count: 1,
            rank,
            time_ms: rank * 10,
        }
    }

    fn profile(name: &str, entries: &[(u32, u32)]) -> Profile {
        Profile {
            name: name.to_owned(),
            layers: (0..2)
                .map(|i| ProfileLayer {
                    layer: LayerId::from_digest(Digest::from_bytes([i; 32])),
                    manifest: Digest::from_bytes([i + 10; 32]),
                })
                .collect(),
            recordings: 1,
            entries: (0..)
                .zip(entries)
                .map(|(rank, &(layer, extent))| entry(layer, extent, rank))
                .collect(),
        }
    }

    #[test]
    fn merging_takes_medians_and_counts() {
        let a = profile("a", &[(0, 1), (0, 2), (1, 9)]);
        let b = profile("b", &[(0, 2), (0, 1)]);
        let c = profile("c", &[(0, 1), (1, 9), (0, 2), (0, 7)]);
        let merged = Profile::merge("all", &[a.clone(), b.clone(), c.clone()]).unwrap();
        let flat: Vec<_> = merged
            .entries
            .iter()
            .map(|e| (e.layer, e.extent, e.count, e.rank))
            .collect();
        assert_eq!(
            flat,
            [(0, 1, 3, 0), (0, 2, 3, 1), (1, 9, 2, 1), (0, 7, 1, 3)]
        );
        assert_eq!(merged.recordings, 3);
        // The order in which they are given does not matter.
        assert_eq!(Profile::merge("all", &[c, b, a]).unwrap(), merged);
        let parsed = Profile::parse(&merged.to_bytes().unwrap()).unwrap();
        assert_eq!(parsed, merged);
    }

    #[test]
    fn other_environments_are_not_merged() {
        let a = profile("a", &[(0, 1)]);
        let mut b = profile("b", &[(0, 1)]);
        b.layers.pop();
        assert!(Profile::merge("x", &[a, b]).is_err());
        assert!(Profile::merge("x", &[]).is_err());
    }

    #[test]
    fn broken_invariants_are_refused() {
        let good = profile("a", &[(0, 1), (1, 2)]);
        let mut twice = good.clone();
        twice.entries.push(entry(0, 1, 5));
        let mut order = good.clone();
        order.entries.reverse();
        let mut outside = good.clone();
        outside.entries.push(entry(2, 1, 9));
        let mut counted = good.clone();
        counted.entries.first_mut().unwrap().count = 2;
        let mut control = good.clone();
        control.name = "a\nb".to_owned();
        for bad in [twice, order, outside, counted, control] {
            assert!(bad.to_bytes().is_err(), "{bad:?}");
        }
        let bytes = good.to_bytes().unwrap();
        for cut in 0..bytes.len() {
            assert!(Profile::parse(bytes.get(..cut).unwrap()).is_err());
        }
        for i in 0..bytes.len() {
            let mut damaged = bytes.clone();
            *damaged.get_mut(i).unwrap() ^= 1;
            assert!(Profile::parse(&damaged).is_err(), "byte {i}");
        }
    }
}
