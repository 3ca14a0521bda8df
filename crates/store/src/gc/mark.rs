//! What a store's references, channels, leases and layers use.
//!
//! In doubt an object is used. Where it cannot be told what something uses (a reference, a channel, a
//! lease, a manifest that cannot be read), everything counts as used; where it cannot be told in
//! which packs a layer lies, all packs do.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use serde::Serialize;

use super::lease::Leases;
use super::parallel;
use crate::blob::{BlobStore, ObjectInfo, Span};
use crate::digest::Digest;
use crate::error::{Result, StoreError};
use crate::format::locator::{MAX_LOCATOR_BYTES, Places};
use crate::key::Key;
use crate::layer::again::read_checked;
use crate::layer::{LayerStore, MAX_SMALL};
use crate::manifest::Manifest;

/// Why an object is kept. The first reason that is found counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Reason {
    /// A published version uses it.
    Reference,
    /// A channel names it.
    Channel,
    /// A layer that is kept was made on it.
    Parent,
    /// A node has it mounted.
    Lease,
    /// A writer that is at work claimed it.
    Writer,
    /// It belongs to the store itself: marker, leases, lists, indexes, objects of other kinds.
    Store,
    /// It was condemned and waits for the end of its grace period.
    Grace,
    /// It was condemned, its grace period is over, and something else keeps it from being deleted:
    /// a writer that began before, another collector.
    Waiting,
    /// It cannot be told whether something uses it.
    Unknown,
}

/// How much cannot be told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(super) enum Unknown {
    #[default]
    Nothing,
    /// Which packs are used.
    Packs,
    /// What is used at all.
    Everything,
}

/// A layer that is used.
#[derive(Debug)]
pub(super) struct UsedLayer {
    /// What to call it.
    pub(super) name: String,
    pub(super) manifest: Manifest,
}

/// What is used.
#[derive(Debug, Default)]
pub(super) struct Marks {
    pub(super) used: HashMap<Key, Reason>,
    pub(super) layers: BTreeMap<Digest, UsedLayer>,
    /// The layers by the identity of their content.
    contents: HashMap<Digest, Reason>,
    pub(super) unknown: Unknown,
    /// What could not be read, one line each.
    pub(super) problems: Vec<String>,
    /// The same, where it is an object of the store.
    pub(super) unreadable: Vec<Unreadable>,
    /// Manifests that layers or leases name and that are not in the store.
    pub(super) absent: BTreeSet<Digest>,
}

/// Something that could not be read.
#[derive(Debug)]
pub(super) struct Unreadable {
    /// What needs it.
    pub(super) name: String,
    pub(super) error: StoreError,
}

impl Marks {
    fn doubt(&mut self, unknown: Unknown, what: String) {
        self.unknown = self.unknown.max(unknown);
        self.problems.push(what);
    }

    fn unreadable(&mut self, unknown: Unknown, what: &str, name: &str, error: StoreError) {
        self.doubt(
            unknown,
            format!("it cannot be told {what} {name} uses: {error}"),
        );
        self.unreadable.push(Unreadable {
            name: name.to_owned(),
            error,
        });
    }

    /// Why the object is kept; `None`: nothing uses it.
    pub(super) fn reason(&self, key: &Key) -> Option<Reason> {
        if let Some(reason) = self.used.get(key) {
            return Some(*reason);
        }
        let text = key.as_str();
        let doubtful = match self.unknown {
            Unknown::Nothing => false,
            Unknown::Packs => text.starts_with("packs/") || text.starts_with("index/"),
            Unknown::Everything => true,
        };
        doubtful.then_some(Reason::Unknown)
    }

    /// Why a layer's content is kept, by its identity.
    pub(super) fn reason_of_content(&self, id: &Digest) -> Option<Reason> {
        self.contents.get(id).copied()
    }

    /// Packs that are used and that the store has although it does not list them: in a registry
    /// where a layer was copied to by its tag alone, they are found through the layer.
    pub(super) fn unlisted_packs(
        &self,
        store: &LayerStore,
        listed: &[ObjectInfo],
    ) -> Result<Vec<ObjectInfo>> {
        let listed: HashSet<&Key> = listed.iter().map(|object| &object.key).collect();
        let mut keys: Vec<&Key> = (self.used.keys())
            .filter(|key| key.as_str().starts_with("packs/") && !listed.contains(key))
            .collect();
        keys.sort_unstable();
        let sizes = parallel::map(&keys, |key| store.blobs().size(key));
        let mut found = Vec::new();
        for (key, size) in keys.into_iter().zip(sizes) {
            found.extend(size?.map(|size| ObjectInfo {
                key: key.clone(),
                size,
                modified: None,
            }));
        }
        Ok(found)
    }

    fn mark(&mut self, key: Key, reason: Reason) {
        self.used.entry(key).or_insert(reason);
    }
}

/// Something that names manifests.
struct Root {
    name: String,
    reason: Reason,
    manifests: Result<Vec<Digest>>,
}

