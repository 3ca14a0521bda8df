//! Requests to one registry: redirects, authorization, time limits, retries.
//!
//! * TLS is never given up: where the registry is spoken to by https, so are its redirects, upload
//!   addresses and token server. Plain http is for loopback hosts or where the caller asks for it.
//! * Redirects are followed here and not by the client, since `Authorization` goes to the
//!   registry's own origin and nowhere else: storage behind a registry refuses foreign tokens, and
//!   its logs must not have ours.
//! * Waiting has bounds: for a connection, for an answer (more where a large body is sent), for
//!   each piece of a body. Retries wait exponentially longer, by chance within that, or as long as
//!   `Retry-After` says up to a limit.
//! * [`Transport::send`] is for what may be done twice; uploads look after themselves
//!   ([`Transport::attempt`] and `upload`).

use std::error::Error as _;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use fs_err::File;
use fs_err::os::unix::fs::FileExt as _;
use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue};
use reqwest::{Method, Url};
use serde::Deserialize;

use super::auth::{self, Challenge, Grant, Grants, Intent, TokenAnswer};
use super::credentials::{self, Credential};
use super::name::{self, RegistryName};
use super::options::RegistryOptions;
use crate::blob::RetryPolicy;
use crate::blob::remote;
use crate::error::{Result, StoreError};

const MAX_REDIRECTS: usize = 8;
/// Largest answer of a token server in bytes.
const MAX_TOKEN: u64 = 1 << 20;
/// How much of an error's body is looked at, in bytes, and how much of it is shown.
const MAX_REFUSAL: u64 = 64 << 10;
const MAX_SHOWN: usize = 300;
/// Slowest upload that is waited for, in bytes per second.
const SLOWEST: u64 = 32 << 10;
/// Pieces in which a file is sent, in bytes.
const PIECE: u64 = 256 << 10;

/// What a request carries.
#[derive(Clone)]
pub(super) enum Body {
    Empty,
    Bytes(Bytes),
    /// All of a file, which is read while it is sent.
    File(Arc<File>, u64),
}

impl Body {
    fn len(&self) -> u64 {
        match self {
            Self::Empty => 0,
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::File(_, size) => *size,
        }
    }
}

/// A request as it is meant, before redirects and authorization.
pub(super) struct Call<'a> {
    pub method: Method,
    pub url: Url,
    pub headers: Vec<(HeaderName, String)>,
    pub body: Body,
    pub intent: Intent,
    /// Statuses that the caller understands; others are errors.
    pub accept: &'a [u16],
    /// For messages: read, write, list or delete.
    pub operation: &'static str,
    /// For messages: the object.
    pub what: &'a str,
}

/// An answer whose body has not been read.
#[derive(Debug)]
pub(super) struct Answer {
    response: reqwest::Response,
    idle: Duration,
    /// Where the answer came from, after redirects.
    pub url: Url,
}

impl Answer {
    pub(super) fn status(&self) -> u16 {
        self.response.status().as_u16()
    }

    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.response.headers().get(name)?.to_str().ok()
    }

    pub(super) fn content_length(&self) -> Option<u64> {
        self.header("content-length")?.parse().ok()
    }

    /// The next piece of the body; `None` at its end.
    pub(super) fn next(&mut self) -> io::Result<Option<Bytes>> {
        let chunk = self.response.chunk();
        let idle = self.idle;
        match remote::block_on(async { tokio::time::timeout(idle, chunk).await })? {
            Ok(Ok(piece)) => Ok(piece),
            Ok(Err(error)) => Err(to_io(&error)),
            Err(_) => Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("no byte came within {} ms", idle.as_millis()),
            )),
        }
    }

    /// The whole body; `None` if it has more than `max` bytes.
    pub(super) fn body(&mut self, max: u64) -> io::Result<Option<Vec<u8>>> {
        if self.content_length().is_some_and(|len| len > max) {
            return Ok(None);
        }
        let mut bytes = Vec::new();
        while let Some(piece) = self.next()? {
            if (bytes.len() + piece.len()) as u64 > max {
                return Ok(None);
            }
            bytes.extend_from_slice(&piece);
        }
        Ok(Some(bytes))
    }
}

