//! What this machine remembers of packs that it has verified, so that a build which shares
//! thousands of frames need not read them all again.
//!
//! The rule stays that no layer is published on frames nobody looked at. A frame counts without
//! being read again only if this machine verified or wrote it, at most [`MAX_AGE`] ago, and its
//! pack has the same size and time of writing as then, and a random sample of the pack's
//! remembered frames, read anew in this very build, is sound. Anything else is verified as if
//! nothing were known. So what is replaced, cut or overwritten in the store is seen at once; bits
//! that rot in place without touching the object's time are seen by the sample, by age, by
//! `verify`, and by a build that is given no such memory.
//!
//! One small file for each store, replaced in one step and ending with its digest: a damaged one
//! counts as none. Of two builds at once the later one keeps what both knew of other packs.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::blob::BlobStore;
use crate::digest::Digest;
use crate::key::Key;

/// How long a verification counts.
pub(super) const MAX_AGE: Duration = Duration::from_secs(7 * 24 * 60 * 60);
/// One remembered frame of so many is read again in each build that wants them.
const SAMPLE: usize = 64;
/// Most packs remembered; those verified longest ago go first.
const MAX_PACKS: usize = 1 << 16;
/// Largest file that is read, in bytes.
const MAX_FILE: u64 = 256 << 20;
const MAGIC: &[u8; 8] = b"LPSEEN1\n";

/// A pack as it was when its frames were verified.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Seen {
    size: u64,
    /// Nanoseconds since 1970 by the store's clock; `None` where the backend does not say.
    modified: Option<u64>,
    /// Seconds since 1970: the oldest verification that counts.
    checked: u64,
    /// One bit for each frame of the pack's table.
    frames: Vec<u64>,
}

impl Seen {
    fn has(&self, frame: usize) -> bool {
        self.frames
            .get(frame / 64)
            .is_some_and(|word| word >> (frame % 64) & 1 == 1)
    }

    fn add(&mut self, frame: usize) -> bool {
        let word = frame / 64;
        if self.frames.len() <= word {
            self.frames.resize(word + 1, 0);
        }
        let bit = 1 << (frame % 64);
        let Some(word) = self.frames.get_mut(word) else {
            return false;
        };
        let new = *word & bit == 0;
        *word |= bit;
        new
    }

