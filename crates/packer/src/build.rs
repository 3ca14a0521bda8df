//! Builds a layer from a source and publishes it.

use layerpack_erofs::NodeId;
use layerpack_store::{Kind, LayerStore, LayerWriter, WriterOptions};

use crate::dir::DirSource;
use crate::dir_view::Plain;
use crate::error::{PackError, Result};
use crate::filter::Filter;
use crate::layout;
use crate::model::Layer;
use crate::options::{BuildOptions, BuildReport, Progress, Source};
use crate::path::{components, escapes};
use crate::tar::{self, Reader};
use crate::tar_source::TarSource;

/// Packs `options.source` and publishes it as `options.reference`.
///
/// # Errors
/// [`PackError`], naming the file or archive concerned. Nothing is published then; what was
/// already stored of the contents stays in the store, unreferenced, and is used again by a later
/// build.
pub fn build(
    store: &LayerStore,
    options: &BuildOptions,
    progress: &dyn Progress,
) -> Result<BuildReport> {
    let clock = crate::cpu::Clock::start();
    let filter = Filter::new(&options.excludes, &options.xattrs, &options.limits)?;
    let kind = options.reference.kind;
    let mut layer = Layer::new(kind == Kind::Base);
    let start = start_directory(&mut layer, options)?;
    let read = read(store, options, &filter, start, &mut layer, progress);
    let mut warnings = std::mem::take(&mut layer.warnings);
    let made = read.and_then(|writer| {
        progress.phase("publish");
        layer.settle()?;
        warnings.absorb(std::mem::take(&mut layer.warnings));
        if let Some(epoch) = options.source_date_epoch {
            layer.clamp_times(epoch);
        }
        let mut finished = layout::finish(layer, options.reference.clone())?;
        let draft = &mut finished.draft;
        draft.platform.clone_from(&options.platform);
        draft.parents.clone_from(&options.parents);
        draft.labels.clone_from(&options.labels);
        draft.annotations.clone_from(&options.annotations);
        let published = writer.finish(finished.draft)?;
        Ok((published, finished.counts, finished.meta_bytes))
    });
    let ((published, counts, meta_bytes), warnings) = warnings.close(made, progress)?;
    Ok(BuildReport {
        published,
        counts,
        meta_bytes,
        warnings,
        cpu_seconds: clock.seconds(),
    })
}

/// Reads the source into `layer`; its contents go through the writer that comes back.
fn read(
    store: &LayerStore,
    options: &BuildOptions,
    filter: &Filter,
    start: NodeId,
    layer: &mut Layer,
    progress: &dyn Progress,
) -> Result<LayerWriter> {
    // A base's root is its own. Of anything else it is where the source happened to lie, and the
    // layers below know better.
    let defines_root = matches!(options.reference.kind, Kind::Base | Kind::Diff);
    let mut writer = store.writer(WriterOptions {
        level: options.level,
        jobs: options.jobs,
        ..WriterOptions::default()
    })?;
    match &options.source {
        Source::Dir(path) => {
            progress.phase("scan");
            let view = Plain {
                xattrs: &filter.xattrs,
            };
            let mut source = DirSource::open(path, &view, filter, options.limits, progress)?;
            source.scan(layer, start, defines_root)?;
            progress.phase("read");
            source.store(layer, &mut writer)?;
        }
        Source::Tar(path) => {
            progress.phase("read");
            let writer = &mut writer;
            let limits = options.limits;
            let mut source = TarSource {
                layer,
                writer,
                filter,
                limits,
                start,
                defines_root,
                progress,
                kept_back: Vec::new(),
                kept_bytes: 0,
            };
            let input = tar::open(path)?;
            tar::ahead(input, |input| {
                source.read(&mut Reader::new(input, path.display().to_string(), limits))
            })?;
        }
    }
    Ok(writer)
}

/// The directory that the source's root becomes; those on the way to it are implicit.
fn start_directory(layer: &mut Layer, options: &BuildOptions) -> Result<NodeId> {
    let Some(at) = &options.at else {
        return Ok(NodeId::ROOT);
    };
    if escapes(at) || at.contains(&0) {
        return Err(PackError::InvalidOption {
            option: format!("at {}", crate::show(at)),
            why: "it must be a path below the root, without leading out of it".to_owned(),
        });
    }
    options.limits.check_path(at)?;
    layer.implicit_directories(&components(at))
}
