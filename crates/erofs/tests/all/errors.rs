//! What trees and the writer refuse, and how they say it.

use layerpack_erofs::{
    BlockIndex, Error, FileData, FileLayout, Metadata, NodeId, NodeKind, Rdev, Tree, WriteOptions,
    write_image,
};

use crate::common::{Sample, meta};

fn tree_with(name: &[u8], metadata: Metadata, kind: NodeKind) -> Tree {
    let mut tree = Tree::new(meta(0o755));
    let dir = tree
        .insert(NodeId::ROOT, b"dir", meta(0o755), NodeKind::Directory)
        .unwrap();
    tree.insert(dir, name, metadata, kind).unwrap();
    tree
}

#[track_caller]
fn refused(tree: &Tree, data_blocks: u64, reason: &str) {
    let options = WriteOptions {
        data_blocks,
        ..WriteOptions::default()
    };
    let mut out = Vec::new();
    let error = write_image(tree, &options, &mut out).unwrap_err();
    assert!(
        matches!(&error, Error::Unrepresentable { path, .. } if path == b"dir/x"),
        "{error:?}"
    );
    assert!(error.to_string().contains(reason), "{error}");
    assert!(
        out.is_empty(),
        "nothing is written of a tree that is refused"
    );
}

#[test]
fn names_that_cannot_be() {
    let mut tree = Tree::new(meta(0o755));
    for name in [b"".as_slice(), b".", b"..", b"a/b", b"a\0b", &[b'n'; 256]] {
        let error = tree
            .insert(NodeId::ROOT, name, meta(0), NodeKind::Fifo)
            .unwrap_err();
        assert!(matches!(error, Error::InvalidName { .. }), "{error:?}");
    }
    assert!(tree.is_empty());
}

#[test]
fn structure_is_kept_sound() {
    let mut tree = Tree::new(meta(0o755));
    let dir = tree
        .insert(NodeId::ROOT, b"d", meta(0o755), NodeKind::Directory)
        .unwrap();
    let file = tree
        .insert(dir, b"f", meta(0), NodeKind::File(FileData::empty()))
        .unwrap();
    let exists = tree.insert(dir, b"f", meta(0), NodeKind::Fifo).unwrap_err();
    assert!(matches!(exists, Error::Exists { .. }));
    assert!(matches!(
        tree.link(dir, b"f", file),
        Err(Error::Exists { .. })
    ));
    assert!(matches!(
        tree.link(NodeId::ROOT, b"e", dir),
        Err(Error::DirectoryLink { .. })
    ));
    assert!(matches!(
        tree.link(NodeId::ROOT, b"e", NodeId::ROOT),
        Err(Error::DirectoryLink { .. })
    ));
    let below = tree.insert(file, b"x", meta(0), NodeKind::Fifo);
    assert!(matches!(below, Err(Error::NotADirectory { .. })));
    assert!(matches!(
        tree.remove(dir, b"g"),
        Err(Error::NotFound { .. })
    ));
    assert_eq!(tree.node(NodeId::ROOT).nlink(), 3);

    // A name outside keeps the inode when the directory goes.
    tree.link(NodeId::ROOT, b"kept", file).unwrap();
    assert_eq!(tree.node(file).nlink(), 2);
    tree.remove(NodeId::ROOT, b"d").unwrap();
    assert_eq!(
        (
            tree.node(file).nlink(),
            tree.node(NodeId::ROOT).nlink(),
            tree.len()
        ),
        (1, 2, 2)
    );
    assert!(matches!(
        tree.insert(dir, b"x", meta(0), NodeKind::Fifo),
        Err(Error::NotFound { .. })
    ));
    assert_eq!(tree.resolve(b"/./kept//"), Some(file));
    assert_eq!(tree.resolve(b"d/f"), None);
    tree.remove(NodeId::ROOT, b"kept").unwrap();
    assert!(matches!(
        tree.link(NodeId::ROOT, b"again", file),
        Err(Error::NotFound { .. })
    ));
    assert!(tree.is_empty());
    assert_eq!(tree.walk().count(), 1);
}

#[test]
fn kinds_that_were_changed_behind_the_trees_back() {
    let mut tree = tree_with(b"x", meta(0), NodeKind::Fifo);
    let dir = tree.resolve(b"dir").unwrap();
    tree.node_mut(dir).kind = NodeKind::Fifo;
    let written = write_image(&tree, &WriteOptions::default(), &mut Vec::new());
    assert!(matches!(written, Err(Error::NotADirectory { .. })));

    let mut tree = tree_with(b"x", meta(0), NodeKind::Fifo);
    let node = tree.resolve(b"dir/x").unwrap();
    tree.link(NodeId::ROOT, b"y", node).unwrap();
    tree.node_mut(node).kind = NodeKind::Directory;
    let written = write_image(&tree, &WriteOptions::default(), &mut Vec::new());
    assert!(matches!(written, Err(Error::DirectoryLink { .. })));
}

