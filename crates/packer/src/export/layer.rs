//! One layer as an archive, as OCI means layers: whiteouts as `.wh.` entries, opaque marks as
//! `.wh..wh..opq`, implicit directories without an entry where those below have them.

use std::collections::{HashMap, HashSet};
use std::io::Write;

use layerpack_erofs::{Metadata, NodeId, NodeKind, Timestamp};

use super::archive::{Archive, Entry, Run, kind};
use super::contents::Contents;
use crate::content::Content;
use crate::error::{PackError, Result};
use crate::model::{Layer, OPAQUE};
use crate::options::Progress;
use crate::path::join;
use crate::warnings::Warnings;

const PREFIX: &[u8] = b".wh.";
/// Why the removal of a file cannot be told.
const GONE: &str = "the layer takes this file of the layers below away, which layers of images cannot say: names that begin with \".wh.\" are whiteouts in them themselves; export an archive of the whole tree, or keep the file";

/// How a layer is written.
pub(super) struct Writing<'a> {
    /// The merge of the layers below it; None: there are none.
    pub below: Option<&'a Layer>,
    /// Whether the archive is a layer of an image, where names that begin with `.wh.` mean
    /// something else than themselves.
    pub image: bool,
    /// The file that is written, for messages.
    pub target: &'a str,
    pub progress: &'a dyn Progress,
    pub warnings: &'a mut Warnings,
}

