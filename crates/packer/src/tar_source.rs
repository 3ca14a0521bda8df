//! Puts the entries of an archive into a layer, as OCI layers mean them.

mod aside;
mod hidden;
mod kept;
mod later;
mod shadow;

use std::collections::HashSet;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use layerpack_erofs::{FileData, Metadata, NodeId, NodeKind, Rdev};
use layerpack_store::LayerWriter;

use self::hidden::{Hidden, Out, check_of};
use self::kept::{KeptBack, Owner};
use self::later::Later;
use self::shadow::Shadow;
use crate::content::{Bytes, Content, Next};
use crate::error::{PackError, Result};
use crate::filter::Filter;
use crate::git::{self, Git};
use crate::model::{Layer, Place, Targets, WHITEOUT};
use crate::options::{Limits, Progress};
use crate::path::{components, escapes};
use crate::tar::{Ending, Entry, EntryKind, Piece, Reader, is_landmark};

pub(crate) use self::hidden::Links;

const PREFIX: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Names of aufs' own, which no layer wants.
const AUFS: &[u8] = b".wh..wh.";
/// Files of up to one block are kept back for a while.
const SMALL: u64 = 4096;

/// Reads an archive to its end into `layer`, below `start`: [`TarSource::read`], then, if it
/// [wants](TarSource::wants_again) that, [`TarSource::read_again`], then [`TarSource::finish`].
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
    /// Whether the archive is one for lazy readers, whose own entries are no files.
    pub lazy: bool,
    /// Whether the archive can be read a second time.
    pub twice: bool,
    /// Symbolic links that are not wanted themselves, of the archives so far.
    pub links: &'a mut Links,
    /// What is known so far.
    pub state: State,
}

/// What is known of an archive while it is read.
#[derive(Default)]
pub(crate) struct State {
    /// Small files whose contents are still to be stored.
    kept_back: KeptBack,
    /// Bytes of all files so far, holes included.
    apparent: u64,
    /// Entries so far.
    entries: u64,
    /// Entries that are put into the tree when all contents are stored.
    later: Option<Later>,
    /// Where entries are set aside, after how many.
    aside: Option<(PathBuf, u64)>,
    /// Symbolic links that are set aside, where patterns leave something out.
    shadow: Shadow,
    /// Whether what was set aside is being put into the tree.
    replaying: bool,
    hidden: Hidden,
}

impl State {
    /// Nothing so far. Entries after the first `after` ones may be set aside in the directory
    /// `scratch`; `None`: they are not.
    pub(crate) fn new(scratch: Option<&Path>, after: u64) -> Self {
        Self {
            aside: scratch.map(|scratch| (scratch.to_owned(), after)),
            ..Self::default()
        }
    }
}

/// Something to be put into the tree.
#[derive(Debug, PartialEq)]
struct Put {
    /// Its path as it stands in the archive.
    path: Vec<u8>,
    thing: Thing,
}

/// What is to be put into the tree.
#[derive(Debug, PartialEq)]
enum Thing {
    /// A whiteout or an opaque mark.
    Mark,
    /// `wanted`: not only on the way to something.
    Directory { metadata: Metadata, wanted: bool },
    /// Another name of what this path names.
    HardLink(Vec<u8>),
    /// A device that overlayfs would take for its own mark.
    WhiteoutDevice,
    /// Anything else.
    Node(Metadata, NodeKind),
}

impl Put {
    /// Whether contents belong to it.
    fn is_file(&self) -> bool {
        matches!(self.thing, Thing::Node(_, NodeKind::File(_)))
    }
}