    fn list(&self) -> Vec<usize> {
        (0..self.frames.len() * 64)
            .filter(|f| self.has(*f))
            .collect()
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Trust {
    path: PathBuf,
    url: String,
    /// Seconds since 1970.
    now: u64,
    packs: HashMap<Digest, Seen>,
    /// Packs of this build: what the store says of them, and whether what is remembered counts.
    asked: HashMap<Digest, Asked>,
    changed: bool,
}

#[derive(Debug, Clone, Copy)]
struct Asked {
    size: u64,
    modified: Option<u64>,
    counts: bool,
}

impl Trust {
    /// What `directory` remembers of the store at `url`. `fresh`: nothing of it counts.
    pub(super) fn load(directory: &Path, url: &str, fresh: bool) -> Self {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |d| d.as_secs());
        let path = directory.join(format!("{}.seen", Digest::of(url.as_bytes()).hex()));
        let packs = match fresh {
            true => HashMap::new(),
            false => read(&path, url).unwrap_or_default(),
        };
        Self {
            path,
            url: url.to_owned(),
            now,
            packs,
            asked: HashMap::new(),
            changed: false,
        }
    }

    /// Frames of a pack to be read anew before what is remembered of it counts; `None`: nothing
    /// usable is remembered, or the pack was judged before.
    pub(super) fn sample(&mut self, blobs: &dyn BlobStore, pack: &Digest) -> Option<Vec<usize>> {
        if self.asked.contains_key(pack) {
            return None;
        }
        let object = ask(blobs, pack);
        let (size, modified) = object.unwrap_or_default();
        let seen = self.packs.get(pack).filter(|seen| {
            object.is_some()
                && (seen.size, seen.modified) == (size, modified)
                && seen.checked <= self.now
                && self.now - seen.checked <= MAX_AGE.as_secs()
        });
        let sample = seen.map(|seen| {
            let mut frames = seen.list();
            fastrand::shuffle(&mut frames);
            frames.truncate(1 + frames.len() / SAMPLE);
            frames
        });
        if sample.is_none() && self.packs.remove(pack).is_some() {
            self.changed = true;
        }
        self.asked.insert(
            *pack,
            Asked {
                size,
                modified,
                counts: false,
            },
        );
        sample
    }

    /// The sample was sound, or it was not and nothing that is remembered of the pack counts.
    pub(super) fn judge(&mut self, pack: &Digest, sound: bool) {
        if let Some(asked) = self.asked.get_mut(pack) {
            asked.counts = sound;
        }
        if !sound {
            self.packs.remove(pack);
            self.changed = true;
        }
    }

    /// Whether the frame need not be read again.
    pub(super) fn covers(&self, pack: &Digest, frame: usize) -> bool {
        self.asked.get(pack).is_some_and(|asked| asked.counts)
            && self.packs.get(pack).is_some_and(|seen| seen.has(frame))
    }

    /// A frame was read and is sound.
    pub(super) fn note(&mut self, pack: &Digest, frame: usize) {
        let Some(asked) = self.asked.get(pack) else {
            return; // never asked what the store says of it
        };
        let now = self.now;
        let seen = self.packs.entry(*pack).or_insert_with(|| Seen {
            size: asked.size,
            modified: asked.modified,
            checked: now,
            frames: Vec::new(),
        });
        self.changed |= seen.add(frame);
    }

    /// This build wrote the pack.
    pub(super) fn wrote(&mut self, blobs: &dyn BlobStore, pack: &Digest, frames: usize) {
        let Some((size, modified)) = ask(blobs, pack) else {
            return;
        };
        let mut seen = Seen {
            size,
            modified,
            checked: self.now,
            frames: Vec::new(),
        };
        for frame in 0..frames {
            seen.add(frame);
        }
        self.packs.insert(*pack, seen);
        self.asked.insert(
            *pack,
            Asked {
                size,
                modified,
                counts: true,
            },
        );
        self.changed = true;
    }

    /// Writes down what is new. It is only a memory: failing costs the next build time, nothing
    /// else.
    pub(super) fn save(&mut self) {
        if !std::mem::take(&mut self.changed) {
            return;
        }
        // What others wrote meanwhile about packs that this build did not touch.
        for (pack, seen) in read(&self.path, &self.url).unwrap_or_default() {
            if !self.asked.contains_key(&pack) {
                self.packs.entry(pack).or_insert(seen);
            }
        }
        let now = self.now;
        self.packs
            .retain(|_, seen| now.saturating_sub(seen.checked) <= MAX_AGE.as_secs());
        let mut packs: Vec<_> = self.packs.iter().collect();
        packs.sort_unstable_by_key(|(id, seen)| (std::cmp::Reverse(seen.checked), **id));
        packs.truncate(MAX_PACKS);
        let bytes = encode(&self.url, &packs);
        if let Err(error) = replace(&self.path, &bytes) {
            tracing::debug!(
                "{} is not kept: {error}: the next build verifies more",
                self.path.display()
            );
        }
    }
}

/// Size and time of a pack as the store has it; `None` if it is gone or the store does not answer.
fn ask(blobs: &dyn BlobStore, pack: &Digest) -> Option<(u64, Option<u64>)> {
    let key = Key::pack(pack);
    let objects = blobs.list(key.as_str()).ok()?;
    let object = objects.into_iter().find(|object| object.key == key)?;
    let modified = object
        .modified
        .and_then(|time| time.duration_since(UNIX_EPOCH).ok())
        .and_then(|since| u64::try_from(since.as_nanos()).ok());
    Some((object.size, modified))
}

fn encode(url: &str, packs: &[(&Digest, &Seen)]) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    out.extend_from_slice(Digest::of(url.as_bytes()).as_bytes());
    for (id, seen) in packs {
        out.extend_from_slice(id.as_bytes());
        // 0 is no time that a pack can have.
        for number in [seen.size, seen.modified.unwrap_or(0), seen.checked] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        out.extend_from_slice(&(seen.frames.len() as u64).to_le_bytes());
        for word in &seen.frames {
            out.extend_from_slice(&word.to_le_bytes());
        }
    }
    let digest = Digest::of(&out);
    out.extend_from_slice(digest.as_bytes());
    out
}

