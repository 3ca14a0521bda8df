//! Reads git's index and writes what it remembers of files in place.
//!
//! The format is that of git's own document `gitformat-index`, versions 2, 3 and 4: a header of
//! signature `DIRC`, version and number of entries; for each entry ten words of 32 bits that
//! remember a file (times, device, inode, mode, owner, group, size), the object's id, flags and the
//! path; extensions; a hash of all before it, zero where the repository skips it. All numbers are
//! big endian. What is remembered of a file has a fixed size, so nothing else of an index changes.
//!
//! The bytes may be hostile: everything is bounded by their length.

use sha1::Sha1;
use sha2::Sha256;

/// Size of what precedes an entry's object id in bytes.
const STAT: usize = 40;
/// Place of the size among its words.
const SIZE: usize = 9;
const ASSUME_VALID: u16 = 0x8000;
const EXTENDED: u16 = 0x4000;
const STAGE: u16 = 0x3000;
const SKIP_WORKTREE: u16 = 0x4000;
const INTENT_TO_ADD: u16 = 0x2000;
/// Longest path in bytes.
const MAX_PATH: usize = 64 << 10;

/// Which hash names a repository's objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hash {
    /// SHA-1.
    Sha1,
    /// SHA-256.
    Sha256,
}

impl Hash {
    /// Length of an id in bytes.
    pub(crate) fn len(self) -> usize {
        match self {
            Self::Sha1 => 20,
            Self::Sha256 => 32,
        }
    }

    fn of(self, bytes: &[u8]) -> Vec<u8> {
        use sha1::Digest as _;
        match self {
            Self::Sha1 => Sha1::digest(bytes).to_vec(),
            Self::Sha256 => {
                use sha2::Digest as _;
                Sha256::digest(bytes).to_vec()
            }
        }
    }
}

/// What an entry names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Named {
    /// A regular file.
    File,
    /// A symbolic link.
    Symlink,
    /// A submodule, or a directory of a sparse index: nothing that has contents of its own.
    Other,
}

/// An entry of an index.
#[derive(Debug)]
pub(crate) struct Entry<'a> {
    /// Where what is remembered of the file begins.
    pub at: usize,
    /// What it names.
    pub named: Named,
    /// Id of the contents.
    pub id: &'a [u8],
    /// Path from the top of the working tree.
    pub path: &'a [u8],
    /// Whether git looks at the file: not if it is to be taken as unchanged or is not checked
    /// out, nor while it is in conflict or only announced.
    pub looked_at: bool,
}

/// What is to be remembered of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stat {
    /// Modification time, which is that of the last change too.
    pub sec: i64,
    /// Its nanoseconds.
    pub nsec: u32,
    /// Inode number.
    pub ino: u64,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Size in bytes.
    pub size: u64,
}

/// What an index is like as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Summary {
    /// The repository's hash.
    pub hash: Hash,
    /// How many entries.
    pub entries: u32,
    /// Most entries are in another file.
    pub split: bool,
}

/// Reads an index and shows each entry to `visit`.
pub(crate) fn read(
    bytes: &[u8],
    mut visit: impl FnMut(&Entry<'_>),
) -> Result<Summary, &'static str> {
    let hash = hash_of(bytes)?;
    let end = bytes.len() - hash.len();
    let body = bytes.get(..end).unwrap_or_default();
    let mut cursor = Cursor { body, at: 0 };
    if cursor.take(4)? != b"DIRC" {
        return Err("it does not begin with DIRC");
    }
    let version = cursor.word()?;
    if !(2..=4).contains(&version) {
        return Err("its version is not 2, 3 or 4");
    }
    let entries = cursor.word()?;
    let mut nameless = false;
    entries_of(&mut cursor, version, entries, hash, |entry| {
        nameless |= entry.path.is_empty();
        visit(entry);
    })?;
    let mut split = false;
    while cursor.at < end {
        let name = cursor.take(4)?;
        let len = usize::try_from(cursor.word()?).unwrap_or(usize::MAX);
        let must = name.first().is_some_and(u8::is_ascii_lowercase);
        match name {
            b"link" => split = true,
            b"sdir" => {}
            _ if must => return Err("it has an extension that must be known and is not"),
            _ => {}
        }
        cursor.take(len)?;
    }
    // Those stand for entries of the other file.
    if nameless && !split {
        return Err("a path is empty");
    }
    Ok(Summary {
        hash,
        entries,
        split,
    })
}

