//! `layerpack build --from oci:… | docker-archive:… | registry:…`: container images as layers.

use std::os::unix::ffi::OsStringExt;
use std::process::ExitCode;

use layerpack_packer::{ImportOptions, import};
use layerpack_store::Reference;
use serde::Serialize;

use super::Outcome;
use super::build::{annotations, labels, published, warn};
use crate::args::BuildArgs;
use crate::context::Context;
use crate::failure::{of_options, usage};
use crate::output::print;
use crate::progress::Reporter;
use crate::published::{Published, platform};
use crate::registries;
use crate::signing::Signer;

/// What `-o json` shows of several layers, as with a split.
#[derive(Debug, Serialize)]
struct Layers {
    layers: Vec<Published>,
}

pub(super) fn run(context: &Context, reference: Reference, args: BuildArgs) -> Outcome {
    let signer = Signer::new(&args.sign)?;
    let options = options(context, reference, args)?;
    let store = context.store()?;
    let reporter = Reporter::new(&options.reference.to_string(), context);
    let report = import(&store, &options, &reporter);
    reporter.finish();
    let mut layers = Vec::new();
    for report in report.map_err(of_options)?.layers {
        warn(context, &report.warnings);
        signer.sign(&store, &report.published.digest)?;
        layers.push(published(report));
    }
    if options.per_layer {
        let shown = Layers { layers };
        print(context.format, &shown, |out| {
            (shown.layers)
                .iter()
                .try_for_each(|layer| writeln!(out, "{}", layer.line()))
        })?;
    } else if let Some(layer) = layers.first() {
        layer.print(context)?;
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) fn options(
    context: &Context,
    reference: Reference,
    args: BuildArgs,
) -> anyhow::Result<ImportOptions> {
    if !args.parent.is_empty() || !args.diff_from.is_empty() {
        return Err(usage(
            "--parent and --diff-from do not go with an image, which has its own layers below",
        ));
    }
    let mut options = ImportOptions::new(reference, args.from.parse()?);
    options.per_layer = args.per_layer;
    options.platform = args.platform;
    options.host = platform(None);
    options.labels = labels(&args.label)?;
    options.level = args.level;
    options.jobs = args.jobs.map_or(0, usize::from);
    options.source_date_epoch = args.source_date_epoch.and_then(|epoch| epoch.0);
    options.annotations = annotations(&args.annotation)?;
    options.owners = args.select.owners();
    options.at = args.at.map(OsStringExt::into_vec);
    options.includes = args.select.include;
    options.excludes = args.select.exclude;
    options.limits = args.limits.limits();
    options.git_index = args.git_index;
    options.xattrs.extend(args.xattr);
    options.registry = registries::image_options(args.plain_http);
    options.downloads = context.cache_dir().map(|dir| dir.join("downloads"));
    options.scratch = Some(context.scratch_dir());
    Ok(options)
}
