//! Damaged and hostile images: an error or another tree, but never a panic, a hang or memory
//! beyond what the image's size justifies.

use layerpack_erofs::{
    BLOCK_SIZE, Error, FileData, FileLayout, Image, MAX_PROBLEMS, NodeId, NodeKind, Rdev, Tree,
    check,
};
use proptest::prelude::*;

use crate::common::{Sample, files, meta, of_tree};

/// A small image with every structure that there is.
fn sample() -> Sample {
    let mut sample = Sample::new(meta(0o755));
    let top = NodeId::ROOT;
    let wide = sample.dir(top, b"wide", meta(0o700));
    for number in 0..90 {
        let name = format!("{number:0>60}");
        sample.file(wide, name.as_bytes(), &[b'w'; 10]);
    }
    let id = sample.file(top, b"file", &vec![b'f'; 10_000]);
    sample.tree.link(wide, b"hard", id).unwrap();
    sample.tree.node_mut(id).metadata.mtime.sec = -7;
    let sparse = sample.store_sparse(1 << 20, &[(0, vec![1; 9]), (900_000, vec![2; 9])]);
    sample.node(top, b"sparse", NodeKind::File(sparse));
    sample.node(top, b"short", NodeKind::Symlink(b"target".to_vec()));
    sample.node(top, b"long", NodeKind::Symlink(vec![b'l'; 4090]));
    sample.node(
        top,
        b"char",
        NodeKind::CharDevice(Rdev { major: 1, minor: 3 }),
    );
    sample.node(
        top,
        b"block",
        NodeKind::BlockDevice(Rdev {
            major: 8,
            minor: 300,
        }),
    );
    sample.node(top, b"fifo", NodeKind::Fifo);
    sample.node(top, b"socket", NodeKind::Socket);
    sample.node(top, b"empty", NodeKind::File(FileData::empty()));
    for name in [b"xattr-1".as_slice(), b"xattr-2"] {
        let id = sample.file(top, name, b"x");
        let xattrs = &mut sample.tree.node_mut(id).metadata.xattrs;
        xattrs.insert(b"user.shared".to_vec(), vec![b's'; 50]);
        xattrs.insert(b"trusted.own".to_vec(), name.to_vec());
    }
    sample
}

/// Makes the checksum right again, so that it does not hide the damage from the reader.
fn repair_checksum(bytes: &mut [u8]) {
    if bytes.len() >= 4096 {
        bytes[1028..1032].fill(0);
        let sum = !crc32c::crc32c(&bytes[1024..4096]);
        bytes[1028..1032].copy_from_slice(&sum.to_le_bytes());
    }
}

/// Reads everything there is in every way; gives the tree if it reads as one.
fn exercise(bytes: &[u8]) -> Result<Tree, Error> {
    let problems = check(bytes);
    assert!(problems.len() <= MAX_PROBLEMS);
    for problem in &problems {
        assert!(problem.to_string().len() < 20_000);
    }
    let image = Image::open(bytes)?;
    // As a browser of the image would, without the guards of the whole-image readers.
    let mut pending = vec![image.root()?];
    let mut left = 2_000;
    while let Some(inode) = pending.pop() {
        let _ = image.xattrs(&inode);
        let _ = image.symlink(&inode);
        let _ = inode.rdev();
        if let Ok(extents) = image.layout(&inode) {
            let _ = extents.take(5_000).try_for_each(|extent| extent.map(drop));
        }
        let Ok(entries) = image.read_dir(&inode) else {
            continue;
        };
        for entry in entries.take(left).map_while(Result::ok) {
            left -= 1;
            let _ = image.lookup(&inode, entry.name);
            pending.extend(image.inode(entry.nid));
        }
        if left == 0 {
            break;
        }
    }
    let _ = image.resolve(b"wide/hard/../x");
    let tree = Tree::from_image(&image)?;
    if problems.is_empty() {
        // What the checker finds nothing wrong with can be written again.
        let sample = Sample {
            tree: tree.clone(),
            data_blocks: 1 << 31,
            ..Sample::new(meta(0))
        };
        assert!(!sample.image().is_empty());
    }
    Ok(tree)
}

