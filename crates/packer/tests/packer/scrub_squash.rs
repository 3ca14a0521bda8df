//! Secrets that would leave by a way around the rules: with the diffs that a snapshot takes in, in the
//! frames of what stays, under another name, behind padding.

use std::path::Path;
use std::time::SystemTime;

use layerpack_fixtures::ScratchDir;
use layerpack_packer::{
    LowerLayer, MergeOptions, OverlayXattrs, PackDiffOptions, PackDiffReport, PackError, Rules,
    Silent, merge, pack_diff,
};
use layerpack_store::{LayerStore, ParentRef};
use rustix::fs::{XattrFlags, setxattr};

use crate::support::{Packed, Tree, memory_store};

const MARKER: &str = "TOPSECRETMARKER-7f3a";

fn options(upper: &Path, reference: &str, rules: Option<&str>) -> PackDiffOptions {
    let mut options = PackDiffOptions::new(reference.parse().unwrap(), upper.to_owned());
    options.overlay_xattrs = OverlayXattrs::User;
    options.rules = rules.map(|rules| Rules::parse(rules, SystemTime::now()).unwrap());
    options
}

#[track_caller]
fn packed(store: &LayerStore, options: &PackDiffOptions) -> (Packed, PackDiffReport) {
    let report = pack_diff(store, options, &Silent).unwrap();
    let digest = report.published.as_ref().unwrap().digest;
    (Packed::load(store, digest, Vec::new()), report)
}

fn write(dir: &Path, path: &str, bytes: impl AsRef<[u8]>) {
    let path = dir.join(path);
    fs_err::create_dir_all(path.parent().unwrap()).unwrap();
    fs_err::write(path, bytes).unwrap();
}

fn whiteout(dir: &Path, path: &str) {
    write(dir, path, "");
    let none = XattrFlags::empty();
    setxattr(dir.join(path), "user.overlay.whiteout", b"y", none).unwrap();
    let parent = dir.join(path);
    setxattr(parent.parent().unwrap(), "user.overlay.opaque", b"x", none).unwrap();
}

fn parent(layer: &Packed) -> ParentRef {
    ParentRef {
        reference: Some(layer.manifest.reference()),
        manifest: layer.digest,
    }
}

/// Whether anything that goes along with a layer holds the marker.
fn travels(layer: &Packed) -> bool {
    let frames = 0..u32::try_from(layer.locator.frames().len()).unwrap();
    let mut raw = frames.map(|n| layer.store.read_frame(&layer.locator, n).unwrap());
    raw.any(|raw| {
        raw.windows(MARKER.len())
            .any(|part| part == MARKER.as_bytes())
    })
}

/// What each file holds.
fn text(tree: &Tree, path: &str) -> String {
    String::from_utf8(tree.get(path).content()).unwrap()
}

