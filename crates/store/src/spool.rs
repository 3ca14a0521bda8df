//! An array of records of one size, most of which lie in an unnamed temporary file.
//!
//! What has to be known of each chunk or file of a layer, but seldom: a million of them then take
//! no memory. The file has no name, so nothing of it is left however the process ends. It is read and
//! written by calls, never mapped. Where no file can be made or written, records stay in memory:
//! that is no reason to fail. Up to a megabyte stays there anyway.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Bytes in memory before there is a file.
const KEEP: usize = 1 << 20;
/// Bytes that go to the file at once.
const PIECE: usize = 128 << 10;
/// Bytes that are read at once where records are asked for in order.
const PAGE: usize = 16 << 10;

/// See the module's documentation. `N`: bytes of a record.
#[derive(Debug)]
pub struct Spool<const N: usize> {
    /// Where the file is to be; `None`: there is to be none (any more).
    directory: Option<PathBuf>,
    file: Option<File>,
    /// Records in the file.
    stored: usize,
    /// The records after those.
    tail: Vec<u8>,
    page: Mutex<Page>,
}

#[derive(Debug, Default)]
struct Page {
    /// Number of its first record.
    first: usize,
    bytes: Vec<u8>,
    /// The record that comes next if they are asked for in order.
    next: usize,
}

impl<const N: usize> Default for Spool<N> {
    fn default() -> Self {
        Self::new(None)
    }
}

impl<const N: usize> Spool<N> {
    /// An empty array, whose file is to be in `directory`; `None`: it stays in memory.
    #[must_use]
    pub fn new(directory: Option<&Path>) -> Self {
        Self {
            directory: directory.map(Path::to_owned),
            file: None,
            stored: 0,
            tail: Vec::new(),
            page: Mutex::default(),
        }
    }

