//! Makes a snapshot: a diff layer from the upper directory of an overlay.
//!
//! Names and metadata are read while the sandbox is halted, contents after it goes on, each
//! checked by its change time. If a file changed before it was read, the sandbox is halted a
//! second time, all of it is looked at anew, and what is not known by then is read before it goes
//! on: so the layer is what the upper was at one moment, whatever the sandbox does.

use std::path::Path;
use std::thread;
use std::time::Duration;

use layerpack_erofs::NodeId;
use layerpack_store::{Digest, Kind, LayerStore, LayerWriter, Manifest, ParentRef, WriterOptions};
use rustix::time::{ClockId, clock_gettime};

use crate::dir::{Captured, DirSource, Which};
use crate::error::{PackError, Result};
use crate::filter::Filter;
use crate::git::{Git, GitIndex, Images, Known};
use crate::halt::{AtRest, Halt, Halted};
use crate::layout;
use crate::model::Layer;
use crate::options::{PackDiffOptions, PackDiffReport, Progress, Silent};
use crate::owner::{Owners, Ownership};
use crate::scrub::{LowerLayer, Scrub, ScrubReport};
use crate::squash::squashed;
use crate::upper::Upper;

/// Rounds before it is an error that something changes also while it is halted.
const ROUNDS: u32 = 4;
/// Files that changed and are named in a warning.
const NAMED: usize = 20;
/// Longest wait for the clock of change times to go on, in milliseconds: it ticks every 10 at most.
const TICK_WAIT: u32 = 25;

/// Packs an upper directory and publishes it as `options.reference`. Reads nothing but the upper,
/// so the cost follows what changed.
///
/// The overlay should be at rest: freeze what writes to it and sync it first, or use
/// [`snapshot`]. If something changes nevertheless, all is looked at again a few times; then it
/// is an error.
///
/// # Errors
/// [`PackError`], naming the file concerned. Nothing is published then.
pub fn pack_diff(
    store: &LayerStore,
    options: &PackDiffOptions,
    progress: &dyn Progress,
) -> Result<PackDiffReport> {
    snapshot(store, options, &AtRest, progress)
}

/// Packs the upper of what `halt` halts, as it was at one moment, and publishes it.
///
/// # Errors
/// [`PackError`], naming the file concerned. Nothing is published then, and what was halted goes
/// on.
pub fn snapshot(
    store: &LayerStore,
    options: &PackDiffOptions,
    halt: &dyn Halt,
    progress: &dyn Progress,
) -> Result<PackDiffReport> {
    let clock = crate::cpu::Clock::start();
    if options.reference.kind != Kind::Diff {
        return Err(PackError::InvalidOption {
            option: format!("reference {}", options.reference),
            why: "a snapshot is of kind diff".to_owned(),
        });
    }
    let filter = Filter::new(&options.excludes, &options.xattrs, &options.limits)?;
    let scrub = options
        .rules
        .as_ref()
        .map(|rules| Scrub::new(rules, &options.upper, &options.lowers));
    let view = Upper {
        xattrs: &filter.xattrs,
        marks: options.overlay_xattrs,
        owners: Ownership::new(&Owners {
            uid_map: options.uid_map.clone(),
            gid_map: options.gid_map.clone(),
            all_root: false,
        })?,
        scrub: scrub.as_ref(),
    };
    // Before anything is halted: a store that is away is so without a sandbox that waits for it.
    let mut writer = thread::scope(|scope| {
        if halt.waits() {
            // What will be read while it is halted is in memory then. What fails here is told there.
            let _ = thread::Builder::new()
                .name("warm".to_owned())
                .spawn_scoped(scope, || {
                    let source =
                        DirSource::open(&options.upper, &view, &filter, options.limits, &Silent);
                    source.and_then(|source| source.gather()).is_ok()
                });
        }
        (!options.dry_run)
            .then(|| {
                store.writer(WriterOptions {
                    level: options.level,
                    jobs: options.jobs,
                    verified_cache: options.cache.clone(),
                    ..WriterOptions::default()
                })
            })
            .transpose()
    })?;
    let mut taking = Taking {
        options,
        filter: &filter,
        view: &view,
        scrub: scrub.as_ref(),
        halt,
        progress,
        captured: Captured::default(),
        git: options.git_index.then(Git::default),
        frozen: Vec::new(),
        again: Vec::new(),
    };
    let mut layer = taking.take(writer.as_mut())?;
    let mut warnings = std::mem::take(&mut layer.warnings);
    for path in taking.again.iter().take(NAMED) {
        warnings.add(format!(
            "{} changed after the sandbox went on, and was read while it was halted again",
            crate::show(path)
        ));
    }
    if taking.again.len() > NAMED {
        let more = taking.again.len() - NAMED;
        warnings.add(format!("{more} more files changed in the same way"));
    }
    let mut stack = options.stack.clone();
    layer.settle()?;
    warnings.absorb(std::mem::take(&mut layer.warnings));
    let mut known = Known::default();
    let upper;
    if !options.squash.is_empty() {
        let over = squashed(
            store,
            &options.squash,
            &layer,
            &mut stack,
            &filter,
            scrub.as_ref(),
            writer.as_mut(),
            &mut warnings,
        );
        let merged = match over {
            Ok(layer) => layer,
            Err(error) => return Err(warnings.tell(error, progress)),
        };
        upper = std::mem::replace(&mut layer, merged);
        if let (Some(git), false) = (&mut taking.git, options.dry_run) {
            let manifests = manifests(store, &options.squash)?;
            let is_own = |path: &[u8]| upper.tree.resolve(path).is_some();
            known.taken = git.take_up(store, &manifests, &mut layer, &is_own, &mut warnings)?;
            known.own = Some(&upper);
        }
    } else if let (Some(git), Some(moves), false) = (&taking.git, &options.moves, options.dry_run)
        && git.holds()
        && let Some((before, after)) = moves.0()
    {
        known.before = Images::of(store, &before)?;
        known.after = Images::of(store, &after)?;
    }
    let scrubbed = match &scrub {
        None => ScrubReport::default(),
        Some(scrub) => {
            let refused = scrub.refusal();
            // What is taken in is no layer below.
            let mut lowers = options.lowers.clone();
            lowers.retain(|lower| !is_taken(options, lower));
            let report = scrub.report(&lowers, &layer);
            if let Some(refused) = refused.filter(|_| !options.dry_run) {
                return Err(warnings.tell(refused, progress));
            }
            report
        }
    };
    let (frozen, copied) = (taking.frozen, taking.captured.copied);
    let made = publish(options, layer, stack, writer, taking.git, &known, progress);
    let Made {
        published,
        counts,
        meta_bytes,
        git,
    } = match made {
        Ok(made) => made,
        Err(error) => return Err(warnings.tell(error, progress)),
    };
    let mut lines = warnings.into_vec();
    if let Some(published) = &published {
        lines.extend(published.warnings.iter().cloned());
    }
    Ok(PackDiffReport {
        published,
        counts,
        meta_bytes,
        warnings: lines,
        cpu_seconds: clock.seconds(),
        scrub: scrubbed,
        frozen,
        copied_files: copied,
        git,
    })
}

