//! What a node has learnt: access profiles of its stacks in a directory of its own.
//!
//! ```text
//! DIR/STACK.all       everything learnt of a stack (LPPROF)
//! DIR/STACK.new       of this, what no store has yet
//! DIR/STACK.sending   what is being given to a store
//! ```
//!
//! Profiles are hints. What is damaged, or of other layers than its name says, is said in the log
//! and dropped.

use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use layerpack_store::profile::{MAX_PROFILE_BYTES, Profile};
use layerpack_store::{Digest, LayerId, LayerStore, StoreError};

use crate::error::{IoContext, LayerfsError, Result};
use crate::files;
use crate::sync::Mutex;

/// The name of profiles that nodes learnt, here and in stores.
pub const LEARNT: &str = "learned";

/// Stacks that are remembered; those learnt longest ago go first.
const MAX_STACKS: usize = 512;
/// Extents that a learnt profile has at most.
pub(crate) const MAX_EXTENTS: usize = 1 << 16;
/// Runs after which older ones begin to count less.
const MAX_RUNS: u32 = 32;
/// Runs from which on extents count that few of them read as not worth fetching.
const SURE: u32 = 4;

const ALL: &str = "all";
const NEW: &str = "new";
const SENDING: &str = "sending";

/// The profiles in one directory.
#[derive(Debug)]
pub(crate) struct Learnt {
    dir: PathBuf,
    /// Files are changed by one thread at a time.
    files: Mutex<()>,
    /// One at a time gives profiles to stores.
    publishing: Mutex<()>,
}

/// What came of giving a stack's profile to a store.
#[derive(Debug)]
pub(crate) enum Given {
    /// It is there, merged with what was there before.
    Stored(Digest, Profile),
    /// The store has all of it already.
    NothingNew,
}

impl Learnt {
    pub(crate) fn new(dir: PathBuf) -> Self {
        Self {
            dir,
            files: Mutex::new(()),
            publishing: Mutex::new(()),
        }
    }

    fn path(&self, stack: &Digest, kind: &str) -> PathBuf {
        self.dir.join(format!("{}.{kind}", stack.hex()))
    }

    /// A profile file, if it is there and of these layers (or of any). What cannot be used is
    /// removed.
    fn read(&self, path: &Path, layers: Option<&[LayerId]>) -> Option<Profile> {
        let len = fs_err::metadata(path).ok()?.len();
        let wrong = if len > MAX_PROFILE_BYTES {
            "it is too large".to_owned()
        } else {
            match fs_err::read(path).map(|bytes| Profile::parse(&bytes)) {
                Err(error) => error.to_string(),
                Ok(Err(error)) => error.to_string(),
                Ok(Ok(profile)) if layers.is_none_or(|l| ids(&profile) == l) => {
                    return Some(profile);
                }
                Ok(Ok(_)) => "it is of other layers".to_owned(),
            }
        };
        tracing::warn!(path = %path.display(), "a learnt profile is ignored: {wrong}");
        let _ = fs_err::remove_file(path);
        None
    }

    fn write(&self, path: &Path, profile: &Profile) -> Result<()> {
        let bytes = profile.to_bytes().map_err(StoreError::from)?;
        files::replace(&self.dir, path, &[&bytes], false)
    }

    /// What is known of a stack of these layers, bottom first.
    pub(crate) fn get(&self, stack: &Digest, layers: &[LayerId]) -> Option<Profile> {
        self.read(&self.path(stack, ALL), Some(layers))
    }

    /// Adds a run. A run is `whole` if all that it read was seen; what another one did not read
    /// says nothing.
    ///
    /// # Errors
    /// When the files cannot be written.
    pub(crate) fn add(&self, stack: &Digest, run: &Profile, whole: bool) -> Result<()> {
        let _files = self.files.lock();
        let layers = ids(run);
        for kind in [ALL, NEW] {
            let path = self.path(stack, kind);
            let known = self.read(&path, Some(&layers));
            let sum = match known {
                None => bounded(run.clone()),
                Some(known) => fold(&known, run, whole)?,
            };
            self.write(&path, &sum)?;
        }
        self.trim();
        Ok(())
    }

