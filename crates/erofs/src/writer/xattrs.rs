//! Extended attributes: which are shared, and the bytes of the others.

use std::collections::HashMap;

use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32};

use crate::format::{RawXattr, RawXattrHeader, XATTR_PREFIXES};
use crate::tree::{Metadata, NodeId, Tree};

/// Most xattr bytes of one inode, header included: what the 16-bit counter can say.
const MAX_BODY: usize = size_of::<RawXattrHeader>() + 4 * (u16::MAX as usize - 1);
/// Most shared xattrs of one inode.
const MAX_SHARED: usize = u8::MAX as usize;

/// An xattr as it is encoded. The order is that of the shared area.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Xattr<'t> {
    prefix: u8,
    suffix: &'t [u8],
    value: &'t [u8],
}

impl<'t> Xattr<'t> {
    fn new(name: &'t [u8], value: &'t [u8]) -> Result<Self, String> {
        let found = XATTR_PREFIXES.iter().find_map(|(number, prefix)| {
            let suffix = name.strip_prefix(*prefix)?;
            // A prefix that ends in a dot wants more, one that does not is the whole name.
            (prefix.ends_with(b".") != suffix.is_empty()).then_some((*number, suffix))
        });
        let (prefix, suffix) = found.ok_or_else(|| {
            format!(
                "xattr {} has a name that EROFS cannot hold",
                name.escape_ascii()
            )
        })?;
        if name.len() > 255 || suffix.contains(&0) {
            return Err(format!(
                "xattr {}: a name has at most 255 bytes, none of them NUL",
                name.escape_ascii()
            ));
        }
        if value.len() > usize::from(u16::MAX) {
            return Err(format!(
                "xattr {} has a value of {} bytes; EROFS holds at most 65535",
                name.escape_ascii(),
                value.len()
            ));
        }
        Ok(Self {
            prefix,
            suffix,
            value,
        })
    }

    fn encoded_len(&self) -> usize {
        (size_of::<RawXattr>() + self.suffix.len() + self.value.len()).next_multiple_of(4)
    }

    fn encode(&self, out: &mut Vec<u8>) {
        let end = out.len() + self.encoded_len();
        let entry = RawXattr {
            // Both lengths were checked by `new`.
            name_len: u8::try_from(self.suffix.len()).unwrap_or(u8::MAX),
            prefix: self.prefix,
            value_len: U16::new(u16::try_from(self.value.len()).unwrap_or(u16::MAX)),
        };
        out.extend_from_slice(entry.as_bytes());
        out.extend_from_slice(self.suffix);
        out.extend_from_slice(self.value);
        out.resize(end, 0);
    }
}

/// The xattrs worth storing once for the whole image.
#[derive(Debug, Default)]
pub(super) struct Shared<'t> {
    /// Byte offset of each in the shared area.
    offsets: HashMap<Xattr<'t>, u64>,
    sorted: Vec<Xattr<'t>>,
    /// Size of the area in bytes.
    pub(super) bytes: u64,
}

impl<'t> Shared<'t> {
    /// Looks at every named inode of the tree.
    pub(super) fn new(
        tree: &'t Tree,
        nodes: impl Iterator<Item = NodeId>,
    ) -> Result<Self, (NodeId, String)> {
        let mut uses: HashMap<Xattr<'t>, usize> = HashMap::new();
        for id in nodes {
            for (name, value) in tree.xattrs(id) {
                let xattr = Xattr::new(name, value).map_err(|reason| (id, reason))?;
                *uses.entry(xattr).or_default() += 1;
            }
        }
        let worth = uses.into_iter().filter(|(xattr, uses)| {
            let len = xattr.encoded_len();
            uses.saturating_mul(len) > len.saturating_add(uses.saturating_mul(4))
        });
        let mut sorted: Vec<_> = worth.map(|(xattr, _)| xattr).collect();
        sorted.sort_unstable();
        let mut bytes = 0;
        let mut offsets = HashMap::with_capacity(sorted.len());
        for xattr in &sorted {
            offsets.insert(*xattr, bytes);
            bytes += xattr.encoded_len() as u64;
        }
        Ok(Self {
            offsets,
            sorted,
            bytes,
        })
    }

    /// Calls `out` with the encoded shared xattrs in order.
    pub(super) fn emit<E>(&self, mut out: impl FnMut(&[u8]) -> Result<(), E>) -> Result<(), E> {
        let mut buffer = Vec::new();
        for xattr in &self.sorted {
            buffer.clear();
            xattr.encode(&mut buffer);
            out(&buffer)?;
        }
        Ok(())
    }

    /// Size of an inode's xattr body: 0 without xattrs.
    pub(super) fn body_len(&self, metadata: &Metadata) -> Result<usize, String> {
        if metadata.xattrs.is_empty() {
            return Ok(0);
        }
        let (shared, own) = self.split(metadata)?;
        let inline: usize = own.iter().map(Xattr::encoded_len).sum();
        let len = size_of::<RawXattrHeader>() + 4 * shared.len() + inline;
        if len > MAX_BODY {
            return Err(format!(
                "its xattrs take {len} bytes; EROFS holds at most {MAX_BODY}"
            ));
        }
        Ok(len)
    }

    /// Encodes an inode's xattr body. `area` is where the shared area begins, in bytes from
    /// the start of the block that shared numbers count from.
    pub(super) fn encode_body(
        &self,
        metadata: &Metadata,
        area: u64,
        out: &mut Vec<u8>,
    ) -> Result<(), String> {
        if metadata.xattrs.is_empty() {
            return Ok(());
        }
        let (shared, own) = self.split(metadata)?;
        let header = RawXattrHeader {
            name_filter: U32::ZERO,
            shared_count: u8::try_from(shared.len()).unwrap_or(u8::MAX),
            reserved: [0; 7],
        };
        out.extend_from_slice(header.as_bytes());
        for offset in shared {
            let number = u32::try_from((area + offset) / 4)
                .map_err(|_| "the image has too many different xattrs".to_owned())?;
            out.extend_from_slice(&number.to_le_bytes());
        }
        for xattr in own {
            xattr.encode(out);
        }
        Ok(())
    }

    /// Offsets of the shared xattrs of an inode, and those it keeps for itself.
    fn split<'m>(&self, metadata: &'m Metadata) -> Result<(Vec<u64>, Vec<Xattr<'m>>), String> {
        let mut shared = Vec::new();
        let mut own = Vec::new();
        for (name, value) in &metadata.xattrs {
            let xattr = Xattr::new(name, value)?;
            match self.offsets.get(&xattr) {
                Some(offset) if shared.len() < MAX_SHARED => shared.push(*offset),
                _ => own.push(xattr),
            }
        }
        Ok((shared, own))
    }
}

/// The inode field that says how long the xattr body is.
pub(super) fn body_count(body_len: usize) -> u16 {
    match body_len.checked_sub(size_of::<RawXattrHeader>()) {
        None => 0,
        // `body_len` keeps it in range.
        Some(rest) => u16::try_from(rest / 4 + 1).unwrap_or(u16::MAX),
    }
}
