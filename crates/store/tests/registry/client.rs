//! The client against a sound registry.

use std::io::Read as _;
use std::sync::Arc;

use fs_err::File;
use layerpack_fixtures::servers::DockerRegistry;
use layerpack_store::StoreError;
use layerpack_store::registry::document::{Descriptor, EMPTY_BYTES, MANIFEST, Manifest};
use layerpack_store::registry::{
    Deleted, ManifestName, Pushed, Registry, RegistryOptions, Sha256, Upload,
};

use crate::support::{noise, options, repository};

fn tag(text: &str) -> ManifestName {
    ManifestName::tag(text).unwrap()
}

fn bytes(bytes: &[u8]) -> Upload {
    Upload::Bytes(bytes.to_vec().into())
}

/// Pushes an artifact with one blob.
fn artifact(registry: &Registry, name: &str, blob: &[u8]) -> (Manifest, Sha256) {
    for blob in [EMPTY_BYTES, blob] {
        registry
            .push_blob(&Sha256::of(blob), &bytes(blob), &[])
            .unwrap();
    }
    let layer = Descriptor::of("application/vnd.layerpack.test.v1", blob);
    let manifest = Manifest::artifact("application/vnd.layerpack.test.v1", vec![layer]);
    let text = serde_json::to_vec(&manifest).unwrap();
    let digest = registry.put_manifest(&tag(name), MANIFEST, &text).unwrap();
    assert_eq!(digest, Sha256::of(&text));
    (manifest, digest)
}

#[test]
fn blobs_go_and_come() {
    let server = DockerRegistry::start().unwrap();
    let small = RegistryOptions {
        chunk_bytes: 64 << 10,
        ..options()
    };
    let registry = repository(&server.host(), small);
    let dir = tempfile::tempdir().unwrap();
    for len in [0, 1, 64 << 10, (64 << 10) + 1, 1_000_003] {
        let blob = noise(len, 1);
        let digest = Sha256::of(&blob);
        assert_eq!(registry.blob_size(&digest).unwrap(), None);
        if len > 0 {
            assert_eq!(registry.blob(&digest, len as u64).unwrap(), None);
        }
        let path = dir.path().join("blob");
        fs_err::write(&path, &blob).unwrap();
        let file = Upload::File(Arc::new(File::open(&path).unwrap()), len as u64);
        let pushed = registry.push_blob(&digest, &file, &[]).unwrap();
        assert_eq!(pushed, Pushed::Sent, "{len}");
        assert_eq!(
            registry.push_blob(&digest, &bytes(&blob), &[]).unwrap(),
            Pushed::Existed
        );
        assert_eq!(registry.blob_size(&digest).unwrap(), Some(len as u64));
        assert_eq!(
            registry.blob(&digest, len as u64).unwrap(),
            Some(blob.clone())
        );
        let mut read = Vec::new();
        registry
            .blob_reader(digest, len as u64)
            .read_to_end(&mut read)
            .unwrap();
        assert_eq!(read, blob);
        for range in [0..0, 0..len, len / 3..len / 2, len..len] {
            let asked = range.start as u64..range.end as u64;
            let part = registry.blob_range(&digest, len as u64, asked).unwrap();
            assert_eq!(part, blob[range]);
        }
        let beyond = registry.blob_range(&digest, len as u64, 0..len as u64 + 1);
        assert!(
            matches!(beyond, Err(StoreError::Corrupt { .. })),
            "{beyond:?}"
        );
    }
    let none = registry.blob_range(&Sha256::of(b"none"), 4, 1..2);
    assert!(matches!(none, Err(StoreError::Missing { .. })), "{none:?}");
}

#[test]
fn a_download_goes_on_where_it_was() {
    let server = DockerRegistry::start().unwrap();
    let registry = repository(&server.host(), options());
    let blob = noise(300_000, 2);
    let digest = Sha256::of(&blob);
    registry.push_blob(&digest, &bytes(&blob), &[]).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("part");
    let open = || {
        fs_err::OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .unwrap()
    };
    for had in [0, 1, 100_000, 300_000, 300_001] {
        let mut start = blob.clone();
        start.resize(had, 7);
        fs_err::write(&path, &start).unwrap();
        registry.download(digest, 300_000, &mut open()).unwrap();
        assert_eq!(fs_err::read(&path).unwrap(), blob, "{had}");
    }
    // A beginning that is another blob's is found out and thrown away.
    fs_err::write(&path, noise(1000, 3)).unwrap();
    let error = registry.download(digest, 300_000, &mut open()).unwrap_err();
    assert!(matches!(error, StoreError::Corrupt { .. }), "{error}");
    assert!(error.to_string().contains(&digest.to_string()), "{error}");
    assert_eq!(fs_err::read(&path).unwrap(), b"");
    registry.download(digest, 300_000, &mut open()).unwrap();
    assert_eq!(fs_err::read(&path).unwrap(), blob);
}

