//! `layerpack umount`: takes a mount of `layerpack mount` away.
//!
//! Nothing here needs the daemon to live: the kernel unmounts, the record is on disk, and a lease
//! that a dead daemon held died with it.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use serde::Serialize;

use super::Outcome;
use crate::args::UmountArgs;
use crate::context::{Context, require_root};
use crate::failure::Failure;
use crate::launch::release;
use crate::mounts::Place;
use crate::output::print;

#[derive(Debug, Serialize)]
struct Unmounted {
    unmounted: Vec<PathBuf>,
}

pub(super) fn run(context: &Context, args: &UmountArgs) -> Outcome {
    let mut done = Unmounted {
        unmounted: Vec::new(),
    };
    let mut failed = None;
    for dir in &args.dirs {
        match one(context, dir, args.lazy) {
            Ok(directory) => done.unmounted.push(directory),
            Err(error) => {
                // The others go all the same, as with umount(8); the last failure ends the command.
                if let Some(failure) = failed.replace(Failure::from(error)) {
                    failure.report(context.format);
                }
            }
        }
    }
    if failed.is_none() || !done.unmounted.is_empty() {
        print(context.format, &done, |_| Ok(()))?;
    }
    match failed {
        Some(failure) => Err(failure),
        None => Ok(ExitCode::SUCCESS),
    }
}

fn one(context: &Context, dir: &Path, lazy: bool) -> anyhow::Result<PathBuf> {
    let directory = resolve(dir)?;
    if is_tree(&directory)? {
        layerpack_layerfs::whole::unmount(&directory, lazy).with_context(|| {
            format!(
                "cannot unmount {}: if it is in use, leave it first or use --lazy",
                directory.display()
            )
        })?;
        return Ok(directory);
    }
    let mounted = match layerpack_sys::mount::is_mounted(&directory) {
        // Of somebody else's FUSE, whose server is gone.
        Err(error) if error.errno == rustix::io::Errno::NOTCONN => true,
        answer => answer?,
    };
    if !mounted && !rustix::process::geteuid().is_root() {
        bail!("nothing is mounted on {}", directory.display());
    }
    require_root("unmounting")?;
    let place = Place::of(context.root(), &directory);
    if place.record()?.is_none() {
        if mounted {
            bail!(
                "{} was not mounted by this node ({}): use umount(8)",
                directory.display(),
                context.root().display()
            );
        }
        bail!(
            "nothing is mounted on {} (`layerpack daemon status` lists the mounts)",
            directory.display()
        );
    }
    // Until the end: a `mount` of the same place is not to find a half of it.
    let Some(_busy) = place.lock()? else {
        bail!("another `layerpack mount` works on {}", directory.display());
    };
    if mounted {
        layerpack_sys::mount::unmount(&directory, lazy).with_context(|| {
            format!(
                "cannot unmount {}: if it is in use, leave it first or use --lazy",
                directory.display()
            )
        })?;
    }
    release(context.root(), place.lease())?;
    place.remove()?;
    Ok(directory)
}

/// Whether the topmost mount on a directory is one of `mount --fuse`.
pub(super) fn is_tree(directory: &Path) -> anyhow::Result<bool> {
    let wanted = format!("fuse.{}", layerpack_layerfs::whole::SUBTYPE);
    let mounts = layerpack_sys::mountinfo::read()?;
    let topmost = mounts.iter().rev().find(|mount| mount.target == directory);
    Ok(topmost.is_some_and(|mount| mount.fstype == wanted))
}

/// The path without symbolic links. The last component is allowed to be unreadable, as the root
/// of a mount without its server may be.
pub(super) fn resolve(dir: &Path) -> anyhow::Result<PathBuf> {
    let error = match fs_err::canonicalize(dir) {
        Ok(path) => return Ok(path),
        Err(error) => error,
    };
    match (dir.parent(), dir.file_name()) {
        (Some(parent), Some(name)) if error.kind() != std::io::ErrorKind::NotFound => {
            let parent = if parent.as_os_str().is_empty() {
                Path::new(".")
            } else {
                parent
            };
            Ok(fs_err::canonicalize(parent)?.join(name))
        }
        _ => Err(error).context("nothing to unmount"),
    }
}
