//! Bytes that no writer of ours made: errors, never panics, never large allocations.

use layerpack_store::format::index::{IndexEntry, IndexPack, IndexSegment};
use layerpack_store::format::pack::{PackFooter, PackTable, check_header};
use layerpack_store::{
    Blob, Codec, Counts, Digest, Extent, Features, FrameLoc, LayerMap, LayerName, Locator,
    Manifest, MapBuilder, PackLoc, Version,
};

use crate::support::noise;

fn extent(data_offset: u64, len: u32) -> Extent {
    Extent {
        data_offset,
        len,
        digest: Digest::of(b"x"),
    }
}

fn small_map() -> LayerMap {
    let mut builder = MapBuilder::new(8192);
    builder
        .push(extent(0, 100))
        .push(extent(4096, 50))
        .implicit(b"")
        .implicit(b"a/b");
    builder.build().unwrap()
}

fn frame(pack: u32, offset: u64, stored_len: u32, raw_len: u32) -> FrameLoc {
    FrameLoc {
        pack,
        codec: Codec::Zstd,
        offset,
        stored_len,
        raw_len,
        digest: Digest::of(b"f"),
    }
}

fn small_locator() -> Locator {
    let pack = PackLoc {
        id: Digest::of(b"p"),
        size: 1000,
    };
    Locator::new(
        Digest::of(b"m"),
        &small_map(),
        vec![pack],
        vec![frame(0, 32, 100, 150)],
        vec![(0, 0), (0, 100)],
    )
    .unwrap()
}

/// Fixes both checksums of a binary object whose header has `header` bytes, so that the checks
/// behind them are reached.
fn reseal(bytes: &mut [u8], header: usize) {
    if bytes.len() < header {
        return;
    }
    let body = crc32c::crc32c(&bytes[header..]);
    bytes[header - 8..header - 4].copy_from_slice(&body.to_le_bytes());
    let head = crc32c::crc32c(&bytes[..header - 4]);
    bytes[header - 4..header].copy_from_slice(&head.to_le_bytes());
}

/// Mutations of good bytes, with wrong and with right checksums.
fn torture(good: &[u8], header: usize, parse: &dyn Fn(&[u8]) -> bool) {
    assert!(parse(good));
    for len in 0..good.len() {
        assert!(!parse(&good[..len]), "{len} bytes were accepted");
        let mut cut = good[..len].to_vec();
        reseal(&mut cut, header);
        assert!(
            !parse(&cut),
            "{len} bytes with right checksums were accepted"
        );
    }
    let mut longer = good.to_vec();
    longer.push(0);
    reseal(&mut longer, header);
    assert!(!parse(&longer), "trailing bytes were accepted");
    for i in 0..good.len() {
        for value in [0, 1, 0x7f, 0x80, 0xff] {
            let mut bad = good.to_vec();
            if bad[i] == value {
                continue;
            }
            bad[i] = value;
            assert!(!parse(&bad), "byte {i} as {value:#x} went unnoticed");
            reseal(&mut bad, header);
            parse(&bad); // may be sound; must not panic
        }
    }
    let random = noise(9, 20_000);
    for i in 0..2000 {
        let mut bad = good.to_vec();
        for k in 0..3 {
            let at = usize::from(u16::from_le_bytes([
                random[i * 9 + k * 3],
                random[i * 9 + k * 3 + 1],
            ])) % bad.len();
            bad[at] = random[i * 9 + k * 3 + 2];
        }
        reseal(&mut bad, header);
        parse(&bad);
    }
}

#[test]
fn maps() {
    torture(&small_map().to_bytes(), 64, &|b| LayerMap::parse(b).is_ok());
}

#[test]
fn locators() {
    let map = small_map();
    torture(&small_locator().to_bytes(), 80, &|b| {
        Locator::parse(b, &Digest::of(b"m"), &map).is_ok()
    });
}

#[test]
fn index_segments() {
    let packs = vec![IndexPack {
        id: Digest::of(b"p"),
        size: 1000,
        table_offset: 500,
    }];
    let entries = (0..3)
        .map(|i| IndexEntry {
            digest: Digest::of(&[i]),
            pack: 0,
            chunk: i.into(),
        })
        .collect();
    let bytes = IndexSegment::new(packs, entries)
        .unwrap()
        .to_bytes()
        .unwrap();
    torture(&bytes, 48, &|b| IndexSegment::parse(b).is_ok());
}

