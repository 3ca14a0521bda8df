//! `layerpack mount REF... DIR`: a stack of layers as one tree.
//!
//! The daemon mounts the layers; this process merges them with overlayfs and attaches the result
//! in its own mount namespace. Whatever fails, nothing stays: the detached overlay goes with its
//! descriptor, the lease and the record with [`Claim`].

mod tree;

use std::ffi::OsString;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use layerpack_layerfs::{LeaseSpec, PrefetchSpec};
use layerpack_sys::mount;
use serde::Serialize;

use super::Outcome;
use crate::api::StackRequest;
use crate::args::MountArgs;
use crate::client::Client;
use crate::context::Context;
use crate::depth;
use crate::known;
use crate::launch::release;
use crate::mounts::{Busy, Place};
use crate::output::print;
use crate::stack::{self, StackLayer};

/// Dead mounts on one directory that are taken away, one after the other.
const MOST_DEAD: u32 = 16;

#[derive(Debug, Serialize)]
pub(super) struct Mounted {
    directory: PathBuf,
    layers: Vec<Layer>,
    writable: bool,
}

#[derive(Debug, Serialize)]
struct Layer {
    layer: String,
    digest: String,
}

impl Mounted {
    /// What `-o json` says of a mount.
    pub(super) fn new(directory: PathBuf, layers: Vec<StackLayer>, writable: bool) -> Self {
        Self {
            directory,
            layers: layers
                .into_iter()
                .map(|layer| Layer {
                    layer: layer.name,
                    digest: layer.digest.to_string(),
                })
                .collect(),
            writable,
        }
    }
}

pub(super) fn run(context: &Context, args: MountArgs) -> Outcome {
    let (references, dir) = split(args.refs_and_dir)?;
    let store = context.store()?;
    let layers = known::resolve(context, &store, &references)?;
    let prefetch = args.prefetch.spec(context, &store, &layers)?;
    let directory = mount_point(&dir)?;
    outside_of_root(context.root(), &directory)?;
    let client = context.daemon("mounting layers")?;
    let claim = Claim::new(context, &client, &directory, &layers, args.rw)?;
    let lowers = claim.stack_up(context, &depth::bounded(&store, &layers)?, prefetch)?;
    let upper = args.rw.then(|| claim.place.upper_and_work());
    let tree = tree::merge(&lowers, upper, &args.ids)?;
    mount::attach(tree.as_fd(), &directory)?;
    claim.keep();
    let mounted = Mounted::new(directory, layers, args.rw);
    print(context.format, &mounted, |_| Ok(()))?;
    Ok(ExitCode::SUCCESS)
}

/// The directory to mount on, without symbolic links. What a `mount --fuse` left on it whose server
/// died is taken away.
pub(super) fn mount_point(dir: &Path) -> anyhow::Result<PathBuf> {
    for _ in 0..MOST_DEAD {
        if !is_dead(dir) {
            break;
        }
        let place = super::umount::resolve(dir)?;
        if !super::umount::is_tree(&place)? {
            bail!(
                "a FUSE mount whose server is gone lies on {}: take it away first (`fusermount3 -u` or umount(8))",
                place.display()
            );
        }
        layerpack_layerfs::whole::unmount(&place, true).with_context(|| {
            format!(
                "a `mount --fuse` whose server is gone lies on {}: `layerpack umount` it first",
                place.display()
            )
        })?;
    }
    let directory =
        fs_err::canonicalize(dir).context("the mount point must exist (create it with mkdir)")?;
    if !directory.is_dir() {
        bail!("the mount point {} is not a directory", directory.display());
    }
    if directory.to_str().is_none() {
        bail!(
            "the mount point {} is not UTF-8, and layerpack's records and answers are: mount on a directory with another name (a bind mount can show it there, too)",
            directory.display()
        );
    }
    Ok(directory)
}

/// Whether a FUSE mount lies there that nobody serves any more. The server is asked: what the kernel
/// has cached does not tell.
fn is_dead(dir: &Path) -> bool {
    use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
    let asked = statx(CWD, dir, AtFlags::STATX_FORCE_SYNC, StatxFlags::BASIC_STATS);
    matches!(asked, Err(rustix::io::Errno::NOTCONN))
}

