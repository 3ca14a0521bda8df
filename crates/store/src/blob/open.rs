//! From an address to a store.
//!
//! A remote store is its backend within a limiter, within retries: each attempt counts against the
//! limits. Around that come the mirrors, so that what is asked of another address was tried enough
//! at the first, and the cache around all.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use reqwest::Url;

use super::s3::{Address, S3Store};
use super::{
    BlobStore, CachedStore, FileStore, HttpStore, LimitedStore, MemStore, MirrorStore, OciStore,
    RateLimits, RetryPolicy, RetryStore, Timeouts,
};
use crate::error::{Result, StoreError};
use crate::registry::RegistryOptions;

/// Most addresses of one store.
const MAX_ADDRESSES: usize = 16;
/// The settings that every remote address takes, for messages.
pub(super) const SETTINGS: &str =
    "timeout, connect_timeout, retries, bytes_per_second, requests_per_second, concurrency";
const SCHEMES: &str = "use a directory's path, file:///DIR, s3://BUCKET/PREFIX, oci://HOST/REPOSITORY or https://HOST/PATH";

/// A user of a bucket.
#[derive(Clone, PartialEq, Eq)]
pub struct S3Credentials {
    /// Name of the key.
    pub access_key: String,
    /// The key itself.
    pub secret_key: String,
    /// Of keys that are good for a while only.
    pub session_token: Option<String>,
}

impl fmt::Debug for S3Credentials {
    /// Shows nothing secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "S3Credentials({})", self.access_key)
    }
}

/// How stores are opened. Everything but the cache concerns remote stores only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenOptions {
    /// Time limits.
    pub timeouts: Timeouts,
    /// What is tried again.
    pub retry: RetryPolicy,
    /// Limits of the load on the store.
    pub rate: RateLimits,
    /// A local directory for objects that never change. For readers only: a writer or checker
    /// must see what the store really has.
    pub read_cache: Option<ReadCacheOptions>,
    /// Requests at once that one operation makes, at least 1.
    pub max_concurrency: usize,
    /// Who asks buckets; `None`: whom the AWS SDK's chain finds (environment, profiles, web
    /// identity, processes, containers, instances).
    pub s3_credentials: Option<S3Credentials>,
    /// Files with credentials of registries, as docker and the containers tools keep them.
    pub registry_credentials: Vec<PathBuf>,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            timeouts: Timeouts::default(),
            retry: RetryPolicy::default(),
            rate: RateLimits::default(),
            read_cache: None,
            max_concurrency: 4,
            s3_credentials: None,
            registry_credentials: Vec::new(),
        }
    }
}

impl OpenOptions {
    /// Sets one field by its name in an address: `timeout` (seconds without any progress, then it
    /// is tried again), `connect_timeout` (seconds), `retries` (further attempts),
    /// `bytes_per_second`, `requests_per_second`, `concurrency`. `false` if there is no such name.
    ///
    /// # Errors
    /// What the value must be, if it cannot be used.
    pub fn set(&mut self, name: &str, value: &str) -> Result<bool, String> {
        let number = |least: u64, most: u64| {
            value
                .parse::<u64>()
                .ok()
                .filter(|n| (least..=most).contains(n))
                .ok_or_else(|| format!("{name} is a number from {least} to {most}, not {value:?}"))
        };
        match name {
            "timeout" => {
                let limit = Duration::from_secs(number(1, 3600)?);
                self.timeouts.response = limit;
                self.timeouts.idle = limit;
                self.timeouts.operation = self.timeouts.operation.max(limit);
            }
            "connect_timeout" => self.timeouts.connect = Duration::from_secs(number(1, 3600)?),
            "retries" => {
                self.retry.attempts = u32::try_from(number(0, 100)?).unwrap_or(100) + 1;
            }
            "bytes_per_second" => self.rate.bytes_per_second = Some(number(1, 1 << 50)?),
            "requests_per_second" => {
                self.rate.requests_per_second = u32::try_from(number(1, 1_000_000)?).ok();
            }
            "concurrency" => {
                self.max_concurrency = usize::try_from(number(1, 64)?).unwrap_or(64);
            }
            _ => return Ok(false),
        }
        Ok(true)
    }
}

