//! `layerpack pack-diff`: what a sandbox changed, as a diff layer.
//!
//! The sandbox is frozen while its upper is read, and thawed whatever happens: on errors by the
//! guard, on SIGINT, SIGTERM and SIGHUP by [`Thaw`], which waits for them meanwhile.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use layerpack_packer::{IdMapRange, PackDiffOptions};
use layerpack_runtime::Sandbox;
use layerpack_store::{Kind, LayerName, ParentRef, Reference, Version};

use super::Outcome;
use super::build::{labels, warn};
use crate::args::PackDiffArgs;
use crate::context::{Context, require_root};
use crate::launch::sandboxes;
use crate::progress::Reporter;
use crate::published::{Published, platform};
use crate::signing::Signer;
use crate::thaw::Thaw;

/// How long the processes of a sandbox may take to come to rest.
const FREEZE: Duration = Duration::from_secs(30);

pub(super) fn run(context: &Context, args: PackDiffArgs) -> Outcome {
    require_root("packing a sandbox")?;
    let reference = Reference::new(
        Kind::Diff,
        LayerName::new(&args.name)?,
        Version::new(&args.version)?,
    );
    let labels = labels(&args.label)?;
    let signer = Signer::new(&args.sign)?;
    let store = context.store()?;
    let sandboxes = sandboxes(context.root())?;
    let sandbox = sandboxes.get(&args.sandbox)?;

    let mut options = PackDiffOptions::new(reference, sandbox.upper.clone());
    (options.uid_map, options.gid_map) = id_maps(&sandbox);
    options.stack = parents(&sandbox)?;
    options.platform = platform(None);
    options.labels = labels;
    options.xattrs.extend(args.xattr);
    options.level = args.level;
    options.jobs = args.jobs.map_or(0, usize::from);

    // A dead sandbox changes no more, and is only kept from being removed meanwhile.
    let frozen = Thaw::on_signals(sandboxes.freeze(sandbox.spec.id.as_str(), FREEZE)?)?;
    let reporter = Reporter::new(&options.reference.to_string(), context);
    let report =
        sync(&sandbox).and_then(|()| Ok(layerpack_packer::pack_diff(&store, &options, &reporter)?));
    drop(frozen);
    reporter.finish();
    let report = report?;
    warn(context, &report.warnings);
    signer.sign(&store, &report.published.digest)?;
    Published::new(
        &report.published,
        report.counts,
        report.meta_bytes,
        report.warnings,
        report.cpu_seconds,
    )
    .print(context)?;
    Ok(ExitCode::SUCCESS)
}

/// Has the kernel finish what the sandbox wrote.
fn sync(sandbox: &Sandbox) -> anyhow::Result<()> {
    let upper = fs_err::File::open(&sandbox.upper)?;
    rustix::fs::syncfs(upper.file())
        .with_context(|| format!("cannot sync {}", sandbox.upper.display()))
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
