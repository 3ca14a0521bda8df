//! Stores in buckets.

use std::sync::Arc;

use layerpack_fixtures::servers::{BUCKET, S3Behaviour, S3Server};
use layerpack_store::blob::contract;
use layerpack_store::{
    BlobStore, LayerStore, OpenOptions, PutMode, PutOutcome, S3Credentials, StoreError, open,
};

use crate::layers::{data_of, noise, publish, read_all, sample};
use crate::support::{bucket, key, s3_options};

fn server(behaviour: S3Behaviour) -> S3Server {
    S3Server::start(behaviour).unwrap()
}

#[test]
fn contract_holds() {
    let server = server(S3Behaviour::default());
    contract::run(&|| bucket(&server, "some/where")).unwrap();
    // Another prefix of the same bucket is another store.
    contract::run(&|| bucket(&server, "some/wher")).unwrap();
}

#[test]
fn contract_holds_at_the_top_of_a_bucket() {
    let server = server(S3Behaviour {
        page: Some(2),
        ..S3Behaviour::default()
    });
    contract::run(&|| bucket(&server, "")).unwrap();
}

#[test]
fn contract_holds_where_conditions_are_ignored() {
    let server = server(S3Behaviour {
        ignores_conditions: true,
        ..S3Behaviour::default()
    });
    contract::run(&|| bucket(&server, "x")).unwrap();
}

#[test]
fn contract_holds_while_the_server_throttles() {
    let server = server(S3Behaviour {
        throttles_every: Some(3),
        ..S3Behaviour::default()
    });
    let opened = || {
        open(&server.store("x"), &{
            let mut options = s3_options();
            options.retry.attempts = 20;
            options
        })
    };
    contract::run(&|| opened().unwrap()).unwrap();
}

/// Of a stream that needs several parts nothing is seen before its end, and nothing stays.
#[test]
fn long_streams_go_up_in_parts() {
    let server = server(S3Behaviour::default());
    let store = bucket(&server, "p");
    let bytes = noise(1, (40 << 20) + 12_345);
    let leftovers = || {
        fs_err::read_dir(server.root_dir())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.contains("upload"))
            .collect::<Vec<_>>()
    };

    // Uploads that go on now, by what the server calls their parts.
    let open = || {
        (leftovers().iter())
            .filter_map(|name| name.strip_prefix(".upload-")?.strip_suffix(".json"))
            .map(|id| format!(".upload_id-{id}.part-"))
            .collect::<Vec<_>>()
    };

    let mut dropped = store.put_stream().unwrap();
    dropped.write(&bytes).unwrap();
    // A part that is on its way may arrive after its upload is called off; of finished uploads
    // none may be left.
    let mut called_off = open();
    assert_eq!(called_off.len(), 1, "parts are on their way already");
    let late = |called_off: &[String], left: &[String]| {
        (left.iter()).all(|name| called_off.iter().any(|id| name.starts_with(id)))
    };
    assert_eq!(store.list("").unwrap(), Vec::new());
    drop(dropped);
    let left = leftovers();
    assert!(late(&called_off, &left), "it was called off: {left:?}");

    for (round, mode) in [PutMode::IfAbsent, PutMode::IfAbsent, PutMode::Overwrite]
        .into_iter()
        .enumerate()
    {
        let mut writer = store.put_stream().unwrap();
        for piece in bytes.chunks(3_000_001) {
            writer.write(piece).unwrap();
        }
        let exists = round == 1;
        if exists {
            called_off.extend(open());
        }
        let outcome = writer.commit(&key("packs/aa/x"), mode).unwrap();
        assert_eq!(outcome == PutOutcome::Exists, exists, "{mode:?}");
        let left = leftovers();
        assert!(late(&called_off, &left), "of {mode:?}: {left:?}");
    }
    assert!(store.get(&key("packs/aa/x"), 1 << 30).unwrap().unwrap() == bytes);
    let middle = 17_000_000..21_000_000;
    let part = store.get_range(&key("packs/aa/x"), middle).unwrap();
    assert!(part == bytes[17_000_000..21_000_000]);
    assert_eq!(store.list("").unwrap().len(), 1);
    let tmp = server.bucket_dir().join("p/tmp");
    assert_eq!(
        fs_err::read_dir(tmp).map_or(0, Iterator::count),
        0,
        "temporaries stay behind"
    );
}