#[test]
fn rules_hold_for_what_a_squash_takes_in() {
    let scratch = ScratchDir::new("squash-rules").unwrap();
    let (old, new) = (scratch.mkdir("old").unwrap(), scratch.mkdir("new").unwrap());
    let store = memory_store();
    let padding = "0123456789abcdef".repeat(64 << 10);
    for (path, bytes) in [
        ("etc/one", "1"),
        ("etc/id_rsa", MARKER),
        ("root/.ssh/config", MARKER),
        ("srv/notes", MARKER),
        ("srv/replaced", MARKER),
        ("srv/removed", MARKER),
        ("srv/keep/allowed", "INTERNAL is fine here"),
    ] {
        write(&old, path, bytes);
    }
    write(&old, "srv/large", format!("{padding}{MARKER}"));
    write(&old, "srv/linked", "of two names");
    fs_err::hard_link(old.join("srv/linked"), old.join("id_dsa")).unwrap();
    whiteout(&old, "opt/gone");
    let (first, _) = packed(&store, &options(&old, "diff/d:1", None));
    // A second diff puts a secret where the first removed something.
    let middle = scratch.mkdir("middle").unwrap();
    write(&middle, "opt/gone", MARKER);
    let mut second = options(&middle, "diff/d:2", None);
    second.stack = vec![parent(&first)];
    let (second, _) = packed(&store, &second);
    write(&new, "etc/two", "2");
    write(&new, "srv/replaced", "harmless");
    whiteout(&new, "srv/removed");
    let rules = format!(
        "sets = [\"ssh\", \"keys\"]\nmax-content = \"64k\"\n\
         [[rule]]\naction = \"keep\"\nglobs = [\"/srv/keep/\", \"/srv/keep/**\"]\n\
         [[rule]]\nname = \"mine\"\ntext = [\"INTERNAL\", \"{MARKER}\"]\n"
    );
    let mut third = options(&new, "diff/d:3", Some(&rules));
    third.stack = vec![parent(&first), parent(&second)];
    third.squash = third.stack.clone();
    third.lowers = vec![LowerLayer {
        name: "diff/d:1".to_owned(),
        path: old.clone(),
        diff: true,
    }];
    let (layer, report) = packed(&store, &third);
    let tree = layer.tree();
    for path in [
        "etc/id_rsa",
        "root/.ssh",
        "srv/notes",
        "srv/large",
        "srv/linked",
        "id_dsa",
    ] {
        assert!(!tree.has(path), "{path}");
    }
    assert_eq!(text(&tree, "etc/one") + &text(&tree, "etc/two"), "12");
    assert_eq!(text(&tree, "srv/replaced"), "harmless");
    assert!(tree.has("srv/keep/allowed"));
    assert!(tree.is_whiteout("srv/removed") && tree.is_whiteout("opt/gone"));
    let found = &report.scrub.scrubbed.named;
    let named = |path: &str| {
        let found = found.iter().find(|f| f.path == path);
        found.map(|f| (f.rule.as_str(), f.pattern.as_deref()))
    };
    assert_eq!(named("/etc/id_rsa"), Some(("keys", None)));
    assert_eq!(named("/srv/notes"), Some(("mine", Some("text"))));
    assert_eq!(named("/srv/large"), Some(("mine", Some("text"))));
    assert_eq!(named("/srv/linked"), Some(("keys", Some("hard-link"))));
    assert_eq!(named("/srv/replaced"), None);
    let below = &report.scrub.still_below;
    assert!(below.is_empty(), "it lies on none of them: {below:?}");
    assert!(travels(&first) && travels(&second) && !travels(&layer));

    // What is forbidden makes it fail, whatever layer it comes from; a dry run says so.
    let forbid = "[[rule]]\nname = \"no\"\naction = \"forbid\"\nglobs = [\"/srv/notes\"]\n";
    third.rules = Some(Rules::parse(forbid, SystemTime::now()).unwrap());
    third.reference = "diff/d:4".parse().unwrap();
    let error = pack_diff(&store, &third, &Silent).unwrap_err();
    assert!(error.to_string().contains("/srv/notes"), "{error}");
    third.dry_run = true;
    let report = pack_diff(&store, &third, &Silent).unwrap();
    assert_eq!(report.scrub.forbidden.named[0].path, "/srv/notes");
}

