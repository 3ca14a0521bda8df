//! Packing into a store in memory and reading layers back without a kernel.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use layerpack_erofs::{FileType, Image, Inode};
use layerpack_fixtures::ScratchDir;
use layerpack_packer::{BuildOptions, BuildReport, PackError, Silent, Source, build};
use layerpack_store::{Digest, LayerMap, LayerStore, Locator, Manifest, MemStore};

/// An empty store in memory.
pub fn memory_store() -> LayerStore {
    LayerStore::new(Arc::new(MemStore::new()))
}

/// A published layer with all its parts.
pub struct Packed {
    pub store: LayerStore,
    pub digest: Digest,
    pub manifest: Manifest,
    pub meta: Vec<u8>,
    pub map: LayerMap,
    pub locator: Locator,
    pub warnings: Vec<String>,
}

impl Packed {
    pub fn load(store: &LayerStore, digest: Digest, warnings: Vec<String>) -> Self {
        let manifest = store.manifest(&digest).unwrap();
        let meta = store.meta(&manifest).unwrap();
        let map = store.map(&manifest).unwrap();
        let locator = store.locator(&manifest, &map).unwrap();
        assert_eq!(layerpack_erofs::check(&meta), vec![]);
        Self {
            store: store.clone(),
            digest,
            manifest,
            meta,
            map,
            locator,
            warnings,
        }
    }

    /// Everything in the layer by path.
    pub fn tree(&self) -> Tree {
        let image = Image::open(&self.meta).unwrap();
        let mut nodes = BTreeMap::new();
        let mut todo = vec![(Vec::new(), image.root().unwrap())];
        while let Some((path, inode)) = todo.pop() {
            if inode.is_dir() {
                for entry in image.read_dir(&inode).unwrap() {
                    let entry = entry.unwrap();
                    let mut below = path.clone();
                    if !below.is_empty() {
                        below.push(b'/');
                    }
                    below.extend_from_slice(entry.name);
                    todo.push((below, image.inode(entry.nid).unwrap()));
                }
            }
            nodes.insert(path, self.node(&image, &inode));
        }
        let implicit = self.map.implicit_dirs().to_vec();
        Tree { nodes, implicit }
    }

    fn node(&self, image: &Image<'_>, inode: &Inode) -> Node {
        let mut node = Node {
            kind: inode.file_type,
            mode: inode.mode & 0o7777,
            uid: inode.uid,
            gid: inode.gid,
            mtime: (inode.mtime.sec, inode.mtime.nsec),
            nlink: inode.nlink,
            nid: inode.nid,
            size: inode.size,
            rdev: inode.rdev().map(|rdev| (rdev.major, rdev.minor)),
            xattrs: image.xattrs(inode).unwrap().into_iter().collect(),
            target: Vec::new(),
            pieces: Vec::new(),
        };
        match inode.file_type {
            FileType::Symlink => node.target = image.symlink(inode).unwrap().to_vec(),
            FileType::File => {
                for extent in image.layout(inode).unwrap() {
                    let extent = extent.unwrap();
                    let Some(place) = extent.place else { continue };
                    assert_eq!(place.device, 1);
                    let end = place.address + extent.len;
                    // What no extent of the map covers reads as zeros and takes no bytes.
                    for covered in &self.map.extents()[self.map.extents_in(place.address..end)] {
                        let from = covered.data_offset.max(place.address);
                        let to = covered.end().min(end);
                        let bytes = self
                            .store
                            .read_data(&self.map, &self.locator, from..to)
                            .unwrap();
                        node.pieces
                            .push((extent.offset + from - place.address, bytes));
                    }
                }
            }
            _ => {}
        }
        node
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    pub kind: FileType,
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    pub mtime: (i64, u32),
    pub nlink: u32,
    pub nid: u64,
    pub size: u64,
    pub rdev: Option<(u32, u32)>,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    pub target: Vec<u8>,
    /// Stored bytes with their offsets.
    pub pieces: Vec<(u64, Vec<u8>)>,
}

impl Node {
    /// The whole content; only for small files.
    pub fn content(&self) -> Vec<u8> {
        assert!(self.size < 64 << 20);
        let mut content = vec![0; self.size as usize];
        for (offset, bytes) in &self.pieces {
            content[*offset as usize..*offset as usize + bytes.len()].copy_from_slice(bytes);
        }
        content
    }

