//! Entries of a large archive, set aside in a temporary file until its contents are stored.
//!
//! While contents are read, what finds chunks, compresses and writes them needs the memory that the
//! tree of a million files would take. So of a large archive only the first entries go into the tree at
//! once; of the others it is written down where they go and what they are, and they are put there in
//! their order when the last byte is stored. What comes of it is the same.

use std::collections::BTreeMap;
use std::path::Path;

use layerpack_erofs::{FileData, Metadata, NodeKind, Rdev, Timestamp};
use layerpack_store::{Spill, StoreError};

use super::{Put, Thing};
use crate::content::Content;
use crate::error::{PackError, Result};
use crate::model::Layer;

const MARK: u8 = 0;
const DIRECTORY: u8 = 1;
const HARD_LINK: u8 = 2;
const WHITEOUT_DEVICE: u8 = 3;
const FILE: u8 = 4;
const SYMLINK: u8 = 5;
const CHAR_DEVICE: u8 = 6;
const BLOCK_DEVICE: u8 = 7;
const FIFO: u8 = 8;
const SOCKET: u8 = 9;

/// See the module's documentation.
pub(super) struct Later {
    /// The entries one after the other, each after its length.
    entries: Spill,
    /// What the files among them hold, in their order: numbers of kept contents.
    contents: Vec<u32>,
    piece: Vec<u8>,
}

impl Later {
    /// None so far. The temporary file is to be in the directory `scratch`.
    pub(super) fn new(scratch: &Path) -> Self {
        Self {
            entries: Spill::new("the entries of an archive", Some(scratch)),
            contents: Vec::new(),
            piece: Vec::new(),
        }
    }

    /// Sets an entry aside. For a file: its number, for [`Later::set_content`].
    pub(super) fn push(&mut self, put: &Put) -> Result<Option<usize>> {
        let mut piece = std::mem::take(&mut self.piece);
        piece.clear();
        piece.extend_from_slice(&[0; 4]);
        encode(put, &mut piece)?;
        let len = length(piece.len() - 4)?;
        for (to, from) in piece.iter_mut().zip(len.to_le_bytes()) {
            *to = from;
        }
        self.entries.write(&piece);
        self.piece = piece;
        if !put.is_file() {
            return Ok(None);
        }
        self.contents.push(0);
        Ok(self.contents.len().checked_sub(1))
    }

    /// Says what a file holds.
    pub(super) fn set_content(
        &mut self,
        layer: &mut Layer,
        file: usize,
        content: Content,
    ) -> Result<()> {
        let kept = layer.keep_content(content)?;
        if let Some(place) = self.contents.get_mut(file) {
            *place = kept;
        }
        Ok(())
    }

    /// Gives all entries to `each`, in their order, files with the numbers of their contents.
    pub(super) fn replay(
        self,
        each: &mut dyn FnMut(&Put, Option<u32>) -> Result<()>,
    ) -> Result<()> {
        let mut contents = self.contents.into_iter();
        let mut failed = None;
        // What is left of a piece: an entry that goes on in the next.
        let mut rest: Vec<u8> = Vec::new();
        let emitted = self.entries.emit(&mut |piece| {
            rest.extend_from_slice(piece);
            let mut left = rest.as_slice();
            while let Some((entry, behind)) = next(left) {
                left = behind;
                let put = decode(entry).ok_or_else(other_bytes)?;
                let content = put.is_file().then(|| contents.next()).flatten();
                if let Err(error) = each(&put, content.filter(|kept| *kept != 0)) {
                    failed = Some(error);
                    return Err(other_bytes()); // nobody sees it
                }
            }
            let done = rest.len() - left.len();
            rest.drain(..done);
            Ok(())
        });
        match failed {
            Some(error) => Err(error),
            None => Ok(emitted?),
        }
    }
}

fn other_bytes() -> StoreError {
    StoreError::InvalidInput {
        object: "a temporary file with an archive's entries".to_owned(),
        what: "its bytes are not those that were written".to_owned(),
    }
}

/// The first entry of `bytes`, and what follows.
fn next(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (len, rest) = bytes.split_first_chunk()?;
    rest.split_at_checked(usize::try_from(u32::from_le_bytes(*len)).ok()?)
}

