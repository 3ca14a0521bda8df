//! The tree of limits through the readers that need no kernel.

use layerpack_erofs::{BLOCK_SIZE, Image, NodeId, NodeKind, Timestamp, WriteOptions, write_image};

use crate::common::{Sample, meta};
use crate::roundtrip::verify;
use crate::trees::limits;

#[test]
fn limits_read_back_equal() {
    // 4 GiB files have too large a data device for a reader of slices.
    verify(&limits(true), false);
}

#[test]
fn small_images_are_one_block() {
    let mut sample = Sample::new(meta(0o755));
    assert_eq!(sample.image().len() as u64, BLOCK_SIZE);
    sample.file(NodeId::ROOT, b"file", b"hello");
    assert_eq!(sample.image().len() as u64, BLOCK_SIZE);
    verify(&sample, true);
}

#[test]
fn inodes_are_small_where_they_can_be() {
    let mut sample = Sample::new(meta(0o755));
    let time = Timestamp {
        sec: 1_700_000_000,
        nsec: 5,
    };
    for number in 0..10 {
        let id = sample.node(NodeId::ROOT, format!("{number}").as_bytes(), NodeKind::Fifo);
        sample.tree.node_mut(id).metadata.mtime = time;
    }
    let odd = sample.node(NodeId::ROOT, b"odd", NodeKind::Fifo);
    sample.tree.node_mut(odd).metadata.uid = 65_536;
    sample.tree.node_mut(odd).metadata.mtime = time;
    let bytes = sample.image();
    let image = Image::open(&bytes).unwrap();
    assert_eq!(image.superblock().epoch, time);
    let compact = |path: &[u8]| image.resolve(path).unwrap().unwrap().compact;
    assert!(compact(b"3"));
    assert!(!compact(b"odd"));
    assert!(!compact(b""), "the root has another time");

    let options = WriteOptions {
        build_time: Some(Timestamp::default()),
        ..sample.options()
    };
    let mut bytes = Vec::new();
    write_image(&sample.tree, &options, &mut bytes).unwrap();
    let image = Image::open(&bytes).unwrap();
    assert!(image.root().unwrap().compact);
    assert!(!image.resolve(b"3").unwrap().unwrap().compact);
}

#[test]
fn equal_xattrs_are_stored_once() {
    let value = vec![b'x'; 1000];
    let mut sample = Sample::new(meta(0o755));
    for number in 0..50 {
        let id = sample.node(NodeId::ROOT, format!("{number}").as_bytes(), NodeKind::Fifo);
        sample
            .tree
            .node_mut(id)
            .metadata
            .xattrs
            .insert(b"user.big".to_vec(), value.clone());
    }
    let bytes = sample.image();
    let copies = bytes
        .windows(value.len())
        .filter(|window| *window == value)
        .count();
    assert_eq!(copies, 1);
    verify(&sample, true);
}

#[test]
fn metadata_is_dense() {
    // Files as a real tree has them: what the image takes beyond inodes and names is little.
    let mut sample = Sample::new(meta(0o755));
    let mut payload = 0;
    for outer in 0..40 {
        let dir = sample.dir(
            NodeId::ROOT,
            format!("directory-{outer}").as_bytes(),
            meta(0o755),
        );
        for inner in 0..outer * 7 {
            let name = format!("file-number-{inner}.txt");
            let id = sample.file(dir, name.as_bytes(), b"x");
            sample.tree.node_mut(id).metadata.mtime.sec = i64::from(inner + 1);
            payload += 96 + 12 + name.len();
        }
    }
    let size = sample.image().len();
    assert!(size < payload + payload / 4, "{size} bytes for {payload}");
}
