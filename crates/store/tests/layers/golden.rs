//! Frozen bytes. A test here that fails means: stores in the field can no longer be read, or
//! identical content gets another identity. Change a format, not a golden value.

use layerpack_store::format::index::{IndexEntry, IndexPack, IndexSegment};
use layerpack_store::{
    Blob, Codec, Counts, Digest, Extent, Features, FrameLoc, Key, Kind, LayerMap, LayerName,
    LayerStore, Locator, Manifest, MapBuilder, PackLoc, ParentRef, Version, open_url,
};

use crate::support::{data_of, memory, noise, publish, read_all, reference, text};

fn hex_lines(bytes: &[u8]) -> Vec<String> {
    bytes.chunks(16).map(hex::encode).collect()
}

fn map() -> LayerMap {
    let mut builder = MapBuilder::new(0x3000);
    builder.push(Extent {
        data_offset: 0x1000,
        len: 0x1234,
        digest: Digest::from_bytes([0xaa; 32]),
    });
    builder.push(Extent {
        data_offset: 0,
        len: 1,
        digest: Digest::from_bytes([0xbb; 32]),
    });
    builder.implicit(b"usr").implicit(b"");
    builder.build().unwrap()
}

#[test]
fn map_bytes() {
    let bytes = map().to_bytes();
    assert_eq!(
        hex_lines(&bytes),
        [
            "4c504d4150000d0a0100000000000000",
            "00000000000000000030000000000000",
            "02000000000000000200000000000000",
            "07000000000000006b649a3e580352cb",
            "00000000000000000100000000000000",
            "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb",
            "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb",
            "00100000000000003412000000000000",
            "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
            "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
            "00000300757372",
        ]
    );
    assert_eq!(LayerMap::parse(&bytes).unwrap(), map());
}

#[test]
fn locator_bytes() {
    let packs = vec![PackLoc {
        id: Digest::from_bytes([1; 32]),
        size: 0x10000,
    }];
    let frames = vec![
        FrameLoc {
            pack: 0,
            codec: Codec::Raw,
            offset: 32,
            stored_len: 0x2000,
            raw_len: 0x2000,
            digest: Digest::from_bytes([2; 32]),
        },
        FrameLoc {
            pack: 0,
            codec: Codec::Zstd,
            offset: 0x2020,
            stored_len: 0x100,
            raw_len: 0x1234,
            digest: Digest::from_bytes([3; 32]),
        },
    ];
    let digest = Digest::from_bytes([0xcc; 32]);
    let locator = Locator::new(digest, &map(), packs, frames, vec![(0, 0x1fff), (1, 0)]).unwrap();
    let bytes = locator.to_bytes();
    assert_eq!(
        hex_lines(&bytes),
        [
            "4c504c4f43000d0a0100000000000000",
            "0000000000000000cccccccccccccccc",
            "cccccccccccccccccccccccccccccccc",
            "cccccccccccccccc0200000000000000",
            "0100000002000000088516e1e70a4d30",
            "01010101010101010101010101010101",
            "01010101010101010101010101010101",
            "00000100000000000000000000000000",
            "20000000000000000020000000200000",
            "02020202020202020202020202020202",
            "02020202020202020202020202020202",
            "00000000010000002020000000000000",
            "00010000341200000303030303030303",
            "03030303030303030303030303030303",
            "030303030303030300000000ff1f0000",
            "0100000000000000",
        ]
    );
    assert_eq!(Locator::parse(&bytes, &digest, &map()).unwrap(), locator);
}

