//! Collecting garbage in two phases.
//!
//! *Condemn*: list all objects, mark what is used, write the rest to a condemned list. *Sweep*, a
//! grace period later, perhaps by another process: put a marker, wait for nobody but check that every
//! living writer knows the list, mark anew, delete what is still unused and unclaimed. Objects are
//! deleted only if two marks found them unused, so that a store that answers wrongly once loses
//! nothing. A crash leaves lists, markers and a lease, which later collections finish or remove.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;

use super::condemned::{Condemned, CondemnedList, MAX_KEYS, SWEEP_TTL};
use super::lease::{Lease, LeaseKind, Leases, random_id, store_time, this_process, unix_now};
use super::mark::{Marks, Reason, Unknown, mark};
use super::parallel;
use super::session::SESSION_TTL;
use crate::blob::{Leftovers, ObjectInfo, PutMode};
use crate::digest::Digest;
use crate::error::{Result, StoreError};
use crate::format::index::{HEADER_LEN, IndexPack, PACK_LEN, pack_count, packs_in};
use crate::key::Key;
use crate::layer::LayerStore;

/// How to collect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GcOptions {
    /// How long an object stays after it was found unused.
    pub grace: Duration,
    /// Write and delete nothing; say what would happen.
    pub dry_run: bool,
    /// Stay until the grace period of what this run condemns is over, then delete it.
    pub wait: bool,
}

/// A number of objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Amount {
    /// How many.
    pub objects: u64,
    /// Their sizes, in bytes.
    pub bytes: u64,
}

impl Amount {
    fn add(&mut self, bytes: u64) {
        self.objects += 1;
        self.bytes += bytes;
    }
}

/// Condemned lists whose objects are still there and that wait for the same thing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Waiting {
    /// The lists' identities.
    pub lists: Vec<String>,
    /// What is in them, used again or not.
    pub amount: Amount,
    /// What they wait for.
    pub why: String,
    #[serde(skip)]
    hindrance: Hindrance,
}

/// What a collection did, or would do.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct GcReport {
    /// Nothing was written or deleted.
    pub dry_run: bool,
    /// All objects that were there.
    pub total: Amount,
    /// Of these, those that stay, by why they do.
    pub kept: BTreeMap<Reason, Amount>,
    /// Of these, those found unused by this run for the first time.
    pub condemned: Amount,
    /// Of these, those deleted.
    pub deleted: Amount,
    /// Lists whose objects are still there.
    pub waiting: Vec<Waiting>,
    /// What lies in the store that was to become objects.
    pub temporaries: Leftovers,
    /// What could not be read and therefore counts as used, and other things to know; one line each.
    pub problems: Vec<String>,
}

/// Families of objects that are deleted when nothing uses them, in the order in which they are.
const FAMILIES: [&str; 9] = [
    "manifests/",
    "signatures/",
    "profiles/",
    "seeds/",
    "locators/",
    "maps/",
    "meta/",
    "index/",
    "packs/",
];

pub(super) fn family(key: &str) -> Option<usize> {
    FAMILIES.iter().position(|family| key.starts_with(family))
}

struct Collector<'a> {
    store: &'a LayerStore,
    options: GcOptions,
    id: String,
    /// The store's time at an instant.
    clock: Option<(SystemTime, Instant)>,
    sizes: HashMap<Key, u64>,
    report: GcReport,
}

/// Why a list was not swept.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Hindrance {
    /// Its grace period: so many seconds more.
    Grace(u64),
    /// A writer that does not know it.
    Writer(String),
    /// Another collector is at it.
    Collector,
    /// Something cannot be read.
    Doubt,
}

impl Hindrance {
    /// Whether it passes by itself.
    fn passes(&self) -> bool {
        self != &Self::Doubt
    }

    /// One hindrance for both, if they are alike.
    fn joined(&self, other: &Self) -> Option<Self> {
        match (self, other) {
            (Self::Grace(a), Self::Grace(b)) => Some(Self::Grace(*a.max(b))),
            (a, b) => (a == b).then(|| a.clone()),
        }
    }

    fn words(&self, lists: usize) -> String {
        let them = if lists == 1 { "it" } else { "them" };
        match self {
            Self::Grace(seconds) if lists == 1 => format!("its grace period, {seconds} s more"),
            Self::Grace(seconds) => format!("their grace periods, up to {seconds} s more"),
            Self::Writer(writer) => format!("the writer {writer}, which began before {them}"),
            Self::Collector => "another collector".to_owned(),
            Self::Doubt => "what cannot be read: see the problems".to_owned(),
        }
    }
}

