//! Objects of a store that others wrote, read as the commands read them, and what registries
//! answer.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use layerpack_fixtures::servers::{Reply, Request, Scripted};
use layerpack_store::format::profile::Profile;
use layerpack_store::registry::{ManifestName, Registry, RegistryOptions, Sha256, document};
use layerpack_store::{
    BlobStore, Digest, GcOptions, Key, LayerStore, MemStore, OciStore, PublicKey, PutMode,
    Reference, RetryPolicy, SigningKey,
};

use crate::{formats, seeds};

/// A profile that is read says the same when it is written.
pub(crate) fn profile(bytes: &[u8]) {
    let mut bytes = bytes.to_vec();
    formats::seal(&mut bytes, 56);
    if let Ok(profile) = Profile::parse(&bytes) {
        let again = profile.to_bytes().map(|bytes| Profile::parse(&bytes));
        assert!(
            again.is_ok_and(|again| again.is_ok_and(|again| again == profile)),
            "a profile changed by writing"
        );
    }
}

/// A store with the layer `toolkit/seed:1` and garbage, made once and copied since.
fn store() -> LayerStore {
    static OBJECTS: OnceLock<Vec<(Key, Vec<u8>)>> = OnceLock::new();
    let objects = OBJECTS.get_or_init(|| {
        let store = seeds::a_store();
        let blobs = store.blobs();
        let garbage = Key::manifest(&Digest::of(b"garbage"));
        let _ = blobs.put(&garbage, b"garbage", PutMode::IfAbsent);
        let list = blobs.list("").unwrap_or_default();
        list.into_iter()
            .filter_map(|info| {
                let bytes = blobs.get(&info.key, info.size).ok()??;
                Some((info.key, bytes))
            })
            .collect()
    });
    let blobs = MemStore::new();
    for (key, bytes) in objects {
        let put = blobs.put(key, bytes, PutMode::IfAbsent);
        assert!(put.is_ok(), "memory takes objects");
    }
    LayerStore::new(Arc::new(blobs))
}

/// Leases, condemned lists and markers as JSON, sealed as they are. Whatever they say, what is
/// published stays.
pub(crate) fn lease(bytes: &[u8]) {
    let store = store();
    let sealed = [format!("{}\n", Digest::of(bytes)).as_bytes(), bytes].concat();
    for key in [
        "leases/node-0123456789abcdef",
        "leases/session-0123456789abcdef0123456789abcdef",
        "gc/list-0123456789abcdef0123456789abcdef",
    ] {
        if let Ok(key) = Key::new(key) {
            let put = store.blobs().put(&key, &sealed, PutMode::IfAbsent);
            assert!(put.is_ok(), "memory takes objects");
        }
    }
    let options = GcOptions {
        grace: Duration::ZERO,
        dry_run: false,
        wait: false,
    };
    for _ in 0..2 {
        let _ = store.collect(options);
    }
    let Ok(reference) = "toolkit/seed:1".parse::<Reference>() else {
        return;
    };
    let report = store.verify(&reference);
    assert!(
        report.is_ok_and(|report| report.is_ok()),
        "a published layer was collected"
    );
}

/// The key that signs in seeds.
pub(crate) fn signing_key() -> Option<SigningKey> {
    SigningKey::from_text(&format!("ed25519-secret:{}\n", "2a".repeat(32))).ok()
}

/// Objects beside a layer, and texts of keys. Only what the key signed counts as its signature.
pub(crate) fn signature(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    if let Ok(key) = SigningKey::from_text(&text) {
        let again = SigningKey::from_text(&key.to_text());
        assert!(
            again.is_ok_and(|again| again.public() == key.public()),
            "a key changed by writing"
        );
    }
    let _ = text.parse::<PublicKey>();
    let Some(key) = signing_key() else { return };
    let manifest = Digest::of(b"a manifest");
    let store = LayerStore::new(Arc::new(MemStore::new()));
    let object = Key::signature(&manifest, &key.public());
    let put = store.blobs().put(&object, bytes, PutMode::IfAbsent);
    assert!(put.is_ok(), "memory takes objects");
    let good = store.is_signed_by(&manifest, &key.public());
    if matches!(good, Ok(true)) && !bytes.contains(&b'\\') {
        assert!(
            text.to_ascii_lowercase().contains(&key.sign(&manifest)),
            "a signature that the key did not make"
        );
    }
    let listed = store.signatures(&manifest);
    assert!(
        listed.is_ok_and(|listed| listed.len() == 1
            && listed
                .iter()
                .all(|entry| entry.signer.is_ok() == good.is_ok())),
        "two ways of reading a signature differ"
    );
}

/// What the registry answers now.
fn answer() -> &'static Mutex<Vec<u8>> {
    static ANSWER: Mutex<Vec<u8>> = Mutex::new(Vec::new());
    &ANSWER
}

/// By the repository: `x` answers everything, `y` wants a token first, `z` refuses, `w` asks for
/// it in its own words.
fn script(request: &Request) -> Reply {
    let body = answer()
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .clone();
    let host = request.header("host").unwrap_or_default();
    let path = request.target.as_str();
    if path.starts_with("/token") {
        return Reply::new(200, body);
    }
    let has_token = request.header("authorization").is_some();
    if path.starts_with("/v2/y/") && !has_token {
        let challenge = format!("Bearer realm=\"http://{host}/token\",service=\"s\"");
        return Reply::new(401, "").header("WWW-Authenticate", challenge);
    }
    if path.starts_with("/v2/w/") {
        // As one line: more would be other headers.
        let challenge: String = String::from_utf8_lossy(&body)
            .chars()
            .filter(|c| c.is_ascii() && !c.is_ascii_control())
            .collect();
        return Reply::new(401, "").header("WWW-Authenticate", challenge);
    }
    if path.starts_with("/v2/z/") {
        return Reply::new(400, body);
    }
    let kind = match path.contains("/referrers/") {
        true => document::INDEX,
        false => document::MANIFEST,
    };
    Reply::new(200, body).header("Content-Type", kind)
}

/// Every document that a registry sends: manifests, lists, tags, tokens, refusals.
pub(crate) fn registry(bytes: &[u8]) {
    static SERVER: OnceLock<Option<Scripted>> = OnceLock::new();
    // One after the other: there is one answer.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(server) = SERVER.get_or_init(|| Scripted::start(script).ok()) else {
        return;
    };
    *answer().lock().unwrap_or_else(PoisonError::into_inner) = bytes.to_vec();
    let host = server.url().replace("http://", "");
    let options = || RegistryOptions {
        retry: RetryPolicy::never(),
        ..RegistryOptions::default()
    };
    let Some(tag) = ManifestName::tag("t") else {
        return;
    };
    for repository in ["x", "y", "z", "w"] {
        let name = format!("{host}/{repository}").parse();
        let Ok(registry) = name.map(|name| Registry::new(name, options())) else {
            return;
        };
        let Ok(registry) = registry else { return };
        let _ = registry.manifest(&tag);
        if repository == "x" {
            let _ = registry.tags();
            let _ = registry.referrers(&Sha256::of(b"subject"), None);
        }
    }
    let Ok(store) = OciStore::new(&format!("{host}/x"), options()) else {
        return;
    };
    let Ok(key) = Key::new("refs/base/a/_1") else {
        return;
    };
    if let Ok(Some(object)) = store.get(&key, 1 << 20)
        && !bytes.contains(&b'\\')
    {
        let text = String::from_utf8_lossy(bytes);
        assert!(
            text.contains(&Sha256::of(&object).to_string()),
            "bytes that the manifest does not name"
        );
    }
    let _ = store.size(&key);
    let _ = store.list("");
}
