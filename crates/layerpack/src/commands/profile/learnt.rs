//! `layerpack profile learned|publish`: what the node has learnt by itself.

use std::collections::BTreeMap;
use std::process::ExitCode;

use anyhow::bail;
use layerpack_layerfs::{LearntProfile, Node};
use layerpack_store::{Digest, LayerStore};
use serde::Serialize;

use super::super::Outcome;
use crate::api::PublishRequest;
use crate::args::ProfilePublishArgs;
use crate::context::Context;
use crate::output::{Table, print};
use crate::stack;
use crate::units::{human_age, human_bytes};

/// A layer of a learnt stack as people know it.
fn name(store: Option<&LayerStore>, profile: &LearntProfile) -> String {
    let top = profile.manifests.last();
    let known = store
        .zip(top)
        .and_then(|(store, digest)| store.manifest(digest).ok());
    match (known, profile.layers.last()) {
        (Some(manifest), _) => manifest.reference().to_string(),
        (None, Some(layer)) => layer.to_string(),
        (None, None) => String::new(),
    }
}

pub(super) fn list(context: &Context) -> Outcome {
    let learnt = context.daemon("what the node has learnt")?.learnt()?;
    let store = context.store_to_read().ok();
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |d| d.as_secs());
    print(context.format, &learnt, |out| {
        let mut table = Table::new(&[
            "STACK",
            "TOP LAYER",
            "LAYERS",
            "RUNS",
            "NEW",
            "EXTENTS",
            "BYTES",
            "CHANGED",
        ]);
        for profile in &learnt {
            table.row([
                profile.stack.to_string().chars().take(15).collect(),
                name(store.as_ref(), profile),
                profile.layers.len().to_string(),
                profile.recordings.to_string(),
                profile.unpublished.to_string(),
                profile.extents.to_string(),
                human_bytes(profile.bytes),
                format!("{} ago", human_age(now.saturating_sub(profile.updated))),
            ]);
        }
        table.write(out)
    })?;
    Ok(ExitCode::SUCCESS)
}

/// What became of one stack's profile.
#[derive(Debug, Serialize)]
struct Published {
    stack: Digest,
    /// Its topmost layer.
    top: String,
    /// Digest in the store; null if the store had all of it.
    profile: Option<Digest>,
    recordings: u32,
    extents: u64,
}

pub(super) fn publish(context: &Context, args: &ProfilePublishArgs) -> Outcome {
    let store = context.store()?;
    let stacks = if args.refs.is_empty() {
        None
    } else {
        let layers = stack::resolve(&store, &args.refs)?;
        let ids: Vec<_> = layers.iter().map(|l| l.manifest.layer_id()).collect();
        Some(vec![Node::stack_of(&ids)])
    };
    let client = context.daemon("publishing what the node has learnt")?;
    let names: BTreeMap<Digest, String> = client
        .learnt()?
        .iter()
        .map(|profile| (profile.stack, name(Some(&store), profile)))
        .collect();
    let reply = client.publish(&PublishRequest {
        store: context.store_url().to_owned(),
        stacks: stacks.clone(),
    })?;
    if stacks.is_some() && reply.published.is_empty() {
        bail_nothing(&args.refs)?;
    }
    let mut published = Vec::new();
    for one in reply.published {
        let top = names.get(&one.stack).cloned().unwrap_or_default();
        if let Some(error) = one.error {
            return Err(anyhow::anyhow!(
                "what was learnt of the stack of {top} cannot be published: {error}"
            )
            .into());
        }
        published.push(Published {
            stack: one.stack,
            top,
            profile: one.profile,
            recordings: one.recordings,
            extents: one.extents,
        });
    }
    print(context.format, &published, |out| {
        for one in &published {
            match &one.profile {
                Some(profile) => writeln!(
                    out,
                    "{}: {profile}: {} recordings, {} extents",
                    one.top, one.recordings, one.extents
                )?,
                None => writeln!(out, "{}: nothing new", one.top)?,
            }
        }
        Ok(())
    })?;
    Ok(ExitCode::SUCCESS)
}

fn bail_nothing(refs: &[String]) -> anyhow::Result<()> {
    bail!(
        "the node has learnt nothing of the stack {} yet: it learns from the first reads of mounts and sandboxes (`layerpack profile learned` lists what it has)",
        refs.join(" ")
    )
}