#[test]
fn values_without_room() {
    let fifo = |metadata: Metadata| tree_with(b"x", metadata, NodeKind::Fifo);
    refused(&fifo(meta(0o10_000)), 0, "mode 10000");
    let mut metadata = meta(0);
    metadata.mtime.nsec = 1_000_000_000;
    refused(&fifo(metadata), 0, "1000000000 nanoseconds");
    for (name, len, reason) in [
        ("user.v".to_owned(), 65_536, "at most 65535"),
        (format!("user.{}", "n".repeat(251)), 1, "at most 255"),
        ("user.".to_owned(), 1, "cannot hold"),
        ("system.posix_acl_accessory".to_owned(), 1, "cannot hold"),
        ("system.nfs4_acl".to_owned(), 1, "cannot hold"),
        ("lustre.lov".to_owned(), 1, "cannot hold"),
        ("plain".to_owned(), 1, "cannot hold"),
    ] {
        let mut metadata = meta(0);
        metadata.xattrs.insert(name.into_bytes(), vec![0; len]);
        refused(&fifo(metadata), 0, reason);
    }
    let mut metadata = meta(0);
    for number in 0..5 {
        metadata
            .xattrs
            .insert(format!("user.{number}").into_bytes(), vec![1; 60_000]);
    }
    refused(&fifo(metadata), 0, "at most 262148");
    let kind = |kind| tree_with(b"x", meta(0), kind);
    refused(&kind(NodeKind::Symlink(vec![])), 0, "1 to 4095");
    refused(&kind(NodeKind::Symlink(vec![b'l'; 4096])), 0, "1 to 4095");
    refused(&kind(NodeKind::Symlink(b"a\0b".to_vec())), 0, "NUL");
    refused(
        &kind(NodeKind::CharDevice(Rdev {
            major: 4096,
            minor: 0,
        })),
        0,
        "4095:1048575",
    );
    refused(
        &kind(NodeKind::BlockDevice(Rdev {
            major: 0,
            minor: 1 << 20,
        })),
        0,
        "4095:1048575",
    );
}

#[test]
fn files_without_room() {
    let start = BlockIndex::new(1).unwrap();
    let file = |size, layout| tree_with(b"x", meta(0), NodeKind::File(FileData { size, layout }));
    let chunked = |chunk_bits, chunks: &[Option<BlockIndex>]| FileLayout::Chunked {
        chunk_bits,
        chunks: chunks.to_vec(),
    };
    refused(&file(1, FileLayout::Empty), 1, "no layout");
    refused(
        &file(0, FileLayout::Contiguous { start }),
        9,
        "has a layout",
    );
    refused(
        &file(4097, FileLayout::Contiguous { start }),
        2,
        "pass the end",
    );
    refused(
        &file(1, FileLayout::Contiguous { start }),
        0,
        "pass the end",
    );
    refused(&file(1 << 63, FileLayout::Contiguous { start }), 9, "2^63");
    refused(&file(8193, chunked(12, &[None, None])), 9, "do not make");
    refused(&file(8192, chunked(11, &[None; 4])), 9, "possible");
    refused(&file(8192, chunked(44, &[None])), 9, "possible");
    refused(
        &file(8193, chunked(13, &[None, Some(start)])),
        1,
        "pass the end",
    );
    let sparse = file(8193, chunked(13, &[None, Some(start)]));
    let options = WriteOptions {
        data_blocks: 2,
        ..WriteOptions::default()
    };
    write_image(&sparse, &options, &mut Vec::new()).unwrap();
}

#[test]
fn too_large_a_data_file() {
    let sample = Sample::new(meta(0o755));
    for (blocks, fits) in [
        (u64::from(u32::MAX) - 2, true),
        (u64::from(u32::MAX) - 1, false),
        (u64::MAX, false),
    ] {
        let options = WriteOptions {
            data_blocks: blocks,
            ..sample.options()
        };
        let written = write_image(&sample.tree, &options, &mut Vec::new());
        match written {
            Ok(_) => assert!(fits),
            Err(error) => assert!(!fits && matches!(error, Error::TooLarge { .. }), "{error}"),
        }
    }
}

#[test]
fn outputs_that_fail() {
    struct Full(usize);
    impl std::io::Write for Full {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            let room = self.0.min(bytes.len());
            self.0 -= room;
            if room == 0 {
                Err(std::io::ErrorKind::StorageFull.into())
            } else {
                Ok(room)
            }
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let sample = crate::trees::limits(false);
    let size = sample.image().len();
    for room in [0, 1, 4096, 300_000, size - 1] {
        let written = write_image(&sample.tree, &sample.options(), &mut Full(room));
        assert!(matches!(written, Err(Error::Write { offset, .. }) if offset <= room as u64));
    }
    write_image(&sample.tree, &sample.options(), &mut Full(size)).unwrap();
}
