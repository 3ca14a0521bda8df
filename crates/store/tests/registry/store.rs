//! The store in a registry.

use std::collections::BTreeMap;
use std::process::Command;
use std::sync::Arc;

use layerpack_fixtures::servers::DockerRegistry;
use layerpack_store::blob::contract;
use layerpack_store::registry::document::Manifest;
use layerpack_store::registry::{ManifestName, Registry};
use layerpack_store::{
    BlobStore, Draft, Extent, Key, LayerStore, MapBuilder, OciStore, PutMode, PutOutcome,
    Reference, StoreError, WriterOptions,
};

use crate::support::{noise, options};

fn store(host: &str, repository: &str) -> OciStore {
    OciStore::new(&format!("{host}/{repository}"), options()).unwrap()
}

#[test]
fn contract() {
    let server = DockerRegistry::start().unwrap();
    contract::run(&|| Arc::new(store(&server.host(), "a/store"))).unwrap();
}

fn key(text: &str) -> Key {
    Key::new(text).unwrap()
}

/// Publishes a layer of a few chunks.
fn publish(store: &LayerStore, reference: &str, seed: u64) -> Reference {
    let reference: Reference = reference.parse().unwrap();
    let mut writer = store.writer(WriterOptions::default()).unwrap();
    let mut map = MapBuilder::new(512_000);
    for n in 0..5_u32 {
        let chunk = noise(100_000, seed + u64::from(n));
        let digest = writer.add_chunk(&chunk).unwrap();
        map.push(Extent {
            data_offset: u64::from(n) * 102_400,
            len: 100_000,
            digest,
        });
    }
    let map = map.build().unwrap();
    writer
        .finish(Draft::new(reference.clone(), noise(5000, seed), map))
        .unwrap();
    reference
}

#[test]
fn layers_are_published_listed_verified_and_removed() {
    let server = DockerRegistry::start().unwrap();
    let blobs = Arc::new(store(&server.host(), "layers"));
    let layers = LayerStore::new(Arc::clone(&blobs) as Arc<dyn BlobStore>);
    let one = publish(&layers, "base/some/name:1.0", 1);
    let two = publish(&layers, "workspace/other:2", 3);
    let listed: Vec<String> = layers
        .list()
        .unwrap()
        .into_iter()
        .map(|(reference, _)| reference.to_string())
        .collect();
    assert_eq!(listed, ["base/some/name:1.0", "workspace/other:2"]);
    for reference in [&one, &two] {
        let report = layers.verify(reference).unwrap();
        assert!(
            report.damaged.is_empty() && report.warnings.is_empty(),
            "{report:?}"
        );
    }
    layers.remove(&one).unwrap();
    assert!(matches!(
        layers.resolve(&one),
        Err(StoreError::UnknownReference { .. })
    ));
    layers.resolve(&two).unwrap();
}

/// A registry cannot create a tag exclusively; publishing makes sure that one writer wins.
#[test]
fn of_writers_of_one_version_one_wins() {
    let server = DockerRegistry::start().unwrap();
    let open = || LayerStore::new(Arc::new(store(&server.host(), "race")) as Arc<dyn BlobStore>);
    let reference: Reference = "base/a:1".parse().unwrap();
    let results: Vec<_> = std::thread::scope(|scope| {
        let writers: Vec<_> = (0..3_u64)
            .map(|n| {
                let (layers, reference) = (open(), reference.clone());
                scope.spawn(move || {
                    let writer = layers.writer(WriterOptions::default()).unwrap();
                    let map = MapBuilder::new(0).build().unwrap();
                    writer.finish(Draft::new(reference, noise(500, n), map))
                })
            })
            .collect();
        writers.into_iter().map(|w| w.join().unwrap()).collect()
    });
    let won: Vec<_> = results.iter().flatten().map(|p| p.digest).collect();
    assert_eq!(won.len(), 1, "{results:?}");
    assert_eq!(open().resolve(&reference).unwrap(), won[0]);
    for result in &results {
        assert!(
            matches!(result, Ok(_) | Err(StoreError::Conflict { .. })),
            "{result:?}"
        );
    }
}

