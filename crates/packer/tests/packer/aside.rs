//! Entries that are set aside until contents are stored: the layer is the same whenever that begins,
//! whatever comes before and after, and in whatever order an archive has its entries.

use layerpack_fixtures::ScratchDir;
use layerpack_fixtures::rng::Rng;
use layerpack_fixtures::tar::{Header, TarWriter, kind};
use layerpack_packer::PackError;

use crate::support::{ArchiveFile, Packed, chain, memory_store, options, try_pack};

/// One archive with patterns, packed so that entries after the first `after` are set aside.
struct Case {
    reference: &'static str,
    file: ArchiveFile,
    excludes: Vec<String>,
    includes: Vec<String>,
    scratch: ScratchDir,
}

impl Case {
    fn new(reference: &'static str, bytes: Vec<u8>, excludes: &[&str], includes: &[&str]) -> Self {
        let strings = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect();
        Self {
            reference,
            file: ArchiveFile::new(bytes),
            excludes: strings(excludes),
            includes: strings(includes),
            scratch: ScratchDir::new("aside").unwrap(),
        }
    }

    fn pack(&self, after: Option<u64>) -> Result<Packed, PackError> {
        let mut with = options(self.reference, self.file.source());
        with.excludes.clone_from(&self.excludes);
        with.includes.clone_from(&self.includes);
        if let Some(after) = after {
            with.scratch = Some(self.scratch.path().to_owned());
            with.aside_after = after;
        }
        try_pack(&memory_store(), &with)
    }

    /// Packs it in all ways; the layer, unless all of them fail.
    fn check(&self, what: &str, afters: &[u64]) -> Option<Packed> {
        let sorted = |packed: &Packed| {
            let mut lines = packed.warnings.clone();
            lines.sort();
            lines
        };
        let whole = self.pack(None);
        for after in afters {
            match (&whole, &self.pack(Some(*after))) {
                (Ok(whole), Ok(aside)) => {
                    assert_eq!(
                        whole.digest,
                        aside.digest,
                        "{what}, after {after}: {:?}, then {:?}",
                        whole.tree().paths(),
                        aside.tree().paths()
                    );
                    assert_eq!(sorted(whole), sorted(aside), "{what}, after {after}");
                }
                (Err(_), Err(_)) => {}
                (Ok(_), Err(error)) => panic!("{what}, after {after}: {}", chain(error)),
                (Err(error), Ok(_)) => {
                    panic!("{what}, after {after}: it is no error: {}", chain(error))
                }
            }
        }
        whole.ok()
    }
}

/// Paths that lead through each other.
const PATHS: [&str; 16] = [
    "a", "b", "d", "d/a", "d/b", "d/e", "d/e/f", "l", "l/a", "l/b", "l/e/f", "m/f", "m", "d/k",
    "d/k/a", "../b",
];
const TARGETS: [&str; 7] = ["d", "/d", "d/e", "../d", "b", ".", "l"];
const PATTERNS: [&str; 10] = [
    "a", "d/*", "l/*", "d/e/", "b", "**/f", "l/b", "m", "d/k", "[de]/a",
];

fn entry(rng: &mut Rng, tar: &mut TarWriter, so_far: &mut Vec<&'static str>) {
    let path = *rng.pick(&PATHS).unwrap();
    match rng.below(16) {
        0..=4 => {
            let len = if rng.one_in(5) {
                9000
            } else {
                rng.below_usize(30)
            };
            tar.file(path, rng.text(len));
        }
        5..=7 => {
            tar.dir(path, if rng.one_in(2) { 0o700 } else { 0o755 });
        }
        8..=10 => {
            tar.symlink(path, rng.pick(&TARGETS).unwrap());
        }
        11..=12 => {
            let target = rng.pick(so_far).copied().unwrap_or("a");
            tar.hard_link(path, target);
        }
        13 => match path.rsplit_once('/') {
            Some((dir, name)) => {
                tar.whiteout(dir, name);
            }
            None => {
                tar.opaque(path);
            }
        },
        14 => {
            let minor = rng.below(2);
            let header = Header::new(kind::CHAR, path).device(minor, minor);
            tar.entry(&header, b"");
        }
        _ => {
            tar.entry(&Header::new(kind::FIFO, path), b"");
        }
    }
    so_far.push(path);
}

/// Random archives of the oddest kinds, with and without patterns.
#[test]
fn when_setting_aside_begins_does_not_matter() {
    let (mut packed, mut selected) = (0, 0);
    for seed in 0..500 {
        let mut rng = Rng::new(seed);
        let mut tar = TarWriter::new();
        let count = 2 + rng.below(10);
        let mut so_far = Vec::new();
        for _ in 0..count {
            entry(&mut rng, &mut tar, &mut so_far);
        }
        let patterns = |rng: &mut Rng, most: u64| -> Vec<&str> {
            (0..rng.below(most + 1))
                .map(|_| *rng.pick(&PATTERNS).unwrap())
                .collect()
        };
        let excludes = patterns(&mut rng, 2);
        let includes = if rng.one_in(6) {
            patterns(&mut rng, 2)
        } else {
            Vec::new()
        };
        let reference = if rng.one_in(2) {
            "base/t:1"
        } else {
            "toolkit/t:1"
        };
        let case = Case::new(reference, tar.finish(), &excludes, &includes);
        let afters = [0, 1, rng.below(count)];
        let what = format!("seed {seed}, {excludes:?}, {includes:?}");
        let all = case.check(&what, &afters);
        packed += u32::from(all.is_some());
        selected += u32::from(all.is_some() && !excludes.is_empty());
    }
    assert!(
        packed > 100 && selected > 50,
        "{packed} and {selected} came of it"
    );
}

