//! Makes a snapshot: a diff layer from the upper directory of an overlay.

use layerpack_erofs::NodeId;
use layerpack_store::{Kind, LayerStore, LayerWriter, WriterOptions};

use crate::dir::DirSource;
use crate::error::{PackError, Result};
use crate::filter::Filter;
use crate::layout;
use crate::model::Layer;
use crate::options::{PackDiffOptions, PackDiffReport, Progress};
use crate::owner::{Owners, Ownership};
use crate::upper::Upper;

/// Packs an upper directory and publishes it as `options.reference`. Reads nothing but the upper,
/// so the cost follows what changed.
///
/// The overlay should be at rest: freeze what writes to it and sync it first. A file that changes
/// while it is read is read again a few times; then it is an error.
///
/// # Errors
/// [`PackError`], naming the file concerned. Nothing is published then.
pub fn pack_diff(
    store: &LayerStore,
    options: &PackDiffOptions,
    progress: &dyn Progress,
) -> Result<PackDiffReport> {
    let clock = crate::cpu::Clock::start();
    if options.reference.kind != Kind::Diff {
        return Err(PackError::InvalidOption {
            option: format!("reference {}", options.reference),
            why: "a snapshot is of kind diff".to_owned(),
        });
    }
    let filter = Filter::new(&options.excludes, &options.xattrs, &options.limits)?;
    let view = Upper {
        xattrs: &filter.xattrs,
        marks: options.overlay_xattrs,
        owners: Ownership::new(&Owners {
            uid_map: options.uid_map.clone(),
            gid_map: options.gid_map.clone(),
            all_root: false,
        })?,
    };
    let mut layer = Layer::new(false);
    let read = read(store, options, &filter, &view, &mut layer, progress);
    let mut warnings = std::mem::take(&mut layer.warnings);
    let made = read.and_then(|writer| {
        progress.phase("publish");
        layer.settle()?;
        warnings.absorb(std::mem::take(&mut layer.warnings));
        let mut finished = layout::finish(layer, options.reference.clone(), options.level)?;
        let draft = &mut finished.draft;
        draft.platform.clone_from(&options.platform);
        draft.parents.clone_from(&options.stack);
        draft.labels.clone_from(&options.labels);
        draft.annotations.clone_from(&options.annotations);
        let published = writer.finish(finished.draft)?;
        Ok((published, finished.counts, finished.meta_bytes))
    });
    let ((published, counts, meta_bytes), warnings) = warnings.close(made, progress)?;
    Ok(PackDiffReport {
        published,
        counts,
        meta_bytes,
        warnings,
        cpu_seconds: clock.seconds(),
    })
}

/// Reads the upper into `layer`; its contents go through the writer that comes back.
fn read(
    store: &LayerStore,
    options: &PackDiffOptions,
    filter: &Filter,
    view: &Upper<'_>,
    layer: &mut Layer,
    progress: &dyn Progress,
) -> Result<LayerWriter> {
    let mut writer = store.writer(WriterOptions {
        level: options.level,
        jobs: options.jobs,
        ..WriterOptions::default()
    })?;
    progress.phase("scan");
    let mut source = DirSource::open(&options.upper, view, filter, options.limits, progress)?;
    source.scan(layer, NodeId::ROOT, true)?;
    progress.phase("read");
    source.store(layer, &mut writer, None)?;
    Ok(writer)
}
