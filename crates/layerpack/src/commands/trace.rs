//! `layerpack trace MOUNT`: which files are read, and what is fetched for them, as it happens.

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use layerpack_layerfs::{TraceEvent, TraceKind};
use layerpack_store::LayerId;
use serde::Serialize;

use super::Outcome;
use crate::api::{Status, TraceBegun, TraceRequest};
use crate::args::TraceArgs;
use crate::client::{Client, ClientError};
use crate::context::{Context, require_root};
use crate::launch::sandboxes;
use crate::mounts::Place;
use crate::output::{Format, note, warning};
use crate::paths::{FilePart, Paths};
use crate::units::human_bytes;

/// A layer that is watched.
struct Layer {
    name: String,
    paths: Paths,
}

/// A line of `-o json`.
#[derive(Debug, Serialize)]
struct Line<'a> {
    /// The layer's name.
    reference: &'a str,
    files: Vec<File>,
    #[serde(flatten)]
    event: &'a TraceEvent,
}

#[derive(Debug, Serialize)]
struct File {
    path: String,
    offset: u64,
    len: u64,
}

/// The lease of what is named.
fn lease_of(context: &Context, status: &Status, target: &str) -> anyhow::Result<String> {
    let known = |id: &str| status.leases.iter().any(|lease| lease.spec.id == id);
    if let Ok(directory) = fs_err::canonicalize(Path::new(target)) {
        let place = Place::of(context.root(), &directory);
        if known(place.lease()) {
            return Ok(place.lease().to_owned());
        }
    }
    if known(target) {
        return Ok(target.to_owned());
    }
    let named = sandboxes(context.root())
        .ok()
        .and_then(|all| all.get(target).ok())
        .map(|sandbox| sandbox.spec.id.to_string());
    match named {
        Some(id) if known(&id) => Ok(id),
        _ => bail!(
            "{target} is neither a directory that layerpack mounted on nor a sandbox with mounted layers (`layerpack top --once` lists what is mounted)"
        ),
    }
}

fn layer(context: &Context, status: &Status, id: LayerId) -> anyhow::Result<Layer> {
    let name = status
        .node
        .layers
        .iter()
        .find(|layer| layer.layer_id == id)
        .map_or_else(|| id.to_string(), |layer| layer.reference.clone());
    let meta = context
        .root()
        .join("cache")
        .join(id.hex())
        .join("meta.erofs");
    let bytes = fs_err::read(&meta).context("cannot read the layer's metadata")?;
    let paths = Paths::new(&bytes).with_context(|| format!("the metadata of {name} is damaged"))?;
    Ok(Layer { name, paths })
}

pub(super) fn run(context: &Context, args: &TraceArgs) -> Outcome {
    require_root("watching reads")?;
    let client = Client::new(context.root())?;
    let status = client.status()?;
    let lease = lease_of(context, &status, &args.target)?;
    let mut begun = client.trace_begin(&TraceRequest {
        lease: lease.clone(),
    })?;
    let watched = watch(context, args, &client, &status, &lease, &mut begun);
    // The daemon may be gone, and the trace with it.
    let ended = client.trace_end(begun.trace);
    watched?;
    match ended {
        Ok(_) | Err(ClientError::NotRunning { .. }) => Ok(ExitCode::SUCCESS),
        Err(error) => Err(error.into()),
    }
}

