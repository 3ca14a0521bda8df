//! What the tests share.

use std::sync::Arc;
use std::time::Duration;

use layerpack_fixtures::servers::{ACCESS_KEY, S3Server, SECRET_KEY};
use layerpack_store::{BlobStore, Key, OpenOptions, RetryPolicy, S3Credentials, Timeouts, open};

/// Options for servers on this machine that may misbehave: little patience.
pub(crate) fn hasty() -> OpenOptions {
    OpenOptions {
        timeouts: Timeouts {
            connect: Duration::from_secs(5),
            response: Duration::from_millis(400),
            idle: Duration::from_millis(400),
            operation: Duration::from_secs(20),
        },
        retry: RetryPolicy {
            attempts: 5,
            first_wait: Duration::from_millis(5),
            longest_wait: Duration::from_secs(3),
            total: Duration::from_secs(15),
        },
        ..OpenOptions::default()
    }
}

/// Options with the test server's user.
pub(crate) fn s3_options() -> OpenOptions {
    OpenOptions {
        s3_credentials: Some(S3Credentials {
            access_key: ACCESS_KEY.to_owned(),
            secret_key: SECRET_KEY.to_owned(),
            session_token: None,
        }),
        retry: RetryPolicy {
            first_wait: Duration::from_millis(5),
            ..RetryPolicy::default()
        },
        ..OpenOptions::default()
    }
}

/// A store below `prefix` of the test server's bucket.
pub(crate) fn bucket(server: &S3Server, prefix: &str) -> Arc<dyn BlobStore> {
    open(&server.store(prefix), &s3_options()).unwrap()
}

pub(crate) fn key(text: &str) -> Key {
    Key::new(text).unwrap()
}
