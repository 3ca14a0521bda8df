//! Development tasks, run as `cargo xtask TASK`.
//!
//! `test` runs every gate, `quickstart` drives the release binary over real input, `bench`
//! measures it beside its peers, `tidy` holds the rules that compilers do not check, `setup`
//! installs what those need. Everything is plain child processes and standard output; the product's code is not linked in, only the fixtures,
//! whose tree compare the quickstart uses as a referee.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a command line tool prints"
)]

mod apt;
mod bench;
mod fuzz;
mod leftovers;
mod process;
mod quickstart;
mod setup;
mod steps;
mod test;
mod tidy;
mod workspace;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(
    name = "cargo xtask",
    about = "layerpack's development tasks",
    max_term_width = 100
)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Run every gate: fmt, tidy, clippy, rustdoc, tests, doctests; then look for leftovers
    Test {
        /// Also the long versions of tests: more random cases, bigger trees
        #[arg(long)]
        full: bool,
        /// Install nothing; fail if something is missing
        #[arg(long)]
        no_setup: bool,
    },
    /// Show the whole product on a real Debian system and a real Python project
    Quickstart {
        /// Remove everything that it made, and stop
        #[arg(long)]
        clean: bool,
        /// Work here instead of `.quickstart` in the repository
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
        /// The release binary is built: set when going on as root
        #[arg(long, hide = true)]
        prebuilt: bool,
    },
    /// Measure the product beside its peers; reports go to bench/results
    Bench {
        /// Small inputs, one round: shows that everything works, claims nothing
        #[arg(long)]
        quick: bool,
        /// A binary of layerpack to measure, instead of building one
        #[arg(long, value_name = "FILE")]
        binary: Option<PathBuf>,
        /// Only these scenarios; an unknown name lists them
        #[arg(value_name = "NAME")]
        only: Vec<String>,
    },
    /// Run a command and write what it took to a file: what `bench` puts between
    #[command(hide = true)]
    Measured {
        /// The file
        report: PathBuf,
        /// Program and arguments
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<std::ffi::OsString>,
    },
    /// Check the rules that compilers do not: imports, file lengths, headers, specs
    Tidy,
    /// Run the fuzz targets, all or one, each for so many seconds
    Fuzz {
        /// Seconds for each target
        #[arg(long, value_name = "N", default_value_t = 60)]
        seconds: u64,
        /// Mutate without libFuzzer, though it is there
        #[arg(long)]
        plain: bool,
        /// Make the committed seeds anew, and stop
        #[arg(long)]
        write_seeds: bool,
        /// Only this target
        target: Option<String>,
    },
    /// Install what `test` and `quickstart` need
    Setup,
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().task {
        Task::Test { full, no_setup } => test::run(full, no_setup),
        Task::Quickstart {
            clean: true, dir, ..
        } => quickstart::clean(dir),
        Task::Quickstart {
            clean: false,
            dir,
            prebuilt,
        } => quickstart::run(dir, prebuilt),
        Task::Fuzz {
            write_seeds: true, ..
        } => fuzz::write_seeds(),
        Task::Fuzz {
            seconds,
            plain,
            target,
            ..
        } => fuzz::run(seconds, target, plain),
        Task::Bench {
            quick,
            binary,
            only,
        } => bench::run(quick, binary.as_deref(), &only),
        Task::Measured { report, command } => bench::measure::inner(&report, &command),
        Task::Tidy => tidy::run(),
        Task::Setup => setup::run(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
