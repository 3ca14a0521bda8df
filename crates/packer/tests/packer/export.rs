//! Exports: what comes back from them, and that equal layers give equal bytes.

use std::path::Path;

use layerpack_fixtures::ScratchDir;
use layerpack_fixtures::rng::Rng;
use layerpack_fixtures::tar::{Header, TarWriter, kind};
use layerpack_packer::{
    Compression, ExportOptions, ExportReport, ImportOptions, PackError, Silent, Source, export,
    export_layer, import,
};
use layerpack_store::LayerStore;

use crate::difference::difference;
use crate::merge::{pack, random_layer, try_merge};
use crate::support::{Packed, chain, memory_store, options, try_pack};

pub fn try_export(
    store: &LayerStore,
    layers: &[&str],
    target: &str,
    change: impl FnOnce(&mut ExportOptions),
) -> Result<ExportReport, PackError> {
    let resolve = |text: &&str| store.resolve(&text.parse().unwrap()).unwrap();
    let layers = layers.iter().map(resolve).collect();
    let mut options = ExportOptions::new(layers, target.parse()?);
    change(&mut options);
    export(store, &options, &Silent)
}

#[track_caller]
fn import_from(store: &LayerStore, source: &str, reference: &str, per_layer: bool) -> Vec<Packed> {
    let mut options = ImportOptions::new(reference.parse().unwrap(), source.parse().unwrap());
    options.per_layer = per_layer;
    let report =
        import(store, &options, &Silent).unwrap_or_else(|error| panic!("{}", chain(&error)));
    let digests = report
        .layers
        .into_iter()
        .map(|layer| layer.published.digest);
    digests
        .map(|digest| Packed::load(store, digest, Vec::new()))
        .collect()
}

/// Everything that ustar's fields cannot hold, and what they can.
fn awkward() -> TarWriter {
    let mut tar = TarWriter::new();
    let long = format!("{}/{}", "d".repeat(200), "n".repeat(250));
    tar.dir("./", 0o711);
    tar.pax(&[
        ("SCHILY.xattr.user.empty", ""),
        ("SCHILY.xattr.user.text", "a=b\n"),
        ("LIBARCHIVE.xattr.user.a%3db%0a", "AP+/"),
        (
            "SCHILY.xattr.security.capability",
            "\u{1}\0\0\u{2}\0\u{4}\0\0\0\0\0\0\0\0\0\0\0\0\0\0",
        ),
        ("mtime", "-12.5"),
        ("uid", "4294967294"),
        ("gid", "3000000"),
    ]);
    tar.entry(&Header::new(kind::FILE, "x").mode(0o6755), b"x");
    tar.named(Header::new(kind::DIR, &long[..200]).mode(0o700), b"");
    tar.named(Header::new(kind::FILE, &long), b"long");
    tar.named(Header::new(kind::LINK, "link").link(&long), b"");
    tar.named(
        Header::new(kind::SYMLINK, "sym").link("t".repeat(4000)),
        b"",
    );
    tar.hard_link("sym2", "sym");
    tar.entry(&Header::new(kind::FILE, b"not-utf8-\xff\xfe"), b"1");
    tar.entry(&Header::new(kind::CHAR, "c").device(5, 300), b"");
    tar.entry(&Header::new(kind::BLOCK, "b").device(259, 70_000), b"");
    tar.entry(&Header::new(kind::FIFO, "p").mtime(1 << 33), b"");
    tar.sparse_pax_1_0(
        "sparse",
        &[(0, 10), (3 << 20, 4096), (9 << 30, 0)],
        9 << 30,
        &[7; 4106],
    );
    tar.sparse_pax_1_0("holes", &[(128 << 10, 512)], 256 << 10, &[3; 512]);
    let noise = Rng::new(5).bytes(700_000);
    tar.file("big", &noise)
        .file("copy", &noise)
        .file("empty", "");
    tar.dir("e", 0o1777);
    tar
}

#[test]
fn a_plain_archive_brings_the_same_layer_back() {
    let store = memory_store();
    let scratch = ScratchDir::new("export").unwrap();
    let base = pack(&store, "base/a:1", awkward());
    let path = scratch.join("a.tar");
    let report = try_export(
        &store,
        &["base/a:1"],
        &format!("tar:{}", path.display()),
        |_| {},
    )
    .unwrap();
    let bytes = fs_err::read(&path).unwrap();
    assert_eq!(report.bytes, bytes.len() as u64);
    assert_eq!(report.digest, crate::image::sha(&bytes));
    assert!(report.bytes < 16 << 20, "holes were written");
    let back = try_pack(&memory_store(), &options("base/a:1", Source::Tar(path))).unwrap();
    let (left, right) = (base.tree(), back.tree());
    for (path, node) in &left.nodes {
        assert_eq!(Some(node), right.nodes.get(path), "{}", path.escape_ascii());
    }
    assert_eq!(back.manifest.layer_id(), base.manifest.layer_id());
}