/// Large tables are compressed: the header says so, packs stay as they are, frames and extents go by
/// planes. Beyond zstd's own bytes nothing is free.
#[test]
fn large_locators() {
    let count = 4000_u32;
    let mut builder = MapBuilder::new(u64::from(count) * 4096);
    let extents: Vec<(u32, u32)> = (0..count).map(|i| (i / 4, i % 4 * 4096)).collect();
    for i in 0..count {
        builder.push(Extent {
            data_offset: u64::from(i) * 4096,
            len: 4096,
            digest: Digest::of(&i.to_le_bytes()),
        });
    }
    let map = builder.build().unwrap();
    let packs = vec![PackLoc {
        id: Digest::from_bytes([1; 32]),
        size: 1 << 30,
    }];
    let frames: Vec<FrameLoc> = (0..count / 4)
        .map(|i| FrameLoc {
            pack: 0,
            codec: Codec::Zstd,
            offset: 32 + u64::from(i) * 9000,
            stored_len: 9000,
            raw_len: 16384,
            digest: Digest::of(&(i + 1_000_000).to_le_bytes()),
        })
        .collect();
    let digest = Digest::of(b"m");
    let locator = Locator::new(digest, &map, packs, frames.clone(), extents.clone()).unwrap();
    let bytes = locator.to_bytes();
    assert!(bytes.len() < 1000 * 40, "{}", bytes.len());
    assert_eq!(bytes[20..24], [1, 0, 0, 0]);
    assert_eq!(bytes[80..112], [1; 32]);
    assert_eq!(Locator::parse(&bytes, &digest, &map).unwrap(), locator);
    let mut tables = Vec::with_capacity(1000 * 56 + 4000 * 8);
    zstd_safe::decompress(&mut tables, &bytes[120..]).unwrap();
    let mut expected = Vec::new();
    let planes = |bytes: &[Vec<u8>], most: usize, out: &mut Vec<u8>| {
        for plane in 0..most {
            out.extend(bytes.iter().map(|record| record[plane]));
        }
        bytes.iter().for_each(|record| out.extend(&record[most..]));
    };
    let wire: Vec<Vec<u8>> = frames
        .iter()
        .map(|f| {
            let mut record = [f.pack.to_le_bytes(), 1_u32.to_le_bytes()].concat();
            record.extend(f.offset.to_le_bytes());
            record.extend(f.stored_len.to_le_bytes());
            record.extend(f.raw_len.to_le_bytes());
            record.extend(f.digest.as_bytes());
            record
        })
        .collect();
    planes(&wire, 24, &mut expected);
    let wire: Vec<Vec<u8>> = extents
        .iter()
        .map(|(frame, offset)| [frame.to_le_bytes(), offset.to_le_bytes()].concat())
        .collect();
    planes(&wire, 8, &mut expected);
    assert!(tables == expected, "{} bytes", tables.len());

    // Damage, cuts and wrong counts are refused, with right checksums too.
    let sealed = |mut bytes: Vec<u8>| {
        let body = crc32c::crc32c(&bytes[80..]);
        bytes[72..76].copy_from_slice(&body.to_le_bytes());
        let head = crc32c::crc32c(&bytes[..76]);
        bytes[76..80].copy_from_slice(&head.to_le_bytes());
        Locator::parse(&bytes, &digest, &map)
    };
    assert_eq!(sealed(bytes.clone()).unwrap(), locator);
    for cut in [80, 119, 120, 121, bytes.len() - 1] {
        assert!(sealed(bytes[..cut].to_vec()).is_err(), "{cut}");
    }
    assert!(sealed([&bytes[..], &[0]].concat()).is_err());
    for (at, value) in [
        (20, 3),
        (20, 0),
        (56, 0xff),
        (63, 0x7f),
        (64, 2),
        (68, 0),
        (70, 1),
    ] {
        let mut bad = bytes.clone();
        bad[at] = value;
        assert!(sealed(bad).is_err(), "{at}");
    }
    for at in (120..bytes.len()).step_by(97) {
        let mut bad = bytes.clone();
        bad[at] ^= 0x20;
        assert!(Locator::parse(&bad, &digest, &map).is_err(), "{at}");
        let _ = sealed(bad); // may be sound; must not panic
    }
}

#[test]
fn index_bytes() {
    let packs = vec![IndexPack {
        id: Digest::from_bytes([1; 32]),
        size: 0x10000,
        table_offset: 0x8000,
    }];
    let entries = vec![
        IndexEntry {
            digest: Digest::from_bytes([9; 32]),
            pack: 0,
            chunk: 1,
        },
        IndexEntry {
            digest: Digest::from_bytes([8; 32]),
            pack: 0,
            chunk: 0,
        },
    ];
    let segment = IndexSegment::new(packs, entries).unwrap();
    let bytes = segment.to_bytes().unwrap();
    assert_eq!(
        hex_lines(&bytes),
        [
            "4c50494458000d0a0100000000000000",
            "00000000000000000200000000000000",
            "010000000000000077f342e6afb976e1",
            "01010101010101010101010101010101",
            "01010101010101010101010101010101",
            "00000100000000000080000000000000",
            "08080808080808080808080808080808",
            "08080808080808080808080808080808",
            "00000000000000000909090909090909",
            "09090909090909090909090909090909",
            "09090909090909090000000001000000",
        ]
    );
    assert_eq!(IndexSegment::parse(&bytes).unwrap(), segment);
}

