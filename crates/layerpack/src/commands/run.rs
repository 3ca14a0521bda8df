//! `layerpack run`: one command in a sandbox of its own.

use std::process::ExitCode;

use layerpack_runtime::{Exit, Streams};
use serde::Serialize;

use super::Outcome;
use crate::args::RunArgs;
use crate::context::Context;
use crate::failure::{Failure, LAUNCH_FAILED};
use crate::launch::{SandboxLease, command, sandboxes};
use crate::output::{Format, note};

/// How a command ended, in `-o json`: on stderr, since stdout is the command's.
#[derive(Debug, Serialize)]
pub(super) struct Ended {
    pub(super) sandbox: String,
    pub(super) exit_code: u8,
    pub(super) oom_killed: bool,
}

pub(super) fn run(context: &Context, args: RunArgs) -> Outcome {
    launch(context, args).map_err(|failure| failure.or_code(LAUNCH_FAILED))
}

fn launch(context: &Context, args: RunArgs) -> Outcome {
    let command = command(
        args.command,
        &args.process,
        &std::collections::BTreeMap::new(),
    )?;
    let (lease, spec) = SandboxLease::take(context, &args.refs, &args.shape, &args.prefetch, true)?;
    let streams = Streams::inherit(args.process.interactive)?;
    let exit = sandboxes(context.root())?
        .run(&spec, &command, streams, !args.rm)
        .map_err(Failure::of_runtime)?;
    drop(lease);
    report(context, spec.id.to_string(), exit);
    Ok(ExitCode::from(exit.code))
}

/// Tells what the exit code does not.
pub(super) fn report(context: &Context, sandbox: String, exit: Exit) {
    match context.format {
        Format::Json => {
            let ended = Ended {
                sandbox,
                exit_code: exit.code,
                oom_killed: exit.oom_killed,
            };
            note(&serde_json::to_string(&ended).unwrap_or_default());
        }
        Format::Text if exit.oom_killed => {
            note(
                "warning: the kernel killed a process of the sandbox for want of memory: raise --memory",
            );
        }
        Format::Text => {}
    }
}
