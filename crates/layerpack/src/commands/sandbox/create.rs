//! `layerpack sandbox create`.

use std::process::ExitCode;

use anyhow::bail;
use serde::Serialize;

use super::super::Outcome;
use crate::args::SandboxCreateArgs;
use crate::context::Context;
use crate::launch::{SandboxLease, environment, sandboxes, set_defaults};
use crate::output::print;

#[derive(Debug, Serialize)]
struct Created {
    id: String,
    name: Option<String>,
    stack: Vec<String>,
    pid: Option<i32>,
}

pub(super) fn run(context: &Context, args: SandboxCreateArgs) -> Outcome {
    let variables = environment(&args.env)?
        .into_iter()
        .map(
            |(key, value)| match (key.into_string(), value.into_string()) {
                (Ok(key), Ok(value)) => Ok((key, value)),
                (Err(text), _) | (_, Err(text)) => {
                    bail!("the variable {} is not UTF-8", text.display())
                }
            },
        )
        .collect::<anyhow::Result<Vec<_>>>()?;
    let (lease, mut spec) = SandboxLease::take(context, &args.refs, &args.shape, false)?;
    spec.env = variables;
    set_defaults(&mut spec, args.user, args.workdir.as_deref())?;
    let sandbox = sandboxes(context.root())?.create(&spec)?;
    lease.keep();
    let created = Created {
        id: spec.id.to_string(),
        name: spec.name.as_ref().map(ToString::to_string),
        stack: spec
            .stack
            .into_iter()
            .map(|layer| layer.reference)
            .collect(),
        pid: sandbox.pid.map(|pid| pid.as_raw_nonzero().get()),
    };
    print(context.format, &created, |out| {
        writeln!(out, "{}", created.id)
    })?;
    Ok(ExitCode::SUCCESS)
}
