//! Writes tar archives: POSIX ustar, with PAX records for what its fields cannot hold.
//!
//! One input, one sequence of bytes: no clock, no names of accounts, records in a fixed order.
//! Sparse files are written in GNU's PAX form 1.0, which GNU tar, libarchive and Go all read, if
//! that saves at least [`SPARSE`] bytes; else holes are written as zeros.

use std::io::{self, Write};

use layerpack_erofs::{Metadata, Timestamp};

const BLOCK: usize = 512;
/// Fewest bytes of holes for which a file is written in sparse form.
const SPARSE: u64 = 1 << 20;
const MAX_OCTAL_7: u64 = 0o7_777_777;
const MAX_OCTAL_11: u64 = 0o77_777_777_777;

/// Types of entries.
pub(super) mod kind {
    pub(in super::super) const FILE: u8 = b'0';
    pub(in super::super) const LINK: u8 = b'1';
    pub(in super::super) const SYMLINK: u8 = b'2';
    pub(in super::super) const CHAR: u8 = b'3';
    pub(in super::super) const BLOCK: u8 = b'4';
    pub(in super::super) const DIRECTORY: u8 = b'5';
    pub(in super::super) const FIFO: u8 = b'6';
}

/// One entry without its data.
pub(super) struct Entry<'a> {
    pub kind: u8,
    pub path: &'a [u8],
    /// Target of a symbolic or hard link.
    pub link: &'a [u8],
    pub metadata: &'a Metadata,
    pub device: (u32, u32),
    /// Whether extended attributes are written: not for further names of one inode.
    pub xattrs: bool,
}

/// A run of a file's data: offset and length in bytes.
pub(super) type Run = (u64, u64);

/// An archive that is being written.
pub(super) struct Archive<W> {
    out: W,
    /// Bytes after which the current entry's data is padded.
    written: u64,
}

impl<W: Write> Archive<W> {
    pub(super) fn new(out: W) -> Self {
        Self { out, written: 0 }
    }

    /// Writes an entry's headers; its data follows through [`Archive::data`] and
    /// [`Archive::pad`]. `runs` are the file's data in order; the answer says whether holes
    /// between them must be written as zeros.
    pub(super) fn entry(&mut self, entry: &Entry<'_>, size: u64, runs: &[Run]) -> io::Result<bool> {
        let stored: u64 = runs.iter().map(|(_, len)| len).sum();
        let sparse = entry.kind == kind::FILE && size.saturating_sub(stored) >= SPARSE;
        let mut records = Records::default();
        let mut name = entry.path.to_vec();
        let mut map = Vec::new();
        let mut length = size;
        if sparse {
            map = sparse_map(size, runs);
            length = stored + map.len() as u64;
            records.add(b"GNU.sparse.major", b"1");
            records.add(b"GNU.sparse.minor", b"0");
            records.add(b"GNU.sparse.name", entry.path);
            records.add(b"GNU.sparse.realsize", size.to_string().as_bytes());
            name = b"GNUSparseFile.0/file".to_vec();
        } else if name.len() > 100 {
            records.add(b"path", &name);
        }
        if entry.link.len() > 100 {
            records.add(b"linkpath", entry.link);
        }
        let metadata = entry.metadata;
        let mtime = whole_seconds(metadata.mtime);
        if mtime.is_none() {
            records.add(b"mtime", decimal_time(metadata.mtime).as_bytes());
        }
        for (key, id) in [(&b"uid"[..], metadata.uid), (b"gid", metadata.gid)] {
            if u64::from(id) > MAX_OCTAL_7 {
                records.add(key, id.to_string().as_bytes());
            }
        }
        if length > MAX_OCTAL_11 {
            records.add(b"size", length.to_string().as_bytes());
        }
        if entry.xattrs {
            for (key, value) in &metadata.xattrs {
                records.xattr(key, value);
                // GNU tar and libarchive take ACLs from their text, if they are asked for them.
                let acl = match key.as_slice() {
                    b"system.posix_acl_access" => Some(&b"SCHILY.acl.access"[..]),
                    b"system.posix_acl_default" => Some(&b"SCHILY.acl.default"[..]),
                    _ => None,
                };
                if let Some((acl, text)) = acl.zip(crate::acl::to_text(value)) {
                    records.add(acl, text.as_bytes());
                }
            }
        }
        if !records.0.is_empty() {
            let header = Header {
                kind: b'x',
                name: b"PaxHeaders/entry",
                size: records.0.len() as u64,
                mode: 0o644,
                ..Header::default()
            };
            self.out.write_all(&header.block())?;
            self.written = 0;
            self.data(&records.0)?;
            self.pad()?;
        }
        let header = Header {
            kind: entry.kind,
            name: &name,
            link: entry.link,
            mode: u64::from(metadata.mode),
            uid: u64::from(metadata.uid).min(MAX_OCTAL_7),
            gid: u64::from(metadata.gid).min(MAX_OCTAL_7),
            size: length.min(MAX_OCTAL_11),
            mtime: mtime.unwrap_or(0),
            device: entry.device,
        };
        self.out.write_all(&header.block())?;
        self.written = 0;
        self.data(&map)?;
        Ok(!sparse)
    }

