//! Images from and to registries, and a store in one. Needs Debian's `docker-registry`.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

mod support;

use std::process::Command;

use layerpack_fixtures::servers::DockerRegistry;
use layerpack_fixtures::tar::TarWriter;
use layerpack_fixtures::{ScratchDir, find_tool};
use support::{Node, build_line};

#[track_caller]
fn build(node: &Node, kind: &str, name: &str, from: &str, more: &[&str]) -> serde_json::Value {
    let reference = format!("{kind}/{name}:1");
    let mut line = vec!["-o", "json"];
    line.extend(build_line(&reference, from, more));
    serde_json::from_str(&node.ok(line)).unwrap()
}

#[test]
fn an_image_goes_to_a_registry_and_comes_back() {
    let server = DockerRegistry::start().unwrap();
    let node = Node::new("registry");
    node.build_stack();
    let merged = node.json([
        "merge",
        "base/a:1",
        "workspace/a:1",
        "--name",
        "a",
        "--version",
        "merged",
    ]);
    let target = format!("registry:{}/images/a:v1", server.host());
    let first = node.json(["export", "base/a:1", "workspace/a:1", "--to", &target]);
    assert_eq!(first["name"], "v1");
    assert_eq!(first["reused_bytes"], 0);
    // Again: nothing but the manifest is sent.
    let again = node.json(["export", "base/a:1", "workspace/a:1", "--to", &target]);
    assert_eq!(again["digest"], first["digest"]);
    let sent = again["bytes"].as_u64().unwrap() - again["reused_bytes"].as_u64().unwrap();
    assert!(sent < 2000, "{again}");
    // Into another repository, from the first.
    let other = format!("registry:{}/images/b", server.host());
    let from = format!("{}/images/a", server.host());
    let mounted = node.json([
        "export",
        "base/a:1",
        "workspace/a:1",
        "--to",
        &other,
        "--tag",
        "v2",
        "--mount-from",
        &from,
    ]);
    assert_eq!(mounted["digest"], first["digest"]);
    assert_eq!(mounted["reused_bytes"], again["reused_bytes"]);

    let digest = first["digest"].as_str().unwrap();
    for (name, source) in [
        ("tag", target.clone()),
        (
            "digest",
            format!("registry:{}/images/b@{digest}", server.host()),
        ),
    ] {
        let back = build(&node, "base", name, &source, &[]);
        assert_eq!(back["layer_id"], merged["layer_id"], "{source}");
    }
    let each = build(&node, "base", "each", &target, &["--per-layer"]);
    assert_eq!(each["layers"].as_array().unwrap().len(), 2);
    // What was kept of downloads is gone.
    let kept = node.scratch.path().join("cache/downloads");
    assert!(!kept.exists() || fs_err::read_dir(kept).unwrap().next().is_none());

    let nowhere = format!("registry:{}/images/a:none", server.host());
    let error = node.fails(1, build_line("base/x:1", &nowhere, &[]));
    assert!(error.contains("images/a:none"), "{error}");
    let arm = ["--platform", "linux/arm64"];
    let error = node.fails(1, build_line("base/x:1", &target, &arm));
    assert!(error.contains("linux/arm64"), "{error}");
}