/// Whether a layer below is taken into the snapshot. Rows of diffs that are mounted as one have a name
/// that is none of the stack's.
fn is_taken(options: &PackDiffOptions, lower: &LowerLayer) -> bool {
    let is = |parent: &ParentRef| {
        let reference = parent.reference.as_ref();
        reference.is_some_and(|reference| reference.to_string() == lower.name)
    };
    match options.stack.iter().any(is) {
        true => options.squash.iter().any(is),
        false => lower.diff && !options.squash.is_empty(),
    }
}

fn manifests(store: &LayerStore, layers: &[ParentRef]) -> Result<Vec<(Digest, Manifest)>> {
    let layers = layers.iter().map(|layer| layer.manifest);
    let loaded = layers.map(|digest| Ok((digest, store.manifest(&digest)?)));
    loaded.collect()
}

/// What was published, if anything, and what is in it.
struct Made {
    published: Option<layerpack_store::Published>,
    counts: crate::options::EntryCounts,
    meta_bytes: u64,
    git: Vec<GitIndex>,
}

fn publish(
    options: &PackDiffOptions,
    mut layer: Layer,
    stack: Vec<ParentRef>,
    mut writer: Option<LayerWriter>,
    git: Option<Git>,
    known: &Known<'_>,
    progress: &dyn Progress,
) -> Result<Made> {
    progress.phase("publish");
    let indexes = match (git, &mut writer) {
        (Some(mut git), Some(writer)) => git.refresh(&mut layer, writer, known)?,
        _ => Vec::new(),
    };
    // What rules keep back, or a squash drops, may lie in frames of the store with what stays: those
    // are written anew, which needs the map.
    let reframes = !options.squash.is_empty() || options.rules.is_some();
    if let Some(writer) = &mut writer
        && !reframes
    {
        writer.close()?;
    }
    let mut finished = layout::finish(layer, options.reference.clone(), options.level)?;
    let draft = &mut finished.draft;
    draft.platform.clone_from(&options.platform);
    draft.parents = stack;
    draft.labels.clone_from(&options.labels);
    draft.annotations.clone_from(&options.annotations);
    if let Some(rules) = &options.rules {
        let digest = rules.digest().to_string();
        draft.parameters.insert("scrub-rules".to_owned(), digest);
    }
    let published = match writer {
        None => None,
        Some(mut writer) => {
            if reframes {
                // What was removed or scrubbed must not come along in the frames of what was not.
                writer.reframe(&finished.draft.map.load()?)?;
            }
            Some(writer.finish(finished.draft)?)
        }
    };
    Ok(Made {
        published,
        counts: finished.counts,
        meta_bytes: finished.meta_bytes,
        git: indexes,
    })
}

