//! Git references and reflogs that are newer than a commit.
//!
//! What a commit is newer than is told by the times that committers' clocks wrote into it and into
//! what it is made on: an old date on top of newer commits hides none of them. The commits are read
//! where git has them, loose or packed, in the upper and in the layers below. A reference whose commit
//! cannot be read counts as newer.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};

/// Largest object that is looked into, and most of any file that is read whole, in bytes.
const MOST: u64 = 4 << 20;
/// Longest chain of deltas, and of tags.
const DEEPEST: u32 = 64;
/// Commits behind a reference that are looked at.
const MOST_COMMITS: usize = 2000;

/// What becomes of a file of git.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Fate {
    /// It stays as it is.
    Stays,
    /// It is left out.
    Goes,
    /// It stays without some of its lines.
    Shorter(Vec<u8>),
}

/// A file of git that can name commits.
pub(super) struct Named<'a> {
    /// The repository's directory.
    pub directory: &'a [u8],
    /// The file's path in it.
    file: &'a [u8],
}

/// Whether a path is one of a file that can name commits.
pub(super) fn named(path: &[u8]) -> Option<Named<'_>> {
    let mut end = 0;
    for part in path.split(|byte| *byte == b'/') {
        end += part.len();
        if part == b".git" {
            let file = path.get(end + 1..)?;
            let name = file.rsplit(|byte| *byte == b'/').next()?;
            let names = file.starts_with(b"refs/")
                || file.starts_with(b"logs/")
                || file.windows(6).any(|w| w == b"/logs/" || w == b"/refs/")
                || name == b"packed-refs"
                || file == b"info/refs"
                || name.ends_with(b"HEAD");
            return (names && !file.starts_with(b"objects/")).then_some(Named {
                directory: path.get(..end)?,
                file,
            });
        }
        end += 1;
    }
    None
}

/// The objects of repositories, as the upper and the layers below have them.
pub(super) struct History {
    roots: Vec<OwnedFd>,
    times: HashMap<(Vec<u8>, String), Option<i64>>,
    /// Commits that are not newer than another, nor is anything behind them: the repository, that
    /// other, the commit.
    old: HashSet<(Vec<u8>, String, String)>,
}

/// The commit that others are not to be newer than.
pub(super) struct Limit<'a> {
    /// Its name.
    pub id: &'a str,
    /// When it was made, in seconds since 1970.
    pub time: i64,
}

