//! A store in a bucket of S3 or of anything that speaks its protocol.
//!
//! * Reads go through [`read`], writes through [`upload`]; both retry and resume for themselves
//!   what a caller cannot.
//! * [`PutMode::IfAbsent`] looks first, then writes with `If-None-Match: *`. A server that ignores
//!   that header lets two writers at once both create: this backend never claims to
//!   [decide races](BlobStore::decides_races), and publishing does not rest on it.
//! * The keys' prefix `tmp/` holds what is being uploaded, as in a directory.

mod address;
mod connect;
mod error;
mod read;
mod upload;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use aws_sdk_s3::Client;
use reqwest::Url;
use tokio::sync::OnceCell;

pub(crate) use self::address::Address;
use self::error::{failed, is_absent};
use self::upload::S3Writer;
use super::http::client::{self, About, Redirects};
use super::http::download::{self, Limits};
use super::open::OpenOptions;
use super::remote;
use super::{BlobStore, BlobWriter, ObjectInfo, PutMode, PutOutcome};
use crate::error::{Result, StoreError};
use crate::key::Key;

/// What is known of the server's handling of `If-None-Match`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Condition {
    /// Nothing yet.
    Unknown,
    /// It has refused a write because of it.
    Works,
    /// It does not accept requests with it.
    Refused,
}

/// A store in a bucket.
#[derive(Debug, Clone)]
pub struct S3Store {
    core: Arc<Core>,
}

#[derive(Debug)]
struct Core {
    address: Address,
    url: String,
    options: OpenOptions,
    client: OnceCell<Client>,
    web: OnceLock<reqwest::Client>,
    signed: read::Signed,
    condition: AtomicU8,
    swept: AtomicBool,
}

impl S3Store {
    /// The store at `address`. Nothing is asked for yet.
    pub(crate) fn new(address: Address, options: &OpenOptions) -> Self {
        Self {
            core: Arc::new(Core {
                url: address.url(),
                address,
                options: options.clone(),
                client: OnceCell::new(),
                web: OnceLock::new(),
                signed: read::Signed::default(),
                condition: AtomicU8::new(Condition::Unknown as u8),
                swept: AtomicBool::new(false),
            }),
        }
    }
}

impl Core {
    async fn client(&self) -> &Client {
        self.client
            .get_or_init(|| connect::connect(&self.address, &self.options))
            .await
    }

    /// The client for signed addresses.
    fn web(&self, url: &Url, about: About<'_>) -> Result<&reqwest::Client> {
        if let Some(web) = self.web.get() {
            return Ok(web);
        }
        let web = client::client(url, &self.options.timeouts, Redirects::None)
            .map_err(|e| client::io_error(about, std::io::ErrorKind::Other, e.to_string()))?;
        Ok(self.web.get_or_init(|| web))
    }

    /// The name in the bucket.
    fn object(&self, key: &str) -> String {
        format!("{}{key}", self.address.prefix)
    }

    fn about<'a>(&'a self, key: &'a str, operation: &'static str) -> About<'a> {
        About {
            store: &self.url,
            key,
            operation,
        }
    }

    fn limits(&self) -> Limits<'_> {
        Limits {
            timeouts: &self.options.timeouts,
            retry: &self.options.retry,
        }
    }

    /// Runs one operation on the shared runtime, within its time.
    fn run<T>(&self, about: About<'_>, future: impl Future<Output = Result<T>>) -> Result<T> {
        let limit = self.options.timeouts.operation;
        remote::block_on(download::within(about, limit, future))
            .map_err(|e| client::io_error(about, e.kind(), e.to_string()))?
    }

    fn condition(&self) -> Condition {
        match self.condition.load(Ordering::Relaxed) {
            1 => Condition::Works,
            2 => Condition::Refused,
            _ => Condition::Unknown,
        }
    }

    fn learn(&self, condition: Condition) {
        self.condition.store(condition as u8, Ordering::Relaxed);
    }

    /// All objects whose key in the store begins with `prefix`, also those that are no keys.
    async fn list_all(&self, about: About<'_>, prefix: &str) -> Result<Vec<(String, Listed)>> {
        let mut found = Vec::new();
        let mut token = None;
        loop {
            let request = self
                .client()
                .await
                .list_objects_v2()
                .bucket(&self.address.bucket)
                .prefix(self.object(prefix))
                .set_continuation_token(token.take());
            let page = download::within(about, self.options.timeouts.response, async {
                request
                    .send()
                    .await
                    .map_err(|e| failed(about, &e, &self.options.timeouts))
            })
            .await?;
            for object in page.contents() {
                let Some(name) = object
                    .key()
                    .and_then(|key| key.strip_prefix(self.address.prefix.as_str()))
                else {
                    continue;
                };
                let listed = Listed {
                    size: object.size().and_then(|size| u64::try_from(size).ok()),
                    modified: object.last_modified().and_then(|t| time(t.secs())),
                };
                found.push((name.to_owned(), listed));
            }
            match page.next_continuation_token() {
                Some(next) if page.is_truncated() == Some(true) => token = Some(next.to_owned()),
                _ if page.is_truncated() == Some(true) => {
                    return Err(client::broken(
                        about,
                        "a list ends without saying how it goes on",
                    ));
                }
                _ => return Ok(found),
            }
        }
    }

    async fn delete_object(&self, about: About<'_>, key: &str) -> Result<()> {
        let limit = self.options.timeouts.response;
        download::within(about, limit, async {
            let result = self
                .client()
                .await
                .delete_object()
                .bucket(&self.address.bucket)
                .key(self.object(key))
                .send()
                .await;
            match result {
                Ok(_) => Ok(()),
                Err(error) if is_absent(&error) => Ok(()),
                Err(error) => Err(failed(about, &error, &self.options.timeouts)),
            }
        })
        .await
    }
}

