//! Commits and tags of git repositories, loose or packed, wherever the upper or a layer below has them.
//! Each is checked by its id, so nobody can give a commit other parents than it has.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io::{BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::sync::Arc;

use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};

/// Largest object that is looked into in bytes: a larger one is as if it could not be read.
const MOST: u64 = 4 << 20;
/// Longest chain of deltas.
const DEEPEST: u32 = 64;
/// Files of packs that are kept open; more are opened each time.
const MOST_OPEN: usize = 128;
/// Names of a pack's index that are read at once, in bytes.
const MOST_NAMES: u64 = 64 << 10;
/// Bytes of a pack that are read at once: most commits are smaller.
const BUFFER: usize = 4096;

/// A file that is read at any place.
pub(crate) trait ReadAt: Send + Sync {
    /// Fills what it can of `buffer` with the bytes from `offset` on; 0 at the end.
    ///
    /// # Errors
    /// What the file's place says.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> std::io::Result<usize>;
}

impl ReadAt for std::fs::File {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> std::io::Result<usize> {
        std::os::unix::fs::FileExt::read_at(self, buffer, offset)
    }
}

/// Files of a layer, by paths from its root.
pub(crate) trait Files: Send {
    /// The file at a path, never through a symbolic link.
    fn open(&self, path: &[u8]) -> Option<Arc<dyn ReadAt>>;
    /// The names in a directory; none if there is no such directory.
    fn names(&self, directory: &[u8]) -> Vec<Vec<u8>>;
}

/// A layer that is a directory of this machine.
#[derive(Debug)]
pub(crate) struct Mounted(pub(crate) OwnedFd);

impl Mounted {
    fn opened(&self, path: &[u8], flags: OFlags) -> Option<OwnedFd> {
        let flags = flags | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let resolve =
            ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        openat2(
            &self.0,
            OsStr::from_bytes(path),
            flags,
            Mode::empty(),
            resolve,
        )
        .ok()
    }
}

impl Files for Mounted {
    fn open(&self, path: &[u8]) -> Option<Arc<dyn ReadAt>> {
        let file = self.opened(path, OFlags::RDONLY)?;
        Some(Arc::new(std::fs::File::from(file)))
    }

    fn names(&self, directory: &[u8]) -> Vec<Vec<u8>> {
        let opened = self.opened(directory, OFlags::RDONLY | OFlags::DIRECTORY);
        let entries = opened.and_then(|fd| rustix::fs::Dir::new(fd).ok());
        entries
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.file_name().to_bytes().to_vec())
            .collect()
    }
}

/// Name of an object: 20 bytes of SHA-1, or 32 of SHA-256.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Id {
    bytes: [u8; 32],
    long: bool,
}

impl Id {
    /// The one that all 40 or 64 hexadecimal digits spell.
    pub(super) fn parse(hex: &[u8]) -> Option<Self> {
        let long = match hex.len() {
            40 => false,
            64 => true,
            _ => return None,
        };
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(hex.chunks_exact(2)) {
            let digit = |at: usize| char::from(*pair.get(at)?).to_digit(16);
            *byte = u8::try_from(digit(0)? * 16 + digit(1)?).ok()?;
        }
        Some(Self { bytes, long })
    }

    fn of_bytes(from: &[u8]) -> Option<Self> {
        let mut bytes = [0; 32];
        bytes.get_mut(..from.len())?.copy_from_slice(from);
        Some(Self {
            bytes,
            long: from.len() == 32,
        })
    }

    fn as_bytes(&self) -> &[u8] {
        let len = if self.long { 32 } else { 20 };
        self.bytes.get(..len).unwrap_or_default()
    }

    /// Whether it is no object's: what reflogs write for nothing.
    pub(super) fn is_zero(&self) -> bool {
        self.bytes == [0; 32]
    }

    /// Whether it is the name of this object.
    fn is_of(&self, kind: Kind, body: &[u8]) -> bool {
        let word = match kind {
            Kind::Commit => "commit",
            Kind::Tag => "tag",
        };
        let header = format!("{word} {}\0", body.len());
        if self.long {
            use sha2::Digest as _;
            let hash = sha2::Sha256::new().chain_update(header).chain_update(body);
            hash.finalize().as_slice() == self.as_bytes()
        } else {
            use sha1::Digest as _;
            let hash = sha1::Sha1::new().chain_update(header).chain_update(body);
            hash.finalize().as_slice() == self.as_bytes()
        }
    }
}

/// What kind of object one is; others are not looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Commit,
    Tag,
}

/// Objects of the repositories of some layers.
pub(super) struct Objects {
    /// Topmost first.
    roots: Vec<Box<dyn Files>>,
    /// Packs by their repository's directory.
    packs: HashMap<Vec<u8>, Vec<Pack>>,
    /// How many of their files are kept open.
    open: usize,
}

/// A pack, and where it is.
struct Pack {
    root: usize,
    /// Path without the ending.
    stem: Vec<u8>,
    index: Option<Arc<dyn ReadAt>>,
    pack: Option<Arc<dyn ReadAt>>,
}

