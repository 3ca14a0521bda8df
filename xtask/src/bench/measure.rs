//! Running a program and measuring it whole: wall time, processor time of it and its children,
//! and the largest resident memory of any of them.
//!
//! The kernel adds these up for the children that a process has waited for (`getrusage(2)`), so a
//! fresh process of this very program is put between: its children are the program and no others.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use nix::sys::resource::{UsageWho, getrusage};
use serde_json::{Value, json};

use crate::process;

/// What one run took.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sample {
    /// Seconds from start to end.
    pub(crate) wall: f64,
    /// Processor seconds, user and system.
    pub(crate) cpu: f64,
    /// Largest resident memory of one process, in bytes.
    pub(crate) peak: u64,
}

/// Runs a command quietly; success is asked for.
///
/// # Errors
/// When it cannot be started or fails.
pub(crate) fn run(command: &Command) -> Result<Sample> {
    let report = tempfile::NamedTempFile::new()?;
    let mut outer = Command::new(std::env::current_exe()?);
    outer.arg("measured").arg(report.path());
    outer.arg(command.get_program()).args(command.get_args());
    if let Some(directory) = command.get_current_dir() {
        outer.current_dir(directory);
    }
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => outer.env(name, value),
            None => outer.env_remove(name),
        };
    }
    process::quietly(&mut outer)?;
    let text = fs_err::read_to_string(report.path())?;
    let value: Value = serde_json::from_str(&text).context("the measuring process said nothing")?;
    let seconds = |name: &str| value.get(name).and_then(Value::as_f64);
    let peak = value.get("peak").and_then(Value::as_u64);
    match (seconds("wall"), seconds("cpu"), peak) {
        (Some(wall), Some(cpu), Some(peak)) => Ok(Sample { wall, cpu, peak }),
        _ => bail!("the measuring process said {text:?}"),
    }
}

/// The process between: runs `arguments` and writes what they took to `report`.
///
/// # Errors
/// When the command cannot be started or fails.
pub(crate) fn inner(report: &Path, arguments: &[OsString]) -> Result<()> {
    let (program, arguments) = arguments.split_first().context("no command is given")?;
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null());
    let started = Instant::now();
    process::run(&mut command)?;
    let wall = started.elapsed().as_secs_f64();
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN)?;
    let seconds = |time: nix::sys::time::TimeVal| {
        // Exact up to 2^53: processor time is far below.
        #[expect(clippy::cast_precision_loss, reason = "microseconds of processor time")]
        let fraction = time.tv_usec() as f64 / 1e6;
        #[expect(clippy::cast_precision_loss, reason = "seconds of processor time")]
        let whole = time.tv_sec() as f64;
        whole + fraction
    };
    let value = json!({
        "wall": wall,
        "cpu": seconds(usage.user_time()) + seconds(usage.system_time()),
        // The kernel counts in KiB.
        "peak": u64::try_from(usage.max_rss()).unwrap_or_default() * 1024,
    });
    fs_err::write(report, value.to_string())?;
    Ok(())
}

/// Reads every file below `path`, so that whoever comes next finds it in the page cache.
///
/// # Errors
/// When something cannot be read.
pub(crate) fn warm(path: &Path) -> Result<()> {
    let mut pending = vec![path.to_owned()];
    let mut sink = std::io::sink();
    while let Some(directory) = pending.pop() {
        for entry in fs_err::read_dir(&directory)? {
            let entry = entry?;
            let kind = entry.file_type()?;
            if kind.is_dir() {
                pending.push(entry.path());
            } else if kind.is_file() {
                std::io::copy(&mut fs_err::File::open(entry.path())?, &mut sink)?;
            }
        }
    }
    Ok(())
}

/// Bytes of all files below `path`, or of the file: what a copy would have to move.
///
/// # Errors
/// When something cannot be read.
pub(crate) fn size(path: &Path) -> Result<u64> {
    let metadata = fs_err::symlink_metadata(path)?;
    if !metadata.is_dir() {
        return Ok(metadata.len());
    }
    let mut bytes = 0;
    for entry in fs_err::read_dir(path)? {
        bytes += size(&entry?.path())?;
    }
    Ok(bytes)
}

/// Median, smallest and largest of some numbers.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Spread {
    /// The middle one; of two in the middle the larger.
    pub(crate) median: f64,
    /// The smallest.
    pub(crate) least: f64,
    /// The largest.
    pub(crate) most: f64,
}

impl Spread {
    /// Of `numbers`; zeros if there are none.
    pub(crate) fn of(numbers: impl IntoIterator<Item = f64>) -> Self {
        let mut numbers: Vec<f64> = numbers.into_iter().collect();
        numbers.sort_by(f64::total_cmp);
        let at = |index: usize| numbers.get(index).copied().unwrap_or_default();
        Self {
            median: at(numbers.len() / 2),
            least: at(0),
            most: at(numbers.len().saturating_sub(1)),
        }
    }
}

/// `median (least to most)`.
impl std::fmt::Display for Spread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:.2} ({:.2} to {:.2})",
            self.median, self.least, self.most
        )
    }
}

/// A count as a number that ratios and charts are made of.
pub(crate) fn float(count: u64) -> f64 {
    #[expect(
        clippy::cast_precision_loss,
        reason = "sizes below 2^53 bytes; shown with three digits"
    )]
    let value = count as f64;
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_is_of_the_numbers_whatever_their_order() {
        let spread = Spread::of([3.0, 1.0, 2.0]);
        assert_eq!(spread.to_string(), "2.00 (1.00 to 3.00)");
        assert_eq!(Spread::of([]).to_string(), "0.00 (0.00 to 0.00)");
    }
}
