//! Mounting: a layer that is not on the node, a stack whose layers are up, very many layers, very
//! many stacks.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use layerpack_fixtures::guards::MountGuard;
use layerpack_fixtures::rng::Rng;
use serde_json::{Value, json};

use super::measure::{Spread, float};
use super::node::{Node, memory, need_root};
use super::origin::Origin;
use super::report::{Report, Verdict};
use super::{Bench, roots};
use crate::steps::say;

/// Layers of a stack, as claimed.
const DEPTHS: [usize; 4] = [3, 5, 10, 20];
/// Builds at once.
const BUILDERS: usize = 6;
/// Layers of each of very many stacks.
const DEEP: usize = 100;
/// How long the very many stacks may take to come up; what is up by then is reported.
const STACKS_LIMIT: Duration = Duration::from_secs(300);

/// The number below which `percent` of 100 lie.
fn percentile(numbers: &[f64], percent: usize) -> f64 {
    let mut numbers = numbers.to_vec();
    numbers.sort_by(f64::total_cmp);
    let index = (numbers.len() * percent).div_ceil(100).saturating_sub(1);
    numbers.get(index).copied().unwrap_or_default()
}

/// The scenario `first-mount`.
pub(super) fn first(bench: &Bench) -> Result<Report> {
    need_root("mounting")?;
    let scratch = bench.scratch("first-mount")?;
    let store = scratch.join("store");
    let root = roots::tools(bench)?;
    let builder = Node::new(
        bench,
        &scratch.join("builder"),
        &store.display().to_string(),
    )?;
    let built = builder.build("base", "root", &root, &[])?;
    drop(builder);
    let metadata = built.get("meta_bytes").and_then(Value::as_u64);
    let origin = Origin::start(&store)?;
    let mut report = Report {
        conditions: vec![
            format!(
                "one layer with {} bytes of metadata (uncompressed), from nginx behind a relay that delays each request",
                metadata.context("the build says nothing of metadata")?
            ),
            "a new node each time, its daemon up; time of `layerpack mount`, process start included; nothing is read ahead".to_owned(),
            "round trips: growth of the least time by the delay, so requests that run at once count once".to_owned(),
        ],
        columns: vec![
            "delay ms",
            "ms: median (least to most)",
            "requests",
            "bytes",
            "round trips",
        ],
        chart: "ms until a layer that is not on the node is mounted",
        ..Report::default()
    };
    let rounds = if bench.quick { 2 } else { 9 };
    let mut without_delay = 0.0;
    for delay in [0, 5, 20_u64] {
        origin.relay().delay(delay);
        let mut times = Vec::new();
        let (mut requests, mut bytes) = (0, 0);
        for _ in 0..rounds {
            let mut node = Node::new(bench, &scratch.join("node"), &origin.url())?;
            node.start()?;
            let target = node.place("mounted");
            fs_err::create_dir_all(&target)?;
            origin.relay().counted();
            let begun = Instant::now();
            node.mount(&["base/root:1"], &target, &["--prefetch", "none"])?;
            times.push(begun.elapsed().as_secs_f64() * 1e3);
            (requests, bytes) = origin.relay().counted();
            node.umount(&target)?;
            node.stop()?;
        }
        let times = Spread::of(times);
        let trips = match delay {
            0 => {
                without_delay = times.least;
                None
            }
            delay => Some((times.least - without_delay) / float(delay)),
        };
        report.rows.push(vec![
            delay.to_string(),
            times.to_string(),
            requests.to_string(),
            bytes.to_string(),
            trips.map_or_else(|| "-".to_owned(), |trips| format!("{trips:.1}")),
        ]);
        report
            .bars
            .push((format!("layerpack, {delay} ms"), times.median));
        if let Some(trips) = trips.filter(|_| delay == 20) {
            report.at_most("M1", "round trips of a first mount", trips, 1.1, "");
        }
    }
    Ok(report)
}

