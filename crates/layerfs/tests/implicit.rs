//! Implicit directories of stacks, without a kernel.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    reason = "tests"
)]

use std::collections::BTreeMap;

use layerpack_erofs::{
    FileData, Image, Metadata, NodeId, NodeKind, Rdev, Timestamp, Tree, WriteOptions, write_image,
};
use layerpack_layerfs::implicit::{Member, hidden_below, resolve};

/// A layer under construction: directories have mode and owner, implicit ones are remembered.
struct Layer {
    tree: Tree,
    implicit: Vec<Vec<u8>>,
}

fn metadata(mode: u16, uid: u32) -> Metadata {
    Metadata {
        mode,
        uid,
        gid: uid,
        mtime: Timestamp {
            sec: 1000 + i64::from(uid),
            nsec: 5,
        },
        xattrs: BTreeMap::new(),
    }
}

impl Layer {
    fn new() -> Self {
        Self {
            tree: Tree::new(metadata(0o755, 0)),
            implicit: vec![Vec::new()],
        }
    }

    fn explicit_root(mut self, mode: u16, uid: u32) -> Self {
        let root = self.tree.root();
        self.tree.node_mut(root).metadata = metadata(mode, uid);
        self.implicit.clear();
        self
    }

    fn parent(&mut self, path: &str) -> NodeId {
        let mut at = self.tree.root();
        let mut so_far = String::new();
        let parents = path.rsplit_once('/').map_or("", |(parents, _)| parents);
        for name in parents.split('/').filter(|n| !n.is_empty()) {
            so_far = if so_far.is_empty() {
                name.to_owned()
            } else {
                format!("{so_far}/{name}")
            };
            at = match self.tree.child(at, name.as_bytes()) {
                Some(child) => child,
                None => {
                    self.implicit.push(so_far.clone().into_bytes());
                    self.tree
                        .insert(at, name.as_bytes(), metadata(0o755, 0), NodeKind::Directory)
                        .unwrap()
                }
            };
        }
        at
    }

    fn node(mut self, path: &str, metadata: Metadata, kind: NodeKind) -> Self {
        let parent = self.parent(path);
        let name = path.rsplit('/').next().unwrap();
        self.tree
            .insert(parent, name.as_bytes(), metadata, kind)
            .unwrap();
        self
    }

    fn dir(self, path: &str, mode: u16, uid: u32) -> Self {
        self.node(path, metadata(mode, uid), NodeKind::Directory)
    }

    fn opaque(self, path: &str, mode: u16, uid: u32) -> Self {
        let mut opaque = metadata(mode, uid);
        opaque
            .xattrs
            .insert(b"trusted.overlay.opaque".to_vec(), b"y".to_vec());
        self.node(path, opaque, NodeKind::Directory)
    }

    fn file(self, path: &str) -> Self {
        self.node(path, metadata(0o644, 0), NodeKind::File(FileData::empty()))
    }

    fn whiteout(self, path: &str) -> Self {
        let device = Rdev { major: 0, minor: 0 };
        self.node(path, metadata(0, 0), NodeKind::CharDevice(device))
    }

    fn image(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        write_image(&self.tree, &WriteOptions::default(), &mut bytes).unwrap();
        bytes
    }
}

/// Path, mode and owner of everything in the generated tree; empty if there is none.
fn resolved(layers: &[Layer]) -> Vec<(String, u16, u32)> {
    let bytes: Vec<Vec<u8>> = layers.iter().map(Layer::image).collect();
    let images: Vec<Image<'_>> = bytes.iter().map(|b| Image::open(b).unwrap()).collect();
    let mut implicit: Vec<Vec<Vec<u8>>> = layers.iter().map(|l| l.implicit.clone()).collect();
    implicit.iter_mut().for_each(|paths| paths.sort());
    let members: Vec<Member<'_>> = images
        .iter()
        .zip(&implicit)
        .map(|(image, implicit)| Member { image, implicit })
        .collect();
    let Some(tree) = resolve(&members).unwrap() else {
        return Vec::new();
    };
    let shown = tree.walk().map(|entry| {
        let node = tree.node(entry.id);
        assert!(node.kind.is_dir());
        assert!(
            node.metadata
                .xattrs
                .keys()
                .all(|k| !k.starts_with(b"trusted.overlay."))
        );
        assert_eq!(node.metadata.mtime.sec, 1000 + i64::from(node.metadata.uid));
        let path = String::from_utf8(entry.path.clone()).unwrap();
        (path, node.metadata.mode, node.metadata.uid)
    });
    let mut shown: Vec<_> = shown.collect();
    shown.sort();
    shown
}

fn entry(path: &str, mode: u16, uid: u32) -> (String, u16, u32) {
    (path.to_owned(), mode, uid)
}

