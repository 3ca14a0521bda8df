//! What fuzzers call: one function for each reader of bytes from outside, and the seeds that they
//! begin with.
//!
//! A target takes any bytes and must come back: errors are fine, panics are not, and where what
//! was read can be checked by another part of the system, it is. The same targets are run by
//! `fuzz/` (libFuzzer, coverage), by this crate's binary (a plain mutator for where no nightly
//! compiler is at hand) and, for a few seconds, by its tests over the seeds in `fuzz/seeds`.
//!
//! Formats that carry checksums are sealed again before they are read: what lies behind a checksum
//! would never be reached otherwise.

mod documents;
mod formats;
mod mutate;
mod objects;
mod pack;
mod seeds;

pub use mutate::mutate;
pub use seeds::seeds;

/// A reader of bytes from outside.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Its name, which is also that of its seeds' folder.
    pub name: &'static str,
    /// Reads bytes; must not panic.
    pub run: fn(&[u8]),
    /// How many mutations a test of seconds has time for, per seed.
    pub quick: u32,
}

/// All targets.
pub const TARGETS: [Target; 24] = [
    target("erofs", formats::erofs, 300),
    target("lpmap", formats::map, 300),
    target("lploc", formats::locator, 300),
    target("lppack", formats::pack, 300),
    target("lpidx", formats::index, 300),
    target("manifest", formats::manifest, 300),
    target("reference", formats::reference, 300),
    target("lpprof", objects::profile, 300),
    target("lease", objects::lease, 20),
    target("signature", objects::signature, 30),
    target("registry", objects::registry, 10),
    target("tar", pack::base, 12),
    target("tar_layer", pack::layer, 12),
    target("tar_merge", pack::merge, 8),
    target("gzip", pack::gzip, 12),
    target("zstd", pack::zstd, 12),
    target("xz", pack::as_is, 12),
    target("bzip2", pack::as_is, 12),
    target("git_index", pack::git_index, 12),
    target("oci_index", documents::oci_index, 20),
    target("oci_manifest", documents::oci_manifest, 20),
    target("oci_config", documents::oci_config, 20),
    target("split", documents::split, 100),
    target("globs", documents::globs, 100),
];

const fn target(name: &'static str, run: fn(&[u8]), quick: u32) -> Target {
    Target { name, run, quick }
}

/// The target of that name.
#[must_use]
pub fn find(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}
