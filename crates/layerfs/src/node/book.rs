//! Leases in memory: who holds which stack, and how often each layer is held.
//!
//! A node has many leases of fewer stacks, each of up to hundreds of layers. So leases of the same
//! stack share what they say of it, a layer's directory is named by the layer, and counts tell
//! whether a layer is held: nothing here is looked through layer by layer for every lease, and
//! memory grows with different stacks.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use layerpack_store::{Digest, LayerId};

use super::lease::{Life, Record};
use super::types::{LeaseInfo, LeaseSpec, Stack};

/// What leases of one stack have in common.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Body {
    store: String,
    manifests: Box<[Digest]>,
    layers: Box<[LayerId]>,
    lowers: Box<[Lower]>,
}

/// A directory that was given out.
#[derive(Debug, PartialEq, Eq, Hash)]
enum Lower {
    /// The mount of the layer at this place of the stack.
    Layer(u32),
    /// Another: a generated layer.
    Other(Box<Path>),
}

impl Body {
    /// Layers, each once.
    fn unique(&self) -> BTreeSet<LayerId> {
        self.layers.iter().copied().collect()
    }

    fn others(&self) -> impl Iterator<Item = &Path> {
        self.lowers.iter().filter_map(|lower| match lower {
            Lower::Layer(_) => None,
            Lower::Other(path) => Some(&**path),
        })
    }
}

#[derive(Debug)]
struct Held {
    spec: LeaseSpec,
    life: Life,
    lost: bool,
    body: Arc<Body>,
}

/// The leases of a node.
#[derive(Debug)]
pub(super) struct Book {
    /// Where layers are mounted, by their names.
    layers_dir: PathBuf,
    by_id: BTreeMap<String, Held>,
    bodies: HashSet<Arc<Body>>,
    /// Leases that hold a layer.
    layers: HashMap<LayerId, usize>,
    /// Leases that were given a directory that is no layer's.
    others: HashMap<PathBuf, usize>,
}

impl Book {
    pub(super) fn new(layers_dir: PathBuf) -> Self {
        Self {
            layers_dir,
            by_id: BTreeMap::new(),
            bodies: HashSet::new(),
            layers: HashMap::new(),
            others: HashMap::new(),
        }
    }

    /// Enters a lease, in the place of one of the same name.
    pub(super) fn insert(&mut self, record: Record) {
        let (life, info) = record.into_parts();
        let LeaseInfo {
            spec,
            manifests,
            store,
            stack,
            lost,
        } = info;
        let places: HashMap<PathBuf, u32> = (0_u32..)
            .zip(&stack.layers)
            .map(|(place, layer)| (self.layers_dir.join(layer.hex()), place))
            .collect();
        let lowers = stack
            .lowers
            .into_iter()
            .map(|path| match places.get(&path) {
                Some(place) => Lower::Layer(*place),
                None => Lower::Other(path.into_boxed_path()),
            })
            .collect();
        let body = self.shared(Body {
            store,
            manifests: manifests.into_boxed_slice(),
            layers: stack.layers.into_boxed_slice(),
            lowers,
        });
        for layer in body.unique() {
            *self.layers.entry(layer).or_default() += 1;
        }
        for path in body.others() {
            *self.others.entry(path.to_owned()).or_default() += 1;
        }
        let id = spec.id.clone();
        let held = Held {
            spec,
            life,
            lost,
            body,
        };
        // The new one is counted before the old one is not.
        if let Some(before) = self.by_id.insert(id, held) {
            self.forget(before.body);
        }
    }

    fn shared(&mut self, body: Body) -> Arc<Body> {
        if let Some(known) = self.bodies.get(&body) {
            return Arc::clone(known);
        }
        let body = Arc::new(body);
        self.bodies.insert(Arc::clone(&body));
        body
    }

    /// Takes a body out of the counts. Returns the layers that no lease holds any more.
    fn forget(&mut self, body: Arc<Body>) -> Vec<LayerId> {
        let mut free = Vec::new();
        for layer in body.unique() {
            if let Some(count) = self.layers.get_mut(&layer) {
                *count -= 1;
                if *count == 0 {
                    self.layers.remove(&layer);
                    free.push(layer);
                }
            }
        }
        for path in body.others() {
            if let Some(count) = self.others.get_mut(path) {
                *count -= 1;
                if *count == 0 {
                    self.others.remove(path);
                }
            }
        }
        // Ours and the table's.
        if Arc::strong_count(&body) == 2 {
            self.bodies.remove(&body);
        }
        free
    }

    /// Strikes a lease out. Returns the layers that no lease holds any more; `None` if there was
    /// no such lease.
    pub(super) fn remove(&mut self, id: &str) -> Option<Vec<LayerId>> {
        let held = self.by_id.remove(id)?;
        Some(self.forget(held.body))
    }

    pub(super) fn contains(&self, id: &str) -> bool {
        self.by_id.contains_key(id)
    }

    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    /// The lease of that name.
    pub(super) fn get(&self, id: &str) -> Option<LeaseInfo> {
        self.by_id.get(id).map(|held| self.info(held))
    }