/// Marks what is used.
///
/// # Errors
/// If references or channels cannot be listed.
pub(super) fn mark(store: &LayerStore, leases: &Leases) -> Result<Marks> {
    let blobs = store.blobs();
    let mut marks = Marks::default();
    for (key, why) in &leases.unknown {
        marks.doubt(
            Unknown::Everything,
            format!("it cannot be told what {key} keeps: {why}"),
        );
    }
    let mut roots: Vec<Root> = Vec::new();
    for object in blobs.list("refs/")? {
        match object.key.to_reference() {
            Some(reference) => roots.push(Root {
                name: reference.to_string(),
                reason: Reason::Reference,
                manifests: store
                    .read_ref(&reference)
                    .map(|digest| digest.into_iter().collect()),
            }),
            None => marks.doubt(
                Unknown::Everything,
                format!("object {} is no reference of this version", object.key),
            ),
        }
    }
    let channels = blobs.list("channels/")?;
    roots.extend(parallel::map(&channels, |object| Root {
        name: object.key.to_string(),
        reason: Reason::Channel,
        manifests: named_in(&**blobs, &object.key),
    }));
    for (key, lease) in &leases.live {
        roots.push(Root {
            name: key.to_string(),
            reason: Reason::Lease,
            manifests: Ok(lease.manifests.iter().copied().collect()),
        });
        for claim in &lease.claims {
            if let Ok(key) = Key::new(claim) {
                marks.mark(key, Reason::Writer);
            }
        }
    }
    let mut wave: Vec<(Digest, Reason, String)> = Vec::new();
    for root in roots {
        match root.manifests {
            Ok(digests) => {
                wave.extend(
                    digests
                        .into_iter()
                        .map(|d| (d, root.reason, root.name.clone())),
                );
            }
            Err(error) => marks.unreadable(Unknown::Everything, "what", &root.name, error),
        }
    }
    let mut seen = BTreeSet::new();
    while !wave.is_empty() {
        wave.retain(|(digest, _, _)| seen.insert(*digest));
        wave = mark_layers(store, &mut marks, &wave);
    }
    Ok(marks)
}

/// Digests that a channel names.
fn named_in(blobs: &dyn BlobStore, key: &Key) -> Result<Vec<Digest>> {
    #[derive(serde::Deserialize)]
    struct Named {
        manifest: Option<Digest>,
    }
    let whole = Span::Whole { max_len: MAX_SMALL };
    let named = read_checked(blobs, key, &whole, &mut |bytes| {
        serde_json::from_slice::<Named>(bytes).map_err(|e| StoreError::Corrupt {
            store: blobs.url(),
            key: key.to_string(),
            range: None,
            what: e.to_string(),
        })
    })?;
    // Nothing: removed meanwhile.
    Ok(named.and_then(|named| named.manifest).into_iter().collect())
}

/// Marks these layers; their parents are the answer.
fn mark_layers(
    store: &LayerStore,
    marks: &mut Marks,
    wave: &[(Digest, Reason, String)],
) -> Vec<(Digest, Reason, String)> {
    type Found = Result<(Manifest, Result<Places>)>;
    let found: Vec<Found> = parallel::map(wave, |(digest, _, _)| {
        let manifest = store.manifest(digest)?;
        let places = places_of(store, &manifest);
        Ok((manifest, places))
    });
    let mut parents = Vec::new();
    for ((digest, reason, name), found) in wave.iter().zip(found) {
        marks.mark(Key::manifest(digest), *reason);
        let (manifest, places) = match found {
            Ok(found) => found,
            // A parent that is gone, or a lease's layer whose reference was removed long ago, uses
            // nothing that could still be read.
            Err(StoreError::Missing { key, .. })
                if matches!(reason, Reason::Parent | Reason::Lease) =>
            {
                marks
                    .problems
                    .push(format!("{name} names {key}, which is not in the store"));
                marks.absent.insert(*digest);
                continue;
            }
            Err(error) => {
                marks.unreadable(Unknown::Everything, "what", name, error);
                continue;
            }
        };
        for key in [
            Key::meta(&manifest.meta.digest),
            Key::map(&manifest.map.digest),
            Key::locator(&manifest.map.digest),
        ] {
            marks.mark(key, *reason);
        }
        match places {
            Ok(places) => {
                for pack in &places.packs {
                    marks.mark(Key::pack(&pack.id), *reason);
                }
            }
            Err(error) => marks.unreadable(Unknown::Packs, "which packs", name, error),
        }
        let content = *manifest.layer_id().digest();
        marks.contents.entry(content).or_insert(*reason);
        for parent in &manifest.parents {
            let called = parent.reference.as_ref().map_or_else(
                || format!("parent of {name}"),
                |reference| reference.to_string(),
            );
            parents.push((parent.manifest, Reason::Parent, called));
        }
        marks.layers.insert(
            *digest,
            UsedLayer {
                name: name.clone(),
                manifest,
            },
        );
    }
    parents
}

/// The packs and frames that a layer's locator names.
pub(super) fn places_of(store: &LayerStore, manifest: &Manifest) -> Result<Places> {
    let key = Key::locator(&manifest.map.digest);
    store.need_checked(&key, MAX_LOCATOR_BYTES, &mut |bytes| {
        Places::parse(bytes, &manifest.map.digest).map_err(|e| store.bad(&key, &e))
    })
}
