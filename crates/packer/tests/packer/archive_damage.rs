//! Archives that are compressed, cut off, garbled or ambiguous.

use std::io::Write as _;

use flate2::Compression;
use flate2::write::GzEncoder;
use layerpack_fixtures::tar::{Header, TarWriter, kind};

use crate::support::{base, refused, try_tar};

const BLOCK: usize = 512;

fn sample() -> Vec<u8> {
    let mut tar = TarWriter::new();
    tar.dir("./", 0o755);
    for index in 0..50 {
        tar.file(
            format!("./dir{}/file{index}", index % 3),
            format!("content {index}").repeat(100 * index),
        );
    }
    tar.finish()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 1).unwrap()
}

/// A zstd frame that decoders skip.
fn skippable(payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![0x5e, 0x2a, 0x4d, 0x18];
    frame.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    frame.extend_from_slice(payload);
    frame
}

#[test]
fn every_packing_of_the_same_bytes_is_the_same_layer() {
    let plain = sample();
    let expected = base(&plain).digest;
    let (a, b) = plain.split_at(plain.len() / 3);
    let multi_gzip = [gzip(a), gzip(b""), gzip(b)].concat();
    let multi_zstd = [
        zstd(a),
        skippable(b"table of contents"),
        zstd(b),
        skippable(b""),
    ]
    .concat();
    let leading = [skippable(b"first"), zstd(&plain)].concat();
    // Padding as tapes and some tools leave it.
    let padded = [gzip(&plain), vec![0; 1000]].concat();
    // As eStargz does: one member an entry, an empty one at the end.
    let stargz = plain
        .chunks(BLOCK * 3)
        .map(gzip)
        .chain([gzip(b"")])
        .collect::<Vec<_>>()
        .concat();
    for (name, bytes) in [
        ("gzip", gzip(&plain)),
        ("members", multi_gzip),
        ("zstd", zstd(&plain)),
        ("frames", multi_zstd),
        ("skippable first", leading),
        ("padded", padded),
        ("stargz", stargz),
        ("records", [plain.clone(), vec![0; 10_240]].concat()),
    ] {
        assert_eq!(base(bytes).digest, expected, "{name}");
    }
}

#[test]
fn archives_cut_off_anywhere_are_errors() {
    let plain = sample();
    // Where the end mark begins: one zero block is enough of it.
    let end = plain.len() - 2 * BLOCK;
    for cut in (0..end)
        .step_by(97 * 7)
        .chain([1, 511, 512, 513, end - 1, end])
    {
        refused(&plain[..cut]);
    }
    base(&plain[..end + BLOCK]);
    // Of the mark itself nothing can be lost.
    base(&plain[..end + BLOCK + 100]);
    for packed in [gzip(&plain), zstd(&plain)] {
        for cut in (0..packed.len())
            .step_by(packed.len() / 40 + 1)
            .chain(packed.len() - 9..packed.len())
        {
            let message = refused(&packed[..cut]);
            assert!(!message.is_empty());
        }
    }
}

#[test]
fn what_follows_the_end_is_an_error() {
    let plain = sample();
    let mut two = TarWriter::new();
    two.file("second", "lost if nobody looked");
    let second = two.finish();
    let garbage = b"garbage".to_vec();
    for bytes in [
        [plain.clone(), second.clone()].concat(),
        [plain.clone(), vec![0; 5000], garbage.clone()].concat(),
        [gzip(&plain), garbage.clone()].concat(),
        [gzip(&plain), vec![0; 100], garbage.clone()].concat(),
        [zstd(&plain), garbage.clone()].concat(),
        [gzip(&plain), gzip(&second)].concat(),
        [gzip(&plain), zstd(b"")].concat(),
    ] {
        refused(bytes);
    }
}

#[test]
fn damaged_checksums_and_contents_are_errors() {
    let packed = gzip(&sample());
    for at in (10..packed.len()).step_by(packed.len() / 25) {
        let mut bad = packed.clone();
        bad[at] ^= 0x10;
        // The checksum at the end covers everything; header bytes that mean nothing may differ.
        if let Ok(packed) = try_tar("base/a:1", &bad) {
            assert_eq!(packed.digest, base(sample()).digest);
        }
    }
    let plain = sample();
    for at in (0..BLOCK).filter(|at| !(148..156).contains(at)) {
        let mut bad = plain.clone();
        bad[at] ^= 1;
        assert!(refused(&bad).contains("checksum"), "byte {at}");
    }
}