/// Refuses a mount point that is part of the node's own state, or that would hide it.
fn outside_of_root(root: &Path, directory: &Path) -> anyhow::Result<()> {
    // A root that is not there yet has no symbolic links to follow either.
    let root = fs_err::canonicalize(root).unwrap_or_else(|_| root.to_owned());
    if directory.starts_with(&root) {
        bail!(
            "the mount point {} is in the node root {}, which holds only layerpack's own state: choose a directory elsewhere",
            directory.display(),
            root.display()
        );
    }
    if root.starts_with(directory) {
        bail!(
            "a mount on {} would hide the node root {}: choose another directory, or another node root with --root",
            directory.display(),
            root.display()
        );
    }
    Ok(())
}

/// The last argument is the directory, those before it are references.
pub(super) fn split(mut arguments: Vec<OsString>) -> anyhow::Result<(Vec<String>, PathBuf)> {
    let Some(dir) = arguments.pop() else {
        bail!("a directory to mount on is needed")
    };
    let references = arguments
        .into_iter()
        .map(|argument| {
            argument
                .into_string()
                .map_err(|a| anyhow::anyhow!("{} is no reference: it is not UTF-8", a.display()))
        })
        .collect::<anyhow::Result<Vec<_>>>()?;
    Ok((references, PathBuf::from(dir)))
}

/// A mount point that is taken but not yet mounted; given back on drop.
struct Claim<'a> {
    place: Place,
    _busy: Busy,
    root: PathBuf,
    client: &'a Client,
    kept: bool,
}

impl<'a> Claim<'a> {
    fn new(
        context: &Context,
        client: &'a Client,
        directory: &Path,
        layers: &[StackLayer],
        writable: bool,
    ) -> anyhow::Result<Self> {
        let place = Place::of(context.root(), directory);
        let names: Vec<String> = layers.iter().map(|layer| layer.name.clone()).collect();
        if place.is_lost() && !mount::is_mounted(directory)? {
            release(context.root(), place.lease())?;
            place.remove()?;
        } else if let Some(record) = place.record()? {
            if mount::is_mounted(directory)? {
                bail!(
                    "{} is mounted on {} already: `layerpack umount` it first",
                    record.layers.join(" "),
                    directory.display()
                );
            }
            // Another `mount` is on its way to mount it, or the mount went away without `layerpack
            // umount`: by umount(8), or a restart.
            let Some(_left) = place.lock()? else {
                bail!("another `layerpack mount` works on {}", directory.display());
            };
            release(context.root(), place.lease())?;
            place.remove()?;
        }
        let busy = place.claim(directory, names, writable).with_context(|| {
            format!(
                "cannot record the mount on {} (does another `layerpack mount` work on it?)",
                directory.display()
            )
        })?;
        Ok(Self {
            place,
            _busy: busy,
            root: context.root().to_owned(),
            client,
            kept: false,
        })
    }

    fn stack_up(
        &self,
        context: &Context,
        layers: &[StackLayer],
        prefetch: PrefetchSpec,
    ) -> anyhow::Result<Vec<PathBuf>> {
        let request = StackRequest {
            store: context.store_url().to_owned(),
            layers: layers
                .iter()
                .map(|layer| layer.digest.to_string())
                .collect(),
            lease: LeaseSpec {
                id: self.place.lease().to_owned(),
                owner: "mount".to_owned(),
                pid: None,
            },
            prefetch,
            manifests: stack::manifests(layers),
        };
        let reply = self.client.stack_up(&request)?;
        super::build::warn(context, &reply.warnings);
        Ok(reply.lowers)
    }

    fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        if let Err(error) = release(&self.root, self.place.lease()) {
            tracing::warn!(%error, "cannot release the lease of a failed mount");
        }
        if let Err(error) = self.place.remove() {
            tracing::warn!(%error, "cannot remove the record of a failed mount");
        }
    }
}
