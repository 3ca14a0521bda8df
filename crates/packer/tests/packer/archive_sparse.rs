//! Sparse files in every form, and zeros that are none.

use layerpack_fixtures::tar::TarWriter;

use crate::support::{Packed, base, refused};

const MIB: u64 = 1 << 20;

/// Pieces that start and end anywhere, more than old GNU's first header and extension hold.
type Sparse = (Vec<(u64, u64)>, u64, Vec<u8>, Vec<u8>);

fn pieces() -> Sparse {
    let mut map = Vec::new();
    let mut stored = Vec::new();
    let size = 40 * MIB + 777;
    let mut content = vec![0; size as usize];
    let mut at = 3;
    for index in 0..60u64 {
        let len = 1 + index * 331 % 20_000;
        let data: Vec<u8> = (0..len).map(|byte| (byte % 250 + 1) as u8).collect();
        content[at as usize..(at + len) as usize].copy_from_slice(&data);
        stored.extend_from_slice(&data);
        map.push((at, len));
        at += len + 512 * (index * 7919 % 1024);
    }
    map.push((size, 0));
    (map, size, stored, content)
}

#[test]
fn every_form_is_the_same_file() {
    let (map, size, stored, content) = pieces();
    type Form = fn(&mut TarWriter, &[(u64, u64)], u64, &[u8]);
    let forms: [(&str, Form); 5] = [
        ("gnu", |tar, map, size, data| {
            tar.sparse_gnu("dir/f", map, size, data);
        }),
        ("0.0", |tar, map, size, data| {
            tar.sparse_pax_0_0("dir/f", map, size, data);
        }),
        ("0.1", |tar, map, size, data| {
            tar.sparse_pax_0_1("dir/f", map, size, data);
        }),
        ("1.0", |tar, map, size, data| {
            tar.sparse_pax_1_0("dir/f", map, size, data);
        }),
        ("dense", |tar, map, size, data| {
            let mut content = vec![0; size as usize];
            let mut at = 0;
            for (offset, len) in map {
                content[*offset as usize..(offset + len) as usize]
                    .copy_from_slice(&data[at..at + *len as usize]);
                at += *len as usize;
            }
            tar.file("dir/f", content);
        }),
    ];
    let mut digests = Vec::new();
    for (name, form) in forms {
        let mut tar = TarWriter::new();
        form(&mut tar, &map, size, &stored);
        tar.file("after", "still found");
        let packed = base(tar.finish());
        let tree = packed.tree();
        assert_eq!(tree.paths(), ["", "after", "dir", "dir/f"], "{name}");
        assert_eq!(tree.get("dir/f").size, size, "{name}");
        assert!(tree.get("dir/f").content() == content, "{name}");
        // Blocks that are touched, and short runs of zeros between them.
        assert!(
            tree.get("dir/f").stored() < stored.len() as u64 + 61 * (8192 + 65_536),
            "{name}"
        );
        assert_eq!(tree.get("after").content(), b"still found", "{name}");
        digests.push(packed.digest);
    }
    digests.dedup();
    assert_eq!(digests.len(), 1);
}

fn address_space(packed: &Packed) -> u64 {
    packed.map.data_size()
}

#[test]
fn holes_cost_next_to_nothing() {
    let size = 8 << 40;
    let mut tar = TarWriter::new();
    tar.sparse_pax_1_0("vast", &[(4 << 40, 4)], size, b"here");
    tar.sparse_pax_1_0("nothing", &[], size, b"");
    tar.sparse_gnu("head", &[(0, 4), (1 << 30, 0)], 1 << 30, b"head");
    let packed = base(tar.finish());
    let tree = packed.tree();
    assert_eq!(tree.get("vast").size, size);
    assert_eq!(tree.get("vast").pieces.len(), 1);
    assert_eq!(tree.get("vast").pieces[0].0, 4 << 40);
    assert!(tree.get("vast").pieces[0].1.starts_with(b"here"));
    assert_eq!(
        (tree.get("nothing").size, tree.get("nothing").stored()),
        (size, 0)
    );
    assert_eq!(tree.get("head").size, 1 << 30);
    assert!(packed.meta.len() < 2 << 20, "{}", packed.meta.len());
    assert!(
        address_space(&packed) < 4 << 30,
        "{}",
        address_space(&packed)
    );
    assert!(packed.map.covered() < 3 * 8192);
}