/// What a list says of an object.
#[derive(Debug, Clone, Copy)]
struct Listed {
    size: Option<u64>,
    modified: Option<SystemTime>,
}

/// A time in seconds since 1970; the part of a second is not worth having.
fn time(seconds: i64) -> Option<SystemTime> {
    let seconds = u64::try_from(seconds).ok()?;
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds))
}

impl BlobStore for S3Store {
    fn get(&self, key: &Key, max_len: u64) -> Result<Option<Vec<u8>>> {
        let core = &*self.core;
        let about = core.about(key.as_str(), "read");
        let found = core.run(about, download::whole(core, about, max_len, core.limits()))?;
        download::as_object(about, found, max_len)
    }

    fn get_range(&self, key: &Key, range: Range<u64>) -> Result<Vec<u8>> {
        let core = &*self.core;
        let about = core.about(key.as_str(), "read");
        let found = core.run(about, async {
            if range.start >= range.end || range.end > download::MAX_OBJECT {
                let size = core.object_size(about, key.as_str()).await?;
                return Ok(download::without_bytes(&range, size));
            }
            download::part(core, about, range.clone(), core.limits()).await
        })?;
        download::as_range(about, found, range)
    }

    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<PutOutcome> {
        let about = self.core.about(key.as_str(), "write");
        self.core.run(
            about,
            upload::put(&self.core, about, key.as_str(), bytes, mode),
        )
    }

    fn put_stream(&self) -> Result<Box<dyn BlobWriter + '_>> {
        Ok(Box::new(S3Writer::new(Arc::clone(&self.core))))
    }

    fn size(&self, key: &Key) -> Result<Option<u64>> {
        let about = self.core.about(key.as_str(), "read");
        self.core
            .run(about, self.core.object_size(about, key.as_str()))
    }

    fn list(&self, prefix: &str) -> Result<Vec<ObjectInfo>> {
        let about = self.core.about(prefix, "list");
        let all = self.core.run(about, self.core.list_all(about, prefix))?;
        let mut found = all
            .into_iter()
            // What cannot be an object of a store is not ours to report.
            .filter_map(|(name, listed)| Key::new(&name).ok().map(|key| (key, listed)))
            .map(|(key, listed)| {
                let size = listed
                    .size
                    .ok_or_else(|| client::broken(about, "a list without sizes"))?;
                Ok(ObjectInfo {
                    key,
                    size,
                    modified: listed.modified,
                })
            })
            .collect::<Result<Vec<_>, StoreError>>()?;
        found.sort_unstable();
        Ok(found)
    }

    fn delete(&self, key: &Key) -> Result<bool> {
        let about = self.core.about(key.as_str(), "delete");
        self.core.run(about, async {
            // The protocol does not say whether there was one.
            let existed = self.core.object_size(about, key.as_str()).await?.is_some();
            if existed {
                self.core.delete_object(about, key.as_str()).await?;
            }
            Ok(existed)
        })
    }

    fn delete_volatile(&self, key: &Key) -> Result<bool> {
        let about = self.core.about(key.as_str(), "delete");
        self.core.run(about, async {
            self.core.delete_object(about, key.as_str()).await?;
            Ok(true)
        })
    }

    fn url(&self) -> String {
        self.core.url.clone()
    }
}