    /// Stacks of which something is known, with the time of the last change in seconds since 1970.
    pub(crate) fn list(&self) -> Vec<(Digest, Profile, u64)> {
        let mut found: Vec<_> = self
            .stacks()
            .into_iter()
            .filter_map(|(stack, at)| {
                let profile = self.read(&self.path(&stack, ALL), None)?;
                Some((stack, profile, at))
            })
            .collect();
        found.sort_by_key(|(stack, _, _)| *stack);
        found
    }

    /// How many stacks something is known of.
    pub(crate) fn count(&self) -> u64 {
        self.stacks().len() as u64
    }

    /// Runs that no store has yet.
    pub(crate) fn unpublished(&self, stack: &Digest) -> u32 {
        [NEW, SENDING]
            .iter()
            .filter_map(|kind| self.read(&self.path(stack, kind), None))
            .fold(0, |sum, p| sum.saturating_add(p.recordings))
    }

    fn stacks(&self) -> Vec<(Digest, u64)> {
        let mut stacks = Vec::new();
        for entry in fs_err::read_dir(&self.dir).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let stack = name
                .to_str()
                .and_then(|name| name.strip_suffix(&format!(".{ALL}")))
                .and_then(|hex| format!("b3:{hex}").parse::<Digest>().ok());
            let at = entry
                .metadata()
                .ok()
                .and_then(|m| m.modified().ok())
                .and_then(|at| at.duration_since(UNIX_EPOCH).ok())
                .map_or(0, |d| d.as_secs());
            stacks.extend(stack.map(|stack| (stack, at)));
        }
        stacks
    }

    fn trim(&self) {
        let mut stacks = self.stacks();
        if stacks.len() <= MAX_STACKS {
            return;
        }
        stacks.sort_by_key(|(_, at)| *at);
        let excess = stacks.len() - MAX_STACKS;
        for (stack, _) in stacks.into_iter().take(excess) {
            for kind in [ALL, NEW, SENDING] {
                let _ = fs_err::remove_file(self.path(&stack, kind));
            }
        }
    }

    /// Gives a store what it does not have of a stack's profile: merged with what nodes learnt
    /// before, which the merged one replaces.
    ///
    /// # Errors
    /// When the store cannot be read or written; it is kept for the next time.
    pub(crate) fn publish(
        &self,
        store: &LayerStore,
        stack: &Digest,
        layers: &[LayerId],
    ) -> Result<Given> {
        let _one = self.publishing.lock();
        let sending = self.take_new(stack, layers)?;
        let Some(all) = self.get(stack, layers) else {
            return Ok(Given::NothingNew);
        };
        let top = layers.last().ok_or_else(|| LayerfsError::Stack {
            what: "a stack needs at least one layer".to_owned(),
        })?;
        let before: Vec<(Digest, Profile)> = store
            .profiles(Some(top))?
            .into_iter()
            .filter_map(|stored| Some((stored.digest, stored.profile.ok()?)))
            .filter(|(_, profile)| profile.name == LEARNT && ids(profile) == layers)
            .collect();
        let mut parts: Vec<Profile> = before.iter().map(|(_, p)| p.clone()).collect();
        match (sending, parts.is_empty()) {
            // A store that has nothing gets everything.
            (_, true) => parts.push(all),
            (Some(new), false) => parts.push(new),
            (None, false) => return Ok(Given::NothingNew),
        }
        let merged = Profile::merge(LEARNT, &parts).map_err(StoreError::from)?;
        let merged = bounded(aged(merged));
        let digest = store.put_profile(&merged)?;
        let _files = self.files.lock();
        let _ = fs_err::remove_file(self.path(stack, SENDING));
        for (old, profile) in before.iter().filter(|(old, _)| *old != digest) {
            // One too many costs little.
            if let Err(error) = store.remove_profile(old, profile) {
                tracing::warn!(profile = %old, %error, "an older profile stays in the store");
            }
        }
        Ok(Given::Stored(digest, merged))
    }

    /// What is new, under a name that later runs leave alone; also what an earlier attempt left.
    fn take_new(&self, stack: &Digest, layers: &[LayerId]) -> Result<Option<Profile>> {
        let _files = self.files.lock();
        let (new, sending) = (self.path(stack, NEW), self.path(stack, SENDING));
        let parts: Vec<Profile> = [&sending, &new]
            .into_iter()
            .filter_map(|path| self.read(path, Some(layers)))
            .collect();
        if parts.is_empty() {
            return Ok(None);
        }
        let merged = Profile::merge(LEARNT, &parts).map_err(StoreError::from)?;
        self.write(&sending, &merged)?;
        match fs_err::remove_file(&new) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(e).at("remove", &new),
            _ => Ok(Some(merged)),
        }
    }
}