impl LayerStore {
    /// Collects garbage: deletes what earlier runs condemned and the grace period is over for, and
    /// condemns what is unused now. Safe beside writers, nodes and other collections.
    ///
    /// # Errors
    /// If the store cannot be listed or written. What was condemned or deleted until then is sound.
    pub fn collect(&self, options: GcOptions) -> Result<GcReport> {
        self.check_marker()?;
        let mut collector = Collector {
            store: self,
            options,
            id: random_id()?,
            clock: None,
            sizes: HashMap::new(),
            report: GcReport {
                dry_run: options.dry_run,
                ..GcReport::default()
            },
        };
        if options.dry_run {
            collector.report.temporaries = self.blobs().leftovers(false)?;
            collector.run()?;
            return Ok(collector.report);
        }
        // First what needs no room, so that there is some for what does.
        collector.report.temporaries = self.blobs().leftovers(true)?;
        let key = Key::lease(&format!("collector-{}", collector.id))?;
        let begun = Instant::now();
        collector.announce(&key)?;
        let time = store_time(&**self.blobs(), &key, Duration::ZERO)?;
        collector.clock = time.map(|time| (time, begun));
        let result = collector.run();
        if let Err(error) = self.blobs().delete_volatile(&key) {
            tracing::debug!(%key, %error, "the collector's lease ends by its age");
        }
        if let Err(error) = self.blobs().reserve(true) {
            tracing::debug!("no room is kept for collecting on a full disk: {error}");
        }
        result.map(|()| collector.report)
    }

    /// The packs that an index segment names, by its head alone.
    pub(super) fn packs_of_index(&self, object: &ObjectInfo) -> Result<Vec<IndexPack>> {
        let bad = |e| self.bad(&object.key, &e);
        let head = 0..HEADER_LEN.min(object.size);
        let count =
            self.range_checked(&object.key, head, &mut |head| pack_count(head).map_err(bad))?;
        let end = HEADER_LEN.saturating_add(u64::from(count).saturating_mul(PACK_LEN));
        if end > object.size {
            return Err(self.corrupt(&object.key, "it ends within its packs"));
        }
        self.range_checked(&object.key, HEADER_LEN..end, &mut |packs| {
            packs_in(packs, count).map_err(bad)
        })
    }
}

