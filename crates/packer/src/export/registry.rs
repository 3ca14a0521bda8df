//! Images in registries.
//!
//! A layer's digest is known when it is compressed, so each is written to a temporary file before
//! it is sent, and sent only if the registry does not have it: the same layer has the same bytes.
//! The manifest goes last, and with it the tag: a reader finds all of the image or the one before.

use std::io::{BufWriter, Write as _};
use std::sync::Arc;

use fs_err::File;
use layerpack_store::registry::{ManifestName, Pushed, Registry, RegistryName, Sha256, Upload};
use layerpack_store::{Digest, LayerStore, Manifest};
use serde_json::json;

use super::image::{
    CONFIG_TYPE, Layers, MANIFEST_TYPE, Packer, Sink, config, layer_type, to_bytes, top,
};
use super::{ExportOptions, ExportReport, write_error};
use crate::error::{PackError, Result};
use crate::options::Progress;
use crate::warnings::Warnings;

/// Sends an image.
pub(super) fn push(
    store: &LayerStore,
    options: &ExportOptions,
    stack: &[(Digest, Manifest)],
    name: &RegistryName,
    progress: &dyn Progress,
    warnings: &mut Warnings,
) -> Result<ExportReport> {
    let tag = tag(options, stack, name)?;
    let mut sending = Sending {
        registry: Registry::new(name.clone(), options.registry.clone())?,
        mount_from: &options.mount_from,
        bytes: 0,
        reused: 0,
    };
    let mut layers = Layers::new(store, progress, warnings);
    let (mut descriptors, mut diff_ids) = (Vec::new(), Vec::new());
    let media_type = layer_type(options.compression);
    for (_, manifest) in stack {
        let at = manifest.reference().to_string();
        let error = |source| write_error(std::path::Path::new("a temporary file"), source);
        let file = match &options.registry.spool {
            Some(dir) => tempfile::tempfile_in(dir),
            None => tempfile::tempfile(),
        };
        let mut file = File::from_parts(file.map_err(error)?, &at);
        let out = Sink::new(BufWriter::with_capacity(1 << 20, &mut file));
        let packer = Packer::new(options.compression, out).map_err(error)?;
        let (packer, diff_id) = layers.next(manifest, &at, packer)?;
        let mut out = packer.finish().map_err(error)?;
        out.flush().map_err(error)?;
        let (digest, bytes) = out.finish();
        let digest = sha(&digest.to_string())?;
        sending.blob(&digest, &Upload::File(Arc::new(file), bytes))?;
        descriptors.push(json!({
            "mediaType": media_type, "digest": digest, "size": bytes,
        }));
        diff_ids.push(diff_id);
    }
    progress.phase("publish");
    let (config, _) = config(options, stack, &diff_ids)?;
    let config_digest = Sha256::of(&config);
    let config_size = config.len();
    sending.blob(&config_digest, &Upload::Bytes(config.into()))?;
    let manifest = to_bytes(&json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": {"mediaType": CONFIG_TYPE, "digest": config_digest, "size": config_size},
        "layers": descriptors,
    }))?;
    let digest = sending
        .registry
        .put_manifest(&tag, MANIFEST_TYPE, &manifest)?;
    Ok(ExportReport {
        digest: digest.to_string(),
        name: Some(tag.to_string()),
        layers: stack.len(),
        bytes: sending.bytes + manifest.len() as u64,
        reused_bytes: sending.reused,
        warnings: Vec::new(),
    })
}

/// The tag of the target's name, the one asked for, or the topmost layer's version.
fn tag(
    options: &ExportOptions,
    stack: &[(Digest, Manifest)],
    name: &RegistryName,
) -> Result<ManifestName> {
    let asked = match (&options.name, name.manifest()) {
        (None, Some(tag)) => return Ok(tag.clone()),
        (Some(asked), None) => asked.clone(),
        (Some(asked), Some(tag)) if *asked == tag.to_string() => return Ok(tag.clone()),
        (Some(asked), Some(tag)) => {
            return Err(PackError::InvalidOption {
                option: format!("tag {asked:?}"),
                why: format!("the target has the tag {tag:?} already; give one of them"),
            });
        }
        (None, None) => top(stack)?.version.to_string(),
    };
    ManifestName::tag(&asked).ok_or_else(|| PackError::InvalidOption {
        option: format!("tag {asked:?}"),
        why: "a tag is 1 to 128 of A-Z a-z 0-9 _ . - and begins with none of . -".to_owned(),
    })
}

fn sha(text: &str) -> Result<Sha256> {
    text.parse().map_err(|error| PackError::BadImage {
        path: "the image to be written".to_owned(),
        what: format!("{error}"),
    })
}

/// What goes to the registry, counted.
struct Sending<'a> {
    registry: Registry,
    mount_from: &'a [RegistryName],
    bytes: u64,
    reused: u64,
}

impl Sending<'_> {
    fn blob(&mut self, digest: &Sha256, upload: &Upload) -> Result<()> {
        let size = upload.size();
        let pushed = self.registry.push_blob(digest, upload, self.mount_from)?;
        self.bytes += size;
        if pushed != Pushed::Sent {
            self.reused += size;
        }
        Ok(())
    }
}
