//! Git's objects in layers of the store, for rules that ask what a commit is made on. Only the chunks
//! that are asked for are read, and verified as ever.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use layerpack_erofs::NodeKind;
use layerpack_store::{Digest, LayerStore, Manifest};

use crate::content::Content;
use crate::error::{PackError, Result};
use crate::export::Contents;
use crate::model::Layer;
use crate::path::components;
use crate::scrub::{Files, ReadAt};

/// Chunks that are kept in memory.
const MOST_CHUNKS: usize = 64;

/// See the module's documentation.
pub(crate) struct GitObjects {
    files: BTreeMap<Vec<u8>, Content>,
    chunks: Arc<Mutex<Chunks>>,
}

struct Chunks {
    contents: Contents,
    /// The last ones that were read.
    recent: VecDeque<(Digest, Arc<[u8]>)>,
}

impl Chunks {
    fn get(&mut self, digest: &Digest) -> Result<Arc<[u8]>> {
        if let Some((_, bytes)) = self.recent.iter().find(|(known, _)| known == digest) {
            return Ok(Arc::clone(bytes));
        }
        let bytes: Arc<[u8]> = self.contents.one(digest)?.into();
        if self.recent.len() >= MOST_CHUNKS {
            self.recent.pop_front();
        }
        self.recent.push_back((*digest, Arc::clone(&bytes)));
        Ok(bytes)
    }
}

impl GitObjects {
    /// Those of `layer`, which was made of the layers given.
    ///
    /// # Errors
    /// [`PackError::Store`] if a map cannot be read.
    pub(crate) fn of(
        store: &LayerStore,
        manifests: &[(Digest, Manifest)],
        layer: &Layer,
    ) -> Result<Self> {
        let mut files = BTreeMap::new();
        for entry in layer.tree.walk() {
            let is_object = || {
                let names = components(&entry.path);
                let mut pairs = names.iter().zip(names.iter().skip(1));
                pairs.any(|(one, next)| *one == b".git" && *next == b"objects")
            };
            if let NodeKind::File(_) = layer.tree.node(entry.id).kind
                && is_object()
                && let Some(content) = layer.content(entry.id)
            {
                files.insert(entry.path, content);
            }
        }
        let contents = match files.is_empty() {
            true => Contents::new(store, [])?,
            false => Contents::new(store, manifests.iter().map(|(_, manifest)| manifest))?,
        };
        let recent = VecDeque::new();
        Ok(Self {
            files,
            chunks: Arc::new(Mutex::new(Chunks { contents, recent })),
        })
    }
}

impl Files for GitObjects {
    fn open(&self, path: &[u8]) -> Option<Arc<dyn ReadAt>> {
        Some(Arc::new(Stored {
            content: self.files.get(path)?.clone(),
            chunks: Arc::clone(&self.chunks),
        }))
    }

    fn names(&self, directory: &[u8]) -> Vec<Vec<u8>> {
        let mut begin = directory.to_vec();
        begin.push(b'/');
        let below = self.files.range(begin.clone()..);
        let mut names: Vec<Vec<u8>> = below
            .map_while(|(path, _)| path.strip_prefix(begin.as_slice()))
            .filter_map(|rest| rest.split(|byte| *byte == b'/').next())
            .map(<[u8]>::to_vec)
            .collect();
        names.dedup();
        names
    }
}

/// A file's content that is read at any place.
struct Stored {
    content: Content,
    chunks: Arc<Mutex<Chunks>>,
}

impl ReadAt for Stored {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let left = self.content.size.saturating_sub(offset);
        let want = usize::try_from(left)
            .unwrap_or(usize::MAX)
            .min(buffer.len());
        let Some(buffer) = buffer.get_mut(..want).filter(|buffer| !buffer.is_empty()) else {
            return Ok(0);
        };
        let pieces = &self.content.pieces;
        let next = pieces.partition_point(|piece| piece.offset + u64::from(piece.len) <= offset);
        let Some(piece) = pieces.get(next) else {
            buffer.fill(0); // a hole at the end
            return Ok(buffer.len());
        };
        if let Some(hole) = piece.offset.checked_sub(offset).filter(|hole| *hole > 0) {
            let len = usize::try_from(hole)
                .unwrap_or(usize::MAX)
                .min(buffer.len());
            buffer.get_mut(..len).unwrap_or_default().fill(0);
            return Ok(len);
        }
        let mut chunks = self.chunks.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = chunks.get(&piece.digest).map_err(io::Error::other)?;
        let within = usize::try_from(offset - piece.offset).unwrap_or(usize::MAX);
        let rest = bytes.get(within..).unwrap_or_default();
        let len = rest.len().min(buffer.len());
        if len == 0 {
            let why = PackError::unsupported(b"", format!("chunk {} is too short", piece.digest));
            return Err(io::Error::other(why));
        }
        if let (Some(to), Some(from)) = (buffer.get_mut(..len), rest.get(..len)) {
            to.copy_from_slice(from);
        }
        Ok(len)
    }
}
