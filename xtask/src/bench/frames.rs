//! The trade-off of frame and chunk sizes, over a real root and the files that a real program
//! opens: an example of the store's crate writes the root in each shape and reads its locator.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use super::report::Report;
use super::{Bench, inputs};
use crate::process;

/// Imports a good part of the standard library and says which files that took.
const PROGRAM: &str = "
import argparse, asyncio, email, http.client, json, sqlite3, ssl, subprocess, sys
files = {getattr(m, a, None) for m in list(sys.modules.values()) for a in ('__file__', '__cached__')}
files |= {line.split(None, 5)[5].strip() for line in open('/proc/self/maps') if '/' in line}
print('\\n'.join(sorted(f for f in files if f)))
";

/// The scenario `frames`.
pub(super) fn table(bench: &Bench) -> Result<Report> {
    let source = inputs::debian(bench)?;
    let scratch = bench.scratch("frames")?;
    let list = scratch.join("touched");
    let touched = touched(&source)?;
    fs_err::write(&list, touched.join("\n"))?;
    let binary = bench.example("frames")?;
    let mut command = Command::new(binary);
    command.arg(&source).arg(&list).arg(scratch.join("stores"));
    if bench.quick {
        command.arg("quick");
    }
    let text = process::output(&mut command)?;
    let rows: Vec<Vec<String>> = text
        .lines()
        .map(|line| line.split('\t').map(ToOwned::to_owned).collect())
        .collect();
    let bars = rows
        .iter()
        .map(|row| {
            let cell = |index: usize| row.get(index).cloned().unwrap_or_default();
            let fetched = cell(6).parse().context("the example printed no number")?;
            Ok((format!("{} KiB, chunks {}", cell(0), cell(1)), fetched))
        })
        .collect::<Result<_>>()?;
    Ok(Report {
        conditions: vec![
            format!(
                "the root of `build`; touched: {} files that a Python program with {} imports opens, each whole",
                touched.len(),
                9
            ),
            "frames are gathered until they have that many raw bytes; chunks are least/average/most/whole in KiB".to_owned(),
        ],
        columns: vec![
            "frame KiB",
            "chunk KiB",
            "stored MB",
            "of unique bytes",
            "dedupe ratio",
            "processor s",
            "fetched MB",
            "frames fetched",
            "frames for each file",
        ],
        rows,
        chart: "MB fetched for what the program touches",
        bars,
        ..Report::default()
    })
}

/// Files below `root` that the program opens, relative to it.
fn touched(root: &Path) -> Result<Vec<String>> {
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "--pid", "--fork", "--mount-proc", "--root"])
        .arg(root)
        .args(["python3", "-B", "-c", PROGRAM]);
    let text = process::output(&mut command)?;
    let mut found = BTreeSet::new();
    for path in text.lines() {
        // Through links such as /lib, as the program's own root has them.
        let mut inside = root.to_owned();
        for name in path.split('/').filter(|name| !name.is_empty()) {
            inside.push(name);
            if let Ok(target) = fs_err::read_link(&inside) {
                inside.pop();
                inside = match target.strip_prefix("/") {
                    Ok(target) => root.join(target),
                    Err(_) => inside.join(target),
                };
            }
        }
        if inside.is_file()
            && let Ok(relative) = inside.strip_prefix(root)
        {
            found.insert(relative.display().to_string());
        }
    }
    if found.len() < 100 {
        bail!("the program opened {} files only", found.len());
    }
    Ok(found.into_iter().collect())
}