#[test]
fn other_tools_take_the_image() {
    if find_tool("skopeo").is_none() || find_tool("umoci").is_none() {
        layerpack_fixtures::skip!("skopeo or umoci is not installed");
    }
    let server = DockerRegistry::start().unwrap();
    let node = Node::new("registry-tools");
    node.build_stack();
    let target = format!("registry:{}/tools:1", server.host());
    let sent = node.json(["export", "base/a:1", "workspace/a:1", "--to", &target]);
    let work = ScratchDir::new("registry-unpacked").unwrap();
    let policy = work
        .write(
            "policy.json",
            r#"{"default":[{"type":"insecureAcceptAnything"}]}"#,
        )
        .unwrap();
    let run = |program: &str, arguments: &[&str]| {
        let output = Command::new(program).args(arguments).output().unwrap();
        assert!(
            output.status.success(),
            "{program} {arguments:?}: {output:?}"
        );
        String::from_utf8(output.stdout).unwrap()
    };
    let image = format!("docker://{}/tools:1", server.host());
    let seen = run("skopeo", &["inspect", "--tls-verify=false", &image]);
    let seen: serde_json::Value = serde_json::from_str(&seen).unwrap();
    assert_eq!(seen["Digest"], sent["digest"]);
    assert_eq!(seen["Layers"].as_array().unwrap().len(), 2);
    let layout = work.join("layout");
    let to = format!("oci:{}:1", layout.display());
    let policy = policy.display().to_string();
    run(
        "skopeo",
        &[
            "--policy",
            &policy,
            "copy",
            "--src-tls-verify=false",
            &image,
            &to,
        ],
    );
    let bundle = work.join("bundle").display().to_string();
    let mut unpack = vec!["unpack"];
    if !layerpack_fixtures::is_root() {
        unpack.push("--rootless");
    }
    let from = format!("{}:1", layout.display());
    unpack.extend(["--image", &from, &bundle]);
    run("umoci", &unpack);
    let root = work.join("bundle/rootfs");
    assert_eq!(fs_err::read_to_string(root.join("etc/os")).unwrap(), "1");
    assert_eq!(fs_err::read_to_string(root.join("etc/new")).unwrap(), "2");
    assert!(!root.join("gone").exists());
}

/// A list of images for several platforms, as other tools push it.
#[test]
fn the_image_of_the_platform_is_taken() {
    use layerpack_store::registry::document::{Descriptor, INDEX};
    use layerpack_store::registry::{ManifestName, Registry, RegistryOptions};
    let server = DockerRegistry::start().unwrap();
    let node = Node::new("registry-platforms");
    let mut manifests = Vec::new();
    for (architecture, content) in [("amd64", "a"), ("arm64", "b")] {
        let mut tar = TarWriter::new();
        tar.dir("./", 0o755).file("arch", content);
        let path = node.root().with_extension(architecture);
        fs_err::write(&path, tar.finish()).unwrap();
        let from = format!("tar:{}", path.display());
        let platform = format!("linux/{architecture}");
        build(
            &node,
            "base",
            architecture,
            &from,
            &["--platform", &platform],
        );
        let target = format!("registry:{}/many:{architecture}", server.host());
        let reference = format!("base/{architecture}:1");
        let sent = node.json(["export", &reference, "--to", &target]);
        manifests.push((sent["digest"].as_str().unwrap().to_owned(), architecture));
    }
    let name = format!("{}/many", server.host()).parse().unwrap();
    let registry = Registry::new(name, RegistryOptions::default()).unwrap();
    let entries: Vec<serde_json::Value> = manifests
        .iter()
        .map(|(digest, architecture)| {
            let found = registry
                .manifest(&ManifestName::Digest(digest.parse().unwrap()))
                .unwrap()
                .unwrap();
            let entry = Descriptor::of(&found.media_type, &found.bytes);
            let mut entry = serde_json::to_value(entry).unwrap();
            entry["platform"] = serde_json::json!({"os": "linux", "architecture": architecture});
            entry
        })
        .collect();
    let index = serde_json::json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": entries});
    let index = serde_json::to_vec(&index).unwrap();
    registry
        .put_manifest(&ManifestName::tag("all").unwrap(), INDEX, &index)
        .unwrap();
    let source = format!("registry:{}/many:all", server.host());
    for (_, architecture) in &manifests {
        let platform = format!("linux/{architecture}");
        let name = format!("got-{architecture}");
        build(&node, "base", &name, &source, &["--platform", &platform]);
        let text = node.ok(["-o", "json", "inspect", &format!("base/{name}:1")]);
        assert!(text.contains(&platform), "{text}");
    }
    let riscv = ["--platform", "linux/riscv64"];
    let error = node.fails(1, build_line("base/x:1", &source, &riscv));
    assert!(error.contains("linux/arm64"), "{error}");
}

