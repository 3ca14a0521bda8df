//! Extended attributes.

use zerocopy::FromBytes;

use crate::BLOCK_SIZE;
use crate::error::{Error, Result};
use crate::format::{RawXattr, RawXattrHeader, XATTR_PREFIXES};
use crate::reader::Image;
use crate::reader::inode::Inode;

/// An xattr in the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct XattrRef<'a> {
    prefix: &'static [u8],
    suffix: &'a [u8],
    pub(crate) value: &'a [u8],
}

impl XattrRef<'_> {
    pub(crate) fn name(&self) -> Vec<u8> {
        [self.prefix, self.suffix].concat()
    }

    /// Bytes that name and value take.
    pub(crate) fn len(&self) -> u64 {
        (self.prefix.len() + self.suffix.len() + self.value.len()) as u64
    }
}

impl<'a> Image<'a> {
    /// Extended attributes of an inode, by full name, in the order in which they are stored:
    /// shared ones first.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if they are damaged.
    pub fn xattrs(&self, inode: &Inode) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
        let mut found = Vec::new();
        self.each_xattr(inode, &mut |xattr| {
            found.push((xattr.name(), xattr.value.to_vec()));
            Ok(())
        })?;
        Ok(found)
    }

    /// Calls `each` with every xattr of an inode.
    pub(crate) fn each_xattr(
        &self,
        inode: &Inode,
        each: &mut dyn FnMut(XattrRef<'a>) -> Result<()>,
    ) -> Result<()> {
        if inode.body_len == 0 {
            return Ok(());
        }
        let damaged = |reason: &str| inode.corrupt(format!("xattrs: {reason}"));
        let body = self
            .slice(inode.offset + inode.core_len, inode.body_len)
            .ok_or_else(|| damaged("pass the end of the image"))?;
        let (header, rest) =
            RawXattrHeader::read_from_prefix(body).map_err(|_| damaged("no header"))?;
        let shared = 4 * usize::from(header.shared_count);
        let (shared, mut own) = rest
            .split_at_checked(shared)
            .ok_or_else(|| damaged("too many shared ones"))?;
        for number in shared.chunks_exact(4) {
            let number = number.try_into().map(u32::from_le_bytes).unwrap_or(0);
            let offset = self.superblock.xattr_block * BLOCK_SIZE + u64::from(number) * 4;
            each(self.shared_xattr(offset)?)?;
        }
        while !own.is_empty() {
            let (xattr, after) = parse(own).ok_or_else(|| damaged("an entry is damaged"))?;
            each(xattr)?;
            own = after;
        }
        Ok(())
    }

    fn shared_xattr(&self, offset: u64) -> Result<XattrRef<'a>> {
        let area = usize::try_from(offset)
            .ok()
            .and_then(|start| self.bytes.get(start..));
        area.and_then(parse)
            .map(|(xattr, _)| xattr)
            .ok_or_else(|| Error::corrupt("shared xattr", offset, "is damaged"))
    }
}

/// Splits off the first xattr with its padding.
fn parse(bytes: &[u8]) -> Option<(XattrRef<'_>, &[u8])> {
    let (raw, rest) = RawXattr::read_from_prefix(bytes).ok()?;
    let (suffix, rest) = rest.split_at_checked(usize::from(raw.name_len))?;
    let (value, _) = rest.split_at_checked(usize::from(raw.value_len.get()))?;
    let prefix = XATTR_PREFIXES
        .iter()
        .find(|(number, _)| *number == raw.prefix)?
        .1;
    // Prefixes that end in a dot need more, the others are whole names.
    if prefix.ends_with(b".") == suffix.is_empty() || suffix.contains(&0) {
        return None;
    }
    let len = size_of::<RawXattr>() + suffix.len() + value.len();
    let after = bytes.get(len.next_multiple_of(4)..)?;
    Some((
        XattrRef {
            prefix,
            suffix,
            value,
        },
        after,
    ))
}