/// The layers of a profile's stack.
pub(crate) fn ids(profile: &Profile) -> Vec<LayerId> {
    profile.layers.iter().map(|l| l.layer).collect()
}

/// What is known with one run more.
fn fold(known: &Profile, run: &Profile, whole: bool) -> Result<Profile> {
    let both = [known.clone(), run.clone()];
    let mut sum = Profile::merge(LEARNT, &both).map_err(StoreError::from)?;
    if !whole {
        // It counts for what it read, and not against what it did not read.
        sum.recordings = known.recordings;
        for entry in &mut sum.entries {
            entry.count = entry.count.min(known.recordings);
        }
    }
    Ok(bounded(aged(sum)))
}

/// Older runs count half, so that what an environment no longer reads is forgotten.
fn aged(mut profile: Profile) -> Profile {
    while profile.recordings > MAX_RUNS {
        profile.recordings /= 2;
        for entry in &mut profile.entries {
            entry.count = (entry.count / 2).min(profile.recordings);
        }
        profile.entries.retain(|entry| entry.count > 0);
    }
    profile
}

/// At most [`MAX_EXTENTS`]: those that most runs read, of these the first.
fn bounded(mut profile: Profile) -> Profile {
    if profile.entries.len() > MAX_EXTENTS {
        profile
            .entries
            .sort_by_key(|e| (u32::MAX - e.count, e.rank, e.layer, e.extent));
        profile.entries.truncate(MAX_EXTENTS);
        profile
            .entries
            .sort_by_key(|e| (e.rank, u32::MAX - e.count, e.layer, e.extent));
    }
    profile
}

/// Whether an extent of a profile is worth fetching ahead: of what nodes learnt over several runs,
/// what at least one in four read.
pub(crate) fn is_worth(profile: &Profile, count: u32) -> bool {
    profile.name != LEARNT
        || profile.recordings < SURE
        || u64::from(count) * 4 >= u64::from(profile.recordings)
}

#[cfg(test)]
mod tests {
    use super::*;
    use layerpack_fixtures::ScratchDir;
    use layerpack_store::MemStore;
    use layerpack_store::profile::{ProfileEntry, ProfileLayer};
    use std::sync::Arc;

    fn layer(n: u8) -> ProfileLayer {
        ProfileLayer {
            layer: LayerId::from_digest(Digest::of(&[n])),
            manifest: Digest::of(&[n, n]),
        }
    }

    fn run(extents: &[u32]) -> Profile {
        Profile {
            name: LEARNT.to_owned(),
            layers: vec![layer(1), layer(2)],
            recordings: 1,
            entries: (0..)
                .zip(extents)
                .map(|(rank, extent)| ProfileEntry {
                    layer: 1,
                    extent: *extent,
                    len: 4096,
                    count: 1,
                    rank,
                    time_ms: rank,
                })
                .collect(),
        }
    }

    fn counts(profile: &Profile) -> Vec<(u32, u32)> {
        profile
            .entries
            .iter()
            .map(|e| (e.extent, e.count))
            .collect()
    }

