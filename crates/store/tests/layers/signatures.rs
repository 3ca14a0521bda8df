//! Signatures: what counts as one, and what does not.

use layerpack_store::{Digest, Key, LayerStore, PublicKey, PutMode, SigningKey, StoreError};

use crate::support::{memory, publish, sample};

fn key(seed: u8) -> SigningKey {
    SigningKey::from_text(&format!("ed25519-secret:{}", hex::encode([seed; 32]))).unwrap()
}

fn signed() -> (LayerStore, Digest, SigningKey) {
    let (_, store) = memory();
    let digest = publish(&store, "base/a:1", &sample(1)).unwrap().digest;
    let key = key(1);
    assert!(store.sign(&digest, &key).unwrap());
    (store, digest, key)
}

#[test]
fn a_signature_is_of_one_key_and_one_manifest() {
    let (store, digest, key_1) = signed();
    let key_2 = key(2);
    assert!(store.is_signed_by(&digest, &key_1.public()).unwrap());
    assert!(!store.is_signed_by(&digest, &key_2.public()).unwrap());
    assert!(!store.sign(&digest, &key_1).unwrap(), "it is there already");
    assert!(store.sign(&digest, &key_2).unwrap());
    let signers: Vec<PublicKey> = store
        .signatures(&digest)
        .unwrap()
        .into_iter()
        .map(|entry| entry.signer.unwrap())
        .collect();
    let mut expected = vec![key_1.public(), key_2.public()];
    expected.sort();
    assert_eq!(signers, expected);

    let other = publish(&store, "base/b:1", &sample(2)).unwrap().digest;
    assert!(store.signatures(&other).unwrap().is_empty());
    assert!(!store.is_signed_by(&other, &key_1.public()).unwrap());
}

/// RFC 8032 fixes the signature and the domain prefix is ours: both are frozen.
#[test]
fn the_bytes_of_a_signature_are_frozen() {
    let key = key(7);
    assert_eq!(
        key.public().to_string(),
        "ed25519:ea4a6c63e29c520abef5507b132ec5f9954776aebebe7b92421eea691446d22c"
    );
    let digest = Digest::of(b"a manifest");
    let signature = key.sign(&digest);
    assert!(key.public().verify(&digest, &signature));
    assert_eq!(Digest::of(signature.as_bytes()).hex(), FROZEN);
}

/// Digest of the signature's hex digits.
const FROZEN: &str = "4bf51c628fa6fac2769daf1ad920833fb4ae4f0d8d644918aab4c18ced68c0fe";

#[test]
fn a_signature_that_was_moved_or_changed_is_refused() {
    let (store, digest, key_1) = signed();
    let object = Key::signature(&digest, &key_1.public());
    let good = store.blobs().get(&object, 1 << 16).unwrap().unwrap();

    // To another layer, to another key's name.
    let other = publish(&store, "base/b:1", &sample(2)).unwrap().digest;
    let moved = Key::signature(&other, &key_1.public());
    store
        .blobs()
        .put(&moved, &good, PutMode::Overwrite)
        .unwrap();
    let error = store.is_signed_by(&other, &key_1.public()).unwrap_err();
    assert!(error.to_string().contains(moved.as_str()), "{error}");
    let renamed = Key::signature(&digest, &key(2).public());
    store
        .blobs()
        .put(&renamed, &good, PutMode::Overwrite)
        .unwrap();
    assert!(store.is_signed_by(&digest, &key(2).public()).is_err());
    // It hides no other.
    let entries = store.signatures(&digest).unwrap();
    assert_eq!(entries.len(), 2);
    assert_eq!(entries.iter().filter(|e| e.signer.is_ok()).count(), 1);

    // Every byte counts, and the object is healed by signing again.
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 1;
        store
            .blobs()
            .put(&object, &bad, PutMode::Overwrite)
            .unwrap();
        match store.is_signed_by(&digest, &key_1.public()) {
            Err(StoreError::Corrupt { key, .. }) => assert_eq!(key, object.as_str()),
            Err(StoreError::Unsupported { .. }) => {} // the format's number
            other => panic!("byte {at}: {other:?}"),
        }
    }
    for bad in [&b""[..], b"{}", &good[..good.len() - 1], &[b'['; 4000]] {
        store.blobs().put(&object, bad, PutMode::Overwrite).unwrap();
        assert!(store.is_signed_by(&digest, &key_1.public()).is_err());
        // Proving the store finds it, and whose it is.
        let damaged = store.audit(false).unwrap().damaged;
        let found = damaged.iter().find(|lost| lost.object == object.as_str());
        assert_eq!(found.unwrap().layers, ["base/a:1"], "{damaged:?}");
    }
    assert!(store.sign(&digest, &key_1).unwrap());
    assert!(store.is_signed_by(&digest, &key_1.public()).unwrap());
}

#[test]
fn what_is_not_in_the_store_cannot_be_signed() {
    let (_, store) = memory();
    publish(&store, "base/a:1", &sample(1)).unwrap();
    let error = store.sign(&Digest::of(b"nothing"), &key(1)).unwrap_err();
    assert!(matches!(error, StoreError::Missing { .. }), "{error}");
    assert!(store.blobs().list("signatures/").unwrap().is_empty());
}

#[test]
fn keys_are_read_back_as_written_and_nothing_else_is_a_key() {
    let generated = SigningKey::generate().unwrap();
    let again = SigningKey::from_text(&generated.to_text()).unwrap();
    assert_eq!(generated.public(), again.public());
    assert_ne!(generated.public(), SigningKey::generate().unwrap().public());
    let public: PublicKey = generated.public().to_string().parse().unwrap();
    assert_eq!(public, generated.public());

    let secret = hex::encode([3; 32]);
    assert!(!format!("{generated:?}").contains("secret"));
    for bad in [
        String::new(),
        "# only a comment\n".to_owned(),
        format!("ed25519-secret:{}", &secret[1..]),
        format!("ed25519-secret:{secret}00"),
        format!("ed25519-secret:{secret}\ned25519-secret:{secret}"),
        generated.public().to_string(),
        format!("rsa:{secret}"),
    ] {
        let error = SigningKey::from_text(&bad).unwrap_err().to_string();
        assert!(
            !error.contains(&secret[2..]),
            "the secret is repeated: {error}"
        );
    }
    // The identity point, a point of small order: signatures by it prove nothing.
    let weak = format!("ed25519:01{}", "00".repeat(31));
    let upper = generated.public().to_string().to_uppercase();
    for bad in [weak.as_str(), upper.as_str(), "ed25519:", "b3:00"] {
        assert!(bad.parse::<PublicKey>().is_err(), "{bad}");
    }
}