impl History {
    /// Those below these directories; ones that cannot be opened have none.
    pub(super) fn new<'a>(roots: impl Iterator<Item = &'a Path>) -> Self {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Self {
            roots: roots
                .filter_map(|root| rustix::fs::open(root, flags, Mode::empty()).ok())
                .collect(),
            times: HashMap::new(),
            old: HashSet::new(),
        }
    }

    /// Whether a commit, or one that it is made on, was made after `limit`. What lies behind `limit`
    /// itself is not looked at, nor what a shallow clone does not have.
    fn is_newer(&mut self, repository: &[u8], id: &str, limit: &Limit<'_>) -> bool {
        let key = |id: &str| (repository.to_vec(), limit.id.to_owned(), id.to_owned());
        let mut seen = HashSet::new();
        let mut next = vec![(id.to_owned(), 0)];
        while let Some((commit, tags)) = next.pop() {
            if commit == limit.id || self.old.contains(&key(&commit)) {
                continue;
            }
            if seen.len() >= MOST_COMMITS {
                break;
            }
            let top = seen.is_empty();
            if !seen.insert(commit.clone()) {
                continue;
            }
            match self.object(repository, &commit, 0) {
                Some((Kind::Commit, bytes)) => {
                    if committed(&bytes).is_none_or(|time| time > limit.time) {
                        return true;
                    }
                    next.extend(parents(&bytes).map(|parent| (parent, 0)));
                }
                // A tag is as old as what it names.
                Some((Kind::Tag, bytes)) if tags < DEEPEST => match target(&bytes) {
                    Some(target) => next.push((target, tags + 1)),
                    None => return true,
                },
                None if !top => {}
                _ => return true,
            }
        }
        self.old.extend(seen.iter().map(|commit| key(commit)));
        false
    }

    /// When a commit was made, in seconds since 1970.
    pub(super) fn time(&mut self, repository: &[u8], id: &str) -> Option<i64> {
        let key = (repository.to_vec(), id.to_owned());
        if let Some(known) = self.times.get(&key) {
            return *known;
        }
        let time = self.read_time(repository, id, 0);
        self.times.insert(key, time);
        time
    }

    fn read_time(&self, repository: &[u8], id: &str, depth: u32) -> Option<i64> {
        let (kind, bytes) = self.object(repository, id, depth)?;
        match kind {
            Kind::Commit => committed(&bytes),
            // A tag is as old as what it names.
            Kind::Tag if depth < DEEPEST => self.read_time(repository, &target(&bytes)?, depth + 1),
            _ => None,
        }
    }

    /// What becomes of a file, where commits made after `limit` are not to be named.
    pub(super) fn fate(&mut self, named: &Named<'_>, bytes: &[u8], limit: &Limit<'_>) -> Fate {
        let repository = named.directory;
        let mut is_newer = |id: &[u8]| {
            let Ok(id) = std::str::from_utf8(id) else {
                return true;
            };
            if id.bytes().all(|byte| byte == b'0') {
                return false; // no commit
            }
            self.is_newer(repository, id, limit)
        };
        let name = named.file.rsplit(|byte| *byte == b'/').next();
        let in_logs = named.file.starts_with(b"logs/")
            || named.file.windows(6).any(|window| window == b"/logs/");
        let lists = name == Some(b"packed-refs")
            || name == Some(b"FETCH_HEAD")
            || named.file == b"info/refs";
        if !in_logs && !lists {
            let text = bytes.trim_ascii();
            return match is_id(text) && is_newer(text) {
                true => Fate::Goes,
                false => Fate::Stays,
            };
        }
        let mut left = Vec::with_capacity(bytes.len());
        let mut peeled_too = false;
        for line in bytes.split_inclusive(|byte| *byte == b'\n') {
            let mut words = line.split(|byte| byte.is_ascii_whitespace());
            let first = words.next().unwrap_or_default();
            // A line of a reflog says what was and what is.
            let then = match in_logs {
                true => words.next().unwrap_or_default(),
                false => first,
            };
            let peeled = first.starts_with(b"^");
            let goes = match peeled {
                true => peeled_too,
                false => [first, then].iter().any(|id| is_id(id) && is_newer(id)),
            };
            if !peeled {
                peeled_too = goes;
            }
            if !goes {
                left.extend_from_slice(line);
            }
        }
        match left.len() == bytes.len() {
            true => Fate::Stays,
            false if left.is_empty() => Fate::Goes,
            false => Fate::Shorter(left),
        }
    }

    fn open(&self, root: &OwnedFd, path: &[u8]) -> Option<std::fs::File> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let resolve =
            ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let file = openat2(root, OsStr::from_bytes(path), flags, Mode::empty(), resolve).ok()?;
        Some(std::fs::File::from(file))
    }

    fn object(&self, repository: &[u8], id: &str, depth: u32) -> Option<(Kind, Vec<u8>)> {
        if !is_id(id.as_bytes()) {
            return None;
        }
        let (head, tail) = id.split_at_checked(2)?;
        let loose = [
            repository,
            b"/objects/",
            head.as_bytes(),
            b"/",
            tail.as_bytes(),
        ]
        .concat();
        let found = self
            .roots
            .iter()
            .find_map(|root| read_loose(self.open(root, &loose)?));
        found.or_else(|| self.packed(repository, &bytes_of(id)?, depth))
    }

    fn packed(&self, repository: &[u8], id: &[u8], depth: u32) -> Option<(Kind, Vec<u8>)> {
        let directory = [repository, b"/objects/pack"].concat();
        for root in &self.roots {
            let Some(packs) = self.open(root, &directory) else {
                continue;
            };
            let names: Vec<Vec<u8>> = rustix::fs::Dir::read_from(&packs)
                .ok()?
                .filter_map(|entry| Some(entry.ok()?.file_name().to_bytes().to_vec()))
                .filter(|name| name.ends_with(b".idx"))
                .collect();
            for name in names {
                let stem = name.strip_suffix(b".idx").unwrap_or_default();
                let at = |end: &[u8]| [&directory, &b"/"[..], stem, end].concat();
                let place = self
                    .open(root, &at(b".idx"))
                    .and_then(|index| offset_in(&index, id));
                if let Some(offset) = place
                    && let Some(pack) = self.open(root, &at(b".pack"))
                {
                    return self.unpack(repository, &pack, offset, id.len(), depth);
                }
            }
        }
        None
    }

    /// The object at an offset of a pack.
    fn unpack(
        &self,
        repository: &[u8],
        pack: &std::fs::File,
        offset: u64,
        id_len: usize,
        depth: u32,
    ) -> Option<(Kind, Vec<u8>)> {
        if depth > DEEPEST {
            return None;
        }
        let mut reader = At { file: pack, offset };
        let mut byte = reader.byte()?;
        let kind = byte >> 4 & 7;
        while byte & 0x80 != 0 {
            byte = reader.byte()?; // the size, which the data tells too
        }
        let base = match kind {
            1 => return Some((Kind::Commit, inflate(reader)?)),
            4 => return Some((Kind::Tag, inflate(reader)?)),
            6 => {
                let mut byte = reader.byte()?;
                let mut back = u64::from(byte & 0x7f);
                while byte & 0x80 != 0 {
                    byte = reader.byte()?;
                    back = (back.checked_add(1)?.checked_mul(128)?) | u64::from(byte & 0x7f);
                }
                let base = offset.checked_sub(back).filter(|base| *base < offset)?;
                self.unpack(repository, pack, base, id_len, depth + 1)?
            }
            7 => {
                let mut id = vec![0; id_len];
                reader.read_exact(&mut id).ok()?;
                let hex: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
                self.object(repository, &hex, depth + 1)?
            }
            _ => return None,
        };
        let delta = inflate(reader)?;
        Some((base.0, apply(&base.1, &delta)?))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Commit,
    Tag,
    Other,
}