    #[test]
    fn runs_are_merged_and_parts_do_not_count_against_others() {
        let scratch = ScratchDir::new("learnt").unwrap();
        let learnt = Learnt::new(scratch.path().to_owned());
        let stack = Digest::of(b"stack");
        let layers = ids(&run(&[]));
        assert!(learnt.get(&stack, &layers).is_none());
        learnt.add(&stack, &run(&[7, 3]), true).unwrap();
        learnt.add(&stack, &run(&[7, 5]), true).unwrap();
        let known = learnt.get(&stack, &layers).unwrap();
        assert_eq!(known.recordings, 2);
        assert_eq!(counts(&known), [(7, 2), (3, 1), (5, 1)]);
        learnt.add(&stack, &run(&[9]), false).unwrap();
        let known = learnt.get(&stack, &layers).unwrap();
        assert_eq!(known.recordings, 2);
        assert!(counts(&known).contains(&(9, 1)) && counts(&known).contains(&(7, 2)));
        // Many runs later what is no longer read is gone, or not worth it.
        for _ in 0..200 {
            learnt.add(&stack, &run(&[7]), true).unwrap();
        }
        let known = learnt.get(&stack, &layers).unwrap();
        assert!(known.recordings <= MAX_RUNS);
        assert_eq!(counts(&known), [(7, known.recordings)]);
        assert!(is_worth(&known, known.recordings) && !is_worth(&known, 1));
        // Another stack's file, or a damaged one, is not believed.
        let other = [layers[1], layers[0]];
        assert!(learnt.get(&stack, &other).is_none());
        assert!(learnt.get(&stack, &layers).is_none(), "it was dropped");
        fs_err::write(learnt.path(&stack, ALL), b"LPPROF\r\nxx").unwrap();
        assert!(learnt.get(&stack, &layers).is_none());
        assert!(learnt.list().is_empty());
    }

    #[test]
    fn there_is_a_limit_to_what_is_learnt() {
        let many: Vec<u32> = (0..u32::try_from(MAX_EXTENTS).unwrap() + 100).collect();
        let mut profile = run(&many);
        profile.entries.last_mut().unwrap().count = 1;
        let kept = bounded(profile);
        assert_eq!(kept.entries.len(), MAX_EXTENTS);
        assert!(kept.to_bytes().is_ok());
    }

    #[test]
    fn nodes_share_what_they_learnt_through_a_store() {
        let scratch = ScratchDir::new("learnt-store").unwrap();
        let store = LayerStore::new(Arc::new(MemStore::new()));
        let stack = Digest::of(b"stack");
        let layers = ids(&run(&[]));
        let nodes: Vec<Learnt> = ["a", "b"]
            .iter()
            .map(|name| Learnt::new(scratch.mkdir(name).unwrap()))
            .collect();
        let (a, b) = (&nodes[0], &nodes[1]);
        let publish = |node: &Learnt| node.publish(&store, &stack, &layers).unwrap();
        assert!(matches!(publish(a), Given::NothingNew));
        a.add(&stack, &run(&[1, 2]), true).unwrap();
        a.add(&stack, &run(&[1]), true).unwrap();
        b.add(&stack, &run(&[1, 4]), true).unwrap();
        assert_eq!(a.unpublished(&stack), 2);
        assert!(matches!(publish(a), Given::Stored(..)));
        assert_eq!(a.unpublished(&stack), 0);
        assert!(matches!(publish(a), Given::NothingNew));
        let Given::Stored(digest, merged) = publish(b) else {
            panic!("nothing was stored")
        };
        assert_eq!(merged.recordings, 3);
        assert_eq!(counts(&merged), [(1, 3), (2, 1), (4, 1)]);
        let stored = store.profiles(None).unwrap();
        assert_eq!(stored.len(), 1, "it replaces the first");
        assert_eq!(stored[0].digest, digest);
        // Only what is new goes there: runs do not count twice.
        a.add(&stack, &run(&[2]), true).unwrap();
        let Given::Stored(_, merged) = publish(a) else {
            panic!("nothing was stored")
        };
        assert_eq!(merged.recordings, 4);
        assert_eq!(counts(&merged)[..2], [(1, 3), (2, 2)]);
        // Another store gets all of it.
        let other = LayerStore::new(Arc::new(MemStore::new()));
        let Given::Stored(_, whole) = a.publish(&other, &stack, &layers).unwrap() else {
            panic!("nothing was stored")
        };
        assert_eq!(whole.recordings, 3);
    }
}
