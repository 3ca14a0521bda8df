//! Large files: one thread reads and finds where their chunks end, another finds the chunks' digests,
//! which takes about as long.

use std::io::Read;
use std::sync::mpsc::sync_channel;
use std::thread;

use super::writer::{FileChunks, LayerWriter, fill};
use crate::chunker::cut;
use crate::digest::Digest;
use crate::error::{Result, StoreError};

/// Files from this size on are worth a thread, in bytes.
pub(super) const LARGE: u64 = 8 << 20;
/// Batches on their way: one that is hashed and one that waits.
const ON_THE_WAY: usize = 2;

/// Some of a file's bytes with the lengths of the chunks in them, and then their digests.
#[derive(Debug, Default)]
struct Batch {
    bytes: Vec<u8>,
    lens: Vec<usize>,
    digests: Vec<Digest>,
}

impl Batch {
    fn pieces(&self) -> impl Iterator<Item = &[u8]> {
        let mut rest = self.bytes.as_slice();
        self.lens.iter().map(move |len| {
            let (piece, others) = rest.split_at_checked(*len).unwrap_or((rest, &[]));
            rest = others;
            piece
        })
    }

    fn hash(&mut self) {
        let digests = self.pieces().map(Digest::of).collect();
        self.digests = digests;
    }
}

impl LayerWriter {
    /// Adds what `reader` has, after the bytes `begun` of the same file. `None`: there is no thread to
    /// be had, and nothing was read.
    pub(super) fn add_large(
        &mut self,
        begun: &[u8],
        reader: &mut dyn Read,
    ) -> Result<Option<FileChunks>> {
        thread::scope(|scope| {
            let (hand, wanted) = sync_channel::<Batch>(ON_THE_WAY);
            let (back, done) = sync_channel::<Batch>(ON_THE_WAY);
            let spawned =
                thread::Builder::new()
                    .name("hash".to_owned())
                    .spawn_scoped(scope, move || {
                        for mut batch in wanted {
                            batch.hash();
                            if back.send(batch).is_err() {
                                return;
                            }
                        }
                    });
            if spawned.is_err() {
                return Ok(None);
            }
            let gone = |store: &str| StoreError::WriterFailed {
                store: store.to_owned(),
            };
            let params = self.chunker();
            let size = params.max.max(256 << 10) * 4;
            let mut file = FileChunks::default();
            let mut batch = Batch {
                bytes: begun.to_vec(),
                ..Batch::default()
            };
            let mut spare = Vec::new();
            let mut on_the_way = 0;
            loop {
                let len = batch.bytes.len();
                batch.bytes.resize(size, 0);
                let room = batch.bytes.get_mut(len..).unwrap_or_default();
                let wanted = room.len();
                let got = fill(reader, room)?;
                let ended = got < wanted;
                batch.bytes.truncate(len + got);
                let mut rest = batch.bytes.as_slice();
                while rest.len() >= params.max || (ended && !rest.is_empty()) {
                    let len = cut(rest, &params);
                    batch.lens.push(len);
                    rest = rest.get(len..).unwrap_or_default();
                }
                let mut next: Batch = spare.pop().unwrap_or_default();
                next.bytes.clear();
                next.bytes.extend_from_slice(rest);
                next.lens.clear();
                hand.send(std::mem::replace(&mut batch, next))
                    .map_err(|_| gone(self.url()))?;
                on_the_way += 1;
                while on_the_way == ON_THE_WAY || (ended && on_the_way > 0) {
                    let hashed = done.recv().map_err(|_| gone(self.url()))?;
                    self.index.expect(hashed.digests.iter().copied());
                    for (piece, digest) in hashed.pieces().zip(&hashed.digests) {
                        self.add_hashed(piece, *digest)?;
                        file.push(*digest, piece.len());
                    }
                    spare.push(hashed);
                    on_the_way -= 1;
                }
                if ended {
                    return Ok(Some(file));
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, Cursor};
    use std::sync::Arc;

    use super::*;
    use crate::blob::MemStore;
    use crate::layer::{LayerStore, WriterOptions};

    fn bytes(len: usize) -> Vec<u8> {
        let mut state = 3_u64;
        let next = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 32).to_le_bytes()[0]
        };
        std::iter::repeat_with(next).take(len).collect()
    }

    fn writer() -> LayerWriter {
        let store = LayerStore::new(Arc::new(MemStore::new()));
        store.writer(WriterOptions::default()).unwrap()
    }

    #[test]
    fn large_files_have_the_chunks_of_others() {
        for len in [70_000, 1 << 20, (5 << 20) + 1, 11 << 20] {
            let bytes = bytes(len);
            let (mut one, mut other) = (writer(), writer());
            let plain = one.add_file(&mut Cursor::new(&bytes), 0).unwrap();
            let large = other.add_file(&mut Cursor::new(&bytes), LARGE).unwrap();
            assert_eq!(plain, large, "{len}");
            assert_eq!((large.size, one.stats()), (len as u64, other.stats()));
        }
    }

    #[test]
    fn a_file_that_cannot_be_read_is_an_error() {
        struct Breaks(usize);
        impl Read for Breaks {
            fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
                let len = out.len().min(self.0);
                out[..len].fill(7);
                self.0 -= len;
                match len {
                    0 => Err(io::Error::other("broken")),
                    len => Ok(len),
                }
            }
        }
        for good in [0, 100_000, 3 << 20, 9 << 20] {
            let error = writer().add_file(&mut Breaks(good), LARGE).unwrap_err();
            assert!(matches!(error, StoreError::Input(_)), "{error}");
        }
    }
}
