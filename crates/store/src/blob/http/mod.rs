//! A store behind a web server, for reading: `https://HOST/PATH` serves a store's directory as
//! plain files. What is read is verified by its readers, so any mirror or cache will do.
//!
//! A web server cannot be listed or written to. References are read by name; what needs a list
//! says so.

pub(crate) mod client;
pub(crate) mod download;

use std::ops::Range;
use std::sync::OnceLock;
use std::time::Duration;

use reqwest::header::{ACCEPT_ENCODING, CONTENT_LENGTH, IF_MATCH, RANGE};
use reqwest::{Client, Method, RequestBuilder, Response, StatusCode, Url};

use self::client::{About, Redirects};
use self::download::{Answer, Body, Limits, Origin};
use super::open::OpenOptions;
use super::remote;
use super::{BlobStore, BlobWriter, ObjectInfo, PutMode, PutOutcome};
use crate::error::{Result, StoreError};
use crate::key::Key;

const READ_ONLY: &str =
    "a web server is only read from; write to the directory or bucket that it serves";
const NO_LIST: &str = "a web server cannot be listed; name the layer, or use the directory or bucket that the server serves";
/// How much of an error's text is read, in bytes.
const MAX_SAID: usize = 2048;
/// How long each piece of that text may take.
const SAID_LIMIT: Duration = Duration::from_secs(2);

/// A store on a web server.
#[derive(Debug)]
pub struct HttpStore {
    url: String,
    base: Url,
    options: OpenOptions,
    client: OnceLock<Client>,
}

impl HttpStore {
    /// The store whose objects are at `base` and their keys, with a `/` between. Nothing is asked
    /// for yet.
    ///
    /// # Errors
    /// [`StoreError::InvalidUrl`] if `base` is no address of this kind, or holds a password.
    pub fn new(base: &str, options: &OpenOptions) -> Result<Self> {
        let invalid = |why: String| StoreError::InvalidUrl {
            url: base.to_owned(),
            why,
        };
        let mut url = Url::parse(base).map_err(|e| invalid(e.to_string()))?;
        if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none() {
            return Err(invalid("it is not http(s)://HOST/PATH".to_owned()));
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err(StoreError::InvalidUrl {
                // Not shown again.
                url: format!("{}://…@{}", url.scheme(), url.host_str().unwrap_or("")),
                why: "an address must not hold a password".to_owned(),
            });
        }
        url.set_query(None);
        url.set_fragment(None);
        let path = url.path().trim_end_matches('/').to_owned();
        url.set_path(&path);
        Ok(Self {
            url: url.as_str().trim_end_matches('/').to_owned(),
            base: url,
            options: options.clone(),
            client: OnceLock::new(),
        })
    }

    fn about<'a>(&'a self, key: &'a str) -> About<'a> {
        About {
            store: &self.url,
            key,
            operation: "read",
        }
    }

    fn client(&self) -> Result<&Client> {
        if let Some(client) = self.client.get() {
            return Ok(client);
        }
        let timeouts = &self.options.timeouts;
        let client = client::client(&self.base, timeouts, Redirects::Secure).map_err(|e| {
            client::io_error(
                self.about("the connection"),
                std::io::ErrorKind::Other,
                e.to_string(),
            )
        })?;
        Ok(self.client.get_or_init(|| client))
    }

    fn request(&self, method: Method, key: &str) -> Result<RequestBuilder> {
        let mut url = self.base.clone();
        url.set_path(&format!("{}/{key}", self.base.path().trim_end_matches('/')));
        Ok(self
            .client()?
            .request(method, url)
            .header(ACCEPT_ENCODING, "identity"))
    }

    async fn send(&self, about: About<'_>, request: RequestBuilder) -> Result<Response> {
        request
            .send()
            .await
            .map_err(|e| client::failed(about, &e, &self.options.timeouts))
    }

    const fn limits(&self) -> Limits<'_> {
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

    async fn object_size(&self, about: About<'_>) -> Result<Option<u64>> {
        let timeouts = &self.options.timeouts;
        let request = self.request(Method::HEAD, about.key)?;
        let response =
            download::within(about, timeouts.response, self.send(about, request)).await?;
        let status = response.status();
        if client::is_absent(status) {
            return Ok(None);
        }
        let length = response
            .headers()
            .get(CONTENT_LENGTH)
            .and_then(|value| value.to_str().ok()?.parse().ok());
        if status == StatusCode::OK
            && let Some(length) = length
        {
            return Ok(Some(length));
        }
        if status.is_success()
            || matches!(
                status,
                StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED
            )
        {
            // A server that does not tell sizes so tells them with a range.
            return self.size_by_range(about).await;
        }
        Err(refused(about, response).await)
    }

    async fn size_by_range(&self, about: About<'_>) -> Result<Option<u64>> {
        let open = self.open(about.key, Some(&(0..1)), None);
        match download::within(about, self.options.timeouts.response, open).await? {
            Answer::Absent => Ok(None),
            Answer::Beyond(size) => Ok(Some(size.unwrap_or(0))),
            Answer::Opened(opened) if opened.total.is_some() => Ok(opened.total),
            Answer::Opened(_) | Answer::Changed => Err(client::io_error(
                about,
                std::io::ErrorKind::Unsupported,
                "the server does not tell the object's size",
            )),
        }
    }
}

