//! Texts that people and registries write.

use std::path::Path;
use std::sync::Arc;

use layerpack_fixtures::ScratchDir;
use layerpack_fixtures::tar::TarWriter;
use layerpack_packer::{
    BuildOptions, ImageSource, ImportOptions, Silent, Source, Split, build, import,
};
use layerpack_store::{LayerStore, MemStore};
use sha2::{Digest as _, Sha256};

const MANIFEST_TYPE: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG_TYPE: &str = "application/vnd.oci.image.config.v1+json";

/// Digest and size of a document, which is put into the layout.
fn put(blobs: &Path, bytes: &[u8]) -> (String, usize) {
    let hex: String = Sha256::digest(bytes)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    // A full disk shows as an image that cannot be read.
    let _ = fs_err::write(blobs.join(&hex), bytes);
    (format!("sha256:{hex}"), bytes.len())
}

fn descriptor(kind: &str, (digest, size): &(String, usize)) -> String {
    format!(r#"{{"mediaType":"{kind}","digest":"{digest}","size":{size}}}"#)
}

/// A layer that every image here has, and its digest.
pub(crate) fn a_layer() -> Vec<u8> {
    let mut tar = TarWriter::new();
    tar.file("a", "1");
    tar.finish()
}

/// Imports a layout whose documents `make` writes: it is given the folder of blobs and answers
/// with the index.
fn layout(make: impl FnOnce(&Path) -> Vec<u8>) {
    let Ok(scratch) = ScratchDir::new("fuzz-image") else {
        return;
    };
    let Ok(blobs) = scratch.mkdir("image/blobs/sha256") else {
        return;
    };
    let dir = scratch.join("image");
    put(&blobs, &a_layer());
    let index = make(&blobs);
    // A full disk shows as an image that cannot be read.
    let _ = fs_err::write(dir.join("index.json"), index);
    let _ = fs_err::write(dir.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#);
    let Ok(reference) = "base/i:1".parse() else {
        return;
    };
    let source = ImageSource::Oci { dir, tag: None };
    let store = LayerStore::new(Arc::new(MemStore::new()));
    let mut options = ImportOptions::new(reference, source);
    options.jobs = 1;
    let _ = import(&store, &options, &Silent);
}

/// `index.json`.
pub(crate) fn oci_index(bytes: &[u8]) {
    layout(|blobs| {
        let config = put(blobs, &config_seed());
        put(blobs, manifest(&config).as_bytes());
        bytes.to_vec()
    });
}

/// A manifest, named rightly by the index.
pub(crate) fn oci_manifest(bytes: &[u8]) {
    layout(|blobs| {
        put(blobs, &config_seed());
        let manifest = put(blobs, bytes);
        index(&manifest).into_bytes()
    });
}

/// A configuration, named rightly by the manifest.
pub(crate) fn oci_config(bytes: &[u8]) {
    layout(|blobs| {
        let config = put(blobs, bytes);
        let manifest = put(blobs, manifest(&config).as_bytes());
        index(&manifest).into_bytes()
    });
}

/// An index of one manifest.
pub(crate) fn index(manifest: &(String, usize)) -> String {
    format!(
        r#"{{"schemaVersion":2,"manifests":[{}]}}"#,
        descriptor(MANIFEST_TYPE, manifest)
    )
}

/// A manifest of one layer.
pub(crate) fn manifest(config: &(String, usize)) -> String {
    let layer = sized(&a_layer());
    format!(
        r#"{{"schemaVersion":2,"config":{},"layers":[{}]}}"#,
        descriptor(CONFIG_TYPE, config),
        descriptor("application/vnd.oci.image.layer.v1.tar", &layer)
    )
}

/// Digest and size.
pub(crate) fn sized(bytes: &[u8]) -> (String, usize) {
    let hex: String = Sha256::digest(bytes)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    (format!("sha256:{hex}"), bytes.len())
}

/// The configuration of that image.
pub(crate) fn config_seed() -> Vec<u8> {
    let (digest, _) = sized(&a_layer());
    format!(
        r#"{{"architecture":"amd64","os":"linux","config":{{"Env":["A=b"],"Cmd":["sh"]}},"rootfs":{{"type":"layers","diff_ids":["{digest}"]}}}}"#
    )
    .into_bytes()
}

/// A split file.
pub(crate) fn split(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    if let Err(error) = Split::parse(&text, Some("n"), Some("1")) {
        assert!(
            !error.to_string().contains('\n'),
            "an error of several lines"
        );
    }
}

/// Lines of patterns, the first for paths to include, over one small archive.
pub(crate) fn globs(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let mut lines = text.lines().take(20).map(str::to_owned);
    let Ok(scratch) = ScratchDir::new("fuzz-globs") else {
        return;
    };
    let mut tar = TarWriter::new();
    for name in [
        "a",
        "usr/lib/x.py",
        "usr/lib/x/y/z",
        "[",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab",
    ] {
        tar.file(name, "");
    }
    let (Ok(path), Ok(reference)) = (scratch.write("input", tar.finish()), "base/g:1".parse())
    else {
        return;
    };
    let mut options = BuildOptions::new(reference, Source::Tar(path));
    options.jobs = 1;
    options.includes = lines
        .next()
        .into_iter()
        .filter(|line| !line.is_empty())
        .collect();
    options.excludes = lines.collect();
    let _ = build(
        &LayerStore::new(Arc::new(MemStore::new())),
        &options,
        &Silent,
    );
}
