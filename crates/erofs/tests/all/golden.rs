//! Digests of small images. They change only with a decision to write other bytes: layers that
//! are rebuilt would get other identities.

use layerpack_erofs::{NodeId, NodeKind, Rdev, Timestamp, WriteOptions, write_image};

use crate::common::{Sample, meta};
use crate::trees::limits;

fn digest(sample: &Sample, options: &WriteOptions) -> String {
    let mut bytes = Vec::new();
    write_image(&sample.tree, options, &mut bytes).unwrap();
    blake3::hash(&bytes).to_hex().to_string()
}

fn mixed() -> Sample {
    let mut sample = Sample::new(meta(0o755));
    let dir = sample.dir(NodeId::ROOT, b"etc", meta(0o755));
    let id = sample.file(dir, b"hostname", b"layer\n");
    sample.tree.node_mut(id).metadata.mtime = Timestamp {
        sec: 1_700_000_000,
        nsec: 123_456_789,
    };
    sample.tree.link(NodeId::ROOT, b"hard", id).unwrap();
    sample.node(dir, b"link", NodeKind::Symlink(b"hostname".to_vec()));
    let null = NodeKind::CharDevice(Rdev { major: 1, minor: 3 });
    sample.node(NodeId::ROOT, b"null", null);
    let sparse = sample.store_sparse(1 << 20, &[(0, vec![1]), (1 << 19, vec![2])]);
    sample.node(NodeId::ROOT, b"sparse", NodeKind::File(sparse));
    for name in [b"a".as_slice(), b"b"] {
        let id = sample.dir(NodeId::ROOT, name, meta(0o700));
        let xattrs = &mut sample.tree.node_mut(id).metadata.xattrs;
        xattrs.insert(b"trusted.overlay.opaque".to_vec(), b"y".to_vec());
        xattrs.insert(b"user.name".to_vec(), name.to_vec());
    }
    sample
}

#[test]
fn an_empty_tree() {
    let sample = Sample::new(meta(0o755));
    assert_eq!(
        digest(&sample, &sample.options()),
        "b51e4ce65cf586c367dfb92f93331f56b8ac476e811730c376c2f75fb5b73c3d"
    );
}

#[test]
fn a_mixed_tree() {
    let sample = mixed();
    assert_eq!(
        digest(&sample, &sample.options()),
        "d9c8a0eb9d0254702becf61983d55b219d2ea58bbe5ba8e7acad04421bf8deb0"
    );
    let options = WriteOptions {
        uuid: Some([0x5a; 16]),
        volume_name: *b"layerpack-golden",
        build_time: Some(Timestamp { sec: -1, nsec: 1 }),
        ..sample.options()
    };
    assert_eq!(
        digest(&sample, &options),
        "9bb17aca0357e3fd45d5aee522c2b41bd4dd1dd677fe10f5e7934e7c83dab750"
    );
}

#[test]
fn the_tree_of_limits() {
    let sample = limits(false);
    assert_eq!(
        digest(&sample, &sample.options()),
        "357f9a27fe5353d08a68d4fab75257c79514162a619b9231da3869ba5dee5390"
    );
}

/// The superblock byte by byte, as the specification has it.
#[test]
fn superblock_bytes() {
    let sample = mixed();
    let (bytes, info) = sample.write();
    let field = |at: usize, len: usize| &bytes[1024 + at..1024 + at + len];
    assert!(bytes[..1024].iter().all(|byte| *byte == 0));
    assert_eq!(field(0, 4), [0xe2, 0xe1, 0xf5, 0xe0]);
    let mut block = bytes[1024..4096].to_vec();
    block[4..8].fill(0);
    assert_eq!(field(4, 4), (!crc32c::crc32c(&block)).to_le_bytes());
    assert_eq!(field(8, 4), 3_u32.to_le_bytes());
    assert_eq!(field(12, 2), [12, 0]);
    assert_eq!(
        field(14, 2),
        40_u16.to_le_bytes(),
        "the root follows the device table"
    );
    assert_eq!(field(16, 8), 8_u64.to_le_bytes());
    assert_eq!(field(36, 4), ((bytes.len() / 4096) as u32).to_le_bytes());
    assert_eq!(field(40, 4), [0; 4]);
    assert_eq!(field(48, 16), info.uuid);
    assert_eq!((info.uuid[6] >> 4, info.uuid[8] >> 6), (8, 2));
    assert_eq!(field(80, 4), 12_u32.to_le_bytes());
    assert_eq!(field(86, 4), [1, 0, 9, 0]);
    assert_eq!(field(90, 38), [0; 38]);
    assert_eq!(field(128, 9), crate::common::TAG);
    assert_eq!(field(192, 4), (sample.data_blocks as u32).to_le_bytes());
    assert_eq!(field(196, 4), ((bytes.len() / 4096) as u32).to_le_bytes());
}

#[test]
fn the_uuid_follows_the_content() {
    let sample = mixed();
    let (_, first) = sample.write();
    let mut other = sample.clone();
    let id = other.tree.resolve(b"etc/hostname").unwrap();
    other.tree.node_mut(id).metadata.mtime.nsec += 1;
    assert_ne!(other.write().1.uuid, first.uuid);
    assert_eq!(sample.write().1.uuid, first.uuid);
    let options = WriteOptions {
        uuid: Some([7; 16]),
        ..sample.options()
    };
    let given = write_image(&sample.tree, &options, &mut Vec::new()).unwrap();
    assert_eq!(given.uuid, [7; 16]);
}
