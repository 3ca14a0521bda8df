//! Containers: from the call to the first command, how many a second, and how much memory idle
//! ones take.

use std::io::Read as _;
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use super::measure::{Spread, float};
use super::node::{Node, memory, need_root};
use super::report::{Report, Verdict};
use super::{Bench, roots};
use crate::process;
use crate::steps::say;

/// The environment: one static program.
const LAYER: &str = "base/small:1";
/// Threads that start sandboxes.
const THREADS: usize = 2;
/// Most time that idle sandboxes may take to come up; what is up by then is reported.
const CREATE_LIMIT: Duration = Duration::from_secs(80);

/// From the call to the first byte that the command writes, and to the end of the call, in ms.
fn first_byte(node: &Node, arguments: &[&str]) -> Result<(f64, f64)> {
    let mut command = node.command();
    command
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let begun = Instant::now();
    let mut child = command.spawn()?;
    let mut out = child.stdout.take().context("stdout is a pipe")?;
    let mut byte = [0];
    let got = out.read(&mut byte)?;
    let first = begun.elapsed().as_secs_f64() * 1e3;
    std::io::copy(&mut out, &mut std::io::sink())?;
    let status = child.wait()?;
    let all = begun.elapsed().as_secs_f64() * 1e3;
    if got == 0 || !status.success() {
        bail!("{arguments:?} wrote nothing or failed: {status}");
    }
    Ok((first, all))
}

fn p90(numbers: &[f64]) -> f64 {
    let mut numbers = numbers.to_vec();
    numbers.sort_by(f64::total_cmp);
    let index = (numbers.len() * 9).div_ceil(10).saturating_sub(1);
    numbers.get(index).copied().unwrap_or_default()
}

fn row(what: &str, numbers: &[f64]) -> Vec<String> {
    vec![
        what.to_owned(),
        Spread::of(numbers.iter().copied()).to_string(),
        format!("{:.2}", p90(numbers)),
    ]
}

/// The scenario `sandboxes`.
pub(super) fn table(bench: &Bench) -> Result<Report> {
    need_root("sandboxes")?;
    let scratch = bench.scratch("sandboxes")?;
    let store = scratch.join("store").display().to_string();
    let mut node = Node::new(bench, &scratch.join("node"), &store)?;
    node.build("base", "small", &roots::small(bench)?, &[])?;
    node.start()?;
    let mut report = Report {
        conditions: vec![
            "an environment of one static program, its layer mounted and read before; the command writes one word".to_owned(),
            "first command: from the start of the process `layerpack` to the first byte that the command wrote; so process start and the way back are in it".to_owned(),
        ],
        columns: vec!["what, ms", "median (least to most)", "90th percentile"],
        chart: "ms to the first command",
        ..Report::default()
    };
    let rounds = if bench.quick { 10 } else { 300 };
    let run = ["run", "--rm", LAYER, "--", "echo", "here"];
    first_byte(&node, &run)?;
    let (mut first, mut whole) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let (byte, all) = first_byte(&node, &run)?;
        first.push(byte);
        whole.push(all);
    }
    report.rows.push(row("run --rm: first command", &first));
    report
        .rows
        .push(row("run --rm: to the end, cleaned up", &whole));
    lasting(&node, rounds, &mut report)?;
    let middle = Spread::of(first.iter().copied()).median;
    report.bars.push(("layerpack run".to_owned(), middle));
    report.at_most("S1", "create to first command, median", middle, 5.0, " ms");
    let rate = rate(&node, bench.quick)?;
    report.conditions.push(format!(
        "{THREADS} callers at once: {rate:.0} sandboxes a second, each started, run and cleaned up"
    ));
    report.verdicts.push(Verdict {
        claim: "S1",
        found: format!("{rate:.0} a second on two cores, 200 are asked for"),
        met: rate >= 200.0,
    });
    idle(bench, &node, &mut report)?;
    node.stop()?;
    Ok(report)
}

/// Sandboxes that last: create, first command, remove.
fn lasting(node: &Node, rounds: usize, report: &mut Report) -> Result<()> {
    let (mut create, mut exec, mut remove) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds.min(100) {
        let begun = Instant::now();
        let made = node.json(&["sandbox", "create", LAYER])?;
        create.push(begun.elapsed().as_secs_f64() * 1e3);
        let id = made.get("id").and_then(Value::as_str).context("no id")?;
        exec.push(first_byte(node, &["sandbox", "exec", id, "--", "echo", "here"])?.0);
        let begun = Instant::now();
        node.output(&["sandbox", "rm", "--force", id])?;
        remove.push(begun.elapsed().as_secs_f64() * 1e3);
    }
    report.rows.push(row("sandbox create", &create));
    report.rows.push(row("sandbox exec: first command", &exec));
    report.rows.push(row("sandbox rm", &remove));
    Ok(())
}