fn base() -> Layer {
    Layer::new()
        .explicit_root(0o750, 1)
        .dir("tmp", 0o1777, 2)
        .dir("usr", 0o711, 3)
        .dir("usr/lib", 0o2755, 4)
        .file("etc")
}

#[test]
fn the_topmost_definition_counts() {
    let upper = Layer::new().file("tmp/x").file("usr/lib/y");
    assert_eq!(
        resolved(&[base(), upper]),
        [
            entry("", 0o750, 1),
            entry("tmp", 0o1777, 2),
            entry("usr", 0o711, 3),
            entry("usr/lib", 0o2755, 4),
        ]
    );
    // A layer between them that defines one of the directories.
    let middle = Layer::new().dir("tmp", 0o700, 9);
    let upper = Layer::new().file("tmp/x");
    assert_eq!(
        resolved(&[base(), middle, upper]),
        [entry("", 0o750, 1), entry("tmp", 0o700, 9)]
    );
    // A layer above that defines it again: only what it leaves open is resolved.
    let middle = Layer::new().file("tmp/x").file("usr/lib/y");
    let upper = Layer::new().dir("tmp", 0o701, 8).dir("usr/lib", 0o702, 7);
    assert_eq!(
        resolved(&[base(), middle, upper]),
        [entry("", 0o750, 1), entry("usr", 0o711, 3)]
    );
}

#[test]
fn nothing_is_made_when_nothing_would_change() {
    assert_eq!(resolved(&[base()]), []);
    assert_eq!(resolved(&[Layer::new().file("a/b/c")]), []);
    let plain = Layer::new().explicit_root(0o755, 0).dir("a", 0o755, 0);
    assert_eq!(resolved(&[plain, Layer::new().file("a/x")]), []);
    // Directories that only implicit layers have stay as they are.
    let both = [Layer::new().file("a/x"), Layer::new().file("a/y")];
    assert_eq!(resolved(&both), []);
}

#[test]
fn what_hides_the_lower_directory_hides_its_metadata() {
    for hiding in [Layer::new().whiteout("tmp"), Layer::new().file("tmp")] {
        let upper = Layer::new().file("tmp/x");
        assert_eq!(resolved(&[base(), hiding, upper]), [entry("", 0o750, 1)]);
    }
    // An opaque directory defines itself, and ends the search of others below it.
    let opaque = Layer::new().opaque("usr", 0o705, 6);
    let upper = Layer::new().file("usr/lib/y");
    assert_eq!(
        resolved(&[base(), opaque, upper]),
        [entry("", 0o750, 1), entry("usr", 0o705, 6)]
    );
}

#[test]
fn what_is_hidden_on_top_does_not_come_back() {
    let middle = Layer::new().file("tmp/x").file("usr/lib/y");
    for hiding in [
        Layer::new().whiteout("tmp").whiteout("usr"),
        Layer::new().file("tmp").file("usr"),
    ] {
        let middle = Layer {
            tree: middle.tree.clone(),
            implicit: middle.implicit.clone(),
        };
        assert_eq!(resolved(&[base(), middle, hiding]), [entry("", 0o750, 1)]);
    }
}

#[test]
fn an_opaque_root_replaces_all_below() {
    let mut replacing = Layer::new().file("tmp/x");
    let root = replacing.tree.root();
    let xattrs = &mut replacing.tree.node_mut(root).metadata.xattrs;
    xattrs.insert(b"trusted.overlay.opaque".to_vec(), b"y".to_vec());
    let layers = [base(), base(), replacing, Layer::new().file("tmp/y")];
    assert_eq!(resolved(&layers), []);
    let bytes: Vec<Vec<u8>> = layers.iter().map(Layer::image).collect();
    let images: Vec<Image<'_>> = bytes.iter().map(|b| Image::open(b).unwrap()).collect();
    let refs: Vec<&Image<'_>> = images.iter().collect();
    assert_eq!(hidden_below(&refs).unwrap(), 2);
    assert_eq!(hidden_below(&refs[..2]).unwrap(), 0);
}

/// Any byte changed in a layer's metadata: an error or a tree, never a panic or a hang.
#[test]
fn damaged_metadata_is_no_panic() {
    let good =
        [base(), Layer::new().file("tmp/x").file("usr/lib/y")].map(|l| (l.image(), l.implicit));
    for layer in 0..2 {
        for at in (0..good[layer].0.len()).step_by(7) {
            let mut bytes = [good[0].0.clone(), good[1].0.clone()];
            bytes[layer][at] ^= 0x55;
            let images: Vec<_> = bytes.iter().map(|b| Image::open(b)).collect();
            let [Ok(lower), Ok(upper)] = &images[..] else {
                continue;
            };
            let members = [
                Member {
                    image: lower,
                    implicit: &good[0].1,
                },
                Member {
                    image: upper,
                    implicit: &good[1].1,
                },
            ];
            let _ = resolve(&members);
            let _ = hidden_below(&[lower, upper]);
        }
    }
}
