//! `layerpack export`: layers as archives and images for other tools.

use std::io::{IsTerminal as _, stdout};
use std::process::ExitCode;

use layerpack_packer::{Compression, ExportOptions, export, export_tar};
use serde::Serialize;

use super::Outcome;
use super::build::warn;
use crate::args::{ExportArgs, LayerCompression};
use crate::context::Context;
use crate::failure::{of_options, usage};
use crate::output::{Format, note, print};
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
    if args.to == "tar:-" {
        return to_stdout(context, &args);
    }
    let (to, tag) = oci_tag(&args.to);
    if tag.is_some() && args.tag.is_some() {
        let both = format!("{} names a tag, and --tag another: leave one out", args.to);
        return Err(usage(both).into());
    }
    let target = to.parse().map_err(of_options)?;
    let store = context.store()?;
    let stack = resolve(&store, &args.refs)?;
    let digests = stack.iter().map(|layer| layer.digest).collect();
    let mut options = ExportOptions::new(digests, target);
    options.name = args.tag.or(tag);
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
            .map_err(|error| usage(format!("cannot use --mount-from {text:?}: {error}")))?;
        options.mount_from.push(name);
    }
    let reporter = Reporter::new(&args.to, context);
    let report = export(&store, &options, &reporter);
    reporter.finish();
    let report = report.map_err(of_options)?;
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
    if !context.quiet && context.format == Format::Text {
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

/// `oci:DIR:TAG` as `oci:DIR` and the tag, as `build --from` and other tools read it.
fn oci_tag(text: &str) -> (String, Option<String>) {
    match text
        .strip_prefix("oci:")
        .and_then(|rest| rest.rsplit_once(':'))
    {
        Some((dir, tag)) if !dir.is_empty() && !tag.is_empty() && !tag.contains('/') => {
            (format!("oci:{dir}"), Some(tag.to_owned()))
        }
        _ => (text.to_owned(), None),
    }
}

/// The archive goes where the result is printed otherwise; that goes to stderr here.
fn to_stdout(context: &Context, args: &ExportArgs) -> Outcome {
    if stdout().is_terminal() {
        return Err(usage(
            "an archive is nothing for a terminal; redirect standard output, or use tar:FILE",
        )
        .into());
    }
    if context.format != Format::Text {
        return Err(usage(
            "the archive and the result cannot both go to standard output; use tar:FILE",
        )
        .into());
    }
    let store = context.store()?;
    let stack = resolve(&store, &args.refs)?;
    let digests: Vec<_> = stack.iter().map(|layer| layer.digest).collect();
    let reporter = Reporter::new(&args.to, context);
    let mut out = stdout().lock();
    let report = export_tar(&store, &digests, "standard output", &mut out, &reporter);
    reporter.finish();
    let report = report?;
    warn(context, &report.warnings);
    if !context.quiet {
        let bytes = human_bytes(report.bytes);
        note(&format!(
            "{} layers, {bytes}: {}",
            report.layers, report.digest
        ));
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layout_can_name_its_tag() {
        for (text, to, tag) in [
            ("oci:d", "oci:d", None),
            ("oci:a/b:1", "oci:a/b", Some("1")),
            ("oci:a:b/c", "oci:a:b/c", None),
            ("oci:d:", "oci:d:", None),
            ("registry:h/r:1", "registry:h/r:1", None),
        ] {
            assert_eq!(oci_tag(text), (to.to_owned(), tag.map(str::to_owned)));
        }
    }
}
