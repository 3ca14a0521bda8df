//! Builds a layer from a source and publishes it.

use std::path::Path;

use layerpack_erofs::{MAX_NAME, NodeId};
use layerpack_store::{Kind, LayerStore, LayerWriter, WriterOptions};

use crate::cache::Place;
use crate::dir::DirSource;
use crate::dir_view::Plain;
use crate::error::{PackError, Result};
use crate::filter::Filter;
use crate::git::{Git, Known};
use crate::layout;
use crate::merge;
use crate::model::Layer;
use crate::options::{BuildOptions, BuildReport, Limits, Progress, Source};
use crate::park;
use crate::path::{components, escapes};
use crate::split::{self, Said, Split, SplitReport};
use crate::tar::{self, Reader};
use crate::tar_source::{Links, State, TarSource};
use crate::warnings::Warnings;

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
    let Filled {
        mut layer,
        mut writer,
        warnings,
        git,
    } = fill(store, options, progress, false)?;
    progress.phase("publish");
    let mut indexes = Vec::new();
    let refreshed = git.map_or(Ok(Vec::new()), |mut git| {
        git.refresh(&mut layer, &mut writer, &Known::default())
    });
    let made = refreshed.and_then(|refreshed| {
        indexes = refreshed;
        // The last pack is written while the layer is laid out.
        writer.close()?;
        let mut finished = layout::finish(layer, options.reference.clone(), options.level)?;
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
        git: indexes,
    })
}

/// Packs `options.source` as a base, splits it and publishes the parts under the references of
/// `split`. `options.reference` names nothing but must be of kind base.
///
/// # Errors
/// As [`build`]. All parts are in the store before the first reference is created, see
/// [`layerpack_store::publish_all`].
pub fn build_split(
    store: &LayerStore,
    options: &BuildOptions,
    split: &Split,
    progress: &dyn Progress,
) -> Result<SplitReport> {
    let clock = crate::cpu::Clock::start();
    split::check(options.reference.kind)?;
    let filled = fill(store, options, progress, true)?;
    let said = Said {
        platform: &options.platform,
        labels: &options.labels,
        annotations: &options.annotations,
        level: options.level,
        clock: &clock,
    };
    split::publish(split, filled, &said, progress)
}

/// A layer that is ready to be laid out, and what its source left to be done.
pub(crate) struct Filled {
    /// The layer.
    pub layer: Layer,
    /// What stores its contents.
    pub writer: LayerWriter,
    /// What was dropped or altered.
    pub warnings: Warnings,
    /// What was seen of git's indexes, if they are to be refreshed.
    pub git: Option<Git>,
}

/// Reads the source. `split`: it is to be divided.
fn fill(
    store: &LayerStore,
    options: &BuildOptions,
    progress: &dyn Progress,
    split: bool,
) -> Result<Filled> {
    let mut git = options.git_index.then(Git::default);
    let filter = Filter::new(&options.excludes, &options.xattrs, &options.limits)?
        .with(&options.includes, &options.owners)?;
    check(options)?;
    let mut warnings = Warnings::default();
    let (mut layer, below) = match below(store, options, &mut warnings)? {
        // A whole tree, of which the difference is taken later.
        Some(below) if options.difference => (Layer::new(true), Some(below)),
        Some(below) => (Layer::above(below), None),
        None => (Layer::new(options.reference.kind == Kind::Base), None),
    };
    // Of those, contents are asked for before they are laid out.
    if !options.difference && !options.git_index && !split {
        layer.spool_contents(options.scratch_directory());
    }
    let start = start_directory(&mut layer, options.at.as_deref(), &options.limits)?;
    let read = read(
        store,
        options,
        &filter,
        start,
        &mut layer,
        git.as_mut(),
        progress,
    );
    let settled = read.and_then(|writer| {
        filter.warn_of_nothing(&mut layer, start);
        layer.settle()?;
        warnings.absorb(std::mem::take(&mut layer.warnings));
        if let Some(epoch) = options.source_date_epoch {
            layer.clamp_times(epoch);
        }
        if let Some(below) = below {
            layer = Layer::difference(&below, &layer, &filter, defines_root(options))?;
        }
        Ok(writer)
    });
    warnings.absorb(std::mem::take(&mut layer.warnings));
    match settled {
        Ok(writer) => Ok(Filled {
            layer,
            writer,
            warnings,
            git,
        }),
        Err(error) => Err(warnings.tell(error, progress)),
    }
}

/// Refuses options that do not fit together.
fn check(options: &BuildOptions) -> Result<()> {
    let invalid = |option: &str, why: &str| {
        Err(PackError::InvalidOption {
            option: option.to_owned(),
            why: why.to_owned(),
        })
    };
    if options.reference.kind == Kind::Base && !options.parents.is_empty() {
        return invalid("parents", "a base lies at the bottom: it has none");
    }
    if options.difference && options.parents.is_empty() {
        return invalid("difference", "name the layers that it is one to");
    }
    if options.difference && options.at.is_some() {
        return invalid("at", "a difference is one of whole trees");
    }
    if options.difference && options.git_index {
        let why = "an index is refreshed for the files of its own layer, a difference has but some";
        return invalid("git-index", why);
    }
    Ok(())
}

