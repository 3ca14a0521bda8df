//! Directories that a layer contains without defining them, resolved for one stack.
//!
//! A workspace or toolkit is packed without knowing its base: `/usr/local/lib` is in it because
//! something below is. Its map lists such directories as **implicit**. overlayfs takes mode,
//! owner, times and xattrs of a merged directory from the topmost layer that has it, so an
//! implicit directory on top would hide what the layers below say of it (`/tmp` would lose its
//! sticky bit). This module looks each of them up in the stack as overlayfs would, takes the
//! metadata of the topmost layer that *defines* the directory, and puts them into a tree of
//! directories only, which the node mounts on top of the stack.
//!
//! Lookup follows overlayfs: a directory merges with those below it until something that is no
//! directory (a whiteout in either form is none) or an opaque directory ends the merge. At the
//! root overlayfs looks at no mark, but a layer with an opaque root means to replace all below:
//! [`hidden_below`] tells where to cut the stack.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::rc::Rc;

use layerpack_erofs::{Error, FileType, Image, Inode, Metadata, NodeKind, Tree};

const OPAQUE: &[u8] = b"trusted.overlay.opaque";
/// Marks of overlayfs itself, which say how layers merge and are nobody's metadata.
const OVERLAY_PREFIXES: [&[u8]; 2] = [b"trusted.overlay.", b"user.overlay."];

/// One layer of a stack: its metadata, and the paths in it that are implicit (from its map;
/// without leading `/`, empty for the root).
#[derive(Debug, Clone, Copy)]
pub struct Member<'a> {
    /// The layer's metadata image.
    pub image: &'a Image<'a>,
    /// Its implicit directories, sorted.
    pub implicit: &'a [Vec<u8>],
}

/// Number of layers at the bottom of `stack` (bottom first) that an opaque root above hides.
///
/// # Errors
/// When an image is damaged.
pub fn hidden_below(stack: &[&Image<'_>]) -> Result<usize, Error> {
    for (index, image) in stack.iter().enumerate().rev() {
        if hides_all(image)? {
            return Ok(index);
        }
    }
    Ok(0)
}

/// Whether nothing below this layer is shown: its root is opaque.
///
/// # Errors
/// When the image is damaged.
pub(crate) fn hides_all(image: &Image<'_>) -> Result<bool, Error> {
    Ok(opaque(image, &image.root()?)?.as_deref() == Some(b"y"))
}

/// The directories of `stack` (bottom first) whose metadata comes from a layer that does not
/// define them, with the metadata they should have, and all directories above them. `None` if
/// the stack needs no such tree.
///
/// # Errors
/// When an image is damaged.
pub fn resolve(stack: &[Member<'_>]) -> Result<Option<Tree>, Error> {
    let mut resolver = Resolver::new(stack)?;
    let paths: BTreeSet<&[u8]> = stack
        .iter()
        .flat_map(|member| member.implicit.iter().map(Vec::as_slice))
        .collect();
    let mut wanted: BTreeSet<Vec<u8>> = BTreeSet::new();
    for path in paths {
        let merged = resolver.merged(path)?;
        let Some(top) = merged.first() else {
            continue;
        };
        if !resolver.is_implicit(top.layer, path) {
            continue;
        }
        let shown = metadata(top.image, &top.inode)?;
        if resolver.effective(path)?.is_some_and(|m| m != shown) {
            wanted.insert(path.to_vec());
        }
    }
    if wanted.is_empty() {
        return Ok(None);
    }
    let root = resolver.effective(b"")?.unwrap_or_default_directory();
    let mut tree = Tree::new(root);
    for path in &wanted {
        let mut at = tree.root();
        let mut so_far: Vec<u8> = Vec::with_capacity(path.len());
        for name in components(path) {
            if !so_far.is_empty() {
                so_far.push(b'/');
            }
            so_far.extend_from_slice(name);
            at = match tree.child(at, name) {
                Some(child) => child,
                None => {
                    let metadata = resolver.effective(&so_far)?.unwrap_or_default_directory();
                    tree.insert(at, name, metadata, NodeKind::Directory)?
                }
            };
        }
    }
    Ok(Some(tree))
}

/// What a directory is when no layer says anything of it. Only reached for paths that exist in
/// no layer, which [`resolve`] does not ask for.
trait OrDefault {
    fn unwrap_or_default_directory(self) -> Metadata;
}

impl OrDefault for Option<Metadata> {
    fn unwrap_or_default_directory(self) -> Metadata {
        self.unwrap_or_else(|| Metadata {
            mode: 0o755,
            ..Metadata::default()
        })
    }
}

fn components(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    path.split(|b| *b == b'/').filter(|name| !name.is_empty())
}

fn metadata(image: &Image<'_>, inode: &Inode) -> Result<Metadata, Error> {
    let xattrs = image
        .xattrs(inode)?
        .into_iter()
        .filter(|(name, _)| !OVERLAY_PREFIXES.iter().any(|p| name.starts_with(p)))
        .collect();
    Ok(Metadata {
        mode: inode.mode & 0o7777,
        uid: inode.uid,
        gid: inode.gid,
        mtime: inode.mtime,
        xattrs,
    })
}

fn xattr(image: &Image<'_>, inode: &Inode, wanted: &[u8]) -> Result<Option<Vec<u8>>, Error> {
    Ok(image
        .xattrs(inode)?
        .into_iter()
        .find(|(name, _)| name == wanted)
        .map(|(_, value)| value))
}

fn opaque(image: &Image<'_>, directory: &Inode) -> Result<Option<Vec<u8>>, Error> {
    xattr(image, directory, OPAQUE)
}

/// What one layer says of a name in a directory that it has.
enum Found {
    Nothing,
    /// Hides what is below, and is no directory itself.
    End,
    Directory(Inode),
}

/// A directory of one layer.
struct Part<'a> {
    layer: usize,
    image: &'a Image<'a>,
    inode: Inode,
}

/// The directories that merge at a path, topmost first.
type Merged<'a> = Rc<Vec<Part<'a>>>;

struct Resolver<'a> {
    implicit: Vec<HashSet<&'a [u8]>>,
    merged: BTreeMap<Vec<u8>, Merged<'a>>,
}

