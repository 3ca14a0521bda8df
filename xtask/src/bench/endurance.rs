//! Random reads while the daemon is killed, the cache is too small and the store fails, all at
//! once. Every byte that is read is compared; reads that fail are counted by what was going on.

use fs_err::os::unix::fs::FileExt as _;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use layerpack_fixtures::rng::Rng;
use rustix::fs::Advice;
use rustix::mount::UnmountFlags;

use super::node::{Node, need_root};
use super::origin::{Fault, Origin};
use super::report::{Report, Verdict};
use super::{Bench, roots};
use crate::steps::say;

/// Threads that read.
const READERS: usize = 4;
/// Layers of the stack.
const LAYERS: u64 = 3;
/// The daemon's limit on a read that waits, which nothing sets; and what a busy machine may add.
const READ_LIMIT: Duration = Duration::from_secs(65);
/// How long after a fault a failed read is still put down to it.
const AFTER: Duration = Duration::from_secs(3);

/// So much of each minute the store is well.
const MINUTE_MS: u64 = 60_000;
const WELL_MS: u64 = 20_000;

/// What happens, as readers see it.
struct Course {
    begun: Instant,
    over: AtomicBool,
    /// Where the tree is mounted now; taken for writing while it is mounted anew.
    target: RwLock<PathBuf>,
    /// Until when failed reads are a fault's or a kill's, in ms since the beginning.
    fault_until: AtomicU64,
    kill_until: AtomicU64,
    tally: Mutex<Tally>,
    /// When each reader began what it does now, in ms since the beginning; 0: nothing.
    reading: [AtomicU64; READERS],
}

#[derive(Default)]
struct Tally {
    reads: u64,
    bytes: u64,
    wrong: Vec<String>,
    after_fault: u64,
    after_kill: u64,
    unexplained: Vec<String>,
    kinds: BTreeMap<String, u64>,
    longest_ms: u64,
    kills: u64,
    remounts: u64,
    faults: u64,
    restarts_ms: Vec<f64>,
}

impl Course {
    fn now(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_millis())
            .unwrap_or(u64::MAX)
            .max(1)
    }

    fn over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    fn tally(&self) -> std::sync::MutexGuard<'_, Tally> {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn until(&self, mark: &AtomicU64, more: Duration) {
        let end = self.now() + u64::try_from(more.as_millis()).unwrap_or_default();
        mark.fetch_max(end, Ordering::Relaxed);
    }
}

/// Some bytes of one file, read and compared. Short reads are wrong ones.
fn compare(mounted: &Path, original: &Path, rng: &mut Rng) -> Result<(u64, Option<String>)> {
    let size = fs_err::metadata(original)?.len();
    let (at, length) = match rng.one_in(6) {
        true => (0, size),
        false => {
            let at = rng.below(size.max(1));
            (at, (size - at).min(1 + rng.below(256 << 10)))
        }
    };
    let mut expected = vec![0; usize::try_from(length)?];
    fs_err::File::open(original)?.read_exact_at(&mut expected, at)?;
    let file = fs_err::File::open(mounted)?;
    let mut found = vec![0; expected.len()];
    let mut done = 0;
    while done < found.len() {
        let rest = found.get_mut(done..).unwrap_or_default();
        let got = file.read_at(rest, at + u64::try_from(done)?)?;
        if got == 0 {
            break;
        }
        done += got;
    }
    // Not the kernel's copy next time.
    let _ = rustix::fs::fadvise(file.file(), 0, None, Advice::DontNeed);
    let differs = expected
        .iter()
        .zip(&found)
        .position(|(a, b)| a != b)
        .or((done < expected.len()).then_some(done));
    let wrong = differs.map(|place| {
        format!(
            "{}: wrong from byte {} on, of {length} at {at}",
            mounted.display(),
            at + u64::try_from(place).unwrap_or_default()
        )
    });
    Ok((length, wrong))
}

