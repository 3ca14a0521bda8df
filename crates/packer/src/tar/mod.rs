//! Reads tar archives as a stream of entries: V7, ustar, GNU, star and PAX.
//!
//! Strict where readers are known to differ: an archive that two readers would unpack differently
//! is refused rather than read in one of the ways. Nothing here knows what a layer is.

mod ahead;
mod compression;
mod header;
mod pax;
mod sparse;

use std::collections::BTreeMap;
use std::io::{self, Read};

use layerpack_erofs::Timestamp;

pub(crate) use ahead::ahead;
pub(crate) use compression::{Ending, can_be_read_twice, decode, is_landmark, is_lazy_file, open};
pub(crate) use pax::decimal;
pub(crate) use sparse::Piece;

use self::header::{BLOCK, Header};
use self::pax::{Effective, Records};
use self::sparse::Form;
use crate::error::{PackError, Result};
use crate::options::Limits;

/// What a member is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum EntryKind {
    /// A regular file; pieces if it is sparse.
    File(Option<Vec<Piece>>),
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// Another name of an earlier member.
    HardLink,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
    /// A named pipe.
    Fifo,
}

/// One member of the archive.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    /// Its name as it stands in the archive.
    pub path: Vec<u8>,
    /// What it is.
    pub kind: EntryKind,
    /// Permission bits, setuid, setgid and sticky.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Modification time.
    pub mtime: Timestamp,
    /// Target of a symbolic or hard link.
    pub link: Vec<u8>,
    /// Device number: major, minor.
    pub rdev: (u32, u32),
    /// A file's size in bytes, holes included.
    pub size: u64,
    /// Extended attributes by full name.
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// ACLs in text form: access, default.
    pub acls: (Option<Vec<u8>>, Option<Vec<u8>>),
}

/// A stream of entries. [`Reader::next_entry`], then the entry's stored bytes through `Read`.
pub(crate) struct Reader<R> {
    input: R,
    archive: String,
    limits: Limits,
    /// Bytes of the uncompressed archive that were read.
    offset: u64,
    global: Records,
    /// The current entry's stored bytes that were not read yet, and their padding.
    remaining: u64,
    padding: u64,
    entry: String,
}

impl<R: Read> Reader<R> {
    /// Reads the uncompressed archive `input`, called `archive` in messages.
    pub(crate) fn new(input: R, archive: String, limits: Limits) -> Self {
        Self {
            input,
            archive,
            limits,
            offset: 0,
            global: Records::default(),
            remaining: 0,
            padding: 0,
            entry: String::new(),
        }
    }

    /// The next member, or None after the end of the archive, which must be where the input ends.
    pub(crate) fn next_entry(&mut self) -> Result<Option<Entry>> {
        self.skip(self.remaining.saturating_add(self.padding))?;
        (self.remaining, self.padding) = (0, 0);
        self.entry.clear();
        let mut own: Option<Records> = None;
        let mut long_name: Option<Vec<u8>> = None;
        let mut long_link: Option<Vec<u8>> = None;
        loop {
            let Some(block) = self.block()? else {
                return Err(
                    self.damaged("it ends without the end mark of two zero blocks: it is cut off")
                );
            };
            if block.iter().all(|&byte| byte == 0) {
                if own.is_some() || long_name.is_some() || long_link.is_some() {
                    return Err(self.damaged("an extended header has no entry after it"));
                }
                self.end()?;
                return Ok(None);
            }
            let header = Header::new(block).map_err(|what| self.damaged(what))?;
            let size = header
                .unsigned(124, 12, "size")
                .map_err(|what| self.damaged(what))?;
            match header.kind() {
                b'x' | b'X' => own = Some(self.records(size)?),
                b'g' => {
                    let records = self.records(size)?;
                    self.global.overlay(records);
                    self.bound(self.global.weight())?;
                }
                b'L' => long_name = Some(self.long_text(size)?),
                b'K' => long_link = Some(self.long_text(size)?),
                // A volume's label: not a member.
                b'V' => self.skip(padded(size))?,
                _ => {
                    let own = own.unwrap_or_default();
                    let global = std::mem::take(&mut self.global);
                    let entry = self.member(
                        &header,
                        size,
                        Effective {
                            own: &own,
                            global: &global,
                        },
                        long_name,
                        long_link,
                    );
                    self.global = global;
                    return entry.map(Some);
                }
            }
        }
    }