    fn info(&self, held: &Held) -> LeaseInfo {
        let body = &held.body;
        let lowers = body.lowers.iter().filter_map(|lower| match lower {
            Lower::Layer(place) => {
                let layer = body.layers.get(usize::try_from(*place).ok()?)?;
                Some(self.layers_dir.join(layer.hex()))
            }
            Lower::Other(path) => Some(path.to_path_buf()),
        });
        LeaseInfo {
            spec: held.spec.clone(),
            manifests: body.manifests.to_vec(),
            store: body.store.clone(),
            stack: Stack {
                lowers: lowers.collect(),
                lease: held.spec.id.clone(),
                layers: body.layers.to_vec(),
            },
            lost: held.lost,
        }
    }

    /// How many leases are lost.
    pub(super) fn lost(&self) -> usize {
        self.by_id.values().filter(|held| held.lost).count()
    }

    /// The lease as it is stored.
    pub(super) fn record(&self, id: &str) -> Option<Record> {
        let held = self.by_id.get(id)?;
        Some(Record::from_parts(held.life.clone(), self.info(held)))
    }

    /// All leases, in order of their names.
    pub(super) fn infos(&self) -> Vec<LeaseInfo> {
        self.by_id.values().map(|held| self.info(held)).collect()
    }

    /// Leases of processes that are no more.
    pub(super) fn dead(&self, boot: &str) -> Vec<String> {
        self.by_id
            .iter()
            .filter(|(_, held)| held.spec.pid.is_some() && !held.life.is_alive(&held.spec, boot))
            .map(|(id, _)| id.clone())
            .collect()
    }

    /// How many leases hold a layer.
    pub(super) fn count(&self, layer: LayerId) -> usize {
        self.layers.get(&layer).copied().unwrap_or(0)
    }

    /// Whether some lease was given this directory of a generated layer.
    pub(super) fn holds(&self, path: &Path) -> bool {
        self.others.contains_key(path)
    }

    /// Adds what is leased to the manifests of each store.
    pub(super) fn by_store(&self, into: &mut BTreeMap<String, BTreeSet<Digest>>) {
        for body in &self.bodies {
            if !into.contains_key(&body.store) {
                into.insert(body.store.clone(), BTreeSet::new());
            }
            if let Some(of_store) = into.get_mut(&body.store) {
                of_store.extend(body.manifests.iter().copied());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(number: u8) -> LayerId {
        LayerId::from_digest(Digest::of(&[number]))
    }

    fn record(book: &Book, id: &str, layers: &[u8], other: Option<&str>) -> Record {
        let layers: Vec<LayerId> = layers.iter().map(|n| layer(*n)).collect();
        let mut lowers: Vec<PathBuf> = layers
            .iter()
            .rev()
            .map(|layer| book.layers_dir.join(layer.hex()))
            .collect();
        lowers.extend(other.map(PathBuf::from));
        let info = LeaseInfo {
            spec: LeaseSpec {
                id: id.to_owned(),
                owner: "test".to_owned(),
                pid: None,
            },
            manifests: layers.iter().map(|l| *l.digest()).collect(),
            store: "memory:".to_owned(),
            stack: Stack {
                lowers,
                lease: id.to_owned(),
                layers,
            },
            lost: false,
        };
        Record::new(info, "boot")
    }

    #[test]
    fn leases_of_a_stack_share_it_and_counts_follow() {
        let mut book = Book::new(PathBuf::from("/layers"));
        let one = record(&book, "one", &[1, 2, 1], Some("/stacks/x/mnt"));
        let info = one.info.clone();
        book.insert(one);
        assert_eq!(book.get("one"), Some(info.clone()));
        assert_eq!(book.record("one").map(|r| r.info), Some(info));
        let two = record(&book, "two", &[1, 2, 1], Some("/stacks/x/mnt"));
        book.insert(two);
        let three = record(&book, "three", &[2, 3], None);
        book.insert(three);
        assert_eq!(book.bodies.len(), 2);
        assert_eq!([1, 2, 3, 4].map(|n| book.count(layer(n))), [2, 3, 1, 0]);
        assert!(book.holds(Path::new("/stacks/x/mnt")));
        assert_eq!(book.infos().len(), 3);
        let mut stores = BTreeMap::new();
        book.by_store(&mut stores);
        assert_eq!(stores["memory:"].len(), 3);

        // The same name again, with another stack.
        let again = record(&book, "two", &[3], None);
        book.insert(again);
        assert_eq!([1, 2, 3].map(|n| book.count(layer(n))), [1, 2, 2]);
        assert_eq!(book.lost(), 0);
        let mut marked = book.record("one").unwrap();
        marked.info.lost = true;
        book.insert(marked);
        assert_eq!(book.lost(), 1);
        assert!(book.get("one").is_some_and(|info| info.lost));
        assert_eq!(book.remove("one"), Some(vec![layer(1)]));
        assert_eq!(book.lost(), 0);
        assert_eq!(book.remove("one"), None);
        assert!(!book.holds(Path::new("/stacks/x/mnt")));
        assert_eq!(book.len(), 2);
        book.remove("two");
        let mut last = book.remove("three").unwrap_or_default();
        last.sort();
        let mut expected = vec![layer(2), layer(3)];
        expected.sort();
        assert_eq!(last, expected);
        assert!(book.bodies.is_empty() && book.layers.is_empty() && book.others.is_empty());
    }
}
