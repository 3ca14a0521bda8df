//! How the kernel's EROFS gets at the files of a layer: by themselves, or through loop devices
//! where it mounts nothing but block devices (before Linux 6.12).
//!
//! A loop device goes with its last user, which is the mount: nothing has to be taken away at
//! unmount, nor after a crash beyond the mount itself.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::str::FromStr;

use layerpack_sys::SysError;
use layerpack_sys::loopdev::LoopDevice;
use layerpack_sys::mount::{self, ErofsOptions};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::error::{LayerfsError, Result};
use crate::sync::{AtomicBool, Ordering};

/// How EROFS is mounted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ErofsBacking {
    /// From files where the kernel can, else by loop devices.
    #[default]
    Auto,
    /// From files only.
    File,
    /// By loop devices only.
    Loop,
}

impl FromStr for ErofsBacking {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "file" => Ok(Self::File),
            "loop" => Ok(Self::Loop),
            _ => Err(format!("{text:?} is none of auto, file and loop")),
        }
    }
}

/// What is wanted, and what was found out.
#[derive(Debug)]
pub(super) struct Backing {
    wanted: ErofsBacking,
    /// The kernel refused files.
    refused: AtomicBool,
}

impl Backing {
    pub(super) fn new(wanted: ErofsBacking) -> Self {
        Self {
            wanted,
            refused: AtomicBool::new(false),
        }
    }

    /// Mounts an image with its devices, detached.
    pub(super) fn mount(&self, meta: &Path, devices: &[&Path]) -> Result<OwnedFd> {
        let by_loop = match self.wanted {
            ErofsBacking::Loop => true,
            ErofsBacking::File => false,
            ErofsBacking::Auto => self.refused.load(Ordering::Relaxed),
        };
        if by_loop {
            return through_loops(meta, devices);
        }
        match mount::erofs(meta, devices, &ErofsOptions::default()) {
            Ok(fd) => Ok(fd),
            Err(e) if e.errno == Errno::NOTBLK => {
                if self.wanted == ErofsBacking::File {
                    return Err(LayerfsError::Unsupported {
                        feature: "mounting EROFS from a file",
                        reason: e.to_string(),
                        remedy: "a kernel from 6.12 on has it; LAYERPACK_EROFS=auto has older ones use loop devices",
                    });
                }
                let fd = through_loops(meta, devices)?;
                if !self.refused.swap(true, Ordering::Relaxed) {
                    tracing::info!(
                        "this kernel mounts no EROFS from files: layers are mounted by loop devices"
                    );
                }
                Ok(fd)
            }
            Err(e) => Err(e.into()),
        }
    }
}

fn through_loops(meta: &Path, devices: &[&Path]) -> Result<OwnedFd> {
    let unsupported = |e: SysError| match e.errno {
        Errno::NOENT | Errno::NXIO | Errno::NODEV | Errno::PERM | Errno::ACCESS => {
            LayerfsError::Unsupported {
                feature: "mounting layers by loop devices",
                reason: e.to_string(),
                remedy: "use Linux 6.12 or newer, or load the kernel's loop module and give access to /dev/loop-control and /dev/loop*",
            }
        }
        _ => LayerfsError::Sys(e),
    };
    let meta = LoopDevice::attach(meta).map_err(unsupported)?;
    let devices = devices
        .iter()
        .map(|device| LoopDevice::attach(device).map_err(unsupported))
        .collect::<Result<Vec<_>>>()?;
    let paths: Vec<&Path> = devices.iter().map(LoopDevice::path).collect();
    let fd = mount::erofs(meta.path(), &paths, &ErofsOptions::default())?;
    // From here on the mount keeps them.
    Ok(fd)
}