/// Built into a registry with a password, listed, verified, exported and removed from there.
#[test]
fn a_store_in_a_registry_is_one_like_any_other() {
    let server = DockerRegistry::locked().unwrap();
    let node = Node::new("registry-store");
    node.build_stack();
    let local = build(
        &node,
        "base",
        "b",
        &format!("tar:{}", node.root().with_extension("base").display()),
        &[],
    );
    let config = node.scratch.mkdir("docker").unwrap();
    let store = format!("oci://{}/layers", server.host());
    let remote = |arguments: &[&str]| {
        node.command()
            .env("DOCKER_CONFIG", &config)
            .env_remove("REGISTRY_AUTH_FILE")
            .args(["--store", &store])
            .args(arguments)
            .output()
            .unwrap()
    };
    let refused = remote(&["ls"]);
    assert_eq!(refused.status.code(), Some(1));
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        said.contains("refuses access") && said.lines().count() == 1,
        "{said}"
    );
    DockerRegistry::credentials(&server.host(), &config.join("config.json")).unwrap();
    let ok = |arguments: &[&str]| {
        let output = remote(arguments);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let from = format!("tar:{}", node.root().with_extension("base").display());
    let mut line = vec!["-o", "json"];
    line.extend(build_line("base/b:1", &from, &[]));
    let built = ok(&line);
    let built: serde_json::Value = serde_json::from_str(&built).unwrap();
    assert_eq!(built["digest"], local["digest"]);
    assert!(ok(&["ls"]).contains("base/b:1"));
    ok(&["verify", "base/b:1"]);
    let archive = node.root().with_file_name("out.tar");
    ok(&[
        "export",
        "base/b:1",
        "--to",
        &format!("tar:{}", archive.display()),
    ]);
    assert!(archive.exists());
    ok(&["rm", "base/b:1"]);
    assert!(!ok(&["ls"]).contains("base/b:1"));
}

/// A run that ended in the middle of a layer is followed by one that fetches the rest.
#[test]
fn an_import_goes_on_where_the_last_one_ended() {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Arc, Mutex};

    use layerpack_fixtures::servers::{Ending, Reply, Scripted};
    let server = Arc::new(DockerRegistry::start().unwrap());
    let node = Node::new("registry-resume");
    let mut tar = TarWriter::new();
    // Does not compress.
    let mut state = 1_u64;
    let noise: Vec<u8> = (0..60_000)
        .flat_map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()
        })
        .collect();
    tar.dir("./", 0o755).file("noise", &noise);
    let path = node.root().with_extension("tar");
    fs_err::write(&path, tar.finish()).unwrap();
    let local = build(&node, "base", "a", &format!("tar:{}", path.display()), &[]);
    node.ok([
        "export",
        "base/a:1",
        "--to",
        &format!("registry:{}/x:1", server.host()),
    ]);

    let broken = Arc::new(AtomicBool::new(true));
    let begun = AtomicBool::new(false);
    type Ranges = Arc<Mutex<Vec<Option<(usize, usize)>>>>;
    let ranges = Ranges::default();
    let (behind, broken_too, ranges_too) = (
        Arc::clone(&server),
        Arc::clone(&broken),
        Arc::clone(&ranges),
    );
    let proxy = Scripted::start(move |request| {
        let reply = behind.forward(request);
        // The configuration is small.
        if !request.target.contains("/blobs/") || reply.body.len() < 10_000 {
            return reply;
        }
        ranges_too.lock().unwrap().push(request.range());
        if !broken_too.load(Ordering::SeqCst) {
            reply
        } else if begun.swap(true, Ordering::SeqCst) {
            Reply::new(404, "gone")
        } else {
            reply.ending(Ending::CloseAfter(200_000))
        }
    })
    .unwrap();
    let host = proxy.url().replace("http://", "");
    let source = format!("registry:{host}/x:1");
    let error = node.fails(1, build_line("base/x:1", &source, &[]));
    assert!(error.contains("/x@sha256:"), "{error}");
    assert!(!node.ok(["ls"]).contains("base/b"));
    broken.store(false, Ordering::SeqCst);
    ranges.lock().unwrap().clear();
    let back = build(&node, "base", "b", &source, &[]);
    assert_eq!(back["layer_id"], local["layer_id"]);
    let ranges = ranges.lock().unwrap();
    assert_eq!(ranges.len(), 1, "{ranges:?}");
    let (from, _) = ranges[0].unwrap();
    assert!(from > 100_000 && from <= 200_000, "{from}");
}
