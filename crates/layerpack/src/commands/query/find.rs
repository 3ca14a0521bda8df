//! `layerpack find`: entries of a layer or stack by path, name, type and size.

use std::process::ExitCode;

use layerpack_packer::{EntryKind, Find};
use layerpack_store::Reference;
use serde::Serialize;

use super::{PathText, open};
use crate::args::FindArgs;
use crate::commands::Outcome;
use crate::context::Context;
use crate::failure::{of_options, usage};
use crate::output::{print, printable_bytes};

/// An entry in `-o json`.
#[derive(Debug, Serialize)]
struct Found {
    #[serde(flatten)]
    path: PathText,
    #[serde(rename = "type")]
    kind: &'static str,
    size: u64,
    /// Permission bits.
    mode: u16,
    uid: u32,
    gid: u32,
    /// Seconds since 1970, and nanoseconds after them.
    mtime: (i64, u32),
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    target_hex: Option<String>,
}

pub(crate) fn find(context: &Context, args: &FindArgs) -> Outcome {
    let (refs, pattern) = match args.refs_and_pattern.split_last() {
        Some((last, refs)) if !refs.is_empty() && last.parse::<Reference>().is_err() => {
            (refs, Some(last.clone()))
        }
        _ => (args.refs_and_pattern.as_slice(), None),
    };
    let find = Find {
        pattern,
        name: args.name.clone(),
        kinds: kinds(&args.kinds)?,
        size: args.size,
    };
    let view = open(&context.store_to_read()?, refs, args.alone)?;
    let entries = view.find(&find).map_err(of_options)?;
    let found: Vec<Found> = entries
        .iter()
        .map(|e| {
            let target = e.target.as_deref();
            Found {
                path: PathText::new(&e.path),
                kind: e.kind.as_str(),
                size: e.size,
                mode: e.metadata.mode,
                uid: e.metadata.uid,
                gid: e.metadata.gid,
                mtime: (e.metadata.mtime.sec, e.metadata.mtime.nsec),
                target: target.map(|t| String::from_utf8_lossy(t).into_owned()),
                target_hex: target
                    .filter(|t| std::str::from_utf8(t).is_err())
                    .map(|t| t.iter().map(|b| format!("{b:02x}")).collect()),
            }
        })
        .collect();
    print(context.format, &found, |out| {
        for entry in &entries {
            writeln!(out, "/{}", printable_bytes(&entry.path))?;
        }
        Ok(())
    })?;
    Ok(ExitCode::SUCCESS)
}

fn kinds(texts: &[String]) -> anyhow::Result<Vec<EntryKind>> {
    const ALL: [EntryKind; 8] = [
        EntryKind::File,
        EntryKind::Directory,
        EntryKind::Symlink,
        EntryKind::CharDevice,
        EntryKind::BlockDevice,
        EntryKind::Fifo,
        EntryKind::Socket,
        EntryKind::Whiteout,
    ];
    let mut kinds = Vec::new();
    for letter in texts.iter().flat_map(|t| t.chars()).filter(|c| *c != ',') {
        match ALL.into_iter().find(|kind| kind.letter() == letter) {
            Some(kind) => kinds.push(kind),
            None => {
                return Err(usage(format!(
                    "{letter:?} is no type of entry: use letters of fdlcbpsw"
                )));
            }
        }
    }
    Ok(kinds)
}