impl Collector<'_> {
    fn now(&self) -> Option<SystemTime> {
        self.clock
            .and_then(|(time, at)| time.checked_add(at.elapsed()))
    }

    /// Writes the collector's lease. It protects nothing and tells the store's time, so that an
    /// empty one will do where there is no room for more.
    fn announce(&mut self, key: &Key) -> Result<()> {
        let blobs = self.store.blobs();
        let mut lease = Lease::new(LeaseKind::Collector, this_process(), SESSION_TTL);
        match lease.put(&**blobs, key) {
            Err(StoreError::NoSpace { .. }) => {}
            done => return done,
        }
        tracing::info!("the store is full: collecting with what room there is");
        blobs.put_volatile(key, b"")
    }

    fn run(&mut self) -> Result<()> {
        let blobs = self.store.blobs();
        let leases = self.leases()?;
        // Listed before marking: what is published meanwhile is not in this list.
        let objects = blobs.list("")?;
        for object in &objects {
            self.report.total.add(object.size);
            self.sizes.insert(object.key.clone(), object.size);
        }
        let marks = mark(self.store, &leases)?;
        let unused = self.unused(&marks, &objects)?;
        let condemned = Condemned::read(&**blobs)?;
        self.report.problems.extend(marks.problems.iter().cloned());
        self.drop_damaged(&condemned)?;
        let mut listed: BTreeMap<String, Reason> = BTreeMap::new();
        for list in condemned.lists {
            let left = self.options.grace.saturating_sub(self.age(&list));
            let hindrance = if left.is_zero() {
                self.sweep(&list)?
            } else {
                Some(Hindrance::Grace(left.as_secs() + 1))
            };
            if let Some(hindrance) = hindrance {
                let reason = match hindrance {
                    Hindrance::Grace(_) => Reason::Grace,
                    _ => Reason::Waiting,
                };
                self.wait_for(&list, hindrance);
                listed.extend(list.keys.into_iter().map(|key| (key, reason)));
            }
        }
        let fresh: BTreeSet<String> = unused
            .iter()
            .filter(|key| self.sizes.contains_key(key)) // not deleted just now
            .map(Key::to_string)
            .filter(|key| !listed.contains_key(key))
            .collect();
        self.count_kept(&marks, &objects, &fresh, &listed);
        self.condemn(fresh)
    }

    /// Reads the leases and removes those that expired: one who was taken for dead finds that out.
    fn leases(&mut self) -> Result<Leases> {
        let mut leases = Leases::read(&**self.store.blobs(), self.now())?;
        if !self.options.dry_run {
            for key in std::mem::take(&mut leases.expired) {
                tracing::info!(%key, "removed a lease that was not renewed");
                self.store.blobs().delete(&key)?;
            }
        }
        Ok(leases)
    }

    fn age(&self, list: &CondemnedList) -> Duration {
        match (list.modified, self.now()) {
            (Some(modified), Some(now)) => now.duration_since(modified).unwrap_or_default(),
            _ => Duration::from_secs(unix_now().saturating_sub(list.created)),
        }
    }

    /// Objects that nothing uses.
    fn unused(&mut self, marks: &Marks, objects: &[ObjectInfo]) -> Result<Vec<Key>> {
        if marks.unknown == Unknown::Everything {
            return Ok(Vec::new());
        }
        let mut unused = Vec::new();
        let mut segments = Vec::new();
        for object in objects {
            let key = &object.key;
            match family(key.as_str()) {
                Some(_) if key.as_str().starts_with("index/") => segments.push(object.clone()),
                Some(_) if reason_of(marks, key).is_none() => unused.push(key.clone()),
                _ => {}
            }
        }
        let named = parallel::map(&segments, |object| self.store.packs_of_index(object));
        for (object, packs) in segments.into_iter().zip(named) {
            match packs {
                Ok(packs) if !self.is_of_use(marks, &packs) => unused.push(object.key),
                Ok(_) => {}
                Err(error) => self
                    .report
                    .problems
                    .push(format!("stays, repair rebuilds it: {error}")),
            }
        }
        unused.sort_by_key(|key| family(key.as_str()));
        Ok(unused)
    }

    /// Whether a segment with these packs helps to find anything that is used.
    fn is_of_use(&self, marks: &Marks, packs: &[IndexPack]) -> bool {
        packs.iter().any(|pack| {
            let key = Key::pack(&pack.id);
            self.sizes.contains_key(&key) && marks.reason(&key).is_some()
        })
    }

    fn count_kept(
        &mut self,
        marks: &Marks,
        objects: &[ObjectInfo],
        fresh: &BTreeSet<String>,
        listed: &BTreeMap<String, Reason>,
    ) {
        for object in objects {
            let key = object.key.as_str();
            let reason = if fresh.contains(key) || !self.sizes.contains_key(&object.key) {
                continue; // condemned or deleted
            } else if family(key).is_none() || key.starts_with("index/") {
                Reason::Store
            } else if let Some(reason) = reason_of(marks, &object.key) {
                reason
            } else if let Some(reason) = listed.get(key) {
                *reason
            } else {
                Reason::Unknown
            };
            self.report.kept.entry(reason).or_default().add(object.size);
        }
    }

    fn amount(&self, keys: &BTreeSet<String>) -> Amount {
        let mut amount = Amount::default();
        for size in keys
            .iter()
            .filter_map(|key| self.sizes.get(&Key::new(key).ok()?))
        {
            amount.add(*size);
        }
        amount
    }

    fn wait_for(&mut self, list: &CondemnedList, hindrance: Hindrance) {
        let amount = self.amount(&list.keys);
        for waiting in &mut self.report.waiting {
            if let Some(joined) = waiting.hindrance.joined(&hindrance) {
                waiting.lists.push(list.id.clone());
                waiting.amount.objects += amount.objects;
                waiting.amount.bytes += amount.bytes;
                waiting.why = joined.words(waiting.lists.len());
                waiting.hindrance = joined;
                return;
            }
        }
        self.report.waiting.push(Waiting {
            lists: vec![list.id.clone()],
            amount,
            why: hindrance.words(1),
            hindrance,
        });
    }

    /// Lists that nobody can read protect nobody and are never swept.
    fn drop_damaged(&mut self, condemned: &Condemned) -> Result<()> {
        for (key, error) in &condemned.damaged {
            self.report.problems.push(format!("removed: {error}"));
            if !self.options.dry_run {
                self.store.blobs().delete(key)?;
            }
        }
        // Markers of collectors that died after their list was gone.
        for sweep in &condemned.sweeps {
            let orphan = !condemned.lists.iter().any(|list| list.id == sweep.list);
            if orphan && !sweep.is_live(self.now()) && !self.options.dry_run {
                self.store.blobs().delete(&sweep.key)?;
            }
        }
        Ok(())
    }

    fn condemn(&mut self, keys: BTreeSet<String>) -> Result<()> {
        if keys.is_empty() || self.options.dry_run {
            self.report.condemned = self.amount(&keys);
            return Ok(());
        }
        // In the order of the families: while manifests are left, nothing that they use is taken
        // for a part of another list only.
        let mut ordered: Vec<String> = keys.into_iter().collect();
        ordered.sort_by_key(|key| family(key));
        let mut rest = ordered.as_slice();
        let due = self.options.wait || self.options.grace.is_zero();
        while !rest.is_empty() {
            let deleted = self.report.deleted;
            let (lists, left) = self.write_lists(rest)?;
            for list in &lists {
                let amount = self.amount(&list.keys);
                self.report.condemned.objects += amount.objects;
                self.report.condemned.bytes += amount.bytes;
            }
            let begun = Instant::now();
            if self.options.wait {
                while let Some(left) = self.options.grace.checked_sub(begun.elapsed()) {
                    std::thread::sleep(left.min(Duration::from_secs(1)));
                }
            }
            for list in lists {
                let hindrance = if due {
                    self.sweep_patiently(&list)?
                } else {
                    Some(Hindrance::Grace(self.options.grace.as_secs()))
                };
                if let Some(hindrance) = hindrance {
                    self.wait_for(&list, hindrance);
                }
            }
            rest = left;
            if !rest.is_empty() && self.report.deleted == deleted {
                self.report.problems.push(format!(
                    "the store is full: there is no room to condemn {} more objects; collect again when those are deleted that are condemned",
                    rest.len()
                ));
                break;
            }
        }
        Ok(())
    }

    /// Condemns as many of these objects as there is room for, at least one. What is left.
    fn write_lists<'k>(&self, keys: &'k [String]) -> Result<(Vec<CondemnedList>, &'k [String])> {
        let blobs = self.store.blobs();
        let mut rest = keys;
        let mut most = MAX_KEYS;
        let mut lists: Vec<CondemnedList> = Vec::new();
        while !rest.is_empty() {
            let (part, others) = rest.split_at_checked(most).unwrap_or((rest, &[]));
            let list = CondemnedList::new(
                format!("{}.{}", random_id()?, lists.len()),
                this_process(),
                part.iter().cloned().collect(),
            );
            match list.put(&**blobs) {
                Ok(()) => {
                    lists.push(list);
                    rest = others;
                }
                Err(StoreError::NoSpace { .. }) if blobs.reserve(false)? => {}
                Err(StoreError::NoSpace { .. }) if part.len() > 1 => most = part.len() / 2,
                Err(StoreError::NoSpace { .. }) if !lists.is_empty() => break,
                Err(error) => return Err(error),
            }
        }
        Ok((lists, rest))
    }

    /// With `wait`, also waits for the writers that were at work.
    fn sweep_patiently(&mut self, list: &CondemnedList) -> Result<Option<Hindrance>> {
        let begun = Instant::now();
        loop {
            match self.sweep(list)? {
                Some(hindrance)
                    if hindrance.passes()
                        && self.options.wait
                        && begun.elapsed() < 2 * SESSION_TTL =>
                {
                    std::thread::sleep(Duration::from_millis(500));
                }
                ended => return Ok(ended),
            }
        }
    }

    /// Deletes a list's objects that are still unused.
    fn sweep(&mut self, list: &CondemnedList) -> Result<Option<Hindrance>> {
        let blobs = self.store.blobs();
        let before = self.leases()?;
        if let Some(wait) = ignorant(&before, &list.id) {
            return Ok(Some(wait));
        }
        let others = Condemned::sweeps(&**blobs)?;
        let live = |s: &super::condemned::Sweep| s.list == list.id && s.is_live(self.now());
        if others.iter().any(live) {
            return Ok(Some(Hindrance::Collector));
        }
        if self.options.dry_run {
            let marks = mark(self.store, &before)?;
            let gone = self.still_unused(list, &marks)?;
            self.report.deleted = self.sum(&gone);
            return Ok(None);
        }
        let marker = Key::sweep(&list.id, &self.id)?;
        let mut beat = Heart::new(marker.clone());
        beat.put(self.store)?;
        let swept = self.sweep_marked(list, &before, &mut beat);
        // Also after an error: what was not deleted is deleted by a later run.
        let cleared = blobs.delete(&marker);
        let swept = swept?;
        cleared?;
        Ok(swept)
    }

    fn sweep_marked(
        &mut self,
        list: &CondemnedList,
        before: &Leases,
        beat: &mut Heart,
    ) -> Result<Option<Hindrance>> {
        let blobs = self.store.blobs();
        // As writers see it now: a list that is gone or damaged condemns nothing.
        let Some(list) = CondemnedList::get(&**blobs, &list.key()?, &list.id)? else {
            return Ok(None);
        };
        let mut leases = self.leases()?;
        // Twice, because a list that leaves a session out once must not cost its objects.
        for (key, lease) in &before.live {
            if !leases.live.contains_key(key) && blobs.size(key)?.is_some() {
                leases.live.insert(key.clone(), lease.clone());
            }
        }
        if let Some(wait) = ignorant(&leases, &list.id) {
            return Ok(Some(wait));
        }
        let marks = mark(self.store, &leases)?;
        if marks.unknown == Unknown::Everything {
            self.report.problems.extend(marks.problems);
            return Ok(Some(Hindrance::Doubt));
        }
        let unused = self.still_unused(&list, &marks)?;
        for chunk in unused.chunks(64) {
            beat.keep(self.store)?;
            let deleted = parallel::map(chunk, |key| blobs.delete(key));
            for (key, deleted) in chunk.iter().zip(deleted) {
                if deleted? {
                    let size = self.sizes.remove(key).unwrap_or(0);
                    self.report.deleted.add(size);
                }
            }
        }
        blobs.delete(&list.key()?)?;
        Ok(None)
    }

    /// Objects of a list that these marks do not use, in the order in which they are deleted.
    fn still_unused(&self, list: &CondemnedList, marks: &Marks) -> Result<Vec<Key>> {
        let mut unused = Vec::new();
        for text in &list.keys {
            let key = Key::new(text)?;
            if family(text).is_none() || reason_of(marks, &key).is_some() {
                continue;
            }
            if text.starts_with("index/") {
                let Some(size) = self.store.blobs().size(&key)? else {
                    continue;
                };
                let object = ObjectInfo {
                    key: key.clone(),
                    size,
                    modified: None,
                };
                match self.store.packs_of_index(&object) {
                    Ok(packs) if !self.is_of_use(marks, &packs) => {}
                    _ => continue,
                }
            }
            unused.push(key);
        }
        unused.sort_by_key(|key| family(key.as_str()));
        Ok(unused)
    }

    fn sum(&self, keys: &[Key]) -> Amount {
        let mut amount = self.report.deleted;
        for size in keys.iter().filter_map(|key| self.sizes.get(key)) {
            amount.add(*size);
        }
        amount
    }
}

