//! The node's cache: its limit, and the commands that look into it.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

mod support;

use layerpack_fixtures::rng::Rng;
use layerpack_fixtures::{is_root, skip};
use support::Node;

const MIB: u64 = 1 << 20;

fn content(number: u64) -> Vec<u8> {
    Rng::new(number + 1).bytes(3 << 20)
}

/// Mounts a layer, reads and compares its file, unmounts.
fn visit(node: &Node, number: u64) {
    let dir = node.scratch.mkdir(format!("mnt{number}")).unwrap();
    let dir = dir.display().to_string();
    node.ok(["mount", &format!("toolkit/t{number}:1"), &dir]);
    let read = fs_err::read(format!("{dir}/file{number}")).unwrap();
    node.ok(["umount", &dir]);
    assert!(read == content(number));
}

#[test]
fn privileged_the_cache_keeps_to_its_limit() {
    if !is_root() {
        skip!("needs root to mount layers");
    }
    let mut node = Node::new("cache");
    let limit = ("LAYERPACK_CACHE_MAX".to_owned(), "8m".to_owned());
    node.environment.push(limit);
    for number in 0..4 {
        let source = node.scratch.mkdir(format!("source{number}")).unwrap();
        fs_err::write(source.join(format!("file{number}")), content(number)).unwrap();
        node.build(&format!("toolkit/t{number}:1"), &source, &[]);
    }
    visit(&node, 0);
    let listed = node.json(["cache", "ls"]);
    assert_eq!(listed[0]["reference"], "toolkit/t0:1");
    assert!(listed[0]["disk_bytes"].as_u64().unwrap() >= 3 * MIB);
    let id = listed[0]["layer_id"].as_str().unwrap().to_owned();
    node.ok(["cache", "pin", "toolkit/t0:1"]);
    for _ in 0..2 {
        for number in 1..4 {
            visit(&node, number);
        }
    }
    let usage = node.json(["cache", "du"]);
    assert_eq!(usage["max_bytes"].as_u64(), Some(8 * MIB));
    assert!(usage["used_bytes"].as_u64().unwrap() <= 8 * MIB, "{usage}");
    assert!(
        usage["pinned_bytes"].as_u64().unwrap() >= 3 * MIB,
        "{usage}"
    );
    let text = node.ok(["cache", "du"]);
    assert!(text.contains("of 8.0 MiB"), "{text}");
    let text = node.ok(["cache", "ls"]);
    assert!(text.contains("pinned"), "{text}");

    // By name and by the first digits of the id, damaged or not.
    let short = id.get(..12).unwrap();
    let data = node.root().join("cache").join(&id[3..]).join("data");
    let checked = node.json(["cache", "verify", short]);
    assert_eq!(checked["layers"][0]["damaged"], 0);
    assert!(checked["layers"][0]["bytes"].as_u64().unwrap() >= 3 * MIB);
    let file = fs_err::OpenOptions::new().write(true).open(&data).unwrap();
    std::os::unix::fs::FileExt::write_all_at(file.file(), b"wrong", 100_000).unwrap();
    let checked = node.json(["cache", "verify"]);
    let of_id = checked["layers"].as_array().unwrap();
    let of_id = of_id.iter().find(|layer| layer["layer_id"] == id.as_str());
    assert_eq!(of_id.unwrap()["damaged"], 1, "{checked}");
    visit(&node, 0);

    let evicted = node.json(["cache", "evict", "--all"]);
    assert_eq!(evicted["pinned"][0], id.as_str());
    node.ok(["cache", "unpin", short]);
    let evicted = node.json(["cache", "evict", "toolkit/t0:1"]);
    assert!(
        evicted["freed_bytes"].as_u64().unwrap() > 5 * MIB / 2,
        "{evicted}"
    );
    for number in 0..4 {
        visit(&node, number);
    }
    assert!(
        node.fails(1, ["cache", "pin", "b3:0123456789"])
            .contains("b3:0123456789")
    );
    assert!(
        node.fails(1, ["cache", "evict", "base/none:1"])
            .contains("base/none:1")
    );

    node.ok(["daemon", "stop"]);
    node.environment[0].1 = "much".to_owned();
    let error = node.fails(1, ["cache", "du"]);
    assert!(error.contains("LAYERPACK_CACHE_MAX"), "{error}");
    node.environment.clear();
    assert_eq!(node.json(["cache", "du"])["max_bytes"].as_u64(), None);
    // A cache that cannot be opened is no cache that is good.
    fs_err::remove_file(&data).unwrap();
    fs_err::create_dir(&data).unwrap();
    let output = node.run(["cache", "verify"]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    let remedy = format!("delete the directory {}", data.parent().unwrap().display());
    assert!(error.contains(&remedy), "{error}");
}

#[test]
fn privileged_a_new_version_fetches_what_is_new_in_it() {
    if !is_root() {
        skip!("needs root to mount layers");
    }
    let node = Node::new("versions");
    let source = node.scratch.mkdir("source").unwrap();
    for number in 0..2 {
        fs_err::write(source.join(format!("file{number}")), content(number)).unwrap();
    }
    node.build("base/a:1", &source, &[]);
    fs_err::write(source.join("file2"), content(2)).unwrap();
    node.build("base/a:2", &source, &[]);
    let status = |version: u32| {
        let name = format!("base/a:{version}");
        let status = node.json(["daemon", "status"]);
        let layers = status["node"]["layers"].as_array().unwrap().clone();
        let found = layers.into_iter().find(|l| l["reference"] == name.as_str());
        let found = found.unwrap();
        move |field: &str| found[field].as_u64().unwrap()
    };
    for version in 1..3_u32 {
        let dir = node.scratch.mkdir(format!("mnt{version}")).unwrap();
        let dir = dir.display().to_string();
        let reference = format!("base/a:{version}");
        node.ok(["mount", "--prefetch", "none", &reference, &dir]);
        for number in 0..=u64::from(version) {
            let read = fs_err::read(format!("{dir}/file{number}")).unwrap();
            assert!(read == content(number), "{version} {number}");
        }
        node.ok(["umount", &dir]);
    }
    let (old, new) = (status(1), status(2));
    assert_eq!(old("copied_bytes"), 0);
    assert!(old("fetched_raw_bytes") >= 6 * MIB);
    // A frame in which two files meet may be fetched for what is new in it.
    assert!(new("copied_bytes") > 5 * MIB, "{}", new("copied_bytes"));
    assert!(
        new("fetched_raw_bytes") < 4 * MIB,
        "{}",
        new("fetched_raw_bytes")
    );
    support::assert_clean(&node);
}
