//! Reading blobs: whole and small, as a stream that goes on where it broke, to a file that an
//! earlier run began, and in ranges.

use std::io::{self, Read, Seek as _, SeekFrom, Write as _};
use std::ops::Range;

use bytes::{Buf as _, Bytes};
use fs_err::File;
use reqwest::Method;
use reqwest::header::{ACCEPT_ENCODING, RANGE};

use super::auth::Intent;
use super::transport::{Answer, Body, Call, Tries};
use super::{Registry, Sha256, Sha256Hasher};
use crate::buffers;
use crate::error::{Result, StoreError};

/// Most memory set aside before bytes come, in bytes: sizes are others' word.
const BELIEVED: u64 = 64 << 20;

impl Registry {
    /// The size of a blob in bytes; `None` if there is none.
    ///
    /// # Errors
    /// What went wrong in asking.
    pub fn blob_size(&self, digest: &Sha256) -> Result<Option<u64>> {
        let transport = &self.transport;
        let what = format!("blob {digest}");
        let answer = transport.send(&Call {
            method: Method::HEAD,
            url: transport.url(&format!("blobs/{digest}"))?,
            headers: Vec::new(),
            body: Body::Empty,
            intent: Intent::Pull,
            accept: &[200, 404],
            operation: "read",
            what: &what,
        })?;
        if answer.status() == 404 {
            return Ok(None);
        }
        let size = answer.content_length();
        size.map(Some)
            .ok_or_else(|| transport.corrupt(&what, "the registry does not say its size"))
    }

    /// A whole blob, checked; `None` if there is none. `size` is what is known of its size.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] if it has another size or digest.
    pub fn blob(&self, digest: &Sha256, size: u64) -> Result<Option<Vec<u8>>> {
        let transport = &self.transport;
        let what = format!("blob {digest}");
        let mut last = None;
        // Bytes may be damaged on their way: look twice.
        for _ in 0..2 {
            let read = transport.persist(&what, || {
                let Some(mut part) = self.open_blob(digest, 0..size, size)? else {
                    return Ok(None);
                };
                let mut bytes = Vec::new();
                while let Some(piece) = part.next().map_err(|e| transport.io("read", &what, e))? {
                    if (bytes.len() + piece.len()) as u64 > size {
                        return Err(
                            transport.corrupt(&what, format!("it has more than {size} bytes"))
                        );
                    }
                    bytes.extend_from_slice(&piece);
                }
                if (bytes.len() as u64) < size {
                    let cut = io::Error::new(
                        io::ErrorKind::UnexpectedEof,
                        format!("it ended after {} of {size} bytes", bytes.len()),
                    );
                    return Err(transport.io("read", &what, cut));
                }
                Ok(Some(bytes))
            })?;
            let Some(bytes) = read else { return Ok(None) };
            let seen = Sha256::of(&bytes);
            if &seen == digest {
                return Ok(Some(bytes));
            }
            last = Some(seen);
        }
        let seen = last.map(|d| d.to_string()).unwrap_or_default();
        Err(transport.corrupt(&what, format!("its bytes have the digest {seen}")))
    }

    /// Bytes of a blob of `size` bytes. **Not checked**: a digest is of a whole blob.
    ///
    /// # Errors
    /// [`StoreError::Missing`] without the blob, [`StoreError::Corrupt`] if `range` is not in it.
    pub fn blob_range(&self, digest: &Sha256, size: u64, range: Range<u64>) -> Result<Vec<u8>> {
        let transport = &self.transport;
        let what = format!("blob {digest}");
        if range.start > range.end || range.end > size {
            return Err(StoreError::Corrupt {
                store: transport.address().to_owned(),
                key: what,
                range: Some(range),
                what: format!("it has {size} bytes"),
            });
        }
        let wanted = range.end - range.start;
        let mut bytes = buffers::take(usize::try_from(wanted.min(BELIEVED)).unwrap_or_default());
        let mut tries = transport.tries();
        while (bytes.len() as u64) < wanted {
            let from = range.start + bytes.len() as u64;
            let missing = || StoreError::Missing {
                store: transport.address().to_owned(),
                key: what.clone(),
            };
            let before = bytes.len();
            let result = self
                .open_blob(digest, from..range.end, size)
                .and_then(|part| part.ok_or_else(missing))
                .and_then(|mut part| {
                    while let Some(piece) =
                        part.next().map_err(|e| transport.io("read", &what, e))?
                    {
                        let room = usize::try_from(wanted).unwrap_or(usize::MAX) - bytes.len();
                        bytes.extend_from_slice(
                            piece.get(..room.min(piece.len())).unwrap_or_default(),
                        );
                        if bytes.len() as u64 == wanted {
                            return Ok(());
                        }
                    }
                    let cut =
                        io::Error::new(io::ErrorKind::UnexpectedEof, "the answer was cut short");
                    Err(transport.io("read", &what, cut))
                });
            if let Err(error) = result {
                if bytes.len() > before {
                    tries.progress();
                }
                tries.again(&what, error)?;
            }
        }
        Ok(bytes)
    }