impl<'a> Resolver<'a> {
    fn new(stack: &'a [Member<'a>]) -> Result<Self, Error> {
        let mut roots = Vec::with_capacity(stack.len());
        for (index, member) in stack.iter().enumerate().rev() {
            let inode = member.image.root()?;
            roots.push(Part {
                layer: index,
                image: member.image,
                inode,
            });
            if opaque(member.image, &inode)?.as_deref() == Some(b"y") {
                break;
            }
        }
        let implicit = stack
            .iter()
            .map(|m| m.implicit.iter().map(Vec::as_slice).collect())
            .collect();
        Ok(Self {
            implicit,
            merged: BTreeMap::from([(Vec::new(), Rc::new(roots))]),
        })
    }

    fn is_implicit(&self, layer: usize, path: &[u8]) -> bool {
        self.implicit
            .get(layer)
            .is_some_and(|paths| paths.contains(path))
    }

    /// Metadata of the topmost layer that defines the directory, else of the topmost that has
    /// it; `None` if the stack shows no directory there.
    fn effective(&mut self, path: &[u8]) -> Result<Option<Metadata>, Error> {
        let merged = self.merged(path)?;
        let defined = merged
            .iter()
            .find(|part| !self.is_implicit(part.layer, path))
            .or(merged.first());
        defined
            .map(|part| metadata(part.image, &part.inode))
            .transpose()
    }

    /// Directories that merge at `path`; empty if the stack shows none there.
    fn merged(&mut self, path: &[u8]) -> Result<Merged<'a>, Error> {
        if let Some(found) = self.merged.get(path) {
            return Ok(Rc::clone(found));
        }
        let mut at = self
            .merged
            .get(&[] as &[u8])
            .map(Rc::clone)
            .unwrap_or_default();
        let mut so_far: Vec<u8> = Vec::with_capacity(path.len());
        for name in components(path) {
            if !so_far.is_empty() {
                so_far.push(b'/');
            }
            so_far.extend_from_slice(name);
            at = match self.merged.get(&so_far) {
                Some(found) => Rc::clone(found),
                None => {
                    let found = Rc::new(step(&at, name)?);
                    self.merged.insert(so_far.clone(), Rc::clone(&found));
                    found
                }
            };
        }
        Ok(at)
    }
}

/// Looks `name` up in merged directories.
fn step<'a>(parents: &[Part<'a>], name: &[u8]) -> Result<Vec<Part<'a>>, Error> {
    let mut merged = Vec::new();
    for parent in parents {
        let image = parent.image;
        match look(image, &parent.inode, name)? {
            Found::Nothing => {}
            Found::End => break,
            Found::Directory(inode) => {
                let ends = opaque(image, &inode)?.as_deref() == Some(b"y");
                merged.push(Part {
                    layer: parent.layer,
                    image,
                    inode,
                });
                if ends {
                    break;
                }
            }
        }
    }
    Ok(merged)
}

fn look(image: &Image<'_>, parent: &Inode, name: &[u8]) -> Result<Found, Error> {
    let Some(entry) = image.lookup(parent, name)? else {
        return Ok(Found::Nothing);
    };
    let inode = image.inode(entry.nid)?;
    Ok(if inode.file_type == FileType::Directory {
        Found::Directory(inode)
    } else {
        Found::End
    })
}
