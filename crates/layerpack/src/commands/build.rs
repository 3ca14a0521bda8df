//! `layerpack build`: packs a source and publishes it as a layer.

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStringExt;
use std::process::ExitCode;

use layerpack_packer::{BuildOptions, BuildReport, ImageSource, Source};
use layerpack_store::{Kind, LayerStore, ParentRef, Reference};

use super::Outcome;
use super::ls::parse_kind;
use crate::args::BuildArgs;
use crate::context::Context;
use crate::failure::{of_options, usage};
use crate::output;
use crate::progress::Reporter;
use crate::published::{Published, platform};
use crate::signing::Signer;
use crate::stack::{named, resolve};

pub(super) fn run(context: &Context, args: BuildArgs) -> Outcome {
    if args.split.is_some() {
        return super::split::run(context, args);
    }
    if args.strict {
        return Err(usage("--strict says what happens to leftovers of a --split").into());
    }
    let difference = !args.diff_from.is_empty();
    // clap asks for the name and the version where there is no split.
    let given = |text: &Option<String>| text.clone().unwrap_or_default();
    let kind = match &args.kind {
        Some(kind) => parse_kind(kind)?,
        None => Kind::Diff,
    };
    if kind == Kind::Diff && !difference {
        return Err(usage("a diff is made from a sandbox with `layerpack pack-diff`, or from a whole tree with --diff-from; or build a base, workspace or toolkit").into());
    }
    if kind == Kind::Base && difference {
        return Err(usage(
            "--diff-from makes a layer that lies on others, a base lies on none; leave --kind out for a diff"
        )
        .into());
    }
    let reference = named(kind, &given(&args.name), &given(&args.version))?;
    if ImageSource::is_image(&args.from) {
        return super::import::run(context, reference, args);
    }
    let store = context.store()?;
    let signer = Signer::new(&args.sign)?;
    let options = options(context, &store, reference, args)?;

    let reporter = Reporter::new(&options.reference.to_string(), context);
    let report = layerpack_packer::build(&store, &options, &reporter);
    reporter.finish();
    let report = report.map_err(of_options)?;
    warn(context, &report.warnings);
    signer.sign(&store, &report.published.digest)?;
    published(report).print(context)?;
    Ok(ExitCode::SUCCESS)
}

/// What the packer is to do.
pub(super) fn options(
    context: &Context,
    store: &LayerStore,
    reference: Reference,
    args: BuildArgs,
) -> anyhow::Result<BuildOptions> {
    if args.per_layer {
        return Err(usage(
            "--per-layer is for images: oci:DIR, docker-archive:FILE or registry:HOST/REPOSITORY",
        ));
    }
    if args.plain_http {
        return Err(usage(
            "--plain-http is for images from a registry: registry:HOST/REPOSITORY",
        ));
    }
    let source: Source = args.from.parse()?;
    let mut options = BuildOptions::new(reference, source);
    options.at = args.at.map(OsStringExt::into_vec);
    options.difference = !args.diff_from.is_empty();
    let below = if options.difference {
        &args.diff_from
    } else {
        &args.parent
    };
    options.parents = parents(store, below)?;
    options.platform = platform(args.platform);
    options.labels = labels(&args.label)?;
    options.annotations = annotations(&args.annotation)?;
    options.level = args.level;
    options.jobs = args.jobs.map_or(0, usize::from);
    options.source_date_epoch = args.source_date_epoch.and_then(|epoch| epoch.0);
    options.owners = args.select.owners();
    options.includes = args.select.include;
    options.excludes = args.select.exclude;
    options.xattrs.extend(args.xattr);
    options.limits = args.limits.limits();
    options.git_index = args.git_index;
    options.allow_empty = args.allow_empty;
    options.cache = context.cache_dir().map(|cache| cache.join("build"));
    options.scratch = Some(context.scratch_dir());
    options.fresh = args.no_cache;
    Ok(options)
}

/// What is printed of a report.
pub(super) fn published(report: BuildReport) -> Published {
    Published::new(
        &report.published,
        report.counts,
        report.meta_bytes,
        report.warnings,
        report.cpu_seconds,
    )
    .with_git(report.git)
}

/// The layers below, bottom first.
fn parents(store: &LayerStore, references: &[String]) -> anyhow::Result<Vec<ParentRef>> {
    let stack = resolve(store, references)?;
    Ok(stack
        .into_iter()
        .map(|layer| ParentRef {
            reference: layer.name.parse().ok(),
            manifest: layer.digest,
        })
        .collect())
}

/// Reads `KEY=VALUE` labels.
pub(super) fn labels(given: &[String]) -> anyhow::Result<BTreeMap<String, String>> {
    pairs("label", given)
}

/// Reads `KEY=VALUE` annotations.
pub(super) fn annotations(given: &[String]) -> anyhow::Result<BTreeMap<String, String>> {
    pairs("annotation", given)
}

fn pairs(what: &str, given: &[String]) -> anyhow::Result<BTreeMap<String, String>> {
    let mut pairs = BTreeMap::new();
    for text in given {
        let Some((key, value)) = text.split_once('=').filter(|(key, _)| !key.is_empty()) else {
            return Err(usage(format!("{what} {text:?} is not KEY=VALUE")));
        };
        if pairs.insert(key.to_owned(), value.to_owned()).is_some() {
            return Err(usage(format!("{what} {key} is given twice")));
        }
    }
    Ok(pairs)
}

/// Shows a report's warnings on stderr, unless they are in the JSON document or not wanted.
pub(super) fn warn(context: &Context, warnings: &[String]) {
    if context.says_warnings() {
        warnings.iter().for_each(|warning| output::warning(warning));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_have_a_key_and_are_given_once() {
        let given =
            |list: &[&str]| labels(&list.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>());
        assert_eq!(
            given(&["a=b=c", "d="])
                .unwrap()
                .get("a")
                .map(String::as_str),
            Some("b=c")
        );
        for bad in [&["a"][..], &["=x"], &["a=1", "a=2"]] {
            assert!(given(bad).is_err(), "{bad:?}");
        }
    }
}
