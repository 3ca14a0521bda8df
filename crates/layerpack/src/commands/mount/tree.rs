//! The layers of a mount as one tree.

use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use layerpack_packer::IdMapRange;
use layerpack_sys::mount::{self, Layer, OverlaySpec};
use layerpack_sys::{ns, probe};

use crate::args::IdArgs;

/// The first kernel whose overlayfs takes layers on detached mounts, which those with a map are.
const DETACHED_LAYERS: (u32, u32) = (6, 15);
/// All ids as they are.
const EVERY: IdMapRange = IdMapRange {
    inside: 0,
    outside: 0,
    count: u32::MAX,
};

/// One detached tree of all lowers (topmost first), read-only without an upper, with the owners that
/// `ids` makes of the layers'.
pub(super) fn merge(
    lowers: &[PathBuf],
    upper: Option<(PathBuf, PathBuf)>,
    ids: &IdArgs,
) -> anyhow::Result<OwnedFd> {
    let map = namespace(ids)?;
    let Some(top) = lowers.first() else {
        bail!("the daemon gave no layers to mount")
    };
    let top = layer(top, map.as_ref())?;
    if lowers.len() == 1 && upper.is_none() {
        // Overlayfs wants two layers: one alone is simply shown in a second place.
        mount::set_private(top.as_fd(), false)?;
        return Ok(top);
    }
    if let Some((upper, _)) = &upper {
        layerpack_runtime::like_top(top.as_fd(), upper)?;
    }
    let lowers = match &map {
        None => lowers.iter().cloned().map(Layer::from).collect(),
        Some(_) if probe::kernel_version() < DETACHED_LAYERS => bail!(
            "--uid-map and --gid-map with more than one layer, or with --rw, need Linux 6.15 or newer"
        ),
        Some(map) => {
            let rest = lowers.iter().skip(1).map(|path| layer(path, Some(map)));
            std::iter::once(Ok(top))
                .chain(rest)
                .map(|fd| fd.map(Layer::from))
                .collect::<anyhow::Result<Vec<_>>>()?
        }
    };
    Ok(mount::overlay(&OverlaySpec {
        lowers,
        // The upper does not outlive the mount: nothing is gained by syncing it.
        volatile: upper.is_some(),
        upper,
        xino: true,
        source: "layerpack".to_owned(),
    })?)
}

/// A copy of a layer's mount, with a map if there is one.
fn layer(path: &Path, map: Option<&OwnedFd>) -> anyhow::Result<OwnedFd> {
    let fd = mount::bind(path)?;
    if let Some(map) = map {
        mount::set_idmap(fd.as_fd(), map.as_fd()).with_context(|| {
            format!(
                "the owners of the layer at {} cannot be mapped",
                path.display()
            )
        })?;
    }
    Ok(fd)
}

/// A user namespace with the maps that were asked for.
fn namespace(ids: &IdArgs) -> anyhow::Result<Option<OwnedFd>> {
    if ids.uid_map.is_empty() && ids.gid_map.is_empty() {
        return Ok(None);
    }
    let ranges = |map: &[IdMapRange]| -> Vec<ns::IdRange> {
        let map = if map.is_empty() { &[EVERY] } else { map };
        map.iter()
            .map(|range| ns::IdRange {
                inside: range.inside,
                outside: range.outside,
                count: range.count,
            })
            .collect()
    };
    let made = ns::userns_fd(&ranges(&ids.uid_map), &ranges(&ids.gid_map));
    made.map(Some).context(
        "the kernel refuses the maps of --uid-map and --gid-map (do two ranges overlap, or go beyond the ids that this user namespace has?)",
    )
}
