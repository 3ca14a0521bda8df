//! `layerpack tag` and `untag`: channels, and their use wherever a layer is named.
//!
//! A command that names layers has its channels resolved once, before it begins, to versions: what
//! it does, prints and records speaks of those.

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::anyhow;
use layerpack_store::channel::{Channel, ChannelName};
use layerpack_store::{Kind, LayerStore, Version};
use serde::Serialize;

use super::Outcome;
use crate::args::{
    CacheCommand, Command, ProfileCommand, SandboxCommand, SnapshotCommand, TagArgs, UntagArgs,
};
use crate::context::Context;
use crate::output::{Table, note, print, printable, warning};
use crate::stack::parse_reference;
use crate::units::human_age;

/// A channel in `-o json`.
#[derive(Debug, Serialize)]
struct Shown {
    /// `kind/name@channel`.
    channel: String,
    /// Where it is: a version's reference.
    reference: String,
    /// Digest of that version's manifest.
    manifest: String,
    /// Seconds since 1970.
    moved: u64,
    /// Where it was before, newest first.
    history: Vec<Before>,
}

#[derive(Debug, Serialize)]
struct Before {
    reference: String,
    manifest: String,
    moved: u64,
}

impl Shown {
    fn new(name: &ChannelName, channel: Channel) -> Self {
        let reference = |version: Version| name.version(version).to_string();
        Self {
            channel: name.to_string(),
            reference: reference(channel.current.version),
            manifest: channel.current.manifest.to_string(),
            moved: channel.current.moved,
            history: channel
                .history
                .into_iter()
                .map(|m| Before {
                    reference: reference(m.version),
                    manifest: m.manifest.to_string(),
                    moved: m.moved,
                })
                .collect(),
        }
    }
}

fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_secs())
}

pub(super) fn tag(context: &Context, args: &TagArgs) -> Outcome {
    let (Some(reference), Some(channel)) = (&args.reference, &args.channel) else {
        return list(context, &context.store_that_is()?);
    };
    let store = context.store()?;
    let reference = parse_reference(reference)?;
    let name = ChannelName::of(&reference, Version::new(channel)?);
    let channel = store.move_channel(&name, &reference.version, now())?;
    let shown = Shown::new(&name, channel);
    print(context.format, &shown, |out| {
        let was = shown
            .history
            .first()
            .map(|m| format!(" (was {})", m.reference))
            .unwrap_or_default();
        writeln!(out, "{} is {}{was}", shown.channel, shown.reference)
    })?;
    Ok(ExitCode::SUCCESS)
}

fn list(context: &Context, store: &LayerStore) -> Outcome {
    let mut shown = Vec::new();
    let mut bad = Vec::new();
    for entry in store.channels()? {
        match entry.channel {
            Ok(channel) => shown.push(Shown::new(&entry.name, channel)),
            Err(error) => bad.push(format!("{}: {error}", entry.name)),
        }
    }
    print(context.format, &shown, |out| {
        let mut table = Table::new(&["CHANNEL", "LAYER", "MOVED", "BEFORE"]);
        for channel in &shown {
            table.row([
                channel.channel.clone(),
                channel.reference.clone(),
                format!("{} ago", human_age(now().saturating_sub(channel.moved))),
                channel
                    .history
                    .first()
                    .map(|m| m.reference.clone())
                    .unwrap_or_default(),
            ]);
        }
        table.write(out)
    })?;
    match bad.pop() {
        None => Ok(ExitCode::SUCCESS),
        Some(last) => {
            bad.iter().for_each(|line| warning(line));
            Err(anyhow!(last).into())
        }
    }
}