    fn member(
        &mut self,
        header: &Header,
        header_size: u64,
        records: Effective<'_>,
        long_name: Option<Vec<u8>>,
        long_link: Option<Vec<u8>>,
    ) -> Result<Entry> {
        let base = header.name();
        self.entry = crate::show(long_name.as_deref().unwrap_or(&base));
        let mut form = sparse::from_pax(&records).map_err(|what| self.damaged(what))?;
        let path = match records
            .get("GNU.sparse.name")
            .filter(|_| form != Form::Dense)
        {
            Some(name) => name.to_vec(),
            None => self.one_of("names", records.get("path"), long_name, base)?,
        };
        let link = self.one_of(
            "link targets",
            records.get("linkpath"),
            long_link,
            header.text(157, 100).to_vec(),
        )?;
        self.entry = crate::show(&path);
        if path.contains(&0) || link.contains(&0) {
            return Err(self.damaged("its name or link target holds a NUL byte"));
        }
        let text = |what: String| self.damaged(what);
        let stored = records.number("size").map_err(text)?.unwrap_or(header_size);
        let kind = match header.kind() {
            b'0' | 0 | b'7' if path.ends_with(b"/") && form == Form::Dense => EntryKind::Directory,
            b'0' | 0 | b'7' | b'S' => EntryKind::File(None),
            b'1' => EntryKind::HardLink,
            b'2' => EntryKind::Symlink,
            b'3' => EntryKind::CharDevice,
            b'4' => EntryKind::BlockDevice,
            b'5' | b'D' => EntryKind::Directory,
            b'6' => EntryKind::Fifo,
            other => {
                let shown = crate::show(&[other]);
                return Err(self.damaged(format!("entries of type {shown:?} are not known")));
            }
        };
        let mtime = match records.time("mtime").map_err(text)? {
            Some(time) => time,
            None => {
                let sec = header.number(136, 12, "mtime").map_err(text)?;
                let sec = i64::try_from(sec)
                    .map_err(|_| self.damaged(format!("mtime {sec} is out of range")))?;
                Timestamp { sec, nsec: 0 }
            }
        };
        let device =
            matches!(kind, EntryKind::CharDevice | EntryKind::BlockDevice) && header.has_devices();
        let mode = header.unsigned(100, 8, "mode").map_err(text)? & 0o7777;
        let mut entry = Entry {
            path,
            kind,
            mode: u16::try_from(mode).unwrap_or_default(),
            uid: self.id(records.id("uid"), || header.id(108, 8, "uid"))?,
            gid: self.id(records.id("gid"), || header.id(116, 8, "gid"))?,
            mtime,
            link,
            rdev: if device {
                (
                    header.id(329, 8, "major").map_err(text)?,
                    header.id(337, 8, "minor").map_err(text)?,
                )
            } else {
                (0, 0)
            },
            size: 0,
            xattrs: records.xattrs().map_err(text)?,
            acls: (
                records.get("SCHILY.acl.access").map(<[u8]>::to_vec),
                records.get("SCHILY.acl.default").map(<[u8]>::to_vec),
            ),
        };
        if !matches!(entry.kind, EntryKind::File(_)) {
            if header.kind() == b'D' {
                // A GNU dump directory: what follows is a list of names for incremental restores.
                self.remaining = stored;
                self.padding = padded(stored) - stored;
            } else if stored != 0 && matches!(header.kind(), b'0' | 0 | b'7') {
                return Err(
                    self.damaged("it is a file by its type and size, a directory by its name")
                );
            }
            return Ok(entry);
        }
        (self.remaining, self.padding) = (stored, padded(stored) - stored);
        entry.size = stored;
        if header.kind() == b'S' {
            if form != Form::Dense {
                return Err(self.damaged("it is sparse in two forms"));
            }
            form = self.old_gnu_map(header)?;
        }
        let (pieces, size) = match form {
            Form::Dense => return Ok(entry),
            Form::Listed { pieces, size } => (pieces, size),
            Form::InData { size } => (self.map_in_data()?, size),
        };
        sparse::check(&pieces, size, self.remaining).map_err(|what| self.damaged(what))?;
        entry.size = size;
        entry.kind = EntryKind::File(Some(pieces));
        Ok(entry)
    }

