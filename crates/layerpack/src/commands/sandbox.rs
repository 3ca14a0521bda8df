//! `layerpack sandbox`: sandboxes that last.

mod create;
mod exec;
mod list;
mod remove;

use super::Outcome;
use crate::args::{SandboxArgs, SandboxCommand};
use crate::context::Context;

pub(super) fn run(context: &Context, args: SandboxArgs) -> Outcome {
    match args.command {
        SandboxCommand::Create(args) => create::run(context, args),
        SandboxCommand::Exec(args) => exec::run(context, args),
        SandboxCommand::Ls => list::run(context),
        SandboxCommand::Rm(args) => remove::run(context, &args),
    }
}
