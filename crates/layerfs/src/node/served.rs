//! What the FUSE directory holds, on disk: `ROOT/served/LAYER`, one small file for each layer.
//!
//! It is written before the layer is mounted and goes when nothing can have the blob open any more.
//! A process that takes the connection over knows by it which blobs the kernel may ask for, how to
//! open them, and how often the kernel has them open. Nothing is synced: the records mean something
//! for as long as the connection lives, and that does not outlive the kernel.
//!
//! The count of opens may be too high after a crash (an open that was counted and not answered is
//! sent again), never too low: it goes up before the kernel is answered, and down after.
//!
//! All integers are little endian. A file of another version or boot, or a damaged one, is no
//! record.

use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use layerpack_store::{Digest, LayerId};
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::cache::BootId;
use crate::error::{IoContext, LayerfsError, Result};
use crate::files;
use crate::sync::{AtomicU64, Mutex, Ordering};

const MAGIC: [u8; 8] = *b"LPSERVE\n";
const VERSION: u32 = 1;
/// Longest address of a store, in bytes.
const MAX_URL: usize = 64 << 10;
/// Where the count of opens lies.
const OPENS_AT: u64 = 16;

#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
struct Header {
    magic: [u8; 8],
    version: U32,
    /// Unknown bit: no record.
    incompat: U32,
    /// Changed in place; the checksum takes it for 0.
    opens: U64,
    boot: [u8; 16],
    manifest: [u8; 32],
    /// Bytes of data; 0: the layer has no blob.
    size: U64,
    url_len: U32,
    /// CRC-32C of the header, with `opens` and this as 0, and of the address.
    crc: U32,
}
const _: () = assert!(size_of::<Header>() == 88);

/// One layer as recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) layer: LayerId,
    /// Digest of the manifest that it came by.
    pub(super) manifest: Digest,
    /// Bytes of data.
    pub(super) size: u64,
    /// Address of the store it came from.
    pub(super) store: String,
    pub(super) opens: u64,
}

/// The directory of records.
#[derive(Debug)]
pub(super) struct Served {
    dir: PathBuf,
    boot: BootId,
    /// One change of any record at a time.
    writing: Mutex<()>,
}

fn checksum(header: &Header, url: &[u8]) -> u32 {
    let mut plain = *header;
    plain.opens = U64::ZERO;
    plain.crc = U32::ZERO;
    crc32c::crc32c_append(crc32c::crc32c(plain.as_bytes()), url)
}

impl Served {
    pub(super) fn new(root: &Path, boot: BootId) -> Self {
        Self {
            dir: root.join("served"),
            boot,
            writing: Mutex::new(()),
        }
    }

    fn path(&self, layer: LayerId) -> PathBuf {
        self.dir.join(layer.hex())
    }

    /// Records a layer; `opens` counts the opens of its blob, if it is served already.
    pub(super) fn write(
        &self,
        layer: LayerId,
        manifest: &Digest,
        size: u64,
        store: &str,
        opens: Option<&AtomicU64>,
    ) -> Result<()> {
        let path = self.path(layer);
        let url_len = u32::try_from(store.len())
            .ok()
            .filter(|_| store.len() <= MAX_URL)
            .ok_or_else(|| LayerfsError::Unusable {
                path: path.clone(),
                what: format!("the store's address has {} bytes", store.len()),
            })?;
        let _one = self.writing.lock();
        let mut header = Header {
            magic: MAGIC,
            version: U32::new(VERSION),
            incompat: U32::ZERO,
            opens: U64::new(opens.map_or(0, |n| n.load(Ordering::Acquire))),
            boot: *self.boot.as_bytes(),
            manifest: *manifest.as_bytes(),
            size: U64::new(size),
            url_len: U32::new(url_len),
            crc: U32::ZERO,
        };
        header.crc = U32::new(checksum(&header, store.as_bytes()));
        files::replace(
            &self.dir,
            &path,
            &[header.as_bytes(), store.as_bytes()],
            false,
        )
    }

    /// Writes down how often a blob is open. A layer without a record (it is about to get one, or
    /// has just lost it) has nothing to change.
    pub(super) fn note_opens(&self, layer: LayerId, opens: &AtomicU64) -> Result<()> {
        let path = self.path(layer);
        let _one = self.writing.lock();
        let file = match fs_err::OpenOptions::new().write(true).open(&path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            other => other.at("open", &path)?,
        };
        let bytes = opens.load(Ordering::Acquire).to_le_bytes();
        file.file()
            .write_all_at(&bytes, OPENS_AT)
            .at("write", &path)
    }

