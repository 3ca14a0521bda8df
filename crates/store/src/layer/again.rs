//! Reads whose bytes are checked, and asked for again if they are wrong: from the next address of a
//! store with several, anew from a remote one (a transfer may damage them). Only if every answer is
//! wrong is the object damaged; the error is then the one about the first answer.

use std::ops::Range;

use super::LayerStore;
use crate::blob::{BlobStore, Span};
use crate::error::{Result, StoreError};
use crate::key::Key;

/// Whether another answer may be right: this one's bytes are not what they must be.
pub(crate) const fn is_wrong(error: &StoreError) -> bool {
    matches!(
        error,
        StoreError::Corrupt { .. }
            | StoreError::DamagedReference { .. }
            | StoreError::Unsupported { .. }
    )
}

/// What `check` makes of the object's bytes. `None`: there is no such object.
pub(crate) fn read_checked<T>(
    blobs: &dyn BlobStore,
    key: &Key,
    span: &Span,
    check: &mut dyn FnMut(&[u8]) -> Result<T>,
) -> Result<Option<T>> {
    let first = match span.read(blobs, key) {
        Ok(None) => return Ok(None),
        Ok(Some(bytes)) => check(&bytes),
        Err(error) => Err(error),
    };
    let error = match first {
        Ok(value) => return Ok(Some(value)),
        Err(error) if is_wrong(&error) => error,
        Err(error) => return Err(error),
    };
    reread(blobs, key, span, error, check).map(Some)
}

/// Reads again what was found wrong (`error`): what `check` makes of the first right answer, or
/// that error.
pub(crate) fn reread<T>(
    blobs: &dyn BlobStore,
    key: &Key,
    span: &Span,
    error: StoreError,
    check: &mut dyn FnMut(&[u8]) -> Result<T>,
) -> Result<T> {
    let mut good = None;
    let again = blobs.reread(key, span, &mut |bytes, from| match check(bytes) {
        Ok(value) => {
            tracing::debug!(%key, from, "right when it was read again");
            good = Some(value);
            true
        }
        Err(error) => {
            tracing::debug!(%key, from, "wrong again: {error}");
            false
        }
    });
    if let Err(later) = again {
        tracing::debug!(%key, "cannot be read again: {later}");
    }
    good.ok_or(error)
}

impl LayerStore {
    /// A whole object of at most `max_len` bytes as `check` understands it, which answers
    /// [`StoreError::Corrupt`] or the like if the bytes are wrong.
    pub(crate) fn get_checked<T>(
        &self,
        key: &Key,
        max_len: u64,
        check: &mut dyn FnMut(&[u8]) -> Result<T>,
    ) -> Result<Option<T>> {
        read_checked(&**self.blobs(), key, &Span::Whole { max_len }, check)
    }

    /// As [`LayerStore::get_checked`], of an object that must be there.
    pub(crate) fn need_checked<T>(
        &self,
        key: &Key,
        max_len: u64,
        check: &mut dyn FnMut(&[u8]) -> Result<T>,
    ) -> Result<T> {
        self.get_checked(key, max_len, check)?
            .ok_or_else(|| self.missing(key))
    }

    /// A range of an object as `check` understands it.
    pub(crate) fn range_checked<T>(
        &self,
        key: &Key,
        range: Range<u64>,
        check: &mut dyn FnMut(&[u8]) -> Result<T>,
    ) -> Result<T> {
        read_checked(&**self.blobs(), key, &Span::Range(range), check)?
            .ok_or_else(|| self.missing(key))
    }

    /// Reads a range again that was found wrong.
    pub(crate) fn reread_range<T>(
        &self,
        key: &Key,
        range: Range<u64>,
        error: StoreError,
        check: &mut dyn FnMut(&[u8]) -> Result<T>,
    ) -> Result<T> {
        if !is_wrong(&error) {
            return Err(error);
        }
        reread(&**self.blobs(), key, &Span::Range(range), error, check)
    }

    /// A range of an object as it came: only that all of it came was checked.
    pub(crate) fn range_whole(&self, key: &Key, range: Range<u64>) -> Result<Vec<u8>> {
        let blobs = &**self.blobs();
        let span = Span::Range(range);
        match span.read(blobs, key) {
            Ok(found) => found.ok_or_else(|| self.missing(key)),
            Err(error) if is_wrong(&error) => {
                reread(blobs, key, &span, error, &mut |bytes| Ok(bytes.to_vec()))
            }
            Err(error) => Err(error),
        }
    }

    /// What `check` makes of each of `parts` of an object, ranges within those that `bytes`, which
    /// begin at `start`, were read from. `check` gets a part's number and its bytes. Parts that it
    /// finds wrong are read again, together.
    pub(crate) fn parts_checked<T>(
        &self,
        key: &Key,
        start: u64,
        bytes: &[u8],
        parts: &[Range<u64>],
        check: &mut dyn FnMut(usize, &[u8]) -> Result<T>,
    ) -> Vec<Result<T>> {
        let mut results: Vec<Result<T>> = Vec::with_capacity(parts.len());
        for (number, part) in parts.iter().enumerate() {
            results.push(check(number, slice_at(start, bytes, part)));
        }
        let wrong = |result: &Result<T>| result.as_ref().is_err_and(is_wrong);
        let bad = results
            .iter()
            .zip(parts)
            .filter(|(result, _)| wrong(result));
        let span = bad.fold(None, |span: Option<Range<u64>>, (_, part)| {
            let span = span.unwrap_or_else(|| part.clone());
            Some(span.start.min(part.start)..span.end.max(part.end))
        });
        let Some(span) = span else {
            return results;
        };
        let from = span.start;
        let again = self
            .blobs()
            .reread(key, &Span::Range(span), &mut |bytes, address| {
                let mut good = true;
                for (number, (result, part)) in results.iter_mut().zip(parts).enumerate() {
                    if !wrong(result) {
                        continue;
                    }
                    match check(number, slice_at(from, bytes, part)) {
                        Err(error) => {
                            tracing::debug!(%key, address, "wrong again: {error}");
                            good = false;
                        }
                        right => *result = right,
                    }
                }
                good
            });
        if let Err(error) = again {
            tracing::debug!(%key, "cannot be read again: {error}");
        }
        results
    }
}

/// The part of bytes that begin at `start`; nothing if it is not within them.
fn slice_at<'a>(start: u64, bytes: &'a [u8], part: &Range<u64>) -> &'a [u8] {
    let at = |position: u64| usize::try_from(position.checked_sub(start)?).ok();
    at(part.start)
        .zip(at(part.end))
        .and_then(|(from, to)| bytes.get(from..to))
        .unwrap_or_default()
}