fn length(len: usize) -> Result<u32> {
    u32::try_from(len).map_err(|_| PackError::Limit {
        object: "an entry of the archive".to_owned(),
        name: "entry",
        limit: u32::MAX.into(),
        unit: "bytes",
    })
}

fn encode(put: &Put, out: &mut Vec<u8>) -> Result<()> {
    let text = |text: &[u8], out: &mut Vec<u8>| -> Result<()> {
        out.extend_from_slice(&length(text.len())?.to_le_bytes());
        out.extend_from_slice(text);
        Ok(())
    };
    text(&put.path, out)?;
    let metadata = match &put.thing {
        Thing::Mark => {
            out.push(MARK);
            return Ok(());
        }
        Thing::WhiteoutDevice => {
            out.push(WHITEOUT_DEVICE);
            return Ok(());
        }
        Thing::HardLink(target) => {
            out.push(HARD_LINK);
            return text(target, out);
        }
        Thing::Directory { metadata, wanted } => {
            out.extend_from_slice(&[DIRECTORY, u8::from(*wanted)]);
            metadata
        }
        Thing::Node(metadata, kind) => {
            let mut device = |tag, rdev: &Rdev| {
                out.push(tag);
                out.extend_from_slice(&rdev.major.to_le_bytes());
                out.extend_from_slice(&rdev.minor.to_le_bytes());
            };
            match kind {
                // Those of archives begin empty, and directories are no nodes here.
                NodeKind::File(_) | NodeKind::Directory => out.push(FILE),
                NodeKind::Symlink(target) => {
                    out.push(SYMLINK);
                    text(target, out)?;
                }
                NodeKind::CharDevice(rdev) => device(CHAR_DEVICE, rdev),
                NodeKind::BlockDevice(rdev) => device(BLOCK_DEVICE, rdev),
                NodeKind::Fifo => out.push(FIFO),
                NodeKind::Socket => out.push(SOCKET),
            }
            metadata
        }
    };
    out.extend_from_slice(&metadata.mode.to_le_bytes());
    out.extend_from_slice(&metadata.uid.to_le_bytes());
    out.extend_from_slice(&metadata.gid.to_le_bytes());
    out.extend_from_slice(&metadata.mtime.sec.to_le_bytes());
    out.extend_from_slice(&metadata.mtime.nsec.to_le_bytes());
    for (name, value) in &metadata.xattrs {
        text(name, out)?;
        text(value, out)?;
    }
    Ok(())
}

/// An entry's bytes that were not looked at yet.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*head)
    }

    fn number(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn text(&mut self) -> Option<&'a [u8]> {
        let len = usize::try_from(self.number()?).ok()?;
        let (text, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(text)
    }

    fn rdev(&mut self) -> Option<Rdev> {
        Some(Rdev {
            major: self.number()?,
            minor: self.number()?,
        })
    }

    /// The last of an entry's fields.
    fn metadata(&mut self) -> Option<Metadata> {
        let mut metadata = Metadata {
            mode: self.take().map(u16::from_le_bytes)?,
            uid: self.number()?,
            gid: self.number()?,
            mtime: Timestamp {
                sec: self.take().map(i64::from_le_bytes)?,
                nsec: self.number()?,
            },
            xattrs: BTreeMap::new(),
        };
        while !self.0.is_empty() {
            let name = self.text()?.to_vec();
            metadata.xattrs.insert(name, self.text()?.to_vec());
        }
        Some(metadata)
    }
}