/// Layers of a few small files each; their digests, in order.
fn layers(node: &Node, scratch: &Path, count: usize) -> Result<Vec<String>> {
    let one = &|number: usize| -> Result<String> {
        let source = scratch.join(format!("layer-{number}"));
        let mut rng = Rng::new(u64::try_from(number)?);
        for directory in ["shared".to_owned(), format!("own-{number}")] {
            let directory = source.join(directory);
            fs_err::create_dir_all(&directory)?;
            for file in 0..4 {
                let size = 2000 + rng.below_usize(3000);
                fs_err::write(directory.join(format!("{number}-{file}")), rng.bytes(size))?;
            }
        }
        let built = node.build("toolkit", &format!("t{number}"), &source, &[])?;
        super::remove(&source)?;
        let digest = built.get("digest").and_then(Value::as_str);
        Ok(digest.context("the build names no digest")?.to_owned())
    };
    // Several at once: a build waits for the disk most of its time.
    let numbers: Vec<usize> = (0..count).collect();
    let mut digests = Vec::with_capacity(count);
    std::thread::scope(|scope| -> Result<()> {
        let builders: Vec<_> = numbers
            .chunks(count.div_ceil(BUILDERS).max(1))
            .map(|some| {
                scope.spawn(move || -> Vec<Result<String>> {
                    some.iter().map(|number| one(*number)).collect()
                })
            })
            .collect();
        for builder in builders {
            match builder.join() {
                Ok(built) => digests.extend(built),
                Err(_) => bail!("a thread that builds panicked"),
            }
        }
        Ok(())
    })?;
    digests.into_iter().collect()
}

/// Asks the daemon for a stack. What overlayfs is to be given, topmost first.
fn lease(node: &Node, store: &str, id: &str, layers: &[String]) -> Result<Vec<PathBuf>> {
    let request = json!({
        "store": store,
        "layers": layers,
        "lease": {"id": id, "owner": "bench", "pid": std::process::id()},
    });
    let reply: Value =
        serde_json::from_str(&node.call("POST", "/v1/stacks", &request.to_string())?)?;
    let lowers = reply.get("lowers").and_then(Value::as_array);
    Ok(lowers
        .context("no directories in the reply")?
        .iter()
        .filter_map(Value::as_str)
        .map(PathBuf::from)
        .collect())
}

fn overlay(lowers: &[PathBuf], target: &Path) -> Result<MountGuard> {
    let lowers: Vec<&Path> = lowers.iter().map(PathBuf::as_path).collect();
    Ok(MountGuard::overlay(&lowers, None, target)?)
}

/// The scenario `mounts`.
pub(super) fn table(bench: &Bench) -> Result<Report> {
    need_root("mounting")?;
    let scratch = bench.scratch("mounts")?;
    let store = scratch.join("store").display().to_string();
    let mut node = Node::new(bench, &scratch.join("node"), &store)?;
    let count = if bench.quick { 100 } else { 1000 };
    let begun = Instant::now();
    let digests = layers(&node, &scratch, count)?;
    say(format!(
        "{count} layers built in {:.1} s",
        begun.elapsed().as_secs_f64()
    ));
    let url = format!("file://{store}");
    node.start()?;
    let mut report = Report {
        conditions: vec![
            "generated layers of eight small files; store on the local disk".to_owned(),
            "mount of a stack: the daemon's reply to POST /v1/stacks on a new connection, and an overlay of what it names; layers up, not seen in this stack before".to_owned(),
            "kernel memory: growth of Slab, KernelStack, PageTables, VmallocUsed and Percpu in /proc/meminfo; right only where nothing else runs".to_owned(),
        ],
        columns: vec!["what", "median", "99th percentile", "by the daemon alone: median", "most"],
        chart: "ms to mount a stack whose layers are up",
        ..Report::default()
    };
    many(&node, &url, &digests, &mut report)?;
    stacks(bench, &node, &scratch, &url, &digests, &mut report)?;
    command_line(bench, &node, &scratch, &mut report)?;
    deep(bench, &node, &scratch, &url, &digests, &mut report)?;
    node.stop()?;
    Ok(report)
}

