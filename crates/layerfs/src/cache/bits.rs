//! Presence files: which extents of a blob are in the cache, and when to believe it.
//!
//! Both files have the same form, little endian: a header of 128 bytes, then the bits in words
//! of 64. The header's checksum covers the header. Bits of `present` change one word at a
//! time, so nothing covers them (the page cache does not tear within a boot); bits of
//! `present.synced`, which must outlive a power cut, are covered by `bits_crc`. FORMAT: local
//! to a node and disposable; an unknown version or feature only means that all is fetched again.

use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::error::{IoContext, LayerfsError, Result};

const MAGIC: [u8; 8] = *b"LPBITS\r\n";
const VERSION: u32 = 1;
const HEADER: usize = 128;

/// Identity of one run of the kernel: pages written but not synced live exactly as long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BootId([u8; 16]);

impl BootId {
    /// Reads the running kernel's.
    ///
    /// # Errors
    /// When `/proc` is not mounted or holds something else.
    pub fn current() -> Result<Self> {
        let path = Path::new("/proc/sys/kernel/random/boot_id");
        let text = fs_err::read_to_string(path).at("read", path)?;
        let mut bytes = [0_u8; 16];
        let mut digits = text.trim().chars().filter(|c| *c != '-');
        for byte in &mut bytes {
            let value = digits
                .next()
                .and_then(|c| c.to_digit(16))
                .zip(digits.next().and_then(|c| c.to_digit(16)))
                .and_then(|(high, low)| u8::try_from(high * 16 + low).ok());
            *byte = value.ok_or_else(|| LayerfsError::Unusable {
                path: path.to_path_buf(),
                what: "it does not hold a UUID".to_owned(),
            })?;
        }
        Ok(Self(bytes))
    }

    pub(super) const fn bytes(self) -> [u8; 16] {
        self.0
    }

    /// An identity of the caller's making, for tests of what a restart does.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// The identity itself.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

/// What a presence file speaks about.
#[derive(Debug, Clone, Copy)]
pub(super) struct Identity {
    pub(super) content: [u8; 32],
    pub(super) extents: u64,
    /// Inode of the data file: bits do not follow a file that was copied or made anew.
    pub(super) data_inode: u64,
    pub(super) boot: BootId,
}

#[repr(C)]
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
struct Header {
    magic: [u8; 8],
    version: U32,
    compat: U32,
    ro_compat: U32,
    /// Unknown bit: do not believe the file.
    incompat: U32,
    content: [u8; 32],
    boot: [u8; 16],
    extents: U64,
    data_inode: U64,
    bits_crc: U32,
    reserved: [u8; 32],
    /// CRC-32C of the 124 bytes before it.
    crc: U32,
}
const _: () = assert!(size_of::<Header>() == HEADER);

fn header(identity: &Identity, bits_crc: u32) -> Header {
    let mut header = Header {
        magic: MAGIC,
        version: U32::new(VERSION),
        compat: U32::ZERO,
        ro_compat: U32::ZERO,
        incompat: U32::ZERO,
        content: identity.content,
        boot: identity.boot.0,
        extents: U64::new(identity.extents),
        data_inode: U64::new(identity.data_inode),
        bits_crc: U32::new(bits_crc),
        reserved: [0; 32],
        crc: U32::ZERO,
    };
    header.crc = U32::new(header_crc(&header));
    header
}

fn header_crc(header: &Header) -> u32 {
    let bytes = header.as_bytes();
    crc32c::crc32c(bytes.get(..HEADER - 4).unwrap_or(bytes))
}

fn encode(bits: &[u64]) -> Vec<u8> {
    bits.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Reads a presence file of exactly the expected form; `None` if it is anything else.
fn load(path: &Path, identity: &Identity, words: usize) -> Option<(Header, Vec<u64>, u32)> {
    let expected = u64::try_from(HEADER + words.checked_mul(8)?).ok()?;
    if fs_err::metadata(path).ok()?.len() != expected {
        return None;
    }
    let bytes = fs_err::read(path).ok()?;
    let (header, rest) = Header::read_from_prefix(&bytes).ok()?;
    let ours = header.magic == MAGIC
        && header.version.get() == VERSION
        && header.incompat.get() == 0
        && header.crc.get() == header_crc(&header)
        && header.content == identity.content
        && header.extents.get() == identity.extents
        && header.data_inode.get() == identity.data_inode;
    if !ours || rest.len() != words * 8 {
        return None;
    }
    let crc = crc32c::crc32c(rest);
    let mut bits: Vec<u64> = rest
        .chunks_exact(8)
        .map(|chunk| chunk.try_into().map_or(0, u64::from_le_bytes))
        .collect();
    // No bit beyond the last extent.
    let tail = identity.extents % 64;
    if tail != 0
        && let Some(last) = bits.last_mut()
    {
        *last &= (1 << tail) - 1;
    }
    Some((header, bits, crc))
}

/// Bits of this boot, written without syncing.
pub(super) fn load_live(path: &Path, identity: &Identity, words: usize) -> Option<Vec<u64>> {
    let (header, bits, _) = load(path, identity, words)?;
    (header.boot == identity.boot.0).then_some(bits)
}

/// Bits of a checkpoint, of whatever boot.
pub(super) fn load_synced(path: &Path, identity: &Identity, words: usize) -> Option<Vec<u64>> {
    let (header, bits, crc) = load(path, identity, words)?;
    (header.bits_crc.get() == crc).then_some(bits)
}

/// Removes a presence file if it is there.
pub(super) fn remove(path: &Path) -> Result<()> {
    match fs_err::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e).at("remove", path),
        _ => Ok(()),
    }
}

/// Replaces the checkpoint file, durably.
pub(super) fn store_synced(
    dir: &Path,
    path: &Path,
    identity: &Identity,
    bits: &[u64],
) -> Result<()> {
    let body = encode(bits);
    let header = header(identity, crc32c::crc32c(&body));
    crate::files::replace(dir, path, &[header.as_bytes(), &body], true)
}

/// The live presence file.
#[derive(Debug)]
pub(super) struct PresenceFile(fs_err::File);

impl PresenceFile {
    /// Replaces the live file by one that says `bits`. Its blocks are all written here, so
    /// that later changes of single words need no space on most filesystems.
    pub(super) fn create(
        dir: &Path,
        path: &Path,
        identity: &Identity,
        bits: &[u64],
    ) -> Result<Self> {
        let header = header(identity, 0);
        crate::files::replace(dir, path, &[header.as_bytes(), &encode(bits)], false)?;
        let file = fs_err::OpenOptions::new()
            .write(true)
            .open(path)
            .at("open", path)?;
        Ok(Self(file))
    }

    /// Overwrites one word of bits.
    pub(super) fn set_word(&self, word: usize, bits: u64) -> io::Result<()> {
        let offset = (HEADER + word * 8) as u64;
        self.0.file().write_all_at(&bits.to_le_bytes(), offset)
    }
}
