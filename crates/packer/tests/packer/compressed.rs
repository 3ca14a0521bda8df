//! Compressed archives: every format with all its parts, cut off, followed by something, bombs,
//! and those that are made for lazy readers.

use std::io::Write as _;

use layerpack_fixtures::ScratchDir;
use layerpack_fixtures::tar::TarWriter;
use layerpack_fixtures::tar::lazy::{Footer, estargz, gzip_member, zstd_chunked, zstd_frame};
use layerpack_packer::{Silent, Source, build};

use crate::support::{ArchiveFile, base, chain, memory_store, options, refused, try_pack};

fn members() -> TarWriter {
    let mut tar = TarWriter::new();
    tar.dir("./", 0o755);
    for index in 0..40 {
        tar.file(
            format!("./dir{}/file{index}", index % 3),
            format!("content {index}").repeat(90 * index),
        );
    }
    tar
}

fn xz(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = liblzma::write::XzEncoder::new(Vec::new(), 1);
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn bzip2(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

type Packing = (&'static str, fn(&[u8]) -> Vec<u8>);

const PACKINGS: [Packing; 4] = [
    ("xz", xz),
    ("bzip2", bzip2),
    ("gzip", |bytes| gzip_member(bytes, b"")),
    ("zstd", zstd_frame),
];

#[test]
fn one_part_or_many_are_the_same_layer() {
    let plain = members().finish();
    let expected = base(&plain).digest;
    for (name, pack) in PACKINGS {
        assert_eq!(base(pack(&plain)).digest, expected, "{name}");
        let parts: Vec<u8> = plain.chunks(10_007).flat_map(pack).collect();
        assert_eq!(base(parts).digest, expected, "{name} in parts");
        // An empty part may stand anywhere.
        let (a, b) = plain.split_at(5000);
        let parts = [pack(b""), pack(a), pack(b""), pack(b), pack(b"")].concat();
        assert_eq!(base(parts).digest, expected, "{name} with empty parts");
    }
    // Streams of xz are padded in fours.
    let padded = [xz(&plain), vec![0; 8]].concat();
    assert_eq!(base(padded).digest, expected);
    let within = [xz(&plain[..4096]), vec![0; 4], xz(&plain[4096..])].concat();
    assert_eq!(base(within).digest, expected);
}

#[test]
fn cut_off_or_followed_by_something_is_an_error() {
    let plain = members().finish();
    for (name, pack) in PACKINGS {
        let whole = pack(&plain);
        let cuts = (8..whole.len()).step_by(whole.len() / 30 + 1);
        for cut in cuts.chain(whole.len() - 8..whole.len()) {
            let message = refused(&whole[..cut]);
            assert!(message.contains("archive"), "{name} at {cut}: {message}");
        }
        let in_parts = [pack(&plain[..2048]), pack(&plain[2048..])].concat();
        refused(&in_parts[..in_parts.len() - 5]);
        for tail in [&b"garbage"[..], b"x", &[0xff; 600]] {
            refused([&whole, tail].concat());
        }
        // A second archive behind the first would be lost in silence.
        refused([whole.clone(), pack(&plain)].concat());
    }
    refused([xz(&plain), vec![0; 3]].concat());
    let mut damaged = xz(&plain);
    let middle = damaged.len() / 2;
    damaged[middle] ^= 4;
    assert!(refused(damaged).contains("cannot read archive"));
}

#[test]
fn the_memory_of_an_xz_decoder_is_bounded() {
    let with = |dictionary: u32| {
        let mut lzma = liblzma::stream::LzmaOptions::new_preset(0).unwrap();
        lzma.dict_size(dictionary);
        let mut filters = liblzma::stream::Filters::new();
        filters.lzma2(&lzma);
        let stream =
            liblzma::stream::Stream::new_stream_encoder(&filters, liblzma::stream::Check::Crc64);
        let mut encoder = liblzma::write::XzEncoder::new_stream(Vec::new(), stream.unwrap());
        encoder.write_all(&members().finish()).unwrap();
        encoder.finish().unwrap()
    };
    base(with(64 << 20));
    let mut bomb = with(64 << 20);
    // The dictionary's size as the block's header has it: 64 MiB become 1.5 GiB.
    let at = bomb.windows(3).position(|w| w == [0x21, 1, 0x1c]).unwrap() + 2;
    bomb[at] = 0x25;
    // Flags of the block's header to its padding, then its checksum.
    let header = 12..12 + usize::from(bomb[12]) * 4;
    let sum = crc32(&bomb[header.clone()]);
    bomb[header.end..header.end + 4].copy_from_slice(&sum.to_le_bytes());
    let message = refused(bomb);
    assert!(message.contains("memory"), "{message}");
}

fn crc32(data: &[u8]) -> u32 {
    let member = gzip_member(data, b"");
    let at = member.len() - 8;
    u32::from_le_bytes(member[at..at + 4].try_into().unwrap())
}

#[test]
fn bombs_are_bounded_by_size_and_by_ratio() {
    // A gibibyte and a bit of zeros in 40 KiB.
    let mut tar = TarWriter::new().into_unfinished();
    let mut header = layerpack_fixtures::tar::Header::new(b'0', "zeros");
    header = header.mode(0o644);
    let size: u64 = (1 << 30) + (64 << 20);
    let mut head = header.to_bytes();
    head[124..136].copy_from_slice(format!("{size:011o}\0").as_bytes());
    head[148..156].fill(b' ');
    let sum: u32 = head.iter().map(|&byte| u32::from(byte)).sum();
    head[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    tar.extend_from_slice(&head);
    let mut encoder = zstd::stream::Encoder::new(Vec::new(), 1).unwrap();
    encoder.write_all(&tar).unwrap();
    std::io::copy(
        &mut std::io::Read::take(std::io::repeat(0), size + 1024),
        &mut encoder,
    )
    .unwrap();
    let file = ArchiveFile::new(encoder.finish().unwrap());
    let mut with = options("base/bomb:1", file.source());
    let packed = try_pack(&memory_store(), &with).unwrap();
    assert_eq!(packed.map.data_size(), 0);
    with.limits.max_ratio = 1000;
    let error = try_pack(&memory_store(), &with).err().unwrap();
    assert!(chain(&error).contains("--max-ratio"), "{}", chain(&error));
    with.limits.max_ratio = u64::MAX;
    with.limits.max_bytes = 100 << 20;
    let error = try_pack(&memory_store(), &with).err().unwrap();
    assert!(chain(&error).contains("--max-bytes"), "{}", chain(&error));
}

#[test]
fn archives_for_lazy_readers_are_ordinary_layers() {
    let expected = base(members().finish()).digest;
    for (name, bytes) in [
        ("eStargz", estargz(&members(), false, Footer::Current)),
        ("prefetch", estargz(&members(), true, Footer::Current)),
        ("stargz", estargz(&members(), true, Footer::Legacy)),
        ("zstd:chunked", zstd_chunked(&members())),
    ] {
        assert_eq!(base(&bytes).digest, expected, "{name}");
        // Where the end cannot be seen before the start.
        assert_eq!(piped(&bytes), expected, "{name} through a pipe");
    }
    // stargz-snapshotter marks zstd:chunked too.
    let mut marked = TarWriter::new();
    marked.file(".no.prefetch.landmark", [0xf]);
    marked.raw(&members().into_unfinished());
    assert_eq!(base(zstd_chunked(&marked)).digest, expected);
}

#[test]
fn elsewhere_such_names_are_files() {
    let mut tar = TarWriter::new();
    for name in [
        "stargz.index.json",
        ".prefetch.landmark",
        ".no.prefetch.landmark",
        "d/stargz.index.json",
    ] {
        tar.file(name, "mine");
    }
    let tree = base(tar.clone().finish()).tree();
    assert_eq!(tree.paths().len(), 6);
    // Within an eStargz archive too, unless at its root.
    let tree = base(estargz(&tar, false, Footer::Current)).tree();
    assert_eq!(tree.paths(), ["", "d", "d/stargz.index.json"]);
}

/// The digest of the base that an archive makes which comes through a named pipe.
fn piped(bytes: &[u8]) -> layerpack_store::Digest {
    let scratch = ScratchDir::new("pipe").unwrap();
    let pipe = scratch.join("pipe");
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut out = fs_err::OpenOptions::new().write(true).open(&pipe).unwrap();
            // One byte first: nobody may take a short read for the end.
            out.write_all(&bytes[..1]).unwrap();
            out.flush().unwrap();
            out.write_all(&bytes[1..]).unwrap();
        });
        let source = Source::Tar(pipe.clone());
        let report = build(&memory_store(), &options("base/a:1", source), &Silent);
        report.unwrap().published.digest
    })
}
