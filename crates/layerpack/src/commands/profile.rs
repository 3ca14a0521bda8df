//! `layerpack profile`: recording, listing and merging what environments read.

mod learnt;

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use layerpack_store::profile::{Profile, ProfileEntry, ProfileLayer};
use layerpack_store::{Digest, LayerStore};
use serde::Serialize;

use super::Outcome;
use crate::api::{RecordRequest, Recording};
use crate::args::{
    PrefetchArgs, ProfileArgs, ProfileCommand, ProfileMergeArgs, ProfileRecordArgs,
    ProfileShowArgs, RunArgs,
};
use crate::client::Client;
use crate::context::Context;
use crate::failure::usage;
use crate::mounts::Place;
use crate::output::{Format, Table, note, print, warning};
use crate::stack::{self, StackLayer};
use crate::units::human_bytes;

/// A profile in `-o json`.
#[derive(Debug, Serialize)]
struct Shown {
    digest: String,
    name: String,
    recordings: u32,
    layers: Vec<Layer>,
    /// Extents read.
    extents: usize,
    /// Their lengths together, in bytes.
    bytes: u64,
    /// In the order of their first use: layer, extent, length, count, rank, milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    entries: Option<Vec<Row>>,
}

/// Layer, extent, length, count, rank, milliseconds.
type Row = (u32, u32, u32, u32, u32, u32);

#[derive(Debug, Serialize)]
struct Layer {
    layer_id: String,
    manifest: String,
    /// The layer's name, if the store has the manifest.
    reference: Option<String>,
    extents: u64,
    bytes: u64,
}

impl Shown {
    fn new(store: &LayerStore, digest: &Digest, profile: &Profile, entries: bool) -> Self {
        let layers = (0_u32..).zip(&profile.layers).map(|(index, layer)| {
            let own = profile.entries.iter().filter(|e| e.layer == index);
            Layer {
                layer_id: layer.layer.to_string(),
                manifest: layer.manifest.to_string(),
                reference: store
                    .manifest(&layer.manifest)
                    .ok()
                    .map(|m| m.reference().to_string()),
                extents: own.clone().count() as u64,
                bytes: own.map(|e| u64::from(e.len)).sum(),
            }
        });
        Self {
            digest: digest.to_string(),
            name: profile.name.clone(),
            recordings: profile.recordings,
            layers: layers.collect(),
            extents: profile.entries.len(),
            bytes: profile.bytes(),
            entries: entries.then(|| {
                profile
                    .entries
                    .iter()
                    .map(|e| (e.layer, e.extent, e.len, e.count, e.rank, e.time_ms))
                    .collect()
            }),
        }
    }
}

pub(super) fn run(context: &Context, args: ProfileArgs) -> Outcome {
    match args.command {
        ProfileCommand::Record(args) => record(context, *args),
        ProfileCommand::Ls => list(context),
        ProfileCommand::Show(args) => show(context, &args),
        ProfileCommand::Merge(args) => merge(context, &args),
        ProfileCommand::Rm(args) => remove(context, &args),
        ProfileCommand::Learned => learnt::list(context),
        ProfileCommand::Publish(args) => learnt::publish(context, &args),
    }
}