/// The connection to one repository of a registry.
#[derive(Debug)]
pub(super) struct Transport {
    client: reqwest::Client,
    base: Url,
    pub name: RegistryName,
    pub options: RegistryOptions,
    grants: Grants,
    address: String,
    /// The registry's time in an answer, and when that came.
    clock: Mutex<Option<(SystemTime, Instant)>>,
}

impl Transport {
    /// Nothing is sent yet. `address` names the store or image in messages.
    pub(super) fn new(
        name: RegistryName,
        options: RegistryOptions,
        address: String,
    ) -> Result<Self> {
        let invalid = |why: String| StoreError::InvalidUrl {
            url: address.clone(),
            why,
        };
        let plain = options.plain_http.unwrap_or_else(|| name.is_loopback());
        let scheme = if plain { "http" } else { "https" };
        let base = Url::parse(&format!(
            "{scheme}://{}/v2/{}/",
            name.interface_host(),
            name.repository()
        ))
        .map_err(|e| invalid(e.to_string()))?;
        let mut client = reqwest::Client::builder()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(options.timeouts.connect)
            .https_only(!plain)
            .user_agent(concat!("layerpack/", env!("CARGO_PKG_VERSION")));
        if name.is_loopback() {
            client = client.no_proxy();
        }
        let client = client
            .build()
            .map_err(|e| invalid(format!("no client can be made: {}", chain(&e))))?;
        Ok(Self {
            client,
            base,
            name,
            options,
            grants: Grants::default(),
            address,
            clock: Mutex::new(None),
        })
    }

    /// The address for messages.
    pub(super) fn address(&self) -> &str {
        &self.address
    }

    /// An address below the repository's.
    pub(super) fn url(&self, path: &str) -> Result<Url> {
        self.resolve(&self.base, path)
    }

    /// What an address in an answer means, if it may be gone to.
    pub(super) fn resolve(&self, from: &Url, location: &str) -> Result<Url> {
        let refused = |why: &str| StoreError::Denied {
            store: self.address.clone(),
            key: show(location),
            what: why.to_owned(),
        };
        let url = from
            .join(location)
            .map_err(|_| refused("the registry refers to something that is no address"))?;
        let secure = url.scheme() == "https";
        let plain_is_fine = self.base.scheme() == "http"
            && url.scheme() == "http"
            && (self.options.plain_http == Some(true)
                || url.host_str().is_some_and(name::is_loopback));
        if !(secure || plain_is_fine) || url.cannot_be_a_base() {
            return Err(refused(
                "the registry refers to an address without TLS, which is not gone to",
            ));
        }
        Ok(url)
    }

    /// The time by the registry's own clock, from its last answer; `None` before the first, and
    /// where it does not say it.
    pub(super) fn now(&self) -> Option<SystemTime> {
        let clock = *self.clock.lock().unwrap_or_else(PoisonError::into_inner);
        let (then, since) = clock?;
        then.checked_add(since.elapsed())
    }

    /// Sets the clock by an answer of the registry itself.
    fn set_clock(&self, answer: &Answer) {
        let date = answer
            .header("date")
            .and_then(|date| httpdate::parse_http_date(date).ok());
        if let Some(date) = date.filter(|_| answer.url.origin() == self.base.origin()) {
            let mut clock = self.clock.lock().unwrap_or_else(PoisonError::into_inner);
            *clock = Some((date, Instant::now()));
        }
    }

    /// An [`StoreError::Io`] about an object.
    pub(super) fn io(&self, operation: &'static str, key: &str, source: io::Error) -> StoreError {
        StoreError::Io {
            operation,
            store: self.address.clone(),
            key: key.to_owned(),
            source,
        }
    }

    /// A [`StoreError::Corrupt`] about an object.
    pub(super) fn corrupt(&self, key: &str, what: impl Into<String>) -> StoreError {
        StoreError::Corrupt {
            store: self.address.clone(),
            key: key.to_owned(),
            range: None,
            what: what.into(),
        }
    }

