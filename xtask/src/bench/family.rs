//! A family of environments: the same base with several versions of a package set, and workspaces
//! of one repository at several commits; beside the same as OCI layers.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::measure::{self, float};
use super::report::Report;
use super::{Bench, inputs};
use crate::process;

/// The scenario `family`.
pub(super) fn table(bench: &Bench) -> Result<Report> {
    let base = inputs::debian(bench)?;
    let packages = inputs::package_sets(bench)?;
    let workspaces = inputs::workspaces(bench)?;
    let scratch = bench.scratch("family")?;
    let store = scratch.join("store");
    let mut rows = Vec::new();
    let mut total = (0, 0);
    let mut all = Chunks::default();
    let members = [("base", "base", vec![base])]
        .into_iter()
        .chain([("packages", "toolkit", packages)])
        .chain([("workspaces", "workspace", workspaces)]);
    for (name, kind, sources) in members {
        let before = size(&store)?;
        let mut gzip = 0;
        let mut chunks = Chunks::default();
        for (version, source) in sources.iter().enumerate() {
            let mut command = Command::new(&bench.binary);
            command
                .args([
                    "--quiet", "-o", "json", "build", "--kind", kind, "--name", name,
                ])
                .args(["--version", &version.to_string(), "--from"])
                .arg(format!("dir:{}", source.display()))
                .arg("--store")
                .arg(&store)
                .arg("--cache-dir")
                .arg(scratch.join("cache"));
            chunks.add(&process::output(&mut command)?)?;
            let layer = scratch.join("layer.tar.gz");
            let mut tar = Command::new("tar");
            tar.args(["-I", "gzip -6", "-cf"]).arg(&layer);
            process::quietly(tar.arg("-C").arg(source).arg("."))?;
            gzip += measure::size(&layer)?;
        }
        let ours = size(&store)? - before;
        total = (total.0 + ours, total.1 + gzip);
        rows.push(row(name, sources.len(), ours, gzip, &chunks));
        all.raw += chunks.raw;
        all.new += chunks.new;
    }
    rows.push(row("all", 0, total.0, total.1, &all));
    let mut report = Report {
        conditions: vec![
            "one base, versions of Django with what it needs, clones of this repository with their history".to_owned(),
            "beside each as one tar layer with gzip -6, as container builders make them; the base counts once on both sides".to_owned(),
            "dedupe ratio: bytes of files for each byte that the store did not have, before compression".to_owned(),
        ],
        columns: vec!["part", "layers", "layerpack bytes", "OCI gzip bytes", "ratio", "dedupe ratio"],
        rows,
        chart: "MB stored for the whole family",
        bars: vec![
            ("layerpack".to_owned(), float(total.0) / 1e6),
            ("OCI layers, gzip".to_owned(), float(total.1) / 1e6),
        ],
        ..Report::default()
    };
    report.at_most(
        "B7",
        "bytes beside OCI gzip layers",
        float(total.0) / float(total.1),
        0.5,
        "",
    );
    Ok(report)
}

fn size(store: &Path) -> Result<u64> {
    if store.exists() {
        measure::size(store)
    } else {
        Ok(0)
    }
}

/// What builds said of the contents that they were given.
#[derive(Default)]
struct Chunks {
    /// Bytes of files.
    raw: u64,
    /// Bytes of those that the store did not have.
    new: u64,
}

impl Chunks {
    fn add(&mut self, report: &str) -> Result<()> {
        let report: Value = serde_json::from_str(report)?;
        let number = |key| {
            let number = report.pointer(key).and_then(Value::as_u64);
            number.with_context(|| format!("the report has no {key}"))
        };
        self.raw += number("/store/raw_bytes")?;
        self.new += number("/store/new_raw_bytes")?;
        Ok(())
    }
}

fn row(part: &str, layers: usize, ours: u64, gzip: u64, chunks: &Chunks) -> Vec<String> {
    vec![
        part.to_owned(),
        if layers == 0 {
            String::new()
        } else {
            layers.to_string()
        },
        ours.to_string(),
        gzip.to_string(),
        format!("{:.3}", float(ours) / float(gzip)),
        format!("{:.2}", float(chunks.raw) / float(chunks.new.max(1))),
    ]
}