    /// A blob's bytes as they come. A connection that breaks is made again and goes on where it
    /// was. At its end the digest is checked: the last `read` fails if it is wrong.
    #[must_use]
    pub fn blob_reader(&self, digest: Sha256, size: u64) -> BlobReader {
        BlobReader {
            registry: self.clone(),
            digest,
            size,
            at: 0,
            part: None,
            piece: Bytes::new(),
            hasher: Some(Sha256Hasher::new()),
            tries: self.transport.tries(),
        }
    }

    /// Fetches a blob into `file`, from where an earlier attempt got: what the file holds is taken
    /// for the blob's beginning and is checked with the rest. On return the file is the blob.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] if the blob or what the file held is not it; the file is then
    /// empty. After other errors the file holds what has come and the call may be repeated.
    pub fn download(&self, digest: Sha256, size: u64, file: &mut File) -> Result<()> {
        let what = format!("blob {digest}");
        let io = |e| self.transport.io("write", &what, e);
        let mut reader = self.blob_reader(digest, size);
        file.seek(SeekFrom::Start(0)).map_err(io)?;
        let mut buffer = vec![0; 1 << 20];
        let mut had = 0;
        while had < size {
            let room = usize::try_from(size - had)
                .unwrap_or(usize::MAX)
                .min(buffer.len());
            let n = file
                .read(buffer.get_mut(..room).unwrap_or_default())
                .map_err(io)?;
            if n == 0 {
                break;
            }
            reader.had(buffer.get(..n).unwrap_or_default());
            had += n as u64;
        }
        let mut result = Ok(());
        loop {
            match reader.read(&mut buffer) {
                Ok(0) => break,
                Ok(n) => file
                    .write_all(buffer.get(..n).unwrap_or_default())
                    .map_err(io)?,
                Err(e) => {
                    result = Err(match e.downcast::<StoreError>() {
                        Ok(error) => error,
                        Err(e) => self.transport.io("read", &what, e),
                    });
                    break;
                }
            }
        }
        if matches!(result, Err(StoreError::Corrupt { .. })) {
            file.set_len(0).map_err(io)?;
        } else if result.is_ok() {
            file.set_len(size).map_err(io)?;
        }
        result
    }

    /// Begins to read a range of a blob of `size` bytes; `None` if there is no such blob. Where
    /// the registry ignores ranges, what comes before is read and dropped.
    fn open_blob(&self, digest: &Sha256, range: Range<u64>, size: u64) -> Result<Option<Part>> {
        let transport = &self.transport;
        let what = format!("blob {digest}");
        if range.is_empty() {
            return Ok(Some(Part {
                answer: None,
                skip: 0,
            }));
        }
        let whole = range == (0..size);
        let mut headers = vec![(ACCEPT_ENCODING, "identity".to_owned())];
        if !whole {
            headers.push((RANGE, format!("bytes={}-{}", range.start, range.end - 1)));
        }
        let answer = transport.attempt_accepting(&Call {
            method: Method::GET,
            url: transport.url(&format!("blobs/{digest}"))?,
            headers,
            body: Body::Empty,
            intent: Intent::Pull,
            accept: &[200, 206, 404, 416],
            operation: "read",
            what: &what,
        })?;
        let corrupt = |what_is: String| StoreError::Corrupt {
            store: transport.address().to_owned(),
            key: what.clone(),
            range: Some(range.clone()),
            what: what_is,
        };
        match answer.status() {
            404 => Ok(None),
            416 => Err(corrupt(format!(
                "the registry does not have this range of its {size} bytes"
            ))),
            206 => {
                let stated = answer.header("content-range").unwrap_or_default();
                if content_range(stated) != Some(range.clone()) {
                    return Err(corrupt(format!(
                        "the registry answered with another range: {}",
                        super::transport::show(stated)
                    )));
                }
                Ok(Some(Part {
                    answer: Some(answer),
                    skip: 0,
                }))
            }
            _ => {
                if let Some(other) = answer.content_length().filter(|len| *len != size) {
                    return Err(corrupt(format!("it has {other} bytes, not {size}")));
                }
                Ok(Some(Part {
                    skip: range.start,
                    answer: Some(answer),
                }))
            }
        }
    }
}

/// The range that a `Content-Range` header states (RFC 9110 section 14.4).
fn content_range(value: &str) -> Option<Range<u64>> {
    let (range, _) = value.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    Some(first.parse().ok()?..last.parse::<u64>().ok()?.checked_add(1)?)
}

/// A blob being read from somewhere on.
#[derive(Debug)]
struct Part {
    answer: Option<Answer>,
    /// Bytes that come before those asked for.
    skip: u64,
}