#[test]
fn packs() {
    for len in [0, 31, 32, 96, 200] {
        let bytes = noise(len, len as usize);
        assert!(check_header(&bytes).is_err());
        assert!(PackFooter::parse(&bytes, len).is_err());
    }
    // A real pack, every byte of table and footer.
    let (blobs, store) = crate::support::memory();
    crate::support::publish(&store, "base/x:1", &[noise(1, 300), noise(2, 70_000)]).unwrap();
    let pack = blobs
        .get(&blobs.list("packs/").unwrap()[0].key, u64::MAX)
        .unwrap()
        .unwrap();
    let size = pack.len() as u64;
    let parse = |pack: &[u8]| -> Option<PackTable> {
        let footer = PackFooter::parse(&pack[pack.len() - 96..], size).ok()?;
        let start = usize::try_from(footer.table_offset).ok()?;
        PackTable::parse(pack.get(start..pack.len() - 96)?, &footer).ok()
    };
    let table = parse(&pack).unwrap();
    assert_eq!((table.frames.len(), table.chunks.len()), (2, 2));
    let tail = pack.len() - 96 - 2 * 56 - 2 * 40;
    for i in tail..pack.len() {
        let mut bad = pack.clone();
        bad[i] ^= 0x81;
        assert_eq!(parse(&bad), None, "byte {i}");
        // With a right checksum and table digest the rest must still hold or be refused.
        let table_digest = Digest::of(&bad[tail..pack.len() - 96]);
        bad[pack.len() - 48..pack.len() - 16].copy_from_slice(table_digest.as_bytes());
        let crc = crc32c::crc32c(&bad[pack.len() - 96..pack.len() - 4]);
        bad[pack.len() - 4..].copy_from_slice(&crc.to_le_bytes());
        parse(&bad);
    }
}

#[test]
fn map_invariants() {
    let build = |size: u64, extents: &[(u64, u32)], paths: &[&[u8]]| {
        let mut builder = MapBuilder::new(size);
        for &(offset, len) in extents {
            builder.push(extent(offset, len));
        }
        for path in paths {
            builder.implicit(path);
        }
        builder.build()
    };
    assert!(
        build(
            4096,
            &[(96, 4000), (0, 96)],
            &[b"b", b"a", b"a", b"", b"a/.b/..c"]
        )
        .is_ok()
    );
    assert!(build(1 << 44, &[], &[]).is_ok());
    let long = [b'x'; 256];
    for (size, extents, paths) in [
        (4095, &[][..], &[][..]),
        ((1 << 44) + 4096, &[], &[]),
        (u64::MAX, &[], &[]),
        (4096, &[(0, 0)], &[]),
        (4096, &[(0, 4097)], &[]),
        (4096, &[(u64::MAX, 2)], &[]),
        (4096, &[(0, 100), (99, 5)], &[]),
        (4096, &[(0, 100), (0, 100)], &[]),
        (8 << 20, &[(0, (1 << 20) + 1)], &[]),
        (0, &[], &[&b"/a"[..]]),
        (0, &[], &[b"a/"]),
        (0, &[], &[b"a//b"]),
        (0, &[], &[b"."]),
        (0, &[], &[b"a/../b"]),
        (0, &[], &[b"a\0"]),
        (0, &[], &[&long]),
    ] {
        assert!(
            build(size, extents, paths).is_err(),
            "{size} {extents:?} {paths:?}"
        );
    }
}