#[test]
fn large_objects_go_up_in_parts() {
    let server = server(S3Behaviour::default());
    let store = bucket(&server, "p");
    let bytes = noise(2, (24 << 20) + 1);
    let put = |mode| store.put(&key("meta/x"), &bytes, mode).unwrap();
    assert_eq!(put(PutMode::IfAbsent), PutOutcome::Created);
    assert_eq!(put(PutMode::IfAbsent), PutOutcome::Exists);
    assert_eq!(put(PutMode::Overwrite), PutOutcome::Created);
    assert!(store.get(&key("meta/x"), 1 << 30).unwrap().unwrap() == bytes);
}

#[test]
fn layers_are_published_and_read() {
    let server = server(S3Behaviour {
        throttles_every: Some(7),
        ..S3Behaviour::default()
    });
    let store = LayerStore::new(bucket(&server, "team/store"));
    let files = sample(1);
    let published = publish(&store, "base/x:1", &files).unwrap();
    assert_eq!(read_all(&store, "base/x:1").unwrap(), data_of(&files));
    let again = publish(&store, "base/x:1", &files).unwrap();
    assert_eq!(again.digest, published.digest);
    let error = publish(&store, "base/x:1", &sample(2)).unwrap_err();
    assert!(matches!(error, StoreError::Conflict { .. }), "{error:?}");
    let report = store.verify(&"base/x:1".parse().unwrap()).unwrap();
    assert!(report.is_ok(), "{:?}", report.damaged);
    assert!(store.blobs().list("claims/").unwrap().is_empty());
}

#[test]
fn times_are_the_stores() {
    let server = server(S3Behaviour::default());
    let store = bucket(&server, "p");
    store.put(&key("a/b"), b"x", PutMode::IfAbsent).unwrap();
    let modified = store.list("").unwrap()[0].modified.unwrap();
    let file = server.bucket_dir().join("p/a/b");
    let there = fs_err::metadata(file).unwrap().modified().unwrap();
    let apart = there
        .duration_since(modified)
        .unwrap_or_else(|e| e.duration());
    assert!(apart.as_secs() <= 1, "{there:?} {modified:?}");
}

fn refusal(url: &str, options: &OpenOptions) -> [StoreError; 4] {
    let store = open(url, options).unwrap();
    [
        store.get(&key("a/b"), 10).unwrap_err(),
        store.get_range(&key("a/b"), 0..1).unwrap_err(),
        store
            .put(&key("a/b"), b"x", PutMode::Overwrite)
            .unwrap_err(),
        store.list("").unwrap_err(),
    ]
}

#[test]
fn wrong_credentials_are_named() {
    let server = server(S3Behaviour::default());
    let mut options = s3_options();
    for (access_key, secret_key) in [("NOBODY", "x"), ("TESTACCESSKEY0000000", "wrong")] {
        options.s3_credentials = Some(S3Credentials {
            access_key: access_key.to_owned(),
            secret_key: secret_key.to_owned(),
            session_token: None,
        });
        assert!(!format!("{options:?}").contains("wrong"));
        for error in refusal(&server.store("x"), &options) {
            assert!(matches!(error, StoreError::Denied { .. }), "{error:?}");
            assert!(error.to_string().contains("credentials"), "{error}");
        }
    }
}

#[test]
fn a_bucket_that_does_not_exist_is_named() {
    let server = server(S3Behaviour::default());
    let url = server.store("x").replace(BUCKET, "no-such-bucket");
    for error in refusal(&url, &s3_options()) {
        let text = error.to_string();
        assert!(
            text.contains("no such bucket") && text.contains("no-such-bucket"),
            "{text}"
        );
    }
}

#[test]
fn a_server_that_is_not_there_is_an_error_in_time() {
    let url = {
        let server = server(S3Behaviour::default());
        server.store("x")
    };
    let mut options = s3_options();
    options.retry.attempts = 2;
    for error in refusal(&url, &options) {
        assert!(error.is_transient(), "{error:?}");
        assert!(error.to_string().contains("a/b") || error.to_string().contains("list"));
    }
}

/// The runtime ends, and a store that was open goes on with a new one.
#[test]
fn a_store_outlives_the_runtime() {
    let server = server(S3Behaviour::default());
    let store: Arc<dyn BlobStore> = bucket(&server, "x");
    store.put(&key("a/b"), b"x", PutMode::IfAbsent).unwrap();
    assert!(store.get(&key("a/b"), 9).unwrap().is_some());
    // Another test of this process may be in the middle of something; then it goes on.
    let _ = layerpack_store::blob::remote::shutdown();
    assert_eq!(store.get(&key("a/b"), 9).unwrap().unwrap(), b"x");
    store.put(&key("a/c"), b"x", PutMode::IfAbsent).unwrap();
}
