//! The build cache: what the files of a source were when they were last packed, so that a file
//! which did not change since is neither opened nor read again.
//!
//! For each source there is one file, a stream of records in the order in which a build stores
//! files: path, identity (device, inode, size, modification and change time), chunks with their
//! digests. A build reads the old stream beside its own list of files, as one merges two sorted
//! lists, and writes the new one; neither is ever in memory. The new stream takes the old one's
//! place in one step and only when a build comes to its end, so builds at once do not disturb each
//! other. Blocks of records carry their digest: from the first damaged one on the cache counts as
//! empty. A cache that another user could have written counts as empty too.
//!
//! What makes it sound: a file is remembered only if its change time was old enough when its bytes
//! were read ([`is_settled`]), so that any later change gives it another one; and a remembered file
//! is used only if the store still has every chunk. What it cannot see, as no cache of its kind
//! can: bytes changed through a shared memory map after the kernel last looked at the page's
//! state, on a machine whose clock is set back, or on a file server whose clock is off.

mod format;

use std::cmp::Ordering;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use layerpack_store::Digest;
use tempfile::NamedTempFile;

use crate::content::Content;
use crate::dir::Identity;

pub(crate) use format::Record;
use format::{Reader, Writer};

/// Caches of sources that were not built for so long go.
const KEEP: Duration = Duration::from_secs(30 * 24 * 60 * 60);
/// Unfinished caches of builds that died go after so long.
const KEEP_PARTIAL: Duration = Duration::from_secs(24 * 60 * 60);
const EXTENSION: &str = "files";
const PARTIAL: &str = "partial";

/// Where a source's cache lies.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    directory: PathBuf,
    file: PathBuf,
    key: Digest,
}

impl Place {
    /// The cache in `directory` for the source at `path`; `rules` names everything else that
    /// decides which files there are and how they are cut.
    pub(crate) fn new(directory: &Path, path: &Path, rules: &[&[u8]]) -> Option<Self> {
        use std::os::unix::ffi::OsStrExt;
        let path = fs_err::canonicalize(path).ok()?;
        let mut text = b"layerpack build cache\0".to_vec();
        for part in [path.as_os_str().as_bytes()].iter().chain(rules) {
            text.extend_from_slice(&(part.len() as u64).to_le_bytes());
            text.extend_from_slice(part);
        }
        let key = Digest::of(&text);
        Some(Self {
            directory: directory.to_owned(),
            file: directory.join(key.hex()).with_extension(EXTENSION),
            key,
        })
    }

    /// What an earlier build remembered, if there is anything.
    pub(crate) fn old(&self) -> Old {
        Old {
            reader: Reader::open(&self.file, &self.key),
            next: None,
        }
    }

    /// Begins what the next build will read. `None` if nothing can be written there: a build does
    /// not fail for that.
    pub(crate) fn new_records(&self) -> Option<New> {
        fs_err::create_dir_all(&self.directory).ok()?;
        let file = tempfile::Builder::new()
            .suffix(&format!(".{PARTIAL}"))
            .tempfile_in(&self.directory)
            .ok()?;
        Some(New {
            writer: Writer::new(file, &self.key)?,
            place: self.clone(),
        })
    }
}

/// An earlier build's records, read in their order.
pub(crate) struct Old {
    reader: Option<Reader>,
    next: Option<Record>,
}

impl Old {
    /// The content of the file at `path`, if it was remembered with this identity. Paths must be
    /// asked for in the order of a build.
    pub(crate) fn find(&mut self, path: &[u8], identity: &Identity) -> Option<Content> {
        loop {
            if self.next.is_none() {
                self.next = self.reader.as_mut()?.next();
                if self.next.is_none() {
                    self.reader = None; // the end, or damage
                    return None;
                }
            }
            let next = self.next.as_ref()?;
            match order((&next.path, next.identity.size()), (path, identity.size())) {
                Ordering::Less => self.next = None,
                Ordering::Greater => return None,
                Ordering::Equal => {
                    let record = self.next.take()?;
                    return (record.identity == *identity).then_some(record.content);
                }
            }
        }
    }
}

/// The records of a build that is under way.
pub(crate) struct New {
    writer: Writer<NamedTempFile>,
    place: Place,
}

impl New {
    /// Remembers a file. `false`: it cannot be written, and this is of no more use.
    #[must_use]
    pub(crate) fn add(&mut self, path: &[u8], identity: &Identity, content: &Content) -> bool {
        self.writer.push(path, identity, content).is_some()
    }

    /// Takes the place of the earlier records. Failing means that the next build reads more.
    pub(crate) fn keep(self) {
        let Self { writer, place } = self;
        if let Some(file) = writer.finish() {
            let _ = file.persist(&place.file);
        }
        sweep(&place.directory);
    }
}

/// Whether a file with this identity, whose bytes were read at or after `read`, gets another change
/// time from any later change. File systems count time in ticks: the kernel's, at most 10 ms, on
/// those that keep nanoseconds; up to 2 s on others, which shows in their change times' last
/// digits.
pub(crate) fn is_settled(identity: &Identity, read: SystemTime) -> bool {
    let (seconds, nanoseconds) = identity.ctime();
    let tick = if nanoseconds % 1000 == 0 {
        Duration::from_secs(2)
    } else {
        Duration::from_millis(100)
    };
    let Ok(since) = u64::try_from(seconds) else {
        return true; // before 1970
    };
    let changed = UNIX_EPOCH
        .checked_add(Duration::from_secs(since))
        .and_then(|time| time.checked_add(Duration::from_nanos(nanoseconds)));
    changed
        .and_then(|changed| read.duration_since(changed).ok())
        .is_some_and(|age| age > tick)
}

/// The order in which a build stores files: small ones first; the files of a directory by name,
/// then its directories by name.
pub(crate) fn order(a: (&[u8], u64), b: (&[u8], u64)) -> Ordering {
    let small = |size: u64| size <= crate::dir::SMALL;
    small(b.1).cmp(&small(a.1)).then_with(|| {
        let same = a.0.iter().zip(b.0).take_while(|(a, b)| a == b).count();
        // From the start of the first component that differs.
        let start =
            a.0.get(..same)
                .and_then(|head| head.iter().rposition(|&byte| byte == b'/'))
                .map_or(0, |slash| slash + 1);
        let (a, b) = (
            a.0.get(start..).unwrap_or_default(),
            b.0.get(start..).unwrap_or_default(),
        );
        fn split(path: &[u8]) -> (bool, &[u8]) {
            match path.iter().position(|&byte| byte == b'/') {
                Some(slash) => (true, path.get(..slash).unwrap_or_default()),
                None => (false, path),
            }
        }
        split(a).cmp(&split(b))
    })
}

/// Removes what nobody will use again.
fn sweep(directory: &Path) {
    let Ok(entries) = fs_err::read_dir(directory) else {
        return;
    };
    for entry in entries.filter_map(Result::ok) {
        let path = entry.path();
        let keep = match path.extension().and_then(|extension| extension.to_str()) {
            Some(EXTENSION) => KEEP,
            Some(PARTIAL) => KEEP_PARTIAL,
            _ => continue,
        };
        let age = entry
            .metadata()
            .and_then(|metadata| metadata.modified())
            .ok()
            .and_then(|modified| modified.elapsed().ok());
        if age.is_some_and(|age| age > keep) {
            let _ = fs_err::remove_file(&path);
        }
    }
}

#[cfg(test)]
mod tests;