/// Bytes where damage changes nothing that the reader reports, by field: in the superblock the
/// features to ignore, identity, name, and reserved bytes; the same in inodes and entries.
fn is_insignificant(pristine: &[u8], offset: usize) -> bool {
    if offset < 1024 {
        return true;
    }
    let image = Image::open(pristine).unwrap();
    let superblock = [
        4..12,
        13..14,
        32..32,
        48..80,
        80..84,
        84..86,
        88..90,
        91..128,
        128..256,
    ];
    if superblock
        .iter()
        .any(|range| range.contains(&(offset - 1024)))
    {
        return true;
    }
    let mut pending = vec![image.root().unwrap()];
    while let Some(inode) = pending.pop() {
        let start = inode.nid as usize * 32;
        let fields: &[std::ops::Range<usize>] = if inode.compact {
            &[12..16, 20..24, 28..32]
        } else {
            &[6..8, 20..24, 48..64]
        };
        // The data field means nothing where there is no content outside of the inode.
        let bare = inode.size == 0 || image.symlink(&inode).is_ok() || inode.is_dir();
        if fields
            .iter()
            .any(|range| range.contains(&offset.wrapping_sub(start)))
        {
            return true;
        }
        if bare && (16..20).contains(&offset.wrapping_sub(start)) {
            return true;
        }
        // One more byte of a directory may be padding of its last name, and a chunk size may be
        // larger than the one chunk of a file.
        let at = offset.wrapping_sub(start);
        let one_chunk = image
            .layout(&inode)
            .is_ok_and(|extents| extents.count() == 1);
        if (inode.is_dir() && at == 8) || (one_chunk && at == 16) {
            return true;
        }
        if inode.is_dir() {
            let entries = image.read_dir(&inode).unwrap().map(Result::unwrap);
            pending.extend(entries.map(|entry| image.inode(entry.nid).unwrap()));
        }
    }
    false
}

#[test]
fn every_byte_damaged() {
    let sample = sample();
    let pristine = sample.image();
    let view = |tree: &Tree| (of_tree(tree), files(tree));
    let expected = view(&exercise(&pristine).unwrap());
    let mut silent = Vec::new();
    let mut errors = 0_usize;
    let end = pristine.len();
    let mut bytes = pristine.clone();
    for offset in 1024..end {
        for change in [0xff, 0x01] {
            bytes[offset] ^= change;
            if offset < 4096 {
                // The one bit that says that there is a checksum is not protected by it.
                let unprotected = offset == 1032 && change & 1 == 1;
                assert!(
                    unprotected || Image::open(&bytes).is_err(),
                    "the checksum misses byte {offset}"
                );
                repair_checksum(&mut bytes);
            }
            match exercise(&bytes) {
                Err(_) => errors += 1,
                Ok(tree) if view(&tree) == expected && check(&bytes).is_empty() => {
                    let padding = pristine[offset] == 0;
                    if !padding && !is_insignificant(&pristine, offset) {
                        silent.push(offset);
                    }
                }
                Ok(_) => {}
            }
            bytes[offset] = pristine[offset];
        }
        if offset < 4096 {
            bytes[1028..1032].copy_from_slice(&pristine[1028..1032]);
        }
    }
    assert!(bytes == pristine);
    assert!(errors > end / 10, "only {errors} errors in {end} bytes");
    assert_eq!(silent, Vec::<usize>::new(), "damage that nobody sees");
    assert!(peak_memory() < 1 << 30);
}

/// 16-, 32- and 64-bit fields at every aligned offset set to extremes.
#[test]
fn every_field_extreme() {
    let pristine = sample().image();
    let mut bytes = pristine.clone();
    for width in [2_usize, 4, 8] {
        for offset in (1024..pristine.len()).step_by(width) {
            let field = &pristine[offset..offset + width];
            if field[0] != 0 && field.iter().all(|byte| *byte == field[0]) {
                continue; // text
            }
            for value in [0, u64::MAX, 1 << (width * 8 - 1), u64::MAX >> 1] {
                bytes[offset..offset + width].copy_from_slice(&value.to_le_bytes()[..width]);
                repair_checksum(&mut bytes);
                let _ = exercise(&bytes);
                bytes[offset..offset + width].copy_from_slice(&pristine[offset..offset + width]);
            }
            bytes[1028..1032].copy_from_slice(&pristine[1028..1032]);
        }
    }
    assert!(peak_memory() < 1 << 30);
}

