//! Writing blobs.
//!
//! A blob's bytes are at hand as a whole (in memory or in a file) with their digest before anything
//! is sent, so that whatever breaks can be sent again:
//!
//! 1. A blob that is there is not sent. One that another repository of the registry has is mounted.
//! 2. A small blob goes in one request.
//! 3. A large one goes in chunks, since registries limit request bodies. When a chunk fails, the
//!    registry is asked how far it got, and it goes on from there.
//! 4. A registry that does not take chunks gets the whole blob in one request.
//! 5. When an upload is lost, it begins anew.

use std::io;
use std::sync::Arc;

use bytes::Bytes;
use fs_err::File;
use fs_err::os::unix::fs::FileExt as _;
use reqwest::header::{CONTENT_RANGE, CONTENT_TYPE};
use reqwest::{Method, Url};

use super::auth::Intent;
use super::manifests::stated_digest;
use super::transport::{Answer, Body, Call, is_unsupported};
use super::{Registry, RegistryName, Sha256};
use crate::error::{Result, StoreError};

const BYTES: &str = "application/octet-stream";

/// The bytes of a blob to be written.
#[derive(Debug, Clone)]
pub enum Upload {
    /// In memory.
    Bytes(Bytes),
    /// All of a file of this size, which does not change.
    File(Arc<File>, u64),
}

impl Upload {
    /// Size in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::File(_, size) => *size,
        }
    }

    fn body(&self) -> Body {
        match self {
            Self::Bytes(bytes) => Body::Bytes(bytes.clone()),
            Self::File(file, size) => Body::File(Arc::clone(file), *size),
        }
    }

    fn part(&self, at: u64, len: u64) -> io::Result<Bytes> {
        let short = || io::Error::from(io::ErrorKind::UnexpectedEof);
        let size = usize::try_from(len).map_err(|_| short())?;
        match self {
            Self::Bytes(bytes) => {
                let from = usize::try_from(at).map_err(|_| short())?;
                let to = from.checked_add(size).filter(|to| *to <= bytes.len());
                Ok(bytes.slice(from..to.ok_or_else(short)?))
            }
            Self::File(file, _) => {
                let mut part = vec![0; size];
                file.read_exact_at(&mut part, at)?;
                Ok(part.into())
            }
        }
    }
}

/// What it took to have a blob in the registry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pushed {
    /// It was there.
    Existed,
    /// It was in another repository of the registry.
    Mounted,
    /// Its bytes were sent.
    Sent,
}

/// An upload that the registry has begun.
struct Session {
    /// Where to go on.
    url: Url,
    /// Bytes that the registry has.
    at: u64,
    /// Smallest chunk that it takes, in bytes.
    least: u64,
}

/// Why chunks did not lead to a blob.
enum Stuck {
    /// Another upload may do it.
    Lost(StoreError),
    /// The registry takes no chunks.
    Refused,
}

impl Registry {
    /// Writes a blob, whose digest is that of its bytes.
    ///
    /// With `mount_from`, repositories of the same registry that may have it are asked first.
    ///
    /// # Errors
    /// What went wrong. A blob is there whole or not at all.
    pub fn push_blob(
        &self,
        digest: &Sha256,
        upload: &Upload,
        mount_from: &[RegistryName],
    ) -> Result<Pushed> {
        if self.blob_size(digest)? == Some(upload.size()) {
            return Ok(Pushed::Existed);
        }
        for other in mount_from {
            let elsewhere = other.host() != self.name().host()
                || other.repository() == self.name().repository();
            if !elsewhere && self.mount(digest, other)? {
                return Ok(Pushed::Mounted);
            }
        }
        self.send_blob(digest, upload)?;
        Ok(Pushed::Sent)
    }