    pub fn stored(&self) -> u64 {
        self.pieces
            .iter()
            .map(|(_, bytes)| bytes.len() as u64)
            .sum()
    }
}

#[derive(Debug, Clone)]
pub struct Tree {
    pub nodes: BTreeMap<Vec<u8>, Node>,
    pub implicit: Vec<Vec<u8>>,
}

impl Tree {
    #[track_caller]
    pub fn get(&self, path: &str) -> &Node {
        self.nodes
            .get(path.as_bytes())
            .unwrap_or_else(|| panic!("no {path} in the layer"))
    }

    pub fn has(&self, path: &str) -> bool {
        self.nodes.contains_key(path.as_bytes())
    }

    pub fn paths(&self) -> Vec<String> {
        self.nodes
            .keys()
            .map(|path| String::from_utf8_lossy(path).into_owned())
            .collect()
    }

    pub fn is_whiteout(&self, path: &str) -> bool {
        self.nodes
            .get(path.as_bytes())
            .is_some_and(|node| node.rdev == Some((0, 0)) && node.kind == FileType::CharDevice)
    }

    #[track_caller]
    pub fn is_opaque(&self, path: &str) -> bool {
        self.get(path)
            .xattrs
            .get(&b"trusted.overlay.opaque"[..])
            .is_some_and(|value| value == b"y")
    }

    pub fn is_implicit(&self, path: &str) -> bool {
        self.implicit
            .iter()
            .any(|implicit| implicit == path.as_bytes())
    }

    /// Names that share an inode with `path`.
    pub fn links(&self, path: &str) -> Vec<String> {
        let nid = self.get(path).nid;
        let names = self.nodes.iter().filter(|(_, node)| node.nid == nid);
        names
            .map(|(path, _)| String::from_utf8_lossy(path).into_owned())
            .collect()
    }
}

pub fn options(reference: &str, source: Source) -> BuildOptions {
    BuildOptions::new(reference.parse().unwrap(), source)
}

/// Builds into `store` and reads the layer back.
pub fn try_pack(store: &LayerStore, options: &BuildOptions) -> Result<Packed, PackError> {
    let BuildReport {
        published,
        warnings,
        ..
    } = build(store, options, &Silent)?;
    Ok(Packed::load(store, published.digest, warnings))
}

/// Writes an archive to a file.
pub struct ArchiveFile {
    _scratch: ScratchDir,
    pub path: PathBuf,
}

impl ArchiveFile {
    pub fn new(bytes: impl AsRef<[u8]>) -> Self {
        let scratch = ScratchDir::new("archive").unwrap();
        let path = scratch.write("archive", bytes).unwrap();
        Self {
            _scratch: scratch,
            path,
        }
    }

    pub fn source(&self) -> Source {
        Source::Tar(self.path.clone())
    }
}

/// Packs an archive, twice: it is the same layer if its entries are set aside until all of its
/// contents are stored, as those of large ones are.
pub fn try_tar(reference: &str, bytes: impl AsRef<[u8]>) -> Result<Packed, PackError> {
    let file = ArchiveFile::new(bytes);
    let mut options = options(reference, file.source());
    let packed = try_pack(&memory_store(), &options)?;
    let cache = ScratchDir::new("aside").unwrap();
    options.cache = Some(cache.path().to_owned());
    options.aside_after = 0;
    let aside = try_pack(&memory_store(), &options)?;
    assert_eq!(packed.digest, aside.digest, "another layer");
    let sorted = |packed: &Packed| {
        let mut lines = packed.warnings.clone();
        lines.sort();
        lines
    };
    assert_eq!(sorted(&packed), sorted(&aside));
    Ok(packed)
}

/// An archive as a base.
#[track_caller]
pub fn base(bytes: impl AsRef<[u8]>) -> Packed {
    try_tar("base/a:1", bytes).unwrap_or_else(|error| panic!("{}", chain(&error)))
}

/// An archive as a layer on top of others.
#[track_caller]
pub fn upper(bytes: impl AsRef<[u8]>) -> Packed {
    try_tar("toolkit/a:1", bytes).unwrap_or_else(|error| panic!("{}", chain(&error)))
}

pub fn try_dir(reference: &str, path: &Path) -> Result<Packed, PackError> {
    try_pack(
        &memory_store(),
        &options(reference, Source::Dir(path.to_owned())),
    )
}

/// An error's message with those of its sources.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(": ");
        text.push_str(&error.to_string());
        source = error.source();
    }
    text
}

/// The message of an archive's failure, which must have one.
#[track_caller]
pub fn refused(bytes: impl AsRef<[u8]>) -> String {
    match try_tar("base/a:1", bytes) {
        Err(error) => chain(&error),
        Ok(packed) => panic!("accepted: {:?}", packed.tree().paths()),
    }
}
