//! `layerpack pack-diff`: what a sandbox changed, as a diff layer.
//!
//! The sandbox is halted while names and metadata are read, and thawed whatever happens: on errors
//! by the guard, on SIGINT, SIGTERM and SIGHUP by [`Thaw`], which waits for them meanwhile, and
//! after `kill -9` by the daemon, which watches this process.

use std::io::Read as _;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, bail};
use fs_err::os::unix::fs::OpenOptionsExt as _;
use layerpack_packer::{
    IdMapRange, LowerLayer, Moves, PackDiffOptions, Rules, ScrubReport, snapshot,
};
use layerpack_runtime::{Sandbox, SandboxState};
use layerpack_store::{Kind, LayerStore, ParentRef};
use rustix::fs::OFlags;
use serde::Serialize;

use super::Outcome;
use super::build::{labels, warn};
use super::scrub_report;
use crate::args::PackDiffArgs;
use crate::context::{Context, require_root};
use crate::depth;
use crate::launch::{STORE_LABEL, sandboxes};
use crate::output::{Format, note, print, warning};
use crate::progress::Reporter;
use crate::published::{Published, platform};
use crate::signing::Signer;
use crate::stack::{StackLayer, named};
use crate::thaw::Thaw;

/// The node's rules, in its root directory: they count where `--rules` says nothing.
pub(crate) const NODE_RULES: &str = "scrub.toml";
/// The name by which all built-in sets are asked for.
const STANDARD: &str = "standard";
/// Largest rules file in bytes.
const MAX_RULES: u64 = 1 << 20;

/// A snapshot in `-o json`.
#[derive(Debug, Serialize)]
struct Packed {
    #[serde(flatten)]
    published: Published,
    /// Nothing was published.
    dry_run: bool,
    /// For how long the sandbox was halted, each time, in milliseconds.
    frozen_ms: Vec<f64>,
    /// By what: `freezer`, `signals`, `nothing`.
    halted_by: &'static str,
    /// Large files that were copied by reference before they were read.
    copied_files: u64,
    /// What rules did.
    report: ScrubReport,
}

/// How long one snapshot of a sandbox waits for another to end.
const TURN: Duration = Duration::from_secs(60);

pub(super) fn run(context: &Context, args: PackDiffArgs) -> Outcome {
    require_root("packing a sandbox")?;
    let reference = named(Kind::Diff, &args.name, &args.version)?;
    let labels = labels(&args.label)?;
    let signer = Signer::new(&args.sign)?;
    let rules = match args.no_rules {
        true => None,
        false => rules(context.root(), args.rules.as_deref())?,
    };
    let store = context.store()?;
    let sandboxes = sandboxes(context.root())?;
    let sandbox = sandboxes.get(&args.sandbox)?;
    let id = sandbox.spec.id.as_str();
    let _hold = sandboxes.hold(id, TURN)?;

    let mut options = PackDiffOptions::new(reference, sandbox.upper.clone());
    (options.uid_map, options.gid_map) = id_maps(&sandbox);
    options.stack = parents(&sandbox)?;
    is_there(context, &store, &sandbox)?;
    let kinds = kinds(context, &store, &options.stack, rules.is_some());
    if args.squash {
        options.squash = diffs_on_top(&store, &options.stack)?;
    }
    options.platform = platform(None);
    options.labels = labels;
    options.xattrs.extend(args.xattr);
    options.excludes = args.exclude;
    options.level = args.level;
    options.jobs = args.jobs.map_or(0, usize::from);
    options.git_index = !args.no_git_index;
    options.dry_run = args.dry_run;
    options.moves = Some(moves(&store, &options.stack));
    options.cache = context.cache_dir().map(|cache| cache.join("build"));
    options.lowers = lowers(&sandbox, &kinds);
    options.scratch = sandbox.upper.parent().map(Path::to_owned);
    options.rules = rules;

    if sandbox.state != SandboxState::Dead {
        guard(context, id);
    }
    let thaw = Thaw::on_signals(&sandboxes, &sandbox)?;
    let reporter = Reporter::new(&options.reference.to_string(), context);
    let report = snapshot(&store, &options, &thaw, &reporter);
    let by = thaw.by();
    drop(thaw);
    reporter.finish();
    let report = report?;
    warn(context, &report.warnings);
    if let Some(published) = &report.published {
        signer.sign(&store, &published.digest)?;
    }
    let packed = Packed {
        published: Published::maybe(
            &options.reference,
            report.published.as_ref(),
            report.counts,
            report.meta_bytes,
            report.warnings,
            report.cpu_seconds,
        )
        .with_git(report.git),
        dry_run: args.dry_run,
        frozen_ms: report
            .frozen
            .iter()
            .map(|frozen| (frozen.as_secs_f64() * 1e6).round() / 1e3)
            .collect(),
        halted_by: by.as_str(),
        copied_files: report.copied_files,
        report: report.scrub,
    };
    packed.print(context)?;
    if args.dry_run && !packed.report.forbidden.is_empty() {
        return Err(anyhow::anyhow!(
            "rules forbid what the report names: without --dry-run this would have failed"
        )
        .into());
    }
    Ok(ExitCode::SUCCESS)
}