    /// A text that PAX, GNU's long headers and the header itself may give. Readers disagree on
    /// which of the first two counts, so they may not differ.
    fn one_of(
        &self,
        what: &str,
        pax: Option<&[u8]>,
        long: Option<Vec<u8>>,
        field: Vec<u8>,
    ) -> Result<Vec<u8>> {
        match (pax, long) {
            (Some(pax), Some(long)) if pax != long => {
                Err(self.damaged(format!("PAX and GNU headers give it different {what}")))
            }
            (Some(pax), _) => Ok(pax.to_vec()),
            (None, Some(long)) => Ok(long),
            (None, None) => Ok(field),
        }
    }

    fn id(
        &self,
        pax: Result<Option<u32>, String>,
        field: impl FnOnce() -> Result<u32, String>,
    ) -> Result<u32> {
        match pax {
            Ok(Some(id)) => Ok(id),
            Ok(None) => field().map_err(|what| self.damaged(what)),
            Err(what) => Err(self.damaged(what)),
        }
    }

    fn old_gnu_map(&mut self, header: &Header) -> Result<Form> {
        let size = header
            .unsigned(483, 12, "real size")
            .map_err(|what| self.damaged(what))?;
        let (mut pieces, mut more) =
            sparse::old_gnu(header, 386, 4, 482).map_err(|what| self.damaged(what))?;
        while more {
            let block = self.block()?.ok_or_else(|| self.cut_off())?;
            let (next, again) = sparse::old_gnu(&Header::unchecked(block), 0, 21, 504)
                .map_err(|what| self.damaged(what))?;
            // An empty block that promises another would go on for ever.
            if next.is_empty() && again {
                return Err(self.damaged("a sparse map has an empty extension"));
            }
            pieces.extend(next);
            more = again;
            self.bound(pieces.len() * 16)?;
        }
        Ok(Form::Listed { pieces, size })
    }

    fn map_in_data(&mut self) -> Result<Vec<Piece>> {
        let mut lines = sparse::MapLines::default();
        loop {
            let Some(left) = self.remaining.checked_sub(BLOCK as u64) else {
                return Err(self.damaged("a sparse map does not end within its entry"));
            };
            let block = self.block()?.ok_or_else(|| self.cut_off())?;
            self.remaining = left;
            if lines.block(&block).map_err(|what| self.damaged(what))? {
                return Ok(lines.pieces());
            }
            self.bound(lines.weight())?;
        }
    }

    fn records(&mut self, size: u64) -> Result<Records> {
        let data = self.extension(size)?;
        Records::parse(&data).map_err(|what| self.damaged(what))
    }

    fn long_text(&mut self, size: u64) -> Result<Vec<u8>> {
        let mut data = self.extension(size)?;
        // Up to its first NUL, as a C string.
        if let Some(end) = data.iter().position(|&byte| byte == 0) {
            data.truncate(end);
        }
        Ok(data)
    }

    /// The data of an extension header, whole and bounded.
    fn extension(&mut self, size: u64) -> Result<Vec<u8>> {
        if size > self.limits.max_header {
            return Err(self.over_header_limit());
        }
        let mut data = Vec::new();
        let start = self.offset;
        let read = (&mut self.input).take(size).read_to_end(&mut data);
        self.offset += data.len() as u64;
        read.map_err(|source| self.unreadable(start, source))?;
        if (data.len() as u64) < size {
            return Err(self.cut_off());
        }
        self.skip(padded(size) - size)?;
        Ok(data)
    }

    fn bound(&self, weight: usize) -> Result<()> {
        if weight as u64 > self.limits.max_header {
            Err(self.over_header_limit())
        } else {
            Ok(())
        }
    }