#[test]
fn manifest_bytes() {
    let manifest = Manifest {
        format: 1,
        features: Features::default(),
        kind: Kind::Diff,
        name: LayerName::new("a/b").unwrap(),
        version: Version::new("v1").unwrap(),
        platform: "linux/amd64".to_owned(),
        parents: vec![
            ParentRef {
                reference: Some("base/debian:12".parse().unwrap()),
                manifest: Digest::from_bytes([1; 32]),
            },
            ParentRef {
                reference: None,
                manifest: Digest::from_bytes([2; 32]),
            },
        ],
        meta: Blob {
            digest: Digest::from_bytes([3; 32]),
            size: 4096,
        },
        map: Blob {
            digest: Digest::from_bytes([4; 32]),
            size: 64,
        },
        data_size: 8192,
        counts: Counts {
            files: 1,
            directories: 2,
            symlinks: 3,
            others: 4,
            bytes: 5,
        },
        parameters: [(
            "chunker".to_owned(),
            "gear64-v1:16384:65536:262144:65536".to_owned(),
        )]
        .into(),
        labels: [
            ("b".to_owned(), "é\n".to_owned()),
            ("a".to_owned(), String::new()),
        ]
        .into(),
        annotations: Default::default(),
    };
    let h = |byte: &str| byte.repeat(32);
    let expected = format!(
        concat!(
            r#"{{"format":1,"features":{{"compat":[],"ro_compat":[],"incompat":[]}},"kind":"diff","name":"a/b","#,
            r#""version":"v1","platform":"linux/amd64","parents":[{{"reference":"base/debian:12","manifest":"b3:{}"}},"#,
            r#"{{"manifest":"b3:{}"}}],"meta":{{"digest":"b3:{}","size":4096}},"map":{{"digest":"b3:{}","size":64}},"#,
            r#""data_size":8192,"counts":{{"files":1,"directories":2,"symlinks":3,"others":4,"bytes":5}},"#,
            r#""parameters":{{"chunker":"gear64-v1:16384:65536:262144:65536"}},"labels":{{"a":"","b":"é\n"}},"#,
            r#""annotations":{{}}}}"#
        ),
        h("01"),
        h("02"),
        h("03"),
        h("04")
    );
    let bytes = manifest.to_bytes().unwrap();
    assert_eq!(String::from_utf8(bytes.clone()).unwrap(), expected);
    assert_eq!(Manifest::from_bytes(&bytes).unwrap(), manifest);
}

/// A whole store of bytes that do not compress (so that zstd's version does not matter): header,
/// one gathered frame, one of its own, table, footer.
#[test]
fn pack_bytes() {
    let (blobs, store) = memory();
    let files = [noise(1, 40), noise(2, 24), noise(3, 65_536)];
    publish(&store, "base/x:1", &files).unwrap();
    let packs = blobs.list("packs/").unwrap();
    let pack = blobs.get(&packs[0].key, u64::MAX).unwrap().unwrap();
    assert_eq!(packs[0].key.digest(), Some(Digest::of(&pack)));
    // The large chunk is complete first, the gathered ones follow at the end.
    let mut expected =
        hex::decode("4c505041434b0d0a01000000000000000000000000000000000000001831b339").unwrap();
    expected.extend_from_slice(&files[2]);
    expected.extend_from_slice(&files[0]);
    expected.extend_from_slice(&files[1]);
    let table_offset = expected.len() as u64;
    let mut frame = |offset: u64, raw: &[u8], chunks: u32| {
        expected.extend_from_slice(&offset.to_le_bytes());
        expected.extend_from_slice(&(raw.len() as u32).to_le_bytes());
        expected.extend_from_slice(&(raw.len() as u32).to_le_bytes());
        expected.extend_from_slice(&0_u32.to_le_bytes());
        expected.extend_from_slice(&chunks.to_le_bytes());
        expected.extend_from_slice(Digest::of(raw).as_bytes());
    };
    frame(32, &files[2], 1);
    frame(32 + 65_536, &[&files[0][..], &files[1]].concat(), 2);
    for (raw, offset) in [(&files[2], 0_u32), (&files[0], 0), (&files[1], 40)] {
        expected.extend_from_slice(Digest::of(raw).as_bytes());
        expected.extend_from_slice(&offset.to_le_bytes());
        expected.extend_from_slice(&(raw.len() as u32).to_le_bytes());
    }
    let table = expected[table_offset as usize..].to_vec();
    assert_eq!(table.len(), 2 * 56 + 3 * 40);
    let mut footer = b"LPPACKF\n\x01\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0".to_vec();
    footer.extend_from_slice(&table_offset.to_le_bytes());
    footer.extend_from_slice(&(table.len() as u64).to_le_bytes());
    footer.extend_from_slice(&2_u32.to_le_bytes());
    footer.extend_from_slice(&3_u32.to_le_bytes());
    footer.extend_from_slice(Digest::of(&table).as_bytes());
    footer.extend_from_slice(&[0; 12]);
    footer.extend_from_slice(&crc32c::crc32c(&footer).to_le_bytes());
    expected.extend_from_slice(&footer);
    assert!(pack == expected);
    assert_eq!(
        packs[0].key.digest().unwrap().hex(),
        "493ce737585f389750e7d8b5e14f0f4eb867cccd343b88505692457eac61f508"
    );
    assert_eq!(read_all(&store, "base/x:1").unwrap(), data_of(&files));
}