/// What the kernel keeps for itself, in bytes.
fn kernel() -> Result<u64> {
    ["Slab", "KernelStack", "PageTables", "VmallocUsed", "Percpu"]
        .into_iter()
        .map(memory)
        .sum()
}

/// Memory of all layers mounted, each by a lease of its own.
fn many(node: &Node, url: &str, digests: &[String], report: &mut Report) -> Result<()> {
    let (usage, before) = (node.usage()?, kernel()?);
    let mut times = Vec::new();
    for (number, digest) in digests.iter().enumerate() {
        let begun = Instant::now();
        lease(
            node,
            url,
            &format!("one-{number}"),
            std::slice::from_ref(digest),
        )?;
        times.push(begun.elapsed().as_secs_f64() * 1e3);
    }
    let (now, after) = (node.usage()?, kernel()?);
    let count = float(u64::try_from(digests.len())?);
    let each = |bytes: u64| float(bytes) / 1024.0 / count;
    let daemon = each(now.rss.saturating_sub(usage.rss));
    let in_kernel = each(after.saturating_sub(before));
    report.rows.push(vec![
        format!("bring up one layer of {count}, ms"),
        format!("{:.2}", percentile(&times, 50)),
        format!("{:.2}", percentile(&times, 99)),
        format!("{:.2}", percentile(&times, 50)),
        format!("{:.2}", percentile(&times, 100)),
    ]);
    report.conditions.push(format!(
        "{count} layers mounted: {daemon:.1} KiB of the daemon and {in_kernel:.1} KiB of the kernel for each; the daemon has {:.1} MiB, {:.1} before",
        float(now.rss) / 1048576.0,
        float(usage.rss) / 1048576.0
    ));
    let what = format!("memory of each of {count} mounted layers, daemon and kernel");
    report.at_most("M8", &what, daemon + in_kernel, 100.0, " KiB");
    let what = format!("the daemon with {count} layers mounted");
    report.at_most("M8", &what, float(now.rss) / 1048576.0, 64.0, " MiB");
    Ok(())
}

/// A different choice of layers each time, all of them up.
fn stacks(
    bench: &Bench,
    node: &Node,
    scratch: &Path,
    url: &str,
    digests: &[String],
    report: &mut Report,
) -> Result<()> {
    let target = scratch.join("stack");
    fs_err::create_dir_all(&target)?;
    let mut rng = Rng::new(5);
    for depth in DEPTHS {
        let (mut all, mut daemon) = (Vec::new(), Vec::new());
        for round in 0..if bench.quick { 20 } else { 300 } {
            let mut chosen = Vec::with_capacity(depth);
            while chosen.len() < depth {
                let digest = rng.pick(digests).context("no layers")?.clone();
                if !chosen.contains(&digest) {
                    chosen.push(digest);
                }
            }
            let id = format!("stack-{depth}-{round}");
            let begun = Instant::now();
            let lowers = lease(node, url, &id, &chosen)?;
            daemon.push(begun.elapsed().as_secs_f64() * 1e3);
            let guard = overlay(&lowers, &target)?;
            all.push(begun.elapsed().as_secs_f64() * 1e3);
            guard.unmount()?;
            node.call("DELETE", &format!("/v1/stacks/{id}"), "")?;
        }
        report.rows.push(vec![
            format!("stack of {depth}, ms"),
            format!("{:.2}", percentile(&all, 50)),
            format!("{:.2}", percentile(&all, 99)),
            format!("{:.2}", percentile(&daemon, 50)),
            format!("{:.2}", percentile(&daemon, 100)),
        ]);
        let what = format!("stack of {depth} layers, 99th percentile");
        report.at_most("M2", &what, percentile(&all, 99), 1.0, " ms");
        report
            .bars
            .push((format!("layerpack, {depth} layers"), percentile(&all, 50)));
    }
    Ok(())
}