#[test]
fn manifests_are_read_tagged_listed_and_deleted() {
    let server = DockerRegistry::start().unwrap();
    let registry = repository(&server.host(), options());
    assert_eq!(registry.tags().unwrap(), [""; 0]);
    assert_eq!(registry.manifest(&tag("none")).unwrap(), None);
    assert_eq!(registry.manifest_digest(&tag("none")).unwrap(), None);
    let (manifest, digest) = artifact(&registry, "b", b"blob");
    artifact(&registry, "a", b"other");
    assert_eq!(registry.tags().unwrap(), ["a", "b"]);
    for name in [tag("b"), ManifestName::Digest(digest)] {
        let fetched = registry.manifest(&name).unwrap().unwrap();
        assert_eq!(fetched.digest, digest);
        assert_eq!(fetched.media_type, MANIFEST);
        let read: Manifest = serde_json::from_slice(&fetched.bytes).unwrap();
        assert_eq!(read, manifest);
        assert_eq!(registry.manifest_digest(&name).unwrap(), Some(digest));
    }
    assert_eq!(registry.delete_manifest(&digest).unwrap(), Deleted::Deleted);
    assert_eq!(registry.delete_manifest(&digest).unwrap(), Deleted::Absent);
    assert_eq!(registry.manifest(&tag("b")).unwrap(), None);
    assert_eq!(registry.tags().unwrap(), ["a"]);
}

#[test]
fn a_blob_of_another_repository_is_mounted() {
    let server = DockerRegistry::start().unwrap();
    let one = repository(&server.host(), options());
    let other = format!("{}/else", server.host());
    let other = Registry::new(other.parse().unwrap(), options()).unwrap();
    let blob = noise(10_000, 4);
    let digest = Sha256::of(&blob);
    one.push_blob(&digest, &bytes(&blob), &[]).unwrap();
    let from = [
        "elsewhere.example/some/where".parse().unwrap(),
        format!("{}/not/there", server.host()).parse().unwrap(),
        one.name().clone(),
    ];
    let pushed = other.push_blob(&digest, &bytes(&blob), &from).unwrap();
    assert_eq!(pushed, Pushed::Mounted);
    assert_eq!(other.blob(&digest, 10_000).unwrap(), Some(blob));
    // What nobody has is sent.
    let pushed = other.push_blob(&Sha256::of(b"new"), &bytes(b"new"), &from);
    assert_eq!(pushed.unwrap(), Pushed::Sent);
}

#[test]
fn referrers_are_found() {
    // This registry knows no subjects: their list is a tag.
    let server = DockerRegistry::start().unwrap();
    let registry = repository(&server.host(), options());
    let (_, subject) = artifact(&registry, "image", b"blob");
    assert_eq!(registry.referrers(&subject, None).unwrap(), []);
    let size = registry
        .manifest(&tag("image"))
        .unwrap()
        .unwrap()
        .bytes
        .len();
    let mut made = Vec::new();
    for (name, kind) in [("s1", "a.sig"), ("s2", "a.sig"), ("p", "a.profile")] {
        let layer = Descriptor::of("application/octet-stream", name.as_bytes());
        registry
            .push_blob(&layer.digest, &bytes(name.as_bytes()), &[])
            .unwrap();
        let mut manifest = Manifest::artifact(kind, vec![layer]);
        manifest.subject = Some(Descriptor::new(MANIFEST, subject, size as u64));
        made.push(registry.put_referrer(&tag(name), &manifest).unwrap());
        // Again changes nothing.
        registry.put_referrer(&tag(name), &manifest).unwrap();
    }
    let found = |kind| {
        let list = registry.referrers(&subject, kind).unwrap();
        list.into_iter()
            .map(|entry| entry.digest)
            .collect::<Vec<_>>()
    };
    assert_eq!(found(None), made);
    assert_eq!(found(Some("a.sig")), made[..2]);
    assert_eq!(found(Some("none")), []);
}

#[test]
fn a_registry_that_keeps_everything_says_so() {
    let server = DockerRegistry::keeping().unwrap();
    let registry = repository(&server.host(), options());
    let (_, digest) = artifact(&registry, "a", b"blob");
    let error = registry.delete_manifest(&digest).unwrap_err();
    assert!(matches!(error, StoreError::Denied { .. }), "{error}");
    assert!(error.to_string().contains("delete"), "{error}");
}