fn watch(
    context: &Context,
    args: &TraceArgs,
    client: &Client,
    status: &Status,
    lease: &str,
    begun: &mut TraceBegun,
) -> anyhow::Result<()> {
    let started = Instant::now();
    // When the trace began that is asked, on the clock of this one.
    let mut base = 0_u64;
    let mut served_by = status.daemon.pid;
    let layers = begun
        .layers
        .iter()
        .map(|id| layer(context, status, *id))
        .collect::<anyhow::Result<Vec<_>>>()?;
    if !context.quiet {
        note(&format!(
            "watching {} layers of {}",
            layers.len(),
            args.target
        ));
    }
    tell_of_whole(context, status, begun, &layers);
    let end = args.time.map(|time| Instant::now() + time.0);
    let mut looked = Instant::now();
    loop {
        let batch = match client.trace_next(begun.trace) {
            Ok(batch) => batch,
            // It was unmounted, and the daemon stopped.
            Err(ClientError::NotRunning { .. }) => return Ok(()),
            // A trace ends with its process; the mount goes on with the next one.
            Err(ClientError::Refused { status: 404, .. }) => {
                base = u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX);
                match again(client, lease, begun)? {
                    Some(next) => *begun = next,
                    None => return Ok(()),
                }
                let process = client.info()?.pid;
                if !context.quiet {
                    let why = match process == served_by {
                        true => "the daemon gave the trace up, since nobody asked",
                        false => "the daemon was restarted",
                    };
                    note(&format!(
                        "{why}: watching goes on, reads in between are not shown"
                    ));
                }
                served_by = process;
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        let idle = batch.events.is_empty();
        let mut out = io::stdout().lock();
        for event in batch.events {
            let event = &TraceEvent {
                time_us: event.time_us.saturating_add(base),
                ..event
            };
            let known = usize::try_from(event.layer)
                .ok()
                .and_then(|at| layers.get(at));
            let Some(layer) = known else { continue };
            let parts = layer
                .paths
                .find(event.offset, event.offset.saturating_add(event.len));
            match context.format {
                Format::Json => json(&mut out, layer, parts, event)?,
                Format::Text => text(&mut out, layer, &parts, event)?,
            }
        }
        out.flush()?;
        drop(out);
        if batch.dropped > 0 && !context.quiet {
            warning(&format!(
                "{} reads came too fast to be shown",
                batch.dropped
            ));
        }
        if end.is_some_and(|end| Instant::now() >= end) {
            return Ok(());
        }
        if idle && looked.elapsed() > Duration::from_secs(2) {
            looked = Instant::now();
            let leases = client.status()?.leases;
            if !leases.iter().any(|known| known.spec.id == lease) {
                return Ok(());
            }
        }
    }
}

/// Says which layers are in the cache as a whole: what is read of them may not be seen here.
fn tell_of_whole(context: &Context, status: &Status, begun: &TraceBegun, layers: &[Layer]) {
    if context.quiet {
        return;
    }
    let whole: Vec<&str> = (begun.layers.iter().zip(layers))
        .filter(|(id, _)| {
            (status.node.layers.iter()).any(|known| known.layer_id == **id && known.whole)
        })
        .map(|(_, layer)| layer.name.as_str())
        .collect();
    if !whole.is_empty() {
        note(&format!(
            "{} {} all in this node's cache: the kernel may read that by itself, without the daemon, and such reads are not shown",
            whole.join(", "),
            if whole.len() == 1 { "is" } else { "are" },
        ));
    }
}

/// Begins anew in the process that serves now. `None` if it holds no such lease.
///
/// # Errors
/// When it cannot, or the lease has other layers by now.
fn again(client: &Client, lease: &str, before: &TraceBegun) -> anyhow::Result<Option<TraceBegun>> {
    let request = TraceRequest {
        lease: lease.to_owned(),
    };
    let next = match client.trace_begin(&request) {
        Ok(next) => next,
        Err(ClientError::NotRunning { .. }) => return Ok(None),
        Err(error) => {
            let leases = client.status()?.leases;
            if leases.iter().any(|known| known.spec.id == lease) {
                return Err(error.into());
            }
            return Ok(None);
        }
    };
    if next.layers != before.layers {
        let _ = client.trace_end(next.trace);
        bail!("other layers are mounted there by now: begin again");
    }
    Ok(Some(next))
}

fn json(
    out: &mut dyn Write,
    layer: &Layer,
    parts: Vec<FilePart>,
    event: &TraceEvent,
) -> anyhow::Result<()> {
    let line = Line {
        reference: &layer.name,
        files: parts
            .into_iter()
            .map(|part| File {
                path: part.path,
                offset: part.offset,
                len: part.len,
            })
            .collect(),
        event,
    };
    serde_json::to_writer(&mut *out, &line)?;
    writeln!(out)?;
    Ok(())
}

/// Microseconds for people.
fn time(us: u64) -> String {
    format!("{}.{:03} ms", us / 1000, us % 1000)
}

/// What an event cost.
fn cost(event: &TraceEvent) -> String {
    let mut words = match event.kind {
        TraceKind::Hit => return "cached".to_owned(),
        TraceKind::Ahead => vec!["fetched ahead".to_owned()],
        TraceKind::Miss => vec![format!("waited {}", time(event.waited_us))],
        TraceKind::Failed => vec![format!("FAILED after {}", time(event.waited_us))],
    };
    if event.frames > 0 {
        let mut text = format!(
            "fetched {} in {} frames",
            human_bytes(event.fetched_bytes),
            event.frames
        );
        if event.peer_frames > 0 {
            text.push_str(&format!(", {} of them from peers", event.peer_frames));
        }
        words.push(text);
    }
    if event.copied_frames > 0 {
        words.push(format!(
            "copied {} frames from other layers",
            event.copied_frames
        ));
    }
    if event.joined > 0 {
        words.push(format!("joined {} under way", event.joined));
    }
    words.extend(event.error.clone());
    words.join(", ")
}

fn text(
    out: &mut dyn Write,
    layer: &Layer,
    parts: &[FilePart],
    event: &TraceEvent,
) -> io::Result<()> {
    let at = format!(
        "{}.{:06}",
        event.time_us / 1_000_000,
        event.time_us % 1_000_000
    );
    let cost = cost(event);
    if parts.is_empty() {
        let range = format!("{}+{}", event.offset, event.len);
        return writeln!(out, "{at:>12}  {}  (data {range})  {cost}", layer.name);
    }
    for (number, part) in parts.iter().enumerate() {
        let said = if number == 0 {
            cost.as_str()
        } else {
            "with it"
        };
        writeln!(
            out,
            "{at:>12}  {}  {}  {}+{}  {said}",
            layer.name, part.path, part.offset, part.len
        )?;
    }
    Ok(())
}
