//! Archives that somebody bent: never a panic, a hang or unbounded memory, and what is accepted is
//! a sound layer.

use layerpack_fixtures::rng::Rng;
use layerpack_fixtures::tar::{Header, TarWriter, kind};

use crate::support::try_tar;

/// One archive with everything that the reader knows.
fn everything() -> Vec<u8> {
    let mut tar = TarWriter::new();
    tar.pax_global(&[("comment", "0123"), ("gid", "7")]);
    tar.dir("./", 0o755);
    tar.dir("d/", 0o700);
    tar.pax(&[
        ("path", "d/pax-named"),
        ("mtime", "-12.5"),
        ("SCHILY.xattr.user.a", "value"),
        ("LIBARCHIVE.xattr.user.b", "AAEC"),
        (
            "SCHILY.acl.access",
            "user::rw-,user:5:r--,group::r--,mask::r--,other::---",
        ),
    ]);
    tar.file("short", "content");
    tar.file("n".repeat(150), "long name");
    tar.symlink("link", "d".repeat(150));
    tar.hard_link("hard", "d/pax-named");
    tar.entry(&Header::new(kind::CHAR, "char").device(1, 3), b"");
    tar.entry(&Header::new(kind::FIFO, "link/../fifo"), b"");
    tar.sparse_gnu(
        "s-gnu",
        &[
            (0, 10),
            (4096, 10),
            (8192, 1),
            (9000, 1),
            (9500, 1),
            (10_000, 0),
        ],
        10_000,
        &[1; 23],
    );
    tar.sparse_pax_0_0("s-00", &[(5, 10), (70_000, 3)], 80_000, &[2; 13]);
    tar.sparse_pax_0_1("s-01", &[(5, 10), (70_000, 3)], 80_000, &[2; 13]);
    tar.sparse_pax_1_0("s-10", &[(5, 10), (70_000, 3)], 80_000, &[2; 13]);
    tar.whiteout("d", "gone");
    tar.opaque("d");
    tar.finish()
}

/// Makes every block that looks like a header valid again, so that what lies behind its checksum
/// is reached.
fn seal(archive: &mut [u8]) {
    for block in archive.chunks_exact_mut(512) {
        if block[257..262] != *b"ustar" {
            continue;
        }
        block[148..156].fill(b' ');
        let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    }
}

const ODD: [u8; 14] = [
    0, b'0', b'1', b'9', b'/', b'.', b'=', b'\n', b' ', b'-', b'S', b'x', 0x80, 0xff,
];

#[test]
fn bent_archives_are_errors_or_sound_layers() {
    let good = everything();
    try_tar("toolkit/h:1", &good).unwrap();
    let (mut accepted, mut refused) = (0, 0);
    for seed in 0..(500 * *layerpack_fixtures::trees::seeds().end()) {
        let mut rng = Rng::new(seed);
        let mut bad = good.clone();
        match rng.below(5) {
            // A few bytes anywhere.
            0 | 1 => {
                for _ in 0..=rng.below(4) {
                    let at = rng.below_usize(bad.len());
                    bad[at] = if rng.one_in(2) {
                        rng.next_u64() as u8
                    } else {
                        *rng.pick(&ODD).unwrap()
                    };
                }
            }
            // A field of a header.
            2 => {
                let fields = [
                    (0, 100),
                    (100, 8),
                    (108, 8),
                    (124, 12),
                    (136, 12),
                    (156, 1),
                    (157, 100),
                    (257, 8),
                    (329, 8),
                    (345, 155),
                    (386, 24),
                    (482, 13),
                ];
                let (at, len) = *rng.pick(&fields).unwrap();
                let block = rng.below_usize(bad.len() / 512) * 512;
                let fill = *rng.pick(&ODD).unwrap();
                bad[block + at..block + at + len].fill(fill);
            }
            // Blocks moved, doubled or gone.
            3 => {
                let from = rng.below_usize(bad.len() / 512) * 512;
                let to = rng.below_usize(bad.len() / 512) * 512;
                let block = bad[from..from + 512].to_vec();
                bad.splice(to..to, block);
            }
            _ => {
                let from = rng.below_usize(bad.len() / 512) * 512;
                bad.drain(from..from + 512);
            }
        }
        seal(&mut bad);
        // Reading the layer back checks the image.
        match try_tar("toolkit/h:1", &bad) {
            Ok(packed) => {
                packed.tree();
                accepted += 1;
            }
            Err(error) => {
                assert!(!error.to_string().is_empty());
                refused += 1;
            }
        }
    }
    // The test means something only if both happen.
    assert!(
        accepted > 100 && refused > 100,
        "{accepted} accepted, {refused} refused"
    );
}

#[test]
fn bytes_that_never_were_an_archive() {
    for seed in 0..200 {
        let mut rng = Rng::new(seed);
        let len = rng.below_usize(4000);
        let mut bytes = rng.bytes(len);
        let magic: [&[u8]; 4] = [
            b"",
            b"\x1f\x8b\x08",
            b"\x28\xb5\x2f\xfd",
            b"\x5f\x2a\x4d\x18",
        ];
        bytes.splice(0..0, rng.pick(&magic).unwrap().iter().copied());
        assert!(try_tar("base/h:1", &bytes).is_err());
    }
}
