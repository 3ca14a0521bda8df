//! Indexes in layers of a store, of which another layer is made.
//!
//! A merge gives files other inode numbers, so git would read them all again. Nothing of their contents
//! has to be read to know better: where an index remembers of a file just what a mount of its layer shows,
//! git believed that the file has the entry's contents, and the file in the merge has them too.

use layerpack_erofs::{FileType, Image, Inode, NodeId, NodeKind};
use layerpack_store::{Digest, LayerStore, Manifest};

use super::index::Stat;
use super::{Git, MAX_LINK};
use crate::content::Content;
use crate::error::Result;
use crate::export::Contents;
use crate::model::Layer;
use crate::path::components;
use crate::warnings::Warnings;

/// Metadata images of layers of a store, topmost first.
#[derive(Default)]
pub(crate) struct Images(Vec<Vec<u8>>);

impl Images {
    /// Those of layers given bottom first.
    pub(crate) fn of(store: &LayerStore, manifests: &[(Digest, Manifest)]) -> Result<Self> {
        let from_top = manifests.iter().rev();
        let metas = from_top.map(|(_, manifest)| Ok(store.meta(manifest)?));
        Ok(Self(metas.collect::<Result<_>>()?))
    }

    pub(super) fn open(&self) -> Result<Shown<'_>> {
        let images = self.0.iter().map(|meta| Ok(Image::open(meta)?));
        Ok(Shown(images.collect::<Result<_>>()?))
    }
}

/// What mounts of layers show.
pub(super) struct Shown<'a>(Vec<Image<'a>>);

impl Shown<'_> {
    /// What `stat` says of a file or symbolic link, in the topmost layer that has the path.
    pub(super) fn stat(&self, path: &[u8]) -> Option<Stat> {
        let mut found = self.0.iter().filter_map(|image| image.resolve(path).ok()?);
        let inode = found.next()?;
        matches!(inode.file_type, FileType::File | FileType::Symlink).then(|| stat(&inode))
    }
}

fn stat(inode: &Inode) -> Stat {
    Stat {
        sec: inode.mtime.sec,
        nsec: inode.mtime.nsec,
        ino: inode.nid,
        uid: inode.uid,
        gid: inode.gid,
        size: inode.size,
    }
}

impl Git {
    /// Takes up the indexes that `layer` has from layers of a store, given bottom first, and gives their
    /// images if there is any index at all. `is_own`: paths whose files are not from there.
    ///
    /// An index that cannot be read stays as it is, with a warning.
    pub(crate) fn take_up(
        &mut self,
        store: &LayerStore,
        manifests: &[(Digest, Manifest)],
        layer: &mut Layer,
        is_own: &dyn Fn(&[u8]) -> bool,
        warnings: &mut Warnings,
    ) -> Result<Images> {
        let mut found: Vec<(Vec<u8>, NodeId, Content)> = Vec::new();
        let mut links: Vec<Content> = Vec::new();
        for entry in layer.tree.walk() {
            let NodeKind::File(_) = layer.tree.node(entry.id).kind else {
                continue;
            };
            let names = components(&entry.path);
            let (is_link, is_index) = match names.split_last() {
                Some((name, above)) => (
                    *name == b".git",
                    *name == b"index" && above.contains(&&b".git"[..]),
                ),
                None => (false, false),
            };
            if !(is_link || is_index) || is_own(&entry.path) {
                continue;
            }
            match layer.content(entry.id) {
                Some(content) if is_link && content.size <= MAX_LINK => links.push(content),
                Some(content) if is_index && self.has_room(content.size) => {
                    found.push((entry.path, entry.id, content));
                }
                _ => {}
            }
        }
        if found.is_empty() && self.indexes.is_empty() {
            return Ok(Images::default());
        }
        if !(found.is_empty() && links.is_empty()) {
            let contents = Contents::new(store, manifests.iter().map(|(_, manifest)| manifest))?;
            for content in links {
                if let Ok(bytes) = read(&contents, &content) {
                    self.links.insert(content.identity(), bytes);
                }
            }
            for (path, id, content) in found {
                match read(&contents, &content) {
                    Ok(bytes) if bytes.starts_with(b"DIRC") && self.has_room(content.size) => {
                        let held = self.hold(&bytes);
                        layer.set_content(id, held)?;
                    }
                    Ok(_) => {}
                    Err(error) => warnings.add(format!(
                        "the git index {} stays as it is: {error}",
                        crate::show(&path)
                    )),
                }
            }
        }
        if self.indexes.is_empty() {
            return Ok(Images::default());
        }
        Images::of(store, manifests)
    }

    /// Whether an index is held back, so that a writer is needed.
    pub(crate) fn holds(&self) -> bool {
        !self.indexes.is_empty()
    }
}

/// All of a small file.
fn read(contents: &Contents, content: &Content) -> Result<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(content.size).unwrap_or_default()];
    for piece in &content.pieces {
        let chunk = contents.one(&piece.digest)?;
        let from = usize::try_from(piece.offset).unwrap_or(usize::MAX);
        if let Some(place) = bytes.get_mut(from..from.saturating_add(chunk.len())) {
            place.copy_from_slice(&chunk);
        }
    }
    Ok(bytes)
}