/// The published identity of fixed content.
#[test]
fn identities() {
    let (_, store) = memory();
    let published = publish(
        &store,
        "base/x:1",
        &[noise(1, 40), noise(2, 300_000), Vec::new()],
    )
    .unwrap();
    assert_eq!(
        published.layer_id.to_string(),
        "b3:f697fb6d1c3e8a9a631a375a869fffb82557e6fdfe4d8e9fa320ce828980169a"
    );
    assert_eq!(
        published.digest.to_string(),
        "b3:f87db6bcee028dab694b1cf23972c0e899376b6d185e1100c81611d63cbedd01"
    );
}

fn golden_files() -> Vec<Vec<u8>> {
    vec![
        text(1, 5000),
        noise(2, 300),
        Vec::new(),
        text(3, 150_000),
        text(1, 5000),
    ]
}

/// A store written by the first release (`golden/v1`): read for ever.
#[test]
fn the_first_release_s_store_is_readable() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/v1");
    let store = LayerStore::new(open_url(root).unwrap());
    assert_eq!(
        read_all(&store, "base/golden:1").unwrap(),
        data_of(&golden_files())
    );
    assert!(store.verify(&reference("base/golden:1")).unwrap().is_ok());
    assert!(store.verify_index().unwrap().is_empty());
}

/// A reference as it is written since it has a copy of its manifest. The one in `golden/v1` has none.
#[test]
fn reference_bytes() {
    let (blobs, store) = memory();
    publish(&store, "base/golden:1", &golden_files()).unwrap();
    let key = Key::reference(&reference("base/golden:1"));
    let bytes = blobs.get(&key, u64::MAX).unwrap().unwrap();
    assert_eq!(
        String::from_utf8(bytes.clone()).unwrap(),
        concat!(
            r#"{"format":1,"manifest":"b3:e7ea04330f728d5efa9725ee0b29a96a85484508c0f99aaacd1cd86eafe61"#,
            r#"8ae","text":"{\"format\":1,\"features\":{\"compat\":[],\"ro_compat\":[],\"incompat\":[]}"#,
            r#",\"kind\":\"base\",\"name\":\"golden\",\"version\":\"1\",\"platform\":\"\",\"parents\":["#,
            r#"],\"meta\":{\"digest\":\"b3:aee7ce028aef34253f968fe860380f02b0eec9cbca719324c2a4782d276b"#,
            r#"31ec\",\"size\":3000},\"map\":{\"digest\":\"b3:13055dc3ab95c22b8d68109fdf4acb4d846330126"#,
            r#"d237afd1d20d1c3a56af800\",\"size\":315},\"data_size\":172032,\"counts\":{\"files\":0,\"d"#,
            r#"irectories\":0,\"symlinks\":0,\"others\":0,\"bytes\":0},\"parameters\":{\"chunker\":\"ge"#,
            r#"ar64-v1:16384:65536:262144:65536\"},\"labels\":{},\"annotations\":{}}"}"#,
        )
    );
    // Both are the same version.
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/v1");
    let old = LayerStore::new(open_url(root).unwrap());
    let first = old.blobs().get(&key, u64::MAX).unwrap().unwrap();
    assert!(bytes.starts_with(&first[..first.len() - 1]));
    let name = reference("base/golden:1");
    assert_eq!(old.load(&name).unwrap(), store.load(&name).unwrap());
}

/// How `golden/v1` was made. Run by hand, and only for the store of a new format version.
#[test]
#[ignore = "writes files for committing"]
fn write_golden_store() {
    let root = std::env::temp_dir().join("layerpack-golden-store");
    let store = LayerStore::new(open_url(root.to_str().unwrap()).unwrap());
    publish(&store, "base/golden:1", &golden_files()).unwrap();
}

#[test]
fn profile_bytes() {
    use layerpack_store::profile::{Profile, ProfileEntry, ProfileLayer};
    let profile = Profile {
        name: "run".to_owned(),
        layers: vec![ProfileLayer {
            layer: layerpack_store::LayerId::from_digest(Digest::from_bytes([1; 32])),
            manifest: Digest::from_bytes([2; 32]),
        }],
        recordings: 3,
        entries: vec![ProfileEntry {
            layer: 0,
            extent: 0x11,
            len: 0x2222,
            count: 2,
            rank: 0x44,
            time_ms: 0x555,
        }],
    };
    let bytes = profile.to_bytes().unwrap();
    assert_eq!(
        hex_lines(&bytes),
        [
            "4c5050524f460d0a0100000000000000",
            "00000000000000000100000003000000",
            "01000000000000000300000000000000",
            "ff46a600a291513f0101010101010101",
            "01010101010101010101010101010101",
            "01010101010101010202020202020202",
            "02020202020202020202020202020202",
            "02020202020202020000000011000000",
            "22220000020000004400000055050000",
            "72756e",
        ]
    );
    assert_eq!(Profile::parse(&bytes).unwrap(), profile);
}
