//! Random trees through the writer and back through every reader that needs no kernel.

use std::io::Read as _;

use layerpack_erofs::{
    DataExtent, FileData, FileLayout, Image, Metadata, NodeId, NodeKind, Tree, check, write_image,
};
use proptest::prelude::*;

use crate::common::{
    Sample, assert_same, content, files, of_image, of_peer, of_tree, peer, probes,
};
use crate::trees::{build, steps};

/// Everything that must hold for any tree.
pub(crate) fn verify(sample: &Sample, with_peer: bool) {
    let (bytes, info) = sample.write();
    assert_eq!(check(&bytes), vec![]);
    let image = Image::open(&bytes).unwrap();
    assert_eq!(image.superblock().inodes, sample.tree.len() as u64);
    assert_eq!(image.superblock().uuid, info.uuid);
    let expected = of_tree(&sample.tree);
    assert_same(&expected, &of_image(&image));

    let back = Tree::from_image(&image).unwrap();
    assert_same(&expected, &of_tree(&back));
    for (path, data) in files(&sample.tree) {
        let inode = image.resolve(&path).unwrap().unwrap();
        let extents: Vec<_> = image.layout(&inode).unwrap().map(Result::unwrap).collect();
        check_extents(&data, &extents);
    }
    let mut again = Vec::new();
    write_image(&back, &sample.options(), &mut again).unwrap();
    assert!(
        again == bytes,
        "an image read back and written again differs"
    );
    verify_rest(sample, &bytes);
    if with_peer {
        verify_peer(sample, &bytes);
    }
}

/// A tree that rests is written as before, has the same names, and can be changed.
fn verify_rest(sample: &Sample, bytes: &[u8]) {
    let mut resting = sample.tree.clone();
    resting.rest();
    let mut same = Vec::new();
    write_image(&resting, &sample.options(), &mut same).unwrap();
    assert!(same == bytes, "a tree that rests is written otherwise");
    let same_names = |tree: &Tree| {
        for entry in sample.tree.walk().take(300) {
            assert_eq!(tree.resolve(&entry.path), Some(entry.id));
        }
    };
    same_names(&resting);
    let fifo = || (Metadata::default(), NodeKind::Fifo);
    let first = sample.tree.children(NodeId::ROOT).next();
    if let Some((name, _)) = first {
        let (metadata, kind) = fifo();
        resting
            .insert(NodeId::ROOT, name, metadata, kind)
            .unwrap_err();
    }
    let (metadata, kind) = fifo();
    let new = b"\x01a name that no other has";
    let id = resting.insert(NodeId::ROOT, new, metadata, kind).unwrap();
    assert_eq!(resting.resolve(new), Some(id));
    same_names(&resting);
    resting.rest();
    resting.remove(NodeId::ROOT, new).unwrap();
    assert_eq!(resting.resolve(new), None);
    same_names(&resting);
}

/// Extents cover the file without gaps and lie where the tree says.
fn check_extents(data: &FileData, extents: &[DataExtent]) {
    let mut next = 0;
    for extent in extents {
        assert_eq!(extent.offset, next);
        next += extent.len;
        let expected = match &data.layout {
            FileLayout::Empty => unreachable!(),
            FileLayout::Contiguous { start } => Some(start.byte_offset() + extent.offset),
            FileLayout::Chunked { chunk_bits, chunks } => {
                chunks[(extent.offset >> chunk_bits) as usize].map(|block| block.byte_offset())
            }
        };
        assert_eq!(extent.place.map(|place| place.address), expected);
        assert!(extent.place.is_none_or(|place| place.device == 1));
    }
    assert_eq!(next, data.size);
}

fn verify_peer(sample: &Sample, bytes: &[u8]) {
    let data = sample.data();
    let fs = peer(sample, bytes, &data);
    assert_same(&of_tree(&sample.tree), &of_peer(&fs));
    for (path, file) in files(&sample.tree) {
        let mut rooted = b"/".to_vec();
        rooted.extend_from_slice(&path);
        let opened = fs.open(rooted.as_slice()).unwrap();
        for (offset, len) in probes(&file) {
            let mut found = vec![0; len];
            let mut filled = 0;
            while filled < len {
                match opened
                    .read_at(&mut found[filled..], offset + filled as u64)
                    .unwrap()
                {
                    0 => break,
                    read => filled += read,
                }
            }
            assert!(
                found[..filled] == content(sample, &file, offset, len),
                "{path:?} at {offset}"
            );
        }
        if file.size < 1 << 16 {
            let mut all = Vec::new();
            fs.open(rooted.as_slice())
                .unwrap()
                .read_to_end(&mut all)
                .unwrap();
            assert_eq!(all.len() as u64, file.size);
        }
    }
}

/// The same tree with entries added in another order.
fn shuffled(tree: &Tree) -> Tree {
    let mut copy = Tree::new(tree.node(NodeId::ROOT).metadata.clone());
    let mut known = std::collections::HashMap::from([(NodeId::ROOT, NodeId::ROOT)]);
    let mut pending = vec![NodeId::ROOT];
    while let Some(dir) = pending.pop() {
        for (name, id) in tree.children(dir).rev() {
            if let Some(copied) = known.get(&id) {
                copy.link(known[&dir], name, *copied).unwrap();
                continue;
            }
            let node = tree.node(id);
            let made = copy.insert(known[&dir], name, node.metadata.clone(), node.kind.clone());
            known.insert(id, made.unwrap());
            if node.kind.is_dir() {
                pending.push(id);
            }
        }
    }
    copy
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_trees_read_back_equal((root, steps) in steps()) {
        verify(&build(&root, &steps), true);
    }

    #[test]
    fn bytes_do_not_depend_on_the_order_of_insertion((root, steps) in steps()) {
        let sample = build(&root, &steps);
        let other = Sample { tree: shuffled(&sample.tree), ..sample.clone() };
        prop_assert!(sample.image() == other.image());
    }
}
