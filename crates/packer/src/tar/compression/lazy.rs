//! Archives made for lazy readers: eStargz and zstd:chunked.
//!
//! Both are ordinary layers for whoever reads them from start to end. eStargz adds entries of its
//! own at the root: a table of contents (`stargz.index.json`) and a mark for prefetching
//! (`.prefetch.landmark` or `.no.prefetch.landmark`; stargz-snapshotter puts these into
//! zstd:chunked too). Lazy readers do not show them, so they are no files of the layer. Only
//! archives that end with the footer of one of the two formats have such entries: elsewhere a file
//! of that name is a file.

use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::Path;

/// Names at the root that are the format's own.
const LANDMARKS: [&[u8]; 3] = [
    b"stargz.index.json",
    b".prefetch.landmark",
    b".no.prefetch.landmark",
];
/// Longest footer of a gzip form in bytes: the last, empty member.
const FOOTER: u64 = 64;
/// A gzip member with an extra field.
const MEMBER: &[u8] = &[0x1f, 0x8b, 8, 4];
/// What that field says in all forms of eStargz, those with the table elsewhere included.
const STARGZ: &[u8] = b"STARGZ";
/// Last bytes of zstd:chunked.
const CHUNKED: &[u8] = b"GNUlInUx";

/// Whether a path from the archive's root is one of the format's own entries.
pub(crate) fn is_landmark(path: &[u8]) -> bool {
    LANDMARKS.contains(&path)
}

/// Whether the last bytes of a stored archive are a footer.
pub(super) fn has_footer(tail: &[u8]) -> bool {
    if tail.ends_with(CHUNKED) {
        return true;
    }
    let find = |bytes: &[u8], what: &[u8]| bytes.windows(what.len()).position(|w| w == what);
    find(tail, MEMBER).is_some_and(|at| {
        let member = tail.get(at..).unwrap_or_default();
        find(member, STARGZ).is_some()
    })
}

/// Whether the file ends with a footer; false if that cannot be seen, as of a pipe.
pub(crate) fn is_lazy_file(path: &Path) -> bool {
    let tail = || -> std::io::Result<Vec<u8>> {
        let mut tail = Vec::new();
        // A pipe must not be opened twice.
        let meta = fs_err::metadata(path)?;
        if meta.is_file() {
            let mut file = fs_err::File::open(path)?;
            file.seek(SeekFrom::Start(meta.len().saturating_sub(FOOTER)))?;
            file.take(FOOTER).read_to_end(&mut tail)?;
        }
        Ok(tail)
    };
    tail().is_ok_and(|tail| has_footer(&tail))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The last member of an eStargz archive with this extra field.
    fn member(extra: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; 100];
        bytes.extend_from_slice(&[0x1f, 0x8b, 8, 4, 0, 0, 0, 0, 0, 0xff]);
        bytes.push(u8::try_from(extra.len()).unwrap());
        bytes.push(0);
        bytes.extend_from_slice(extra);
        bytes.extend_from_slice(&[1, 0, 0, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 0]);
        let last = bytes.len() - 64;
        bytes.split_off(last)
    }

    #[test]
    fn footers_of_every_form() {
        assert!(has_footer(&member(b"SG\x16\x0000000000000012abSTARGZ")));
        assert!(has_footer(&member(b"00000000000012abSTARGZ")));
        assert!(has_footer(&member(b"SG\x11\x00STARGZEXTERNALTOC")));
        assert!(!has_footer(&member(b"other")));
        assert!(has_footer(b"0123456789GNUlInUx"));
        assert!(!has_footer(b"STARGZ") && !has_footer(b""));
    }
}
