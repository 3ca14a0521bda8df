//! From an image's layers to ours.

use std::collections::BTreeMap;
use std::path::PathBuf;

use layerpack_erofs::NodeId;
use layerpack_store::registry::{Registry, RegistryOptions};
use layerpack_store::{
    Kind, LayerStore, LayerWriter, Manifest, ParentRef, Published, Reference, Sealed, Staged,
    Version, WriterOptions, publish_all,
};

use super::hashing::{Hashing, Sha};
use super::spec::Platform;
use super::{Blob, Image, ImageSource, archive, oci, registry};
use crate::build::{Filled, start_directory};
use crate::error::{PackError, Result};
use crate::filter::Filter;
use crate::git::{Git, GitIndex, Known};
use crate::layout;
use crate::merge::overlay;
use crate::model::Layer;
use crate::options::{ASIDE_AFTER, BuildReport, DEFAULT_XATTRS, EntryCounts, Limits, Progress};
use crate::owner::Owners;
use crate::path::components;
use crate::split::{self, Said, Split, SplitReport};
use crate::tar::{self, Reader};
use crate::tar_source::{Links, State, TarSource};
use crate::warnings::Warnings;

/// Most layers of one image.
const MAX_LAYERS: usize = 1000;
/// Longest text of a manifest's annotation in bytes.
const MAX_ANNOTATION: usize = 64 << 10;
/// Annotation with the configuration that containers of the image are run with, as JSON.
pub(crate) const CONFIG: &str = "oci.config";
/// Annotation with the digest of the image's manifest.
const MANIFEST: &str = "oci.manifest";

/// Which image to import, and how.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ImportOptions {
    /// What the layer is published as; with `per_layer` a base, which the lowest layer becomes.
    pub reference: Reference,
    /// Where the image comes from.
    pub source: ImageSource,
    /// One layer for each of the image's. Those above the lowest are published as
    /// `diff/NAME:VERSION-layer-N`, the topmost one as `diff/NAME:VERSION`; each names those below
    /// it as its parents.
    pub per_layer: bool,
    /// The image must be for this platform (`os/architecture[/variant]`); None: the only one that
    /// there is, or that for `host`.
    pub platform: Option<String>,
    /// The platform to choose where there are several.
    pub host: String,
    /// Labels of the manifests.
    pub labels: BTreeMap<String, String>,
    /// Annotations of the manifests, besides those that tell of the image.
    pub annotations: BTreeMap<String, String>,
    /// zstd level. Not part of a layer's identity.
    pub level: i32,
    /// Threads that compress; 0 is one per processor.
    pub jobs: usize,
    /// Later modification times become this one, in seconds since 1970.
    pub source_date_epoch: Option<i64>,
    /// Extended attributes to keep, as for a build.
    pub xattrs: Vec<String>,
    /// Paths to leave out, as for a build.
    pub excludes: Vec<String>,
    /// Paths that alone are wanted, as for a build.
    pub includes: Vec<String>,
    /// Whose things are in the layers, as for a build.
    pub owners: Owners,
    /// Path in the layers below which the image is put, as for a build; the image's configuration
    /// does not go along then, since its paths are others, unless it is the root.
    pub at: Option<Vec<u8>>,
    /// Whether git's indexes are refreshed, as for a build. With `per_layer` an index gets what
    /// is shown of the files of its own layer.
    pub git_index: bool,
    /// Bounds: `max_bytes` on all layers together, uncompressed, the others on each.
    pub limits: Limits,
    /// How a registry is spoken to.
    pub registry: RegistryOptions,
    /// Directory that keeps what has come of a registry's layers until the import has succeeded,
    /// so that the next run goes on where this one ended. None: nothing is kept.
    pub downloads: Option<PathBuf>,
    /// Directory for temporary files with what has to be known of large layers. None: that stays in
    /// memory.
    pub scratch: Option<PathBuf>,
    /// After how many entries of a layer the others are set aside there, as for a build.
    pub aside_after: u64,
}

impl ImportOptions {
    /// Options with everything at its default.
    #[must_use]
    pub fn new(reference: Reference, source: ImageSource) -> Self {
        Self {
            reference,
            source,
            per_layer: false,
            platform: None,
            host: "linux/amd64".to_owned(),
            labels: BTreeMap::new(),
            annotations: BTreeMap::new(),
            level: 3,
            jobs: 0,
            source_date_epoch: None,
            xattrs: DEFAULT_XATTRS
                .iter()
                .map(|name| (*name).to_owned())
                .collect(),
            excludes: Vec::new(),
            includes: Vec::new(),
            owners: Owners::default(),
            at: None,
            git_index: false,
            limits: Limits::default(),
            registry: RegistryOptions::default(),
            downloads: None,
            scratch: None,
            aside_after: ASIDE_AFTER,
        }
    }
}

