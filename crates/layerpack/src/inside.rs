//! `pack_diff`: the command by which processes inside a sandbox ask for a snapshot of it.
//!
//! It is this binary, shown in the sandbox as `/dev/layerpack/pack_diff`. It holds no secret and
//! decides nothing: the daemon knows by the socket which sandbox asks, and what that may do.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser;
use layerpack_packer::ScrubReport;
use serde::Deserialize as _;
use serde_json::Value;

use crate::api;
use crate::client::Client;
use crate::commands::scrub_report;
use crate::failure::one_line;
use crate::output::{Format, note, print, printable, warning};
use crate::units::human_bytes;

/// The name under which the binary is this command.
pub(crate) const NAME: &str = "pack_diff";
/// Warnings that are printed; `-o json` has all of them.
const WARNINGS: usize = 20;

/// Publishes what this sandbox changed as the snapshot diff/NAME:VERSION.
#[derive(Debug, Parser)]
#[command(name = "pack_diff", max_term_width = 100)]
struct Arguments {
    /// Name of the snapshot
    #[arg(long)]
    name: String,
    /// Version of the snapshot; once published it never changes
    #[arg(long)]
    version: String,
    /// Label for people and tools (repeatable)
    #[arg(long, value_name = "KEY=VALUE")]
    label: Vec<String>,
    /// Leave these paths as the layers below have them; with --squash, as those have them that are not
    /// taken in (repeatable)
    #[arg(long, value_name = "PATTERN")]
    exclude: Vec<String>,
    /// Do everything but publish, and report
    #[arg(long)]
    dry_run: bool,
    /// Take the diffs that the sandbox was made from into the snapshot
    #[arg(long)]
    squash: bool,
    /// Leave the indexes of git repositories as they are
    #[arg(long)]
    no_git_index: bool,
    /// How the result is printed
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value_t = Format::Text)]
    output: Format,
}

/// Whether the binary was started as this command.
pub(crate) fn is_meant(program: &std::ffi::OsStr) -> bool {
    Path::new(program)
        .file_name()
        .is_some_and(|name| name == NAME)
}

/// Asks, and prints the answer.
pub(crate) fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match ask(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            note(&format!("error: {}", one_line(&error)));
            ExitCode::FAILURE
        }
    }
}

fn ask(arguments: &Arguments) -> anyhow::Result<()> {
    let socket = Path::new(api::INSIDE_DIRECTORY).join(api::INSIDE_SOCKET);
    let client = Client::at(&socket)?;
    let request = api::InsideRequest {
        name: arguments.name.clone(),
        version: arguments.version.clone(),
        labels: arguments.label.clone(),
        excludes: arguments.exclude.clone(),
        dry_run: arguments.dry_run,
        squash: arguments.squash,
        no_git_index: arguments.no_git_index,
    };
    let report = client.pack_diff(&request)?;
    let text = |pointer: &str| {
        let value = report.pointer(pointer).and_then(|value| value.as_str());
        value.unwrap_or_default().to_owned()
    };
    let number = |pointer: &str| {
        let value = report.pointer(pointer).and_then(Value::as_u64);
        value.unwrap_or_default()
    };
    if arguments.output == Format::Text {
        note(&format!(
            "{} files, {}; {} new in the store",
            number("/counts/files"),
            human_bytes(number("/counts/bytes")),
            human_bytes(number("/store/new_bytes")),
        ));
        let warnings = report.pointer("/warnings").and_then(Value::as_array);
        for line in warnings.into_iter().flatten().take(WARNINGS) {
            warning(&printable(line.as_str().unwrap_or_default()));
        }
        if let Some(told) = report.get("report") {
            let told = ScrubReport::deserialize(told).context("cannot read the daemon's report")?;
            scrub_report::note_all(&told);
        }
    }
    print(arguments.output, &report, |out| {
        writeln!(out, "{} {}", text("/reference"), text("/digest"))
    })?;
    Ok(())
}