fn decode(bytes: &[u8], url: &str) -> Option<HashMap<Digest, Seen>> {
    let (body, digest) = bytes.split_last_chunk::<{ Digest::LEN }>()?;
    if Digest::of(body).as_bytes() != digest {
        return None;
    }
    let mut rest = body.strip_prefix(MAGIC)?;
    if take::<{ Digest::LEN }>(&mut rest)? != Digest::of(url.as_bytes()).as_bytes() {
        return None;
    }
    let mut packs = HashMap::new();
    while !rest.is_empty() {
        let id = Digest::from_bytes(*take::<{ Digest::LEN }>(&mut rest)?);
        let size = number(&mut rest)?;
        let modified = Some(number(&mut rest)?).filter(|time| *time != 0);
        let checked = number(&mut rest)?;
        let words = usize::try_from(number(&mut rest)?).ok()?;
        let mut frames = Vec::new(); // grows with the bytes that are really there
        for _ in 0..words {
            frames.push(number(&mut rest)?);
        }
        packs.insert(
            id,
            Seen {
                size,
                modified,
                checked,
                frames,
            },
        );
    }
    Some(packs)
}

fn take<'a, const N: usize>(rest: &mut &'a [u8]) -> Option<&'a [u8; N]> {
    let (head, tail) = rest.split_first_chunk::<N>()?;
    *rest = tail;
    Some(head)
}

fn number(rest: &mut &[u8]) -> Option<u64> {
    take::<8>(rest).map(|bytes| u64::from_le_bytes(*bytes))
}

fn read(path: &Path, url: &str) -> Option<HashMap<Digest, Seen>> {
    use std::io::Read as _;
    let mut bytes = Vec::new();
    fs_err::File::open(path)
        .ok()?
        .take(MAX_FILE)
        .read_to_end(&mut bytes)
        .ok()?;
    decode(&bytes, url)
}

/// Not synced: after a crash the file is the old one, the new one, or damaged and ignored.
fn replace(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    if let Some(directory) = path.parent() {
        fs_err::create_dir_all(directory)?;
    }
    let partial = path.with_extension(format!("{}-{:x}", std::process::id(), fastrand::u64(..)));
    let written = fs_err::write(&partial, bytes).and_then(|()| fs_err::rename(&partial, path));
    if written.is_err() {
        let _ = fs_err::remove_file(&partial);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(frames: &[usize]) -> Seen {
        let mut seen = Seen {
            size: 9,
            modified: None,
            checked: 77,
            frames: Vec::new(),
        };
        for frame in frames {
            assert!(seen.add(*frame));
            assert!(!seen.add(*frame));
        }
        seen
    }

    #[test]
    fn what_was_written_comes_back_and_nothing_else_does() {
        let packs = [
            (Digest::of(b"a"), seen(&[0, 63, 64, 1000])),
            (Digest::of(b"b"), seen(&[])),
        ];
        let list: Vec<_> = packs.iter().map(|(id, seen)| (id, seen)).collect();
        let bytes = encode("file:///x", &list);
        let back = decode(&bytes, "file:///x").unwrap();
        assert_eq!(back, HashMap::from(packs));
        assert_eq!(back[&Digest::of(b"a")].list(), [0, 63, 64, 1000]);
        assert!(decode(&bytes, "file:///y").is_none());
        for at in 0..bytes.len() {
            let mut bad = bytes.clone();
            bad[at] ^= 1;
            assert!(decode(&bad, "file:///x").is_none(), "byte {at}");
            assert!(decode(&bytes[..at], "file:///x").is_none(), "length {at}");
        }
    }
}