#[test]
fn an_image_brings_the_layers_back_one_by_one_and_merged() {
    for seed in 0..12 {
        let mut rng = Rng::new(7000 + seed);
        let store = memory_store();
        let names = ["base/l:0", "diff/l:1", "diff/l:2"];
        let layers: Vec<Packed> = (0u64..)
            .zip(names)
            .map(|(number, name)| pack(&store, name, random_layer(&mut rng, number, number > 0)))
            .collect();
        let merged = try_merge(&store, "base/m:1", &names).unwrap();
        let scratch = ScratchDir::new("export").unwrap();
        for (kind, compression) in [
            ("oci", Compression::Gzip),
            ("oci", Compression::Zstd),
            ("oci", Compression::None),
            ("docker-archive", Compression::None),
        ] {
            let target = format!(
                "{kind}:{}",
                scratch.join(format!("{kind}{compression:?}")).display()
            );
            let report = try_export(&store, &names, &target, |options| {
                options.compression = compression;
            })
            .unwrap();
            assert_eq!(report.layers, 3);
            let back = memory_store();
            let flat = import_from(&back, &target, "base/flat:1", false);
            assert_eq!(
                flat[0].manifest.layer_id(),
                merged.manifest.layer_id(),
                "{target}"
            );
            let each = import_from(&back, &target, "base/each:1", true);
            for (back, layer) in each.iter().zip(&layers) {
                assert_eq!(back.tree().paths(), layer.tree().paths());
                assert_eq!(back.manifest.layer_id(), layer.manifest.layer_id());
            }
        }
    }
}

#[test]
fn implicit_directories_have_an_entry_only_where_nobody_below_has_them() {
    let store = memory_store();
    let mut base = TarWriter::new();
    base.dir("srv", 0o750).symlink("l", "srv");
    pack(&store, "base/b:1", base);
    let mut upper = TarWriter::new();
    upper.file("srv/a", "1").file("new/b", "1").file("l/c", "1");
    pack(&store, "workspace/w:1", upper);
    let scratch = ScratchDir::new("export").unwrap();
    let target = format!("oci:{}", scratch.join("o").display());
    let names = ["base/b:1", "workspace/w:1"];
    try_export(&store, &names, &target, |_| {}).unwrap();
    let each = import_from(&store, &target, "base/each:1", true);
    let tree = each[1].tree();
    // overlayfs shows a directory where the base has a link; so must the image.
    assert_eq!(
        tree.paths(),
        ["", "l", "l/c", "new", "new/b", "srv", "srv/a"]
    );
    assert_eq!(tree.implicit, [&b""[..], b"srv"]);
    let flat = import_from(&store, &target, "base/flat:1", false);
    assert_eq!(flat[0].tree().get("srv").mode, 0o750);
}

fn all_files(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let mut files = Vec::new();
    let mut todo = vec![dir.to_owned()];
    while let Some(at) = todo.pop() {
        for entry in fs_err::read_dir(&at).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                todo.push(path);
            } else {
                let name = path.strip_prefix(dir).unwrap().display().to_string();
                files.push((name, fs_err::read(&path).unwrap()));
            }
        }
    }
    files.sort();
    files
}

#[test]
fn same_layers_same_bytes_and_nothing_left_over() {
    let scratch = ScratchDir::new("export").unwrap();
    let mut seen = Vec::new();
    for round in 0..2 {
        // Stores that came about differently.
        let store = memory_store();
        if round == 1 {
            pack(
                &store,
                "base/other:1",
                random_layer(&mut Rng::new(1), 0, false),
            );
        }
        pack(&store, "base/a:1", awkward());
        let dir = scratch.mkdir(format!("{round}")).unwrap();
        for target in ["tar:t", "oci:o", "docker-archive:d"] {
            let (scheme, name) = target.split_once(':').unwrap();
            let target = format!("{scheme}:{}", dir.join(name).display());
            try_export(&store, &["base/a:1"], &target, |_| {}).unwrap();
        }
        seen.push(all_files(&dir));
    }
    assert_eq!(seen[0], seen[1]);
    let names: Vec<&str> = seen[0].iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names.len(), 7, "{names:?}");
}