#[test]
fn locator_invariants() {
    let map = small_map();
    let pack = |size| PackLoc {
        id: Digest::of(b"p"),
        size,
    };
    let sound = (
        vec![pack(1000)],
        vec![frame(0, 32, 100, 150)],
        vec![(0, 0), (0, 100)],
    );
    let try_it = |(packs, frames, extents): (Vec<PackLoc>, Vec<FrameLoc>, Vec<(u32, u32)>)| {
        Locator::new(Digest::of(b"m"), &map, packs, frames, extents).is_ok()
    };
    assert!(try_it(sound.clone()));
    let raw = FrameLoc {
        codec: Codec::Raw,
        ..frame(0, 32, 100, 150)
    };
    for bad in [
        (vec![], sound.1.clone(), sound.2.clone()),
        (vec![pack(u64::MAX)], sound.1.clone(), sound.2.clone()),
        (vec![pack(131)], sound.1.clone(), sound.2.clone()),
        (
            sound.0.clone(),
            vec![frame(1, 32, 100, 150)],
            sound.2.clone(),
        ),
        (
            sound.0.clone(),
            vec![frame(0, 31, 100, 150)],
            sound.2.clone(),
        ),
        (
            sound.0.clone(),
            vec![frame(0, u64::MAX, 100, 150)],
            sound.2.clone(),
        ),
        (sound.0.clone(), vec![frame(0, 32, 0, 150)], sound.2.clone()),
        (
            sound.0.clone(),
            vec![frame(0, 32, 100, 149)],
            sound.2.clone(),
        ),
        (
            vec![pack(1 << 30)],
            vec![frame(0, 32, 100, (4 << 20) + 1)],
            sound.2.clone(),
        ),
        (
            vec![pack(1 << 30)],
            vec![frame(0, 32, (4 << 20) + 1, 150)],
            sound.2.clone(),
        ),
        (sound.0.clone(), vec![raw], sound.2.clone()),
        (sound.0.clone(), sound.1.clone(), vec![(0, 0)]),
        (sound.0.clone(), sound.1.clone(), vec![(0, 0), (1, 0)]),
        (
            sound.0.clone(),
            sound.1.clone(),
            vec![(0, u32::MAX), (0, 0)],
        ),
    ] {
        assert!(!try_it(bad.clone()), "{bad:?}");
    }
}

#[test]
fn manifests() {
    let manifest = Manifest {
        format: 1,
        features: Features::default(),
        kind: layerpack_store::Kind::Base,
        name: LayerName::new("x").unwrap(),
        version: Version::new("1").unwrap(),
        platform: String::new(),
        parents: Vec::new(),
        meta: Blob {
            digest: Digest::of(b"meta"),
            size: 4,
        },
        map: Blob {
            digest: Digest::of(b"map"),
            size: 3,
        },
        data_size: 4096,
        counts: Counts::default(),
        parameters: [("k".to_owned(), "v".to_owned())].into(),
        labels: Default::default(),
        annotations: Default::default(),
    };
    let good = manifest.to_bytes().unwrap();
    assert_eq!(Manifest::from_bytes(&good).unwrap(), manifest);
    let text = String::from_utf8(good.clone()).unwrap();
    let swap = |from: &str, to: &str| {
        assert!(text.contains(from), "{from}");
        text.replacen(from, to, 1)
    };
    for (bad, newer) in [
        (format!(" {text}"), false),
        (format!("{text}\n"), false),
        (swap(r#""format":1"#, r#""format":2"#), true),
        (swap(r#""incompat":[]"#, r#""incompat":["x"]"#), true),
        (swap(r#""compat":[]"#, r#""compat":["b","a"]"#), false),
        (swap(r#""labels":{}"#, r#""labels":{"":""}"#), false),
        (swap(r#""labels":{}"#, r#""labels":{"b":"","a":""}"#), false),
        (
            swap(r#""labels":{}"#, r#""labels":{"a":"1","a":"2"}"#),
            false,
        ),
        (swap(r#""labels":{},"#, ""), false),
        (swap(r#""kind":"base""#, r#""kind":"Base""#), false),
        (swap(r#""name":"x""#, r#""name":"../x""#), false),
        (swap(r#""data_size":4096"#, r#""data_size":4097"#), false),
        (swap(r#""data_size":4096"#, r#""data_size":-1"#), false),
        (swap(r#""size":4"#, r#""size":4294967297"#), false),
        (swap(r#""platform":"""#, r#""platform":"","more":1"#), false),
        (swap("b3:", "B3:"), false),
        (String::new(), false),
        ("[".repeat(100_000), false),
    ] {
        match Manifest::from_bytes(bad.as_bytes()) {
            Err(error) => assert_eq!(error.newer, newer, "{bad}: {error}"),
            Ok(_) => panic!("accepted: {bad}"),
        }
    }
    assert!(Manifest::from_bytes(&vec![b' '; (4 << 20) + 1]).is_err());
    // A compatible feature of the future is no obstacle.
    let compatible = swap(r#""compat":[]"#, r#""compat":["later"]"#);
    assert!(Manifest::from_bytes(compatible.as_bytes()).is_ok());
    for len in 0..good.len() {
        assert!(Manifest::from_bytes(&good[..len]).is_err());
    }
}
