//! Puts the entries of an archive into a layer, as OCI layers mean them.

use std::io::{self, Read};

use layerpack_erofs::{FileData, Metadata, NodeId, NodeKind, Rdev};
use layerpack_store::LayerWriter;

use crate::content::{Bytes, Next};
use crate::error::{PackError, Result};
use crate::filter::Filter;
use crate::git::{self, Git};
use crate::model::{Layer, Place, WHITEOUT};
use crate::options::{Limits, Progress};
use crate::path::{components, escapes};
use crate::tar::{Ending, Entry, EntryKind, Piece, Reader, is_landmark};

const PREFIX: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Names of aufs' own, which no layer wants.
const AUFS: &[u8] = b".wh..wh.";
/// Files of up to one block are kept back until there are this many bytes of them, so that they
/// lie next to each other in the store too.
const KEEP_BACK: usize = 4 << 20;
const SMALL: u64 = 4096;

/// Reads an archive to its end into `layer`, below `start`.
pub(crate) struct TarSource<'a> {
    /// The layer to fill.
    pub layer: &'a mut Layer,
    /// Where contents go.
    pub writer: &'a mut LayerWriter,
    /// What is left out.
    pub filter: &'a Filter,
    /// Bounds.
    pub limits: Limits,
    /// Where the source's root goes.
    pub start: NodeId,
    /// Whether the archive's own root entry defines the directory that it goes to.
    pub defines_root: bool,
    /// Told of entries and bytes.
    pub progress: &'a dyn Progress,
    /// Takes note of contents.
    pub git: Option<&'a mut Git>,
    /// Small files whose contents are still to be stored, with their names.
    pub kept_back: Vec<(NodeId, Vec<u8>, Vec<u8>)>,
    /// Their bytes.
    pub kept_bytes: usize,
    /// Bytes of all files so far, holes included.
    pub apparent: u64,
    /// Whether the archive is one for lazy readers, whose own entries are no files.
    pub lazy: bool,
}

