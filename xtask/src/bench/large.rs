//! Inputs that are large in one way: a million files, one file of 10 GiB.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::measure::{self, Sample, float};
use super::report::Report;
use super::{Bench, build, inputs};

/// Builds once into a store of its own; what it took, and the bytes of the metadata image.
fn pack(bench: &Bench, name: &str, source: &Path) -> Result<(Sample, u64)> {
    let scratch: PathBuf = bench.scratch(name)?;
    let store = scratch.join("store");
    let mut command = build::pack(bench, source, &store, &scratch.join("cache"));
    let sample = measure::run(command.args(["-o", "json"]))?;
    let manifests = fs_err::read_dir(store.join("manifests"))?;
    let path = manifests
        .filter_map(Result::ok)
        .map(|entry| entry.path())
        .next()
        .context("nothing was published")?;
    let manifest: Value = serde_json::from_slice(&fs_err::read(path)?)?;
    let meta = manifest.pointer("/meta/size").and_then(Value::as_u64);
    Ok((sample, meta.context("the manifest has no metadata size")?))
}

fn row(what: String, (sample, meta): &(Sample, u64)) -> Vec<String> {
    vec![
        what,
        format!("{:.2}", sample.wall),
        format!("{:.2}", sample.cpu),
        format!("{:.1}", float(sample.peak) / 1048576.0),
        meta.to_string(),
    ]
}

const COLUMNS: [&str; 5] = [
    "input",
    "wall s",
    "processor s",
    "peak MiB",
    "bytes of metadata",
];

/// The scenario `million`.
pub(super) fn million(bench: &Bench) -> Result<Report> {
    let thousands: [u32; 2] = if bench.quick { [5, 20] } else { [100, 1000] };
    let mut taken = Vec::new();
    for thousand in thousands {
        let source = inputs::many(bench, thousand)?;
        measure::warm(&source)?;
        taken.push((thousand, pack(bench, "million", &source)?));
    }
    let mut report = Report {
        conditions: vec![
            "directories of 1000 files, each file of some 40 bytes that no other has; once"
                .to_owned(),
        ],
        columns: COLUMNS.to_vec(),
        rows: taken
            .iter()
            .map(|(thousand, pair)| row(format!("{thousand},000 files"), pair))
            .collect(),
        chart: "Peak memory in MiB",
        bars: taken
            .iter()
            .map(|(thousand, pair)| {
                (
                    format!("layerpack, {thousand},000 files"),
                    float(pair.0.peak) / 1048576.0,
                )
            })
            .collect(),
        ..Report::default()
    };
    if let [(few, small), (many, large)] = taken.as_slice() {
        let files = f64::from(*many) * 1000.0;
        let growth = large.0.cpu / small.0.cpu / (f64::from(*many) / f64::from(*few));
        report.at_most(
            "B5",
            "peak memory",
            float(large.0.peak) / 1048576.0,
            100.0,
            " MiB",
        );
        report.at_most(
            "B9",
            "processor time for each file beside that of a tenth of them",
            growth,
            1.2,
            "",
        );
        // Each name has 12 bytes.
        report.at_most(
            "B9",
            "metadata for each file beside its name",
            float(large.1) / files - 12.0,
            120.0,
            " bytes",
        );
    }
    Ok(report)
}

/// The scenario `file`.
pub(super) fn file(bench: &Bench) -> Result<Report> {
    let gib = if bench.quick { 1 } else { 10 };
    let source = inputs::large(bench, gib)?;
    let taken = pack(bench, "file", &source)?;
    let mut report = Report {
        conditions: vec![format!(
            "one file of {gib} GiB: a half noise, a quarter text, a quarter holes; once, partly from disk"
        )],
        columns: COLUMNS.to_vec(),
        rows: vec![row(format!("{gib} GiB"), &taken)],
        ..Report::default()
    };
    report.at_most(
        "B5",
        "peak memory",
        float(taken.0.peak) / 1048576.0,
        100.0,
        " MiB",
    );
    Ok(report)
}
