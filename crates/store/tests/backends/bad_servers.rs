//! Servers that are overloaded, slow, broken or wrong: the read ends right or in an error that
//! names the object, in time, and never with a wrong byte.

use std::sync::Arc;
use std::time::{Duration, Instant};

use layerpack_fixtures::servers::{Ending, Reply, Request, S3Behaviour, S3Server, Scripted};
use layerpack_store::{
    BlobStore, Key, LayerStore, MemStore, OpenOptions, PutMode, StoreError, open,
};

use crate::layers::{data_of, noise, publish, read_all, sample};
use crate::support::{hasty, key, s3_options};

const SIZE: usize = 300_000;

fn object() -> Vec<u8> {
    noise(5, SIZE)
}

/// A sound answer, with a version.
fn sound(request: &Request) -> Reply {
    Reply::of(&object(), request).header("ETag", "\"v1\"")
}

fn start(script: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Scripted {
    Scripted::start(script).unwrap()
}

fn opened(server: &Scripted, options: &OpenOptions) -> Arc<dyn BlobStore> {
    open(&server.url(), options).unwrap()
}

/// Reads the object and a range of it in spite of what `bad` does to the first requests of each.
fn survives(
    what: &str,
    failures: u64,
    bad: impl Fn(&Request) -> Reply + Send + Sync + Clone + 'static,
) {
    for (range, wanted) in [
        (None, object()),
        (Some(1000..90_000), object()[1000..90_000].to_vec()),
    ] {
        let bad = bad.clone();
        let server = start(move |request| {
            if request.number < failures {
                bad(request)
            } else {
                sound(request)
            }
        });
        let store = opened(&server, &hasty());
        let read = match range {
            None => store
                .get(&key("packs/aa/x"), SIZE as u64)
                .map(Option::unwrap),
            Some(range) => store.get_range(&key("packs/aa/x"), range),
        };
        let read = read.unwrap_or_else(|e| panic!("{what}: {e:?}"));
        assert!(read == wanted, "{what}: other bytes");
        assert!(server.requests() > failures, "{what}: asked too seldom");
    }
}

#[test]
fn what_passes_is_survived() {
    for status in [408, 429, 500, 502, 503, 504] {
        survives(&format!("status {status}"), 2, move |_| {
            Reply::new(status, "busy")
        });
    }
    survives("closed at once", 2, |_| Reply::none(Ending::CloseAfter(0)));
    survives("reset at once", 2, |_| Reply::none(Ending::ResetAfter(0)));
    survives("no answer", 1, |_| Reply::none(Ending::HangAfter(0)));
    for sent in [0, 1, 30_000] {
        survives(&format!("closed after {sent}"), 2, move |request| {
            sound(request).ending(Ending::CloseAfter(sent))
        });
        survives(&format!("reset after {sent}"), 2, move |request| {
            sound(request).ending(Ending::ResetAfter(sent))
        });
        survives(&format!("hangs after {sent}"), 1, move |request| {
            sound(request).ending(Ending::HangAfter(sent))
        });
    }
    survives("says longer than it is", 2, |request| {
        let reply = sound(request);
        let length = reply.body.len().to_string();
        let short = reply.body[..reply.body.len() / 2].to_vec();
        Reply {
            body: short,
            ending: Ending::CloseAfter(usize::MAX),
            ..reply
        }
        .header("Content-Length", length)
    });
    // Of the range of another request.
    survives("another range", 2, |request| match request.range() {
        Some(_) => Reply::new(206, vec![1; 10]).header("Content-Range", "bytes 0-9/300000"),
        None => Reply::new(503, ""),
    });
    survives(
        "a range that does not say which",
        2,
        |request| match request.range() {
            Some(_) => Reply::new(206, vec![1; 10]),
            None => Reply::new(503, ""),
        },
    );
}

/// A body is resumed where it broke off, from the same version.
#[test]
fn bodies_are_resumed() {
    let server = start(|request| {
        if request.number == 0 {
            return sound(request).ending(Ending::CloseAfter(200_000));
        }
        assert_eq!(request.header("if-match"), Some("\"v1\""));
        sound(request)
    });
    let store = opened(&server, &hasty());
    let read = store.get(&key("a/b"), SIZE as u64).unwrap().unwrap();
    assert!(read == object());
    assert_eq!(server.requests(), 2, "only the rest was asked for");
}

/// An object that becomes another one in the middle is read anew, whole; the halves of two
/// objects are never put together.
#[test]
fn versions_are_not_mixed() {
    for honours in [true, false] {
        let other = noise(6, SIZE);
        let server = start(move |request| match request.number {
            0 => sound(request).ending(Ending::CloseAfter(200_000)),
            _ if honours && request.header("if-match").is_some() => Reply::new(412, ""),
            _ => Reply::of(&other, request).header("ETag", "\"v2\""),
        });
        let store = opened(&server, &hasty());
        let read = store.get(&key("a/b"), SIZE as u64).unwrap().unwrap();
        assert!(read == noise(6, SIZE), "honours If-Match: {honours}");
    }
}

/// A server that does not know ranges is put up with where that costs little, else it is an
/// error that says so.
#[test]
fn a_server_without_ranges() {
    let server = start(|_| Reply::new(200, object()));
    let store = opened(&server, &hasty());
    let read = store.get_range(&key("a/b"), 1000..2000).unwrap();
    assert!(read == object()[1000..2000]);

    let server = start(|_| Reply::new(200, vec![0; 6 << 20]));
    let store = opened(&server, &hasty());
    let error = store
        .get_range(&key("a/b"), 5 << 20..(5 << 20) + 10)
        .unwrap_err();
    assert!(error.to_string().contains("a/b"), "{error}");
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert!(source.contains("ranges"), "{source}");
}

#[test]
fn what_stays_wrong_is_an_error_that_names_the_object() {
    type Bad = fn(&Request) -> Reply;
    let cases: [(&str, Bad); 9] = [
        ("always 503", |_| Reply::new(503, "")),
        ("always 500", |_| Reply::new(500, "")),
        ("always reset", |_| Reply::none(Ending::ResetAfter(0))),
        ("always silent", |_| Reply::none(Ending::HangAfter(0))),
        ("hangs in the body", |request| {
            sound(request).ending(Ending::HangAfter(10))
        }),
        ("no rights", |_| Reply::new(403, "<html>no</html>")),
        ("nonsense", |_| Reply::new(418, "teapot\r\n\0")),
        ("packed", |request| {
            sound(request).header("Content-Encoding", "gzip")
        }),
        ("a redirect to nowhere", |_| {
            Reply::new(302, "").header("Location", "http://127.0.0.1:1/")
        }),
    ];
    for (what, bad) in cases {
        let server = start(bad);
        let mut options = hasty();
        options.retry.attempts = 2;
        let store = opened(&server, &options);
        let begun = Instant::now();
        for error in [
            store.get(&key("packs/aa/x"), 1 << 20).unwrap_err(),
            store.get_range(&key("packs/aa/x"), 5..1000).unwrap_err(),
        ] {
            assert_eq!(error.key(), Some("packs/aa/x"), "{what}: {error:?}");
            let text = error.to_string();
            assert!(text.contains("packs/aa/x"), "{what}: {text}");
            assert!(text.contains(&server.url()), "{what}: {text}");
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{what}: a hang");
    }
}

/// A server that never ends its answer, one byte at a time, does not keep a reader for ever.
#[test]
fn an_endless_trickle_ends() {
    let server = start(|request| sound(request).ending(Ending::CloseAfter(1)));
    let mut options = hasty();
    options.timeouts.operation = Duration::from_secs(2);
    options.retry.attempts = 3;
    let error = opened(&server, &options)
        .get(&key("a/b"), SIZE as u64)
        .unwrap_err();
    assert!(error.is_transient(), "{error:?}");
}

#[test]
fn the_server_says_when_to_come_back() {
    let server = start(|request| match request.number {
        0 => Reply::new(429, "").header("Retry-After", "1"),
        _ => sound(request),
    });
    let begun = Instant::now();
    opened(&server, &hasty())
        .get(&key("a/b"), SIZE as u64)
        .unwrap();
    assert!(begun.elapsed() >= Duration::from_secs(1), "asked too early");

    // Longer than anyone would wait: the caller is told.
    let server = start(|_| Reply::new(503, "").header("Retry-After", "3600"));
    let error = opened(&server, &hasty()).get(&key("a/b"), 1).unwrap_err();
    match error {
        StoreError::Throttled { retry_after_ms, .. } => {
            assert_eq!(retry_after_ms, Some(3_600_000));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(server.requests(), 1);
}

#[test]
fn redirects_are_followed() {
    let target = start(sound);
    let there = target.url();
    let server = start(move |request| {
        Reply::new(307, "").header("Location", format!("{there}{}", request.target))
    });
    let store = opened(&server, &hasty());
    let range = store.get_range(&key("a/b"), 100..200_100).unwrap();
    assert!(range == object()[100..200_100]);
    assert_eq!(store.size(&key("a/b")).unwrap(), Some(SIZE as u64));

    let server = start(|request| Reply::new(302, "").header("Location", request.target.clone()));
    opened(&server, &hasty()).get(&key("a/b"), 9).unwrap_err();
    assert!(server.requests() < 20, "a circle");
}

/// Sizes are never believed beyond what the caller accepts.
#[test]
fn lengths_are_not_believed() {
    let server = start(|_| {
        Reply::new(200, "tiny")
            .header("Content-Length", "4000000000")
            .ending(Ending::CloseAfter(usize::MAX))
    });
    let mut options = hasty();
    options.retry.attempts = 2;
    let store = opened(&server, &options);
    let error = store.get(&key("a/b"), 1000).unwrap_err();
    assert!(
        matches!(
            error,
            StoreError::TooLarge {
                size: 4_000_000_000,
                ..
            }
        ),
        "{error:?}"
    );
    store.get(&key("a/b"), u64::MAX).unwrap_err();

    // A body that does not say how long it is ends at what is accepted.
    let server = start(|_| {
        Reply::new(200, vec![0; 100_000])
            .header("Transfer-Encoding", "identity")
            .header("Connection", "close")
            .ending(Ending::CloseAfter(usize::MAX))
    });
    let error = opened(&server, &options)
        .get(&key("a/b"), 1000)
        .unwrap_err();
    assert!(matches!(error, StoreError::TooLarge { .. }), "{error:?}");
}

/// The same faults in front of a bucket: the SDK's requests fail, the store's do not.
#[test]
fn an_overloaded_bucket() {
    let server = S3Server::start(S3Behaviour {
        throttles_every: Some(2),
        ..S3Behaviour::default()
    })
    .unwrap();
    let mut options = s3_options();
    options.retry.attempts = 30;
    let store = open(&server.store("x"), &options).unwrap();
    let bytes = noise(9, 20 << 20);
    let mut writer = store.put_stream().unwrap();
    writer.write(&bytes).unwrap();
    writer
        .commit(&key("packs/aa/x"), PutMode::IfAbsent)
        .unwrap();
    let read = store.get(&key("packs/aa/x"), 1 << 30).unwrap().unwrap();
    assert!(read == bytes);

    options.retry.attempts = 1;
    let store = open(&server.store("x"), &options).unwrap();
    let failed = (0..6)
        .filter_map(|_| store.get(&key("packs/aa/x"), 1 << 30).err())
        .collect::<Vec<_>>();
    assert!(!failed.is_empty());
    for error in failed {
        assert!(matches!(error, StoreError::Throttled { .. }), "{error:?}");
    }
}

/// A server that changes a bit of every second answer: layers read right all the same.
#[test]
fn every_second_answer_is_wrong() {
    let files = sample(9);
    let blobs = MemStore::new();
    publish(
        &LayerStore::new(Arc::new(blobs.clone())),
        "base/x:1",
        &files,
    )
    .unwrap();
    let answer = move |request: &Request| {
        let object = Key::new(request.target.trim_start_matches('/'))
            .ok()
            .and_then(|key| blobs.get(&key, u64::MAX).unwrap());
        let Some(object) = object else {
            return Reply::new(404, "");
        };
        let mut reply = Reply::of(&object, request);
        if request.number % 2 == 1 && request.method == "GET" {
            let middle = reply.body.len() / 2;
            reply.body[middle] ^= 4;
        }
        reply
    };
    let server = start(answer.clone());
    let store = LayerStore::new(opened(&server, &hasty()));
    assert!(read_all(&store, "base/x:1").unwrap() == data_of(&files));
    // Wrong every time: an error that names the object, after a few requests.
    let server = start(move |request| {
        let mut reply = answer(&Request {
            number: 0,
            ..request.clone()
        });
        if request.target.contains("maps/") {
            reply.body[20] ^= 4;
        }
        reply
    });
    let store = LayerStore::new(opened(&server, &hasty()));
    let error = read_all(&store, "base/x:1").unwrap_err();
    assert!(matches!(error, StoreError::Corrupt { .. }), "{error:?}");
    assert!(error.key().unwrap().starts_with("maps/"), "{error}");
    assert!(server.requests() < 12, "{}", server.requests());
}