/// A local read-through cache of a remote store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadCacheOptions {
    /// The directory; created when it is first needed. Processes may share it.
    pub dir: PathBuf,
    /// Most bytes that it may hold.
    pub max_bytes: u64,
}

/// Opens the store at `url`: `file:///DIR` or a directory's path, `s3://BUCKET/PREFIX`,
/// `oci://HOST/REPOSITORY`, `http(s)://HOST/PATH` (read only), `mem://NAME` (this process only), or several of one store,
/// separated by `,`: the first is written to, the others are copies to read from. Nothing is read
/// or created yet.
///
/// # Errors
/// [`StoreError::InvalidUrl`] for addresses that cannot be used.
pub fn open(url: &str, options: &OpenOptions) -> Result<Arc<dyn BlobStore>> {
    let addresses = addresses(url)?;
    let mut remote = false;
    let mut stores = Vec::with_capacity(addresses.len());
    for address in addresses {
        let (store, is_remote) = open_one(address, options)?;
        remote |= is_remote;
        stores.push(store);
    }
    let mut stores = stores.into_iter();
    let first = stores.next().ok_or_else(|| invalid(url, "it is empty"))?;
    let copies: Vec<_> = stores.collect();
    let store: Arc<dyn BlobStore> = if copies.is_empty() {
        first
    } else {
        Arc::new(MirrorStore::new(first, copies))
    };
    Ok(match &options.read_cache {
        Some(cache) if remote => Arc::new(CachedStore::new(store, cache.clone())),
        _ => store,
    })
}

/// [`open`] with the default options.
///
/// # Errors
/// As [`open`].
pub fn open_url(url: &str) -> Result<Arc<dyn BlobStore>> {
    open(url, &OpenOptions::default())
}

/// Addresses for a message: without what comes before a host, which may be a password.
pub(super) fn redacted(text: &str) -> String {
    let one = |address: &str| match address.split_once("://") {
        Some((scheme, rest)) if scheme != "file" => {
            let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
            let place = place.rsplit_once('@').map_or(place, |(_, host)| host);
            let mark = if query.is_empty() { "" } else { "?" };
            format!("{scheme}://{place}{mark}{query}")
        }
        _ => address.to_owned(),
    };
    text.split(',').map(one).collect::<Vec<_>>().join(",")
}

fn invalid(url: &str, why: impl Into<String>) -> StoreError {
    StoreError::InvalidUrl {
        url: redacted(url),
        why: why.into(),
    }
}

/// The addresses in `text`, at least one. A comma separates them where an address with a scheme or an
/// absolute path follows; another comma belongs to a directory's name.
///
/// # Errors
/// [`StoreError::InvalidUrl`] if one is empty or there are too many.
pub fn addresses(text: &str) -> Result<Vec<&str>> {
    if text.is_empty() {
        return Err(invalid(text, format!("it is empty; {SCHEMES}")));
    }
    let mut found = Vec::new();
    let mut rest = text;
    let mut from = 0;
    while let Some(comma) = rest.get(from..).and_then(|part| part.find(',')) {
        let at = from + comma;
        let (head, tail) = (rest.get(..at), rest.get(at + 1..));
        let (Some(head), Some(tail)) = (head, tail) else {
            break;
        };
        if has_scheme(tail) || tail.starts_with('/') {
            found.push(head);
            rest = tail;
            from = 0;
        } else {
            from = at + 1;
        }
    }
    found.push(rest);
    if (found.iter()).any(|address| address.is_empty() || address.ends_with(',')) {
        return Err(invalid(text, "one of its addresses is empty"));
    }
    if found.len() > MAX_ADDRESSES {
        return Err(invalid(
            text,
            format!("at most {MAX_ADDRESSES} addresses of one store are taken"),
        ));
    }
    Ok(found)
}