/// What the layers show that this one lies on.
fn below(
    store: &LayerStore,
    options: &BuildOptions,
    warnings: &mut Warnings,
) -> Result<Option<Layer>> {
    if options.parents.is_empty() {
        return Ok(None);
    }
    let mut manifests = Vec::with_capacity(options.parents.len());
    for parent in &options.parents {
        let manifest = store.manifest(&parent.manifest)?;
        if manifest.kind == Kind::Base && !manifests.is_empty() {
            return Err(PackError::InvalidOption {
                option: manifest.reference().to_string(),
                why: "a base lies at the bottom; name the layers from the bottom up".to_owned(),
            });
        }
        manifests.push((parent.manifest, manifest));
    }
    let mut below = merge::stack(store, &manifests, false, warnings)?;
    // Removed in one of them is not there, whatever lies further down.
    merge::overlay::bottom(&mut below)?;
    Ok(Some(below))
}

/// A base's root is its own, and so is that of a difference. Of anything else it is where the
/// source happened to lie, and the layers below know better.
fn defines_root(options: &BuildOptions) -> bool {
    matches!(options.reference.kind, Kind::Base | Kind::Diff)
}

/// Reads the source into `layer`; its contents go through the writer that comes back.
fn read(
    store: &LayerStore,
    options: &BuildOptions,
    filter: &Filter,
    start: NodeId,
    layer: &mut Layer,
    git: Option<&mut Git>,
    progress: &dyn Progress,
) -> Result<LayerWriter> {
    let defines_root = defines_root(options);
    let mut writer = store.writer(WriterOptions {
        level: options.level,
        jobs: options.jobs,
        verified_cache: options.cache.clone(),
        verify_all: options.fresh,
        scratch: options.scratch_directory().map(Path::to_owned),
        ..WriterOptions::default()
    })?;
    // Opening the index may have merged it.
    layerpack_sys::memory::trim();
    let alone = options.parents.is_empty() && git.is_none();
    match &options.source {
        Source::Dir(path) => {
            progress.phase("scan");
            let view = Plain {
                xattrs: &filter.xattrs,
                owners: &filter.owners,
            };
            let mut source = DirSource::open(path, &view, filter, options.limits, progress)?;
            source.spilling(options.scratch_directory());
            source.cached(cache_place(options, path), options.fresh);
            // Nobody asks for names then, which come in order.
            if alone && !filter.selects() {
                layer.tree.rest();
            }
            source.scan(layer, start, defines_root)?;
            let mut away = None;
            if alone {
                // What is read needs the memory.
                layer.tree.rest();
                away = park::away(&mut layer.tree, options.scratch_directory());
            }
            progress.phase("read");
            source.store(layer, &mut writer, git)?;
            if let Some(away) = away {
                // No chunk comes any more. Finding them took memory too.
                writer.close()?;
                layer.tree = away.back()?;
            }
        }
        Source::Tar(path) => {
            progress.phase("read");
            let max_ratio = options.limits.max_ratio;
            let input = tar::open(path, max_ratio)?;
            let limits = options.limits;
            if alone && !filter.selects() {
                // Names of most archives come in order too; where they do not, that ends this.
                layer.tree.rest();
            }
            let mut source = TarSource {
                layer,
                writer: &mut writer,
                filter,
                limits,
                start,
                defines_root,
                progress,
                git,
                lazy: input.lazy,
                twice: tar::can_be_read_twice(path),
                links: &mut Links::default(),
                state: State::new(options.scratch_directory(), options.aside_after),
            };
            let (input, ending) = input.split();
            let name = path.display().to_string();
            let entries = tar::ahead(input, |input| {
                source.read(&mut Reader::new(input, name.clone(), limits))
            })?;
            if source.wants_again() {
                let (input, _) = tar::open(path, max_ratio)?.split();
                tar::ahead(input, |input| {
                    source.read_again(&mut Reader::new(input, name.clone(), limits))
                })?;
            }
            source.finish(&ending, true)?;
            if entries == 0 && !options.allow_empty {
                return Err(PackError::EmptyArchive { archive: name });
            }
        }
    }
    Ok(writer)
}

/// The build cache of a directory. Chunks come from bytes and the chunker alone; what is left out
/// decides which files there are, so builds that differ in that do not share a cache.
fn cache_place(options: &BuildOptions, path: &Path) -> Option<Place> {
    let chunker = WriterOptions::default().chunker.to_string();
    let mut rules = vec![layout::RULES.as_bytes(), chunker.as_bytes()];
    rules.extend(options.includes.iter().map(String::as_bytes));
    rules.push(b"excludes");
    rules.extend(options.excludes.iter().map(String::as_bytes));
    Place::new(options.cache.as_deref()?, path, &rules)
}

/// The directory that the source's root becomes; those on the way to it are implicit.
pub(crate) fn start_directory(
    layer: &mut Layer,
    at: Option<&[u8]>,
    limits: &Limits,
) -> Result<NodeId> {
    let Some(at) = at else {
        return Ok(NodeId::ROOT);
    };
    if escapes(at) || at.contains(&0) {
        return Err(PackError::InvalidOption {
            option: format!("at {}", crate::show(at)),
            why: "it must be a path below the root, without leading out of it".to_owned(),
        });
    }
    let names = components(at);
    if let Some(name) = names.iter().find(|name| name.len() > MAX_NAME) {
        return Err(PackError::InvalidOption {
            option: format!("at {}", crate::show(at)),
            why: format!(
                "a name in it has {} bytes, and none can have more than {MAX_NAME}",
                name.len()
            ),
        });
    }
    limits.check_path(at).map_err(|error| match error {
        PackError::Limit {
            name, limit, unit, ..
        } => PackError::InvalidOption {
            option: format!("at {}", crate::show(at)),
            why: format!("it has more than the {limit} {unit} that {name} allows"),
        },
        error => error,
    })?;
    layer.implicit_directories(&names)
}
