//! Archives through all of packing: decompression, tar, layers, and merges of them.
//!
//! What is published is read back: its metadata must have nothing that the checker complains of.

use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;

use layerpack_fixtures::ScratchDir;
use layerpack_fixtures::tar::TarWriter;
use layerpack_packer::{BuildOptions, Limits, MergeOptions, Silent, Source, build};
use layerpack_store::{Digest, LayerStore, MemStore, Reference};

/// Small enough that no input takes long.
fn limits() -> Limits {
    Limits {
        max_entries: 2000,
        max_bytes: 8 << 20,
        max_path: 8192,
        max_depth: 2000,
        max_header: 128 << 10,
        ..Limits::default()
    }
}

fn store() -> LayerStore {
    LayerStore::new(Arc::new(MemStore::new()))
}

/// Packs an archive under a reference; its digest, if it could be.
fn layer_of(store: &LayerStore, reference: &Reference, bytes: &[u8], git: bool) -> Option<Digest> {
    packed(store, reference, bytes, |_, options| {
        options.git_index = git
    })
}

fn packed(
    store: &LayerStore,
    reference: &Reference,
    bytes: &[u8],
    change: impl FnOnce(&Path, &mut BuildOptions),
) -> Option<Digest> {
    // Gone on return, so that a fuzzer that is stopped leaves one at most.
    let scratch = ScratchDir::new("fuzz").ok()?;
    let path = scratch.write("input", bytes).ok()?;
    let mut options = BuildOptions::new(reference.clone(), Source::Tar(path));
    options.limits = limits();
    options.jobs = 1;
    change(scratch.path(), &mut options);
    let report = build(store, &options, &Silent).ok()?;
    sound(store, &report.published.digest);
    Some(report.published.digest)
}

fn sound(store: &LayerStore, digest: &Digest) {
    let meta = store
        .manifest(digest)
        .and_then(|manifest| store.meta(&manifest));
    match meta {
        Ok(meta) => assert_eq!(layerpack_erofs::check(&meta), vec![], "a broken layer"),
        Err(error) => panic!("what was published cannot be read: {error}"),
    }
}

fn reference(text: &str) -> Reference {
    match text.parse() {
        Ok(reference) => reference,
        Err(error) => panic!("{text}: {error}"),
    }
}

/// An archive as a base.
pub(crate) fn base(bytes: &[u8]) {
    layer_of(&store(), &reference("base/f:1"), bytes, false);
}

/// As a layer on others, where whiteouts mean something. It is the same if entries are set aside, and
/// patterns that leave out some must not make it unsound.
pub(crate) fn layer(bytes: &[u8]) {
    let name = reference("toolkit/f:1");
    let whole = layer_of(&store(), &name, bytes, false);
    let aside = packed(&store(), &name, bytes, |scratch, options| {
        options.cache = Some(scratch.join("cache"));
        options.aside_after = 2;
    });
    assert_eq!(whole, aside, "another layer");
    let some = |options: &mut BuildOptions| {
        options.includes = vec!["[!a-f]*".to_owned()];
        options.excludes = vec!["*[1-3]".to_owned()];
    };
    packed(&store(), &name, bytes, |_, options| some(options));
}

/// Compressed in whatever way the bytes say.
pub(crate) fn as_is(bytes: &[u8]) {
    base(bytes);
}

/// A gzip member, from its deflated bytes: the checksum at the end is made right.
pub(crate) fn gzip(bytes: &[u8]) {
    base(bytes);
    let Some((kind, bytes)) = bytes.split_first() else {
        return;
    };
    let mut encoder =
        flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::new(u32::from(kind % 10)));
    if encoder.write_all(bytes).is_ok()
        && let Ok(made) = encoder.finish()
    {
        base(&made);
    }
}

/// A zstd frame as it is, and an archive inside of one.
pub(crate) fn zstd(bytes: &[u8]) {
    base(bytes);
    if let Ok(made) = zstd::bulk::compress(bytes, 1) {
        base(&made);
    }
}

/// Two archives, the length of the first in front: a base and a layer on it, then their merge.
pub(crate) fn merge(bytes: &[u8]) {
    let Some((len, rest)) = bytes.split_first_chunk::<4>() else {
        return;
    };
    let len = usize::try_from(u32::from_le_bytes(*len)).unwrap_or(usize::MAX);
    let Some((lower, upper)) = rest.split_at_checked(len) else {
        return;
    };
    let store = store();
    let parts = [reference("base/f:1"), reference("toolkit/f:1")];
    let [below, above] = &parts;
    if layer_of(&store, below, lower, false).is_some()
        && layer_of(&store, above, upper, false).is_some()
    {
        let options = MergeOptions::new(reference("base/m:1"), parts.to_vec());
        match merged(&store, &options) {
            Ok(digest) => sound(&store, &digest),
            Err(error) => panic!("layers that are sound cannot be merged: {error}"),
        }
    }
}

fn merged(
    store: &LayerStore,
    options: &MergeOptions,
) -> layerpack_packer::Result<layerpack_store::Digest> {
    Ok(layerpack_packer::merge(store, options, &Silent)?
        .published
        .digest)
}

/// git's index in a repository with two files. The hash at its end is left out, as git allows.
pub(crate) fn git_index(bytes: &[u8]) {
    let mut index = bytes.to_vec();
    index.extend_from_slice(&[0; 20]);
    let mut tar = TarWriter::new();
    tar.file(".git/index", &index)
        .file("a", "hello\n")
        .symlink("b", "a");
    layer_of(&store(), &reference("base/f:1"), &tar.finish(), true);
}