/// Whether an address names its scheme; else it is a directory's path.
#[must_use]
pub fn has_scheme(text: &str) -> bool {
    text.split_once("://").is_some_and(|(scheme, _)| {
        !scheme.is_empty()
            && scheme
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
    })
}

/// One address, and whether it is remote.
fn open_one(text: &str, options: &OpenOptions) -> Result<(Arc<dyn BlobStore>, bool)> {
    let Some((scheme, rest)) = text.split_once("://").filter(|_| has_scheme(text)) else {
        return Ok((Arc::new(FileStore::new(PathBuf::from(text))?), false));
    };
    match scheme {
        "file" if rest.starts_with('/') => {
            Ok((Arc::new(FileStore::new(PathBuf::from(rest))?), false))
        }
        "file" => Err(invalid(
            text,
            "a file address is file:///DIR with an absolute directory",
        )),
        "mem" if rest.is_empty() => Err(invalid(text, "a store in memory is mem://NAME")),
        "mem" => Ok((Arc::new(MemStore::named(rest)), false)),
        "s3" | "http" | "https" => {
            let (url, own, options) = settings(text, options)?;
            let backend: Arc<dyn BlobStore> = if scheme == "s3" {
                Arc::new(S3Store::new(Address::new(&url, &own)?, &options))
            } else {
                if let Some((name, _)) = own.first() {
                    return Err(invalid(
                        text,
                        format!("there is no setting {name:?}; the address takes {SETTINGS}"),
                    ));
                }
                Arc::new(HttpStore::new(url.as_str(), &options)?)
            };
            Ok((wrapped(backend, &options), true))
        }
        "oci" => {
            let (url, own, options) = settings(text, options)?;
            let backend = registry(&url, &own, &options)?;
            // It tries again by itself, and knows better where to go on.
            let once = OpenOptions {
                retry: RetryPolicy::never(),
                ..options
            };
            Ok((wrapped(Arc::new(backend), &once), true))
        }
        other => Err(invalid(
            text,
            format!("{other}:// is not supported; {SCHEMES}"),
        )),
    }
}

/// The store in a registry's repository.
fn registry(url: &Url, own: &[(String, String)], options: &OpenOptions) -> Result<OciStore> {
    let text = url.as_str().split('?').next().unwrap_or_default();
    if !url.username().is_empty() || url.password().is_some() {
        return Err(invalid(
            "oci://…",
            "it holds a name or password; registries' credentials are in files, as `docker login` writes them",
        ));
    }
    let mut plain_http = None;
    for (name, value) in own {
        match (name.as_str(), value.as_str()) {
            ("plain_http", "true") => plain_http = Some(true),
            ("plain_http", "false") => plain_http = Some(false),
            ("plain_http", _) => return Err(invalid(text, "plain_http is true or false")),
            (other, _) => {
                return Err(invalid(
                    text,
                    format!(
                        "there is no setting {other:?}; the address takes plain_http, {SETTINGS}"
                    ),
                ));
            }
        }
    }
    let name = text.strip_prefix("oci://").unwrap_or_default();
    let options = RegistryOptions {
        credential_files: options.registry_credentials.clone(),
        plain_http,
        timeouts: options.timeouts,
        retry: options.retry,
        max_concurrency: options.max_concurrency,
        ..RegistryOptions::default()
    };
    OciStore::new(name.trim_end_matches('/'), options)
}

/// An address, the settings in it that are its scheme's own, and the options with the others.
type Parsed = (Url, Vec<(String, String)>, OpenOptions);

fn settings(text: &str, options: &OpenOptions) -> Result<Parsed> {
    // Without the query, which may be long, and what comes before the host, which may be secret.
    let shown = || {
        let (scheme, rest) = text.split_once("://").unwrap_or(("", text));
        let rest = rest.split('?').next().unwrap_or("");
        let rest = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
        format!("{scheme}://{rest}")
    };
    let url = Url::parse(text).map_err(|e| invalid(&shown(), e.to_string()))?;
    let mut options = options.clone();
    let mut own = Vec::new();
    for (name, value) in url.query_pairs() {
        let known = options
            .set(&name, &value)
            .map_err(|why| invalid(&shown(), why))?;
        if !known {
            own.push((name.into_owned(), value.into_owned()));
        }
    }
    Ok((url, own, options))
}

