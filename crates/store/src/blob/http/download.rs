//! Reading one object or range over HTTP, whoever signs the request: checks that the answer is
//! what was asked for, and goes on from where a body broke off, as long as the object is the same.

use std::ops::Range;
use std::time::Duration;

use bytes::Bytes;
use reqwest::StatusCode;
use reqwest::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, ETAG, HeaderMap};

use super::super::remote::Timeouts;
use super::super::retry::RetryPolicy;
use super::client::{About, broken, io_error, timed_out};
use crate::buffers;
use crate::error::{Result, StoreError};

/// A body that brought this much has made progress: what broke before is forgotten.
const PROGRESS: usize = 64 << 10;
/// Most memory set aside on the word of a server, in bytes.
const BELIEVED: u64 = 64 << 20;
/// A server that ignores ranges may send at most this much before what was asked for, in bytes.
const MAX_SKIP: u64 = 4 << 20;

/// No object is larger, in bytes: ranges beyond are not asked for.
pub(crate) const MAX_OBJECT: u64 = 1 << 53;

/// What a range without bytes, or beyond every object's end, is of an object of `size` bytes.
pub(crate) fn without_bytes(range: &Range<u64>, size: Option<u64>) -> Download {
    match size {
        None => Download::Absent,
        Some(size) if range.start == range.end && range.end <= size => Download::Bytes(Vec::new()),
        Some(size) => Download::Short(Some(size)),
    }
}

/// Pieces of a body.
pub(crate) enum Body {
    /// Of a plain request.
    Web(reqwest::Response),
    /// Of one that the SDK made.
    Sdk(aws_sdk_s3::primitives::ByteStream),
}

impl Body {
    /// The next piece; `None` at the end. The error says why the body broke.
    async fn chunk(&mut self) -> Result<Option<Bytes>, String> {
        match self {
            Self::Web(response) => response.chunk().await.map_err(|e| e.to_string()),
            Self::Sdk(stream) => stream.try_next().await.map_err(|e| e.to_string()),
        }
    }
}

/// The head of an answer that brings bytes.
pub(crate) struct Opened {
    /// Where the body begins in the object.
    pub(crate) start: u64,
    /// How many bytes the body has, if the server says so.
    pub(crate) len: Option<u64>,
    /// The object's size, if the server says so.
    pub(crate) total: Option<u64>,
    /// The version of the object.
    pub(crate) etag: Option<String>,
    /// The bytes.
    pub(crate) body: Body,
}

/// An answer to a request for an object or a part of it.
pub(crate) enum Answer {
    /// It exists.
    Opened(Opened),
    /// There is no such object.
    Absent,
    /// The range begins beyond its end. The size, if the server says it.
    Beyond(Option<u64>),
    /// It is no longer the version that was asked for.
    Changed,
}

/// Where objects come from: a web server, or a bucket with signed requests.
pub(crate) trait Origin {
    /// Asks for the object from byte `range.start` to before `range.end` (`None`: all of it), if
    /// it still is the version `etag`.
    async fn open(
        &self,
        key: &str,
        range: Option<&Range<u64>>,
        etag: Option<&str>,
    ) -> Result<Answer>;
}

/// What a download ends with.
pub(crate) enum Download {
    /// All bytes asked for.
    Bytes(Vec<u8>),
    /// There is no such object.
    Absent,
    /// The object has fewer bytes; its size, if it is known.
    Short(Option<u64>),
    /// The object has more bytes than accepted: at least this many.
    TooLarge(u64),
}

/// What limits a download.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits<'a> {
    pub(crate) timeouts: &'a Timeouts,
    pub(crate) retry: &'a RetryPolicy,
}

/// All of an object, of at most `max_len` bytes.
pub(crate) async fn whole(
    origin: &impl Origin,
    about: About<'_>,
    max_len: u64,
    limits: Limits<'_>,
) -> Result<Download> {
    let first = match opened(origin, about, None, None, limits).await? {
        Answer::Opened(opened) => opened,
        Answer::Absent => return Ok(Download::Absent),
        Answer::Beyond(size) => return Ok(Download::Short(size)),
        Answer::Changed => return Err(broken(about, "the object changed while it was read")),
    };
    let size = first.total.or(first.len);
    if let Some(size) = size.filter(|size| *size > max_len) {
        return Ok(Download::TooLarge(size));
    }
    fill(origin, about, first, 0, size, max_len, limits).await
}

/// The bytes of a range that is not empty.
pub(crate) async fn part(
    origin: &impl Origin,
    about: About<'_>,
    range: Range<u64>,
    limits: Limits<'_>,
) -> Result<Download> {
    let first = match opened(origin, about, Some(&range), None, limits).await? {
        Answer::Opened(opened) => opened,
        Answer::Absent => return Ok(Download::Absent),
        Answer::Beyond(size) => return Ok(Download::Short(size)),
        Answer::Changed => return Err(broken(about, "the object changed while it was read")),
    };
    if let Some(size) = first.total.filter(|total| *total < range.end) {
        return Ok(Download::Short(Some(size)));
    }
    let len = range.end - range.start;
    fill(origin, about, first, range.start, Some(len), len, limits).await
}

