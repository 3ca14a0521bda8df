//! `layerpack cache`: what this node holds of layers, and taking it out.

use std::process::ExitCode;

use anyhow::bail;
use layerpack_layerfs::{CacheStatus, CachedLayer};
use layerpack_store::LayerId;
use serde::Serialize;

use super::Outcome;
use crate::api::{CacheEvict, CacheLayers, CachePin};
use crate::args::{CacheArgs, CacheCommand, CacheEvictArgs};
use crate::client::Client;
use crate::context::Context;
use crate::output::{Table, print, warning};
use crate::stack::parse_reference;
use crate::units::{human_age, human_bytes};

pub(super) fn run(context: &Context, args: CacheArgs) -> Outcome {
    let client = context.daemon("the node's cache")?;
    let status = client.cache()?;
    match args.command {
        CacheCommand::Ls => list(context, &status),
        CacheCommand::Du => usage(context, &status),
        CacheCommand::Pin(args) => pin(context, &client, &status, &args.layers, true),
        CacheCommand::Unpin(args) => pin(context, &client, &status, &args.layers, false),
        CacheCommand::Evict(args) => evict(context, &client, &status, &args),
        CacheCommand::Verify(args) => verify(context, &client, &status, &args.layers),
    }
}

/// What people know a layer by.
fn name(layer: &CachedLayer) -> String {
    layer
        .reference
        .clone()
        .unwrap_or_else(|| layer.layer_id.to_string())
}

fn list(context: &Context, status: &CacheStatus) -> Outcome {
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |d| d.as_secs());
    print(context.format, &status.layers, |out| {
        let mut table = Table::new(&["LAYER", "ID", "DATA", "ON DISK", "STATE", "WRITTEN"]);
        for layer in &status.layers {
            let id: String = layer.layer_id.to_string().chars().take(15).collect();
            let mut state = vec![if layer.served { "served" } else { "idle" }];
            if layer.pinned {
                state.push("pinned");
            }
            table.row([
                name(layer),
                id,
                layer.data_bytes.map_or_else(String::new, human_bytes),
                human_bytes(layer.disk_bytes),
                state.join(", "),
                format!("{} ago", human_age(now.saturating_sub(layer.used))),
            ]);
        }
        table.write(out)
    })?;
    Ok(ExitCode::SUCCESS)
}

/// What `cache du` says in `-o json`; sizes in bytes.
#[derive(Debug, Serialize)]
struct Usage {
    used_bytes: u64,
    max_bytes: Option<u64>,
    pinned_bytes: u64,
    served_bytes: u64,
    layers: usize,
    evictions: u64,
    freed_bytes: u64,
    refused_bytes: u64,
}

fn usage(context: &Context, status: &CacheStatus) -> Outcome {
    let sum = |of: fn(&CachedLayer) -> bool| -> u64 {
        let layers = status.layers.iter().filter(|layer| of(layer));
        layers.map(|layer| layer.disk_bytes).sum()
    };
    let usage = Usage {
        used_bytes: status.used_bytes,
        max_bytes: status.max_bytes,
        pinned_bytes: sum(|layer| layer.pinned),
        served_bytes: sum(|layer| layer.served),
        layers: status.layers.len(),
        evictions: status.evictions,
        freed_bytes: status.freed_bytes,
        refused_bytes: status.refused_bytes,
    };
    print(context.format, &usage, |out| {
        let limit = usage.max_bytes.map_or_else(
            || "(no limit)".to_owned(),
            |max| format!("of {}", human_bytes(max)),
        );
        writeln!(
            out,
            "{} {limit} in {} layers: {} served now, {} pinned",
            human_bytes(usage.used_bytes),
            usage.layers,
            human_bytes(usage.served_bytes),
            human_bytes(usage.pinned_bytes)
        )?;
        writeln!(
            out,
            "since the daemon started: {} evictions freed {}; {} fetched and not kept",
            usage.evictions,
            human_bytes(usage.freed_bytes),
            human_bytes(usage.refused_bytes)
        )
    })?;
    Ok(ExitCode::SUCCESS)
}

