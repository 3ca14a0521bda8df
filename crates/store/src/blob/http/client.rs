//! The web client, and what its answers and failures mean.

use std::io;
use std::time::{Duration, SystemTime};

use reqwest::header::{HeaderMap, RETRY_AFTER};
use reqwest::{Client, StatusCode, Url, redirect};

use super::super::remote::Timeouts;
use crate::error::StoreError;

/// Redirects followed in a row.
const MAX_REDIRECTS: usize = 5;
/// How much of what a server says goes into an error, in characters.
const MAX_SAID: usize = 200;

/// Which redirects are followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Redirects {
    /// None: a signed request is signed for one address.
    None,
    /// A few, and never from https to http.
    Secure,
}

/// What an operation is about, for its errors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct About<'a> {
    pub(crate) store: &'a str,
    pub(crate) key: &'a str,
    pub(crate) operation: &'static str,
}

/// A client for `base`. Certificates are checked against the system's roots.
pub(crate) fn client(
    base: &Url,
    timeouts: &Timeouts,
    redirects: Redirects,
) -> Result<Client, reqwest::Error> {
    let policy = match redirects {
        Redirects::None => redirect::Policy::none(),
        Redirects::Secure => redirect::Policy::custom(|attempt| {
            let was_secure = attempt.previous().iter().any(|url| url.scheme() == "https");
            if attempt.previous().len() > MAX_REDIRECTS {
                attempt.error("too many redirects")
            } else if was_secure && attempt.url().scheme() != "https" {
                attempt.error("a redirect from https to an unencrypted address")
            } else {
                attempt.follow()
            }
        }),
    };
    let mut builder = Client::builder()
        .user_agent(concat!("layerpack/", env!("CARGO_PKG_VERSION")))
        .redirect(policy)
        .referer(false)
        .connect_timeout(timeouts.connect)
        .tcp_nodelay(true);
    if is_loopback(base) {
        builder = builder.no_proxy();
    }
    builder.build()
}

/// Whether an address means this machine, which no proxy can reach.
fn is_loopback(url: &Url) -> bool {
    url.host_str().is_some_and(|host| {
        let host = host.trim_start_matches('[').trim_end_matches(']');
        host == "localhost"
            || host
                .parse::<std::net::IpAddr>()
                .is_ok_and(|ip| ip.is_loopback())
    })
}

/// An error that passes: the connection or the answer broke.
pub(crate) fn broken(about: About<'_>, what: impl Into<String>) -> StoreError {
    io_error(about, io::ErrorKind::ConnectionAborted, what)
}

/// An error of a kind.
pub(crate) fn io_error(
    about: About<'_>,
    kind: io::ErrorKind,
    what: impl Into<String>,
) -> StoreError {
    StoreError::Io {
        operation: about.operation,
        store: about.store.to_owned(),
        key: about.key.to_owned(),
        source: io::Error::new(kind, what.into()),
    }
}

/// A time limit passed.
pub(crate) fn timed_out(about: About<'_>, limit: Duration) -> StoreError {
    StoreError::TimedOut {
        store: about.store.to_owned(),
        key: about.key.to_owned(),
        limit_ms: u64::try_from(limit.as_millis()).unwrap_or(u64::MAX),
    }
}

/// A failure to get an answer at all.
pub(crate) fn failed(about: About<'_>, error: &reqwest::Error, timeouts: &Timeouts) -> StoreError {
    if error.is_timeout() {
        let limit = if error.is_connect() {
            timeouts.connect
        } else {
            timeouts.response
        };
        return timed_out(about, limit);
    }
    let text = chain(error);
    if error.is_redirect() {
        io_error(about, io::ErrorKind::Other, text)
    } else if error.is_connect() {
        // A certificate that is not trusted today is not trusted in a second either.
        let kind = if text.contains("certificate") {
            io::ErrorKind::InvalidData
        } else {
            io::ErrorKind::ConnectionRefused
        };
        io_error(about, kind, text)
    } else if error.is_builder() {
        io_error(about, io::ErrorKind::InvalidInput, text)
    } else {
        broken(about, text)
    }
}

/// An error's causes in one line. Not the error itself: reqwest's names the address, which may hold
/// a signature.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut parts: Vec<String> = Vec::new();
    let mut cause = error.source();
    while let Some(error) = cause {
        // Some have pictures or lists of several lines.
        let text = error.to_string();
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        if parts.last() != Some(&text) {
            parts.push(text);
        }
        cause = error.source();
    }
    if parts.is_empty() {
        parts.push("the request failed".to_owned());
    }
    parts.join(": ")
}

/// What an answer other than a success and "no such object" means. `said` is what the server
/// wrote, for people.
pub(crate) fn refusal(
    about: About<'_>,
    status: u16,
    retry_after: Option<Duration>,
    said: &str,
) -> StoreError {
    let said: String = said
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(MAX_SAID)
        .collect();
    let text = match said.trim() {
        "" => format!("the server answered {status}"),
        said => format!("the server answered {status}: {said}"),
    };
    match status {
        401 | 403 => StoreError::Denied {
            store: about.store.to_owned(),
            key: about.key.to_owned(),
            what: text,
        },
        429 | 503 => StoreError::Throttled {
            store: about.store.to_owned(),
            key: about.key.to_owned(),
            retry_after_ms: retry_after
                .map(|wait| u64::try_from(wait.as_millis()).unwrap_or(u64::MAX)),
        },
        408 | 425 | 500 | 502 | 504 => broken(about, text),
        507 => StoreError::NoSpace {
            store: about.store.to_owned(),
            key: about.key.to_owned(),
            source: io::Error::new(io::ErrorKind::StorageFull, text),
        },
        _ => io_error(about, io::ErrorKind::Other, text),
    }
}