/// What ends setting aside where patterns leave something out, one by one.
#[test]
fn what_the_tree_is_asked_for_brings_entries_back() {
    type Make = fn(&mut TarWriter);
    let cases: [(&str, &[&str], Make); 10] = [
        (
            "a link among those that are set aside",
            &["real/x*"],
            |tar| {
                tar.dir("real", 0o755).symlink("link", "real");
                tar.file("link/x1", "out").file("link/y", "in");
            },
        ),
        (
            "a link that is replaced by a directory",
            &["real/x*"],
            |tar| {
                tar.symlink("link", "real").dir("link", 0o700);
                tar.file("link/x1", "in").dir("real", 0o700);
            },
        ),
        ("a link that goes with its directory", &["real/x*"], |tar| {
            tar.dir("d", 0o755).symlink("d/link", "../real");
            tar.file("d", "a file").dir("d", 0o700).dir("d/link", 0o700);
            tar.file("d/link/x1", "in");
        }),
        ("a hard link to a link", &["real/x*"], |tar| {
            tar.symlink("link", "real").hard_link("other", "link");
            tar.file("other/x1", "out").file("other/y", "in");
        }),
        ("a hard link to what is left out", &["out"], |tar| {
            tar.file("out", "contents").file("a", "1");
            tar.hard_link("in", "out").hard_link("too", "in");
        }),
        (
            "a hard link that is left out to what is not",
            &["out"],
            |tar| {
                tar.file("in", "contents").hard_link("out", "in");
                tar.hard_link("again", "out").file("in", "others");
            },
        ),
        (
            "a hard link before its target is left out elsewhere",
            &["l/a"],
            |tar| {
                tar.dir("d", 0o755).symlink("l", "d").file("d/a", "1");
                tar.hard_link("first", "d/a").file("l/a", "2");
                tar.hard_link("second", "d/a");
            },
        ),
        ("a device that is a whiteout", &["real/x*"], |tar| {
            tar.symlink("link", "real");
            tar.entry(&Header::new(kind::CHAR, "link"), b"");
            tar.file("link/x1", "in");
        }),
        ("a mark", &["real/x*"], |tar| {
            tar.symlink("link", "real").whiteout("link", "gone");
            tar.opaque("link")
                .file("link/x1", "out")
                .file("link/y", "in");
        }),
        ("a loop", &["a"], |tar| {
            tar.symlink("l", "m").symlink("m", "l").file("a", "1");
            tar.file("b", "2");
        }),
    ];
    for (what, excludes, make) in cases {
        for reference in ["base/t:1", "toolkit/t:1"] {
            let mut tar = TarWriter::new();
            tar.dir("./", 0o711);
            make(&mut tar);
            let case = Case::new(reference, tar.finish(), excludes, &[]);
            let packed = case.check(what, &[0, 1, 2, 3, 4, 5]);
            let tree = packed.unwrap_or_else(|| panic!("{what}")).tree();
            assert!(!tree.paths().is_empty());
        }
    }
}

/// The same entries in many orders are the same layer, with names that come in order or not.
#[test]
fn the_order_of_entries_does_not_matter() {
    const DIRECTORIES: usize = 20;
    const FILES: usize = 60;
    let mut entries = Vec::new();
    for i in 0..DIRECTORIES {
        for j in 0..FILES {
            entries.push((i, j));
        }
    }
    let whole = |order: &[(usize, usize)], directories_last: bool| {
        let mut tar = TarWriter::new();
        let directories = |tar: &mut TarWriter| {
            tar.dir("./", 0o711);
            for i in 0..DIRECTORIES {
                tar.dir(format!("d{i:02}"), 0o750);
            }
        };
        if !directories_last {
            directories(&mut tar);
        }
        for (i, j) in order {
            let path = format!("d{i:02}/n{j:02}");
            match (i + j) % 7 {
                0 => tar.file(path, ""),
                1 => tar.symlink(path, format!("../d{j:02}")),
                2 => tar.entry(&Header::new(kind::FIFO, path), b""),
                3 => tar.entry(&Header::new(kind::CHAR, path).device(1, 3), b""),
                4 => tar.dir(path, 0o700),
                _ => tar.file(path, format!("{}", i * j)),
            };
        }
        if directories_last {
            directories(&mut tar);
        }
        let case = Case::new("base/t:1", tar.finish(), &[], &[]);
        let packed = case.check("an order", &[0, 100, 700]).unwrap();
        let without = Case::new(
            "base/t:1",
            fs_err::read(&case.file.path).unwrap(),
            &["d03/*"],
            &[],
        );
        let without = without
            .check("an order without some", &[0, 100, 700])
            .unwrap();
        (packed.digest, without.digest)
    };
    let sorted = whole(&entries, false);
    let mut rng = Rng::new(1);
    let mut shuffled = entries.clone();
    for i in (1..shuffled.len()).rev() {
        shuffled.swap(i, rng.below_usize(i + 1));
    }
    let reversed: Vec<_> = entries.iter().rev().copied().collect();
    let mut interleaved = entries.clone();
    interleaved.sort_by_key(|(i, j)| (*j, *i));
    let mut twice = reversed.clone();
    twice.extend(&entries);
    for (what, order) in [
        ("shuffled", shuffled),
        ("reversed", reversed),
        ("interleaved", interleaved),
        ("twice", twice),
        ("sorted", entries),
    ] {
        for directories_last in [false, true] {
            assert!(whole(&order, directories_last) == sorted, "{what}");
        }
    }
}
