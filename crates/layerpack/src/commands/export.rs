//! `layerpack export`: layers as archives and images for other tools.

use std::process::ExitCode;

use anyhow::Context as _;
use layerpack_packer::{Compression, ExportOptions, export};
use serde::Serialize;

use super::Outcome;
use super::build::warn;
use crate::args::{ExportArgs, LayerCompression};
use crate::context::Context;
use crate::output::{note, print};
use crate::progress::Reporter;
use crate::published::platform;
use crate::registries;
use crate::stack::resolve;
use crate::units::human_bytes;

/// An export in `-o json`.
#[derive(Debug, Serialize)]
struct Exported {
    target: String,
    /// Digest of the image's manifest, of its configuration (docker-archive) or of the archive.
    digest: String,
    /// Tag or name of the image.
    name: Option<String>,
    layers: usize,
    bytes: u64,
    /// Bytes that a registry had already.
    reused_bytes: u64,
    warnings: Vec<String>,
}

pub(super) fn run(context: &Context, args: ExportArgs) -> Outcome {
    let target = args.to.parse()?;
    let store = context.store()?;
    let stack = resolve(&store, &args.refs)?;
    let digests = stack.iter().map(|layer| layer.digest).collect();
    let mut options = ExportOptions::new(digests, target);
    options.name = args.tag;
    options.platform = platform(None);
    options.compression = match args.compression {
        LayerCompression::Gzip => Compression::Gzip,
        LayerCompression::Zstd => Compression::Zstd,
        LayerCompression::None => Compression::None,
    };
    options.registry = registries::image_options(args.plain_http);
    for text in &args.mount_from {
        let name = text
            .parse()
            .with_context(|| format!("cannot use --mount-from {text:?}"))?;
        options.mount_from.push(name);
    }
    let reporter = Reporter::new(&args.to, context);
    let report = export(&store, &options, &reporter);
    reporter.finish();
    let report = report?;
    warn(context, &report.warnings);
    let exported = Exported {
        target: args.to,
        digest: report.digest,
        name: report.name,
        layers: report.layers,
        bytes: report.bytes,
        reused_bytes: report.reused_bytes,
        warnings: report.warnings,
    };
    if !context.quiet && context.format == crate::output::Format::Text {
        let reused = match exported.reused_bytes {
            0 => String::new(),
            bytes => format!(", {} of it there already", human_bytes(bytes)),
        };
        note(&format!(
            "{} layers, {}{reused}",
            exported.layers,
            human_bytes(exported.bytes)
        ));
    }
    print(context.format, &exported, |out| {
        writeln!(out, "{} {}", exported.target, exported.digest)
    })?;
    Ok(ExitCode::SUCCESS)
}