    /// Sends a request until it is answered with a status that the caller understands.
    pub(super) fn send(&self, call: &Call<'_>) -> Result<Answer> {
        self.persist(call.what, || self.attempt_accepting(call))
    }

    /// The same, tried once.
    pub(super) fn attempt_accepting(&self, call: &Call<'_>) -> Result<Answer> {
        let answer = self.attempt(call)?;
        if call.accept.contains(&answer.status()) {
            Ok(answer)
        } else {
            Err(self.refusal(call, answer))
        }
    }

    /// Does something until it succeeds or fails for good.
    pub(super) fn persist<T>(&self, what: &str, mut act: impl FnMut() -> Result<T>) -> Result<T> {
        let mut tries = self.tries();
        loop {
            match act() {
                Ok(value) => return Ok(value),
                Err(error) => tries.again(what, error)?,
            }
        }
    }

    /// Counts failures from now on.
    pub(super) fn tries(&self) -> Tries {
        Tries {
            policy: self.options.retry,
            since: Instant::now(),
            failed: 0,
        }
    }

    /// One request, with a second one if the registry wants to know who asks.
    pub(super) fn attempt(&self, call: &Call<'_>) -> Result<Answer> {
        let mut header = match self.grants.fresh(&call.intent) {
            Some(header) => Some(header),
            None => match self.grants.challenge(&call.intent) {
                Some(challenge) => Some(self.authorize(call, &challenge, None)?),
                None => None,
            },
        };
        let answer = self.exchange(call, header.as_deref())?;
        if answer.status() != 401 || answer.url.origin() != self.base.origin() {
            return Ok(answer);
        }
        let challenge = choose(answer.response.headers());
        let Some(challenge) = challenge else {
            return Ok(answer);
        };
        header = Some(self.authorize(call, &challenge, header.as_deref())?);
        self.exchange(call, header.as_deref())
    }

    /// A header that answers a challenge.
    fn authorize(
        &self,
        call: &Call<'_>,
        challenge: &Challenge,
        refused: Option<&str>,
    ) -> Result<String> {
        self.grants
            .obtain(&call.intent, challenge, refused, || {
                let credential = self
                    .grants
                    .credential(|| {
                        credentials::find(
                            &self.options.credential_files,
                            &self.name,
                            self.options.helper_limit,
                        )
                    })
                    .map_err(|what| self.denied(call, what))?;
                if challenge.scheme == "bearer" {
                    return self.token(call, challenge, credential.as_ref());
                }
                match credential {
                    Some(Credential::Password { user, secret }) => {
                        let header = auth::basic(&user, &secret);
                        if Some(header.as_str()) == refused {
                            return Err(self.denied(call, format!("the registry refuses user {user} and password")));
                        }
                        Ok(Grant { header, until: None })
                    }
                    Some(Credential::Identity(_)) => Err(self.denied(
                        call,
                        "it wants a user and password, and the configuration has a token".to_owned(),
                    )),
                    None => Err(self.denied(
                        call,
                        format!("it wants a user and password, and no configuration of credentials has any for {}", self.name.host()),
                    )),
                }
            })
    }

    fn denied(&self, call: &Call<'_>, what: String) -> StoreError {
        StoreError::Denied {
            store: self.address.clone(),
            key: call.what.to_owned(),
            what,
        }
    }

