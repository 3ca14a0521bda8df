//! What is passing is got over, what is wrong is refused: no wrong byte, no endless wait.

use std::io::Read as _;
use std::time::Duration;

use layerpack_fixtures::servers::{DockerRegistry, Ending, Reply, Request, Scripted};
use layerpack_store::registry::{ManifestName, Pushed, RegistryOptions, Sha256, Upload};
use layerpack_store::{StoreError, Timeouts};

use crate::support::{Counter, Proxied, host, noise, options, repository};

fn is_blob(request: &Request) -> bool {
    request.method == "GET" && request.target.contains("/blobs/sha256:")
}

#[test]
fn broken_answers_are_resumed() {
    let blob = noise(200_000, 5);
    let digest = Sha256::of(&blob);
    let served = blob.clone();
    let asked = Counter::default();
    let ranges = Counter::default();
    let (asked_too, ranges_too) = (asked.clone(), ranges.clone());
    let server = Scripted::start(move |request| {
        let n = asked_too.next();
        if request.range().is_some() {
            ranges_too.next();
        }
        let reply = Reply::of(&served, request);
        match n % 4 {
            0 => reply.ending(Ending::CloseAfter(30_000)),
            1 => Reply::new(503, "busy").header("Retry-After", "0"),
            2 => reply.ending(Ending::ResetAfter(20_000)),
            _ => Reply::none(Ending::CloseAfter(0)),
        }
    })
    .unwrap();
    let registry = repository(&host(&server), options());
    let mut read = Vec::new();
    registry
        .blob_reader(digest, 200_000)
        .read_to_end(&mut read)
        .unwrap();
    assert!(read == blob);
    assert!(
        asked.get() >= 12 && ranges.get() >= 4,
        "{asked:?} {ranges:?}"
    );
    let part = registry
        .blob_range(&digest, 200_000, 1000..150_000)
        .unwrap();
    assert!(part == blob[1000..150_000]);
    let dir = tempfile::tempdir().unwrap();
    let mut file = fs_err::OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .open(dir.path().join("x"))
        .unwrap();
    registry.download(digest, 200_000, &mut file).unwrap();
    assert!(fs_err::read(dir.path().join("x")).unwrap() == blob);
}

#[test]
fn a_registry_without_ranges_is_read_from_the_beginning() {
    let blob = noise(100_000, 6);
    let digest = Sha256::of(&blob);
    let served = blob.clone();
    let asked = Counter::default();
    let asked_too = asked.clone();
    let server = Scripted::start(move |_| {
        let whole = Reply::new(200, served.clone());
        if asked_too.next() == 0 {
            whole.ending(Ending::CloseAfter(50_000))
        } else {
            whole
        }
    })
    .unwrap();
    let registry = repository(&host(&server), options());
    let mut read = Vec::new();
    registry
        .blob_reader(digest, 100_000)
        .read_to_end(&mut read)
        .unwrap();
    assert!(read == blob);
    assert_eq!(asked.get(), 2);
    let part = registry
        .blob_range(&digest, 100_000, 70_000..70_010)
        .unwrap();
    assert_eq!(part, blob[70_000..70_010]);
}

#[test]
fn wrong_bytes_are_refused() {
    let blob = noise(1000, 7);
    let digest = Sha256::of(&blob);
    // Another byte, one too many, one too few, another range, a page of HTML.
    let mut other = blob.clone();
    other[500] ^= 1;
    let mut long = blob.clone();
    long.push(0);
    let short = blob[..999].to_vec();
    for body in [other, long, short, b"<html>log in</html>".to_vec()] {
        let len = body.len();
        let server = Scripted::start(move |_| Reply::new(200, body.clone())).unwrap();
        let registry = repository(&host(&server), options());
        let error = registry.blob(&digest, 1000).unwrap_err();
        assert!(
            matches!(error, StoreError::Corrupt { .. }),
            "{len}: {error}"
        );
        assert!(error.to_string().contains(&digest.to_string()), "{error}");
        let mut read = Vec::new();
        let error = registry
            .blob_reader(digest, 1000)
            .read_to_end(&mut read)
            .unwrap_err();
        assert_eq!(
            error.kind(),
            std::io::ErrorKind::InvalidData,
            "{len}: {error}"
        );
        assert!(error.to_string().contains(&digest.to_string()), "{error}");
    }
    let server = Scripted::start(|_| {
        Reply::new(206, "0123456789").header("Content-Range", "bytes 5-14/1000")
    })
    .unwrap();
    let error = repository(&host(&server), options())
        .blob_range(&digest, 1000, 0..10)
        .unwrap_err();
    assert!(matches!(error, StoreError::Corrupt { .. }), "{error}");
}