impl Part {
    fn next(&mut self) -> io::Result<Option<Bytes>> {
        let Some(answer) = &mut self.answer else {
            return Ok(None);
        };
        while let Some(mut piece) = answer.next()? {
            let skipped = usize::try_from(self.skip)
                .unwrap_or(usize::MAX)
                .min(piece.len());
            piece.advance(skipped);
            self.skip -= skipped as u64;
            if !piece.is_empty() {
                return Ok(Some(piece));
            }
        }
        Ok(None)
    }
}

/// A blob as a stream; see [`Registry::blob_reader`]. Errors hold a [`StoreError`].
#[derive(Debug)]
pub struct BlobReader {
    registry: Registry,
    digest: Sha256,
    size: u64,
    at: u64,
    part: Option<Part>,
    piece: Bytes,
    /// `None` once the digest was checked.
    hasher: Option<Sha256Hasher>,
    tries: Tries,
}

impl BlobReader {
    /// Takes bytes that follow as known: they are not fetched, and are checked with the rest.
    /// To be called before the first read.
    pub fn had(&mut self, bytes: &[u8]) {
        if let Some(hasher) = &mut self.hasher {
            hasher.update(bytes);
        }
        self.at += bytes.len() as u64;
    }

    /// The next piece, with connections made anew as needed.
    fn fetch(&mut self) -> Result<Bytes> {
        let what = format!("blob {}", self.digest);
        loop {
            match self.fetch_once(&what) {
                Ok(piece) => {
                    self.tries.progress();
                    return Ok(piece);
                }
                Err(error) => {
                    self.part = None;
                    self.tries.again(&what, error)?;
                }
            }
        }
    }

    fn fetch_once(&mut self, what: &str) -> Result<Bytes> {
        let transport = &self.registry.transport;
        let part = match &mut self.part {
            Some(part) => part,
            none => {
                let opened = self
                    .registry
                    .open_blob(&self.digest, self.at..self.size, self.size)?
                    .ok_or_else(|| StoreError::Missing {
                        store: transport.address().to_owned(),
                        key: what.to_owned(),
                    })?;
                none.insert(opened)
            }
        };
        let piece = part.next().map_err(|e| transport.io("read", what, e))?;
        let Some(piece) = piece else {
            let cut = format!("it ended after {} of {} bytes", self.at, self.size);
            let cut = io::Error::new(io::ErrorKind::UnexpectedEof, cut);
            return Err(transport.io("read", what, cut));
        };
        if piece.len() as u64 > self.size - self.at {
            return Err(transport.corrupt(what, format!("it has more than {} bytes", self.size)));
        }
        Ok(piece)
    }

    fn check(&mut self) -> Result<()> {
        let transport = &self.registry.transport;
        let what = format!("blob {}", self.digest);
        let Some(hasher) = &self.hasher else {
            return Ok(());
        };
        let seen = hasher.clone().finish();
        if seen != self.digest || self.at != self.size {
            let what_is = format!("its {} bytes have the digest {seen}", self.at);
            return Err(transport.corrupt(&what, what_is));
        }
        self.hasher = None;
        Ok(())
    }
}

impl Read for BlobReader {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if out.is_empty() {
            return Ok(0);
        }
        if self.piece.is_empty() {
            if self.at >= self.size {
                self.check().map_err(to_io)?;
                return Ok(0);
            }
            let piece = self.fetch().map_err(to_io)?;
            if let Some(hasher) = &mut self.hasher {
                hasher.update(&piece);
            }
            self.at += piece.len() as u64;
            self.piece = piece;
        }
        let n = self.piece.len().min(out.len());
        if let (Some(to), Some(from)) = (out.get_mut(..n), self.piece.get(..n)) {
            to.copy_from_slice(from);
        }
        self.piece.advance(n);
        Ok(n)
    }
}

/// Keeps the error within, and the kind of what caused it.
fn to_io(error: StoreError) -> io::Error {
    let kind = match &error {
        StoreError::Io { source, .. } => source.kind(),
        StoreError::Corrupt { .. } => io::ErrorKind::InvalidData,
        StoreError::Missing { .. } => io::ErrorKind::NotFound,
        StoreError::Denied { .. } => io::ErrorKind::PermissionDenied,
        StoreError::TimedOut { .. } | StoreError::Throttled { .. } => io::ErrorKind::TimedOut,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stated_ranges_are_read() {
        assert_eq!(content_range("bytes 0-9/10"), Some(0..10));
        assert_eq!(content_range("bytes 5-5/*"), Some(5..6));
        for bad in [
            "",
            "bytes",
            "bytes */10",
            "bytes 1-/2",
            "bytes 1-18446744073709551615/2",
            "items 0-1/2",
        ] {
            assert_eq!(content_range(bad), None, "{bad}");
        }
    }
}