/// What [`import`] published.
#[derive(Debug)]
pub struct ImportReport {
    /// One layer, or one for each of the image's, the lowest first.
    pub layers: Vec<BuildReport>,
    /// The image's platform.
    pub platform: String,
}

/// Imports an image.
///
/// # Errors
/// [`PackError::BadImage`] if documents or digests do not fit; else as [`crate::build`]. With
/// `per_layer`, all layers are in the store before the first reference is created, see
/// [`layerpack_store::publish_all`].
pub fn import(
    store: &LayerStore,
    options: &ImportOptions,
    progress: &dyn Progress,
) -> Result<ImportReport> {
    let (mut work, image, diff_ids) = Import::open(store, options, progress)?;
    progress.phase("read");
    let layers = if options.per_layer {
        work.one_by_one(&image, &diff_ids)?
    } else {
        let filled = work.all_in_one(&image, &diff_ids, false)?;
        let reference = options.reference.clone();
        work.git = filled.git;
        vec![work.publish(
            filled.layer,
            filled.writer,
            reference,
            Vec::new(),
            filled.warnings,
        )?]
    };
    registry::forget(&image);
    Ok(ImportReport {
        layers,
        platform: work.platform,
    })
}

/// Imports an image as one tree, splits it and publishes the parts under the references of
/// `split`. `options.reference` names nothing but must be of kind base.
///
/// # Errors
/// As [`import`] and [`crate::build_split`].
pub fn import_split(
    store: &LayerStore,
    options: &ImportOptions,
    split: &Split,
    progress: &dyn Progress,
) -> Result<SplitReport> {
    split::check(options.reference.kind)?;
    if options.per_layer {
        return Err(PackError::InvalidOption {
            option: "per_layer".to_owned(),
            why: "an image is split as one tree".to_owned(),
        });
    }
    let (mut work, image, diff_ids) = Import::open(store, options, progress)?;
    progress.phase("read");
    let filled = work.all_in_one(&image, &diff_ids, true)?;
    let said = Said {
        platform: &work.platform,
        labels: &options.labels,
        annotations: &work.annotations,
        level: options.level,
        clock: &work.clock,
    };
    let report = split::publish(split, filled, &said, progress)?;
    registry::forget(&image);
    Ok(report)
}

/// The digests that uncompressed layers must have.
fn check(image: &Image) -> Result<Vec<Sha>> {
    let bad = |what: String| PackError::BadImage {
        path: image.at.display().to_string(),
        what,
    };
    let ids = &image.config.rootfs.diff_ids;
    let count = image.layers.len();
    if count == 0 {
        return Err(bad("its image has no layers".to_owned()));
    }
    if count > MAX_LAYERS {
        return Err(bad(format!(
            "its image has {count} layers, at most {MAX_LAYERS} are read"
        )));
    }
    if ids.len() != count {
        return Err(bad(format!(
            "its image has {count} layers, its configuration lists {}",
            ids.len()
        )));
    }
    ids.iter().map(|id| Sha::parse(id).map_err(bad)).collect()
}

/// What the layers say of the image.
fn annotations(image: &Image, options: &ImportOptions) -> BTreeMap<String, String> {
    let mut annotations = options.annotations.clone();
    let config = image.config.config.as_ref().map(ToString::to_string);
    let config = config.filter(|config| config.len() <= MAX_ANNOTATION);
    // At `/` its paths are what they were.
    let moved = (options.at.as_deref()).is_some_and(|at| !components(at).is_empty());
    if let Some(config) = config.filter(|_| !moved) {
        annotations.insert(CONFIG.to_owned(), config);
    }
    if let Some(digest) = &image.digest {
        annotations.insert(MANIFEST.to_owned(), digest.clone());
    }
    annotations
}

/// The configuration that containers of a layer's image are run with, if it came from one.
pub(crate) fn config_annotation(manifest: &Manifest) -> Option<serde_json::Value> {
    serde_json::from_str(manifest.annotations.get(CONFIG)?).ok()
}

/// How a layer's contents are kept.
#[derive(Debug, Clone, Copy)]
struct End {
    /// In a temporary file, if there are many: nobody asks for them before they are laid out.
    spools: bool,
    /// No others are stored after them.
    closes: bool,
    /// Nobody asks for names when the layer is read.
    rests: bool,
}