    /// Asks the token server that a challenge names.
    fn token(
        &self,
        call: &Call<'_>,
        challenge: &Challenge,
        credential: Option<&Credential>,
    ) -> Result<Grant> {
        let parameter = |name: &str| challenge.parameters.get(name).map(String::as_str);
        let realm = parameter("realm")
            .ok_or_else(|| self.denied(call, "its challenge names no token server".to_owned()))?;
        let mut url = self.resolve(&self.base, realm)?;
        let scopes = call
            .intent
            .scopes(self.name.repository(), parameter("scope"));
        let service = parameter("service");
        let mut headers = Vec::new();
        let (method, body) = if let Some(Credential::Identity(secret)) = credential {
            let mut form = url::form_urlencoded::Serializer::new(String::new());
            form.append_pair("grant_type", "refresh_token")
                .append_pair("client_id", "layerpack")
                .append_pair("refresh_token", secret)
                .append_pair("scope", &scopes.join(" "));
            if let Some(service) = service {
                form.append_pair("service", service);
            }
            headers.push((
                reqwest::header::CONTENT_TYPE,
                "application/x-www-form-urlencoded".to_owned(),
            ));
            (Method::POST, Body::Bytes(form.finish().into()))
        } else {
            {
                let mut query = url.query_pairs_mut();
                for scope in &scopes {
                    query.append_pair("scope", scope);
                }
                if let Some(service) = service {
                    query.append_pair("service", service);
                }
                if let Some(Credential::Password { user, .. }) = credential {
                    query.append_pair("account", user);
                }
            }
            (Method::GET, Body::Empty)
        };
        let header = match credential {
            Some(Credential::Password { user, secret }) => Some(auth::basic(user, secret)),
            _ => None,
        };
        let asked = Instant::now();
        let ask = Call {
            method,
            url,
            headers,
            body,
            intent: call.intent.clone(),
            accept: &[200],
            operation: "read",
            what: call.what,
        };
        let mut answer = self.exchange_at(&ask, header.as_deref(), &ask.url)?;
        if answer.status() != 200 {
            return Err(match self.refusal(&ask, answer) {
                StoreError::Denied { what, .. } => {
                    self.denied(call, format!("its token server refuses: {what}"))
                }
                error => error,
            });
        }
        let bytes = answer
            .body(MAX_TOKEN)
            .map_err(|e| self.broken(call, e))?
            .ok_or_else(|| {
                self.denied(
                    call,
                    format!("its token server's answer has more than {MAX_TOKEN} bytes"),
                )
            })?;
        serde_json::from_slice::<TokenAnswer>(&bytes)
            .ok()
            .and_then(|answer| answer.grant(asked))
            .ok_or_else(|| self.denied(call, "its token server's answer holds no token".to_owned()))
    }

    /// One request with its redirects. `authorization` goes to the registry's origin only.
    fn exchange(&self, call: &Call<'_>, authorization: Option<&str>) -> Result<Answer> {
        self.exchange_at(call, authorization, &self.base)
    }

    /// The same, with the origin that may see `authorization`.
    fn exchange_at(
        &self,
        call: &Call<'_>,
        authorization: Option<&str>,
        trusted: &Url,
    ) -> Result<Answer> {
        let mut url = call.url.clone();
        for _ in 0..=MAX_REDIRECTS {
            let shown = authorization.filter(|_| url.origin() == trusted.origin());
            let answer = self.single(call, &url, shown)?;
            let follows = match answer.status() {
                307 | 308 => true,
                301..=303 => matches!(call.method, Method::GET | Method::HEAD),
                _ => false,
            };
            let Some(location) = answer.header("location").filter(|_| follows) else {
                return Ok(answer);
            };
            url = self.resolve(&url, location)?;
        }
        Err(self.denied(
            call,
            format!("it redirects more than {MAX_REDIRECTS} times"),
        ))
    }