fn is_id(text: &[u8]) -> bool {
    matches!(text.len(), 40 | 64) && text.iter().all(u8::is_ascii_hexdigit)
}

fn bytes_of(hex: &str) -> Option<Vec<u8>> {
    let digits = hex.as_bytes().chunks(2);
    digits
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok())
        .collect()
}

fn read_loose(file: std::fs::File) -> Option<(Kind, Vec<u8>)> {
    let bytes = inflate(file)?;
    let end = bytes.iter().position(|byte| *byte == 0)?;
    let (head, body) = (bytes.get(..end)?, bytes.get(end + 1..)?);
    let kind = if head.starts_with(b"commit ") {
        Kind::Commit
    } else if head.starts_with(b"tag ") {
        Kind::Tag
    } else {
        Kind::Other
    };
    Some((kind, body.to_vec()))
}

/// What a stream of zlib holds, up to a limit.
fn inflate(from: impl std::io::Read) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    flate2::read::ZlibDecoder::new(from)
        .take(MOST)
        .read_to_end(&mut bytes)
        .ok()?;
    Some(bytes)
}

/// What a tag names.
fn target(tag: &[u8]) -> Option<String> {
    let line = tag.split(|byte| *byte == b'\n').next()?;
    let target = std::str::from_utf8(line.strip_prefix(b"object ")?).ok()?;
    Some(target.to_owned())
}