/// Sandboxes a second, by callers that start one after the other.
fn rate(node: &Node, quick: bool) -> Result<f64> {
    let time = Duration::from_secs(if quick { 1 } else { 10 });
    let done = AtomicUsize::new(0);
    let begun = Instant::now();
    std::thread::scope(|scope| -> Result<()> {
        let callers: Vec<_> = (0..THREADS)
            .map(|_| {
                scope.spawn(|| -> Result<()> {
                    while begun.elapsed() < time {
                        let arguments = ["run", "--rm", LAYER, "--", "true"];
                        process::quietly(node.command().args(arguments))?;
                        done.fetch_add(1, Ordering::Relaxed);
                    }
                    Ok(())
                })
            })
            .collect();
        for caller in callers {
            match caller.join() {
                Ok(outcome) => outcome?,
                Err(_) => bail!("a caller panicked"),
            }
        }
        Ok(())
    })?;
    let count = u64::try_from(done.load(Ordering::Relaxed))?;
    Ok(float(count) / begun.elapsed().as_secs_f64())
}

/// Proportional share of memory of a process, in bytes; 0 if it is gone.
fn share(pid: i64) -> u64 {
    let path = format!("/proc/{pid}/smaps_rollup");
    let text = fs_err::read_to_string(Path::new(&path)).unwrap_or_default();
    text.lines()
        .find_map(|line| line.strip_prefix("Pss:"))
        .and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok())
        .unwrap_or_default()
        * 1024
}

/// Memory of sandboxes that do nothing.
fn idle(bench: &Bench, node: &Node, report: &mut Report) -> Result<()> {
    let (wanted, rest) = match bench.quick {
        true => (20, Duration::from_secs(1)),
        false => (2000, Duration::from_secs(30)),
    };
    let (usage, before) = (node.usage()?, memory("MemAvailable")?);
    let begun = Instant::now();
    let (mut ids, mut pids) = (Vec::new(), Vec::new());
    let mut stopped = None;
    while ids.len() < wanted && begun.elapsed() < CREATE_LIMIT {
        // How many go is what is to be found out: the first that does not ends it.
        match node.json(&["sandbox", "create", LAYER]) {
            Ok(made) => {
                let id = made.get("id").and_then(Value::as_str).context("no id")?;
                ids.push(id.to_owned());
                pids.extend(made.get("pid").and_then(Value::as_i64));
            }
            Err(error) => {
                stopped = Some(format!("{error:#}"));
                break;
            }
        }
    }
    let took = begun.elapsed().as_secs_f64();
    std::thread::sleep(rest);
    let (now, after) = (node.usage()?, memory("MemAvailable")?);
    let count = float(u64::try_from(ids.len().max(1))?);
    let own: u64 = pids.iter().map(|pid| share(*pid)).sum();
    let all = float(before.saturating_sub(after));
    let beyond = (all - float(own)).max(0.0) / count / 1048576.0;
    report.conditions.push(format!(
        "{} idle containers came up in {took:.1} s, measured after {} s: {:.2} MiB of the machine's memory each, {:.2} MiB of that their own processes; the daemon has {:.1} MiB, {:.1} before{}",
        ids.len(),
        rest.as_secs(),
        all / count / 1048576.0,
        float(own) / count / 1048576.0,
        float(now.rss) / 1048576.0,
        float(usage.rss) / 1048576.0,
        stopped.map_or_else(String::new, |why| format!("; the next did not start: {why}")),
    ));
    let what = format!(
        "memory of each of {} idle containers beyond its processes",
        ids.len()
    );
    report.at_most("S3", &what, beyond, 2.0, " MiB");
    report.verdicts.push(Verdict {
        claim: "S3",
        found: format!("{} idle containers at once, 2,000 are asked for", ids.len()),
        met: ids.len() >= 2000,
    });
    let begun = Instant::now();
    for some in ids.chunks(50) {
        let mut command = node.command();
        process::quietly(command.args(["sandbox", "rm", "--force"]).args(some))?;
    }
    say(format!(
        "{} sandboxes removed in {:.1} s",
        ids.len(),
        begun.elapsed().as_secs_f64()
    ));
    Ok(())
}