    /// Removes a layer's record; it may be gone already.
    pub(super) fn remove(&self, layer: LayerId) {
        let path = self.path(layer);
        let _one = self.writing.lock();
        match fs_err::remove_file(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                // It would be adopted, found unmounted and without opens, and tried again.
                tracing::warn!(error = %e, "a record of a layer stays behind");
            }
            _ => {}
        }
    }

    /// Removes all records: they were of a connection that is gone.
    pub(super) fn clear(&self) {
        for entry in fs_err::read_dir(&self.dir).into_iter().flatten().flatten() {
            let _ = fs_err::remove_file(entry.path());
        }
    }

    /// All records of this boot; what cannot be read is a problem.
    pub(super) fn load(&self, problems: &mut Vec<String>) -> Result<Vec<Record>> {
        let mut records = Vec::new();
        for entry in fs_err::read_dir(&self.dir).at("list", &self.dir)? {
            let path = entry.at("list", &self.dir)?.path();
            let name = path.file_name().and_then(|name| name.to_str());
            let Some(layer) = name.and_then(|n| format!("b3:{n}").parse::<Digest>().ok()) else {
                continue;
            };
            match self.read(&path, LayerId::from_digest(layer)) {
                Some(record) => records.push(record),
                None => problems.push(format!(
                    "layer {layer} cannot be adopted: its record {} is damaged or of another version",
                    path.display()
                )),
            }
        }
        Ok(records)
    }

    fn read(&self, path: &Path, layer: LayerId) -> Option<Record> {
        let len = fs_err::metadata(path).ok()?.len();
        if len > (size_of::<Header>() + MAX_URL) as u64 {
            return None;
        }
        let bytes = fs_err::read(path).ok()?;
        let (header, url) = Header::read_from_prefix(&bytes).ok()?;
        let ours = header.magic == MAGIC
            && header.version.get() == VERSION
            && header.incompat.get() == 0
            && header.boot == *self.boot.as_bytes()
            && usize::try_from(header.url_len.get()) == Ok(url.len())
            && header.crc.get() == checksum(&header, url);
        if !ours {
            return None;
        }
        Some(Record {
            layer,
            manifest: Digest::from_bytes(header.manifest),
            size: header.size.get(),
            store: String::from_utf8(url.to_vec()).ok()?,
            opens: header.opens.get(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_come_back_with_their_opens_and_damage_is_seen() {
        let dir = layerpack_fixtures::ScratchDir::new("served").unwrap();
        dir.mkdir("served").unwrap();
        let boot = BootId::from_bytes([3; 16]);
        let served = Served::new(dir.path(), boot);
        let layer = LayerId::from_digest(Digest::of(b"layer"));
        let manifest = Digest::of(b"manifest");
        let opens = AtomicU64::new(0);
        // Without a record there is nothing to count in.
        served.note_opens(layer, &opens).unwrap();
        served
            .write(layer, &manifest, 4096, "file:///store", None)
            .unwrap();
        opens.store(7, Ordering::Release);
        served.note_opens(layer, &opens).unwrap();
        let expected = Record {
            layer,
            manifest,
            size: 4096,
            store: "file:///store".to_owned(),
            opens: 7,
        };
        let mut problems = Vec::new();
        assert_eq!(
            served.load(&mut problems).unwrap(),
            std::slice::from_ref(&expected)
        );
        // Written again, it keeps what is open.
        served
            .write(layer, &manifest, 4096, "file:///store", Some(&opens))
            .unwrap();
        assert_eq!(served.load(&mut problems).unwrap(), [expected]);
        assert!(problems.is_empty());

        // Of another boot, or with any byte changed but those of the count: no record.
        let other = Served::new(dir.path(), BootId::from_bytes([4; 16]));
        assert!(other.load(&mut problems).unwrap().is_empty());
        let path = dir.path().join("served").join(layer.hex());
        let bytes = fs_err::read(&path).unwrap();
        for at in (0..16).chain(24..bytes.len()) {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            fs_err::write(&path, damaged).unwrap();
            assert!(served.load(&mut problems).unwrap().is_empty(), "{at}");
        }
        for len in 0..bytes.len() {
            fs_err::write(&path, &bytes[..len]).unwrap();
            assert!(served.load(&mut problems).unwrap().is_empty(), "{len}");
        }
        fs_err::write(&path, bytes).unwrap();
        served.remove(layer);
        served.remove(layer);
        assert!(served.load(&mut Vec::new()).unwrap().is_empty());
    }
}