    /// One request to one place.
    fn single(&self, call: &Call<'_>, url: &Url, authorization: Option<&str>) -> Result<Answer> {
        let bad = |what: &str| self.denied(call, format!("{what} cannot be sent in a header"));
        let mut request = reqwest::Request::new(call.method.clone(), url.clone());
        let headers = request.headers_mut();
        for (name, value) in &call.headers {
            let value = HeaderValue::from_str(value).map_err(|_| bad("a value"))?;
            headers.insert(name.clone(), value);
        }
        if let Some(authorization) = authorization {
            let mut value =
                HeaderValue::from_str(authorization).map_err(|_| bad("the credential"))?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        if matches!(call.method, Method::PUT | Method::PATCH | Method::POST) {
            headers.insert(
                reqwest::header::CONTENT_LENGTH,
                HeaderValue::from(call.body.len()),
            );
        }
        *request.body_mut() = match &call.body {
            Body::Empty => None,
            Body::Bytes(bytes) => Some(bytes.clone().into()),
            Body::File(file, size) => Some(stream(Arc::clone(file), *size)),
        };
        let limit =
            self.options.timeouts.response + Duration::from_secs(call.body.len().div_ceil(SLOWEST));
        let answered = remote::block_on(async {
            tokio::time::timeout(limit, self.client.execute(request)).await
        })
        .map_err(|e| self.io(call.operation, call.what, e))?;
        match answered {
            Ok(Ok(response)) => {
                let answer = Answer {
                    response,
                    idle: self.options.timeouts.idle,
                    url: url.clone(),
                };
                self.set_clock(&answer);
                Ok(answer)
            }
            Ok(Err(error)) => Err(self.broken(call, to_io(&error))),
            Err(_) => Err(StoreError::TimedOut {
                store: self.address.clone(),
                key: call.what.to_owned(),
                limit_ms: u64::try_from(limit.as_millis()).unwrap_or(u64::MAX),
            }),
        }
    }

    /// The connection failed.
    fn broken(&self, call: &Call<'_>, source: io::Error) -> StoreError {
        self.io(call.operation, call.what, source)
    }

    /// What an answer of another status than expected means.
    pub(super) fn refusal(&self, call: &Call<'_>, mut answer: Answer) -> StoreError {
        let status = answer.response.status();
        let retry_after = answer.header("retry-after").and_then(retry_after);
        let said = answer
            .body(MAX_REFUSAL)
            .ok()
            .flatten()
            .map(|body| said(&body))
            .unwrap_or_default();
        let code = status.as_u16();
        let text = if said.is_empty() {
            status.to_string()
        } else {
            format!("{status}: {said}")
        };
        let (store, key) = (self.address.clone(), call.what.to_owned());
        match code {
            401 | 403 => StoreError::Denied {
                store,
                key,
                what: text,
            },
            405 => StoreError::Denied {
                store,
                key,
                what: format!(
                    "{text}; the registry does not allow to {} this",
                    call.operation
                ),
            },
            429 | 503 => StoreError::Throttled {
                store,
                key,
                retry_after_ms: retry_after
                    .map(|wait| u64::try_from(wait.as_millis()).unwrap_or(u64::MAX)),
            },
            507 => StoreError::NoSpace {
                store,
                key,
                source: io::Error::other(text),
            },
            _ => {
                let kind = match code {
                    404 | 410 => io::ErrorKind::NotFound,
                    408 | 425 | 504 => io::ErrorKind::TimedOut,
                    500 | 502 => io::ErrorKind::ConnectionAborted,
                    _ => io::ErrorKind::Other,
                };
                self.io(call.operation, call.what, io::Error::new(kind, text))
            }
        }
    }
}

/// Failures of one operation, and whether it is worth another try.
#[derive(Debug)]
pub(super) struct Tries {
    policy: RetryPolicy,
    since: Instant,
    failed: u32,
}

impl Tries {
    /// Waits for the next try, or gives the error back: it stays at that.
    pub(super) fn again(&mut self, what: &str, error: StoreError) -> Result<()> {
        self.failed += 1;
        let Some(wait) = self.policy.next(self.failed, self.since, &error) else {
            return Err(error);
        };
        tracing::debug!(object = what, ?wait, "trying again: {error}");
        std::thread::sleep(wait);
        Ok(())
    }