#[test]
fn a_merge_that_reframes_takes_nothing_else_along() {
    let scratch = ScratchDir::new("reframe").unwrap();
    let (low, high) = (
        scratch.mkdir("low").unwrap(),
        scratch.mkdir("high").unwrap(),
    );
    let store = memory_store();
    for (path, bytes) in [("a", "first"), ("b", MARKER), ("c", "third")] {
        write(&low, path, bytes);
    }
    let large: Vec<u8> = (0..400_000_u32)
        .flat_map(|i| i.wrapping_mul(i).to_le_bytes())
        .collect();
    write(&low, "large", &large);
    let (first, _) = packed(&store, &options(&low, "diff/m:1", None));
    whiteout(&high, "b");
    let mut second = options(&high, "diff/m:2", None);
    second.stack = vec![parent(&first)];
    packed(&store, &second);
    let merged = |version: u32, reframe| {
        let layers = ["diff/m:1", "diff/m:2"].map(|text| text.parse().unwrap());
        let reference = format!("diff/all:{version}").parse().unwrap();
        let mut options = MergeOptions::new(reference, layers.into());
        options.reframe = reframe;
        let report = merge(&store, &options, &Silent).unwrap();
        let layer = Packed::load(&store, report.published.digest, Vec::new());
        (layer, report.published)
    };
    let (plain, _) = merged(1, false);
    assert!(travels(&plain), "nothing to test");
    let (layer, published) = merged(2, true);
    assert!(!travels(&layer));
    assert_eq!(layer.manifest.layer_id(), plain.manifest.layer_id());
    assert_eq!(published.stats.new_packs, 1);
    // Frames that were its own stayed where they were.
    assert!(published.stats.new_raw_bytes < large.len() as u64);
    let tree = layer.tree();
    assert_eq!(text(&tree, "a") + &text(&tree, "c"), "firstthird");
    assert_eq!(tree.get("large").content(), large);
    // The locator is that of the map: the plain one is rid of it too.
    assert!(!travels(&Packed::load(&store, plain.digest, Vec::new())));
}

#[test]
fn all_names_of_a_file_go_that_one_name_of_is_left_out() {
    let scratch = ScratchDir::new("links").unwrap();
    let upper = scratch.mkdir("upper").unwrap();
    write(&upper, "root/.ssh/id_rsa", MARKER);
    write(&upper, "root/.ssh/known", "wanted");
    for (from, to) in [
        ("root/.ssh/id_rsa", "hardkey"),
        ("root/.ssh/id_rsa", "zz"),
        ("root/.ssh/known", "known"),
    ] {
        fs_err::hard_link(upper.join(from), upper.join(to)).unwrap();
    }
    write(&upper, "plain", "x");
    fs_err::hard_link(upper.join("plain"), upper.join("plain-too")).unwrap();
    let rules =
        "sets = [\"ssh\"]\n[[rule]]\nname = \"ok\"\naction = \"keep\"\nglobs = [\"/known\"]\n";
    let (layer, report) = packed(&memory_store(), &options(&upper, "diff/l:1", Some(rules)));
    let tree = layer.tree();
    assert_eq!(tree.paths(), ["", "known", "plain", "plain-too", "root"]);
    assert!(!travels(&layer));
    let scrub = &report.scrub;
    let mut other: Vec<&str> = (scrub.scrubbed.named.iter())
        .filter(|f| f.pattern.as_deref() == Some("hard-link"))
        .map(|f| f.path.as_str())
        .collect();
    other.sort_unstable();
    assert_eq!(other, ["/hardkey", "/zz"]);
    assert_eq!((scrub.scrubbed.total.entries, scrub.kept.entries), (4, 3));
}