    /// Writes bytes of the current entry.
    pub(super) fn data(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.written += bytes.len() as u64;
        self.out.write_all(bytes)
    }

    /// Writes zeros.
    pub(super) fn zeros(&mut self, mut n: u64) -> io::Result<()> {
        const ZEROS: [u8; 4096] = [0; 4096];
        while n > 0 {
            let step = n.min(ZEROS.len() as u64);
            self.data(
                ZEROS
                    .get(..usize::try_from(step).unwrap_or(0))
                    .unwrap_or_default(),
            )?;
            n -= step;
        }
        Ok(())
    }

    /// Ends the current entry's data.
    pub(super) fn pad(&mut self) -> io::Result<()> {
        let rest = self.written % BLOCK as u64;
        if rest > 0 {
            self.zeros(BLOCK as u64 - rest)?;
        }
        self.written = 0;
        Ok(())
    }

    /// Ends the archive.
    pub(super) fn finish(mut self) -> io::Result<W> {
        self.zeros(2 * BLOCK as u64)?;
        Ok(self.out)
    }
}

/// The header of a plain file of root's, for archives whose members are known only afterwards.
pub(super) fn plain_header(name: &str, size: u64) -> [u8; BLOCK] {
    let header = Header {
        kind: kind::FILE,
        name: name.as_bytes(),
        size,
        mode: 0o644,
        ..Header::default()
    };
    header.block()
}

#[derive(Default)]
struct Header<'a> {
    kind: u8,
    name: &'a [u8],
    link: &'a [u8],
    mode: u64,
    uid: u64,
    gid: u64,
    size: u64,
    mtime: u64,
    device: (u32, u32),
}

impl Header<'_> {
    fn block(&self) -> [u8; BLOCK] {
        let mut block = [0; BLOCK];
        let mut put = |at: usize, len: usize, bytes: &[u8]| {
            for (to, from) in block.iter_mut().skip(at).take(len).zip(bytes) {
                *to = *from;
            }
        };
        put(0, 100, self.name);
        put(100, 8, &octal(self.mode, 8));
        put(108, 8, &octal(self.uid, 8));
        put(116, 8, &octal(self.gid, 8));
        put(124, 12, &octal(self.size, 12));
        put(136, 12, &octal(self.mtime, 12));
        put(148, 8, b"        ");
        put(156, 1, &[self.kind]);
        put(157, 100, self.link);
        put(257, 8, b"ustar\x0000");
        put(329, 8, &octal(u64::from(self.device.0), 8));
        put(337, 8, &octal(u64::from(self.device.1), 8));
        let sum: u64 = block.iter().map(|byte| u64::from(*byte)).sum();
        let sum = format!("{sum:06o}\0 ");
        for (to, from) in block.iter_mut().skip(148).zip(sum.bytes()) {
            *to = from;
        }
        block
    }
}

/// Octal digits and a NUL; in base 256 what they cannot hold.
fn octal(value: u64, len: usize) -> Vec<u8> {
    let digits = format!("{value:0width$o}", width = len - 1);
    if digits.len() < len {
        let mut field = digits.into_bytes();
        field.push(0);
        return field;
    }
    let mut field = vec![0; len];
    for (to, from) in field.iter_mut().rev().zip(value.to_le_bytes()) {
        *to = from;
    }
    if let Some(first) = field.first_mut() {
        *first |= 0x80;
    }
    field
}

/// PAX records: length, key, value.
#[derive(Default)]
struct Records(Vec<u8>);

