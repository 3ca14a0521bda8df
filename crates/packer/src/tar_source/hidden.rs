//! What patterns left out of an archive, as far as what remains leads there.
//!
//! A path may lead through a symbolic link that is not wanted itself, and a hard link may be another
//! name of a file that is left out. Then that name is the file's, as in a directory; what it holds is
//! read when the archive is read again, since nobody wanted it when it came by.

use std::collections::{BTreeMap, HashMap};

use layerpack_erofs::NodeId;
use layerpack_store::Digest;

/// Symbolic links that are not wanted, of an archive or of the archives of an image. By where they
/// lie: which archive has them, and their targets.
#[derive(Debug, Default)]
pub(crate) struct Links {
    by_path: HashMap<Vec<u8>, (usize, Vec<u8>)>,
    /// Number of the archive at hand.
    archive: usize,
}

impl Links {
    pub(super) fn is_empty(&self) -> bool {
        self.by_path.is_empty()
    }

    pub(super) fn target(&self, path: &[u8]) -> Option<Vec<u8>> {
        self.by_path.get(path).map(|(_, target)| target.clone())
    }

    pub(super) fn add(&mut self, path: Vec<u8>, target: Vec<u8>) {
        self.by_path.insert(path, (self.archive, target));
    }

    /// Something else lies there now.
    pub(super) fn replace(&mut self, path: &[u8]) {
        self.by_path.remove(path);
    }

    /// A whiteout, or with nothing at its end an opaque mark: the archives below have nothing there.
    pub(super) fn hide(&mut self, path: &[u8]) {
        let archive = self.archive;
        self.by_path.retain(|link, (of, _)| {
            let inside = match path {
                b"" => true,
                path => link.strip_prefix(path).is_some_and(|rest| {
                    rest.is_empty() || rest.starts_with(b"/") || path.ends_with(b"/")
                }),
            };
            *of == archive || !inside
        });
    }

    /// Another archive follows, which lies on those so far.
    pub(crate) fn next_archive(&mut self) {
        self.archive += 1;
    }
}

/// Stands for a path: a million of them are no burden.
type Key = [u8; 16];

fn key(path: &[u8]) -> Key {
    let [key @ .., _, _, _, _, _, _, _, _, _, _, _, _, _, _, _, _] = *Digest::of(path).as_bytes();
    key
}

/// What a path that is left out was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Out {
    /// The archive's entry of this number, and what tells its name from others.
    Entry(u64, u32),
    /// Another name of something that is in the layer.
    Node(NodeId),
}

/// Everything but directories that one archive has and the layer does not.
#[derive(Debug, Default)]
pub(super) struct Hidden {
    by_path: HashMap<Key, Out>,
    /// Files of the layer whose metadata and contents are those of an entry that was left out, by its
    /// number.
    wanted: BTreeMap<u64, (u32, NodeId)>,
}

/// Tells names from each other, for what must be the same as before.
pub(super) fn check_of(name: &[u8]) -> u32 {
    let [a, b, c, d, ..] = *Digest::of(name).as_bytes();
    u32::from_le_bytes([a, b, c, d])
}

impl Hidden {
    /// Something is left out.
    pub(super) fn add(&mut self, landed: &[u8], out: Out) {
        self.by_path.insert(key(landed), out);
    }

    /// Something else lies there now.
    pub(super) fn replace(&mut self, landed: &[u8]) {
        self.by_path.remove(&key(landed));
    }

    /// What was left out there.
    pub(super) fn at(&self, landed: &[u8]) -> Option<Out> {
        self.by_path.get(&key(landed)).copied()
    }

    /// The file that stands for an entry that was left out.
    pub(super) fn stand_in(&self, number: u64) -> Option<NodeId> {
        self.wanted.get(&number).map(|(_, id)| *id)
    }

    /// From now on `id` stands for an entry that was left out.
    pub(super) fn want(&mut self, number: u64, check: u32, id: NodeId) {
        self.wanted.insert(number, (check, id));
    }

    /// All stand-ins with their entries' numbers, rising, and what tells their names from others.
    pub(super) fn take_wanted(&mut self) -> BTreeMap<u64, (u32, NodeId)> {
        std::mem::take(&mut self.wanted)
    }

    /// Whether the archive is to be read again.
    pub(super) fn wants(&self) -> bool {
        !self.wanted.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_hide_the_links_of_archives_below() {
        let mut links = Links::default();
        for path in ["a", "a/b", "ab", "c/d", "c/e/f"] {
            links.add(path.as_bytes().to_vec(), b"t".to_vec());
        }
        links.next_archive();
        links.add(b"a/own".to_vec(), b"t".to_vec());
        links.hide(b"a");
        links.hide(b"c/e/");
        let mut left: Vec<_> = links.by_path.keys().map(Vec::as_slice).collect();
        left.sort_unstable();
        assert_eq!(left, [&b"a/own"[..], b"ab", b"c/d"]);
        links.replace(b"ab");
        assert_eq!(links.target(b"ab"), None);
        links.hide(b"");
        assert_eq!(links.target(b"c/d"), None);
        assert_eq!(links.target(b"a/own"), Some(b"t".to_vec()));
    }
}
