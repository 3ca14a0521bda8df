//! The formats of layers and of the store.

use std::str::FromStr as _;

use layerpack_erofs::{Image, Tree, WriteOptions, check, write_image};
use layerpack_store::format::{index::IndexSegment, pack};
use layerpack_store::{Digest, LayerMap, LayerName, Locator, Manifest, Reference, Version};

/// Where an image's superblock lies, and where its first block ends.
const SUPERBLOCK: std::ops::Range<usize> = 1024..4096;

/// Opens and checks an image. One that the checker finds nothing wrong with can be read whole, and
/// written again if it is a tree that we could have made.
pub(crate) fn erofs(bytes: &[u8]) {
    let mut bytes = bytes.to_vec();
    seal_superblock(&mut bytes);
    let problems = check(&bytes);
    let Ok(image) = Image::open(&bytes) else {
        assert!(!problems.is_empty(), "checked, and cannot be opened");
        return;
    };
    let tree = Tree::from_image(&image);
    if problems.is_empty()
        && let Ok(tree) = tree
    {
        let mut again = Vec::new();
        if write_image(&tree, &WriteOptions::default(), &mut again).is_ok() {
            assert_eq!(check(&again), vec![], "a tree written again is broken");
        }
    }
}

/// crc32c without the last inversion of all but the checksum itself.
fn seal_superblock(bytes: &mut [u8]) {
    let Some(block) = bytes.get_mut(SUPERBLOCK) else {
        return;
    };
    let Some((head, rest)) = block.split_at_mut_checked(4) else {
        return;
    };
    let Some((field, rest)) = rest.split_at_mut_checked(4) else {
        return;
    };
    let sum = crc32c::crc32c_append(crc32c::crc32c_append(crc32c::crc32c(head), &[0; 4]), rest);
    field.copy_from_slice(&(!sum).to_le_bytes());
}

/// Writes the two checksums that end a header, of what follows it and of itself.
pub(crate) fn seal(bytes: &mut [u8], header: usize) {
    let Some((head, body)) = bytes.split_at_mut_checked(header) else {
        return;
    };
    if let Some(slot) = head.get_mut(header - 8..header - 4) {
        slot.copy_from_slice(&crc32c::crc32c(body).to_le_bytes());
    }
    let own = head.get(..header - 4).map(crc32c::crc32c);
    if let (Some(slot), Some(own)) = (head.get_mut(header - 4..), own) {
        slot.copy_from_slice(&own.to_le_bytes());
    }
}

/// A map that is read says the same when it is written.
pub(crate) fn map(bytes: &[u8]) {
    let mut bytes = bytes.to_vec();
    seal(&mut bytes, 64);
    if let Ok(map) = LayerMap::parse(&bytes) {
        let again = LayerMap::parse(&map.to_bytes());
        assert!(
            again.is_ok_and(|again| again == map),
            "a map changed by writing"
        );
        for extent in map.extents() {
            let range = extent.data_offset..extent.end();
            assert!(!map.extents_in(range).is_empty(), "an extent is not found");
        }
    }
}

/// First the map, with its length in front, then the locator.
pub(crate) fn locator(bytes: &[u8]) {
    let Some((len, rest)) = bytes.split_first_chunk::<4>() else {
        return;
    };
    let len = usize::try_from(u32::from_le_bytes(*len)).unwrap_or(usize::MAX);
    let Some((map, locator)) = rest.split_at_checked(len) else {
        return;
    };
    let (mut map, mut locator) = (map.to_vec(), locator.to_vec());
    seal(&mut map, 64);
    let digest = Digest::of(&map);
    // It must name its map.
    if let Some(slot) = locator.get_mut(24..56) {
        slot.copy_from_slice(digest.as_bytes());
    }
    seal(&mut locator, 80);
    let Ok(map) = LayerMap::parse(&map) else {
        return;
    };
    if let Ok(locator) = Locator::parse(&locator, &digest, &map) {
        let again = Locator::parse(&locator.to_bytes(), &digest, &map);
        assert!(again.is_ok(), "a locator cannot be read again");
    }
}

/// A pack as a whole: header, table, footer.
pub(crate) fn pack(bytes: &[u8]) {
    let mut bytes = bytes.to_vec();
    seal_pack(&mut bytes);
    let _ = pack::check_header(&bytes);
    let len = bytes.len() as u64;
    let Some(at) = len.checked_sub(pack::FOOTER_LEN).map(usize::try_from) else {
        return;
    };
    let footer = at.ok().and_then(|at| bytes.get(at..));
    let Ok(footer) = pack::PackFooter::parse(footer.unwrap_or_default(), len) else {
        return;
    };
    let table = usize::try_from(footer.table_offset)
        .ok()
        .zip(usize::try_from(footer.table_offset + footer.table_len).ok())
        .and_then(|(from, to)| bytes.get(from..to));
    let _ = pack::PackTable::parse(table.unwrap_or_default(), &footer);
}

/// The footer holds the table's place, digest and its own checksum.
fn seal_pack(bytes: &mut [u8]) {
    let len = bytes.len();
    let Some((body, footer)) = len
        .checked_sub(96)
        .and_then(|at| bytes.split_at_mut_checked(at))
    else {
        return;
    };
    let number = |at: usize| {
        let field = footer.get(at..at + 8)?.first_chunk::<8>()?;
        usize::try_from(u64::from_le_bytes(*field)).ok()
    };
    let table = number(24)
        .zip(number(32))
        .and_then(|(at, len)| body.get(at..at.checked_add(len)?));
    let digest = Digest::of(table.unwrap_or_default());
    if let Some(slot) = footer.get_mut(48..80) {
        slot.copy_from_slice(digest.as_bytes());
    }
    let own = footer.get(..92).map(crc32c::crc32c);
    if let (Some(slot), Some(own)) = (footer.get_mut(92..), own) {
        slot.copy_from_slice(&own.to_le_bytes());
    }
}

/// A segment that is read is written as it was.
pub(crate) fn index(bytes: &[u8]) {
    let mut bytes = bytes.to_vec();
    seal(&mut bytes, 48);
    if let Ok(segment) = IndexSegment::parse(&bytes)
        && let Ok(written) = segment.to_bytes()
    {
        assert!(
            IndexSegment::parse(&written).is_ok(),
            "a segment cannot be read again"
        );
    }
}

/// A manifest has one form.
pub(crate) fn manifest(bytes: &[u8]) {
    if let Ok(manifest) = Manifest::from_bytes(bytes)
        && let Ok(written) = manifest.to_bytes()
    {
        let again = Manifest::from_bytes(&written);
        assert!(
            again.is_ok_and(|again| again == manifest),
            "a manifest changed by writing"
        );
    }
}

/// References, and the parts of them.
pub(crate) fn reference(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    if let Ok(reference) = Reference::from_str(&text) {
        assert_eq!(
            Reference::from_str(&reference.to_string()).ok(),
            Some(reference)
        );
    }
    let _ = LayerName::new(&text);
    let _ = Version::new(&text);
    let _ = Digest::from_str(&text);
}