    /// The same without asking whether it is there.
    pub(crate) fn send_blob(&self, digest: &Sha256, upload: &Upload) -> Result<()> {
        let transport = &self.transport;
        let what = format!("blob {digest}");
        let size = upload.size();
        let mut chunked = size > transport.options.chunk_bytes;
        let mut tries = transport.tries();
        loop {
            let result = if chunked {
                match self.send_chunks(digest, upload, &what) {
                    Ok(()) => Ok(()),
                    Err(Stuck::Lost(error)) => Err(error),
                    Err(Stuck::Refused) => {
                        tracing::debug!(object = %what, "the registry takes no chunks");
                        chunked = false;
                        continue;
                    }
                }
            } else {
                self.send_whole(digest, upload, &what)
            };
            let Err(error) = result else { return Ok(()) };
            // The answer alone may have been lost.
            if error.is_transient() && self.blob_size(digest).ok().flatten() == Some(size) {
                return Ok(());
            }
            tries.again(&what, error)?;
        }
    }

    /// Whether the registry took the blob over from another repository.
    fn mount(&self, digest: &Sha256, other: &RegistryName) -> Result<bool> {
        let transport = &self.transport;
        let what = format!("blob {digest}");
        let mut url = transport.url("blobs/uploads/")?;
        url.query_pairs_mut()
            .append_pair("mount", &digest.to_string())
            .append_pair("from", other.repository());
        let call = Call {
            method: Method::POST,
            url,
            headers: Vec::new(),
            body: Body::Empty,
            intent: Intent::Mount(other.repository().to_owned()),
            accept: &[201, 202],
            operation: "write",
            what: &what,
        };
        match transport.send(&call) {
            Ok(answer) if answer.status() == 201 => Ok(true),
            Ok(answer) => {
                // It began an upload instead, which nobody needs.
                if let Ok(url) = self.location(&answer) {
                    self.cancel(url, &what);
                }
                Ok(false)
            }
            // No right to read there: then it is sent.
            Err(StoreError::Denied { .. }) => Ok(false),
            Err(error) if is_unsupported(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn begin(&self, what: &str) -> Result<Session> {
        let answer = self.transport.attempt_accepting(&Call {
            method: Method::POST,
            url: self.transport.url("blobs/uploads/")?,
            headers: Vec::new(),
            body: Body::Empty,
            intent: Intent::Push,
            accept: &[202],
            operation: "write",
            what,
        })?;
        Ok(Session {
            url: self.location(&answer)?,
            at: 0,
            least: answer
                .header("oci-chunk-min-length")
                .and_then(|least| least.parse().ok())
                .unwrap_or(0),
        })
    }

    fn location(&self, answer: &Answer) -> Result<Url> {
        let location = answer.header("location").ok_or_else(|| {
            self.transport.corrupt(
                "upload",
                "the registry does not say where to send the blob to",
            )
        })?;
        self.transport.resolve(&answer.url, location)
    }

    /// Ends an upload; that it does not matter is why.
    fn cancel(&self, url: Url, what: &str) {
        let _ = self.transport.attempt(&Call {
            method: Method::DELETE,
            url,
            headers: Vec::new(),
            body: Body::Empty,
            intent: Intent::Push,
            accept: &[],
            operation: "write",
            what,
        });
    }

    fn finish(&self, mut url: Url, digest: &Sha256, body: Body, what: &str) -> Result<()> {
        url.query_pairs_mut()
            .append_pair("digest", &digest.to_string());
        let answer = self.transport.attempt_accepting(&Call {
            method: Method::PUT,
            url,
            headers: vec![(CONTENT_TYPE, BYTES.to_owned())],
            body,
            intent: Intent::Push,
            accept: &[201, 204],
            operation: "write",
            what,
        })?;
        match stated_digest(&answer).filter(|stated| stated != digest) {
            Some(stated) => Err(self
                .transport
                .corrupt(what, format!("the registry took it for {stated}"))),
            None => Ok(()),
        }
    }

    fn send_whole(&self, digest: &Sha256, upload: &Upload, what: &str) -> Result<()> {
        let session = self.begin(what)?;
        self.finish(session.url, digest, upload.body(), what)
    }

    fn send_chunks(&self, digest: &Sha256, upload: &Upload, what: &str) -> Result<(), Stuck> {
        let transport = &self.transport;
        let size = upload.size();
        let mut session = self.begin(what).map_err(Stuck::Lost)?;
        let chunk = transport.options.chunk_bytes.max(session.least);
        let mut tries = transport.tries();
        while session.at < size {
            let before = session.at;
            let len = chunk.min(size - session.at);
            let error = match self.patch(&mut session, upload, len, what) {
                Ok(()) => {
                    tries.progress();
                    continue;
                }
                Err(error) => error,
            };
            if before == 0 && is_unsupported(&error) {
                self.cancel(session.url, what);
                return Err(Stuck::Refused);
            }
            // How far did it get? A session that is gone is lost with what it had.
            tries.again(what, error).map_err(Stuck::Lost)?;
            self.ask(&mut session, size, what).map_err(Stuck::Lost)?;
        }
        self.finish(session.url, digest, Body::Empty, what)
            .map_err(Stuck::Lost)
    }

    /// Sends the next `len` bytes.
    fn patch(&self, session: &mut Session, upload: &Upload, len: u64, what: &str) -> Result<()> {
        let transport = &self.transport;
        let part = upload
            .part(session.at, len)
            .map_err(|e| transport.io("write", what, e))?;
        let answer = transport.attempt_accepting(&Call {
            method: Method::PATCH,
            url: session.url.clone(),
            headers: vec![
                (CONTENT_TYPE, BYTES.to_owned()),
                (
                    CONTENT_RANGE,
                    format!("{}-{}", session.at, session.at + len - 1),
                ),
            ],
            body: Body::Bytes(part),
            intent: Intent::Push,
            accept: &[202, 204],
            operation: "write",
            what,
        })?;
        let end = session.at + len;
        session.url = self.location(&answer)?;
        session.at = match answer.header("range").and_then(received) {
            Some(at) if at > end => {
                let what_is = format!("the registry has {at} bytes of {end} that were sent");
                return Err(transport.corrupt(what, what_is));
            }
            Some(at) => at,
            None => end,
        };
        Ok(())
    }

    /// Asks how much of an upload the registry has.
    fn ask(&self, session: &mut Session, size: u64, what: &str) -> Result<()> {
        let transport = &self.transport;
        let answer = transport.send(&Call {
            method: Method::GET,
            url: session.url.clone(),
            headers: Vec::new(),
            body: Body::Empty,
            intent: Intent::Push,
            accept: &[204, 404],
            operation: "write",
            what,
        })?;
        let lost = |why: &str| {
            let kind = io::ErrorKind::ConnectionReset;
            transport.io("write", what, io::Error::new(kind, why.to_owned()))
        };
        if answer.status() == 404 {
            return Err(lost("the registry dropped the upload"));
        }
        if answer.header("location").is_some() {
            session.url = self.location(&answer)?;
        }
        session.at = answer.header("range").and_then(received).unwrap_or(0);
        if session.at > size {
            return Err(lost("the registry has more of the upload than there is"));
        }
        Ok(())
    }
}

/// How many bytes a registry's `Range` header says that it has. `0-0` means none: registries say
/// it of an empty upload, and no chunk is one byte.
fn received(range: &str) -> Option<u64> {
    let range = range.strip_prefix("bytes=").unwrap_or(range);
    match range.split_once('-')? {
        ("0", "0") => Some(0),
        ("0", last) => last.parse::<u64>().ok()?.checked_add(1),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn received_bytes_are_read() {
        for (range, bytes) in [
            ("0-0", Some(0)),
            ("0-9", Some(10)),
            ("bytes=0-9", Some(10)),
            ("1-9", None),
            ("0-", None),
            ("0-18446744073709551615", None),
            ("", None),
        ] {
            assert_eq!(received(range), bytes, "{range}");
        }
    }

    #[test]
    fn parts_are_within_the_blob() {
        let upload = Upload::Bytes(Bytes::from_static(b"0123456789"));
        assert_eq!(&*upload.part(2, 3).unwrap(), b"234");
        assert!(upload.part(8, 3).is_err());
        assert!(upload.part(u64::MAX, 1).is_err());
    }
}