/// What a commit is made on.
fn parents(commit: &[u8]) -> impl Iterator<Item = String> {
    let head = commit.split(|byte| *byte == b'\n');
    head.take_while(|line| !line.is_empty())
        .filter_map(|line| std::str::from_utf8(line.strip_prefix(b"parent ")?).ok())
        .map(str::to_owned)
}

/// The time of a commit's committer.
fn committed(commit: &[u8]) -> Option<i64> {
    let head = commit.split(|byte| *byte == b'\n');
    for line in head.take_while(|line| !line.is_empty()) {
        if let Some(who) = line.strip_prefix(b"committer ") {
            let end = who.iter().rposition(|byte| *byte == b'>')?;
            let rest = std::str::from_utf8(who.get(end + 1..)?).ok()?;
            return rest.split_whitespace().next()?.parse().ok();
        }
    }
    None
}

/// A file read from an offset on.
struct At<'a> {
    file: &'a std::fs::File,
    offset: u64,
}

impl At<'_> {
    fn byte(&mut self) -> Option<u8> {
        let mut one = [0];
        self.read_exact(&mut one).ok()?;
        let [byte] = one;
        Some(byte)
    }
}

impl std::io::Read for At<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let n = std::os::unix::fs::FileExt::read_at(self.file, buffer, self.offset)?;
        self.offset += n as u64;
        Ok(n)
    }
}

/// Where a pack has an object, by its index of version 2.
fn offset_in(index: &std::fs::File, id: &[u8]) -> Option<u64> {
    let read = |at: u64, n: usize| -> Option<Vec<u8>> {
        let mut bytes = vec![0; n];
        let mut reader = At {
            file: index,
            offset: at,
        };
        reader.read_exact(&mut bytes).ok()?;
        Some(bytes)
    };
    let number = |at: u64| -> Option<u64> {
        let bytes = read(at, 4)?;
        Some(u64::from(u32::from_be_bytes(*bytes.first_chunk()?)))
    };
    if read(0, 8)? != b"\xfftOc\0\0\0\x02" {
        return None;
    }
    let first = u64::from(*id.first()?);
    let fan = |byte: u64| number(8 + 4 * byte);
    let (mut low, mut high) = (if first == 0 { 0 } else { fan(first - 1)? }, fan(first)?);
    let all = fan(255)?;
    let len = id.len() as u64;
    let names = 8 + 4 * 256;
    while low < high {
        let middle = low + (high - low) / 2;
        match read(names + middle * len, id.len())?.as_slice().cmp(id) {
            std::cmp::Ordering::Less => low = middle + 1,
            std::cmp::Ordering::Greater => high = middle,
            std::cmp::Ordering::Equal => {
                let offsets = names + all * (len + 4);
                let offset = number(offsets + 4 * middle)?;
                if offset & 0x8000_0000 == 0 {
                    return Some(offset);
                }
                let large = offsets + 4 * all + 8 * (offset & 0x7fff_ffff);
                let bytes = read(large, 8)?;
                return Some(u64::from_be_bytes(*bytes.first_chunk()?));
            }
        }
    }
    None
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
    fn files_that_name_commits() {
        let of = |path: &str| {
            named(path.as_bytes()).map(|n| String::from_utf8_lossy(n.directory).into_owned())
        };
        for path in [
            "a/.git/refs/heads/x",
            "a/.git/logs/HEAD",
            "a/.git/packed-refs",
            "a/.git/ORIG_HEAD",
            "a/.git/info/refs",
            "a/.git/worktrees/w/HEAD",
            "a/.git/worktrees/w/logs/HEAD",
        ] {
            assert_eq!(of(path).as_deref(), Some("a/.git"), "{path}");
        }
        for path in [
            "a/.git/config",
            "a/.git/objects/x/HEAD",
            "a/git/refs/x",
            ".git",
        ] {
            assert_eq!(of(path), None, "{path}");
        }
    }

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
