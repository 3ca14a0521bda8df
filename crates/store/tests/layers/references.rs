//! Names, digests and keys.

use layerpack_store::{Digest, Key, LayerId, Reference, StoreError, open_url};

#[test]
fn references_round_trip() {
    for text in [
        "base/debian:12",
        "workspace/org/repo.git:v1.2_3-x",
        "toolkit/0:_",
        "diff/a-b__c:A.B",
    ] {
        let parsed: Reference = text.parse().unwrap();
        assert_eq!(parsed.to_string(), text);
        assert_eq!(Key::reference(&parsed).to_reference(), Some(parsed));
    }
}

#[test]
fn bad_references_are_refused_by_name() {
    let long = format!("base/{}:1", "x".repeat(201));
    for text in [
        "",
        "base",
        "base/",
        "base/x",
        "base/:1",
        "base/x:",
        "Base/x:1",
        "other/x:1",
        "base/X:1",
        "base/x:1:2",
        "base//x:1",
        "base/x/:1",
        "base/../x:1",
        "base/.x:1",
        "base/x.:1",
        "base/x y:1",
        "base/x:.1",
        "base/x:-1",
        "base/x:1/2",
        "base/é:1",
        "base/x:1\n",
        &long,
    ] {
        match text.parse::<Reference>() {
            Err(StoreError::InvalidReference { .. }) => {}
            other => panic!("{text:?}: {other:?}"),
        }
    }
}

/// A file store needs a file and a directory for these: their keys must not collide.
#[test]
fn a_name_may_continue_another() {
    let short = Key::reference(&"base/a:b".parse().unwrap());
    let long = Key::reference(&"base/a/b:c".parse().unwrap());
    assert!(!long.as_str().starts_with(&format!("{short}/")));
}

#[test]
fn digests_have_one_spelling() {
    let digest = Digest::of(b"");
    assert_eq!(
        digest.to_string(),
        "b3:af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    );
    assert_eq!(digest.to_string().parse::<Digest>().unwrap(), digest);
    let hex = digest.hex();
    for bad in [
        &hex,
        &format!("b3:{}", hex.to_uppercase()),
        &format!("b3:{}", &hex[1..]),
        &format!("b3:{hex}0"),
        "b3:",
    ] {
        assert!(bad.parse::<Digest>().is_err(), "{bad}");
    }
}

#[test]
fn layer_id_is_frozen() {
    let id = LayerId::of(&Digest::of(b"meta"), &Digest::of(b"map"));
    let mut all = b"layerpack layer v1\0".to_vec();
    all.extend_from_slice(Digest::of(b"meta").as_bytes());
    all.extend_from_slice(Digest::of(b"map").as_bytes());
    assert_eq!(id.digest(), &Digest::of(&all));
}

#[test]
fn keys_are_safe_paths() {
    for bad in [
        "",
        "/x",
        "x/",
        "a//b",
        "a/../b",
        ".x",
        "a/.x",
        "tmp/x",
        "a b",
        "a\\b",
        "a\0",
        "é",
        &"x/".repeat(300),
    ] {
        assert!(Key::new(bad).is_err(), "{bad:?}");
    }
    assert!(Key::new("a/tmp/x_-.9").is_ok());
}

#[test]
fn addresses() {
    assert_eq!(
        open_url("file:///some/dir").unwrap().url(),
        "file:///some/dir"
    );
    assert_eq!(open_url("/some/dir").unwrap().url(), "file:///some/dir");
    assert!(open_url("dir").unwrap().url().ends_with("/dir"));
    for bad in ["", "ftp://host/x", "file://host/dir", "s3:///x"] {
        assert!(
            matches!(open_url(bad), Err(StoreError::InvalidUrl { .. })),
            "{bad}"
        );
    }
}
