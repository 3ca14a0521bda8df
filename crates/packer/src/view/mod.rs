//! What a layer or a stack of layers shows, without mounting it: entries, paths through symbolic
//! links, contents of files, and how two of them differ.
//!
//! Only metadata and maps are read; contents are, when they are asked for, and verified as ever.
//! A stack that begins with a base shows what a sandbox would see; anything else shows its
//! whiteouts, too, since they mean something to the layers that it will lie on.

mod diff;
mod find;
mod rebase;

use std::io::Write;

use layerpack_erofs::{Metadata, NodeId, NodeKind, Tree};
use layerpack_store::{Digest, Kind, LayerStore, Manifest};

pub use diff::{Change, ChangeKind, Difference};
pub use find::{Find, SizeTest};
pub use rebase::{ConflictKind, RebaseConflict, RebaseOptions, RebaseReport, Strategy, rebase};

use crate::error::{PackError, Result, not_there};
use crate::export::Contents;
use crate::merge;
use crate::model::Layer;
use crate::warnings::Warnings;

/// Symbolic links followed on one path.
const MAX_FOLLOWED: usize = 40;
/// Zero bytes written at once for a hole.
const ZEROS: usize = 64 << 10;

/// Type of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EntryKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
    /// A named pipe.
    Fifo,
    /// A unix socket.
    Socket,
    /// Removes what lower layers have under its name.
    Whiteout,
}

impl EntryKind {
    /// The type's name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Directory => "directory",
            Self::Symlink => "symlink",
            Self::CharDevice => "char-device",
            Self::BlockDevice => "block-device",
            Self::Fifo => "fifo",
            Self::Socket => "socket",
            Self::Whiteout => "whiteout",
        }
    }

    /// The letter that `ls` and `find` show for the type; `w` for a whiteout.
    #[must_use]
    pub const fn letter(self) -> char {
        match self {
            Self::File => 'f',
            Self::Directory => 'd',
            Self::Symlink => 'l',
            Self::CharDevice => 'c',
            Self::BlockDevice => 'b',
            Self::Fifo => 'p',
            Self::Socket => 's',
            Self::Whiteout => 'w',
        }
    }
}

/// An entry of a view.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ViewEntry {
    /// Path from the root without a leading `/`; empty for the root.
    pub path: Vec<u8>,
    /// Its type.
    pub kind: EntryKind,
    /// Size of a file in bytes, else 0.
    pub size: u64,
    /// Mode, owner, time, extended attributes.
    pub metadata: Metadata,
    /// Where a symbolic link points.
    pub target: Option<Vec<u8>>,
}

/// What a layer or stack shows.
pub struct View {
    store: LayerStore,
    manifests: Vec<Manifest>,
    layer: Layer,
}

impl std::fmt::Debug for View {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let layers: Vec<String> = self
            .manifests
            .iter()
            .map(|m| m.reference().to_string())
            .collect();
        f.debug_tuple("View").field(&layers).finish()
    }
}

impl View {
    /// Reads the metadata of the layers given, bottom first.
    ///
    /// # Errors
    /// [`PackError::Store`] if one cannot be read, [`PackError::InvalidOption`] if there is none.
    pub fn open(store: &LayerStore, layers: &[(Digest, Manifest)]) -> Result<Self> {
        let bottom = layers
            .first()
            .is_some_and(|(_, manifest)| manifest.kind == Kind::Base);
        // Whether each layer was made for this stack is not the question here.
        let mut layer = merge::stack(store, layers, bottom, &mut Warnings::default())?;
        if bottom {
            merge::overlay::bottom(&mut layer)?;
        }
        Ok(Self {
            store: store.clone(),
            manifests: layers.iter().map(|(_, m)| m.clone()).collect(),
            layer,
        })
    }

    fn tree(&self) -> &Tree {
        &self.layer.tree
    }

    /// All entries: directories before what is in them, names in the order of their bytes.
    pub fn entries(&self) -> impl Iterator<Item = ViewEntry> {
        self.tree().walk().map(|e| self.entry(e.path, e.id))
    }

    /// The entry at this path; symbolic links on the way are followed, the last component is not.
    #[must_use]
    pub fn get(&self, path: &[u8]) -> Option<ViewEntry> {
        let (id, real) = self.lookup(path, false).ok()?;
        Some(self.entry(real, id))
    }