    /// Something went well: count anew.
    pub(super) fn progress(&mut self) {
        self.failed = 0;
        self.since = Instant::now();
    }
}

/// The challenge that we can answer best.
fn choose(headers: &HeaderMap) -> Option<Challenge> {
    let mut found: Vec<Challenge> = headers
        .get_all(reqwest::header::WWW_AUTHENTICATE)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(auth::challenges)
        .filter(|challenge| matches!(challenge.scheme.as_str(), "bearer" | "basic"))
        .collect();
    found.sort_by_key(|challenge| challenge.scheme != "bearer");
    found.into_iter().next()
}

/// A body that reads a file as it goes: a piece is in memory at a time.
fn stream(file: Arc<File>, size: u64) -> reqwest::Body {
    let pieces = (0..size.div_ceil(PIECE)).map(move |n| {
        let at = n * PIECE;
        let len = usize::try_from(PIECE.min(size - at)).unwrap_or_default();
        let mut piece = vec![0; len];
        file.read_exact_at(&mut piece, at)?;
        Ok::<_, io::Error>(Bytes::from(piece))
    });
    reqwest::Body::wrap_stream(futures_util::stream::iter(pieces))
}

/// The client's error with its causes in one line, and the kind of the system's error behind it.
fn to_io(error: &reqwest::Error) -> io::Error {
    let text = chain(error);
    let mut kind = if error.is_timeout() {
        io::ErrorKind::TimedOut
    } else {
        io::ErrorKind::ConnectionReset
    };
    if error.is_builder() || text.contains("certificate") {
        kind = io::ErrorKind::InvalidData;
    } else {
        let mut source = error.source();
        while let Some(cause) = source {
            if let Some(io) = cause.downcast_ref::<io::Error>()
                && !matches!(io.kind(), io::ErrorKind::Other | io::ErrorKind::InvalidData)
            {
                kind = io.kind();
            }
            source = cause.source();
        }
    }
    io::Error::new(kind, text)
}

fn chain(error: &reqwest::Error) -> String {
    // Addresses of storage may carry a signature in their query.
    let mut parts: Vec<String> = Vec::new();
    let mut source = error.source();
    while let Some(cause) = source {
        let text = cause.to_string();
        if parts.last() != Some(&text) {
            parts.push(text);
        }
        source = cause.source();
    }
    if parts.is_empty() {
        parts.push("the request failed".to_owned());
    }
    parts.join(": ")
}

/// The wait that a `Retry-After` header asks for: seconds or a date.
fn retry_after(value: &str) -> Option<Duration> {
    if let Ok(seconds) = value.trim().parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = httpdate::parse_http_date(value).ok()?;
    Some(date.duration_since(SystemTime::now()).unwrap_or_default())
}

#[derive(Deserialize)]
struct Refusals {
    errors: Vec<Refusal>,
}

#[derive(Deserialize)]
struct Refusal {
    #[serde(default)]
    code: String,
    #[serde(default)]
    message: String,
}

/// What a registry says of an error, made fit for one line.
fn said(body: &[u8]) -> String {
    let text = match serde_json::from_slice::<Refusals>(body) {
        Ok(refusals) => {
            let each = refusals
                .errors
                .iter()
                .map(|e| format!("{} {}", e.code, e.message));
            each.collect::<Vec<_>>().join("; ")
        }
        Err(_) => String::from_utf8_lossy(body).into_owned(),
    };
    show(text.trim())
}

/// Text from outside, fit for a message.
pub(super) fn show(text: &str) -> String {
    let clean: String = text
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(MAX_SHOWN)
        .collect();
    clean.trim().to_owned()
}

/// Whether a status means that the server does not know how to do this.
pub(super) fn is_unsupported(error: &StoreError) -> bool {
    match error {
        StoreError::Denied { what, .. } => what.starts_with("405"),
        StoreError::Io { source, .. } => {
            let text = source.to_string();
            ["400", "404", "411", "413", "415", "416", "501"]
                .iter()
                .any(|code| text.starts_with(code))
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_registries_say_fits_one_line() {
        let json = br#"{"errors":[{"code":"DENIED","message":"no\nentry"},{"code":"X"}]}"#;
        assert_eq!(said(json), "DENIED no entry; X");
        assert_eq!(said(b"<html>\x1b[31m\r\n</html>\n"), "<html> [31m  </html>");
        assert_eq!(said(&[b'x'; 5000]).len(), MAX_SHOWN);
    }

    #[test]
    fn waits_are_seconds_or_dates() {
        assert_eq!(retry_after("7"), Some(Duration::from_secs(7)));
        assert_eq!(
            retry_after("Thu, 01 Jan 1970 00:00:10 GMT"),
            Some(Duration::ZERO)
        );
        let later = httpdate::fmt_http_date(SystemTime::now() + Duration::from_secs(3600));
        assert!(retry_after(&later).unwrap() > Duration::from_secs(3000));
        assert_eq!(retry_after("soon"), None);
    }
}