/// The same by the command line, as a user has it.
fn command_line(bench: &Bench, node: &Node, scratch: &Path, report: &mut Report) -> Result<()> {
    let target = scratch.join("by-command");
    let names: Vec<String> = (0..10)
        .map(|number| format!("toolkit/t{number}:1"))
        .collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut times = Vec::new();
    for _ in 0..if bench.quick { 5 } else { 50 } {
        let begun = Instant::now();
        node.mount(&names, &target, &["--prefetch", "none"])?;
        times.push(begun.elapsed().as_secs_f64() * 1e3);
        node.umount(&target)?;
    }
    report.rows.push(vec![
        "`layerpack mount` of 10, ms".to_owned(),
        format!("{:.2}", percentile(&times, 50)),
        format!("{:.2}", percentile(&times, 99)),
        "-".to_owned(),
        "-".to_owned(),
    ]);
    Ok(())
}

/// Very many stacks of very many layers at once.
fn deep(
    bench: &Bench,
    node: &Node,
    scratch: &Path,
    url: &str,
    digests: &[String],
    report: &mut Report,
) -> Result<()> {
    let wanted = if bench.quick { 20 } else { 10_000 };
    let (usage, before) = (node.usage()?, kernel()?);
    let mut guards = Vec::new();
    let mut times = Vec::new();
    let begun = Instant::now();
    let mut rng = Rng::new(6);
    for number in 0..wanted {
        if begun.elapsed() > STACKS_LIMIT {
            break;
        }
        let first = rng.below_usize(digests.len().saturating_sub(DEEP) + 1);
        let chosen = digests.get(first..first + DEEP).context("too few layers")?;
        let target = scratch.join("stacks").join(number.to_string());
        fs_err::create_dir_all(&target)?;
        let started = Instant::now();
        let lowers = lease(node, url, &format!("deep-{number}"), chosen)?;
        guards.push(overlay(&lowers, &target)?);
        times.push(started.elapsed().as_secs_f64() * 1e3);
    }
    let took = begun.elapsed().as_secs_f64();
    let (now, after) = (node.usage()?, kernel()?);
    let up = guards.len();
    // One file of each layer, through the last stack.
    if let Some(last) = guards.last() {
        super::measure::warm(last.path())?;
    }
    report.rows.push(vec![
        format!("{up} stacks of {DEEP} at once, ms each"),
        format!("{:.2}", percentile(&times, 50)),
        format!("{:.2}", percentile(&times, 99)),
        "-".to_owned(),
        format!("{:.2}", percentile(&times, 100)),
    ]);
    report.conditions.push(format!(
        "{up} stacks of {DEEP} layers came up in {took:.1} s: the daemon has {:.1} MiB, {:.1} before; the kernel {:.1} KiB for each",
        float(now.rss) / 1048576.0,
        float(usage.rss) / 1048576.0,
        float(after.saturating_sub(before)) / 1024.0 / float(u64::try_from(up.max(1))?)
    ));
    report.verdicts.push(Verdict {
        claim: "M8",
        found: format!(
            "{up} stacks of {DEEP} layers at once, the daemon with {:.1} MiB; 10,000 and 64 MiB are asked for",
            float(now.rss) / 1048576.0
        ),
        met: up >= 10_000 && now.rss <= 64 << 20,
    });
    let begun = Instant::now();
    drop(guards);
    for number in 0..up {
        node.call("DELETE", &format!("/v1/stacks/deep-{number}"), "")?;
    }
    say(format!(
        "{up} stacks taken down in {:.1} s",
        begun.elapsed().as_secs_f64()
    ));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles() {
        let numbers: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(percentile(&numbers, 50).to_bits(), 50_f64.to_bits());
        assert_eq!(percentile(&numbers, 99).to_bits(), 99_f64.to_bits());
        assert_eq!(percentile(&numbers, 100).to_bits(), 100_f64.to_bits());
        assert_eq!(percentile(&[], 99).to_bits(), 0_f64.to_bits());
    }
}