/// A snapshot that is being taken.
struct Taking<'a> {
    options: &'a PackDiffOptions,
    filter: &'a Filter,
    view: &'a Upper<'a>,
    scrub: Option<&'a Scrub<'a>>,
    halt: &'a dyn Halt,
    progress: &'a dyn Progress,
    captured: Captured,
    git: Option<Git>,
    /// For how long it was halted, each time.
    frozen: Vec<Duration>,
    /// Files that changed before they could be read.
    again: Vec<Vec<u8>>,
}

impl Taking<'_> {
    /// The upper as it was at one moment, contents and all.
    fn take(&mut self, mut writer: Option<&mut LayerWriter>) -> Result<Layer> {
        let mut round = 0;
        loop {
            round += 1;
            match self.round(round, writer.as_deref_mut()) {
                Ok(layer) if self.captured.changed.is_empty() => return Ok(layer),
                Err(PackError::Changed { path, what }) if round >= ROUNDS => {
                    return Err(PackError::Changed { path, what });
                }
                Ok(_) if round >= ROUNDS => {
                    let path = self.captured.changed.first();
                    return Err(PackError::Changed {
                        path: path.map_or_else(String::new, |path| crate::show(path)),
                        what: "also while the sandbox was halted".to_owned(),
                    });
                }
                Ok(_) => {
                    let changed = std::mem::take(&mut self.captured.changed);
                    for path in changed {
                        if !self.again.contains(&path) && self.again.len() < 10_000 {
                            self.again.push(path);
                        }
                    }
                }
                Err(PackError::Changed { .. }) => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn round(&mut self, round: u32, mut writer: Option<&mut LayerWriter>) -> Result<Layer> {
        let options = self.options;
        self.captured.restart();
        if let Some(scrub) = self.scrub {
            scrub.restart();
        }
        let mut layer = Layer::new(false);
        if round == 1 {
            self.progress.phase("scan");
        }
        let tells = round == 1 && tells_changes(&options.upper);
        let mut source = DirSource::open(
            &options.upper,
            self.view,
            self.filter,
            options.limits,
            self.progress,
        )?;
        let mut halted = Some(Halted::begin(self.halt)?);
        let gathered = source.gather()?;
        let latest = match &gathered {
            Some(gathered) => gathered.latest_change(),
            None => {
                source.scan(&mut layer, NodeId::ROOT, true)?;
                source.latest_change()
            }
        };
        if tells && clock_goes_on(latest) {
            self.let_go(&mut halted)?;
        }
        if let Some(gathered) = gathered {
            source.take_in(gathered, &mut layer, NodeId::ROOT, true)?;
        }
        if round == 1 {
            self.progress.phase("read");
        }
        if let Some(scratch) = &options.scratch {
            source.copy_large(&mut self.captured, scratch);
        }
        for which in [Which::InPlace, Which::Copied] {
            source.capture(
                which,
                &mut layer,
                writer.as_deref_mut(),
                &mut self.captured,
                self.scrub,
                self.git.as_mut(),
            )?;
            // What is copied by reference can wait.
            self.let_go(&mut halted)?;
        }
        if let Some(scrub) = self.scrub {
            layer.take_out(&self.captured.left_out)?;
            layer.prune_empty(&scrub.emptied())?;
        }
        Ok(layer)
    }

    fn let_go(&mut self, halted: &mut Option<Halted<'_>>) -> Result<()> {
        if let Some(halted) = halted.take() {
            self.frozen.push(halted.end()?);
        }
        Ok(())
    }
}

/// Whether every later write to a file of this directory's filesystem shows in its change time,
/// also one through a memory map that was there before: those that write pages back protect them
/// against writing then.
fn tells_changes(upper: &Path) -> bool {
    const EXT4: i64 = 0xef53;
    const XFS: i64 = 0x5846_5342;
    const BTRFS: i64 = 0x9123_683e;
    const F2FS: i64 = 0xf2f5_2010;
    rustix::fs::statfs(upper).is_ok_and(|stat| [EXT4, XFS, BTRFS, F2FS].contains(&stat.f_type))
}

/// Waits until the clock that change times are taken from is past the latest of all files, so that
/// a later change leaves another one. `false`: it does not get there, as after it was set back.
fn clock_goes_on(latest: Option<(i64, u64)>) -> bool {
    let Some((sec, nsec)) = latest else {
        return true;
    };
    for _ in 0..TICK_WAIT {
        let now = clock_gettime(ClockId::RealtimeCoarse);
        let passed = (now.tv_sec, u64::try_from(now.tv_nsec).unwrap_or_default()) > (sec, nsec);
        if passed {
            return true;
        }
        thread::sleep(Duration::from_millis(1));
    }
    false
}