#[test]
fn padding_hides_nothing_from_what_is_forbidden() {
    let scratch = ScratchDir::new("padding").unwrap();
    let upper = scratch.mkdir("upper").unwrap();
    let token = format!(" ghp_{} ", "a1".repeat(18));
    let size = 3 << 20;
    let place = |at: usize| {
        let mut bytes = vec![b'.'; size];
        bytes[at..at + token.len()].copy_from_slice(token.as_bytes());
        bytes
    };
    let rules = |action: &str| {
        format!(
            "max-content = \"1k\"\n\
             [[rule]]\nname = \"no-keys\"\naction = \"{action}\"\ncontent = [\"github-token\"]\n"
        )
    };
    // Also across the borders of what is read and looked at together.
    let window = (1 << 20) + 4096;
    for at in [
        0,
        (256 << 10) - 20,
        window - 20,
        window - 4096,
        window + (1 << 20) - 5,
        size - token.len(),
    ] {
        write(&upper, "srv/padded", place(at));
        let store = memory_store();
        let with = options(&upper, "diff/p:1", Some(&rules("forbid")));
        let error = pack_diff(&store, &with, &Silent).unwrap_err();
        assert!(
            matches!(error, PackError::Forbidden { .. })
                && error.to_string().contains("/srv/padded"),
            "{at}: {error}"
        );
        assert!(store.entries().unwrap().is_empty());
    }
    let with = options(&upper, "diff/p:1", Some(&rules("scrub")));
    let (layer, report) = packed(&memory_store(), &with);
    assert!(!layer.tree().has("srv/padded"));
    assert_eq!(report.scrub.too_large.total.entries, 0);
    // A hole is no border that hides something either.
    let file = fs_err::File::create(upper.join("srv/sparse")).unwrap();
    file.set_len(64 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(file.file(), token.as_bytes(), 40 << 20).unwrap();
    let (layer, _) = packed(&memory_store(), &with);
    assert!(!layer.tree().has("srv/sparse"));
    // For a suspicion, large files are only counted; what has no token is packed.
    let with = options(&upper, "diff/p:1", Some(&rules("suspicious")));
    let (_, report) = packed(&memory_store(), &with);
    assert_eq!(report.scrub.too_large.total.entries, 2);
    let named = &report.scrub.too_large.named;
    assert!(
        named.len() == 2
            && named
                .iter()
                .all(|f| f.path.starts_with('/') && !f.rule.is_empty()),
        "{named:?}"
    );
    write(&upper, "srv/padded", vec![b'.'; size]);
    fs_err::remove_file(upper.join("srv/sparse")).unwrap();
    let with = options(&upper, "diff/p:1", Some(&rules("forbid")));
    assert!(packed(&memory_store(), &with).0.tree().has("srv/padded"));
}

#[test]
fn what_a_layer_below_shows_is_said_though_it_was_not_touched() {
    let scratch = ScratchDir::new("untouched").unwrap();
    let upper = scratch.mkdir("upper").unwrap();
    let (high, low) = (
        scratch.mkdir("high").unwrap(),
        scratch.mkdir("low").unwrap(),
    );
    for path in [
        "root/.ssh/id_rsa",
        "home/me/.aws/credentials",
        "home/me/.netrc",
        "home/other/.netrc",
        "home/gone/.netrc",
        "home/opaque/.netrc",
        "etc/answers/one",
        "etc/allowed",
        "srv/deep/id_rsa",
        "var/cache/apt/x",
    ] {
        write(&low, path, "old");
    }
    fs_err::create_dir_all(low.join("home/me/.kube")).unwrap();
    write(&high, "home/me/.netrc", "newer");
    // A file where a directory was.
    write(&high, "home/gone", "");
    // The sandbox hides a whole directory, and touches one path.
    write(&upper, "home/opaque/x", "");
    let none = XattrFlags::empty();
    setxattr(upper.join("home/opaque"), "user.overlay.opaque", b"y", none).unwrap();
    write(&upper, "home/other/.netrc", "mine");
    let rules = "sets = [\"all\"]\n\
         [[rule]]\naction = \"keep\"\nglobs = [\"/etc/allowed\"]\n\
         [[rule]]\nname = \"no\"\naction = \"forbid\"\n\
         globs = [\"/etc/answers/*\", \"/etc/allowed\", \"/etc/absent\"]\n";
    let mut with = options(&upper, "diff/u:1", Some(rules));
    with.lowers = [("toolkit/t:1", &high), ("base/b:1", &low)]
        .map(|(name, path)| LowerLayer {
            name: name.to_owned(),
            path: path.clone(),
            diff: false,
        })
        .into();
    let report = pack_diff(&memory_store(), &with, &Silent).unwrap();
    let mut below: Vec<(&str, &str, usize, bool)> = (report.scrub.still_below.iter())
        .map(|b| (b.path.as_str(), b.rule.as_str(), b.layers.len(), b.visible))
        .collect();
    below.sort_unstable();
    assert_eq!(
        below,
        [
            ("/etc/answers", "no", 1, true),
            ("/home/gone/.netrc", "cloud-credentials", 1, false),
            ("/home/me/.aws", "cloud-credentials", 1, true),
            ("/home/me/.netrc", "cloud-credentials", 2, true),
            ("/home/opaque/.netrc", "cloud-credentials", 1, false),
            ("/home/other/.netrc", "cloud-credentials", 1, true),
            ("/root/.ssh", "ssh", 1, true),
        ]
    );
}

#[test]
fn a_new_file_beside_a_secret_below_does_not_silence_its_warning() {
    let scratch = ScratchDir::new("beside").unwrap();
    let (upper, low) = (
        scratch.mkdir("upper").unwrap(),
        scratch.mkdir("low").unwrap(),
    );
    write(&low, "root/.ssh/id_rsa", "old");
    write(&low, "home/me/.aws/credentials", "old");
    write(&upper, "root/.ssh/known_hosts", "new");
    // All that is below is in the report by itself.
    write(&upper, "home/me/.aws/credentials", "mine");
    write(&upper, "home/me/.aws/config", "mine");
    let mut with = options(&upper, "diff/u:1", Some("sets = [\"all\"]\n"));
    with.lowers = vec![LowerLayer {
        name: "base/b:1".to_owned(),
        path: low,
        diff: false,
    }];
    let report = pack_diff(&memory_store(), &with, &Silent).unwrap();
    let mut below: Vec<(&str, bool)> = (report.scrub.still_below.iter())
        .map(|b| (b.path.as_str(), b.visible))
        .collect();
    below.sort_unstable();
    assert_eq!(
        below,
        [("/home/me/.aws/credentials", true), ("/root/.ssh", true)]
    );
}

#[test]
fn other_names_of_a_file_below_are_told() {
    let scratch = ScratchDir::new("below-links").unwrap();
    let [upper, high, low] = ["upper", "high", "low"].map(|name| scratch.mkdir(name).unwrap());
    write(&low, "root/.ssh/id_rsa", "key");
    write(&low, "root/.netrc", "password");
    write(&low, "root/.pypirc", "token");
    for (file, link) in [
        ("root/.ssh/id_rsa", "srv/one"),
        ("root/.ssh/id_rsa", "srv/two"),
        ("root/.ssh/id_rsa", "srv/covered"),
        ("root/.ssh/id_rsa", "srv/removed"),
        ("root/.netrc", "srv/netrc"),
    ] {
        fs_err::create_dir_all(low.join("srv")).unwrap();
        fs_err::hard_link(low.join(file), low.join(link)).unwrap();
    }
    write(&high, "srv/covered", "");
    whiteout(&upper, "srv/removed");
    whiteout(&upper, "root/.netrc");
    let mut with = options(&upper, "diff/u:1", Some(Rules::standard()));
    with.lowers = [("diff/h:1", &high), ("base/b:1", &low)]
        .map(|(name, path)| LowerLayer {
            name: name.to_owned(),
            path: path.clone(),
            diff: false,
        })
        .into();
    let report = pack_diff(&memory_store(), &with, &Silent).unwrap();
    let links = |path: &str| {
        let mut below = report.scrub.still_below.iter();
        below.find(|b| b.path == path).unwrap().links.clone()
    };
    assert_eq!(links("/root/.ssh"), ["/srv/one", "/srv/two"]);
    assert_eq!(links("/root/.netrc"), ["/srv/netrc"]);
    assert!(links("/root/.pypirc").is_empty());
}

#[test]
fn excludes_hold_for_what_a_squash_takes_in() {
    let scratch = ScratchDir::new("excluded").unwrap();
    let [low, high] = ["low", "high"].map(|name| scratch.mkdir(name).unwrap());
    let store = memory_store();
    for path in ["srv/a.o", "srv/a.c", "build/x", "build/y/z", "kept"] {
        write(&low, path, format!("{path} {MARKER}"));
    }
    whiteout(&low, "old.o");
    whiteout(&low, "gone");
    let (first, _) = packed(&store, &options(&low, "diff/e:1", None));
    write(&high, "srv/b.o", "b");
    write(&high, "new", "n");
    let mut second = options(&high, "diff/e:2", None);
    second.stack = vec![parent(&first)];
    second.squash.clone_from(&second.stack);
    second.excludes = vec!["*.o".to_owned(), "/build/".to_owned(), "kept".to_owned()];
    let (layer, _) = packed(&store, &second);
    let tree = layer.tree();
    for path in ["srv/a.c", "new", "gone"] {
        assert!(tree.has(path), "{path}");
    }
    for path in ["srv/a.o", "srv/b.o", "build", "kept", "old.o"] {
        assert!(!tree.has(path), "{path}");
    }
    assert!(layer.manifest.parents.is_empty());
}

#[test]
fn rules_hold_for_a_squash_of_what_is_in_the_store() {
    let scratch = ScratchDir::new("stored").unwrap();
    let [low, high] = ["low", "high"].map(|name| scratch.mkdir(name).unwrap());
    let store = memory_store();
    write(&low, "root/.ssh/id_rsa", MARKER);
    fs_err::create_dir_all(low.join("srv")).unwrap();
    fs_err::hard_link(low.join("root/.ssh/id_rsa"), low.join("srv/link")).unwrap();
    write(&low, "work", "kept");
    let (first, _) = packed(&store, &options(&low, "diff/s:1", None));
    write(&high, "token", format!("ghp_{} {MARKER}", "a1B2".repeat(9)));
    write(&high, "notes", "answers");
    whiteout(&high, "below/secret");
    let mut second = options(&high, "diff/s:2", None);
    second.stack = vec![parent(&first)];
    packed(&store, &second);
    let squash = |version: u32, rules: &str| {
        let layers = ["diff/s:1", "diff/s:2"].map(|text| text.parse().unwrap());
        let reference = format!("diff/all:{version}").parse().unwrap();
        let options = MergeOptions::new(reference, layers.into());
        let rules = Rules::parse(rules, SystemTime::now()).unwrap();
        layerpack_packer::merge_with_rules(&store, &options, &[], &rules, &Silent)
    };
    let rules = "sets = [\"ssh\"]\n[[rule]]\nname = \"t\"\ncontent = [\"all\"]\n";
    let report = squash(1, rules).unwrap();
    let layer = Packed::load(&store, report.merged.published.digest, Vec::new());
    let tree = layer.tree();
    for path in ["root/.ssh", "srv/link", "token"] {
        assert!(!tree.has(path), "{path}");
    }
    assert_eq!(text(&tree, "work") + &text(&tree, "notes"), "keptanswers");
    assert!(tree.has("below/secret"), "what was removed stays removed");
    assert_eq!(report.scrub.scrubbed.total.entries, 3);
    assert!(!travels(&layer));
    assert!(layer.manifest.parameters.contains_key("scrub-rules"));
    // What is forbidden publishes nothing.
    let rules = "[[rule]]\naction = \"forbid\"\nglobs = [\"notes\"]\n";
    let error = squash(2, rules).unwrap_err();
    assert!(matches!(error, PackError::Forbidden { .. }), "{error}");
    assert!(!store.has_reference(&"diff/all:2".parse().unwrap()).unwrap());
}

/// A first snapshot without rules puts the secret into frames of the store with all else.
#[test]
fn what_an_earlier_snapshot_took_does_not_come_along_in_its_frames() {
    let scratch = ScratchDir::new("frames").unwrap();
    let upper = scratch.mkdir("upper").unwrap();
    let store = memory_store();
    write(&upper, "a", "before\n".repeat(100));
    write(&upper, "id_rsa", format!("{MARKER}\n"));
    write(&upper, "z", "after\n".repeat(100));
    let (first, _) = packed(&store, &options(&upper, "diff/d:1", None));
    assert!(travels(&first));
    let rules = "sets = [\"keys\"]\n";
    let (second, report) = packed(&store, &options(&upper, "diff/d:2", Some(rules)));
    assert_eq!(report.scrub.scrubbed.total.entries, 1);
    assert_eq!(text(&second.tree(), "a"), "before\n".repeat(100));
    assert!(!travels(&second));
}