fn decode(bytes: &[u8]) -> Option<Put> {
    let mut fields = Fields(bytes);
    let path = fields.text()?.to_vec();
    let [tag] = fields.take()?;
    let kind = match tag {
        MARK => None,
        WHITEOUT_DEVICE => {
            let thing = Thing::WhiteoutDevice;
            return Some(Put { path, thing });
        }
        HARD_LINK => {
            let thing = Thing::HardLink(fields.text()?.to_vec());
            return Some(Put { path, thing });
        }
        DIRECTORY => {
            let [wanted] = fields.take()?;
            let thing = Thing::Directory {
                wanted: wanted != 0,
                metadata: fields.metadata()?,
            };
            return Some(Put { path, thing });
        }
        FILE => Some(NodeKind::File(FileData::empty())),
        SYMLINK => Some(NodeKind::Symlink(fields.text()?.to_vec())),
        CHAR_DEVICE => Some(NodeKind::CharDevice(fields.rdev()?)),
        BLOCK_DEVICE => Some(NodeKind::BlockDevice(fields.rdev()?)),
        FIFO => Some(NodeKind::Fifo),
        SOCKET => Some(NodeKind::Socket),
        _ => return None,
    };
    let thing = match kind {
        None => Thing::Mark,
        Some(kind) => Thing::Node(fields.metadata()?, kind),
    };
    Some(Put { path, thing })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata(i: u32) -> Metadata {
        let mut metadata = Metadata {
            mode: 0o4755,
            uid: i,
            gid: u32::MAX - i,
            mtime: Timestamp {
                sec: -i64::from(i),
                nsec: i,
            },
            xattrs: BTreeMap::new(),
        };
        for n in 0..i % 3 {
            let value = vec![7; 100 * n as usize];
            metadata.xattrs.insert(format!("u{n}").into_bytes(), value);
        }
        metadata
    }

    fn things(i: u32) -> Vec<Thing> {
        let rdev = Rdev { major: i, minor: 7 };
        let node = |kind| Thing::Node(metadata(i), kind);
        vec![
            Thing::Mark,
            node(NodeKind::File(FileData::empty())),
            Thing::Directory {
                metadata: metadata(i),
                wanted: i.is_multiple_of(2),
            },
            Thing::HardLink(vec![b'x'; i as usize % 300]),
            Thing::WhiteoutDevice,
            node(NodeKind::Symlink(b"../a".to_vec())),
            node(NodeKind::CharDevice(rdev)),
            node(NodeKind::BlockDevice(rdev)),
            node(NodeKind::Fifo),
            node(NodeKind::File(FileData::empty())),
        ]
    }

    #[test]
    fn entries_come_back_in_order_from_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let mut layer = Layer::new(true);
        let mut later = Later::new(dir.path());
        let mut all = Vec::new();
        let mut files = 0;
        // Some MiB: more than stays in memory.
        for i in 0..6000 {
            for thing in things(i) {
                let path = format!("d{i}/").repeat(1 + i as usize % 9).into_bytes();
                let put = Put { path, thing };
                let number = later.push(&put).unwrap();
                if put.is_file() {
                    assert_eq!(number, Some(files));
                    files += 1;
                    // Every second one holds something.
                    if files % 2 == 0 {
                        let content = Content {
                            size: files as u64,
                            pieces: Vec::new().into(),
                        };
                        later.set_content(&mut layer, files - 1, content).unwrap();
                    }
                } else {
                    assert_eq!(number, None);
                }
                all.push(put);
            }
        }
        let mut all = all.into_iter();
        let mut seen = 0;
        later
            .replay(&mut |put, content| {
                assert_eq!(Some(put), all.next().as_ref());
                seen += usize::from(put.is_file());
                assert_eq!(content.is_some(), put.is_file() && seen % 2 == 0);
                Ok(())
            })
            .unwrap();
        assert!(all.next().is_none());
    }

    #[test]
    fn what_fails_in_between_is_what_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let mut later = Later::new(dir.path());
        for thing in things(1) {
            let put = Put {
                path: b"a".to_vec(),
                thing,
            };
            later.push(&put).unwrap();
        }
        let mut left = 3;
        let error = later
            .replay(&mut |put, _| {
                left -= 1;
                match left {
                    0 => Err(PackError::unsupported(&put.path, "enough")),
                    _ => Ok(()),
                }
            })
            .unwrap_err();
        assert!(error.to_string().contains("enough"), "{error}");
    }

    #[test]
    fn other_bytes_are_no_entries() {
        let mut bytes = Vec::new();
        let put = Put {
            path: b"a/b".to_vec(),
            thing: Thing::Node(metadata(5), NodeKind::Symlink(b"c".to_vec())),
        };
        encode(&put, &mut bytes).unwrap();
        assert_eq!(decode(&bytes), Some(put));
        for len in 0..bytes.len() {
            let cut = decode(&bytes[..len]);
            assert!(cut.is_none() || cut != decode(&bytes), "{len}");
        }
        bytes[7] = 77;
        assert_eq!(decode(&bytes), None);
    }
}