struct Import<'a> {
    store: &'a LayerStore,
    options: &'a ImportOptions,
    progress: &'a dyn Progress,
    filter: Filter,
    /// Uncompressed bytes that may still be read.
    left: u64,
    platform: String,
    annotations: BTreeMap<String, String>,
    clock: crate::cpu::Clock,
    /// What was seen of git's indexes, if they are to be refreshed.
    git: Option<Git>,
    /// Symbolic links of its layers that are not wanted themselves.
    links: Links,
}

impl<'a> Import<'a> {
    /// Opens the image and checks what its documents say.
    fn open(
        store: &'a LayerStore,
        options: &'a ImportOptions,
        progress: &'a dyn Progress,
    ) -> Result<(Self, Image, Vec<Sha>)> {
        let clock = crate::cpu::Clock::start();
        let platform = |name: &str, text: &str| {
            Platform::parse(text).ok_or_else(|| PackError::InvalidOption {
                option: format!("{name} {text:?}"),
                why: "a platform is os/architecture or os/architecture/variant".to_owned(),
            })
        };
        let wanted = options
            .platform
            .as_deref()
            .map(|text| platform("platform", text))
            .transpose()?;
        let host = platform("host", &options.host)?;
        if options.per_layer && options.reference.kind != Kind::Base {
            return Err(PackError::InvalidOption {
                option: format!("kind {}", options.reference.kind),
                why: "layers of an image lie on a base".to_owned(),
            });
        }
        let image = match &options.source {
            ImageSource::Oci { dir, tag } => {
                oci::open(dir, tag.as_deref(), wanted.as_ref(), &host)?
            }
            ImageSource::DockerArchive { file, name } => {
                archive::open(file, name.as_deref(), wanted.as_ref(), options.limits)?
            }
            ImageSource::Registry(name) => registry::open(
                &Registry::new(name.clone(), options.registry.clone())?,
                name,
                wanted.as_ref(),
                &host,
                options.downloads.as_deref(),
            )?,
        };
        let diff_ids = check(&image)?;
        let work = Self {
            store,
            options,
            progress,
            filter: Filter::new(&options.excludes, &options.xattrs, &options.limits)?
                .with(&options.includes, &options.owners)?,
            left: options.limits.max_bytes,
            platform: image.config.platform().text(),
            annotations: annotations(&image, options),
            clock,
            git: options.git_index.then(Git::default),
            links: Links::default(),
        };
        Ok((work, image, diff_ids))
    }
}