    fn kind(&self, id: NodeId) -> EntryKind {
        if self.layer.is_whiteout(id) {
            return EntryKind::Whiteout;
        }
        match self.tree().node(id).kind {
            NodeKind::Directory => EntryKind::Directory,
            NodeKind::File(_) => EntryKind::File,
            NodeKind::Symlink(_) => EntryKind::Symlink,
            NodeKind::CharDevice(_) => EntryKind::CharDevice,
            NodeKind::BlockDevice(_) => EntryKind::BlockDevice,
            NodeKind::Fifo => EntryKind::Fifo,
            NodeKind::Socket => EntryKind::Socket,
        }
    }

    fn entry(&self, path: Vec<u8>, id: NodeId) -> ViewEntry {
        let node = self.tree().node(id);
        ViewEntry {
            path,
            kind: self.kind(id),
            size: self.layer.size(id),
            metadata: node.metadata.clone(),
            target: match &node.kind {
                NodeKind::Symlink(target) => Some(target.clone()),
                _ => None,
            },
        }
    }

    /// Finds a path, and the path that it really is. Links never lead out of the view.
    fn lookup(&self, path: &[u8], follow: bool) -> Result<(NodeId, Vec<u8>)> {
        let fail = |why: &str| Err(not_there(path, why));
        let split = |text: &[u8]| -> Vec<Vec<u8>> {
            let parts = text.split(|&b| b == b'/');
            let parts = parts.filter(|part| !part.is_empty() && *part != b".");
            parts.map(<[u8]>::to_vec).collect()
        };
        let mut todo: Vec<Vec<u8>> = split(path);
        todo.reverse();
        let mut stack: Vec<(NodeId, Vec<u8>)> = vec![(NodeId::ROOT, Vec::new())];
        let mut followed = 0;
        while let Some(name) = todo.pop() {
            if name == b".." {
                if stack.len() > 1 {
                    stack.pop();
                }
                continue;
            }
            let here = stack.last().map_or(NodeId::ROOT, |(id, _)| *id);
            if !self.tree().node(here).kind.is_dir() {
                return fail("a part of the path is not a directory");
            }
            let Some(id) = self.tree().child(here, &name) else {
                return fail("there is no such file or directory");
            };
            match &self.tree().node(id).kind {
                NodeKind::Symlink(target) if follow || !todo.is_empty() => {
                    followed += 1;
                    if followed > MAX_FOLLOWED {
                        return fail("its path leads through too many symbolic links");
                    }
                    if target.starts_with(b"/") {
                        stack.truncate(1);
                    }
                    todo.extend(split(target).into_iter().rev());
                }
                _ => stack.push((id, name)),
            }
        }
        let real: Vec<&[u8]> = stack.iter().skip(1).map(|(_, n)| n.as_slice()).collect();
        let id = stack.last().map_or(NodeId::ROOT, |(id, _)| *id);
        Ok((id, real.join(&b'/')))
    }

    /// Writes a file's contents, each chunk verified before a byte of it is written, holes as
    /// zeros. Symbolic links are followed within the view. Bytes written.
    ///
    /// # Errors
    /// [`PackError::NotThere`] if there is no such file, [`PackError::Store`] if a chunk cannot
    /// be read, [`PackError::Write`] if `out` fails, naming `target`.
    pub fn cat(&self, path: &[u8], out: &mut dyn Write, target: &str) -> Result<u64> {
        let (id, real) = self.lookup(path, true)?;
        let Some(content) = self.layer.content(id) else {
            let why = match self.kind(id) {
                EntryKind::File => return Ok(0), // empty
                kind => format!("it is a {}, not a file", kind.as_str()),
            };
            return Err(not_there(&real, why));
        };
        let failed = |source| PackError::Write {
            path: target.to_owned(),
            source,
        };
        let mut contents = Contents::new(&self.store, &self.manifests)?;
        for piece in &content.pieces {
            contents.expect(piece.digest, piece.len);
        }
        let zeros = vec![0_u8; ZEROS];
        let mut at = 0;
        let hole = |from: u64, to: u64, out: &mut dyn Write| {
            let mut left = to.saturating_sub(from);
            while left > 0 {
                let len = usize::try_from(left).unwrap_or(ZEROS).min(ZEROS);
                out.write_all(zeros.get(..len).unwrap_or_default())?;
                left -= len as u64;
            }
            Ok(())
        };
        for piece in &content.pieces {
            hole(at, piece.offset, out).map_err(failed)?;
            let bytes = contents.get(&piece.digest)?;
            out.write_all(bytes).map_err(failed)?;
            at = piece.offset + u64::from(piece.len);
        }
        hole(at, content.size, out).map_err(failed)?;
        out.flush().map_err(failed)?;
        Ok(content.size)
    }
}