#[test]
fn manifests_must_have_their_digest() {
    let server = Scripted::start(|_| {
        Reply::new(200, "{}").header(
            "Docker-Content-Digest",
            Sha256::of(b"something else").to_string(),
        )
    })
    .unwrap();
    let registry = repository(&host(&server), options());
    for name in [
        ManifestName::tag("x").unwrap(),
        ManifestName::Digest(Sha256::of(b"asked for")),
    ] {
        let error = registry.manifest(&name).unwrap_err();
        assert!(matches!(error, StoreError::Corrupt { .. }), "{error}");
        assert!(error.to_string().contains(&name.to_string()), "{error}");
    }
    // Huge ones are not read.
    let server = Scripted::start(|_| Reply::new(200, vec![b' '; (4 << 20) + 1])).unwrap();
    let registry = repository(&host(&server), options());
    let error = registry
        .manifest(&ManifestName::tag("x").unwrap())
        .unwrap_err();
    assert!(matches!(error, StoreError::TooLarge { .. }), "{error}");
}

#[test]
fn waits_end() {
    for silent in [false, true] {
        let server = Scripted::start(move |_| {
            if silent {
                Reply::none(Ending::HangAfter(0))
            } else {
                Reply::new(200, "1234567890").ending(Ending::HangAfter(3))
            }
        })
        .unwrap();
        let impatient = RegistryOptions {
            timeouts: Timeouts {
                response: Duration::from_millis(100),
                idle: Duration::from_millis(100),
                ..options().timeouts
            },
            ..options()
        };
        let registry = repository(&host(&server), impatient);
        let error = registry.blob(&Sha256::of(b"1234567890"), 10).unwrap_err();
        assert!(error.is_transient(), "{error:?}");
        assert_eq!(server.requests(), 4, "{silent}");
    }
}