    fn over_header_limit(&self) -> PackError {
        PackError::Limit {
            object: format!(
                "an extended header at byte {} of archive {}",
                self.offset, self.archive
            ),
            name: "max_header",
            limit: self.limits.max_header,
            unit: "bytes",
        }
    }

    /// One block; None where the input ends before it.
    fn block(&mut self) -> Result<Option<[u8; BLOCK]>> {
        let mut block = [0; BLOCK];
        let mut filled = 0;
        while let Some(rest) = block.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match self.input.read(rest) {
                Ok(0) if filled == 0 => return Ok(None),
                Ok(0) => return Err(self.cut_off()),
                Ok(n) => filled += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(self.unreadable(self.offset, source)),
            }
        }
        self.advance(BLOCK as u64)?;
        Ok(Some(block))
    }

    fn advance(&mut self, n: u64) -> Result<()> {
        self.offset = self.offset.saturating_add(n);
        if self.offset > self.limits.max_bytes {
            return Err(PackError::Limit {
                object: format!("archive {}", self.archive),
                name: "max_bytes",
                limit: self.limits.max_bytes,
                unit: "bytes when uncompressed",
            });
        }
        Ok(())
    }

    fn skip(&mut self, n: u64) -> Result<()> {
        let mut left = n;
        let mut buffer = [0; 16 << 10];
        while left > 0 {
            let want = buffer
                .len()
                .min(usize::try_from(left).unwrap_or(usize::MAX));
            match self.input.read(buffer.get_mut(..want).unwrap_or_default()) {
                Ok(0) => return Err(self.cut_off()),
                Ok(n) => {
                    left -= n as u64;
                    self.advance(n as u64)?;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(self.unreadable(self.offset, source)),
            }
        }
        Ok(())
    }

    /// After the first zero block only zeros may follow: anything else would be dropped in
    /// silence, for instance the second of two archives that were put one after the other.
    fn end(&mut self) -> Result<()> {
        let mut buffer = [0; 16 << 10];
        loop {
            match self.input.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(n) => {
                    if buffer.iter().take(n).any(|&byte| byte != 0) {
                        return Err(self.damaged("data follows the end of the archive"));
                    }
                    self.advance(n as u64)?;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(self.unreadable(self.offset, source)),
            }
        }
    }

    /// An error about the entry at hand.
    pub(crate) fn damaged(&self, what: impl Into<String>) -> PackError {
        PackError::Archive {
            archive: self.archive.clone(),
            offset: self.offset,
            entry: self.entry.clone(),
            what: what.into(),
        }
    }

    /// The error that reading an entry's bytes put into an I/O error.
    pub(crate) fn error(&self, error: io::Error) -> PackError {
        error
            .downcast::<PackError>()
            .unwrap_or_else(|source| self.unreadable(self.offset, source))
    }

    fn cut_off(&self) -> PackError {
        self.damaged("it ends in the middle of an entry: it is cut off")
    }

    fn unreadable(&self, offset: u64, source: io::Error) -> PackError {
        // A limit that was passed on the way here speaks for itself.
        source
            .downcast::<PackError>()
            .unwrap_or_else(|source| PackError::ArchiveRead {
                archive: self.archive.clone(),
                offset,
                source,
            })
    }
}

/// The stored bytes of the current entry. Errors carry a [`PackError`].
impl<R: Read> Read for Reader<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let want = out
            .len()
            .min(usize::try_from(self.remaining).unwrap_or(usize::MAX));
        if want == 0 {
            return Ok(0);
        }
        match self.input.read(out.get_mut(..want).unwrap_or_default()) {
            Ok(0) => Err(io::Error::other(self.cut_off())),
            Ok(n) => {
                self.remaining -= n as u64;
                self.advance(n as u64).map_err(io::Error::other)?;
                Ok(n)
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Err(e),
            Err(source) => Err(io::Error::other(self.unreadable(self.offset, source))),
        }
    }
}

/// `size` rounded up to whole blocks.
fn padded(size: u64) -> u64 {
    size.checked_next_multiple_of(BLOCK as u64)
        .unwrap_or(u64::MAX)
}
