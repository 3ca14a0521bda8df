//! What goes into a decoder and what comes out of it.

use std::io::{self, Read};
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::PackError;

/// Last bytes of the input that are kept, for a look at its end.
const TAIL: usize = 64;
/// Uncompressed bytes that may come from any number of stored ones: small archives of zeros are
/// nobody's burden.
const FREE: u64 = 1 << 30;

#[derive(Debug, Default)]
struct State {
    bytes: u64,
    tail: Vec<u8>,
}

/// What a [`Watched`] reader has given so far.
#[derive(Debug, Clone, Default)]
pub(super) struct Watch(Arc<Mutex<State>>);

impl Watch {
    fn take(&self, read: &[u8]) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.bytes += read.len() as u64;
        let last = read.len().saturating_sub(TAIL);
        state
            .tail
            .extend_from_slice(read.get(last..).unwrap_or_default());
        let excess = state.tail.len().saturating_sub(TAIL);
        state.tail.drain(..excess);
    }

    fn bytes(&self) -> u64 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).bytes
    }

    /// The last bytes.
    pub(super) fn tail(&self) -> Vec<u8> {
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.tail.clone()
    }
}

/// Stored bytes on their way into a decoder.
pub(super) struct Watched<R> {
    inner: R,
    watch: Watch,
}

impl<R> Watched<R> {
    /// Watches a reader.
    pub(super) fn new(inner: R) -> (Self, Watch) {
        let watch = Watch::default();
        let own = watch.clone();
        (Self { inner, watch: own }, watch)
    }
}

impl<R: Read> Read for Watched<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(out)?;
        self.watch.take(out.get(..n).unwrap_or_default());
        Ok(n)
    }
}

/// Uncompressed bytes, of which there may not be too many for each stored one.
pub(super) struct Bounded<R> {
    inner: R,
    stored: Watch,
    bytes: u64,
    archive: String,
    max_ratio: u64,
}

impl<R> Bounded<R> {
    /// Bounds what `inner` makes of what `stored` saw.
    pub(super) fn new(inner: R, stored: Watch, archive: String, max_ratio: u64) -> Self {
        Self {
            inner,
            stored,
            bytes: 0,
            archive,
            max_ratio,
        }
    }
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(out)?;
        self.bytes += n as u64;
        if self.bytes > FREE && self.bytes / self.max_ratio.max(1) > self.stored.bytes() {
            return Err(io::Error::other(PackError::Limit {
                object: format!("archive {}", self.archive),
                name: "max_ratio",
                limit: self.max_ratio,
                unit: "uncompressed bytes for each stored one",
            }));
        }
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tail_is_the_end_however_it_was_read() {
        let bytes: Vec<u8> = (0..=255).collect();
        for size in [1, 7, 63, 64, 65, 300] {
            let (mut reader, watch) = Watched::new(&bytes[..]);
            let mut buffer = vec![0; size];
            while reader.read(&mut buffer).unwrap() > 0 {}
            assert_eq!(watch.tail(), &bytes[bytes.len() - TAIL..], "{size}");
            assert_eq!(watch.bytes(), 256);
        }
    }

    #[test]
    fn a_ratio_counts_from_a_size_on() {
        let read = |bytes: u64, ratio: u64| {
            let (mut stored, watch) = Watched::new(&[0u8; 1000][..]);
            io::copy(&mut stored, &mut io::sink()).unwrap();
            let inner = io::repeat(0).take(bytes);
            let mut bounded = Bounded::new(inner, watch, "a.tar".to_owned(), ratio);
            io::copy(&mut bounded, &mut io::sink())
        };
        assert_eq!(read(FREE, 1).unwrap(), FREE);
        assert_eq!(read(FREE + 1000, 2 << 20).unwrap(), FREE + 1000);
        let error = read(FREE + 1000, 1000).unwrap_err().to_string();
        assert!(
            error.contains("a.tar") && error.contains("--max-ratio"),
            "{error}"
        );
    }
}