/// Whether an answer means that there is no such object.
pub(crate) fn is_absent(status: StatusCode) -> bool {
    matches!(status, StatusCode::NOT_FOUND | StatusCode::GONE)
}

/// How long the server asks to wait: seconds, or a date (RFC 9110, 10.2.3).
pub(crate) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?;
    parse_retry_after(text, SystemTime::now())
}

/// The value of `Retry-After` at the time `now`. A date in the past is no wait.
pub(crate) fn parse_retry_after(text: &str, now: SystemTime) -> Option<Duration> {
    let text = text.trim();
    if let Ok(seconds) = text.parse::<u64>() {
        return Some(Duration::from_secs(seconds));
    }
    let date = http_date(text)?;
    let now = now.duration_since(SystemTime::UNIX_EPOCH).ok()?.as_secs();
    Some(Duration::from_secs(date.saturating_sub(now)))
}

/// Seconds since 1970 of a date such as `Sun, 06 Nov 1994 08:49:37 GMT`.
fn http_date(text: &str) -> Option<u64> {
    const MONTHS: [&str; 12] = [
        "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
    ];
    let mut fields = text.split_once(", ")?.1.split(' ');
    let day: u64 = fields.next()?.parse().ok()?;
    let month = fields.next()?;
    let month = u64::try_from(MONTHS.iter().position(|m| *m == month)?).ok()? + 1;
    let year: u64 = fields.next()?.parse().ok()?;
    let mut clock = fields.next()?.split(':');
    let mut unit = |limit: u64| -> Option<u64> {
        let value = clock.next()?.parse().ok()?;
        (value <= limit).then_some(value)
    };
    let (hour, minute, second) = (unit(23)?, unit(59)?, unit(60)?);
    if fields.next()? != "GMT" || !(1970..=9999).contains(&year) || !(1..=31).contains(&day) {
        return None;
    }
    // Days since 1970, of a calendar whose years begin in March.
    let (y, m) = if month > 2 {
        (year, month - 3)
    } else {
        (year - 1, month + 9)
    };
    let days = 365 * y + y / 4 - y / 100 + y / 400 + (153 * m + 2) / 5 + day - 1;
    let days = days.checked_sub(719_468)?;
    Some(days * 86_400 + hour * 3600 + minute * 60 + second)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{0}")]
    struct Said(&'static str, #[source] Option<Box<Said>>);

    #[test]
    fn causes_are_one_line() {
        let cause = Said("no provider:\n  - env: unset\n  - file: absent\n", None);
        let error = Said("the request failed", Some(Box::new(cause)));
        assert_eq!(chain(&error), "no provider: - env: unset - file: absent");
        assert_eq!(chain(&Said("alone", None)), "the request failed");
    }

    #[test]
    fn retry_after_takes_seconds_and_dates() {
        let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let parse = |text| parse_retry_after(text, at(784_111_770));
        assert_eq!(parse("7"), Some(Duration::from_secs(7)));
        assert_eq!(parse(" 0 "), Some(Duration::ZERO));
        assert_eq!(
            parse("Sun, 06 Nov 1994 08:49:37 GMT"),
            Some(Duration::from_secs(7))
        );
        assert_eq!(parse("Sun, 06 Nov 1994 08:49:00 GMT"), Some(Duration::ZERO));
        for bad in [
            "",
            "-1",
            "soon",
            "Sun, 06 Nov 1994 08:49:37",
            "Sun, 06 Foo 1994 08:49:37 GMT",
            "Sun, 00 Nov 1994 08:49:37 GMT",
            "Sun, 06 Nov 1994 28:49:37 GMT",
            "Sun, 06 Nov 99999999999 08:49:37 GMT",
            "Thu, 01 Jan 1960 00:00:00 GMT",
        ] {
            assert_eq!(parse(bad), None, "{bad}");
        }
        assert_eq!(http_date("Thu, 01 Jan 1970 00:00:00 GMT"), Some(0));
        assert_eq!(
            http_date("Tue, 29 Feb 2000 00:00:00 GMT"),
            Some(951_782_400)
        );
        assert_eq!(
            http_date("Fri, 31 Dec 9999 23:59:59 GMT"),
            Some(253_402_300_799)
        );
    }

    #[test]
    fn what_is_tried_again() {
        let about = About {
            store: "s",
            key: "k",
            operation: "read",
        };
        for (status, transient) in [
            (400, false),
            (401, false),
            (403, false),
            (405, false),
            (408, true),
            (429, true),
            (500, true),
            (501, false),
            (502, true),
            (503, true),
            (504, true),
            (507, false),
            (301, false),
        ] {
            let error = refusal(about, status, None, "says\nthis");
            assert_eq!(error.is_transient(), transient, "{status}");
            assert!(!error.to_string().contains('\n'));
        }
    }
}
