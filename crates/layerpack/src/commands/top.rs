//! `layerpack top`: live mounts and their rates.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal as _, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use layerpack_layerfs::LayerStatus;
use layerpack_store::LayerId;
use serde::Serialize;

use super::Outcome;
use super::daemon::holder;
use crate::api::Status;
use crate::args::TopArgs;
use crate::client::Client;
use crate::context::{Context, require_root};
use crate::output::{Format, Table, print};
use crate::units::human_bytes;

/// Clears a terminal and goes to its first line.
const CLEAR: &str = "\x1b[H\x1b[2J";

/// Rates of some layers together. Bytes and numbers a second.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
struct Rates {
    reads_per_second: u64,
    read_bytes_per_second: u64,
    /// Reads answered from the cache, in percent; null without reads.
    hit_percent: Option<u64>,
    /// As stored, from the store.
    fetched_bytes_per_second: u64,
    /// From other nodes, uncompressed.
    peer_bytes_per_second: u64,
    /// From the caches of other layers of this node, uncompressed.
    copied_bytes_per_second: u64,
    failed_per_second: u64,
    /// Reads that wait now.
    waiting: u64,
    /// How long the oldest of them has waited.
    oldest_wait_ms: u64,
}

/// A mount, sandbox or other lease.
#[derive(Debug, Serialize)]
struct Row {
    lease: String,
    owner: String,
    on: String,
    layers: usize,
    /// Its layers were served by a daemon that died with its holder; the rates are not its.
    lost: bool,
    #[serde(flatten)]
    rates: Rates,
}

/// One look.
#[derive(Debug, Serialize)]
struct View {
    pid: u32,
    rss_bytes: u64,
    cache_used_bytes: u64,
    cache_max_bytes: u64,
    inflight_bytes: u64,
    interval_ms: u64,
    layers: usize,
    /// All layers.
    total: Rates,
    mounts: Vec<Row>,
}

/// Counters of a layer, for differences.
#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    reads: u64,
    misses: u64,
    served: u64,
    fetched: u64,
    peers: u64,
    copied: u64,
    errors: u64,
}

impl Counts {
    fn of(layer: &LayerStatus) -> Self {
        Self {
            reads: layer.reads,
            misses: layer.misses,
            served: layer.served_bytes,
            fetched: layer.fetched_bytes,
            peers: layer.from_peers_bytes,
            copied: layer.copied_bytes,
            errors: layer.errors,
        }
    }
}

/// Rates of layers between two looks.
fn rates<'a>(
    layers: impl Iterator<Item = &'a LayerStatus>,
    before: &BTreeMap<LayerId, Counts>,
    interval: Duration,
) -> Rates {
    let mut sum = Counts::default();
    let mut rates = Rates::default();
    for layer in layers {
        let now = Counts::of(layer);
        // A layer that came since then began at zero; so did one that went and came again.
        let was = before.get(&layer.layer_id).copied().unwrap_or_default();
        let more = |now: u64, was: u64| now.checked_sub(was).unwrap_or(now);
        sum.reads += more(now.reads, was.reads);
        sum.misses += more(now.misses, was.misses);
        sum.served += more(now.served, was.served);
        sum.fetched += more(now.fetched, was.fetched);
        sum.peers += more(now.peers, was.peers);
        sum.copied += more(now.copied, was.copied);
        sum.errors += more(now.errors, was.errors);
        rates.waiting += layer.waiting;
        rates.oldest_wait_ms = rates.oldest_wait_ms.max(layer.oldest_wait_ms);
    }
    let ms = u64::try_from(interval.as_millis())
        .unwrap_or(u64::MAX)
        .max(1);
    let per_second = |n: u64| n.saturating_mul(1000) / ms;
    Rates {
        reads_per_second: per_second(sum.reads),
        read_bytes_per_second: per_second(sum.served),
        hit_percent: (sum.reads.saturating_sub(sum.misses) * 100).checked_div(sum.reads),
        fetched_bytes_per_second: per_second(sum.fetched),
        peer_bytes_per_second: per_second(sum.peers),
        copied_bytes_per_second: per_second(sum.copied),
        failed_per_second: per_second(sum.errors),
        ..rates
    }
}

fn view(status: &Status, before: &BTreeMap<LayerId, Counts>, interval: Duration) -> View {
    let totals = &status.node.totals;
    let mut mounts: Vec<Row> = status
        .leases
        .iter()
        .map(|lease| {
            let own = |layer: &&LayerStatus| lease.stack.layers.contains(&layer.layer_id);
            Row {
                lease: lease.spec.id.clone(),
                owner: lease.spec.owner.clone(),
                on: holder(&status.daemon.root, &lease.spec),
                layers: lease.stack.layers.len(),
                lost: lease.lost,
                rates: rates(status.node.layers.iter().filter(own), before, interval),
            }
        })
        .collect();
    mounts.sort_by(|a, b| {
        let busy = |row: &Row| (row.rates.read_bytes_per_second, row.rates.waiting);
        busy(b).cmp(&busy(a)).then_with(|| a.on.cmp(&b.on))
    });
    View {
        pid: status.daemon.pid,
        rss_bytes: totals.rss_bytes,
        cache_used_bytes: totals.cache_used_bytes,
        cache_max_bytes: totals.cache_max_bytes,
        inflight_bytes: totals.inflight_bytes,
        interval_ms: u64::try_from(interval.as_millis()).unwrap_or(u64::MAX),
        layers: status.node.layers.len(),
        total: rates(status.node.layers.iter(), before, interval),
        mounts,
    }
}

