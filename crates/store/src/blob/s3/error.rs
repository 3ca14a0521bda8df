//! What the SDK's errors mean.

use std::io;
use std::time::{Duration, SystemTime};

use aws_sdk_s3::config::http::HttpResponse;
use aws_sdk_s3::error::{ProvideErrorMetadata, SdkError};

use super::super::http::client::{
    About, broken, chain, io_error, parse_retry_after, refusal, timed_out,
};
use super::super::remote::Timeouts;
use crate::error::StoreError;

/// Status and code of an answer that is an error.
pub(crate) fn status_and_code<E: ProvideErrorMetadata>(
    error: &SdkError<E, HttpResponse>,
) -> (Option<u16>, Option<&str>) {
    let status = error
        .raw_response()
        .map(|response| response.status().as_u16());
    let code = match error {
        SdkError::ServiceError(service) => service.err().code(),
        _ => None,
    };
    (status, code)
}

/// Whether an answer says that there is no such object. A bucket that does not exist is another
/// matter, where the server says so: answers to HEAD have no code.
pub(crate) fn is_absent<E: ProvideErrorMetadata>(error: &SdkError<E, HttpResponse>) -> bool {
    let (status, code) = status_and_code(error);
    matches!(status, Some(404 | 410)) && code != Some("NoSuchBucket")
}

/// The store's error for one of the SDK.
pub(crate) fn failed<E>(
    about: About<'_>,
    error: &SdkError<E, HttpResponse>,
    timeouts: &Timeouts,
) -> StoreError
where
    E: ProvideErrorMetadata + std::error::Error + 'static,
{
    match error {
        SdkError::TimeoutError(_) => timed_out(about, timeouts.operation),
        SdkError::DispatchFailure(failure) if failure.is_timeout() => {
            timed_out(about, timeouts.connect)
        }
        SdkError::DispatchFailure(failure) => {
            let text = chain(error);
            if names_credentials(&text) {
                denied(about, text)
            } else if failure.is_user() || text.contains("certificate") {
                io_error(about, io::ErrorKind::InvalidData, text)
            } else {
                broken(about, text)
            }
        }
        SdkError::ResponseError(_) => broken(about, chain(error)),
        SdkError::ServiceError(service) => {
            let headers = service.raw().headers();
            let wait = headers
                .get("retry-after")
                .and_then(|text| parse_retry_after(text, SystemTime::now()));
            let status = service.raw().status().as_u16();
            let meta = service.err().meta();
            if (200..300).contains(&status) && meta.code().is_none() {
                let what = format!(
                    "the server answered {status} to {}, with a body that is not understood: {}",
                    operation_of::<E>(),
                    chain(error)
                );
                return io_error(about, io::ErrorKind::InvalidData, what);
            }
            by_code(about, status, meta.code(), meta.message(), wait)
        }
        _ => {
            let text = chain(error);
            if names_credentials(&text) {
                denied(about, text)
            } else {
                io_error(about, io::ErrorKind::Other, text)
            }
        }
    }
}

/// The operation whose errors a type of the SDK is for.
fn operation_of<E>() -> &'static str {
    let name = std::any::type_name::<E>();
    let name = name.rsplit("::").next().unwrap_or(name);
    name.strip_suffix("Error").unwrap_or(name)
}

fn names_credentials(text: &str) -> bool {
    text.contains("credential") || text.contains("identity")
}

fn denied(about: About<'_>, what: String) -> StoreError {
    StoreError::Denied {
        store: about.store.to_owned(),
        key: about.key.to_owned(),
        what,
    }
}

/// The error of a code in an answer's text. Codes say more than the status, which may even be 200.
pub(crate) fn by_code(
    about: About<'_>,
    status: u16,
    code: Option<&str>,
    message: Option<&str>,
    retry_after: Option<Duration>,
) -> StoreError {
    let said = match (code, message) {
        (Some(code), Some(message)) => format!("{code}: {message}"),
        (Some(code), None) => code.to_owned(),
        (None, message) => message.unwrap_or("").to_owned(),
    };
    match code.unwrap_or("") {
        "SlowDown"
        | "Throttling"
        | "ThrottlingException"
        | "RequestLimitExceeded"
        | "TooManyRequests"
        | "ServiceUnavailable" => refusal(about, 503, retry_after, &said),
        "RequestTimeout" | "InternalError" | "OperationAborted" | "ConditionalRequestConflict" => {
            broken(about, format!("the server answered {status}: {said}"))
        }
        "ExpiredToken"
        | "InvalidToken"
        | "InvalidAccessKeyId"
        | "SignatureDoesNotMatch"
        | "AccessDenied"
        | "RequestTimeTooSkewed"
        | "AllAccessDisabled"
        | "AccountProblem" => denied(about, said),
        "NoSuchBucket" => StoreError::InvalidUrl {
            url: about.store.to_owned(),
            why: "there is no such bucket; create it first, or correct the address".to_owned(),
        },
        "PermanentRedirect" | "TemporaryRedirect" | "AuthorizationHeaderMalformed" => io_error(
            about,
            io::ErrorKind::Other,
            format!("{said} (set the bucket's region with region=NAME in the address)"),
        ),
        "QuotaExceeded" | "XMinioStorageFull" | "XAmzQuotaExceeded" | "InsufficientStorage" => {
            refusal(about, 507, None, &said)
        }
        _ => refusal(about, status, retry_after, &said),
    }
}
