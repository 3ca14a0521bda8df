//! Every gate, one after the other; all of them run, so that one run shows all there is to mend.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::leftovers::Leftovers;
use crate::steps::{self, Steps};
use crate::{process, setup, tidy, workspace};

/// One gate's name, how it went, and how long it took.
struct Outcome {
    name: &'static str,
    failure: Option<String>,
    took: Duration,
}

/// Runs them all.
///
/// # Errors
/// When any of them failed; what and why was printed.
pub(crate) fn run(full: bool, no_setup: bool) -> Result<()> {
    let root = workspace::root()?;
    let target = workspace::target_dir()?;
    let skip_log = target.join("skipped-tests.log");
    let before = Leftovers::look(&target)?;
    let mut steps = Steps::new(8);
    let mut outcomes: Vec<Outcome> = Vec::new();

    steps.begin("tools");
    if !no_setup {
        setup::run()?;
    }
    steps.done();

    let mut gate = |name: &'static str, work: &mut dyn FnMut() -> Result<()>| {
        steps.begin(name);
        let started = Instant::now();
        let failure = work().err().map(|error| format!("{error:#}"));
        let took = started.elapsed();
        match &failure {
            None => steps::say(format!("ok in {}", steps::seconds(took))),
            Some(text) => steps::say(format!("FAILED in {}: {text}", steps::seconds(took))),
        }
        outcomes.push(Outcome {
            name,
            failure,
            took,
        });
    };
    let cargo = |arguments: &[&str]| {
        let mut command = workspace::cargo();
        command.args(arguments).current_dir(&root);
        command
    };

    gate("formatting", &mut || {
        process::run(&mut cargo(&["fmt", "--all", "--check"]))
    });
    gate("tidy", &mut tidy::run);
    gate("clippy", &mut || {
        process::run(&mut cargo(&[
            "clippy",
            "--quiet",
            "--locked",
            "--workspace",
            "--all-targets",
            "--",
            "-D",
            "warnings",
        ]))
    });
    gate("documentation", &mut || {
        let mut command = cargo(&["doc", "--quiet", "--locked", "--workspace", "--no-deps"]);
        process::run(command.env("RUSTDOCFLAGS", "-D warnings"))
    });
    // The logs of skips are told apart by run: an old one must not count.
    let _ = fs_err::remove_file(&skip_log);
    gate("tests", &mut || {
        let mut command = cargo(&["nextest", "run", "--locked", "--workspace"]);
        if full {
            command.args(["--profile", "full"]);
        }
        process::run(for_tests(&mut command, &skip_log, full))
    });
    gate("documentation tests", &mut || {
        let mut command = cargo(&["test", "--quiet", "--locked", "--workspace", "--doc"]);
        process::run(for_tests(&mut command, &skip_log, full))
    });
    gate("nothing left behind", &mut || {
        let left = before.new_since()?;
        if !left.is_empty() {
            bail!("{} left:\n       {}", left.len(), left.join("\n       "));
        }
        Ok(())
    });
    report(&outcomes, &skip_log, steps.elapsed())
}

fn for_tests<'a>(command: &'a mut Command, skip_log: &Path, full: bool) -> &'a mut Command {
    command.env("LAYERPACK_SKIP_LOG", skip_log);
    // A developer's own settings must not steer what tests do.
    for variable in [
        "LAYERPACK_ROOT",
        "LAYERPACK_STORE",
        "LAYERPACK_CACHE",
        "LAYERPACK_STORE_OPTIONS",
        "SOURCE_DATE_EPOCH",
    ] {
        command.env_remove(variable);
    }
    if full {
        command
            .env("LAYERPACK_TEST_FULL", "1")
            // Ten builders and collectors at once.
            .env("LAYERPACK_STORE_TEST_SECONDS", "120")
            .env("PROPTEST_CASES", "4096");
    }
    command
}

fn report(outcomes: &[Outcome], skip_log: &Path, took: Duration) -> Result<()> {
    println!("\nSummary");
    for outcome in outcomes {
        let verdict = if outcome.failure.is_none() {
            "ok"
        } else {
            "FAILED"
        };
        println!(
            "  {verdict:<6} {:<20} {}",
            outcome.name,
            steps::seconds(outcome.took)
        );
    }
    // Absent when no test skipped.
    let log = fs_err::read_to_string(skip_log).unwrap_or_default();
    let skips: BTreeSet<&str> = log.lines().filter(|line| !line.is_empty()).collect();
    println!(
        "  {} tests declined to run{}",
        skips.len(),
        if skips.is_empty() { "" } else { ":" }
    );
    for skip in &skips {
        println!("    {skip}");
    }
    let failed: Vec<&str> = outcomes
        .iter()
        .filter(|outcome| outcome.failure.is_some())
        .map(|outcome| outcome.name)
        .collect();
    if !failed.is_empty() {
        bail!(
            "failed after {}: {}",
            steps::seconds(took),
            failed.join(", ")
        );
    }
    println!("All gates passed in {}.", steps::seconds(took));
    Ok(())
}