impl Packed {
    fn print(&self, context: &Context) -> std::io::Result<()> {
        if !context.quiet && context.format == Format::Text {
            self.published.note();
            self.note();
        }
        print(context.format, self, |out| {
            writeln!(out, "{}", self.published.line())
        })
    }

    /// The report on stderr.
    fn note(&self) {
        let halted: Vec<String> = self.frozen_ms.iter().map(|ms| format!("{ms} ms")).collect();
        match self.halted_by {
            "nothing" => {}
            "signals" => note(&format!(
                "halted for {} by signals, since there is no freezer: its processes could see it",
                halted.join(" and ")
            )),
            _ => note(&format!("frozen for {}", halted.join(" and "))),
        }
        scrub_report::note_all(&self.report);
    }
}

/// Long rows of diffs are mounted through merged ones: which, that one more diff decides.
fn moves(store: &LayerStore, stack: &[ParentRef]) -> Moves {
    let (store, stack) = (store.clone(), stack.to_vec());
    Moves(Arc::new(move || {
        let layers = stack.iter().map(|parent| {
            Some(StackLayer {
                name: parent.reference.as_ref()?.to_string(),
                digest: parent.manifest,
                manifest: store.manifest(&parent.manifest).ok()?,
            })
        });
        let layers = layers.collect::<Option<Vec<_>>>()?;
        let (before, after) = depth::moved(&store, &layers)?;
        let plain = |all: Vec<StackLayer>| {
            let pairs = all.into_iter().map(|layer| (layer.digest, layer.manifest));
            pairs.collect()
        };
        Some((plain(before), plain(after)))
    }))
}

/// Refuses to make a store at the address that the sandbox's layers came from: it is away then.
fn is_there(context: &Context, store: &LayerStore, sandbox: &Sandbox) -> anyhow::Result<()> {
    let own = sandbox.spec.labels.get(STORE_LABEL);
    if sandbox.spec.stack.is_empty() || own.is_some_and(|own| own != context.store_url()) {
        return Ok(());
    }
    store.must_exist().with_context(|| {
        format!(
            "the store of the layers of sandbox {} is away; nothing was packed",
            sandbox.spec.id
        )
    })
}

/// Has the daemon let the sandbox go on if this process dies. Without a daemon the next command in
/// the sandbox does, and the next daemon.
fn guard(context: &Context, id: &str) {
    let guarded = context
        .daemon("packing a sandbox")
        .and_then(|client| Ok(client.guard(id, std::process::id())?));
    if let Err(error) = guarded
        && context.says_warnings()
    {
        warning(&format!(
            "no daemon watches over the frozen sandbox: {error:#}"
        ));
    }
}

/// The rules that count: those of the file named, or of the node, if it has any.
pub(crate) fn rules(root: &Path, named: Option<&Path>) -> anyhow::Result<Option<Rules>> {
    let node = root.join(NODE_RULES);
    let path = match named {
        Some(path) => path,
        None if node.symlink_metadata().is_ok() => &node,
        None => return Ok(None),
    };
    let rules = Rules::parse(&rules_text(path)?, SystemTime::now())
        .with_context(|| format!("cannot use {}", path.display()))?;
    Ok(Some(rules))
}