fn read(course: &Course, reader: usize, source: &Path, files: &[PathBuf]) -> Result<()> {
    let mut rng = Rng::new(1000 + u64::try_from(reader)?);
    let busy = course.reading.get(reader).context("readers are counted")?;
    while !course.over() {
        let original = rng.pick(files).context("no files")?;
        let inside = original.strip_prefix(source)?;
        let target = course.target.read().unwrap_or_else(PoisonError::into_inner);
        let begun = course.now();
        busy.store(begun, Ordering::Relaxed);
        let outcome = compare(&target.join(inside), original, &mut rng);
        busy.store(0, Ordering::Relaxed);
        drop(target);
        let took = course.now().saturating_sub(begun);
        let in_fault = course.fault_until.load(Ordering::Relaxed) >= begun;
        let in_kill = course.kill_until.load(Ordering::Relaxed) >= begun;
        let mut tally = course.tally();
        tally.reads += 1;
        tally.longest_ms = tally.longest_ms.max(took);
        match outcome {
            Ok((bytes, wrong)) => {
                tally.bytes += bytes;
                tally.wrong.extend(wrong);
            }
            Err(error) => {
                let kind = kind(&format!("{error:#}"));
                *tally.kinds.entry(kind).or_default() += 1;
                match (in_fault, in_kill) {
                    (true, _) => tally.after_fault += 1,
                    (false, true) => tally.after_kill += 1,
                    (false, false) => tally.unexplained.push(format!("{error:#}")),
                }
                drop(tally);
                // A dead mount fails at once, again and again.
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }
    Ok(())
}

/// The kind of an error by its text, which ends with the number: the error itself is wrapped.
fn kind(text: &str) -> String {
    let number = text
        .rsplit_once("(os error ")
        .and_then(|(_, rest)| rest.strip_suffix(')'));
    let name = match number {
        Some("5") => "EIO",
        Some("107") => "ENOTCONN",
        Some("110") => "ETIMEDOUT",
        Some("103") => "ECONNABORTED",
        Some("116") => "ESTALE",
        Some(number) => return format!("error {number}"),
        None => text,
    };
    name.to_owned()
}

/// Faults of the store, one after the other, with times between in which all is well: short ones, and
/// the first part of each minute, in which a read that fails can have no other reason than a kill.
fn spoil(course: &Course, origin: &Origin) {
    let mut rng = Rng::new(31);
    while !course.over() {
        if course.now() % MINUTE_MS < WELL_MS {
            nap(course, Duration::from_millis(100));
            continue;
        }
        nap(course, Duration::from_millis(500 + rng.below(2500)));
        let faults = [Fault::Refuse, Fault::Cut, Fault::Corrupt, Fault::Hang];
        let fault = rng.pick(&faults).copied().unwrap_or(Fault::Cut);
        let time = Duration::from_millis(200 + rng.below(3000));
        // Requests that hung are tried again after the store's time limit.
        course.until(&course.fault_until, time + AFTER + AFTER);
        origin.relay().fault(fault);
        course.tally().faults += 1;
        nap(course, time);
        origin.relay().fault(Fault::None);
        course.until(&course.fault_until, AFTER + AFTER);
    }
    origin.relay().fault(Fault::None);
}

fn nap(course: &Course, time: Duration) {
    let begun = Instant::now();
    while begun.elapsed() < time && !course.over() {
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Kills of the daemon; after each it is started again, if nothing else does, and the tree is mounted
/// anew if its mount did not outlive it.
fn kill(course: &Course, node: &mut Node, origin: &Origin, layers: &[&str]) -> Result<()> {
    let mut rng = Rng::new(77);
    while !course.over() {
        nap(course, Duration::from_millis(1000 + rng.below(3000)));
        if course.over() {
            break;
        }
        course.until(&course.kill_until, Duration::from_secs(3600));
        let begun = Instant::now();
        node.kill()?;
        let restarted = begun.elapsed().as_secs_f64() * 1e3;
        if !alive(course, origin) {
            let old = course
                .target
                .read()
                .unwrap_or_else(PoisonError::into_inner)
                .clone();
            let number = course.tally().kills;
            let new = node.place(&format!("mounted-{number}"));
            node.mount(layers, &new, &["--prefetch", "none"])?;
            *course
                .target
                .write()
                .unwrap_or_else(PoisonError::into_inner) = new;
            if node.umount(&old).is_err() {
                let flags = UnmountFlags::DETACH | UnmountFlags::NOFOLLOW;
                let _ = rustix::mount::unmount(&old, flags);
            }
            course.tally().remounts += 1;
        }
        // What began before this moment may still end with an error.
        course.kill_until.store(course.now(), Ordering::Relaxed);
        let mut tally = course.tally();
        tally.kills += 1;
        tally.restarts_ms.push(restarted);
    }
    Ok(())
}

/// Whether the tree still serves what the kernel has not cached: some of many reads succeed while
/// the store is well.
fn alive(course: &Course, origin: &Origin) -> bool {
    let target = course
        .target
        .read()
        .unwrap_or_else(PoisonError::into_inner)
        .clone();
    origin.relay().fault(Fault::None);
    let _ = fs_err::write("/proc/sys/vm/drop_caches", "1");
    let files = roots::plain_files(&target).unwrap_or_default();
    let some: Vec<&PathBuf> = files.iter().step_by(files.len() / 8 + 1).collect();
    !some.is_empty() && some.iter().all(|file| fs_err::read(file).is_ok())
}

/// The scenario `endurance`.
pub(super) fn table(bench: &Bench) -> Result<Report> {
    need_root("mounting")?;
    let (time, size) = match bench.quick {
        true => (Duration::from_secs(30), 8_u64 << 20),
        false => (Duration::from_secs(600), 100 << 20),
    };
    let scratch = bench.scratch("endurance")?;
    let (source, store) = (scratch.join("source"), scratch.join("store"));
    let builder = Node::new(
        bench,
        &scratch.join("builder"),
        &store.display().to_string(),
    )?;
    let mut layers = Vec::new();
    for number in 0..LAYERS {
        let name = format!("part-{number}");
        let inside = source.join(&name);
        fs_err::create_dir_all(&inside)?;
        roots::files(&inside, size, 500 + number)?;
        let at = format!("/{name}");
        builder.build("toolkit", &name, &inside, &["--at", &at])?;
        layers.push(format!("toolkit/{name}:1"));
    }
    drop(builder);
    let layers: Vec<&str> = layers.iter().map(String::as_str).collect();
    let files = roots::plain_files(&source)?;
    let origin = Origin::start(&store)?;
    origin.relay().delay(1);
    let mut node = Node::new(bench, &scratch.join("node"), &origin.url())?;
    let cache = size * LAYERS / 3;
    node.set("LAYERPACK_CACHE_MAX", cache.to_string());
    node.set(
        "LAYERPACK_STORE_OPTIONS",
        "timeout=2&connect_timeout=1&retries=2",
    );
    node.start()?;
    let target = node.place("mounted");
    node.mount(&layers, &target, &["--prefetch", "none"])?;
    let course = Course {
        begun: Instant::now(),
        over: AtomicBool::new(false),
        target: RwLock::new(target),
        fault_until: AtomicU64::new(0),
        kill_until: AtomicU64::new(0),
        tally: Mutex::new(Tally::default()),
        reading: Default::default(),
    };
    let hangs = run(&course, &mut node, &origin, &layers, &source, &files, time)?;
    let last = all_right(&course, &node, &origin, &layers, &source, &files)?;
    node.stop()?;
    let tally = course
        .tally
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner);
    Ok(report(&tally, time, hangs, last, cache, size * LAYERS))
}

/// Everything at once for so long. How many reads hung.
fn run(
    course: &Course,
    node: &mut Node,
    origin: &Origin,
    layers: &[&str],
    source: &Path,
    files: &[PathBuf],
    time: Duration,
) -> Result<u64> {
    let mut hangs = 0;
    let mut outcomes = Vec::new();
    let killer_outcome = std::thread::scope(|scope| -> Result<()> {
        let readers: Vec<_> = (0..READERS)
            .map(|reader| scope.spawn(move || read(course, reader, source, files)))
            .collect();
        scope.spawn(|| spoil(course, origin));
        let killer = scope.spawn(|| kill(course, node, origin, layers));
        let limit = u64::try_from(READ_LIMIT.as_millis())?;
        let mut hung = [0; READERS];
        let mut said = Instant::now();
        while course.begun.elapsed() < time && !killer.is_finished() {
            std::thread::sleep(Duration::from_millis(200));
            for (busy, hung) in course.reading.iter().zip(&mut hung) {
                let since = busy.load(Ordering::Relaxed);
                if since != 0 && course.now().saturating_sub(since) > limit && *hung != since {
                    *hung = since;
                    hangs += 1;
                }
            }
            if said.elapsed() > Duration::from_secs(60) {
                said = Instant::now();
                let tally = course.tally();
                say(format!(
                    "{} s: {} reads, {} wrong, {} kills, {} faults",
                    course.begun.elapsed().as_secs(),
                    tally.reads,
                    tally.wrong.len(),
                    tally.kills,
                    tally.faults
                ));
            }
        }
        course.over.store(true, Ordering::Relaxed);
        for reader in readers {
            outcomes.push(reader.join());
        }
        match killer.join() {
            Ok(outcome) => outcome,
            Err(_) => anyhow::bail!("the thread that kills panicked"),
        }
    });
    for outcome in outcomes {
        match outcome {
            Ok(outcome) => outcome?,
            Err(_) => anyhow::bail!("a reader panicked"),
        }
    }
    killer_outcome?;
    Ok(hangs)
}

/// At the end, with all well again: every file whole. Files that cannot be read or are wrong.
fn all_right(
    course: &Course,
    node: &Node,
    origin: &Origin,
    layers: &[&str],
    source: &Path,
    files: &[PathBuf],
) -> Result<usize> {
    origin.relay().fault(Fault::None);
    let target = node.place("mounted-last");
    node.mount(layers, &target, &["--prefetch", "none"])?;
    let mut bad = 0;
    for original in files {
        let mounted = target.join(original.strip_prefix(source)?);
        let right = fs_err::read(&mounted)
            .ok()
            .zip(fs_err::read(original).ok())
            .is_some_and(|(found, expected)| found == expected);
        if !right {
            bad += 1;
        }
    }
    node.umount(&target)?;
    let old = course
        .target
        .read()
        .unwrap_or_else(PoisonError::into_inner)
        .clone();
    node.umount(&old)?;
    Ok(bad)
}

fn report(tally: &Tally, time: Duration, hangs: u64, last: usize, cache: u64, size: u64) -> Report {
    let failed = tally.after_kill + tally.after_fault + count_of(&tally.unexplained);
    let kinds: Vec<String> = tally
        .kinds
        .iter()
        .map(|(kind, count)| format!("{count} {kind}"))
        .collect();
    let mut report = Report {
        conditions: vec![
            format!(
                "{READERS} readers for {} s over {} MiB in {LAYERS} layers, cache limited to {} MiB; parts of files and whole files, compared with the originals, pages dropped after each read",
                time.as_secs(),
                size >> 20,
                cache >> 20
            ),
            "store: nginx behind a relay that hangs up, cuts replies short, turns bits, or sends nothing on, for 0.2 to 3.2 s at a time, but for 20 s of each minute; requests are given up after 2 s and tried twice more".to_owned(),
            "daemon: killed 1 to 4 s after it serves again and started again, if nothing else does; where its mounts do not outlive it, the stack is mounted anew".to_owned(),
            format!("errors: {}", kinds.join(", ")),
        ],
        columns: vec!["what", "count"],
        ..Report::default()
    };
    let restarts = super::measure::Spread::of(tally.restarts_ms.iter().copied());
    for (what, count) in [
        ("reads", tally.reads.to_string()),
        ("MiB compared", (tally.bytes >> 20).to_string()),
        ("wrong reads", tally.wrong.len().to_string()),
        ("reads that failed", failed.to_string()),
        ("of these across a kill alone", tally.after_kill.to_string()),
        (
            "of these in a fault of the store, or up to 6 s after",
            tally.after_fault.to_string(),
        ),
        (
            "of these for no reason",
            tally.unexplained.len().to_string(),
        ),
        ("longest read, ms", tally.longest_ms.to_string()),
        ("kills", tally.kills.to_string()),
        ("mounted anew", tally.remounts.to_string()),
        ("faults of the store", tally.faults.to_string()),
        ("kill to first answer, ms", restarts.to_string()),
        ("files wrong or unreadable at the end", last.to_string()),
    ] {
        report.rows.push(vec![what.to_owned(), count]);
    }
    let mut verdict = |claim, what: &str, count: u64, examples: &[String]| {
        let example = examples
            .first()
            .map_or_else(String::new, |e| format!("; {e}"));
        report.verdicts.push(Verdict {
            claim,
            found: format!("{what}: {count}, none may be{example}"),
            met: count == 0,
        });
    };
    verdict("F2", "wrong reads", count_of(&tally.wrong), &tally.wrong);
    verdict("F2", "reads that hung", hangs, &[]);
    verdict(
        "F2",
        "failed reads with neither fault nor kill",
        count_of(&tally.unexplained),
        &tally.unexplained,
    );
    verdict(
        "F2",
        "failed reads across a kill alone",
        tally.after_kill,
        &[],
    );
    verdict(
        "F2",
        "files wrong or unreadable at the end",
        u64::try_from(last).unwrap_or(u64::MAX),
        &[],
    );
    report
}

fn count_of(list: &[String]) -> u64 {
    u64::try_from(list.len()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_told_apart() {
        let wrapped = fs_err::File::open("/nonexistent").unwrap_err();
        assert_eq!(kind(&wrapped.to_string()), "error 2");
        let plain = std::io::Error::from_raw_os_error(110);
        assert_eq!(kind(&plain.to_string()), "ETIMEDOUT");
        assert_eq!(kind("short"), "short");
    }
}