impl TarSource<'_> {
    /// See the type. How many entries the archive has.
    pub(crate) fn read<R: Read>(&mut self, reader: &mut Reader<R>) -> Result<u64> {
        while let Some(entry) = reader.next_entry()? {
            self.state.entries += 1;
            if self.state.entries > self.limits.max_entries {
                return Err(PackError::Limit {
                    object: "the archive".to_owned(),
                    name: "max_entries",
                    limit: self.limits.max_entries,
                    unit: "entries",
                });
            }
            self.entry(entry, reader)?;
        }
        self.flush()?;
        if self.wants_again() {
            self.bring_back()?;
        }
        Ok(self.state.entries)
    }

    /// Whether the archive has to be read again: it has names of files whose other names, which had
    /// the contents, were left out.
    pub(crate) fn wants_again(&self) -> bool {
        self.state.hidden.wants()
    }

    /// Reads the archive again, for what [`TarSource::wants_again`] asks for.
    pub(crate) fn read_again<R: Read>(&mut self, reader: &mut Reader<R>) -> Result<()> {
        let wanted = self.state.hidden.take_wanted();
        let (mut number, mut found) = (0, 0);
        while let Some(mut entry) = reader.next_entry()? {
            number += 1;
            let Some((check, id)) = wanted.get(&number).copied() else {
                continue;
            };
            if check != check_of(&entry.path) {
                break;
            }
            found += 1;
            if self.layer.tree.node(id).nlink() == 0 {
                continue; // its last name was replaced
            }
            let metadata = self.metadata(&mut entry)?;
            let Some(kind) = kind_of(&entry) else {
                break;
            };
            if kind == NodeKind::CharDevice(WHITEOUT) {
                self.layer.warnings.add(whiteout_device(&entry.path));
                self.layer.take_out(&HashSet::from([id]))?;
                continue;
            }
            let node = self.layer.tree.node_mut(id);
            (node.metadata, node.kind) = (metadata, kind);
            if let EntryKind::File(pieces) = &entry.kind {
                let name = last_name(&entry.path);
                let owner = Owner::Node(id);
                self.contents(owner, &name, entry.size, pieces.as_deref(), reader)?;
            }
        }
        if found < wanted.len() {
            return Err(reader.damaged("it changed while it was read"));
        }
        self.flush()
    }

    /// Puts what was set aside into the tree, and takes out what is there for nothing. `last`: nothing
    /// else is stored after this archive.
    pub(crate) fn finish(&mut self, ending: &Ending, last: bool) -> Result<()> {
        self.state.kept_back = KeptBack::default();
        if self.state.later.is_some() {
            if last && self.git.is_none() {
                // No chunk comes any more. Finding them took memory.
                self.writer.close()?;
            }
            layerpack_sys::memory::trim();
            self.replay()?;
        }
        if self.filter.selects() {
            self.layer.prune(self.start)?;
        }
        self.close(ending)
    }

    /// Takes out what a lazy reader does not show, where only the archive's end told that it is
    /// for one.
    fn close(&mut self, ending: &Ending) -> Result<()> {
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

    /// Where an entry of this path comes to lie.
    fn landing(&self, path: &[u8]) -> Vec<u8> {
        let shadow = &self.state.shadow;
        let of_others = |path: &[u8]| self.links.target(path).or_else(|| shadow.target(path));
        let links: Option<&Targets<'_>> = match self.links.is_empty() && shadow.is_empty() {
            true => None,
            false => Some(&of_others),
        };
        self.layer.landing(self.start, path, links)
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
        let name = last_name(&entry.path);
        if self.lazy && is_landmark(&path) {
            return Ok(());
        }
        self.layer.tree.heed(); // entries that are left out are looked up too
        // By its spelling and by where it comes to lie: `lib/x` is `usr/lib/x` where `lib` is a link.
        let landed = self.filter.asks().then(|| self.landing(&entry.path));
        let wanted = match &landed {
            None => true,
            Some(landed) => match self.wanted(&entry, &path, landed, &name)? {
                Some(wanted) => wanted,
                None => return Ok(()),
            },
        };
        let thing = if name.starts_with(PREFIX) {
            Thing::Mark
        } else if entry.kind == EntryKind::HardLink {
            self.limits.check_path(&entry.link)?;
            Thing::HardLink(std::mem::take(&mut entry.link))
        } else {
            let metadata = self.metadata(&mut entry)?;
            match kind_of(&entry) {
                Some(NodeKind::CharDevice(WHITEOUT)) => Thing::WhiteoutDevice,
                Some(kind) => Thing::Node(metadata, kind),
                None => Thing::Directory { metadata, wanted },
            }
        };
        let put = Put {
            path: std::mem::take(&mut entry.path),
            thing,
        };
        let owner = match self.set_aside(&put, landed.as_deref())? {
            Some(later) => later.push(&put)?.map(Owner::Later),
            None => self.put(&put, landed.as_deref())?.map(Owner::Node),
        };
        if let Some(owner) = owner
            && let EntryKind::File(pieces) = &entry.kind
        {
            self.contents(owner, &name, entry.size, pieces.as_deref(), reader)?;
        }
        Ok(())
    }

    /// Whether patterns want an entry; `None`: it is left out. A directory that is not wanted may
    /// still lead to something that is.
    fn wanted(
        &mut self,
        entry: &Entry,
        path: &[u8],
        landed: &[u8],
        name: &[u8],
    ) -> Result<Option<bool>> {
        let is_directory = entry.kind == EntryKind::Directory;
        let is_mark = name.starts_with(PREFIX);
        let excluded =
            self.filter.excludes(path, is_directory) || self.filter.excludes(landed, is_directory);
        if is_mark {
            if excluded {
                return Ok(None);
            }
            if !name.starts_with(AUFS) {
                let parent = landed.strip_suffix(name).unwrap_or_default();
                let hidden = name.strip_prefix(PREFIX).unwrap_or_default();
                self.links.hide(&[parent, hidden].concat());
            } else if name == OPAQUE {
                self.links
                    .hide(landed.strip_suffix(name).unwrap_or_default());
            }
            let wanted = !self.filter.selects() || self.wants_mark(path, landed, name);
            return Ok(wanted.then_some(true));
        }
        let wanted =
            self.filter.includes(path, is_directory) || self.filter.includes(landed, is_directory);
        if !excluded && (wanted || is_directory) {
            self.links.replace(landed);
            self.state.hidden.replace(landed);
            return Ok(Some(wanted));
        }
        match &entry.kind {
            EntryKind::Symlink if !excluded => {
                self.links.add(landed.to_vec(), entry.link.clone());
            }
            _ => self.links.replace(landed),
        }
        let out = match &entry.kind {
            EntryKind::Directory => None,
            EntryKind::HardLink => {
                self.bring_back()?;
                let target = self.landing(&entry.link);
                self.state.hidden.at(&target).or_else(|| {
                    let id = self.layer.child_at(self.start, &target);
                    id.map(Out::Node)
                })
            }
            _ => Some(Out::Entry(self.state.entries, check_of(&entry.path))),
        };
        match out {
            Some(out) => self.state.hidden.add(landed, out),
            None => self.state.hidden.replace(landed),
        }
        Ok(None)
    }

    /// Whether what a mark hides is wanted.
    fn wants_mark(&self, path: &[u8], landed: &[u8], name: &[u8]) -> bool {
        let hidden = name.strip_prefix(PREFIX).unwrap_or_default();
        name.starts_with(AUFS)
            || [path, landed].iter().any(|path| {
                let parent = path.strip_suffix(name).unwrap_or_default();
                self.filter.includes(&[parent, hidden].concat(), false)
            })
    }

    /// Puts something into the tree; `landed` is where its path leads, where that was asked. The
    /// inode, if it is a file that contents belong to.
    fn put(&mut self, put: &Put, landed: Option<&[u8]>) -> Result<Option<NodeId>> {
        // The links on the way may not be in the tree.
        let path = match landed.filter(|_| !self.links.is_empty()) {
            Some(landed) => landed,
            None => put.path.as_slice(),
        };
        match &put.thing {
            Thing::Mark => self.mark(put, path)?,
            Thing::Directory { metadata, wanted } => {
                self.directory(path, metadata.clone(), *wanted)?;
            }
            Thing::HardLink(target) => {
                let place = self.layer.place(self.start, path)?;
                self.hard_link(&place, &put.path, target)?;
            }
            Thing::WhiteoutDevice => {
                let place = self.layer.place(self.start, path)?;
                self.drop_whiteout_device(&place, &put.path)?;
            }
            Thing::Node(metadata, kind) => {
                let place = self.layer.place(self.start, path)?;
                let (metadata, kind) = (metadata.clone(), kind.clone());
                let id = self.layer.add(&place, &put.path, metadata, kind)?;
                return Ok(put.is_file().then_some(id));
            }
        }
        Ok(None)
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
            // As Linux shows them all, whatever an archive says.
            mode: match entry.kind {
                EntryKind::Symlink => 0o777,
                _ => entry.mode,
            },
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

    fn directory(&mut self, path: &[u8], metadata: Metadata, wanted: bool) -> Result<()> {
        match self.layer.place(self.start, path)? {
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
    fn mark(&mut self, put: &Put, path: &[u8]) -> Result<()> {
        let name = last_name(path);
        let path = components(path).join(&b'/');
        if self.layer.is_behind_file(self.start, &path) {
            // Nothing can be there to hide. `umoci repack` writes such marks where a file takes a
            // directory's place.
            return Ok(());
        }
        let place = self.layer.place_in_passing(self.start, &path)?;
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
                .add(format!("left out {}: aufs' own", crate::show(&put.path)));
            return Ok(());
        }
        match name.strip_prefix(PREFIX).unwrap_or_default() {
            b"" | b"." | b".." => Err(PackError::unsupported(
                &put.path,
                "it is a whiteout of nothing that can be",
            )),
            hidden => {
                self.layer.add_whiteout(parent, hidden.to_vec());
                Ok(())
            }
        }
    }

    fn hard_link(&mut self, place: &Place, path: &[u8], link: &[u8]) -> Result<()> {
        let landed = match self.filter.asks() {
            true => Some(self.landing(link)),
            false => None,
        };
        // One that was set aside names nothing of the kind.
        let hidden = landed.as_deref().filter(|_| !self.state.replaying);
        if let Some(out) = hidden.and_then(|at| self.state.hidden.at(at)) {
            return self.link_to_hidden(place, path, link, out);
        }
        let link = match &landed {
            Some(landed) if !self.links.is_empty() => landed.as_slice(),
            _ => link,
        };
        let target = match self.layer.place_in_passing(self.start, link)? {
            Place::Root => None,
            Place::Named { parent, name } => match self.layer.tree.child(parent, &name) {
                Some(target) => Some(target),
                None => (self.layer).copy_up(&Place::Named { parent, name }, place)?,
            },
        };
        let target = target.ok_or_else(|| {
            let shown = crate::show(link);
            let left_out = |at: &[u8]| {
                self.filter.excludes(at, false) || !self.filter.includes(at, false)
            };
            let why = match landed.as_deref().is_some_and(left_out) {
                true => format!(
                    "it is a hard link to {shown}, which is left out of a layer below; leave out both or neither"
                ),
                false => format!(
                    "it is a hard link to {shown}, which the archive does not have before it; if it is in a layer below, name that with --parent"
                ),
            };
            PackError::unsupported(path, why)
        })?;
        self.layer.add_link(place, path, target)
    }

    /// A name of something whose other name is left out.
    fn link_to_hidden(&mut self, place: &Place, path: &[u8], link: &[u8], out: Out) -> Result<()> {
        let (number, check) = match out {
            Out::Node(id) => return self.layer.add_link(place, path, id),
            Out::Entry(number, check) => (number, check),
        };
        let known = self.state.hidden.stand_in(number);
        if let Some(id) = known.filter(|id| self.layer.tree.node(*id).nlink() > 0) {
            return self.layer.add_link(place, path, id);
        }
        if !self.twice {
            let why = format!(
                "it is a hard link to {}, which is left out, so the archive has to be read twice; have it in a file instead of a pipe, or leave out both",
                crate::show(link)
            );
            return Err(PackError::unsupported(path, why));
        }
        // What it is comes when the archive is read again.
        let kind = NodeKind::File(FileData::empty());
        let id = self.layer.add(place, path, Metadata::default(), kind)?;
        self.state.hidden.want(number, check, id);
        Ok(())
    }

    /// A device that overlayfs would take for its own mark: it would hide what the layers below
    /// have of that name, or nothing at all.
    fn drop_whiteout_device(&mut self, place: &Place, path: &[u8]) -> Result<()> {
        self.layer.warnings.add(whiteout_device(path));
        if let Place::Named { parent, name } = place {
            self.layer.clear(*parent, name)?;
        }
        Ok(())
    }

    fn contents<R: Read>(
        &mut self,
        owner: Owner,
        name: &[u8],
        size: u64,
        pieces: Option<&[Piece]>,
        reader: &mut Reader<R>,
    ) -> Result<()> {
        self.state.apparent = self.state.apparent.saturating_add(size);
        if self.state.apparent > self.limits.max_apparent {
            return Err(PackError::Limit {
                object: "the archive".to_owned(),
                name: "max_apparent",
                limit: self.limits.max_apparent,
                unit: "bytes, holes included",
            });
        }
        if size <= SMALL && pieces.is_none() {
            self.state.kept_back.push(owner, name, |bytes| {
                let read = reader.read_to_end(bytes);
                read.map_err(|error| reader.error(error))
            })?;
            self.progress.bytes(size);
            if self.state.kept_back.is_full() {
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
        let later = &mut self.state.later;
        set_content(self.layer, later, owner, content)
    }

    /// Stores what was kept back.
    fn flush(&mut self) -> Result<()> {
        let State {
            kept_back, later, ..
        } = &mut self.state;
        kept_back.drain(|owner, name, bytes| {
            let git = self.git.as_deref_mut();
            let content = git::store_small(git, self.writer, name, bytes)?;
            set_content(self.layer, later, owner, content)
        })
    }
}

fn set_content(
    layer: &mut Layer,
    later: &mut Option<Later>,
    owner: Owner,
    content: Content,
) -> Result<()> {
    match (owner, later) {
        (Owner::Node(id), _) => layer.set_content(id, content),
        (Owner::Later(file), Some(later)) => later.set_content(layer, file, content),
        (Owner::Later(_), None) => Ok(()), // they are there as long as its contents come
    }
}

fn whiteout_device(path: &[u8]) -> String {
    let shown = crate::show(path);
    format!("dropped {shown}: a character device 0:0 would act as a whiteout")
}

/// The last name of an entry's path.
fn last_name(path: &[u8]) -> Vec<u8> {
    components(path)
        .last()
        .map(|name| name.to_vec())
        .unwrap_or_default()
}

/// What an entry becomes in the tree: nothing of the kind for directories and hard links.
fn kind_of(entry: &Entry) -> Option<NodeKind> {
    Some(match &entry.kind {
        EntryKind::Directory | EntryKind::HardLink => return None,
        EntryKind::File(_) => NodeKind::File(FileData::empty()),
        EntryKind::Symlink => NodeKind::Symlink(entry.link.clone()),
        EntryKind::Fifo => NodeKind::Fifo,
        EntryKind::BlockDevice => NodeKind::BlockDevice(rdev(entry)),
        EntryKind::CharDevice => NodeKind::CharDevice(rdev(entry)),
    })
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