impl TarSource<'_> {
    /// See the type. How many entries the archive has.
    pub(crate) fn read<R: Read>(&mut self, reader: &mut Reader<R>) -> Result<u64> {
        let mut entries = 0;
        while let Some(entry) = reader.next_entry()? {
            entries += 1;
            if entries > self.limits.max_entries {
                return Err(PackError::Limit {
                    object: "the archive".to_owned(),
                    name: "max_entries",
                    limit: self.limits.max_entries,
                    unit: "entries",
                });
            }
            self.entry(entry, reader)?;
        }
        if self.filter.selects() {
            self.layer.prune(self.start)?;
        }
        self.flush()?;
        Ok(entries)
    }

    /// Takes out what a lazy reader does not show, where only the archive's end told that it is
    /// for one.
    pub(crate) fn close(&mut self, ending: &Ending) -> Result<()> {
        if self.lazy || !ending.is_lazy() {
            return Ok(());
        }
        let names: Vec<Vec<u8>> = self
            .layer
            .tree
            .children(self.start)
            .map(|(name, _)| name.to_vec())
            .filter(|name| is_landmark(name))
            .collect();
        for name in names {
            self.layer.clear(self.start, &name)?;
        }
        Ok(())
    }

    fn entry<R: Read>(&mut self, mut entry: Entry, reader: &mut Reader<R>) -> Result<()> {
        self.limits.check_path(&entry.path)?;
        if escapes(&entry.path) {
            let shown = crate::show(&entry.path);
            self.layer
                .warnings
                .add(format!("{shown} would leave the root: kept within it"));
        }
        let path = components(&entry.path).join(&b'/');
        self.progress.entry(&path);
        let name = components(&entry.path)
            .last()
            .map(|name| name.to_vec())
            .unwrap_or_default();
        if self.lazy && is_landmark(&path) {
            return Ok(());
        }
        let is_directory = entry.kind == EntryKind::Directory;
        // By its spelling and by where it comes to lie: `lib/x` is `usr/lib/x` where `lib` is a link.
        let landed = match self.filter.asks() {
            true => self.layer.landing(self.start, &entry.path),
            false => Vec::new(),
        };
        if self.filter.excludes(&path, is_directory) || self.filter.excludes(&landed, is_directory)
        {
            return Ok(());
        }
        if name.starts_with(PREFIX) {
            return self.mark(&entry, &path, &landed, &name);
        }
        let wanted = self.filter.includes(&path, is_directory)
            || self.filter.includes(&landed, is_directory);
        if !wanted && !is_directory {
            return Ok(());
        }
        let metadata = self.metadata(&mut entry)?;
        if is_directory {
            return self.directory(&entry, metadata, wanted);
        }
        let place = self.layer.place(self.start, &entry.path)?;
        let kind = match &entry.kind {
            EntryKind::HardLink => return self.hard_link(&place, &entry),
            EntryKind::Directory | EntryKind::File(_) => NodeKind::File(FileData::empty()),
            EntryKind::Symlink => NodeKind::Symlink(entry.link.clone()),
            EntryKind::Fifo => NodeKind::Fifo,
            EntryKind::BlockDevice => NodeKind::BlockDevice(rdev(&entry)),
            EntryKind::CharDevice if rdev(&entry) == WHITEOUT => {
                return self.drop_whiteout_device(&place, &entry);
            }
            EntryKind::CharDevice => NodeKind::CharDevice(rdev(&entry)),
        };
        let id = self.layer.add(&place, &entry.path, metadata, kind)?;
        if let EntryKind::File(pieces) = &entry.kind {
            self.contents(id, &name, entry.size, pieces.as_deref(), reader)?;
        }
        Ok(())
    }

    fn metadata(&mut self, entry: &mut Entry) -> Result<Metadata> {
        let mut xattrs = std::mem::take(&mut entry.xattrs);
        let acls = [
            (&b"system.posix_acl_access"[..], &entry.acls.0),
            (b"system.posix_acl_default", &entry.acls.1),
        ];
        for (name, text) in acls {
            let Some(text) = text else { continue };
            if xattrs.contains_key(name) {
                continue;
            }
            match crate::acl::from_text(text) {
                Ok(Some(value)) => {
                    xattrs.insert(name.to_vec(), value);
                }
                Ok(None) => {}
                Err(why) => {
                    let shown = crate::show(&entry.path);
                    self.layer
                        .warnings
                        .add(format!("dropped an ACL of {shown}: {why}"));
                }
            }
        }
        self.filter
            .xattrs
            .filter(&entry.path, &mut xattrs, &mut self.layer.warnings)?;
        let mut metadata = Metadata {
            mode: entry.mode,
            uid: entry.uid,
            gid: entry.gid,
            mtime: entry.mtime,
            xattrs,
        };
        let warnings = &mut self.layer.warnings;
        self.filter
            .owners
            .apply(&entry.path, &mut metadata, warnings)?;
        Ok(metadata)
    }

    fn directory(&mut self, entry: &Entry, metadata: Metadata, wanted: bool) -> Result<()> {
        match self.layer.place(self.start, &entry.path)? {
            Place::Root => self
                .layer
                .define_start(self.start, metadata, self.defines_root),
            place @ Place::Named { .. } => {
                let id = self.layer.add_directory(&place, metadata)?;
                if wanted && self.filter.selects() {
                    self.layer.keep(id);
                }
            }
        }
        Ok(())
    }

    /// A whiteout or an opaque mark; its type and content do not matter.
    fn mark(&mut self, entry: &Entry, path: &[u8], landed: &[u8], name: &[u8]) -> Result<()> {
        let hidden = name.strip_prefix(PREFIX).unwrap_or_default();
        if self.filter.selects() && !name.starts_with(AUFS) {
            // What it hides decides whether it is wanted.
            let wanted = [path, landed].iter().any(|path| {
                let parent = path.strip_suffix(name).unwrap_or_default();
                self.filter.includes(&[parent, hidden].concat(), false)
            });
            if !wanted {
                return Ok(());
            }
        }
        if self.layer.is_behind_file(self.start, path) {
            // Nothing can be there to hide. `umoci repack` writes such marks where a file takes a
            // directory's place.
            return Ok(());
        }
        let place = self.layer.place_in_passing(self.start, &entry.path)?;
        let Place::Named { parent, .. } = place else {
            return Ok(());
        };
        if name == OPAQUE {
            self.layer.add_opaque(parent);
            return Ok(());
        }
        if name.starts_with(AUFS) {
            self.layer
                .warnings
                .add(format!("left out {}: aufs' own", crate::show(&entry.path)));
            return Ok(());
        }
        match hidden {
            b"" | b"." | b".." => Err(PackError::unsupported(
                &entry.path,
                "it is a whiteout of nothing that can be",
            )),
            hidden => {
                self.layer.add_whiteout(parent, hidden.to_vec());
                Ok(())
            }
        }
    }

    fn hard_link(&mut self, place: &Place, entry: &Entry) -> Result<()> {
        self.limits.check_path(&entry.link)?;
        let target = match self.layer.place_in_passing(self.start, &entry.link)? {
            Place::Root => None,
            Place::Named { parent, name } => match self.layer.tree.child(parent, &name) {
                Some(target) => Some(target),
                None => (self.layer).copy_up(&Place::Named { parent, name }, place)?,
            },
        };
        let target = target.ok_or_else(|| {
            let why = format!(
                "it is a hard link to {}, which the archive does not have before it; if it is in a layer below, name that with --parent",
                crate::show(&entry.link)
            );
            PackError::unsupported(&entry.path, why)
        })?;
        self.layer.add_link(place, &entry.path, target)
    }

    /// A device that overlayfs would take for its own mark: it would hide what the layers below
    /// have of that name, or nothing at all.
    fn drop_whiteout_device(&mut self, place: &Place, entry: &Entry) -> Result<()> {
        let shown = crate::show(&entry.path);
        self.layer.warnings.add(format!(
            "dropped {shown}: a character device 0:0 would act as a whiteout"
        ));
        if let Place::Named { parent, name } = place {
            self.layer.clear(*parent, name)?;
        }
        Ok(())
    }

    fn contents<R: Read>(
        &mut self,
        id: NodeId,
        name: &[u8],
        size: u64,
        pieces: Option<&[Piece]>,
        reader: &mut Reader<R>,
    ) -> Result<()> {
        self.apparent = self.apparent.saturating_add(size);
        if self.apparent > self.limits.max_apparent {
            return Err(PackError::Limit {
                object: "the archive".to_owned(),
                name: "max_apparent",
                limit: self.limits.max_apparent,
                unit: "bytes, holes included",
            });
        }
        if size <= SMALL && pieces.is_none() {
            let mut bytes = Vec::with_capacity(usize::try_from(size).unwrap_or_default());
            reader
                .read_to_end(&mut bytes)
                .map_err(|error| reader.error(error))?;
            self.progress.bytes(size);
            self.kept_bytes += bytes.len();
            self.kept_back.push((id, bytes, name.to_vec()));
            if self.kept_bytes >= KEEP_BACK {
                self.flush()?;
            }
            return Ok(());
        }
        let mut bytes = Stored {
            reader,
            pieces,
            at: 0,
            size,
            progress: self.progress,
        };
        let git = self.git.as_deref_mut();
        let content = git::store(git, self.writer, name, &mut bytes, size)?;
        self.layer.set_content(id, content)
    }

    /// Stores what was kept back.
    fn flush(&mut self) -> Result<()> {
        self.kept_bytes = 0;
        for (id, bytes, name) in self.kept_back.drain(..) {
            let git = self.git.as_deref_mut();
            let content = git::store_small(git, self.writer, &name, &bytes)?;
            self.layer.set_content(id, content)?;
        }
        Ok(())
    }
}