fn record(context: &Context, args: ProfileRecordArgs) -> Outcome {
    if let Some(dir) = &args.start {
        let (id, layers) = of_mount(context, dir)?;
        begin(context, &id, &layers)?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(dir) = &args.stop {
        let (id, layers) = of_mount(context, dir)?;
        end(context, &id, &layers, args.store_as.as_deref())?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.shape.name.is_some() {
        return Err(usage(
            "--name would name the sandbox, which is deleted when the command ends: name the profile with --store-as NAME",
        )
        .into());
    }
    let layers = stack::resolve(&context.store()?, &args.refs)?;
    let id = format!("profile-{}", std::process::id());
    begin(context, &id, &layers)?;
    let ran = super::run::run(
        context,
        RunArgs {
            refs: args.refs,
            command: args.command,
            rm: true,
            // What is fetched ahead is not what is read.
            prefetch: PrefetchArgs::none(),
            process: args.process,
            shape: args.shape,
        },
    );
    let code = match ran {
        Ok(code) => code,
        // The command was not started, so nothing was recorded that would be worth its name.
        Err(failure) => {
            if let Err(error) = Client::new(context.root())?.record_end(&id) {
                tracing::warn!(%error, "the recording of a command that did not start goes on");
            }
            return Err(failure);
        }
    };
    end(context, &id, &layers, args.store_as.as_deref())?;
    Ok(code)
}

/// The recording of a mount, and the layers that are mounted there.
fn of_mount(context: &Context, dir: &Path) -> anyhow::Result<(String, Vec<StackLayer>)> {
    let dir = fs_err::canonicalize(dir)?;
    let place = Place::of(context.root(), &dir);
    let Some(record) = place.record()? else {
        bail!("nothing of this node is mounted on {}", dir.display());
    };
    let store = context.store()?;
    let layers = record
        .layers
        .iter()
        .map(|name| match name.parse::<Digest>() {
            Ok(digest) => Ok(StackLayer {
                name: name.clone(),
                digest,
                manifest: store.manifest(&digest)?,
            }),
            Err(_) => {
                let (digest, manifest) = store.load(&stack::parse_reference(name)?)?;
                Ok(StackLayer {
                    name: name.clone(),
                    digest,
                    manifest,
                })
            }
        })
        .collect::<anyhow::Result<Vec<_>>>()?;
    Ok((place.lease().to_owned(), layers))
}

fn begin(context: &Context, id: &str, layers: &[StackLayer]) -> anyhow::Result<()> {
    let client = context.daemon("recording a profile")?;
    let begun = client.record_begin(&RecordRequest {
        id: id.to_owned(),
        store: context.store_url().to_owned(),
        layers: layers.iter().map(|l| l.digest.to_string()).collect(),
    })?;
    if context.says_warnings() {
        for layer in layers {
            if begun.warm.contains(&layer.manifest.layer_id().to_string()) {
                warning(&format!(
                    "{} is in use: what the kernel has cached of it is not recorded",
                    layer.name
                ));
            }
        }
    }
    Ok(())
}

fn end(
    context: &Context,
    id: &str,
    layers: &[StackLayer],
    name: Option<&str>,
) -> anyhow::Result<()> {
    let recording = Client::new(context.root())?.record_end(id)?;
    if recording.left_out > 0 && context.says_warnings() {
        warning(&format!(
            "{} extents did not fit into the recording",
            recording.left_out
        ));
    }
    let profile = profile_of(&recording, layers, name.unwrap_or_default())?;
    let store = context.store()?;
    let digest = store.put_profile(&profile)?;
    let shown = Shown::new(&store, &digest, &profile, false);
    // stdout is the command's.
    match context.format {
        Format::Json => note(&serde_json::to_string(&shown)?),
        Format::Text if context.quiet => {}
        Format::Text => note(&format!(
            "profile {} {}: {} extents, {}",
            shown.name,
            shown.digest,
            shown.extents,
            human_bytes(shown.bytes)
        )),
    }
    Ok(())
}

fn profile_of(recording: &Recording, layers: &[StackLayer], name: &str) -> anyhow::Result<Profile> {
    let ids: Vec<String> = layers
        .iter()
        .map(|l| l.manifest.layer_id().to_string())
        .collect();
    if recording.layers != ids {
        bail!("the recording is of other layers than are mounted now: begin it anew");
    }
    Ok(Profile {
        name: name.to_owned(),
        layers: layers
            .iter()
            .map(|l| ProfileLayer {
                layer: l.manifest.layer_id(),
                manifest: l.digest,
            })
            .collect(),
        recordings: 1,
        entries: (0_u32..)
            .zip(&recording.touches)
            .map(|(rank, &(layer, extent, len, time_ms))| ProfileEntry {
                layer,
                extent,
                len,
                count: 1,
                rank,
                time_ms,
            })
            .collect(),
    })
}

fn list(context: &Context) -> Outcome {
    let store = context.store_that_is()?;
    let mut shown = Vec::new();
    for stored in store.profiles(None)? {
        match stored.profile {
            Ok(profile) => shown.push(Shown::new(&store, &stored.digest, &profile, false)),
            Err(error) if context.says_warnings() => warning(&error.to_string()),
            Err(_) => {}
        }
    }
    print(context.format, &shown, |out| {
        let mut table = Table::new(&["NAME", "DIGEST", "RUNS", "EXTENTS", "BYTES", "TOP LAYER"]);
        for profile in &shown {
            let top = profile.layers.last();
            table.row([
                profile.name.clone(),
                profile.digest.chars().take(15).collect(),
                profile.recordings.to_string(),
                profile.extents.to_string(),
                human_bytes(profile.bytes),
                top.map(|l| l.reference.clone().unwrap_or_else(|| l.layer_id.clone()))
                    .unwrap_or_default(),
            ]);
        }
        table.write(out)
    })?;
    Ok(ExitCode::SUCCESS)
}

fn show(context: &Context, args: &ProfileShowArgs) -> Outcome {
    let store = context.store()?;
    let mut shown = Vec::new();
    for text in &args.profiles {
        let (digest, profile) = store.find_profile(text)?;
        shown.push(Shown::new(&store, &digest, &profile, true));
    }
    print(context.format, &shown, |out| {
        for profile in &shown {
            writeln!(
                out,
                "{} {}: {} recordings, {} extents, {}",
                profile.name,
                profile.digest,
                profile.recordings,
                profile.extents,
                human_bytes(profile.bytes)
            )?;
            let mut table = Table::new(&["LAYER", "EXTENTS", "BYTES"]);
            for layer in &profile.layers {
                table.row([
                    layer
                        .reference
                        .clone()
                        .unwrap_or_else(|| layer.layer_id.clone()),
                    layer.extents.to_string(),
                    human_bytes(layer.bytes),
                ]);
            }
            table.write(out)?;
        }
        Ok(())
    })?;
    Ok(ExitCode::SUCCESS)
}

fn merge(context: &Context, args: &ProfileMergeArgs) -> Outcome {
    let store = context.store()?;
    let profiles = args
        .profiles
        .iter()
        .map(|text| Ok(store.find_profile(text)?.1))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let name = args.store_as.as_deref().unwrap_or_default();
    let merged = Profile::merge(name, &profiles).context("these profiles cannot be merged")?;
    let digest = store.put_profile(&merged)?;
    let shown = Shown::new(&store, &digest, &merged, false);
    print(context.format, &shown, |out| {
        writeln!(
            out,
            "{} {}: {} recordings, {} extents, {}",
            shown.name,
            shown.digest,
            shown.recordings,
            shown.extents,
            human_bytes(shown.bytes)
        )
    })?;
    Ok(ExitCode::SUCCESS)
}

fn remove(context: &Context, args: &ProfileShowArgs) -> Outcome {
    let store = context.store()?;
    let found = args
        .profiles
        .iter()
        .map(|text| Ok(store.find_profile(text)?))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let mut removed = Vec::new();
    for (digest, profile) in &found {
        store.remove_profile(digest, profile)?;
        removed.push(digest.to_string());
    }
    print(context.format, &removed, |out| {
        for digest in &removed {
            writeln!(out, "{digest}")?;
        }
        Ok(())
    })?;
    Ok(ExitCode::SUCCESS)
}