#[test]
fn the_window_of_a_frame_is_bounded() {
    let frame = |window: u32| {
        let mut encoder = zstd::stream::Encoder::new(Vec::new(), 1).unwrap();
        encoder.window_log(window).unwrap();
        encoder.write_all(&sample()).unwrap();
        encoder.finish().unwrap()
    };
    base(frame(27));
    let message = refused(frame(28));
    assert!(
        message.contains("memory") || message.contains("window"),
        "{message}"
    );
}

#[test]
fn other_formats_are_named() {
    for (bytes, part) in [
        (&b"\xfd7zXZ\0rest"[..], "cannot read archive"),
        (b"BZh91AY", "cannot read archive"),
        (b"", "empty"),
        (b"#!/bin/sh\n", "cut off"),
        (&[7; 4096], "checksum"),
    ] {
        let message = refused(bytes);
        assert!(message.contains(part), "{message}");
    }
    let scratch = layerpack_fixtures::ScratchDir::new("missing").unwrap();
    let store = crate::support::memory_store();
    for path in [scratch.join("not-there"), scratch.path().to_owned()] {
        let options =
            crate::support::options("base/a:1", layerpack_packer::Source::Tar(path.clone()));
        let message = crate::support::try_pack(&store, &options)
            .err()
            .unwrap()
            .to_string();
        assert!(message.contains(&path.display().to_string()), "{message}");
    }
}

#[test]
fn what_readers_disagree_on_is_refused() {
    let mut tar = TarWriter::new();
    tar.pax(&[("path", "one")]);
    tar.gnu_long(kind::GNU_NAME, b"other");
    tar.file("x", "");
    assert!(refused(tar.finish()).contains("different names"));

    let mut tar = TarWriter::new();
    tar.file("directory/", "with content");
    assert!(refused(tar.finish()).contains("directory"));

    let mut tar = TarWriter::new();
    tar.pax(&[("path", "a\0b")]);
    tar.file("x", "");
    assert!(refused(tar.finish()).contains("NUL"));

    let mut tar = TarWriter::new();
    tar.entry(&Header::new(b'M', "volume"), b"");
    assert!(refused(tar.finish()).contains("type"));

    let mut tar = TarWriter::new();
    tar.pax(&[("path", "nothing")]);
    assert!(refused(tar.finish()).contains("no entry"));

    // A hard link that brings data along: that data would be taken for headers.
    let mut tar = TarWriter::new();
    tar.file("a", "data");
    tar.entry(&Header::new(kind::LINK, "b").link("a"), b"data again");
    refused(tar.finish());
}

#[test]
fn bad_records_and_numbers_are_refused() {
    for records in [
        &b"no length"[..],
        b"99 path=short\n",
        b"9 path=x\0",
        b"12 size=-100\n",
        b"15 uid=4294967296\n",
        b"13 uid=abcde\n",
        b"14 mtime=1e10\n",
        b"26 mtime=99999999999999999999\n",
        b"30 LIBARCHIVE.xattr.user.a=?\n",
        b"0 \n",
        b"5 a\n\n",
    ] {
        let mut tar = TarWriter::new();
        tar.entry(&Header::new(kind::PAX, "x"), records);
        tar.file("f", "");
        let message = refused(tar.finish());
        assert!(message.contains("archive"), "{message}");
    }
    let mut header = Header::new(kind::FILE, "negative").to_bytes();
    header[124..136].fill(0xff);
    header[148..156].fill(b' ');
    let sum: u32 = header.iter().map(|&byte| u32::from(byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    assert!(refused([&header[..], &[0; 1024]].concat()).contains("size"));
}

#[test]
fn a_cut_off_compressed_archive_says_what_to_do() {
    for whole in [gzip(&sample()), zstd(&sample())] {
        for len in [whole.len() / 2, whole.len() - 3] {
            let error = refused(&whole[..len]);
            assert!(
                error.contains("the archive is incomplete: fetch or make it again"),
                "{error}"
            );
        }
    }
}
