//! pjdfstest and fsx on a writable mount of a layer, beside the same overlay over a plain
//! directory: nothing may fail here that passes there.
//!
//! Both programs come from crates.io and are built once, under `target/bench/tools`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};
use layerpack_fixtures::guards::MountGuard;
use layerpack_fixtures::rng::Rng;

use super::node::{Node, need_root};
use super::report::{Report, Verdict};
use super::{Bench, roots};
use crate::steps::say;
use crate::{process, workspace};

/// Crates and versions.
const TOOLS: [(&str, &str); 2] = [("pjdfstest", "0.2.2"), ("fsx", "0.3.2")];
/// Features of Linux filesystems; naps are longer than the clock of timestamps is coarse.
const CONFIGURATION: &str = "[features]
posix_fallocate = {}
rename_ctime = {}
stat_st_birthtime = {}
utime_now = {}
utimensat = {}
[settings]
naptime = 0.02
allow_remount = false
[dummy_auth]
entries = [[\"nobody\", \"nogroup\"], [\"daemon\", \"daemon\"], [\"bin\", \"bin\"]]
";
/// How often a test that failed is tried again: it counts if it fails each time.
const AGAIN: usize = 2;

/// One of the programs, built if it is not there.
fn tool(bench: &Bench, name: &str, version: &str) -> Result<PathBuf> {
    let tools = bench.work.join("tools");
    let program = tools.join("bin").join(name);
    if program.is_file() {
        return Ok(program);
    }
    say(format!("building {name} {version}"));
    fs_err::create_dir_all(&tools)?;
    let mut command = workspace::cargo();
    command
        .args(["install", "--locked", "--quiet", name, "--version", version])
        .arg("--root")
        .arg(&tools)
        // Settings of this workspace are not theirs.
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_TARGET_DIR")
        .env("CARGO_PROFILE_RELEASE_LTO", "off")
        .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1")
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16")
        .current_dir("/");
    process::run(&mut command).with_context(|| format!("{name} {version} cannot be built"))?;
    Ok(program)
}

/// What came of a run of pjdfstest.
#[derive(Debug, Default)]
struct Outcome {
    passed: BTreeSet<String>,
    failed: BTreeSet<String>,
    skipped: usize,
}

/// Reads lines such as `truncate::etxtbsy     ok`.
fn parse(text: &str) -> Outcome {
    let mut outcome = Outcome::default();
    for line in text
        .lines()
        .filter(|line| !line.starts_with(char::is_whitespace))
    {
        let mut words = line.split_whitespace();
        let (Some(name), Some(word), None) = (words.next(), words.next(), words.next()) else {
            continue;
        };
        match word {
            "ok" => drop(outcome.passed.insert(name.to_owned())),
            "FAILED" => drop(outcome.failed.insert(name.to_owned())),
            "skipped" => outcome.skipped += 1,
            _ => {}
        }
    }
    outcome
}

fn pjdfstest(
    program: &Path,
    configuration: &Path,
    inside: &Path,
    only: &[&str],
) -> Result<Outcome> {
    let mut command = Command::new(program);
    command
        .arg("--configuration-file")
        .arg(configuration)
        .arg("--path")
        .arg(inside)
        .stdin(Stdio::null());
    if !only.is_empty() {
        command.arg("--exact").args(only);
    }
    // It fails if a test fails, which is what is to be found out.
    let output = command.output()?;
    let outcome = parse(&String::from_utf8_lossy(&output.stdout));
    if outcome.passed.is_empty() && outcome.failed.is_empty() {
        bail!(
            "pjdfstest ran no test: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(outcome)
}

/// The scenario `conformance`.
pub(super) fn table(bench: &Bench) -> Result<Report> {
    need_root("mounting")?;
    let mut programs = Vec::new();
    for (name, version) in TOOLS {
        programs.push(tool(bench, name, version)?);
    }
    let [pjd, fsx] = programs.as_slice() else {
        bail!("there are two tools");
    };
    let scratch = bench.scratch("conformance")?;
    let (source, store) = (scratch.join("source"), scratch.join("store"));
    fs_err::create_dir_all(source.join("test"))?;
    roots::files(&source, 4 << 20, 3)?;
    let mut rng = Rng::new(17);
    for seed in 0..SEEDS {
        fs_err::write(source.join(format!("fsx-{seed}")), rng.bytes(300_000))?;
    }
    let configuration = scratch.join("pjdfstest.toml");
    fs_err::write(&configuration, CONFIGURATION)?;

    let mut node = Node::new(bench, &scratch.join("node"), &store.display().to_string())?;
    node.build("base", "tree", &source, &[])?;
    node.start()?;
    // Names of sockets have at most 107 bytes: the tests' paths must be short.
    let short = tempfile::Builder::new()
        .prefix("layerpack-bench-")
        .tempdir()?;
    rustix::fs::chmod(short.path(), rustix::fs::Mode::from_raw_mode(0o755))?;
    let (ours, plain) = (short.path().join("ours"), short.path().join("plain"));
    node.mount(&["base/tree:1"], &ours, &["--rw"])?;
    let ours_guard = MountGuard::new(&ours);
    let (upper, work) = (scratch.join("upper"), scratch.join("work"));
    for path in [&plain, &upper, &work] {
        fs_err::create_dir_all(path)?;
    }
    let guard = MountGuard::overlay(&[&source], Some((&upper, &work)), &plain)?;

    let mut report = Report {
        conditions: vec![
            "both are overlays on one disk, below ours the layer, below the other the directory it was made of".to_owned(),
            format!("a test that fails is run {AGAIN} times more and counts if it fails each time"),
        ],
        columns: vec!["program", "where", "passed", "failed", "skipped"],
        ..Report::default()
    };
    let there = pjdfstest(pjd, &configuration, &plain.join("test"), &[])?;
    let mut here = pjdfstest(pjd, &configuration, &ours.join("test"), &[])?;
    let mut worse: BTreeSet<String> = here.failed.intersection(&there.passed).cloned().collect();
    for _ in 0..AGAIN {
        let names: Vec<&str> = worse.iter().map(String::as_str).collect();
        if names.is_empty() {
            break;
        }
        let again = pjdfstest(pjd, &configuration, &ours.join("test"), &names)?;
        for name in again.passed {
            worse.remove(&name);
            here.failed.remove(&name);
            here.passed.insert(name);
        }
    }
    for (place, outcome) in [("layerpack", &here), ("plain", &there)] {
        report.rows.push(vec![
            "pjdfstest".to_owned(),
            place.to_owned(),
            outcome.passed.len().to_string(),
            outcome.failed.len().to_string(),
            outcome.skipped.to_string(),
        ]);
    }
    let list: Vec<&str> = there.failed.iter().map(String::as_str).collect();
    report.conditions.push(format!(
        "{} fail on the plain one (overlayfs takes a character device 0:0 for a whiteout), such as: {}",
        list.len(),
        list.get(..8).unwrap_or(&list).join(", ")
    ));
    let list: Vec<&str> = worse.iter().map(String::as_str).collect();
    report.verdicts.push(Verdict {
        claim: "F3",
        found: match list.is_empty() {
            true => "pjdfstest: nothing fails that passes on a plain directory".to_owned(),
            false => format!(
                "pjdfstest: fails here and passes there: {}",
                list.join(", ")
            ),
        },
        met: list.is_empty(),
    });
    exercise(
        bench,
        fsx,
        &[("layerpack", &ours), ("plain", &plain)],
        &mut report,
    )?;
    guard.unmount()?;
    node.umount(&ours)?;
    drop(ours_guard);
    node.stop()?;
    Ok(report)
}

/// Files that fsx works on, each with a seed of its own.
const SEEDS: u32 = 3;

/// fsx on files that lie in the lower layer at first.
fn exercise(
    bench: &Bench,
    fsx: &Path,
    places: &[(&str, &Path)],
    report: &mut Report,
) -> Result<()> {
    let steps = if bench.quick { "1000" } else { "10000" };
    let (seeds, mut failed) = (if bench.quick { 1 } else { SEEDS }, Vec::new());
    for (place, directory) in places {
        let mut passed = 0;
        let before = failed.len();
        for seed in 0..seeds {
            let mut command = Command::new(fsx);
            command
                .args(["-N", steps, "-S", &seed.to_string(), "-q", "-P"])
                .arg(&bench.work)
                .arg(directory.join(format!("fsx-{seed}")))
                .stdin(Stdio::null());
            let output = command.output()?;
            match output.status.success() {
                true => passed += 1,
                false => failed.push(format!(
                    "{place}, seed {seed}: {}",
                    String::from_utf8_lossy(&output.stderr).trim()
                )),
            }
        }
        report.rows.push(vec![
            format!("fsx, {steps} steps"),
            (*place).to_owned(),
            passed.to_string(),
            (failed.len() - before).to_string(),
            "0".to_owned(),
        ]);
    }
    report.verdicts.push(Verdict {
        claim: "F3",
        found: match failed.is_empty() {
            true => format!("fsx: {seeds} seeds, {steps} steps each: all bytes right on both"),
            false => format!("fsx: {}", failed.join("; ")),
        },
        met: !failed.iter().any(|line| line.starts_with("layerpack")),
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_pjdfstest_are_read() {
        let outcome = parse(
            "a::b                ok\nc::d::fifo        FAILED\n\tTimestamps did not change\n\
             Backtrace:\n   0: x\ne::f      skipped\n\treason\nSummary: 1 failed, 1 skipped\n",
        );
        assert_eq!(outcome.passed.into_iter().collect::<Vec<_>>(), ["a::b"]);
        assert_eq!(
            outcome.failed.into_iter().collect::<Vec<_>>(),
            ["c::d::fifo"]
        );
        assert_eq!(outcome.skipped, 1);
    }
}