/// One of a pack's two files.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Index,
    Pack,
}

impl Objects {
    /// Those of these layers, topmost first.
    pub(super) fn new(roots: Vec<Box<dyn Files>>) -> Self {
        Self {
            roots,
            packs: HashMap::new(),
            open: 0,
        }
    }

    /// A commit or tag. `None`: no layer has it as its id says.
    pub(super) fn object(&mut self, repository: &[u8], id: &Id) -> Option<(Kind, Vec<u8>)> {
        self.found(repository, id, 0)
    }

    fn found(&mut self, repository: &[u8], id: &Id, depth: u32) -> Option<(Kind, Vec<u8>)> {
        let hex: String = id.as_bytes().iter().map(|b| format!("{b:02x}")).collect();
        let (head, tail) = hex.split_at_checked(2)?;
        let loose = [
            repository,
            b"/objects/",
            head.as_bytes(),
            b"/",
            tail.as_bytes(),
        ]
        .concat();
        let right = |(kind, body): &(Kind, Vec<u8>)| id.is_of(*kind, body);
        let found = self
            .roots
            .iter()
            .find_map(|root| read_loose(&*root.open(&loose)?).filter(right));
        found.or_else(|| self.packed(repository, id, depth))
    }

    fn packed(&mut self, repository: &[u8], id: &Id, depth: u32) -> Option<(Kind, Vec<u8>)> {
        for at in 0..self.list(repository) {
            let place = self
                .file(repository, at, Part::Index)
                .and_then(|index| offset_in(&*index, id.as_bytes()));
            let Some(offset) = place else { continue };
            let Some(pack) = self.file(repository, at, Part::Pack) else {
                continue;
            };
            if let Some((kind, body)) = self.unpack(repository, &*pack, offset, id.long, depth)
                && id.is_of(kind, &body)
            {
                return Some((kind, body));
            }
        }
        None
    }

    /// Looks once for a repository's packs; how many there are.
    fn list(&mut self, repository: &[u8]) -> usize {
        if let Some(packs) = self.packs.get(repository) {
            return packs.len();
        }
        let directory = [repository, b"/objects/pack"].concat();
        let mut packs = Vec::new();
        for (root, files) in self.roots.iter().enumerate() {
            for name in files.names(&directory) {
                if let Some(stem) = name.strip_suffix(b".idx") {
                    packs.push(Pack {
                        root,
                        stem: [&directory, &b"/"[..], stem].concat(),
                        index: None,
                        pack: None,
                    });
                }
            }
        }
        let count = packs.len();
        self.packs.insert(repository.to_vec(), packs);
        count
    }

    fn file(&mut self, repository: &[u8], at: usize, part: Part) -> Option<Arc<dyn ReadAt>> {
        let pack = self.packs.get_mut(repository)?.get_mut(at)?;
        let (slot, ending) = match part {
            Part::Index => (&mut pack.index, &b".idx"[..]),
            Part::Pack => (&mut pack.pack, &b".pack"[..]),
        };
        if let Some(file) = slot {
            return Some(Arc::clone(file));
        }
        let path = [&pack.stem, ending].concat();
        let file = self.roots.get(pack.root)?.open(&path)?;
        if self.open < MOST_OPEN {
            self.open += 1;
            *slot = Some(Arc::clone(&file));
        }
        Some(file)
    }

    /// The object at an offset of a pack.
    fn unpack(
        &mut self,
        repository: &[u8],
        pack: &dyn ReadAt,
        offset: u64,
        long: bool,
        depth: u32,
    ) -> Option<(Kind, Vec<u8>)> {
        if depth > DEEPEST {
            return None;
        }
        let mut reader = BufReader::with_capacity(BUFFER, At { file: pack, offset });
        let mut byte = byte_of(&mut reader)?;
        let kind = byte >> 4 & 7;
        while byte & 0x80 != 0 {
            byte = byte_of(&mut reader)?; // the size, which the data tells too
        }
        let (kind, base) = match kind {
            1 => return Some((Kind::Commit, inflate(reader)?)),
            4 => return Some((Kind::Tag, inflate(reader)?)),
            6 => {
                let mut byte = byte_of(&mut reader)?;
                let mut back = u64::from(byte & 0x7f);
                while byte & 0x80 != 0 {
                    byte = byte_of(&mut reader)?;
                    back = (back.checked_add(1)?.checked_mul(128)?) | u64::from(byte & 0x7f);
                }
                let base = offset.checked_sub(back).filter(|base| *base < offset)?;
                self.unpack(repository, pack, base, long, depth + 1)?
            }
            7 => {
                let mut id = vec![0; if long { 32 } else { 20 }];
                reader.read_exact(&mut id).ok()?;
                self.found(repository, &Id::of_bytes(&id)?, depth + 1)?
            }
            _ => return None,
        };
        let delta = inflate(reader)?;
        Some((kind, apply(&base, &delta)?))
    }
}