impl Writing<'_> {
    /// Writes `layer`, whose chunks `contents` has.
    pub(super) fn write<W: Write>(
        &mut self,
        layer: &Layer,
        contents: &mut Contents,
        out: W,
    ) -> Result<W> {
        let mut seen: HashSet<NodeId> = HashSet::new();
        for entry in layer.tree.walk() {
            if let Some(content) = first_content(layer, &mut seen, entry.id) {
                for piece in &content.pieces {
                    contents.expect(piece.digest, piece.len);
                }
            }
        }
        let mut archive = Archive::new(out);
        let mut names: HashMap<NodeId, Vec<u8>> = HashMap::new();
        for entry in layer.tree.walk() {
            self.progress.entry(&entry.path);
            self.node(
                layer,
                contents,
                &mut archive,
                &mut names,
                &entry.path,
                entry.id,
            )?;
        }
        archive.finish().map_err(|error| self.io(error))
    }

    fn node<W: Write>(
        &mut self,
        layer: &Layer,
        contents: &mut Contents,
        archive: &mut Archive<W>,
        names: &mut HashMap<NodeId, Vec<u8>>,
        path: &[u8],
        id: NodeId,
    ) -> Result<()> {
        let node = layer.tree.node(id);
        let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        if self.image && name.starts_with(PREFIX) && layer.is_whiteout(id) {
            // Only what is not there can be taken away without a mark.
            return match self.below.is_some_and(|below| shows(below, path)) {
                true => Err(PackError::unsupported(path, GONE)),
                false => Ok(()),
            };
        }
        if self.image && name.starts_with(PREFIX) {
            let why = "layers of images take names that begin with \".wh.\" for whiteouts; rename or exclude it";
            return Err(PackError::unsupported(path, why));
        }
        if layer.is_whiteout(id) {
            return self.mark(archive, parent(path), name);
        }
        let metadata = &node.metadata;
        let mut entry = Entry {
            kind: kind::FILE,
            path,
            link: b"",
            metadata,
            device: (0, 0),
            xattrs: true,
        };
        if node.kind.is_dir() {
            return self.directory(layer, archive, path, id);
        }
        if let NodeKind::Socket = node.kind {
            self.warnings.add(format!(
                "left out {}: an archive cannot hold a socket",
                crate::show(path)
            ));
            return Ok(());
        }
        if let Some(first) = names.get(&id).cloned() {
            let mut entry = entry;
            entry.kind = kind::LINK;
            entry.link = &first;
            entry.xattrs = false;
            return self.headers(archive, &entry);
        }
        if node.nlink() > 1 {
            names.insert(id, path.to_vec());
        }
        match &node.kind {
            NodeKind::File(_) => return self.file(layer, contents, archive, &entry, id),
            NodeKind::Symlink(target) => {
                entry.kind = kind::SYMLINK;
                entry.link = target;
            }
            NodeKind::CharDevice(rdev) => {
                entry.kind = kind::CHAR;
                entry.device = (rdev.major, rdev.minor);
            }
            NodeKind::BlockDevice(rdev) => {
                entry.kind = kind::BLOCK;
                entry.device = (rdev.major, rdev.minor);
            }
            NodeKind::Fifo | NodeKind::Socket | NodeKind::Directory => entry.kind = kind::FIFO,
        }
        self.headers(archive, &entry)
    }

    /// An entry without data.
    fn headers<W: Write>(&self, archive: &mut Archive<W>, entry: &Entry<'_>) -> Result<()> {
        archive
            .entry(entry, 0, &[])
            .map(drop)
            .map_err(|error| self.io(error))
    }

    fn directory<W: Write>(
        &mut self,
        layer: &Layer,
        archive: &mut Archive<W>,
        path: &[u8],
        id: NodeId,
    ) -> Result<()> {
        let opaque = layer.is_opaque(id);
        // The root is there in any case.
        let has_own = !layer.is_implicit(id)
            || !(path.is_empty()
                || self.below.is_some_and(|below| {
                    let there = below.tree.resolve(path);
                    there.is_some_and(|there| below.tree.node(there).kind.is_dir())
                }));
        if has_own {
            let mut metadata = layer.tree.node(id).metadata.clone();
            metadata.xattrs.remove(OPAQUE);
            let mut name = if path.is_empty() {
                b".".to_vec()
            } else {
                path.to_vec()
            };
            name.push(b'/');
            let entry = Entry {
                kind: kind::DIRECTORY,
                path: &name,
                link: b"",
                metadata: &metadata,
                device: (0, 0),
                xattrs: true,
            };
            self.headers(archive, &entry)?;
        }
        if opaque {
            self.mark(archive, path, b".wh..opq")
        } else {
            Ok(())
        }
    }

    /// A whiteout of `name` in `directory`; `.wh..opq` makes an opaque mark.
    fn mark<W: Write>(
        &mut self,
        archive: &mut Archive<W>,
        directory: &[u8],
        name: &[u8],
    ) -> Result<()> {
        let mut marked = PREFIX.to_vec();
        marked.extend_from_slice(name);
        let path = join(directory, &marked);
        if marked.len() > layerpack_erofs::MAX_NAME {
            let why = "its whiteout's name would be too long for an image's layer";
            return Err(PackError::unsupported(&path, why));
        }
        let metadata = Metadata {
            mtime: Timestamp::default(),
            ..Metadata::default()
        };
        let entry = Entry {
            kind: kind::FILE,
            path: &path,
            link: b"",
            metadata: &metadata,
            device: (0, 0),
            xattrs: false,
        };
        self.headers(archive, &entry)
    }

    fn file<W: Write>(
        &mut self,
        layer: &Layer,
        contents: &mut Contents,
        archive: &mut Archive<W>,
        entry: &Entry<'_>,
        id: NodeId,
    ) -> Result<()> {
        let empty = Content {
            size: 0,
            pieces: Vec::new().into(),
        };
        let content = layer.content(id).unwrap_or(empty);
        let fill = archive
            .entry(entry, content.size, &runs(&content))
            .map_err(|error| self.io(error))?;
        let mut at = 0;
        for piece in &content.pieces {
            if fill {
                archive
                    .zeros(piece.offset.saturating_sub(at))
                    .map_err(|error| self.io(error))?;
            }
            let bytes = contents.get(&piece.digest)?;
            archive.data(bytes).map_err(|error| self.io(error))?;
            self.progress.bytes(u64::from(piece.len));
            at = piece.offset + u64::from(piece.len);
        }
        if fill {
            archive
                .zeros(content.size.saturating_sub(at))
                .map_err(|error| self.io(error))?;
        }
        archive.pad().map_err(|error| self.io(error))
    }

    fn io(&self, source: std::io::Error) -> PackError {
        PackError::Write {
            path: self.target.to_owned(),
            source,
        }
    }
}

/// Whether there is something at a path of a layer.
fn shows(layer: &Layer, path: &[u8]) -> bool {
    let there = layer.tree.resolve(path);
    there.is_some_and(|id| !layer.is_whiteout(id))
}

/// A file's content, where the walk comes to its first name.
fn first_content(layer: &Layer, seen: &mut HashSet<NodeId>, id: NodeId) -> Option<Content> {
    let node = layer.tree.node(id);
    if !matches!(node.kind, NodeKind::File(_)) {
        return None;
    }
    if node.nlink() > 1 && !seen.insert(id) {
        return None;
    }
    layer.content(id)
}

/// Neighbouring chunks as runs.
fn runs(content: &Content) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for piece in &content.pieces {
        match runs.last_mut() {
            Some((offset, len)) if *offset + *len == piece.offset => *len += u64::from(piece.len),
            _ => runs.push((piece.offset, u64::from(piece.len))),
        }
    }
    runs
}

fn parent(path: &[u8]) -> &[u8] {
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(at) => path.get(..at).unwrap_or_default(),
        None => b"",
    }
}
