//! `layerpack sandbox create`.

use std::process::ExitCode;

use anyhow::bail;
use layerpack_runtime::Sandbox;
use layerpack_store::Kind;
use layerpack_store::transfer::{Selection, TransferOptions, select, transfer};
use serde::Serialize;

use super::super::Outcome;
use super::super::pack_diff::{rules, rules_text};
use crate::args::SandboxCreateArgs;
use crate::context::Context;
use crate::launch::{
    PACK_DIFF_LABEL, RULES_FILE, SandboxLease, environment, sandboxes, set_defaults,
};
use crate::output::print;
use crate::stack::parse_reference;

#[derive(Debug, Serialize)]
struct Created {
    id: String,
    name: Option<String>,
    stack: Vec<String>,
    pid: Option<i32>,
}

/// Has all layers of a snapshot in the store: those that are missing come from `origin`.
fn fetch(context: &Context, snapshot: &str, origin: Option<&str>) -> anyhow::Result<()> {
    let reference = parse_reference(snapshot)?;
    if reference.kind != Kind::Diff {
        bail!("{snapshot} is no snapshot: name other layers without --from");
    }
    let Some(origin) = origin else {
        return Ok(());
    };
    let store = context.store()?;
    let missing = store.load(&reference).ok().map(|(_, manifest)| {
        let mut parents = manifest.parents;
        parents.retain(|parent| store.manifest(&parent.manifest).is_err());
        parents
    });
    // The snapshot may be here and what it lies on only there.
    let patterns = match &missing {
        Some(parents) => parents
            .iter()
            .map(|parent| match &parent.reference {
                Some(reference) => Ok(reference.to_string()),
                None => bail!(
                    "{snapshot} lies on the layer {}, which is not in the store and has no name: copy it",
                    parent.manifest
                ),
            })
            .collect::<anyhow::Result<Vec<String>>>()?,
        None => vec![snapshot.to_owned()],
    };
    if patterns.is_empty() {
        return Ok(());
    }
    let from = context.store_at(origin)?;
    for parent in missing.iter().flatten() {
        let Some(name) = &parent.reference else {
            continue;
        };
        let (found, _) = from.load(name)?;
        if found != parent.manifest {
            bail!(
                "{snapshot} lies on {name} with the manifest {}; in {origin} that name stands for {found}",
                parent.manifest
            );
        }
    }
    let layers = select(
        &from,
        &Selection {
            patterns,
            all: false,
            parents: false,
            alone: false,
        },
    )?;
    transfer(
        &from,
        &store,
        &layers,
        &TransferOptions::default(),
        &mut |_| {},
    )?;
    Ok(())
}

/// Writes the sandbox's own rules and has the daemon serve its channel.
fn open_channel(context: &Context, sandbox: &Sandbox, rules: Option<&str>) -> anyhow::Result<()> {
    if let Some(text) = rules {
        fs_err::write(sandbox.channel.with_file_name(RULES_FILE), text)?;
    }
    if sandbox.spec.channel {
        let client = context.daemon("a sandbox with a channel")?;
        client.channel(sandbox.spec.id.as_str())?;
    }
    Ok(())
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
    let refs = match args.from {
        None => args.refs,
        Some(from) => {
            fetch(context, &from, args.fetch_from.as_deref())?;
            vec![from]
        }
    };
    let (lease, mut spec) = SandboxLease::take(context, &refs, &args.shape, &args.prefetch, false)?;
    spec.env = variables;
    set_defaults(&mut spec, args.user, args.workdir.as_deref())?;
    let rules = match &args.pack_diff_rules {
        None => None,
        Some(path) => {
            // What is wrong with it is said now, and what it says is kept as it is now.
            rules(context.root(), Some(path))?;
            Some(rules_text(path)?)
        }
    };
    if let Some(names) = args.allow_pack_diff {
        spec.channel = true;
        spec.labels.insert(PACK_DIFF_LABEL.to_owned(), names);
    }
    let all = sandboxes(context.root())?;
    let sandbox = all.create(&spec)?;
    if let Err(error) = open_channel(context, &sandbox, rules.as_deref()) {
        let _ = all.remove(spec.id.as_str(), true);
        return Err(error.into());
    }
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