impl Origin for HttpStore {
    async fn open(
        &self,
        key: &str,
        range: Option<&Range<u64>>,
        etag: Option<&str>,
    ) -> Result<Answer> {
        let about = self.about(key);
        let mut request = self.request(Method::GET, key)?;
        if let Some(range) = range {
            request = request.header(RANGE, download::range_header(range));
        }
        if let Some(etag) = etag.filter(|etag| !etag.starts_with("W/")) {
            request = request.header(IF_MATCH, etag);
        }
        let response = self.send(about, request).await?;
        answer(about, response, range).await
    }
}

/// What a response to a GET means.
pub(crate) async fn answer(
    about: About<'_>,
    response: Response,
    range: Option<&Range<u64>>,
) -> Result<Answer> {
    let status = response.status();
    match status {
        StatusCode::OK | StatusCode::PARTIAL_CONTENT => {
            let headers = response.headers().clone();
            let opened = download::head(about, status, &headers, range, Body::Web(response))?;
            Ok(Answer::Opened(opened))
        }
        status if client::is_absent(status) => Ok(Answer::Absent),
        StatusCode::RANGE_NOT_SATISFIABLE => Ok(Answer::Beyond(download::unsatisfied_size(
            response.headers(),
        ))),
        StatusCode::PRECONDITION_FAILED => Ok(Answer::Changed),
        _ => Err(refused(about, response).await),
    }
}

/// The error of an answer that brings no object, with the beginning of its text.
pub(crate) async fn refused(about: About<'_>, response: Response) -> StoreError {
    refused_with_code(about, response).await.0
}

/// The same, and the code in an answer of a bucket.
pub(crate) async fn refused_with_code(
    about: About<'_>,
    mut response: Response,
) -> (StoreError, Option<String>) {
    let status = response.status().as_u16();
    let retry_after = client::retry_after(response.headers());
    let mut said = Vec::new();
    // The text is for people: without it the status must do.
    while said.len() < MAX_SAID
        && let Ok(Ok(Some(piece))) = tokio::time::timeout(SAID_LIMIT, response.chunk()).await
    {
        said.extend_from_slice(&piece);
    }
    said.truncate(MAX_SAID);
    let text = String::from_utf8_lossy(&said);
    let code = element(&text, "Code");
    // A page for browsers says nothing that the status does not.
    let plain = match (code, element(&text, "Message")) {
        (Some(code), Some(message)) => format!("{code}: {message}"),
        (Some(code), None) => code.to_owned(),
        _ if text.trim_start().starts_with('<') => String::new(),
        _ => text.clone().into_owned(),
    };
    let error = client::refusal(about, status, retry_after, &plain);
    (error, code.map(str::to_owned))
}

/// The text of an XML element without attributes or children.
fn element<'a>(xml: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = xml.split_once(&format!("<{name}>"))?;
    let (text, _) = rest.split_once(&format!("</{name}>"))?;
    (!text.contains('<')).then_some(text)
}

impl BlobStore for HttpStore {
    fn get(&self, key: &Key, max_len: u64) -> Result<Option<Vec<u8>>> {
        let about = self.about(key.as_str());
        let download = self.run(about, download::whole(self, about, max_len, self.limits()))?;
        download::as_object(about, download, max_len)
    }

    fn get_range(&self, key: &Key, range: Range<u64>) -> Result<Vec<u8>> {
        let about = self.about(key.as_str());
        let download = self.run(about, async {
            if range.start >= range.end || range.end > download::MAX_OBJECT {
                let size = self.object_size(about).await?;
                return Ok(download::without_bytes(&range, size));
            }
            download::part(self, about, range.clone(), self.limits()).await
        })?;
        download::as_range(about, download, range)
    }

    fn put(&self, _key: &Key, _bytes: &[u8], _mode: PutMode) -> Result<PutOutcome> {
        Err(self.unsupported("write", READ_ONLY))
    }

    fn put_stream(&self) -> Result<Box<dyn BlobWriter + '_>> {
        Err(self.unsupported("write", READ_ONLY))
    }

    fn size(&self, key: &Key) -> Result<Option<u64>> {
        let about = self.about(key.as_str());
        self.run(about, self.object_size(about))
    }

    fn list(&self, _prefix: &str) -> Result<Vec<ObjectInfo>> {
        Err(self.unsupported("list objects", NO_LIST))
    }

    fn delete(&self, _key: &Key) -> Result<bool> {
        Err(self.unsupported("delete", READ_ONLY))
    }

    fn url(&self) -> String {
        self.url.clone()
    }
}

impl HttpStore {
    fn unsupported(&self, operation: &'static str, why: &'static str) -> StoreError {
        StoreError::NotSupported {
            operation,
            store: self.url.clone(),
            why,
        }
    }
}