#[test]
fn a_layout_keeps_its_other_images_and_a_foreign_directory_is_refused() {
    let store = memory_store();
    for (reference, file) in [("base/a:1", "one"), ("base/a:2", "two")] {
        let mut tar = TarWriter::new();
        tar.file(file, "1");
        pack(&store, reference, tar);
    }
    let scratch = ScratchDir::new("export").unwrap();
    let target = format!("oci:{}", scratch.join("o").display());
    for reference in ["base/a:1", "base/a:2", "base/a:1"] {
        try_export(&store, &[reference], &target, |_| {}).unwrap();
    }
    for (tag, file) in [("1", "one"), ("2", "two")] {
        let back = import_from(
            &store,
            &format!("{target}:{tag}"),
            &format!("base/b:{tag}"),
            false,
        );
        assert_eq!(back[0].tree().paths(), ["", file]);
    }
    scratch.write("full/file", "x").unwrap_or_else(|_| {
        scratch.mkdir("full").unwrap();
        scratch.write("full/file", "x").unwrap()
    });
    let target = format!("oci:{}", scratch.join("full").display());
    let error = try_export(&store, &["base/a:1"], &target, |_| {}).unwrap_err();
    assert!(chain(&error).contains("no OCI layout"), "{}", chain(&error));
    assert_eq!(all_files(&scratch.join("full")).len(), 1);
    let error = try_export(&store, &["base/a:1"], "tar:/no/such/dir/t", |_| {}).unwrap_err();
    assert!(
        chain(&error).contains("/no/such/dir/t"),
        "{}",
        chain(&error)
    );
    for bad in ["", "tar", "tar:", "zip:x"] {
        assert!(
            try_export(&store, &["base/a:1"], bad, |_| {}).is_err(),
            "{bad}"
        );
    }
}

#[test]
fn the_image_is_run_as_the_one_that_it_came_from() {
    let store = memory_store();
    let scratch = ScratchDir::new("export").unwrap();
    let mut tar = TarWriter::new();
    tar.file("a", "1");
    let bytes = tar.finish();
    crate::image::Layout::new(scratch.path()).image("t", "arm64", &[bytes]);
    let packed = import_from(
        &store,
        &format!("oci:{}", scratch.path().display()),
        "base/i:1",
        false,
    );
    assert_eq!(packed[0].manifest.platform, "linux/arm64");
    try_merge(&store, "base/i:2", &["base/i:1"]).unwrap();
    let target = format!("oci:{}", scratch.join("o").display());
    try_export(&store, &["base/i:2"], &target, |_| {}).unwrap();
    let back = import_from(&store, &target, "base/i:3", false);
    assert_eq!(
        back[0].manifest.annotations["oci.config"],
        r#"{"Env":["A=b"]}"#
    );
    assert_eq!(back[0].manifest.platform, "linux/arm64");
}

/// What a first export left when it failed does not stand in the way of the next.
#[test]
fn a_layout_that_was_begun_is_gone_on_with() {
    let store = memory_store();
    let mut tar = TarWriter::new();
    tar.dir("./", 0o755).file("etc", "1");
    pack(&store, "base/a:1", tar);
    let scratch = ScratchDir::new("begun").unwrap();
    let dir = scratch.path().join("layout");
    fs_err::create_dir_all(dir.join("blobs/sha256")).unwrap();
    fs_err::write(dir.join("blobs/sha256/.layerpack-x"), "half").unwrap();
    try_export(&store, &["base/a:1"], &target("oci", &dir), |_| {}).unwrap();
    assert_eq!(
        import_from(&store, &target("oci", &dir), "base/b:1", false).len(),
        1
    );
    // Other files are somebody's.
    let other = scratch.path().join("other");
    fs_err::create_dir_all(&other).unwrap();
    fs_err::write(other.join("notes"), "").unwrap();
    let error = try_export(&store, &["base/a:1"], &target("oci", &other), |_| {}).unwrap_err();
    assert!(error.to_string().contains("no OCI layout"), "{error}");
}

