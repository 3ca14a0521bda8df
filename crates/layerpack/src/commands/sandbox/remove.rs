//! `layerpack sandbox rm`.

use std::process::ExitCode;

use serde::Serialize;

use super::super::Outcome;
use crate::args::SandboxRmArgs;
use crate::context::{Context, require_root};
use crate::launch::{release, sandboxes};
use crate::output::print;

#[derive(Debug, Serialize)]
struct Removed {
    removed: Vec<String>,
}

pub(super) fn run(context: &Context, args: &SandboxRmArgs) -> Outcome {
    require_root("removing a sandbox")?;
    let sandboxes = sandboxes(context.root())?;
    // All are looked up first: a typing error in the last must not leave half of it done.
    for name in &args.sandboxes {
        sandboxes.find(name)?;
    }
    let mut done = Removed {
        removed: Vec::new(),
    };
    for name in &args.sandboxes {
        let sandbox = sandboxes.remove(name, args.force)?;
        if let Some(lease) = &sandbox.spec.lease {
            release(context.root(), lease)?;
        }
        done.removed.push(sandbox.spec.id.to_string());
    }
    print(context.format, &done, |out| {
        for id in &done.removed {
            writeln!(out, "{id}")?;
        }
        Ok(())
    })?;
    Ok(ExitCode::SUCCESS)
}