/// The text of a rules file, or of the built-in rules.
pub(crate) fn rules_text(path: &Path) -> anyhow::Result<String> {
    if path == Path::new(STANDARD) {
        return Ok(Rules::standard().to_owned());
    }
    // Not waiting for the writer of a fifo, nor reading a device without end.
    let file = fs_err::OpenOptions::new()
        .read(true)
        .custom_flags(i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or_default())
        .open(path)?;
    if !file.metadata()?.is_file() {
        bail!("{} is no rules file: it is no regular file", path.display());
    }
    let mut bytes = Vec::new();
    file.take(MAX_RULES + 1)
        .read_to_end(&mut bytes)
        .with_context(|| format!("cannot read {}", path.display()))?;
    if bytes.len() as u64 > MAX_RULES {
        bail!(
            "{} is no rules file: it has more than {MAX_RULES} bytes",
            path.display()
        );
    }
    String::from_utf8(bytes).map_err(|error| {
        anyhow::anyhow!(
            "{} is no rules file: it is no text, its byte {} is not UTF-8",
            path.display(),
            error.utf8_error().valid_up_to()
        )
    })
}

/// The diffs on top of a stack, from the lowest on.
fn diffs_on_top(store: &LayerStore, stack: &[ParentRef]) -> anyhow::Result<Vec<ParentRef>> {
    let mut on_top = Vec::new();
    for parent in stack.iter().rev() {
        if store.manifest(&parent.manifest)?.kind != Kind::Diff {
            break;
        }
        on_top.push(parent.clone());
    }
    on_top.reverse();
    Ok(on_top)
}

/// The kinds of the layers that the snapshot lies on, as far as they are known; `asks` if they matter.
/// Warns of layers that the store does not have.
fn kinds(
    context: &Context,
    store: &LayerStore,
    stack: &[ParentRef],
    asks: bool,
) -> Vec<Option<Kind>> {
    let says = context.says_warnings();
    let kind = |parent: &ParentRef| {
        let reference = parent.reference.as_ref();
        let named = reference.map(|reference| reference.kind);
        if !says && !asks {
            return named;
        }
        let kind = store.manifest(&parent.manifest).map(|m| m.kind);
        if kind.is_err() && says {
            let name = reference.map_or_else(|| parent.manifest.to_string(), ToString::to_string);
            warning(&format!(
                "{name}, which the snapshot lies on, is not in the store {}: push it there too, or start the snapshot with --fetch-from",
                store.url()
            ));
        }
        kind.ok().or(named)
    };
    stack.iter().map(kind).collect()
}

/// The layers below as they are mounted, topmost first. `kinds`: those of the stack, as far as they are
/// known.
fn lowers(sandbox: &Sandbox, kinds: &[Option<Kind>]) -> Vec<LowerLayer> {
    let (paths, stack) = (&sandbox.spec.lowers, &sandbox.spec.stack);
    // There may be one more on top: what the node made of implicit directories.
    let own = paths.len().saturating_sub(stack.len());
    // Rows of diffs may be mounted as one.
    let named = own <= 1 && paths.len() >= stack.len();
    let diffs = kinds
        .iter()
        .rev()
        .take_while(|kind| **kind == Some(Kind::Diff));
    let below = stack.len() - diffs.count().min(stack.len());
    paths
        .iter()
        .enumerate()
        .skip(if named { own } else { 0 })
        .map(|(index, path)| {
            let from_top = index
                .checked_sub(own)
                .and_then(|above| stack.len().checked_sub(above + 1));
            let from_bottom = paths.len().checked_sub(index + 1);
            let place = match named {
                true => from_top,
                false => from_bottom.filter(|at| *at < below),
            };
            let layer = place.and_then(|at| stack.get(at));
            let kind = place.and_then(|at| kinds.get(at)).copied().flatten();
            LowerLayer {
                name: layer.map_or_else(
                    || format!("several diffs at {}", path.display()),
                    |layer| layer.reference.clone(),
                ),
                path: path.clone(),
                diff: layer.is_none() || kind == Some(Kind::Diff),
            }
        })
        .collect()
}

fn id_maps(sandbox: &Sandbox) -> (Vec<IdMapRange>, Vec<IdMapRange>) {
    let map = &sandbox.spec.id_map;
    let range = IdMapRange {
        inside: 0,
        outside: map.base,
        count: map.count,
    };
    (vec![range], vec![range])
}

/// The stack that the sandbox was made from.
fn parents(sandbox: &Sandbox) -> anyhow::Result<Vec<ParentRef>> {
    let mut parents = Vec::with_capacity(sandbox.spec.stack.len());
    for layer in &sandbox.spec.stack {
        let manifest = layer
            .manifest
            .parse()
            .with_context(|| format!("the record of sandbox {} is damaged", sandbox.spec.id))?;
        // A layer known by its digest only has no reference.
        parents.push(ParentRef {
            reference: layer.reference.parse().ok(),
            manifest,
        });
    }
    Ok(parents)
}
