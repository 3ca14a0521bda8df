//! The targets for a few seconds: every seed, and mutations of it that are the same in every run.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

use std::collections::BTreeMap;
use std::path::PathBuf;

use layerpack_fixtures::rng::Rng;
use layerpack_fuzz::{TARGETS, find, mutate, seeds};

fn folder(target: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../fuzz/seeds")
        .join(target)
}

/// The committed seeds of a target by name.
fn committed(target: &str) -> BTreeMap<String, Vec<u8>> {
    let entries = fs_err::read_dir(folder(target)).unwrap();
    entries
        .map(|entry| {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            (name, fs_err::read(path).unwrap())
        })
        .collect()
}

#[test]
fn the_committed_seeds_are_those_that_the_program_makes() {
    for target in TARGETS {
        let made: BTreeMap<String, Vec<u8>> = seeds(target.name).into_iter().collect();
        let mut there = committed(target.name);
        // What fuzzing found stays as a seed of its own.
        there.retain(|name, _| !name.starts_with("found-"));
        assert!(!made.is_empty(), "{} has no seeds", target.name);
        assert!(
            made == there,
            "run `cargo xtask fuzz --write-seeds` for {}",
            target.name
        );
    }
}

/// A number that depends on nothing but the name.
fn seed_of(name: &str) -> u64 {
    name.bytes().fold(7, |sum, byte| sum * 31 + u64::from(byte))
}

#[track_caller]
fn run(names: &[&str]) {
    for name in names {
        let target = find(name).unwrap();
        let inputs: Vec<Vec<u8>> = committed(name).into_values().collect();
        inputs.iter().for_each(|input| (target.run)(input));
        (target.run)(b"");
        let mut rng = Rng::new(seed_of(name));
        let rounds = u64::from(target.quick) * inputs.len() as u64;
        for round in 0..rounds {
            let input = mutate(&mut rng, &inputs);
            let outcome = std::panic::catch_unwind(|| (target.run)(&input));
            if outcome.is_err() {
                let path = std::env::temp_dir().join(format!("layerpack-fuzz-{name}-{round}"));
                fs_err::write(&path, &input).unwrap();
                panic!("{name} panics in round {round} on {}", path.display());
            }
        }
    }
}

#[test]
fn formats() {
    run(&[
        "erofs",
        "lpmap",
        "lploc",
        "lppack",
        "lpidx",
        "manifest",
        "reference",
        "lpprof",
    ]);
}

#[test]
fn archives() {
    run(&["tar", "tar_layer", "tar_merge"]);
}

#[test]
fn compressions() {
    run(&["gzip", "zstd", "xz", "bzip2"]);
}

#[test]
fn documents() {
    run(&[
        "oci_index",
        "oci_manifest",
        "oci_config",
        "split",
        "globs",
        "git_index",
    ]);
}

#[test]
fn objects() {
    run(&["lease", "signature", "registry"]);
}

#[test]
fn every_target_is_run() {
    let text = include_str!("seeded.rs");
    for target in TARGETS {
        let quoted = format!("\"{}\"", target.name);
        assert!(text.contains(&quoted), "{} is in no test", target.name);
    }
}