/// The identities of layers given by name or id: as the node knows them, else as the store does.
fn identities(
    context: &Context,
    status: &CacheStatus,
    given: &[String],
) -> anyhow::Result<Vec<LayerId>> {
    let mut found = Vec::with_capacity(given.len());
    for text in given {
        let matching: Vec<LayerId> = status
            .layers
            .iter()
            .filter(|layer| match text.strip_prefix("b3:") {
                Some(digits) => digits.len() >= 6 && layer.layer_id.hex().starts_with(digits),
                None => layer.reference.as_deref() == Some(text.as_str()),
            })
            .map(|layer| layer.layer_id)
            .collect();
        match (matching.as_slice(), text.starts_with("b3:")) {
            ([one], _) => found.push(*one),
            ([], true) => bail!(
                "no layer in the node's cache has an id that begins with {text} (at least 6 digits; `layerpack cache ls` lists them)"
            ),
            (_, true) => bail!("{text} is the beginning of several layers' ids: give more digits"),
            // Not here, or known by another name.
            (_, false) => {
                let (_, manifest) = context.store()?.load(&parse_reference(text)?)?;
                found.push(manifest.layer_id());
            }
        }
    }
    Ok(found)
}

fn texts(layers: &[LayerId]) -> Vec<String> {
    layers.iter().map(ToString::to_string).collect()
}

fn pin(
    context: &Context,
    client: &Client,
    status: &CacheStatus,
    given: &[String],
    pinned: bool,
) -> Outcome {
    let layers = texts(&identities(context, status, given)?);
    let reply = client.cache_pin(&CachePin { layers, pinned })?;
    print(context.format, &reply, |_| Ok(()))?;
    Ok(ExitCode::SUCCESS)
}

fn evict(
    context: &Context,
    client: &Client,
    status: &CacheStatus,
    args: &CacheEvictArgs,
) -> Outcome {
    let layers = if args.layers.is_empty() {
        None
    } else {
        Some(texts(&identities(context, status, &args.layers)?))
    };
    let evicted = client.cache_evict(&CacheEvict {
        layers,
        bytes: args.bytes.map(|bytes| bytes.0),
    })?;
    if context.says_warnings() {
        for id in &evicted.pinned {
            let layer = status.layers.iter().find(|layer| layer.layer_id == *id);
            let name = layer.map_or_else(|| id.to_string(), name);
            warning(&format!(
                "{name} is pinned and stays (`layerpack cache unpin`)"
            ));
        }
    }
    print(context.format, &evicted, |out| {
        writeln!(out, "freed {}", human_bytes(evicted.freed_bytes))
    })?;
    Ok(ExitCode::SUCCESS)
}

fn verify(context: &Context, client: &Client, status: &CacheStatus, given: &[String]) -> Outcome {
    let layers = if given.is_empty() {
        None
    } else {
        Some(texts(&identities(context, status, given)?))
    };
    let checked = client.cache_verify(&CacheLayers { layers })?;
    print(context.format, &checked, |out| {
        let mut table = Table::new(&["LAYER", "CHECKED", "DROPPED", "RESULT"]);
        for layer in &checked.layers {
            let result = match (&layer.unchecked, layer.damaged, layer.stuck) {
                (Some(why), _, _) => format!("not checked: {why}"),
                (None, 0, 0) => "good".to_owned(),
                (None, _, 0) => "damaged; fetched again when it is read".to_owned(),
                (None, _, stuck) => {
                    format!("{stuck} damaged extents are in use: unmount and retry")
                }
            };
            table.row([
                layer
                    .reference
                    .clone()
                    .unwrap_or_else(|| layer.layer_id.to_string()),
                human_bytes(layer.bytes),
                layer.damaged.to_string(),
                result,
            ]);
        }
        table.write(out)
    })?;
    let unusable: Vec<&str> = (checked.layers.iter().filter(|layer| layer.unusable))
        .filter_map(|layer| layer.unchecked.as_deref())
        .collect();
    if !unusable.is_empty() {
        return Err(anyhow::anyhow!(
            "{} of these layers cannot be opened: {}",
            unusable.len(),
            unusable.join("; ")
        )
        .into());
    }
    let stuck: u64 = checked.layers.iter().map(|layer| layer.stuck).sum();
    if stuck > 0 {
        return Err(anyhow::anyhow!(
            "{stuck} damaged extents are in use: unmount their layers and retry"
        )
        .into());
    }
    Ok(ExitCode::SUCCESS)
}