fn read_loose(file: &dyn ReadAt) -> Option<(Kind, Vec<u8>)> {
    let bytes = inflate(BufReader::with_capacity(BUFFER, At { file, offset: 0 }))?;
    let end = bytes.iter().position(|byte| *byte == 0)?;
    let (head, body) = (bytes.get(..end)?, bytes.get(end + 1..)?);
    let kind = if head.starts_with(b"commit ") {
        Kind::Commit
    } else if head.starts_with(b"tag ") {
        Kind::Tag
    } else {
        return None;
    };
    Some((kind, body.to_vec()))
}

/// What a stream of zlib holds, up to a limit.
fn inflate(from: impl std::io::BufRead) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    flate2::bufread::ZlibDecoder::new(from)
        .take(MOST)
        .read_to_end(&mut bytes)
        .ok()?;
    Some(bytes)
}

fn byte_of(reader: &mut impl Read) -> Option<u8> {
    let mut one = [0];
    reader.read_exact(&mut one).ok()?;
    let [byte] = one;
    Some(byte)
}

/// A file read from an offset on.
struct At<'a> {
    file: &'a dyn ReadAt,
    offset: u64,
}

impl Read for At<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let n = self.file.read_at(buffer, self.offset)?;
        self.offset += n as u64;
        Ok(n)
    }
}

/// Where a pack has an object, by its index of version 2.
fn offset_in(index: &dyn ReadAt, id: &[u8]) -> Option<u64> {
    let read = |at: u64, n: u64| -> Option<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(n).ok()?];
        let mut reader = At {
            file: index,
            offset: at,
        };
        reader.read_exact(&mut bytes).ok()?;
        Some(bytes)
    };
    let names = 8 + 4 * 256;
    let head = read(0, names)?;
    if !head.starts_with(b"\xfftOc\0\0\0\x02") {
        return None;
    }
    let fan = |byte: usize| -> Option<u64> {
        let count = head.get(8 + 4 * byte..)?.first_chunk()?;
        Some(u64::from(u32::from_be_bytes(*count)))
    };
    let first = usize::from(*id.first()?);
    let (mut low, mut high) = match first.checked_sub(1) {
        None => (0, fan(first)?),
        Some(before) => (fan(before)?, fan(first)?),
    };
    let all = fan(255)?;
    let len = id.len() as u64;
    while high.checked_sub(low)? * len > MOST_NAMES {
        let middle = low + (high - low) / 2;
        match read(names + middle * len, len)?.as_slice() <= id {
            true => low = middle,
            false => high = middle,
        }
    }
    let some = read(names + low * len, (high - low) * len)?;
    let place = some.chunks_exact(id.len()).position(|name| name == id)?;
    let offsets = names + all * (len + 4);
    let offset = read(offsets + 4 * (low + place as u64), 4)?;
    let offset = u64::from(u32::from_be_bytes(*offset.first_chunk()?));
    if offset & 0x8000_0000 == 0 {
        return Some(offset);
    }
    let large = offsets + 4 * all + 8 * (offset & 0x7fff_ffff);
    Some(u64::from_be_bytes(*read(large, 8)?.first_chunk()?))
}

/// What a delta makes of its base.
fn apply(base: &[u8], delta: &[u8]) -> Option<Vec<u8>> {
    let mut delta = delta.iter().copied();
    let mut size = || -> Option<usize> {
        let (mut value, mut shift) = (0usize, 0u32);
        loop {
            let byte = delta.next()?;
            value |= usize::from(byte & 0x7f).checked_shl(shift)?;
            shift += 7;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
    };
    let (of_base, of_result) = (size()?, size()?);
    if of_base != base.len() || of_result as u64 > MOST {
        return None;
    }
    let mut result = Vec::with_capacity(of_result);
    while let Some(code) = delta.next() {
        if code & 0x80 == 0 {
            if code == 0 {
                return None;
            }
            for _ in 0..code {
                result.push(delta.next()?);
            }
            continue;
        }
        let mut field = |bits: u8, count: u32| -> Option<usize> {
            let mut value = 0usize;
            for index in 0..count {
                if bits >> index & 1 != 0 {
                    value |= usize::from(delta.next()?) << (8 * index);
                }
            }
            Some(value)
        };
        let offset = field(code & 0x0f, 4)?;
        let len = match field(code >> 4 & 7, 3)? {
            0 => 0x10000,
            len => len,
        };
        result.extend_from_slice(base.get(offset..offset.checked_add(len)?)?);
        if result.len() > of_result {
            return None;
        }
    }
    (result.len() == of_result).then_some(result)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deltas() {
        // Base of 5, result of 8: copy 1..4, insert "xyz", copy 0..2.
        let delta = [5, 8, 0x91, 1, 3, 3, b'x', b'y', b'z', 0x90, 2];
        assert_eq!(apply(b"abcde", &delta).unwrap(), b"bcdxyzab");
        for bad in [&delta[..8], &[4, 8][..], &[5, 1, 0], &[5, 9, 0x91, 4, 9]] {
            assert_eq!(apply(b"abcde", bad), None, "{bad:?}");
        }
    }
}