fn wrapped(backend: Arc<dyn BlobStore>, options: &OpenOptions) -> Arc<dyn BlobStore> {
    let mut store = backend;
    if options.rate != RateLimits::default() {
        store = Arc::new(LimitedStore::new(store, options.rate));
    }
    if options.retry.attempts > 1 {
        store = Arc::new(RetryStore::new(store, options.retry));
    }
    store
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_told_apart() {
        for (text, wanted) in [
            ("/a", &["/a"][..]),
            ("/a,b", &["/a,b"]),
            ("/a,/b", &["/a", "/b"]),
            ("/a,b,mem://x", &["/a,b", "mem://x"]),
            (
                "s3://b?region=x,http://h/p,file:///d,e",
                &["s3://b?region=x", "http://h/p", "file:///d,e"],
            ),
        ] {
            assert_eq!(addresses(text).unwrap(), wanted, "{text}");
        }
        for text in ["", ",", ",/a", "/a,", "file:///a,,file:///b"] {
            addresses(text).unwrap_err();
        }
        addresses(&vec!["mem://x"; 17].join(",")).unwrap_err();
    }

    #[test]
    fn stores_open_by_their_own_address() {
        for text in [
            "file:///some/dir",
            "mem://x",
            "s3://bucket/a?endpoint=http://127.0.0.1:1&region=r",
            "http://localhost:1/a/b",
            "https://example.org",
            "mem://x,file:///some/dir",
            "oci://localhost:5000/a/b",
            "oci://h.example/a/b?plain_http=true",
        ] {
            let store = open_url(text).unwrap();
            assert_eq!(store.url(), text);
        }
        let store = open_url("http://h/a/?timeout=3&retries=0").unwrap();
        assert_eq!(store.url(), "http://h/a");
    }

    #[test]
    fn what_cannot_be_opened_says_why_and_shows_no_secret() {
        for (text, why) in [
            ("", "empty"),
            ("ftp://h/x", "not supported"),
            ("ftp://u:secret@h/x", "not supported"),
            ("file://host/x", "absolute"),
            ("mem://", "NAME"),
            ("http://u:secret@h/x", "password"),
            ("s3://u:secret@b/x", "credentials"),
            ("s3://u:secret@b/x?timeout=0", "timeout"),
            ("oci://u:secret@h/x", "password"),
            ("oci://h", "repository"),
            ("oci://h/X", "repository"),
            ("oci://h/x:1", "tag"),
            ("oci://h/x?plain_http=maybe", "plain_http"),
            ("oci://h/x?colour=red", "colour"),
            ("http://h/x?colour=red", "colour"),
            ("http://h/x?timeout=soon", "timeout"),
            ("http://h/x?retries=101", "retries"),
            ("http://h/x?bytes_per_second=0", "bytes_per_second"),
            ("http://h:x/", "port"),
        ] {
            let error = open_url(text).unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
            assert!(!error.contains("secret"), "{text}: {error}");
        }
    }

    #[test]
    fn settings_reach_their_options() {
        let mut options = OpenOptions::default();
        for (name, value) in [
            ("timeout", "400"),
            ("connect_timeout", "2"),
            ("retries", "0"),
            ("bytes_per_second", "1000"),
            ("requests_per_second", "7"),
            ("concurrency", "9"),
        ] {
            assert_eq!(options.set(name, value), Ok(true));
        }
        assert_eq!(options.set("colour", "red"), Ok(false));
        assert_eq!(options.timeouts.idle, Duration::from_secs(400));
        assert_eq!(options.timeouts.operation, Duration::from_secs(400));
        assert_eq!(options.timeouts.connect, Duration::from_secs(2));
        assert_eq!(options.retry.attempts, 1);
        assert_eq!(options.rate.bytes_per_second, Some(1000));
        assert_eq!(options.rate.requests_per_second, Some(7));
        assert_eq!(options.max_concurrency, 9);
    }
}