#[test]
fn a_layer_of_holes_alone() {
    let mut tar = TarWriter::new();
    tar.sparse_pax_0_1("f", &[(MIB, 0)], MIB, b"");
    let packed = base(tar.finish());
    assert_eq!(packed.map.extents().len(), 0);
    assert_eq!(packed.tree().get("f").content(), vec![0; MIB as usize]);
}

#[test]
fn sizes_around_the_borders() {
    let mut tar = TarWriter::new();
    let mut expected = Vec::new();
    for size in [
        1usize,
        2,
        4095,
        4096,
        4097,
        65_535,
        65_536,
        65_537,
        69_632,
        262_143,
        262_145,
        1 << 20,
    ] {
        for fill in [0u8, 1] {
            let name = format!("{size}-{fill}");
            let mut data = vec![fill; size];
            // A file of zeros but for its last byte, and one all alike.
            if fill == 0 && size % 2 == 1 {
                data[size - 1] = 9;
            }
            tar.file(&name, &data);
            expected.push((name, data));
        }
    }
    let tree = base(tar.finish()).tree();
    for (name, data) in expected {
        assert!(tree.get(&name).content() == data, "{name}");
    }
}

#[test]
fn maps_that_cannot_be_are_refused() {
    type Form = fn(&mut TarWriter, &[(u64, u64)], u64, &[u8]);
    let forms: [Form; 4] = [
        |tar, map, size, data| {
            tar.sparse_gnu("named", map, size, data);
        },
        |tar, map, size, data| {
            tar.sparse_pax_0_0("named", map, size, data);
        },
        |tar, map, size, data| {
            tar.sparse_pax_0_1("named", map, size, data);
        },
        |tar, map, size, data| {
            tar.sparse_pax_1_0("named", map, size, data);
        },
    ];
    for form in forms {
        for (map, size, stored) in [
            (vec![(0, 10)], 5, 10),             // beyond the file
            (vec![(0, 10), (5, 10)], 100, 20),  // overlap
            (vec![(50, 10), (0, 10)], 100, 20), // falling
            (vec![(0, 10)], 100, 9),            // less data than pieces
            (vec![(0, 10)], 100, 11),           // more
            (vec![(u64::MAX >> 2, 10)], 100, 10),
        ] {
            let mut tar = TarWriter::new();
            form(&mut tar, &map, size, &vec![1; stored]);
            let message = refused(tar.finish());
            assert!(message.contains("sparse"), "{message}");
        }
    }
    for records in [
        vec![("GNU.sparse.map", "0,1,2"), ("GNU.sparse.size", "10")],
        vec![("GNU.sparse.map", "0,x"), ("GNU.sparse.size", "10")],
        vec![("GNU.sparse.map", "0,1")],
        vec![("GNU.sparse.major", "2"), ("GNU.sparse.minor", "0")],
        vec![("GNU.sparse.major", "1"), ("GNU.sparse.minor", "0")],
        vec![
            ("GNU.sparse.offset", "0"),
            ("GNU.sparse.offset", "0"),
            ("GNU.sparse.size", "10"),
        ],
    ] {
        let mut tar = TarWriter::new();
        tar.pax(&records);
        tar.file("named", "1");
        assert!(refused(tar.finish()).contains("sparse"), "{records:?}");
    }
    // A map in the data that goes on for ever.
    let mut tar = TarWriter::new();
    tar.pax(&[
        ("GNU.sparse.major", "1"),
        ("GNU.sparse.minor", "0"),
        ("GNU.sparse.realsize", "10"),
    ]);
    tar.file("named", "9".repeat(2000));
    refused(tar.finish());
}
