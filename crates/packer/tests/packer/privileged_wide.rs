//! One directory of very many entries, from a directory on disk to a mount: a million of them with
//! `cargo xtask test --full`.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use layerpack_fixtures::{ScratchDir, skip};
use layerpack_packer::Source;

use crate::limits_of_meaning::entries;
use crate::privileged_kernel::{stack, unable};
use crate::support::{memory_store, options, try_pack};

fn name(index: u64) -> String {
    format!("entry-{index:07}")
}

/// Every hundredth entry has contents, and every thousandth of those shares them with a neighbour.
fn contents(index: u64) -> String {
    match index % 100 {
        0 => format!(
            "contents of {}",
            index / 100_000 * 100_000 + index % 100_000 / 200
        ),
        _ => String::new(),
    }
}

fn make(dir: &Path, count: u64) {
    for index in 0..count {
        fs_err::write(dir.join(name(index)), contents(index)).unwrap();
    }
}

#[test]
fn privileged_a_directory_of_very_many_entries_is_listed_and_read() {
    if let Some(why) = unable() {
        skip!("{why}");
    }
    let count = entries();
    let scratch = ScratchDir::new("wide").unwrap();
    let dir = scratch.mkdir("tree/wide").unwrap();
    make(&dir, count);
    let cache = scratch.join("cache");
    let store = memory_store();
    let mut options = options("base/wide:1", Source::Dir(scratch.join("tree")));
    options.cache = Some(cache);
    let packed = try_pack(&store, &options).unwrap();
    assert_eq!(packed.manifest.counts.files, count);
    let mounted = stack(&[&packed], &scratch, "wide", None);
    let wide = mounted.merged.join("wide");
    let mut names: Vec<String> = fs_err::read_dir(&wide)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort_unstable();
    assert_eq!(names.len() as u64, count);
    assert!(
        (0..)
            .zip(&names)
            .all(|(index, found)| *found == name(index))
    );
    for index in [0, 1, 99, 100, count / 2, count - 100, count - 1] {
        let (here, there) = (dir.join(name(index)), wide.join(name(index)));
        let (packed, source) = (
            fs_err::metadata(&there).unwrap(),
            fs_err::metadata(&here).unwrap(),
        );
        assert_eq!(packed.len(), source.len());
        assert_eq!(
            (
                packed.mode(),
                packed.uid(),
                packed.mtime(),
                packed.mtime_nsec()
            ),
            (
                source.mode(),
                source.uid(),
                source.mtime(),
                source.mtime_nsec()
            )
        );
        assert_eq!(fs_err::read_to_string(&there).unwrap(), contents(index));
    }
    assert!(!wide.join(name(count)).exists());
}