impl Records {
    fn add(&mut self, key: &[u8], value: &[u8]) {
        // Space, equals sign, newline; the length counts its own digits.
        let rest = key.len() + value.len() + 3;
        let mut total = rest;
        while rest + total.to_string().len() != total {
            total = rest + total.to_string().len();
        }
        self.0.extend_from_slice(total.to_string().as_bytes());
        self.0.push(b' ');
        self.0.extend_from_slice(key);
        self.0.push(b'=');
        self.0.extend_from_slice(value);
        self.0.push(b'\n');
    }
}

impl Records {
    /// The usual record; for a name that would end at its equals sign, libarchive's.
    fn xattr(&mut self, name: &[u8], value: &[u8]) {
        let mut key = b"SCHILY.xattr.".to_vec();
        if !name.contains(&b'=') {
            key.extend_from_slice(name);
            self.add(&key, value);
            return;
        }
        key = b"LIBARCHIVE.xattr.".to_vec();
        for byte in name {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'.' | b'_' | b'-' => key.push(*byte),
                other => key.extend_from_slice(format!("%{other:02X}").as_bytes()),
            }
        }
        self.add(&key, &base64(value));
    }
}

/// Base64 without padding.
fn base64(bytes: &[u8]) -> Vec<u8> {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = Vec::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let mut bits = 0u32;
        for at in 0..3 {
            bits = bits << 8 | u32::from(three.get(at).copied().unwrap_or(0));
        }
        for digit in 0..=three.len() {
            let index = (bits >> (18 - 6 * digit)) & 63;
            out.extend(
                usize::try_from(index)
                    .ok()
                    .and_then(|index| DIGITS.get(index)),
            );
        }
    }
    out
}

/// Number of runs, then offset and length of each in decimal lines, padded. A file that ends in a
/// hole has an empty run at its end.
fn sparse_map(size: u64, runs: &[Run]) -> Vec<u8> {
    let end = runs.last().map_or(0, |(offset, len)| offset + len);
    let tail = (end < size).then_some((size, 0));
    let count = runs.len() + usize::from(tail.is_some());
    let mut map = format!("{count}\n").into_bytes();
    for (offset, len) in runs.iter().copied().chain(tail) {
        map.extend_from_slice(format!("{offset}\n{len}\n").as_bytes());
    }
    map.resize(map.len().next_multiple_of(BLOCK), 0);
    map
}

/// A time that a header's field holds.
fn whole_seconds(time: Timestamp) -> Option<u64> {
    u64::try_from(time.sec)
        .ok()
        .filter(|sec| time.nsec == 0 && *sec <= MAX_OCTAL_11)
}

fn decimal_time(time: Timestamp) -> String {
    let nanos = i128::from(time.sec) * 1_000_000_000 + i128::from(time.nsec);
    let sign = if nanos < 0 { "-" } else { "" };
    let (sec, fraction) = (nanos.abs() / 1_000_000_000, nanos.abs() % 1_000_000_000);
    if fraction == 0 {
        return format!("{sign}{sec}");
    }
    let digits = format!("{fraction:09}");
    format!("{sign}{sec}.{}", digits.trim_end_matches('0'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_1970_keep_their_fraction() {
        let text = |sec, nsec| decimal_time(Timestamp { sec, nsec });
        assert_eq!(text(-13, 500_000_000), "-12.5");
        assert_eq!(text(-1, 999_999_999), "-0.000000001");
        assert_eq!(text(-5, 0), "-5");
        assert_eq!(text(7, 120), "7.00000012");
    }

    #[test]
    fn record_lengths_count_themselves() {
        for len in [0, 1, 80, 90, 92, 93, 94, 95, 96, 985, 990, 9990] {
            let mut records = Records::default();
            records.add(b"k", &vec![b'v'; len]);
            let digits = records
                .0
                .iter()
                .take_while(|byte| byte.is_ascii_digit())
                .count();
            let length: usize = std::str::from_utf8(&records.0[..digits])
                .unwrap()
                .parse()
                .unwrap();
            assert_eq!(length, records.0.len(), "{len}");
        }
    }

    #[test]
    fn base64_is_that_of_the_rfc() {
        for (plain, encoded) in [
            ("", ""),
            ("f", "Zg"),
            ("fo", "Zm8"),
            ("foo", "Zm9v"),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(base64(plain.as_bytes()), encoded.as_bytes());
        }
    }

    #[test]
    fn large_numbers_take_base_256() {
        assert_eq!(octal(0o7_777_777, 8), b"7777777\0");
        assert_eq!(
            octal(1 << 40, 12)[..],
            [0x80, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]
        );
    }
}
