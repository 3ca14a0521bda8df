//! `layerpack sandbox exec`.

use std::process::ExitCode;

use layerpack_runtime::Streams;

use super::super::{Outcome, run::report};
use crate::args::SandboxExecArgs;
use crate::context::{Context, require_root};
use crate::failure::{Failure, LAUNCH_FAILED};
use crate::launch::{command, sandboxes};

pub(super) fn run(context: &Context, args: SandboxExecArgs) -> Outcome {
    exec(context, args).map_err(|failure| failure.or_code(LAUNCH_FAILED))
}

fn exec(context: &Context, args: SandboxExecArgs) -> Outcome {
    require_root("running a command in a sandbox")?;
    let sandboxes = sandboxes(context.root())?;
    let sandbox = sandboxes.get(&args.sandbox)?;
    let command = command(args.command, &args.process, &sandbox.spec.labels)?;
    let id = sandbox.spec.id.to_string();
    let streams = Streams::inherit(args.process.interactive)?;
    let exit = sandboxes
        .exec(&id, &command, streams)
        .map_err(Failure::of_runtime)?;
    report(context, id, exit);
    Ok(ExitCode::from(exit.code))
}