#[test]
fn every_truncation() {
    let pristine = sample().image();
    for len in 0..pristine.len() {
        let mut bytes = pristine[..len].to_vec();
        assert!(exercise(&bytes).is_err(), "{len} bytes read as an image");
        // With a superblock that claims no more than there is.
        if len >= 4096 {
            bytes[1060..1064].copy_from_slice(&((len / 4096) as u32).to_le_bytes());
            repair_checksum(&mut bytes);
            let _ = exercise(&bytes);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_damage(changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..30)) {
        thread_local! {
            static PRISTINE: Vec<u8> = sample().image();
        }
        let mut bytes = PRISTINE.with(Clone::clone);
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        bytes[1024..1028].copy_from_slice(&0xE0F5_E1E2_u32.to_le_bytes());
        repair_checksum(&mut bytes);
        let _ = exercise(&bytes);
    }

    #[test]
    fn random_bytes(mut bytes in proptest::collection::vec(any::<u8>(), 4096..16_384)) {
        let header = &PRISTINE_HEADER.with(Clone::clone)[1024..1152];
        bytes[1024..1152].copy_from_slice(header);
        bytes[1060..1064].copy_from_slice(&1_u32.to_le_bytes());
        repair_checksum(&mut bytes);
        let _ = exercise(&bytes);
    }
}

thread_local! {
    static PRISTINE_HEADER: Vec<u8> = sample().image();
}

/// Many directories that claim the same blocks would be read once for each.
#[test]
fn shared_directory_content_is_refused() {
    let mut sample = Sample::new(meta(0o755));
    let shared = sample.dir(NodeId::ROOT, b"0-shared", meta(0o755));
    let target = sample.node(shared, b"0", NodeKind::Fifo);
    for number in 1..3000 {
        sample
            .tree
            .link(shared, number.to_string().as_bytes(), target)
            .unwrap();
    }
    for number in 0..3000 {
        sample.dir(
            NodeId::ROOT,
            format!("dir-{number}").as_bytes(),
            meta(0o755),
        );
    }
    let mut bytes = sample.image();
    let (start, copies) = {
        let image = Image::open(&bytes).unwrap();
        let root = image.root().unwrap();
        let nid = |name: &[u8]| image.lookup(&root, name).unwrap().unwrap().nid as usize * 32;
        let copies: Vec<_> = (0..3000)
            .map(|n| nid(format!("dir-{n}").as_bytes()))
            .collect();
        (nid(b"0-shared"), copies)
    };
    let size = bytes[start + 8..start + 12].to_vec();
    let block = bytes[start + 16..start + 20].to_vec();
    for copy in copies {
        // All compact: plain layout, with the size and first block of the shared directory.
        assert_eq!(bytes[copy] & 1, 0);
        bytes[copy] = 0;
        bytes[copy + 8..copy + 12].copy_from_slice(&size);
        bytes[copy + 16..copy + 20].copy_from_slice(&block);
    }
    repair_checksum(&mut bytes);
    let error = Tree::from_image(&Image::open(&bytes).unwrap()).unwrap_err();
    assert!(matches!(error, Error::Corrupt { .. }), "{error}");
    assert!(!check(&bytes).is_empty());
    assert!(peak_memory() < 1 << 30);
}

/// One shared value of 64 KiB named by very many inodes.
#[test]
fn shared_values_are_not_expanded_without_end() {
    let mut sample = Sample::new(meta(0o755));
    for number in 0..3000 {
        let id = sample.node(NodeId::ROOT, format!("{number}").as_bytes(), NodeKind::Fifo);
        let xattrs = &mut sample.tree.node_mut(id).metadata.xattrs;
        xattrs.insert(b"user.a".to_vec(), vec![1; 10_000]);
        xattrs.insert(b"user.b".to_vec(), vec![2; 30_000]);
    }
    let bytes = sample.image();
    drop(sample);
    // Nothing is wrong with it, but the tree would take 120 MB for an image of 0.4 MB.
    assert_eq!(check(&bytes), vec![]);
    let error = Tree::from_image(&Image::open(&bytes).unwrap()).unwrap_err();
    assert!(matches!(error, Error::Corrupt { .. }), "{error}");
}

#[test]
fn cycles_and_double_names_of_directories() {
    let mut sample = Sample::new(meta(0o755));
    let outer = sample.dir(NodeId::ROOT, b"outer", meta(0o755));
    sample.dir(outer, b"inner", meta(0o755));
    let pristine = sample.image();
    let image = Image::open(&pristine).unwrap();
    let root = image.root().unwrap();
    let outer = image.resolve(b"outer").unwrap().unwrap();
    let inner = image.resolve(b"outer/inner").unwrap().unwrap();
    let entry = pristine
        .windows(8)
        .rposition(|window| window == inner.nid.to_le_bytes());
    // The entry "inner" of "outer" names each of the directories above it.
    let at = pristine
        .windows(8)
        .position(|window| window == inner.nid.to_le_bytes())
        .unwrap();
    assert!(entry.unwrap() >= at);
    for nid in [root.nid, outer.nid] {
        let mut bytes = pristine.clone();
        bytes[at..at + 8].copy_from_slice(&nid.to_le_bytes());
        repair_checksum(&mut bytes);
        assert!(Tree::from_image(&Image::open(&bytes).unwrap()).is_err());
        assert!(!check(&bytes).is_empty());
    }
}

/// Depth is bounded by nothing but memory, and nothing recurses or takes paths apart for it.
#[test]
fn very_deep_trees() {
    let mut sample = Sample::new(meta(0o755));
    let mut dir = NodeId::ROOT;
    for _ in 0..20_000 {
        sample.node(dir, b"a", NodeKind::Fifo);
        dir = sample.dir(dir, b"d", meta(0o755));
    }
    let bytes = sample.image();
    assert_eq!(check(&bytes), vec![]);
    let image = Image::open(&bytes).unwrap();
    let mut tree = Tree::from_image(&image).unwrap();
    assert_eq!(tree.walk().count(), 40_001);
    assert_eq!(
        image.resolve(&b"d/".repeat(20_000)).unwrap().unwrap().nlink,
        2
    );
    // Damage at the bottom is reported with the end of its path only.
    let bottom = image.resolve(&b"d/".repeat(20_000)).unwrap().unwrap();
    let mut damaged = bytes.clone();
    let at = bottom.nid as usize * 32;
    damaged[at + 6] = 9;
    let problems = check(&damaged);
    assert!(
        problems.len() == 1 && problems[0].path.len() < 5000,
        "{problems:?}"
    );
    tree.remove(NodeId::ROOT, b"d").unwrap();
    assert_eq!(tree.len(), 2);
}

#[test]
fn features_that_are_not_known_are_refused() {
    let pristine = sample().image();
    for bit in 0..32 {
        let mut bytes = pristine.clone();
        let field = 1024 + 80;
        let known = u32::from_le_bytes(bytes[field..field + 4].try_into().unwrap());
        bytes[field..field + 4].copy_from_slice(&(known | 1 << bit).to_le_bytes());
        repair_checksum(&mut bytes);
        let opened = Image::open(&bytes).map(|_| ());
        if [0, 2, 3].contains(&bit) {
            opened.unwrap();
        } else {
            assert!(
                matches!(opened, Err(Error::Unsupported { .. })),
                "bit {bit}"
            );
        }
    }
    for (offset, value) in [(1024, 0), (1024 + 12, 9), (1024 + 12, 16), (1024 + 90, 1)] {
        let mut bytes = pristine.clone();
        bytes[offset] = value;
        repair_checksum(&mut bytes);
        assert!(matches!(
            Image::open(&bytes),
            Err(Error::Unsupported { .. })
        ));
    }
}

/// Trees that are read back have places on device 1 only.
#[test]
fn places_outside_of_the_device() {
    let mut sample = sample();
    let image = sample.image();
    let tree = Tree::from_image(&Image::open(&image).unwrap()).unwrap();
    for item in tree.walk() {
        if let NodeKind::File(FileData {
            size,
            layout: FileLayout::Contiguous { start },
        }) = &tree.node(item.id).kind
        {
            assert!(start.get() + size.div_ceil(BLOCK_SIZE) <= sample.data_blocks);
        }
    }
    // The same image with a device that is a block too small.
    sample.data_blocks -= 1;
    let mut bytes = image;
    bytes[1152 + 64..1152 + 68].copy_from_slice(&(sample.data_blocks as u32).to_le_bytes());
    repair_checksum(&mut bytes);
    assert!(Tree::from_image(&Image::open(&bytes).unwrap()).is_err());
    assert_eq!(check(&bytes).len(), 1);
}

/// Peak resident memory of this process in bytes.
fn peak_memory() -> u64 {
    let status = fs_err::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("VmHWM:"))
        .unwrap();
    line.split_whitespace()
        .nth(1)
        .unwrap()
        .parse::<u64>()
        .unwrap()
        * 1024
}
