//! What the first `git status` reads of a mounted workspace, with and without a refreshed index.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use layerpack_fixtures::find_tool;
use serde_json::Value;

use super::measure::{self, float};
use super::report::Report;
use super::snapshot::Node;
use super::{Bench, inputs};
use crate::process;

/// The name under which the workspace is packed.
const LAYER: &str = "workspace/repo:1";

/// A mount, taken away whatever happens.
struct Mounted<'a> {
    node: &'a Node<'a>,
    point: PathBuf,
}

impl<'a> Mounted<'a> {
    fn new(node: &'a Node<'a>, point: &Path) -> Result<Self> {
        fs_err::create_dir_all(point)?;
        node.output(&["mount", LAYER, &point.display().to_string()])?;
        Ok(Self {
            node,
            point: point.to_owned(),
        })
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        let point = self.point.display().to_string();
        let _ = self.node.output(&["umount", &point]);
    }
}

/// Bytes of the layer's data that the node fetched so far, and all there are.
fn fetched(node: &Node<'_>) -> Result<(u64, u64)> {
    let status = node.json(&["daemon", "status"])?;
    let layers = status.pointer("/node/layers").and_then(Value::as_array);
    let layer = layers
        .into_iter()
        .flatten()
        .find(|layer| layer.get("reference").and_then(Value::as_str) == Some(LAYER));
    let number = |key: &str| layer?.get(key)?.as_u64();
    number("fetched_raw_bytes")
        .zip(number("data_bytes"))
        .context("the daemon's status does not have the layer")
}

/// The same when readahead has come to its end.
fn settled(node: &Node<'_>) -> Result<(u64, u64)> {
    let mut last = fetched(node)?;
    loop {
        std::thread::sleep(Duration::from_millis(300));
        let next = fetched(node)?;
        if next == last {
            return Ok(next);
        }
        last = next;
    }
}

/// Runs `git status` on the repository and says how long that took. It must find nothing.
fn status(repository: &Path) -> Result<Duration> {
    let mut command = Command::new("git");
    command
        .args(["-c", "safe.directory=*", "status", "--porcelain"])
        .current_dir(repository)
        .env("GIT_OPTIONAL_LOCKS", "0")
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .env_remove("GIT_DIR")
        .env_remove("GIT_WORK_TREE")
        .env_remove("GIT_INDEX_FILE");
    let begun = Instant::now();
    let found = process::output(&mut command)?;
    let took = begun.elapsed();
    if !found.trim().is_empty() {
        bail!("git finds changes in a packed repository: {found}");
    }
    Ok(took)
}

/// The scenario `git-status`.
pub(super) fn table(bench: &Bench) -> Result<Report> {
    if !rustix::process::geteuid().is_root() {
        bail!("mounts need root");
    }
    find_tool("git").context("needs git")?;
    let workspaces = inputs::workspaces(bench)?;
    let source = workspaces.first().context("there is no workspace")?;
    let files = measure::size(source)?;
    let mut rows = Vec::new();
    let mut bars = Vec::new();
    let mut parts = Vec::new();
    for (what, extra) in [("as it was", &[][..]), ("`--git-index`", &["--git-index"])] {
        // A node of its own: nothing is in its cache.
        let scratch = bench.scratch("git-status")?;
        let node = Node {
            bench,
            root: scratch.join("node"),
            store: scratch.join("store"),
        };
        node.build("workspace", "repo", source, extra)?;
        let mounted = Mounted::new(&node, &scratch.join("mount"))?;
        let (before, all) = settled(&node)?;
        let took = status(&mounted.point)?;
        let (after, _) = settled(&node)?;
        let read = after.saturating_sub(before);
        let part = float(read) / float(all);
        rows.push(vec![
            what.to_owned(),
            read.to_string(),
            format!("{:.1}%", part * 100.0),
            format!("{:.0}", took.as_secs_f64() * 1e3),
        ]);
        bars.push((what.to_owned(), float(read) / 1e6));
        parts.push(part);
    }
    let mut report = Report {
        conditions: vec![
            format!(
                "a clone of this repository with its history, {:.1} MB of files, packed from where it was cloned to; mounted on a node that has none of it",
                float(files) / 1e6
            ),
            "bytes of the layer's data that were fetched until no more came, whole frames, readahead included".to_owned(),
        ],
        columns: vec!["index", "bytes fetched", "of the layer's data", "`git status` ms"],
        rows,
        chart: "MB fetched by the first git status",
        bars,
        ..Report::default()
    };
    if let [_, with] = parts[..] {
        report.at_most(
            "B10",
            "of the layer's data, with a refreshed index",
            with,
            0.22,
            "",
        );
    }
    Ok(report)
}