#[test]
fn a_registry_that_asks_for_patience_is_obeyed_within_limits() {
    let asked = Counter::default();
    let asked_too = asked.clone();
    let server = Scripted::start(move |_| {
        if asked_too.next() == 0 {
            Reply::new(429, "").header("Retry-After", "1")
        } else {
            Reply::new(200, r#"{"tags":["a"]}"#)
        }
    })
    .unwrap();
    let begun = std::time::Instant::now();
    assert_eq!(repository(&host(&server), options()).tags().unwrap(), ["a"]);
    assert!(begun.elapsed() >= Duration::from_secs(1));

    let server = Scripted::start(|_| Reply::new(429, "").header("Retry-After", "1000")).unwrap();
    let error = repository(&host(&server), options()).tags().unwrap_err();
    assert!(
        matches!(
            error,
            StoreError::Throttled {
                retry_after_ms: Some(1_000_000),
                ..
            }
        ),
        "{error:?}"
    );
    assert_eq!(server.requests(), 1);
    // Errors say what the registry says, in one line.
    let server = Scripted::start(|_| {
        Reply::new(
            400,
            "{\"errors\":[{\"code\":\"NAME_INVALID\",\"message\":\"bad\\nname\"}]}",
        )
    })
    .unwrap();
    let error = repository(&host(&server), options()).tags().unwrap_err();
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert!(source.contains("NAME_INVALID bad name"), "{source}");
}

#[test]
fn pages_of_tags_are_put_together() {
    let server = Scripted::start(|request| match request.target.split('?').next_back() {
        Some("n=1000") => Reply::new(200, r#"{"tags":["b","-no","a"]}"#)
            .header("Link", "</v2/some/where/tags/list?last=b>; rel=\"next\""),
        Some("last=b") => Reply::new(200, r#"{"tags":["d","c","a"]}"#)
            .header("Link", "<list?last=d>; rel=\"next\""),
        _ => Reply::new(200, r#"{"tags":null}"#),
    })
    .unwrap();
    let registry = repository(&host(&server), options());
    assert_eq!(registry.tags().unwrap(), ["a", "b", "c", "d"]);
    assert_eq!(server.requests(), 3);
}

/// Uploads through a proxy that fails the nth request of each kind in each way: the blob gets
/// there, or the error names it.
#[test]
fn uploads_survive_what_is_passing() {
    let blob = noise(300_000, 8);
    let digest = Sha256::of(&blob);
    for way in 0..4_u64 {
        for nth in 0..9 {
            let count = Counter::default();
            let server = Proxied::start(move |request, registry| {
                if request.target.contains("/blobs/uploads/") && count.next() == nth {
                    return Some(match way {
                        0 => Reply::new(503, ""),
                        1 => Reply::none(Ending::CloseAfter(0)),
                        // It is done, and the answer is lost.
                        2 => {
                            let _ = registry.forward(request);
                            Reply::none(Ending::CloseAfter(0))
                        }
                        _ => {
                            let _ = registry.forward(request);
                            Reply::new(500, "")
                        }
                    });
                }
                None
            });
            let chunked = RegistryOptions {
                chunk_bytes: 64 << 10,
                ..options()
            };
            let registry = repository(&server.host(), chunked);
            let upload = Upload::Bytes(blob.clone().into());
            let pushed = registry.push_blob(&digest, &upload, &[]).unwrap();
            assert_eq!(pushed, Pushed::Sent, "way {way}, request {nth}");
            let direct = repository(&server.registry.host(), options());
            assert!(direct.blob(&digest, 300_000).unwrap().unwrap() == blob);
        }
    }
}

#[test]
fn an_upload_that_is_lost_begins_anew() {
    let count = Counter::default();
    let server = Proxied::start(move |request, _| {
        let third = request.method == "PATCH" && count.next() == 2;
        if third {
            return Some(Reply::none(Ending::CloseAfter(0)));
        }
        // And the registry has forgotten it.
        (request.method == "GET" && request.target.contains("/blobs/uploads/"))
            .then(|| Reply::new(404, ""))
    });
    let chunked = RegistryOptions {
        chunk_bytes: 64 << 10,
        ..options()
    };
    let registry = repository(&server.host(), chunked);
    let blob = noise(300_000, 9);
    let upload = Upload::Bytes(blob.clone().into());
    registry
        .push_blob(&Sha256::of(&blob), &upload, &[])
        .unwrap();
    let direct = repository(&server.registry.host(), options());
    assert!(direct.blob(&Sha256::of(&blob), 300_000).unwrap().unwrap() == blob);
}

#[test]
fn a_registry_without_chunks_gets_the_whole() {
    for refusal in [405, 400, 501, 415] {
        let server = Proxied::start(move |request, _| {
            (request.method == "PATCH").then(|| Reply::new(refusal, "no chunks"))
        });
        let chunked = RegistryOptions {
            chunk_bytes: 64 << 10,
            ..options()
        };
        let registry = repository(&server.host(), chunked);
        let dir = tempfile::tempdir().unwrap();
        let blob = noise(700_000, 10);
        fs_err::write(dir.path().join("x"), &blob).unwrap();
        let file = fs_err::File::open(dir.path().join("x")).unwrap();
        let upload = Upload::File(std::sync::Arc::new(file), 700_000);
        registry
            .push_blob(&Sha256::of(&blob), &upload, &[])
            .unwrap();
        let direct = repository(&server.registry.host(), options());
        assert!(direct.blob(&Sha256::of(&blob), 700_000).unwrap().unwrap() == blob);
    }
}

/// No request body is larger than the limit says.
#[test]
fn chunks_are_within_their_limit() {
    let largest = std::sync::Arc::new(std::sync::Mutex::new(0));
    let seen = std::sync::Arc::clone(&largest);
    let server = Proxied::start(move |request, _| {
        let mut seen = seen.lock().unwrap();
        *seen = request.body.len().max(*seen);
        None
    });
    let registry = repository(&server.host(), options());
    let blob = noise(9 << 20, 11);
    let upload = Upload::Bytes(blob.clone().into());
    registry
        .push_blob(&Sha256::of(&blob), &upload, &[])
        .unwrap();
    let largest = *largest.lock().unwrap();
    assert!(largest < 4 << 20 && largest > 1 << 20, "{largest}");
}

/// Half of the requests go wrong, in all ways at once; what is read is right.
#[test]
fn a_bad_line_costs_time_only() {
    let blob = noise(1_000_000, 12);
    let digest = Sha256::of(&blob);
    let rolls = Counter::default();
    let server = Proxied::start(move |request: &Request, registry: &DockerRegistry| {
        let roll = rolls.next();
        if roll % 2 == 0 {
            return None;
        }
        Some(match roll % 7 {
            0 => Reply::new(502, ""),
            1 => Reply::new(503, "").header("Retry-After", "0"),
            2 => Reply::none(Ending::CloseAfter(0)),
            _ if is_blob(request) => registry
                .forward(request)
                .ending(Ending::CloseAfter(100_000)),
            _ => return None,
        })
    });
    let patient = RegistryOptions {
        chunk_bytes: 100 << 10,
        retry: layerpack_store::RetryPolicy {
            attempts: 20,
            ..options().retry
        },
        ..options()
    };
    let registry = repository(&server.host(), patient);
    let upload = Upload::Bytes(blob.clone().into());
    registry.push_blob(&digest, &upload, &[]).unwrap();
    let mut read = Vec::new();
    registry
        .blob_reader(digest, 1_000_000)
        .read_to_end(&mut read)
        .unwrap();
    assert!(read == blob);
}
