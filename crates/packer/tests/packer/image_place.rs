//! Images below a path, and large ones.

use layerpack_fixtures::ScratchDir;
use layerpack_packer::{Silent, import};

use crate::image::{Layout, layer, options};
use crate::support::{Packed, memory_store};

/// As a directory or an archive is put below a path, with what its layers mean to each other.
#[test]
fn an_image_is_put_below_a_path() {
    let scratch = ScratchDir::new("image").unwrap();
    let below = layer(|tar| {
        tar.dir("./", 0o711).dir("usr", 0o750);
        tar.file("usr/a", "1")
            .file("gone", "2")
            .dir("o", 0o700)
            .file("o/old", "3");
        tar.symlink("lib", "/usr").file("usr/h", "4");
    });
    let above = layer(|tar| {
        tar.whiteout("", "gone").opaque("o").file("o/new", "5");
        tar.file("lib/b", "6").hard_link("link", "lib/h");
    });
    let layers = [below.finish(), above.finish()];
    Layout::new(scratch.path()).image("t", "amd64", &layers);
    let import = |reference: &str, per_layer| {
        let mut options = options(&scratch, "");
        options.reference = reference.parse().unwrap();
        options.at = Some(b"opt/sub".to_vec());
        options.per_layer = per_layer;
        let store = memory_store();
        let report = import(&store, &options, &Silent).unwrap();
        let load = |report: layerpack_packer::BuildReport| {
            Packed::load(&store, report.published.digest, report.warnings)
        };
        report.layers.into_iter().map(load).collect::<Vec<_>>()
    };
    let whole = &import("base/i:1", false)[0];
    let tree = whole.tree();
    let paths = [
        "", "lib", "link", "o", "o/new", "usr", "usr/a", "usr/b", "usr/h",
    ];
    let mut placed: Vec<String> = (paths.iter())
        .map(|path| format!("opt/sub/{path}").trim_end_matches('/').to_owned())
        .chain(["".to_owned(), "opt".to_owned()])
        .collect();
    placed.sort();
    assert_eq!(tree.paths(), placed);
    assert_eq!(
        tree.links("opt/sub/link"),
        ["opt/sub/link", "opt/sub/usr/h"]
    );
    assert_eq!(tree.get("opt/sub").mode, 0o711);
    assert_eq!(tree.get("opt/sub/usr").mode, 0o750);
    assert_eq!(tree.get("opt/sub/lib").target, b"/usr");
    assert!(tree.is_implicit("opt") && !tree.is_implicit("opt/sub"));
    assert!(!whole.manifest.annotations.contains_key("oci.config"));
    assert!(whole.manifest.annotations.contains_key("oci.manifest"));
    // The place of anything but a base's root is for the layers below to describe.
    let workspace = &import("workspace/i:1", false)[0];
    assert!(workspace.tree().is_implicit("opt/sub"));
    // Layer by layer the marks stay.
    let each = import("base/i:1", true);
    let tree = each[1].tree();
    assert!(tree.is_whiteout("opt/sub/gone") && tree.is_opaque("opt/sub/o"));
    assert!(tree.has("opt/sub/usr/b") && tree.has("opt/sub/usr/h"));
    let mut outside = options(&scratch, "");
    outside.at = Some(b"../x".to_vec());
    let error = layerpack_packer::import(&memory_store(), &outside, &Silent);
    assert!(error.unwrap_err().to_string().contains("below the root"));
}

/// The root is no other place.
#[test]
fn an_image_at_the_root_keeps_its_configuration() {
    let scratch = ScratchDir::new("image").unwrap();
    let only = layer(|tar| {
        tar.dir("./", 0o711).file("a", "1");
    });
    Layout::new(scratch.path()).image("t", "amd64", &[only.finish()]);
    let manifest = |at: Option<&str>| {
        let mut options = options(&scratch, "");
        options.at = at.map(|at| at.as_bytes().to_vec());
        let store = memory_store();
        let report = import(&store, &options, &Silent).unwrap();
        Packed::load(&store, report.layers[0].published.digest, Vec::new()).manifest
    };
    let plain = manifest(None);
    assert!(plain.annotations.contains_key("oci.config"));
    for at in ["/", "", "./", "/x/.."] {
        let placed = manifest(Some(at));
        assert_eq!(placed.annotations, plain.annotations, "{at}");
        assert_eq!(placed.layer_id(), plain.layer_id(), "{at}");
    }
}

/// Entries that are set aside until contents are stored make the same layers.
#[test]
fn images_whose_entries_are_set_aside_are_the_same() {
    let scratch = ScratchDir::new("image").unwrap();
    let below = layer(|tar| {
        tar.dir("./", 0o711).file("usr/a", "1").file("gone", "2");
        tar.symlink("lib", "usr").file("lib/h", vec![7; 9000]);
    });
    let above = layer(|tar| {
        tar.whiteout("", "gone")
            .file("lib/b", "6")
            .hard_link("link", "lib/h");
        tar.file("usr/a", "again");
    });
    let layers = [below.finish(), above.finish()];
    Layout::new(scratch.path()).image("t", "amd64", &layers);
    for per_layer in [false, true] {
        for git in [false, true] {
            let made = |aside_after| {
                let mut options = options(&scratch, "");
                options.per_layer = per_layer;
                options.git_index = git;
                options.scratch = Some(scratch.join("cache"));
                options.aside_after = aside_after;
                let report = import(&memory_store(), &options, &Silent).unwrap();
                let digests = report.layers.iter().map(|layer| layer.published.digest);
                digests.collect::<Vec<_>>()
            };
            assert_eq!(made(0), made(1_000), "{per_layer} {git}");
            assert_eq!(made(2), made(1_000), "{per_layer} {git}");
        }
    }
}