impl Import<'_> {
    fn all_in_one(&mut self, image: &Image, diff_ids: &[Sha], split: bool) -> Result<Filled> {
        let mut writer = self.writer()?;
        let mut merged: Option<Layer> = None;
        let mut warnings = Warnings::default();
        let count = image.layers.len();
        for (index, (blob, diff_id)) in image.layers.iter().zip(diff_ids).enumerate() {
            let end = End {
                // Else contents are asked for before they are laid out.
                spools: count == 1 && !split && self.git.is_none(),
                closes: index + 1 == count,
                rests: count == 1 && self.git.is_none() && !self.filter.selects(),
            };
            let read = self.layer(blob, diff_id, merged, end, &mut writer, &mut warnings);
            let (layer, below) = match read {
                Ok(read) => read,
                Err(error) => return Err(warnings.tell(error, self.progress)),
            };
            merged = Some(match below {
                None => layer,
                Some(mut below) => {
                    overlay::apply(&mut below, &layer)?;
                    below
                }
            });
        }
        let mut layer = merged.unwrap_or_else(|| Layer::new(true));
        let at = self.options.at.as_deref().unwrap_or_default();
        if let Some(start) = layer.child_at(NodeId::ROOT, at) {
            self.filter.warn_of_nothing(&mut layer, start);
        }
        warnings.absorb(std::mem::take(&mut layer.warnings));
        overlay::bottom(&mut layer)?;
        Ok(Filled {
            layer,
            writer,
            warnings,
            git: self.git.take(),
        })
    }

    fn one_by_one(&mut self, image: &Image, diff_ids: &[Sha]) -> Result<Vec<BuildReport>> {
        let mut merged: Option<Layer> = None;
        let mut parents: Vec<ParentRef> = Vec::new();
        let mut made = Vec::with_capacity(image.layers.len());
        let mut sealed: Option<Sealed> = None;
        let count = image.layers.len();
        for (index, (blob, diff_id)) in image.layers.iter().zip(diff_ids).enumerate() {
            let mut writer = match sealed.take() {
                Some(sealed) => sealed.reopen()?,
                None => self.writer()?,
            };
            let earlier = writer.stats();
            let mut warnings = Warnings::default();
            let end = End {
                spools: index == 0 && self.git.is_none(),
                closes: true,
                rests: false, // the next layer lies on it
            };
            let read = self.layer(blob, diff_id, merged, end, &mut writer, &mut warnings);
            let (layer, below) = match read {
                Ok(read) => read,
                Err(error) => return Err(warnings.tell(error, self.progress)),
            };
            let reference = self.reference(index, count)?;
            let (layer, next) = match below {
                // The lowest layer is also the first merge.
                None => (None, layer),
                Some(mut below) => {
                    overlay::apply(&mut below, &layer)?;
                    (Some(layer), below)
                }
            };
            let below = match layer {
                Some(_) => parents.clone(),
                None => Vec::new(),
            };
            let (layer, next) = match layer {
                Some(layer) => (layer, Some(next)),
                None => (next, None),
            };
            let (mut one, after) = self.stage(layer, writer, reference.clone(), below, warnings)?;
            let digest = *one.staged.digest();
            one.staged = one.staged.counted_from(earlier);
            merged = match next {
                Some(next) => Some(next),
                // As it was published, so that what comes next does not depend on how it was made.
                None => {
                    let manifest = self.store.manifest(&digest)?;
                    Some(crate::merge::load(self.store, &manifest, false)?)
                }
            };
            parents.push(ParentRef {
                reference: Some(reference),
                manifest: digest,
            });
            made.push(one);
            sealed = Some(after);
        }
        let (staged, rest): (Vec<_>, Vec<_>) = made.into_iter().map(Made::split).unzip();
        let published = match publish_all(staged) {
            Ok(published) => published,
            Err(error) => {
                let lines = rest.iter().flat_map(|rest| &rest.warnings);
                lines.for_each(|line| self.progress.warning(line));
                return Err(error.into());
            }
        };
        Ok(published
            .into_iter()
            .zip(rest)
            .map(|(published, rest)| rest.report(published))
            .collect())
    }

    fn reference(&self, index: usize, count: usize) -> Result<Reference> {
        let base = &self.options.reference;
        if index == 0 {
            return Ok(base.clone());
        }
        let version = if index + 1 == count {
            base.version.clone()
        } else {
            Version::new(&format!("{}-layer-{}", base.version, index + 1))?
        };
        Ok(Reference::new(Kind::Diff, base.name.clone(), version))
    }

    fn writer(&self) -> Result<LayerWriter> {
        Ok(self.store.writer(WriterOptions {
            level: self.options.level,
            jobs: self.options.jobs,
            scratch: self.options.scratch.clone(),
            ..WriterOptions::default()
        })?)
    }

    /// Reads one layer above `below`, which comes back.
    fn layer(
        &mut self,
        blob: &Blob,
        diff_id: &Sha,
        below: Option<Layer>,
        end: End,
        writer: &mut LayerWriter,
        warnings: &mut Warnings,
    ) -> Result<(Layer, Option<Layer>)> {
        let options = self.options;
        let mut layer = match below {
            None => Layer::new(true),
            Some(below) => Layer::above(below),
        };
        if end.rests {
            layer.tree.rest();
        }
        if end.spools {
            layer.spool_contents(options.scratch.as_deref());
        }
        let limits = Limits {
            max_bytes: self.left,
            ..options.limits
        };
        let start = start_directory(&mut layer, options.at.as_deref(), &limits)?;
        self.links.next_archive();
        let (stored, stored_seen) = Hashing::new(blob.open()?);
        let input = tar::decode(stored, &blob.name, limits.max_ratio)?;
        let lazy = input.lazy || blob.is_lazy();
        let (raw, ending) = input.split();
        let (raw, raw_seen) = Hashing::new(raw);
        let mut source = TarSource {
            layer: &mut layer,
            writer,
            filter: &self.filter,
            limits,
            start,
            // A workspace's root says nothing about where it is put.
            defines_root: options.reference.kind == Kind::Base,
            progress: self.progress,
            git: self.git.as_mut(),
            lazy,
            twice: true,
            links: &mut self.links,
            state: State::new(options.scratch.as_deref(), options.aside_after),
        };
        let name = blob.name.display().to_string();
        let read = tar::ahead(Box::new(raw), |input| {
            source.read(&mut Reader::new(input, name.clone(), limits))
        });
        let read = read.and_then(|_| {
            if source.wants_again() {
                let (raw, _) = tar::decode(blob.open()?, &blob.name, limits.max_ratio)?.split();
                let (raw, again) = Hashing::new(raw);
                tar::ahead(Box::new(raw), |input| {
                    source.read_again(&mut Reader::new(input, name.clone(), limits))
                })?;
                if again.so_far().0 != raw_seen.so_far().0 {
                    return Err(PackError::BadImage {
                        path: name.clone(),
                        what: "it changed while it was read".to_owned(),
                    });
                }
            }
            source.finish(&ending, end.closes)
        });
        let bad = |what: String| PackError::BadImage {
            path: name.clone(),
            what,
        };
        warnings.absorb(std::mem::take(&mut layer.warnings));
        read?;
        let (digest, bytes) = raw_seen.so_far();
        if &digest != diff_id {
            return Err(bad(format!(
                "uncompressed its digest is {digest}, the image's configuration says {diff_id}"
            )));
        }
        if let Some((expected, size)) = &blob.stored {
            let (digest, bytes) = stored_seen.so_far();
            if &digest != expected || bytes != *size {
                return Err(bad(format!(
                    "it has {bytes} bytes with the digest {digest}, the image says {size} and {expected}"
                )));
            }
        }
        self.left = self.left.saturating_sub(bytes);
        layer.settle()?;
        if let Some(epoch) = self.options.source_date_epoch {
            layer.clamp_times(epoch);
        }
        warnings.absorb(std::mem::take(&mut layer.warnings));
        let below = layer.take_below();
        Ok((layer, below))
    }

    /// Publishes a layer.
    fn publish(
        &mut self,
        layer: Layer,
        writer: LayerWriter,
        reference: Reference,
        parents: Vec<ParentRef>,
        warnings: Warnings,
    ) -> Result<BuildReport> {
        let (made, _sealed) = self.stage(layer, writer, reference, parents, warnings)?;
        let (staged, rest) = made.split();
        match staged.publish() {
            Ok(published) => Ok(rest.report(published)),
            Err(error) => {
                rest.warnings
                    .iter()
                    .for_each(|line| self.progress.warning(line));
                Err(error.into())
            }
        }
    }

    /// Stores a layer without publishing it.
    fn stage(
        &mut self,
        mut layer: Layer,
        mut writer: LayerWriter,
        reference: Reference,
        parents: Vec<ParentRef>,
        warnings: Warnings,
    ) -> Result<(Made, Sealed)> {
        self.progress.phase("publish");
        let made = (|| -> Result<(Made, Sealed)> {
            let git = match &mut self.git {
                Some(git) => git.refresh(&mut layer, &mut writer, &Known::default())?,
                None => Vec::new(),
            };
            let mut finished = layout::finish(layer, reference, self.options.level)?;
            let draft = &mut finished.draft;
            draft.platform.clone_from(&self.platform);
            draft.parents = parents;
            draft.labels.clone_from(&self.options.labels);
            draft.annotations.clone_from(&self.annotations);
            let (staged, sealed) = writer.stage(finished.draft)?;
            let rest = Rest {
                counts: finished.counts,
                meta_bytes: finished.meta_bytes,
                warnings: Vec::new(),
                cpu_seconds: self.clock.seconds(),
                git,
            };
            Ok((Made { staged, rest }, sealed))
        })();
        match made {
            Ok((mut made, sealed)) => {
                made.rest.warnings = warnings.into_vec();
                Ok((made, sealed))
            }
            Err(error) => Err(warnings.tell(error, self.progress)),
        }
    }
}

/// A layer that is stored and not published.
struct Made {
    staged: Staged,
    rest: Rest,
}

/// What its report will say beside what publishing says.
struct Rest {
    counts: EntryCounts,
    meta_bytes: u64,
    warnings: Vec<String>,
    cpu_seconds: f64,
    git: Vec<GitIndex>,
}

impl Made {
    fn split(self) -> (Staged, Rest) {
        (self.staged, self.rest)
    }
}

impl Rest {
    fn report(mut self, published: Published) -> BuildReport {
        self.warnings.extend(published.warnings.iter().cloned());
        BuildReport {
            published,
            counts: self.counts,
            meta_bytes: self.meta_bytes,
            warnings: self.warnings,
            cpu_seconds: self.cpu_seconds,
            git: self.git,
        }
    }
}
