//! One file per command. Each takes its arguments and the [`Context`], and ends with an exit code
//! or a [`Failure`].

mod build;
mod cache;
mod channels;
mod checkout;
mod daemon;
mod doctor;
mod export;
mod flatten;
mod gc;
mod import;
mod inspect;
mod key;
mod ls;
mod merge;
mod mount;
mod mount_fuse;
mod pack_diff;
mod profile;
mod prune;
mod query;
mod repair;
mod rm;
mod run;
mod sandbox;
pub(crate) mod scrub_report;
mod seed;
mod snapshot;
mod split;
mod top;
mod trace;
mod transfer;
mod umount;
mod verify;
mod verify_all;
mod watched;

use std::process::ExitCode;

use clap::Parser as _;

use crate::args::{Cli, Command, DaemonCommand};
use crate::context::Context;
use crate::failure::{Failure, LAUNCH_FAILED};
use crate::logging;

/// What a command comes to.
pub(crate) type Outcome = Result<ExitCode, Failure>;

/// Parses the command line, runs the command, reports its failure.
pub(crate) fn main() -> ExitCode {
    layerpack_sys::memory::return_large();
    let cli = Cli::parse();
    let format = cli.global.output;
    logging::start(
        cli.global.verbose,
        cli.global.quiet,
        is_daemon(&cli.command),
    );
    let outcome = Context::new(&cli.global)
        .map_err(Failure::from)
        .and_then(|context| dispatch(&context, cli.command));
    match outcome {
        Ok(code) => code,
        Err(failure) => failure.report(format),
    }
}

fn is_daemon(command: &Command) -> bool {
    match command {
        Command::Daemon(d) => matches!(d.command, None | Some(DaemonCommand::Run { .. })),
        Command::Mount(args) => args.fuse.detached,
        _ => false,
    }
}

fn dispatch(context: &Context, mut command: Command) -> Outcome {
    channels::resolve(context, &mut command).map_err(|error| {
        let failure = Failure::from(error);
        match command {
            Command::Run(_) => failure.or_code(LAUNCH_FAILED),
            _ => failure,
        }
    })?;
    match command {
        Command::Build(args) => build::run(context, *args),
        Command::Ls(args) => ls::run(context, &args),
        Command::Inspect(args) => inspect::run(context, &args),
        Command::Verify(args) => verify::run(context, &args),
        Command::Key(args) => key::run(context, &args),
        Command::Sign(args) => key::sign(context, &args),
        Command::Rm(args) => rm::run(context, &args),
        Command::Gc(args) => gc::run(context, &args),
        Command::Prune(args) => prune::run(context, &args),
        Command::Repair(args) => repair::run(context, &args),
        Command::Push(args) => transfer::push(context, &args),
        Command::Pull(args) => transfer::pull(context, &args),
        Command::Copy(args) => transfer::copy(context, &args),
        Command::Diff(args) => query::diff(context, &args),
        Command::Du(args) => query::du(context, &args),
        Command::Cat(args) => query::cat(context, &args),
        Command::Find(args) => query::find(context, &args),
        Command::Profile(args) => profile::run(context, args),
        Command::Seed(args) => seed::run(context, &args),
        Command::Tag(args) => channels::tag(context, &args),
        Command::Untag(args) => channels::untag(context, &args),
        Command::Mount(args) if args.fuse.fuse => mount_fuse::run(context, args),
        Command::Mount(args) => mount::run(context, args),
        Command::Umount(args) => umount::run(context, &args),
        Command::Cache(args) => cache::run(context, args),
        Command::Top(args) => top::run(context, &args),
        Command::Trace(args) => trace::run(context, &args),
        Command::Daemon(args) => daemon::run(context, args),
        Command::Merge(args) => merge::run(context, args),
        Command::Export(args) => export::run(context, args),
        Command::Flatten(args) => flatten::run(context, args),
        Command::Doctor => doctor::run(context),
        Command::Run(args) => run::run(context, args),
        Command::Sandbox(args) => sandbox::run(context, args),
        Command::PackDiff(args) => pack_diff::run(context, args),
        Command::Snapshot(args) => snapshot::run(context, args),
        Command::Checkout(args) => checkout::run(context, &args),
    }
}