fn rdev(entry: &Entry) -> Rdev {
    Rdev {
        major: entry.rdev.0,
        minor: entry.rdev.1,
    }
}

/// An entry's stored bytes, spread to where they belong in the file.
struct Stored<'a, R> {
    reader: &'a mut Reader<R>,
    /// Pieces still to come, the current one shortened by what was read; None for a dense file.
    pieces: Option<&'a [Piece]>,
    at: u64,
    size: u64,
    progress: &'a dyn Progress,
}

impl<R: Read> Bytes for Stored<'_, R> {
    fn next(&mut self, buffer: &mut [u8]) -> io::Result<Next> {
        let mut want = buffer.len() as u64;
        if let Some(pieces) = self.pieces {
            // Pieces that are behind us or empty.
            let done = pieces
                .iter()
                .take_while(|piece| piece.offset + piece.len <= self.at)
                .count();
            let pieces = pieces.get(done..).unwrap_or_default();
            self.pieces = Some(pieces);
            let start = pieces.first().map_or(self.size, |piece| piece.offset);
            if start > self.at {
                let hole = start - self.at;
                self.at = start;
                return Ok(Next::Hole(hole));
            }
            let Some(piece) = pieces.first() else {
                return Ok(Next::End);
            };
            want = want.min(piece.offset + piece.len - self.at);
        }
        let want = usize::try_from(want).unwrap_or(usize::MAX);
        match self
            .reader
            .read(buffer.get_mut(..want).unwrap_or_default())?
        {
            0 => Ok(Next::End),
            n => {
                self.at += n as u64;
                self.progress.bytes(n as u64);
                Ok(Next::Data(n))
            }
        }
    }
}