/// Which hash an index was written with: the one that stands at its end, or one whose place is
/// left zero.
fn hash_of(bytes: &[u8]) -> Result<Hash, &'static str> {
    let trailer = |hash: Hash| bytes.split_at_checked(bytes.len().checked_sub(hash.len())?);
    let mut blank = None;
    for hash in [Hash::Sha256, Hash::Sha1] {
        let Some((body, end)) = trailer(hash) else {
            continue;
        };
        if end.iter().all(|&byte| byte == 0) {
            // The shorter one may be the end of the longer one: whichever the entries fit.
            if blank.is_none() && fits(body, hash) {
                blank = Some(hash);
            }
        } else if hash.of(body) == end {
            return Ok(hash);
        }
    }
    blank.ok_or("the hash at its end is not that of its bytes: it is damaged or not whole")
}

fn fits(body: &[u8], hash: Hash) -> bool {
    let mut cursor = Cursor { body, at: 4 };
    let (Ok(version), Ok(entries)) = (cursor.word(), cursor.word()) else {
        return false;
    };
    if entries_of(&mut cursor, version, entries, hash, |_| {}).is_err() {
        return false;
    }
    while cursor.at < body.len() {
        let Ok(len) = cursor.take(4).and_then(|_| cursor.word()) else {
            return false;
        };
        if cursor
            .take(usize::try_from(len).unwrap_or(usize::MAX))
            .is_err()
        {
            return false;
        }
    }
    true
}

fn entries_of(
    cursor: &mut Cursor<'_>,
    version: u32,
    entries: u32,
    hash: Hash,
    mut visit: impl FnMut(&Entry<'_>),
) -> Result<(), &'static str> {
    let mut path: Vec<u8> = Vec::new();
    for _ in 0..entries {
        let at = cursor.at;
        let stat = cursor.take(STAT)?;
        let mode = stat.get(24..28).and_then(|word| word.first_chunk());
        let mode = mode.map_or(0, |word| u32::from_be_bytes(*word));
        let id = cursor.take(hash.len())?;
        let flags = cursor.short()?;
        let mut looked_at = flags & (STAGE | ASSUME_VALID) == 0;
        if flags & EXTENDED != 0 {
            if version < 3 {
                return Err("an entry has flags that its version does not have");
            }
            looked_at &= cursor.short()? & (SKIP_WORKTREE | INTENT_TO_ADD) == 0;
        }
        if version == 4 {
            let gone = cursor.varint()?;
            let kept = path
                .len()
                .checked_sub(gone)
                .ok_or("a path takes more from the one before than that has")?;
            path.truncate(kept);
            path.extend_from_slice(cursor.text()?);
        } else {
            path.clear();
            path.extend_from_slice(cursor.text()?);
            // Entries are padded to eight bytes; the NUL that was read is one of them.
            let over = (cursor.at - at) % 8;
            if over != 0 && cursor.take(8 - over)?.iter().any(|&byte| byte != 0) {
                return Err("the padding of an entry is not zero");
            }
        }
        if path.len() > MAX_PATH {
            return Err("a path is too long");
        }
        let named = match mode >> 12 {
            0o10 => Named::File,
            0o12 => Named::Symlink,
            _ => Named::Other,
        };
        visit(&Entry {
            at,
            named,
            id,
            path: &path,
            looked_at,
        });
    }
    Ok(())
}