pub(super) fn untag(context: &Context, args: &UntagArgs) -> Outcome {
    let names = args
        .channels
        .iter()
        .map(|text| Ok(text.parse::<ChannelName>()?))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let store = context.store()?;
    for name in &names {
        store.remove_channel(name)?;
    }
    let removed: Vec<String> = names.iter().map(ToString::to_string).collect();
    print(context.format, &removed, |out| {
        for name in &removed {
            writeln!(out, "{name}")?;
        }
        Ok(())
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Puts versions in the place of channels among the layers that a command names.
pub(super) fn resolve(context: &Context, command: &mut Command) -> anyhow::Result<()> {
    let refs: &mut [String] = match command {
        Command::Build(args) => {
            replace(context, &mut args.diff_from, || context.store())?;
            &mut args.parent
        }
        Command::Flatten(args) => &mut args.refs,
        Command::Merge(args) => &mut args.refs,
        Command::Export(args) => &mut args.refs,
        Command::Inspect(args) => &mut args.refs,
        Command::Verify(args) => &mut args.refs,
        Command::Run(args) => &mut args.refs,
        Command::Push(args) => &mut args.transfer.refs,
        Command::Du(args) => &mut args.refs,
        Command::Seed(args) => &mut args.layers,
        Command::Profile(args) => match &mut args.command {
            ProfileCommand::Record(args) => &mut args.refs,
            ProfileCommand::Publish(args) => &mut args.refs,
            _ => return Ok(()),
        },
        Command::Cache(args) => match &mut args.command {
            CacheCommand::Pin(args) | CacheCommand::Unpin(args) => &mut args.layers,
            CacheCommand::Evict(args) => &mut args.layers,
            CacheCommand::Verify(args) => &mut args.layers,
            CacheCommand::Ls | CacheCommand::Du => return Ok(()),
        },
        Command::Cat(args) => return mount(context, &mut args.refs_and_path),
        Command::Find(args) => &mut args.refs_and_pattern,
        Command::Diff(args) => {
            for side in [&mut args.old, &mut args.new] {
                let mut refs: Vec<String> = side.split(',').map(str::to_owned).collect();
                replace(context, &mut refs, || context.store())?;
                *side = refs.join(",");
            }
            return Ok(());
        }
        Command::Tag(args) => args.reference.as_mut_slice(),
        Command::Pull(args) => {
            let from = args.from.clone();
            return replace(context, &mut args.transfer.refs, || context.store_at(&from));
        }
        Command::Copy(args) => {
            let from = args.from.clone();
            return replace(context, &mut args.transfer.refs, || context.store_at(&from));
        }
        Command::Sandbox(args) => match &mut args.command {
            SandboxCommand::Create(args) => match &mut args.from {
                Some(from) => std::slice::from_mut(from),
                None => &mut args.refs,
            },
            SandboxCommand::Exec(_) | SandboxCommand::Ls | SandboxCommand::Rm(_) => return Ok(()),
        },
        Command::Mount(args) => return mount(context, &mut args.refs_and_dir),
        Command::Checkout(args) => return mount(context, &mut args.refs_and_dir),
        Command::Snapshot(args) => match &mut args.command {
            SnapshotCommand::Inspect(args) => std::slice::from_mut(&mut args.reference),
            SnapshotCommand::Squash(args) => std::slice::from_mut(&mut args.reference),
            SnapshotCommand::Export(args) => std::slice::from_mut(&mut args.reference),
            SnapshotCommand::Rebase(args) => {
                replace(context, &mut args.onto, || context.store())?;
                std::slice::from_mut(&mut args.reference)
            }
            SnapshotCommand::Diff(args) => {
                replace(context, args.new.as_mut_slice(), || context.store())?;
                std::slice::from_mut(&mut args.reference)
            }
            SnapshotCommand::Ls(_) | SnapshotCommand::Rm(_) => return Ok(()),
        },
        // `rm` and the others do not take channels: what they do is meant for one version.
        _ => return Ok(()),
    };
    replace(context, refs, || context.store())
}

/// The last argument of `mount` is a directory, that of `cat` a path.
fn mount(context: &Context, refs_and_dir: &mut [OsString]) -> anyhow::Result<()> {
    let Some((_, refs)) = refs_and_dir.split_last_mut() else {
        return Ok(());
    };
    for text in refs {
        if let Some(channel) = text.to_str().filter(|t| is_channel(t)) {
            let mut one = [channel.to_owned()];
            replace(context, &mut one, || context.store())?;
            let [version] = one;
            *text = version.into();
        }
    }
    Ok(())
}

/// Whether the text can only be meant as a channel: it begins as a reference does.
fn is_channel(text: &str) -> bool {
    let kind = text.split('/').next().unwrap_or_default();
    kind.parse::<Kind>().is_ok() && text.contains('@') && !text.contains([':', '*', '?'])
}

fn replace(
    context: &Context,
    refs: &mut [String],
    store: impl Fn() -> anyhow::Result<LayerStore>,
) -> anyhow::Result<()> {
    let mut opened = None;
    for text in refs.iter_mut().filter(|text| is_channel(text)) {
        let name: ChannelName = text.parse()?;
        let store = match &opened {
            Some(store) => store,
            None => opened.insert(store()?),
        };
        let reference = store.resolve_channel(&name)?.to_string();
        if context.says_warnings() {
            note(&printable(&format!("{text} is {reference}")));
        }
        *text = reference;
    }
    Ok(())
}
