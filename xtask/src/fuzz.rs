//! `cargo xtask fuzz`: runs the fuzz targets.
//!
//! With a nightly compiler and cargo-fuzz, by libFuzzer with coverage and the address sanitizer;
//! else by the plain mutator of `layerpack-fuzz`, in this compiler's release build. To have the
//! first: `rustup toolchain install nightly` and `cargo install cargo-fuzz --locked`, whose program
//! has to be on `PATH`. It compiles for some minutes the first time, into `fuzz/target`.
//!
//! New inputs that libFuzzer keeps go to `fuzz/corpus`, inputs that make a target fail to
//! `fuzz/artifacts`; neither is committed. A failure is seen again by
//! `cargo +nightly fuzz run TARGET fuzz/artifacts/TARGET/FILE`, made smaller by `cargo +nightly
//! fuzz tmin TARGET FILE`, and becomes a seed once it is mended: `fuzz/seeds/TARGET/found-WHAT`,
//! which the tests run too.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};

use crate::process;
use crate::steps::{Steps, say};
use crate::workspace;

/// Runs one target, or all, each for `seconds`.
///
/// # Errors
/// When a target fails, or nothing can be built.
pub(crate) fn run(seconds: u64, target: Option<String>, plain: bool) -> Result<()> {
    let root = workspace::root()?;
    let all = targets(&root)?;
    let chosen: Vec<String> = match target {
        None => all,
        Some(target) if all.contains(&target) => vec![target],
        Some(target) => bail!("there is no target {target}; there are {}", all.join(", ")),
    };
    let libfuzzer = !plain && has_libfuzzer();
    if libfuzzer {
        say("by libFuzzer, with coverage; the first run compiles for some minutes");
    }
    let mut steps = Steps::new(chosen.len());
    let mut failed = Vec::new();
    for target in &chosen {
        steps.begin(target);
        let done = if libfuzzer {
            by_libfuzzer(&root, target, seconds)
        } else {
            by_mutation(&root, target, seconds)
        };
        match done {
            Ok(()) => {
                steps.done();
            }
            Err(error) => {
                say(format!("failed: {error:#}"));
                failed.push(target.as_str());
            }
        }
    }
    if !failed.is_empty() {
        bail!(
            "targets that fail: {}; their inputs are in fuzz/artifacts",
            failed.join(", ")
        );
    }
    Ok(())
}

/// Writes the seeds that the program makes.
///
/// # Errors
/// When they cannot be made or written.
pub(crate) fn write_seeds() -> Result<()> {
    let root = workspace::root()?;
    process::run(driver(&root).args(["--write-seeds", "fuzz/seeds"]))
}

fn driver(root: &Path) -> Command {
    let mut command = workspace::cargo();
    command
        .args(["run", "-q", "--release", "-p", "layerpack-fuzz", "--"])
        .current_dir(root);
    command
}

fn targets(root: &Path) -> Result<Vec<String>> {
    let text = process::output(driver(root).arg("--list"))?;
    Ok(text.lines().map(str::to_owned).collect())
}

/// Whether nightly and cargo-fuzz are there; says what to do if not.
fn has_libfuzzer() -> bool {
    let nightly = process::succeeds(Command::new("cargo").args(["+nightly", "--version"]));
    let tool = process::succeeds(Command::new("cargo").args(["fuzz", "--version"]));
    if nightly && tool {
        return true;
    }
    let mut wanted = Vec::new();
    if !nightly {
        wanted.push("`rustup toolchain install nightly`");
    }
    if !tool {
        wanted.push("`cargo install cargo-fuzz --locked` (and its program on PATH)");
    }
    say(format!(
        "mutating without coverage; for libFuzzer: {}",
        wanted.join(" and ")
    ));
    false
}

fn by_mutation(root: &Path, target: &str, seconds: u64) -> Result<()> {
    let seeds = format!("fuzz/seeds/{target}");
    process::run(driver(root).args([target, &seconds.to_string(), &seeds, "fuzz/artifacts"]))
}

fn by_libfuzzer(root: &Path, target: &str, seconds: u64) -> Result<()> {
    let corpus = format!("fuzz/corpus/{target}");
    fs_err::create_dir_all(root.join(&corpus))?;
    let mut command = Command::new("cargo");
    command
        .args(["+nightly", "fuzz", "run", target, &corpus])
        .arg(format!("fuzz/seeds/{target}"))
        .arg("--")
        .arg(format!("-max_total_time={seconds}"))
        .args(["-timeout=20", "-rss_limit_mb=2048", "-max_len=1048576"])
        .current_dir(root);
    process::run(&mut command)
}