async fn opened(
    origin: &impl Origin,
    about: About<'_>,
    range: Option<&Range<u64>>,
    etag: Option<&str>,
    limits: Limits<'_>,
) -> Result<Answer> {
    let limit = limits.timeouts.response;
    tokio::time::timeout(limit, origin.open(about.key, range, etag))
        .await
        .map_err(|_| timed_out(about, limit))?
}

/// Gathers the object's bytes from `start`: `len` of them, or if that is not known all there are,
/// up to `max_len`.
async fn fill(
    origin: &impl Origin,
    about: About<'_>,
    mut from: Opened,
    start: u64,
    len: Option<u64>,
    max_len: u64,
    limits: Limits<'_>,
) -> Result<Download> {
    // `len` is what the caller accepts, whatever the server says.
    let wanted = len.unwrap_or(max_len).min(max_len);
    // No more at first than a server can be believed without a byte of proof.
    let likely = len.unwrap_or(0).min(wanted).min(BELIEVED);
    let mut bytes = buffers::take(usize::try_from(likely).unwrap_or(0));
    let etag = from.etag.clone();
    let mut broken_before = 0;
    loop {
        let have = bytes.len();
        let broke = match take(about, &mut from, start, wanted, len, &mut bytes, limits).await {
            Ok(Taken::All) => return Ok(Download::Bytes(bytes)),
            Ok(Taken::TooLarge) => return Ok(Download::TooLarge(max_len.saturating_add(1))),
            Ok(Taken::Broke(why)) => broken(about, why),
            Err(error) if error.is_transient() => error,
            Err(error) => return Err(error),
        };
        if bytes.len() >= have + PROGRESS {
            broken_before = 0;
        }
        // Without a length nobody knows where the end is: it must be read in one go.
        let Some(len) = len else { return Err(broke) };
        loop {
            broken_before += 1;
            if broken_before >= limits.retry.attempts {
                return Err(broke);
            }
            tracing::debug!(key = about.key, have = bytes.len(), "resuming: {broke}");
            tokio::time::sleep(limits.retry.wait(broken_before, None)).await;
            let rest = start + bytes.len() as u64..start + len;
            match opened(origin, about, Some(&rest), etag.as_deref(), limits).await {
                Ok(Answer::Opened(next)) if next.etag == etag => {
                    from = next;
                    break;
                }
                Ok(Answer::Opened(_) | Answer::Changed | Answer::Absent | Answer::Beyond(_)) => {
                    return Err(broken(about, "the object changed while it was read"));
                }
                Err(error) if error.is_transient() => {}
                Err(error) => return Err(error),
            }
        }
    }
}

enum Taken {
    All,
    TooLarge,
    Broke(String),
}

/// Appends one body to `bytes`, which holds the object from `start` on.
async fn take(
    about: About<'_>,
    from: &mut Opened,
    start: u64,
    wanted: u64,
    len: Option<u64>,
    bytes: &mut Vec<u8>,
    limits: Limits<'_>,
) -> Result<Taken> {
    let at = start + bytes.len() as u64;
    // A server that does not know ranges begins at the object's first byte.
    let mut skip = match at.checked_sub(from.start) {
        Some(skip) if skip <= MAX_SKIP => skip,
        _ => {
            let what = format!(
                "asked for bytes from {at}, the server sends from {}: it does not support ranges; serve the store with one that does",
                from.start
            );
            return Err(io_error(about, std::io::ErrorKind::Unsupported, what));
        }
    };
    // More than that is what nobody asked for; it is left in the connection, which is closed.
    let exact = from.start == at;
    loop {
        let missing = wanted - bytes.len() as u64;
        let idle = limits.timeouts.idle;
        if len.is_some() && missing == 0 {
            // A body that was read to its end leaves its connection for the next request. How it
            // ends no longer matters.
            if exact && from.len.is_some_and(|sent| at + sent == start + wanted) {
                let _ = tokio::time::timeout(idle, from.body.chunk()).await;
            }
            return Ok(Taken::All);
        }
        let chunk = tokio::time::timeout(idle, from.body.chunk())
            .await
            .map_err(|_| timed_out(about, idle))?;
        let piece = match chunk {
            Ok(Some(piece)) => piece,
            Ok(None) if len.is_none() => return Ok(Taken::All),
            Ok(None) => return Ok(Taken::Broke("the answer is too short".to_owned())),
            Err(why) => return Ok(Taken::Broke(why)),
        };
        let passed = usize::try_from(skip).map_or(piece.len(), |skip| skip.min(piece.len()));
        skip -= passed as u64;
        let piece = piece.get(passed..).unwrap_or_default();
        if piece.len() as u64 > missing {
            if len.is_none() {
                return Ok(Taken::TooLarge);
            }
            if exact && from.len.is_none_or(|sent| sent <= missing) {
                return Err(broken(about, "the answer is longer than it says"));
            }
        }
        let fits = usize::try_from(missing).map_or(piece.len(), |m| m.min(piece.len()));
        bytes.extend_from_slice(piece.get(..fits).unwrap_or_default());
    }
}