    /// Number of records.
    #[must_use]
    pub fn len(&self) -> usize {
        self.stored + self.tail.len() / N
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether some records are in a file.
    #[must_use]
    pub fn is_spilled(&self) -> bool {
        self.stored > 0
    }

    /// Appends a record.
    pub fn push(&mut self, record: &[u8; N]) {
        self.tail.extend_from_slice(record);
        let most = match self.file {
            Some(_) => PIECE,
            None => KEEP,
        };
        if self.tail.len() >= most && self.directory.is_some() {
            self.spill();
        }
    }

    fn spill(&mut self) {
        if self.file.is_none() {
            self.file = self.directory.as_deref().and_then(|d| create(d).ok());
        }
        let offset = offset(self.stored, N);
        let written = self.file.as_ref().and_then(|file| {
            let written = file.write_all_at(&self.tail, offset);
            written.ok()
        });
        match written {
            Some(()) => {
                self.stored += self.tail.len() / N;
                self.tail = Vec::with_capacity(PIECE + N);
            }
            None => self.directory = None, // what is in the file stays there, the rest here
        }
    }

    /// The record with this number.
    ///
    /// # Errors
    /// If the file cannot be read; [`io::ErrorKind::InvalidInput`] if there are not so many records.
    pub fn get(&self, index: usize) -> io::Result<[u8; N]> {
        let absent = || io::Error::from(io::ErrorKind::InvalidInput);
        if let Some(number) = index.checked_sub(self.stored) {
            return record(&self.tail, number).ok_or_else(absent);
        }
        let file = self.file.as_ref().ok_or_else(absent)?;
        let mut page = self.page.lock().unwrap_or_else(PoisonError::into_inner);
        let there = index.checked_sub(page.first);
        if let Some(found) = there.and_then(|number| record(&page.bytes, number)) {
            page.next = index + 1;
            return Ok(found);
        }
        let in_order = page.next == index;
        page.next = index + 1;
        if !in_order {
            let mut found = [0; N];
            file.read_exact_at(&mut found, offset(index, N))?;
            return Ok(found);
        }
        let records = (PAGE / N).max(1).min(self.stored - index);
        page.first = index;
        page.bytes.clear();
        let mut bytes = std::mem::take(&mut page.bytes);
        bytes.resize(records * N, 0);
        file.read_exact_at(&mut bytes, offset(index, N))?;
        page.bytes = bytes;
        record(&page.bytes, 0).ok_or_else(absent)
    }

    /// Replaces the record with this number.
    ///
    /// # Errors
    /// As [`Spool::get`], and if the file cannot be written.
    pub fn set(&mut self, index: usize, new: &[u8; N]) -> io::Result<()> {
        let absent = || io::Error::from(io::ErrorKind::InvalidInput);
        if let Some(number) = index.checked_sub(self.stored) {
            let start = number.saturating_mul(N);
            let place = self.tail.get_mut(start..start.saturating_add(N));
            place.ok_or_else(absent)?.copy_from_slice(new);
            return Ok(());
        }
        let page = self.page.get_mut().unwrap_or_else(PoisonError::into_inner);
        page.bytes.clear();
        let file = self.file.as_ref().ok_or_else(absent)?;
        file.write_all_at(new, offset(index, N))
    }

    /// Leaves only so many bytes of the file.
    #[cfg(test)]
    pub(crate) fn cut(&self, len: u64) {
        self.file.as_ref().unwrap().set_len(len).unwrap();
    }

    /// Where its file is, for messages.
    #[must_use]
    pub fn place(&self) -> String {
        match &self.directory {
            Some(directory) => format!("a temporary file in {}", directory.display()),
            None => "a temporary file".to_owned(),
        }
    }
}

fn offset(index: usize, len: usize) -> u64 {
    (index as u64).saturating_mul(len as u64)
}

fn record<const N: usize>(bytes: &[u8], number: usize) -> Option<[u8; N]> {
    let start = number.checked_mul(N)?;
    bytes.get(start..)?.first_chunk().copied()
}

/// An unnamed file in a directory, which is made if it is not there.
pub(crate) fn create(directory: &Path) -> io::Result<File> {
    fs_err::create_dir_all(directory)?;
    tempfile::tempfile_in(directory)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(i: usize) -> [u8; 44] {
        let mut bytes = [7; 44];
        bytes[3..11].copy_from_slice(&(i as u64).to_le_bytes());
        bytes
    }

    /// More than stays in memory.
    const MANY: usize = 60_000;

    fn full(directory: Option<&Path>) -> Spool<44> {
        let mut spool = Spool::new(directory);
        assert!(spool.is_empty());
        for i in 0..MANY {
            spool.push(&bytes(i));
        }
        assert_eq!(spool.len(), MANY);
        spool
    }

    fn all_are_right(spool: &mut Spool<44>) {
        for i in 0..MANY {
            assert_eq!(spool.get(i).unwrap(), bytes(i));
        }
        for i in (0..MANY).map(|i| i * 7919 % MANY) {
            assert_eq!(spool.get(i).unwrap(), bytes(i));
        }
        let beyond = spool.get(MANY).unwrap_err();
        assert_eq!(beyond.kind(), io::ErrorKind::InvalidInput);
        // A change is seen, whatever was read before.
        for i in [0, 1, 5000, 5001, MANY - 1] {
            assert_eq!(spool.get(i).unwrap(), bytes(i));
            spool.set(i, &bytes(i + MANY)).unwrap();
            assert_eq!(spool.get(i).unwrap(), bytes(i + MANY));
            assert_eq!(spool.get(2).unwrap(), bytes(2));
        }
        assert!(spool.set(MANY, &bytes(0)).is_err());
    }

    #[test]
    fn records_come_back_from_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let inside = dir.path().join("made");
        let mut spool = full(Some(&inside));
        assert!(spool.is_spilled() && spool.tail.len() <= PIECE);
        assert_eq!(
            fs_err::read_dir(&inside).unwrap().count(),
            0,
            "it has no name"
        );
        all_are_right(&mut spool);
    }

    #[test]
    fn without_a_file_records_stay_in_memory() {
        let mut spool = full(None);
        assert!(!spool.is_spilled());
        all_are_right(&mut spool);
        // A file where the directory should be.
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut spool = full(Some(file.path()));
        assert!(!spool.is_spilled());
        all_are_right(&mut spool);
    }

    #[test]
    fn a_disk_that_fills_up_keeps_the_rest_in_memory() {
        let dir = tempfile::tempdir().unwrap();
        let mut spool = Spool::new(Some(dir.path()));
        let half = MANY / 2;
        for i in 0..half {
            spool.push(&bytes(i));
        }
        // Nothing can be written any more, all that is there can be read.
        let path = format!("/proc/self/fd/{}", {
            use std::os::fd::AsRawFd;
            spool.file.as_ref().unwrap().as_raw_fd()
        });
        let again = fs_err::OpenOptions::new().read(true).open(path).unwrap();
        spool.file = Some(again.into_parts().0);
        for i in half..MANY {
            spool.push(&bytes(i));
        }
        assert!(spool.is_spilled() && spool.tail.len() > PIECE);
        for i in 0..MANY {
            assert_eq!(spool.get(i).unwrap(), bytes(i));
        }
    }
}