/// Whether an entry, given by where [`Entry::at`] says, remembers just this of its file.
pub(crate) fn remembers(bytes: &[u8], at: usize, stat: &Stat) -> bool {
    let Some(entry) = bytes.get(at..at.saturating_add(STAT)) else {
        return false;
    };
    let (words, _) = entry.as_chunks::<4>();
    words_of(stat)
        .iter()
        .all(|(place, value)| words.get(*place) == Some(&value.to_be_bytes()))
}

/// Has an entry remember nothing of its file, so that git reads it.
pub(crate) fn forget(bytes: &mut [u8], at: usize) {
    let (from, to) = (at.saturating_add(SIZE * 4), at.saturating_add(STAT));
    if let Some(size) = bytes.get_mut(from..to) {
        size.fill(0);
    }
}

/// The words of an entry that remember a file, by their places: all but device and mode.
fn words_of(stat: &Stat) -> [(usize, u32); 8] {
    let sec = low(stat.sec.cast_unsigned());
    [
        (0, sec), // change time
        (1, stat.nsec),
        (2, sec), // modification time
        (3, stat.nsec),
        (5, low(stat.ino)),
        (7, stat.uid),
        (8, stat.gid),
        (SIZE, size_word(stat.size)),
    ]
}

/// Writes what is to be remembered of files, given by where [`Entry::at`] says, and the hash at
/// the end unless it is left out.
pub(crate) fn write(bytes: &mut [u8], hash: Hash, files: &[(usize, Stat)]) {
    for (at, stat) in files {
        let Some(entry) = bytes.get_mut(*at..*at + STAT) else {
            continue;
        };
        let (words, _) = entry.as_chunks_mut::<4>();
        for (place, value) in words_of(stat) {
            if let Some(word) = words.get_mut(place) {
                *word = value.to_be_bytes();
            }
        }
    }
    let Some(end) = bytes.len().checked_sub(hash.len()) else {
        return;
    };
    let Some((body, trailer)) = bytes.split_at_mut_checked(end) else {
        return;
    };
    if trailer.iter().any(|&byte| byte != 0) {
        trailer.copy_from_slice(&hash.of(body));
    }
}

/// git keeps 32 bits of everything.
fn low(value: u64) -> u32 {
    u32::try_from(value & 0xffff_ffff).unwrap_or_default()
}

/// Sizes too: zero is for files whose contents must be read, so a larger one never becomes zero.
fn size_word(size: u64) -> u32 {
    match low(size) {
        0 if size > 0 => 0x8000_0000,
        word => word,
    }
}

struct Cursor<'a> {
    body: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], &'static str> {
        let end = self.at.checked_add(n).ok_or("it is cut off")?;
        let taken = self.body.get(self.at..end).ok_or("it is cut off")?;
        self.at = end;
        Ok(taken)
    }

    fn word(&mut self) -> Result<u32, &'static str> {
        let word = self.take(4)?.first_chunk().ok_or("it is cut off")?;
        Ok(u32::from_be_bytes(*word))
    }

    fn short(&mut self) -> Result<u16, &'static str> {
        let short = self.take(2)?.first_chunk().ok_or("it is cut off")?;
        Ok(u16::from_be_bytes(*short))
    }

    /// Bytes up to a NUL, which is passed over.
    fn text(&mut self) -> Result<&'a [u8], &'static str> {
        let rest = self.body.get(self.at..).unwrap_or_default();
        let rest = rest.get(..rest.len().min(MAX_PATH + 1)).unwrap_or_default();
        let len = rest.iter().position(|&byte| byte == 0);
        let text = self.take(len.ok_or("a path has no end")?)?;
        self.take(1)?;
        Ok(text)
    }

    /// git's number of variable length, in which every number has one form.
    fn varint(&mut self) -> Result<usize, &'static str> {
        let mut value = 0usize;
        for index in 0.. {
            let [byte] = *self.take(1)?.first_chunk().ok_or("it is cut off")?;
            if index > 0 {
                value += 1;
            }
            value = (value << 7) + usize::from(byte & 0x7f);
            if value > MAX_PATH {
                break;
            }
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err("a path takes more from the one before than that has")
    }
}