/// Reads the head of a successful answer (200 or 206).
pub(crate) fn head(
    about: About<'_>,
    status: StatusCode,
    headers: &HeaderMap,
    asked: Option<&Range<u64>>,
    body: Body,
) -> Result<Opened> {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    if let Some(encoding) = text(CONTENT_ENCODING).filter(|e| *e != "identity") {
        let what = format!(
            "the server sends {:?} instead of the object as it is",
            encoding.chars().take(40).collect::<String>()
        );
        return Err(io_error(about, std::io::ErrorKind::Unsupported, what));
    }
    let len = text(CONTENT_LENGTH).and_then(|text| text.parse::<u64>().ok());
    let etag = text(ETAG).map(str::to_owned);
    if status == StatusCode::PARTIAL_CONTENT {
        let (range, total) = text(CONTENT_RANGE)
            .and_then(content_range)
            .ok_or_else(|| broken(about, "a partial answer does not say which part it is"))?;
        if asked.is_none_or(|asked| range.start != asked.start || range.end > asked.end) {
            let what = format!(
                "asked for {asked:?}, the server sends bytes {}..{}",
                range.start, range.end
            );
            return Err(broken(about, what));
        }
        return Ok(Opened {
            start: range.start,
            len: Some(range.end - range.start),
            total,
            etag,
            body,
        });
    }
    Ok(Opened {
        start: 0,
        len,
        total: len,
        etag,
        body,
    })
}

/// `bytes FIRST-LAST/SIZE` as a range that excludes its end, and the size if it is given.
pub(crate) fn content_range(text: &str) -> Option<(Range<u64>, Option<u64>)> {
    let (range, size) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
    let end = last.checked_add(1)?;
    let total = match size {
        "*" => None,
        size => Some(size.parse::<u64>().ok()?),
    };
    (first < end && total.is_none_or(|total| end <= total)).then_some((first..end, total))
}

/// The size in `bytes */SIZE`, which comes with "range not satisfiable".
pub(crate) fn unsatisfied_size(headers: &HeaderMap) -> Option<u64> {
    let text = headers.get(CONTENT_RANGE)?.to_str().ok()?;
    text.strip_prefix("bytes */")?.parse().ok()
}

/// The header that asks for a range that is not empty.
pub(crate) fn range_header(range: &Range<u64>) -> String {
    format!("bytes={}-{}", range.start, range.end.saturating_sub(1))
}

/// Waits for `future`, but not longer than one operation may take.
pub(crate) async fn within<T>(
    about: About<'_>,
    limit: Duration,
    future: impl Future<Output = Result<T>>,
) -> Result<T> {
    tokio::time::timeout(limit, future)
        .await
        .unwrap_or_else(|_| Err(timed_out(about, limit)))
}

/// The answer of [`BlobStore::get`](crate::BlobStore::get).
pub(crate) fn as_object(
    about: About<'_>,
    download: Download,
    max_len: u64,
) -> Result<Option<Vec<u8>>> {
    match download {
        Download::Bytes(bytes) => Ok(Some(bytes)),
        Download::Absent => Ok(None),
        Download::TooLarge(size) => Err(StoreError::TooLarge {
            store: about.store.to_owned(),
            key: about.key.to_owned(),
            size,
            limit: max_len,
        }),
        Download::Short(_) => Err(broken(about, "the server cannot send all of the object")),
    }
}

/// The answer of [`BlobStore::get_range`](crate::BlobStore::get_range).
pub(crate) fn as_range(about: About<'_>, download: Download, range: Range<u64>) -> Result<Vec<u8>> {
    let what = match download {
        Download::Bytes(bytes) => return Ok(bytes),
        Download::Absent => {
            return Err(StoreError::Missing {
                store: about.store.to_owned(),
                key: about.key.to_owned(),
            });
        }
        Download::Short(Some(size)) => format!("it has only {size} bytes"),
        Download::Short(None) | Download::TooLarge(_) => "it has fewer bytes".to_owned(),
    };
    Err(StoreError::Corrupt {
        store: about.store.to_owned(),
        key: about.key.to_owned(),
        range: Some(range),
        what,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_ranges() {
        assert_eq!(content_range("bytes 0-9/10"), Some((0..10, Some(10))));
        assert_eq!(content_range("bytes 5-5/*"), Some((5..6, None)));
        for bad in [
            "",
            "bytes",
            "bytes 9-0/10",
            "bytes 0-10/10",
            "bytes */10",
            "items 0-9/10",
            "bytes 0-18446744073709551615/*",
            "bytes a-b/c",
        ] {
            assert_eq!(content_range(bad), None, "{bad}");
        }
    }
}