/// A reference's artifact lists all that the layer needs, and a tool that copies it has copied
/// the layer.
#[test]
fn a_layer_is_one_artifact_that_tools_copy() {
    let server = DockerRegistry::start().unwrap();
    let blobs = Arc::new(store(&server.host(), "layers"));
    let layers = LayerStore::new(Arc::clone(&blobs) as Arc<dyn BlobStore>);
    let reference = publish(&layers, "base/a:1", 10);
    let registry = blobs.registry();
    let fetched = registry
        .manifest(&ManifestName::tag("refs.base.a.__1").unwrap())
        .unwrap()
        .unwrap();
    let artifact: Manifest = serde_json::from_slice(&fetched.bytes).unwrap();
    assert_eq!(
        artifact.artifact_type.as_deref(),
        Some("application/vnd.layerpack.layer.v1")
    );
    let kinds: BTreeMap<&str, usize> =
        artifact
            .layers
            .iter()
            .fold(BTreeMap::new(), |mut kinds, layer| {
                *kinds.entry(layer.media_type.as_str()).or_default() += 1;
                kinds
            });
    for kind in [
        "reference.v1+json",
        "manifest.v1+json",
        "meta.v1.zstd",
        "map.v1.zstd",
        "locator.v1",
        "pack.v1",
    ] {
        assert_eq!(
            kinds[format!("application/vnd.layerpack.{kind}").as_str()],
            1,
            "{kinds:?}"
        );
    }

    if layerpack_fixtures::find_tool("skopeo").is_none() {
        layerpack_fixtures::skip!("skopeo is not installed");
    }
    let other = DockerRegistry::start().unwrap();
    let from = format!("docker://{}/layers:refs.base.a.__1", server.host());
    let to = format!("docker://{}/copied:refs.base.a.__1", other.host());
    let policy = tempfile::NamedTempFile::new().unwrap();
    fs_err::write(
        policy.path(),
        r#"{"default":[{"type":"insecureAcceptAnything"}]}"#,
    )
    .unwrap();
    let output = Command::new("skopeo")
        .arg("--policy")
        .arg(policy.path())
        .args(["copy", "--src-tls-verify=false", "--dest-tls-verify=false"])
        .args([&from, &to])
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    drop(server);
    // By name, and by digest alone, as a daemon asks.
    let copied = LayerStore::new(Arc::new(store(&other.host(), "copied")));
    let report = copied.verify(&reference).unwrap();
    assert!(report.damaged.is_empty(), "{report:?}");
    let digest = copied.resolve(&reference).unwrap();
    let fresh = LayerStore::new(Arc::new(store(&other.host(), "copied")));
    let manifest = fresh.manifest(&digest).unwrap();
    let map = fresh.map(&manifest).unwrap();
    let locator = fresh.locator(&manifest, &map).unwrap();
    let data = fresh.read_data(&map, &locator, 0..100_000).unwrap();
    assert!(data == noise(100_000, 10));
    // And as a whole: what has no tag of its own is not listed, and there.
    let fresh = LayerStore::new(Arc::new(store(&other.host(), "copied")));
    let audit = fresh.audit(true).unwrap();
    assert!(audit.damaged.is_empty(), "{audit:?}");
    assert!(audit.packs == 1 && audit.frames > 0, "{audit:?}");
    assert!(audit.layers.iter().all(|layer| layer.sound), "{audit:?}");
    for dry_run in [true, false] {
        let fresh = LayerStore::new(Arc::new(store(&other.host(), "copied")));
        let repaired = fresh.repair(dry_run).unwrap();
        assert!(repaired.is_ok(), "{repaired:?}");
        assert!(repaired.relocated.is_empty(), "{repaired:?}");
    }
    assert!(fresh.audit(true).unwrap().damaged.is_empty());
}