/// A writer that does not know the list may rely on its objects.
fn ignorant(leases: &Leases, list: &str) -> Option<Hindrance> {
    leases
        .live
        .iter()
        .find(|(_, lease)| lease.kind == LeaseKind::Session && !lease.knows.contains(list))
        .map(|(key, lease)| Hindrance::Writer(format!("{} ({key})", lease.who)))
}

/// Why a collected object stays.
pub(super) fn reason_of(marks: &Marks, key: &Key) -> Option<Reason> {
    let text = key.as_str();
    if let Some((family @ ("signatures" | "profiles" | "seeds"), rest)) = text.split_once('/') {
        // They stay as long as what they are about: a manifest, a layer's content, a map.
        let hex = rest.split('/').next().unwrap_or_default();
        let Ok(about) = Digest::from_hex(hex) else {
            return Some(Reason::Unknown);
        };
        return marks.reason(key).or_else(|| match family {
            "signatures" => marks.reason(&Key::manifest(&about)),
            "seeds" => marks.reason(&Key::map(&about)),
            _ => marks.reason_of_content(&about),
        });
    }
    if key.digest().is_none() {
        return Some(Reason::Unknown); // not an object of ours
    }
    marks.reason(key)
}

/// The marker of a sweep, renewed while it lasts.
struct Heart {
    key: Key,
    beaten: super::session::BootInstant,
}

impl Heart {
    fn new(key: Key) -> Self {
        Self {
            key,
            beaten: super::session::BootInstant::now(),
        }
    }

    fn put(&mut self, store: &LayerStore) -> Result<()> {
        let begun = super::session::BootInstant::now();
        let text = this_process();
        let blobs = store.blobs();
        match blobs.put(&self.key, text.as_bytes(), PutMode::Overwrite) {
            // What is in it is for people.
            Err(StoreError::NoSpace { .. }) => blobs.put(&self.key, b"", PutMode::Overwrite)?,
            put => put?,
        };
        self.beaten = begun;
        Ok(())
    }

    /// Before each deletion: nobody may have taken this collector for dead.
    fn keep(&mut self, store: &LayerStore) -> Result<()> {
        let age = self.beaten.elapsed();
        if age > SWEEP_TTL / 2 {
            return Err(StoreError::LeaseLost {
                store: store.url().to_owned(),
                key: self.key.to_string(),
            });
        }
        if age > SWEEP_TTL / 10 {
            self.put(store)?;
        }
        Ok(())
    }
}
