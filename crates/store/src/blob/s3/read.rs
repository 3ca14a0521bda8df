//! Reading: the SDK signs an address once per object, and every range of the object is then a
//! plain request to it. That costs a small part of what the SDK spends on each request, and the
//! body is read, checked and resumed by the same code as a web server's.
//!
//! A signed address that the server does not accept (a skewed clock, expired credentials, a
//! gateway that does not know them) is no failure: the SDK then makes the request itself, and its
//! word counts.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use aws_sdk_s3::presigning::PresigningConfig;
use reqwest::header::{ACCEPT_ENCODING, IF_MATCH, RANGE};
use reqwest::{StatusCode, Url};

use super::super::http::client::{About, io_error};
use super::super::http::download::{self, Answer, Body, Opened, Origin};
use super::super::http::{self, client};
use super::Core;
use super::error::{failed, is_absent, status_and_code};
use crate::error::Result;

/// How long a signed address is good for, and how long it is used.
const SIGNED_FOR: Duration = Duration::from_secs(15 * 60);
const USED_FOR: Duration = Duration::from_secs(5 * 60);
/// Signed addresses kept; when there are as many, all are signed anew.
const MAX_SIGNED: usize = 4096;

/// Signed addresses of objects.
#[derive(Debug, Default)]
pub(super) struct Signed {
    known: Mutex<HashMap<String, (Url, Instant)>>,
    /// The server accepts requests of the SDK, but not signed addresses.
    useless: AtomicBool,
}

impl Signed {
    fn get(&self, key: &str) -> Option<Url> {
        // Entries are whole or absent, whatever panicked.
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known
            .get(key)
            .filter(|(_, since)| since.elapsed() < USED_FOR)
            .map(|(url, _)| url.clone())
    }

    fn set(&self, key: &str, url: Option<Url>) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= MAX_SIGNED {
            known.clear();
        }
        match url {
            Some(url) => known.insert(key.to_owned(), (url, Instant::now())),
            None => known.remove(key),
        };
    }
}

impl Core {
    /// The signed address of an object, and whether it was signed just now.
    async fn signed_url(&self, about: About<'_>, key: &str) -> Result<(Url, bool)> {
        if let Some(url) = self.signed.get(key) {
            return Ok((url, false));
        }
        let other =
            |e: &dyn std::fmt::Display| io_error(about, std::io::ErrorKind::Other, e.to_string());
        let config = PresigningConfig::expires_in(SIGNED_FOR).map_err(|e| other(&e))?;
        let request = self
            .client()
            .await
            .get_object()
            .bucket(&self.address.bucket)
            .key(self.object(key))
            .presigned(config)
            .await
            .map_err(|e| failed(about, &e, &self.options.timeouts))?;
        let url = Url::parse(request.uri()).map_err(|e| other(&e))?;
        self.signed.set(key, Some(url.clone()));
        Ok((url, true))
    }

    /// A plain request to a signed address; `None` if the SDK should ask. An address that was
    /// signed with what has expired since is signed anew first.
    async fn open_signed(
        &self,
        about: About<'_>,
        range: Option<&Range<u64>>,
        etag: Option<&str>,
    ) -> Result<Option<Answer>> {
        let (url, fresh) = self.signed_url(about, about.key).await?;
        let answer = self.open_at(about, url, range, etag).await?;
        if answer.is_some() || fresh {
            return Ok(answer);
        }
        let (url, _) = self.signed_url(about, about.key).await?;
        self.open_at(about, url, range, etag).await
    }

    /// One such request. An address that is refused is forgotten.
    async fn open_at(
        &self,
        about: About<'_>,
        url: Url,
        range: Option<&Range<u64>>,
        etag: Option<&str>,
    ) -> Result<Option<Answer>> {
        let mut request = self
            .web(&url, about)?
            .get(url)
            .header(ACCEPT_ENCODING, "identity");
        if let Some(range) = range {
            request = request.header(RANGE, download::range_header(range));
        }
        if let Some(etag) = etag {
            request = request.header(IF_MATCH, etag);
        }
        let response = request
            .send()
            .await
            .map_err(|e| client::failed(about, &e, &self.options.timeouts))?;
        match response.status() {
            // "No such object" has a body that tells it from "no such bucket".
            StatusCode::NOT_FOUND => Ok(
                match http::refused_with_code(about, response).await.1.as_deref() {
                    Some("NoSuchKey") => Some(Answer::Absent),
                    _ => None,
                },
            ),
            status if status.is_redirection() => {
                self.signed.set(about.key, None);
                Ok(None)
            }
            StatusCode::BAD_REQUEST | StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                self.signed.set(about.key, None);
                Ok(None)
            }
            _ => http::answer(about, response, range).await.map(Some),
        }
    }

    /// The same through the SDK.
    async fn open_sdk(
        &self,
        about: About<'_>,
        range: Option<&Range<u64>>,
        etag: Option<&str>,
    ) -> Result<Answer> {
        let result = self
            .client()
            .await
            .get_object()
            .bucket(&self.address.bucket)
            .key(self.object(about.key))
            .set_range(range.map(download::range_header))
            .set_if_match(etag.map(str::to_owned))
            .send()
            .await;
        let output = match result {
            Ok(output) => output,
            Err(error) if is_absent(&error) => return Ok(Answer::Absent),
            Err(error) => {
                return match status_and_code(&error).0 {
                    Some(416) => Ok(Answer::Beyond(None)),
                    Some(412) => Ok(Answer::Changed),
                    _ => Err(failed(about, &error, &self.options.timeouts)),
                };
            }
        };
        let len = output
            .content_length()
            .and_then(|len| u64::try_from(len).ok());
        let sent = output.content_range().and_then(download::content_range);
        let (start, total) = match sent {
            Some((sent, total)) => (sent.start, total),
            None => (0, len),
        };
        Ok(Answer::Opened(Opened {
            start,
            len,
            total,
            etag: output.e_tag().map(str::to_owned),
            body: Body::Sdk(output.body),
        }))
    }

    /// Size of an object.
    pub(super) async fn object_size(&self, about: About<'_>, key: &str) -> Result<Option<u64>> {
        let limit = self.options.timeouts.response;
        download::within(about, limit, async {
            let result = self
                .client()
                .await
                .head_object()
                .bucket(&self.address.bucket)
                .key(self.object(key))
                .send()
                .await;
            match result {
                Ok(output) => match output.content_length().map(u64::try_from) {
                    Some(Ok(len)) => Ok(Some(len)),
                    _ => Err(client::broken(about, "the server does not tell the size")),
                },
                Err(error) if is_absent(&error) => Ok(None),
                Err(error) => Err(failed(about, &error, &self.options.timeouts)),
            }
        })
        .await
    }
}

impl Origin for Core {
    async fn open(
        &self,
        key: &str,
        range: Option<&Range<u64>>,
        etag: Option<&str>,
    ) -> Result<Answer> {
        let about = self.about(key, "read");
        let signs = !self.address.anonymous && !self.signed.useless.load(Ordering::Relaxed);
        if !signs {
            return self.open_sdk(about, range, etag).await;
        }
        if let Some(answer) = self.open_signed(about, range, etag).await? {
            return Ok(answer);
        }
        let answer = self.open_sdk(about, range, etag).await?;
        if matches!(answer, Answer::Opened(_)) {
            tracing::debug!(
                store = about.store,
                "the server does not accept signed addresses"
            );
            self.signed.useless.store(true, Ordering::Relaxed);
        }
        Ok(answer)
    }
}