#[test]
fn a_tag_that_means_something_else_is_said_so() {
    let server = DockerRegistry::start().unwrap();
    let blobs = store(&server.host(), "mixed");
    blobs.put(&key("a/b"), b"bytes", PutMode::IfAbsent).unwrap();
    let registry: &Registry = blobs.registry();
    let fetched = registry
        .manifest(&ManifestName::tag("a.b").unwrap())
        .unwrap()
        .unwrap();
    for tag in ["latest", "c.d"] {
        let tag = ManifestName::tag(tag).unwrap();
        registry
            .put_manifest(&tag, &fetched.media_type, &fetched.bytes)
            .unwrap();
    }
    // `latest` spells a key and is not that object; neither is `c/d`.
    let listed: Vec<String> = blobs
        .list("")
        .unwrap()
        .into_iter()
        .map(|o| o.key.to_string())
        .collect();
    assert_eq!(listed, ["a/b"]);
    let error = blobs.get(&key("c/d"), 10).unwrap_err();
    assert!(error.is_damage() && error.key() == Some("c/d"), "{error}");
}

#[test]
fn long_keys_and_large_objects() {
    let server = DockerRegistry::start().unwrap();
    let blobs = store(&server.host(), "long");
    let long = key(&format!(
        "refs/base/{}/_{}",
        ["a".repeat(90), "b".repeat(90)].join("/"),
        "1".repeat(100)
    ));
    blobs.put(&long, b"x", PutMode::IfAbsent).unwrap();
    assert_eq!(
        blobs.put(&long, b"y", PutMode::IfAbsent).unwrap(),
        PutOutcome::Exists
    );
    assert_eq!(blobs.get(&long, 1).unwrap().unwrap(), b"x");
    let listed = blobs.list("refs/base/a").unwrap();
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0].key, long);
    // Beyond what waits in memory and beyond one request.
    let bytes = noise(9_000_001, 1);
    let mut writer = blobs.put_stream().unwrap();
    for piece in bytes.chunks(123_457) {
        writer.write(piece).unwrap();
    }
    let pack = key("packs/x");
    assert_eq!(
        writer.commit(&pack, PutMode::IfAbsent).unwrap(),
        PutOutcome::Created
    );
    assert!(blobs.get(&pack, 9_000_001).unwrap().unwrap() == bytes);
    let part = blobs.get_range(&pack, 8_999_000..9_000_001).unwrap();
    assert!(part == bytes[8_999_000..]);
}

/// What was replaced is deleted where that is allowed, and nothing else is.
#[test]
fn replacing_leaves_nothing_behind_but_the_new() {
    for server in [
        DockerRegistry::start().unwrap(),
        DockerRegistry::keeping().unwrap(),
    ] {
        let blobs = store(&server.host(), "leases");
        let lease = key("leases/1");
        for n in 0..5_u8 {
            // The same bytes too.
            blobs.put(&lease, &[n / 2], PutMode::Overwrite).unwrap();
            assert_eq!(blobs.get(&lease, 1).unwrap().unwrap(), [n / 2]);
        }
        let listed = blobs.list("leases/").unwrap();
        assert_eq!(listed.len(), 1);
        // By the registry's clock, which here is ours.
        let age = listed[0].modified.unwrap().elapsed().unwrap_or_default();
        assert!(age.as_secs() < 3600, "{age:?}");
    }
}

#[test]
fn signatures_refer_to_their_layer() {
    let server = DockerRegistry::start().unwrap();
    let blobs = Arc::new(store(&server.host(), "signed"));
    let layers = LayerStore::new(Arc::clone(&blobs) as Arc<dyn BlobStore>);
    let reference = publish(&layers, "base/a:1", 20);
    let digest = layers.resolve(&reference).unwrap();
    let signature = key(&format!("signatures/{}/k1", digest.hex()));
    blobs.put(&signature, b"signed", PutMode::IfAbsent).unwrap();
    assert_eq!(blobs.get(&signature, 10).unwrap().unwrap(), b"signed");
    let layer = ManifestName::tag("refs.base.a.__1").unwrap();
    let layer = blobs.registry().manifest_digest(&layer).unwrap().unwrap();
    let referrers = blobs.registry().referrers(&layer, None).unwrap();
    assert_eq!(referrers.len(), 1);
    assert_eq!(
        referrers[0].annotations["layerpack.key"],
        signature.to_string()
    );
    // The list of referrers is no object.
    let keys = blobs.list("").unwrap();
    assert!(
        keys.iter().all(|o| !o.key.as_str().contains("sha256")),
        "{keys:?}"
    );
}
