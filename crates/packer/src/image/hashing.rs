//! SHA-256 of what is read, as OCI names contents.

use std::fmt;
use std::io::{self, Read};
use std::sync::{Arc, Mutex, PoisonError};

use sha2::{Digest as _, Sha256};

/// The digest of a blob or of an uncompressed layer.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Sha(String);

impl Sha {
    /// Parses `sha256:` and 64 lowercase hexadecimal digits.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let shown: String = text.chars().take(100).collect();
        let hex = text.strip_prefix("sha256:").ok_or_else(|| {
            format!("digest {shown:?} is not a sha256 one, which alone are known")
        })?;
        let good = hex.len() == 64 && hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        if good {
            Ok(Self(hex.to_owned()))
        } else {
            Err(format!("digest {shown:?} has not 64 hexadecimal digits"))
        }
    }

    /// Digest of `bytes`.
    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self::from_hasher(Sha256::new_with_prefix(bytes))
    }

    /// What a hasher has taken.
    pub(crate) fn from_hasher(hasher: Sha256) -> Self {
        let mut hex = String::with_capacity(64);
        for byte in hasher.finalize() {
            hex.push_str(&format!("{byte:02x}"));
        }
        Self(hex)
    }

    /// 64 lowercase hexadecimal digits.
    pub(crate) fn hex(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Sha {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.0)
    }
}

/// Hashes and counts what passes through it.
pub(crate) struct Hashing<R> {
    inner: R,
    state: Arc<Mutex<(Sha256, u64)>>,
}

/// The other end of a [`Hashing`], for when its reader is gone.
pub(crate) struct Seen(Arc<Mutex<(Sha256, u64)>>);

impl<R> Hashing<R> {
    /// Wraps a reader.
    pub(crate) fn new(inner: R) -> (Self, Seen) {
        let state = Arc::new(Mutex::new((Sha256::new(), 0)));
        let seen = Seen(Arc::clone(&state));
        (Self { inner, state }, seen)
    }
}

impl Seen {
    /// Digest and number of the bytes so far.
    pub(crate) fn so_far(&self) -> (Sha, u64) {
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        (Sha::from_hasher(state.0.clone()), state.1)
    }
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(out)?;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.0.update(out.get(..n).unwrap_or_default());
        state.1 += n as u64;
        Ok(n)
    }
}
