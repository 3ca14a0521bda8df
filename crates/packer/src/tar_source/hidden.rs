//! What patterns left out of an archive, as far as what remains leads there.
//!
//! A path may lead through a symbolic link that is not wanted itself, and a hard link may be another
//! name of a file that is left out. Then that name is the file's, as in a directory; what it holds is
//! read when the archive is read again, since nobody wanted it when it came by.

use std::collections::{BTreeMap, HashMap};

use hashbrown::HashTable;
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
type Key = [u8; 12];

fn key(path: &[u8]) -> Key {
    let digest = Digest::of(path);
    digest.as_bytes().first_chunk().copied().unwrap_or_default()
}

/// Keys are uniform: any of their bytes make a hash.
fn hash(key: &Key) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = *key;
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

/// What a path that is left out was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Out {
    /// The archive's entry of this number, and what tells its name from others.
    Entry(u64, u32),
    /// Another name of something that is in the layer.
    Node(NodeId),
}

/// What was left out at a path, in 20 bytes.
#[derive(Debug, Clone, Copy)]
struct Slot {
    key: Key,
    /// Number of an entry; 0: it is a node, which the other number is.
    number: u32,
    check: u32,
}
const _: () = assert!(size_of::<Slot>() == 20);

impl Slot {
    fn new(key: Key, out: Out) -> Option<Self> {
        let (number, check) = match out {
            Out::Entry(number, check) => (
                u32::try_from(number).ok().filter(|number| *number > 0)?,
                check,
            ),
            Out::Node(id) => (0, u32::try_from(id.index()).ok()?),
        };
        Some(Self { key, number, check })
    }

    fn out(&self) -> Out {
        match self.number {
            0 => Out::Node(NodeId::from_index(self.check)),
            number => Out::Entry(number.into(), self.check),
        }
    }
}

/// Everything but directories that one archive has and the layer does not.
#[derive(Debug, Default)]
pub(super) struct Hidden {
    by_path: HashTable<Slot>,
    /// The same, where numbers do not fit the short form: of archives with billions of entries.
    others: HashMap<Key, Out>,
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
        self.replace(landed);
        let key = key(landed);
        match Slot::new(key, out) {
            Some(slot) => {
                let hash_of = |slot: &Slot| hash(&slot.key);
                self.by_path.insert_unique(hash(&key), slot, hash_of);
            }
            None => {
                self.others.insert(key, out);
            }
        }
    }

    /// Something else lies there now.
    pub(super) fn replace(&mut self, landed: &[u8]) {
        if self.by_path.is_empty() && self.others.is_empty() {
            return;
        }
        let key = key(landed);
        if let Ok(there) = self.by_path.find_entry(hash(&key), |slot| slot.key == key) {
            there.remove();
        }
        self.others.remove(&key);
    }

    /// What was left out there.
    pub(super) fn at(&self, landed: &[u8]) -> Option<Out> {
        let key = key(landed);
        let slot = self.by_path.find(hash(&key), |slot| slot.key == key);
        (slot.map(Slot::out)).or_else(|| self.others.get(&key).copied())
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

    #[test]
    fn what_is_left_out_is_known_by_its_path() {
        let mut hidden = Hidden::default();
        let far = 1 << 40;
        let outs = [
            Out::Entry(1, 0),
            Out::Entry(u32::MAX.into(), u32::MAX),
            Out::Node(NodeId::ROOT),
            Out::Node(NodeId::from_index(7)),
            Out::Entry(far, 3),
        ];
        for round in 0..outs.len() {
            let out = |i: usize| outs[(i + round) % outs.len()];
            for i in 0..2000 {
                hidden.add(format!("p{i}").as_bytes(), out(i));
            }
            for i in 0..2000 {
                assert_eq!(hidden.at(format!("p{i}").as_bytes()), Some(out(i)));
            }
        }
        assert_eq!(hidden.by_path.len() + hidden.others.len(), 2000);
        assert_eq!(hidden.others.len(), 400);
        for i in 0..1999 {
            hidden.replace(format!("p{i}").as_bytes());
            assert_eq!(hidden.at(format!("p{i}").as_bytes()), None);
        }
        assert!(hidden.at(b"p1999").is_some() && hidden.at(b"p").is_none());
    }
}