/// A pipe or a device is written to, never replaced; what needs a file says so.
#[test]
fn what_is_no_file_is_not_replaced() {
    let store = memory_store();
    let mut tar = TarWriter::new();
    tar.dir("./", 0o755).file("a", "1");
    pack(&store, "base/a:1", tar);
    let scratch = ScratchDir::new("special").unwrap();
    let dir = scratch.path();
    let plain = dir.join("plain.tar");
    try_export(&store, &["base/a:1"], &target("tar", &plain), |_| {}).unwrap();
    let expected = fs_err::read(&plain).unwrap();

    let pipe = dir.join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    assert!(made.unwrap().success());
    for scheme in ["docker-archive", "tar"] {
        let reader = (scheme == "tar").then(|| {
            let pipe = pipe.clone();
            std::thread::spawn(move || fs_err::read(pipe).unwrap())
        });
        let done = try_export(&store, &["base/a:1"], &target(scheme, &pipe), |_| {});
        assert_eq!(done.is_ok(), scheme == "tar", "{done:?}");
        if let Some(reader) = reader {
            assert!(reader.join().unwrap() == expected);
        }
        assert!(std::os::unix::fs::FileTypeExt::is_fifo(
            &fs_err::metadata(&pipe).unwrap().file_type()
        ));
    }
    // Through a link the file behind it is replaced, not the link.
    let link = dir.join("link");
    fs_err::os::unix::fs::symlink("plain.tar", &link).unwrap();
    fs_err::write(&plain, "old").unwrap();
    try_export(&store, &["base/a:1"], &target("tar", &link), |_| {}).unwrap();
    assert!(fs_err::read(&plain).unwrap() == expected);
    assert!(fs_err::symlink_metadata(&link).unwrap().is_symlink());
    assert!("tar:-".parse::<layerpack_packer::ExportTarget>().is_err());
}

/// In an image's layer `.wh.x` takes `x` away: a file of that name cannot be told from it.
#[test]
fn names_of_whiteouts_are_no_names_of_files_in_an_image() {
    let store = memory_store();
    let scratch = ScratchDir::new("marks").unwrap();
    fs_err::create_dir_all(scratch.join("tree/etc")).unwrap();
    fs_err::write(scratch.join("tree/etc/.wh.foo"), "x").unwrap();
    let tree = Source::Dir(scratch.join("tree"));
    let packed = try_pack(&store, &options("base/a:1", tree)).unwrap();
    let (image, layer) = (scratch.join("image"), scratch.join("layer.tar"));
    let told = |error: PackError| {
        let error = error.to_string();
        assert!(
            error.contains("etc/.wh.foo") && error.contains("rename or exclude"),
            "{error}"
        );
    };
    told(try_export(&store, &["base/a:1"], &target("oci", &image), |_| {}).unwrap_err());
    told(export_layer(&store, &[packed.digest], &layer, &Silent).unwrap_err());
    assert!(!layer.exists() && !image.join("index.json").exists());
    // An archive of the tree has it.
    let tar = target("tar", &scratch.join("tree.tar"));
    try_export(&store, &["base/a:1"], &tar, |_| {}).unwrap();
}

fn target(scheme: &str, path: &Path) -> String {
    format!("{scheme}:{}", path.display())
}

/// That such a file is gone cannot be said in an image's layer either, and need not where nobody has it.
#[test]
fn a_file_with_a_whiteouts_name_that_is_gone_is_told_where_somebody_has_it() {
    let store = memory_store();
    let scratch = ScratchDir::new("marks").unwrap();
    let (old, new) = (scratch.mkdir("old").unwrap(), scratch.mkdir("new").unwrap());
    fs_err::create_dir_all(old.join("etc")).unwrap();
    fs_err::write(old.join("etc/.wh.foo"), "x").unwrap();
    fs_err::write(old.join("gone"), "x").unwrap();
    fs_err::create_dir_all(new.join("etc")).unwrap();
    let base = try_pack(&store, &options("base/old:1", Source::Dir(old))).unwrap();
    let diff = difference(
        &store,
        "diff/d:1",
        Source::Dir(new.clone()),
        &["base/old:1"],
    );
    assert!(diff.tree().is_whiteout("etc/.wh.foo") && diff.tree().is_whiteout("gone"));
    let layer = scratch.join("layer.tar");
    let error = export_layer(&store, &[base.digest, diff.digest], &layer, &Silent);
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("etc/.wh.foo") && error.contains("takes this file"),
        "{error}"
    );
    assert!(!layer.exists());
    // On a base that has no such file the same layer says nothing of it.
    let other = try_pack(&store, &options("base/new:1", Source::Dir(new))).unwrap();
    for stack in [&[other.digest, diff.digest][..], &[diff.digest]] {
        export_layer(&store, stack, &layer, &Silent).unwrap();
        let bytes = fs_err::read(&layer).unwrap();
        let has = |name: &[u8]| bytes.windows(name.len()).any(|there| there == name);
        assert!(has(b".wh.gone") && !has(b".wh.foo"));
    }
}