fn counts(status: &Status) -> BTreeMap<LayerId, Counts> {
    let layers = status.node.layers.iter();
    layers.map(|l| (l.layer_id, Counts::of(l))).collect()
}

pub(super) fn run(context: &Context, args: &TopArgs) -> Outcome {
    require_root("asking the daemon")?;
    let client = Client::new(context.root())?;
    let once = args.once || !io::stdout().is_terminal();
    // Not so often that looking is what is seen.
    let interval = args.interval.0.max(Duration::from_millis(100));
    let mut status = client.status()?;
    let mut at = Instant::now();
    loop {
        let before = counts(&status);
        std::thread::sleep(interval);
        status = client.status()?;
        let shown = view(&status, &before, at.elapsed());
        at = Instant::now();
        if once {
            print(context.format, &shown, |out| draw(out, &shown))?;
            return Ok(ExitCode::SUCCESS);
        }
        let mut out = io::stdout().lock();
        match context.format {
            Format::Text => {
                write!(out, "{CLEAR}")?;
                draw(&mut out, &shown)?;
            }
            // One document after the other.
            Format::Json => writeln!(out, "{}", serde_json::to_string(&shown)?)?,
        }
        out.flush()?;
    }
}

fn hits(rates: &Rates) -> String {
    rates
        .hit_percent
        .map_or_else(|| "-".to_owned(), |percent| format!("{percent}%"))
}

fn oldest(rates: &Rates) -> String {
    match rates.waiting {
        0 => "-".to_owned(),
        _ => format!("{} ms", rates.oldest_wait_ms),
    }
}

fn draw(out: &mut dyn Write, view: &View) -> io::Result<()> {
    let limit = match view.cache_max_bytes {
        0 => String::new(),
        max => format!(" of {}", human_bytes(max)),
    };
    writeln!(
        out,
        "daemon {}: {} resident, cache {}{limit}, {} in flight, {} layers",
        view.pid,
        human_bytes(view.rss_bytes),
        human_bytes(view.cache_used_bytes),
        human_bytes(view.inflight_bytes),
        view.layers
    )?;
    let mut table = Table::new(&[
        "MOUNT",
        "LAYERS",
        "READS/S",
        "BYTES/S",
        "HITS",
        "FETCHED/S",
        "PEERS/S",
        "COPIED/S",
        "FAILED/S",
        "WAITING",
        "OLDEST",
    ]);
    let mut row = |on: &str, layers: usize, rates: &Rates| {
        table.row([
            on.to_owned(),
            layers.to_string(),
            rates.reads_per_second.to_string(),
            human_bytes(rates.read_bytes_per_second),
            hits(rates),
            human_bytes(rates.fetched_bytes_per_second),
            human_bytes(rates.peer_bytes_per_second),
            human_bytes(rates.copied_bytes_per_second),
            rates.failed_per_second.to_string(),
            rates.waiting.to_string(),
            oldest(rates),
        ]);
    };
    row("all layers", view.layers, &view.total);
    for mount in &view.mounts {
        let mark = if mount.lost { " (lost)" } else { "" };
        row(&format!("{}{mark}", mount.on), mount.layers, &mount.rates);
    }
    table.write(out)?;
    if view.mounts.iter().any(|mount| mount.lost) {
        writeln!(
            out,
            "lost: on layers of a daemon that died with its holder (`layerpack daemon status` says what to do)"
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_differences_over_time() {
        let text = r#"{"layer_id":"b3:0000000000000000000000000000000000000000000000000000000000000001",
            "reference":"base/a:1","manifest":"b3:0000000000000000000000000000000000000000000000000000000000000002",
            "mounted":true,"leases":1,"opens":1,"meta_bytes":1,"data_bytes":1,"cached_bytes":1,
            "fetched_bytes":5000,"fetched_raw_bytes":1,"requests":1,"frames":1,"written_bytes":1,
            "served_bytes":9000,"reads":30,"misses":12,"errors":2,"passed_through_bytes":0,
            "from_peers_bytes":800,"copied_bytes":7000,
            "waiting":3,"oldest_wait_ms":250}"#;
        let layer: LayerStatus = serde_json::from_str(text).unwrap();
        let was = Counts {
            reads: 10,
            misses: 7,
            served: 1000,
            fetched: 1000,
            peers: 200,
            copied: 1000,
            errors: 2,
        };
        let before = BTreeMap::from([(layer.layer_id, was)]);
        let found = rates([&layer].into_iter(), &before, Duration::from_secs(2));
        assert_eq!(
            found,
            Rates {
                reads_per_second: 10,
                read_bytes_per_second: 4000,
                hit_percent: Some(75),
                fetched_bytes_per_second: 2000,
                peer_bytes_per_second: 300,
                copied_bytes_per_second: 3000,
                failed_per_second: 0,
                waiting: 3,
                oldest_wait_ms: 250,
            }
        );
        // The same layer, mounted anew since.
        let more = Counts { reads: 100, ..was };
        let before = BTreeMap::from([(layer.layer_id, more)]);
        let found = rates([&layer].into_iter(), &before, Duration::from_secs(1));
        assert_eq!(found.reads_per_second, 30);
        let none = rates([].into_iter(), &before, Duration::from_secs(1));
        assert_eq!((none.hit_percent, none.reads_per_second), (None, 0));
    }
}
