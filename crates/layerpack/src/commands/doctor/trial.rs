//! Tries, in a scratch directory of the node root, each thing that mounting and sandboxes need
//! from the kernel: a small layer is published, served, mounted, read back, merged with an upper
//! and shown under other ids. What fails names the feature; what depends on it is not tried.

use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, bail};
use layerpack_layerfs::{LeaseSpec, Node, NodeConfig};
use layerpack_packer::{BuildOptions, Silent, Source};
use layerpack_store::{Kind, LayerName, LayerStore, Reference, Version};
use layerpack_sys::mount::{self, OverlaySpec};
use layerpack_sys::ns::{IdRange, userns_fd};
use rustix::fs::{Mode, OFlags};

use super::Finding;

/// What the trial layer's file holds.
const CONTENT: &[u8] = b"layerpack doctor was here\n";
/// Lease of the trial.
const LEASE: &str = "doctor";

/// Runs all trials below `root`.
pub(super) fn run(root: &Path) -> Vec<Finding> {
    let mut findings = vec![
        Finding::new("FUSE", fuse(), "load the kernel module: modprobe fuse"),
        Finding::new(
            "user namespaces",
            user_namespace().map(|_| "can be made".to_owned()),
            "raise user.max_user_namespaces with sysctl, or use a kernel with CONFIG_USER_NS",
        ),
    ];
    let scratch = match Scratch::new(root) {
        Ok(scratch) => scratch,
        Err(error) => {
            findings.push(Finding::new(
                "scratch directory",
                Err(error),
                "make the node root writable",
            ));
            return findings;
        }
    };
    let image = scratch.path.join("probe.erofs");
    findings.push(Finding::optional(
        "EROFS from files",
        erofs_image(&image).and_then(|()| from_file(&image)),
        "layers are mounted by loop devices",
        "use Linux 6.12 or newer with CONFIG_EROFS_FS_BACKED_BY_FILE",
    ));
    findings.push(Finding::optional(
        "EROFS from loop devices",
        by_loop(&image),
        "nothing, where EROFS is mounted from files",
        "load the kernel module (modprobe loop) if there is no EROFS from files",
    ));
    let served = serve(&scratch.path);
    findings.push(Finding::new(
        "layers",
        served.as_ref().map(|s| s.said.clone()).map_err(copy),
        "use Linux 6.12 or newer with CONFIG_EROFS_FS_BACKED_BY_FILE, or loop devices, and a node root on a disk filesystem (not tmpfs, not overlayfs)",
    ));
    if let Ok(served) = &served {
        findings.extend(overlay_options(&served.lower, &scratch.path));
        findings.push(Finding::new(
            "restarts",
            Ok(restarts(&served.node).to_owned()),
            "",
        ));
        findings.push(Finding::new(
            "overlay",
            overlay(&served.lower, &scratch.path),
            "load the kernel module (modprobe overlay); the node root's filesystem must support extended attributes",
        ));
        findings.push(Finding::new(
            "layers under other ids",
            shifted(&served.lower),
            "use Linux 5.19 or newer; sandboxes need it, `layerpack mount` does not",
        ));
    }
    findings
}

/// An error's text again; `anyhow` errors cannot be cloned.
fn copy(error: &anyhow::Error) -> anyhow::Error {
    anyhow::anyhow!("{}", crate::failure::one_line(error))
}

pub(super) fn fuse() -> anyhow::Result<String> {
    fs_err::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/fuse")?;
    Ok("/dev/fuse can be opened".to_owned())
}

fn user_namespace() -> anyhow::Result<std::os::fd::OwnedFd> {
    let map = [IdRange {
        inside: 0,
        outside: 1 << 20,
        count: 1 << 16,
    }];
    Ok(userns_fd(&map, &map)?)
}

/// A directory that is deleted on drop.
struct Scratch {
    path: PathBuf,
}

impl Scratch {
    fn new(root: &Path) -> anyhow::Result<Self> {
        let path = root.join(format!("doctor-{}", std::process::id()));
        fs_err::create_dir(&path)?;
        Ok(Self { path })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = fs_err::remove_dir_all(&self.path) {
            tracing::warn!(%error, "the scratch directory stays");
        }
    }
}

/// A node that serves the trial layer; it stops on drop.
struct Served {
    node: Arc<Node>,
    lower: PathBuf,
    said: String,
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Err(error) = self.node.stop(true) {
            tracing::warn!(%error, "the trial left mounts");
        }
    }
}

fn serve(scratch: &Path) -> anyhow::Result<Served> {
    let source = scratch.join("source");
    fs_err::create_dir(&source)?;
    fs_err::write(source.join("file"), CONTENT)?;
    let url = format!("file://{}", scratch.join("store").display());
    let store = LayerStore::new(layerpack_store::open_url(&url)?);
    let reference = Reference::new(Kind::Base, LayerName::new("doctor")?, Version::new("1")?);
    let options = BuildOptions::new(reference, Source::Dir(source));
    let built = layerpack_packer::build(&store, &options, &Silent)?;
    let node = Node::start(NodeConfig::recommended(scratch.join("node")))?;
    let mut served = Served {
        node,
        lower: PathBuf::new(),
        said: String::new(),
    };
    let lease = LeaseSpec {
        id: LEASE.to_owned(),
        owner: "run".to_owned(),
        pid: Some(std::process::id()),
    };
    let stack = served
        .node
        .stack_up(&store, &[built.published.digest], &lease)?;
    served.lower = stack
        .lowers
        .first()
        .cloned()
        .context("the stack has no layers")?;
    let read = fs_err::read(served.lower.join("file"))?;
    if read != CONTENT {
        bail!("a file of a layer was read back with other contents");
    }
    served.said = "a layer was published, mounted and read".to_owned();
    Ok(served)
}

/// Writes an image with nothing in it.
fn erofs_image(path: &Path) -> anyhow::Result<()> {
    let tree = layerpack_erofs::Tree::new(layerpack_erofs::Metadata {
        mode: 0o755,
        ..layerpack_erofs::Metadata::default()
    });
    let mut image = Vec::new();
    layerpack_erofs::write_image(&tree, &layerpack_erofs::WriteOptions::default(), &mut image)?;
    fs_err::write(path, image)?;
    Ok(())
}

fn from_file(image: &Path) -> anyhow::Result<String> {
    mount::erofs(image, &[], &mount::ErofsOptions::default())?;
    Ok("an image was mounted from its file".to_owned())
}

fn by_loop(image: &Path) -> anyhow::Result<String> {
    let device = layerpack_sys::loopdev::LoopDevice::attach(image)?;
    mount::erofs(device.path(), &[], &mount::ErofsOptions::default())?;
    Ok("an image was mounted by a loop device".to_owned())
}

/// Options of overlayfs that make a difference, each with an overlay of its own.
fn overlay_options(lower: &Path, scratch: &Path) -> Vec<Finding> {
    let tried = |name: &str, options: &[(&str, &str)]| -> anyhow::Result<String> {
        let (upper, work) = (
            scratch.join(format!("{name}-upper")),
            scratch.join(format!("{name}-work")),
        );
        fs_err::create_dir(&upper)?;
        fs_err::create_dir(&work)?;
        // By descriptors: the mount API takes no long paths.
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open = |path: &Path| rustix::fs::open(path, flags, Mode::empty());
        let fds = (open(&upper)?, open(&work)?, open(lower)?);
        let link = |fd: &OwnedFd| format!("/proc/self/fd/{}", fd.as_raw_fd());
        let (upper, work, lower) = (link(&fds.0), link(&fds.1), link(&fds.2));
        let key = if name == "lowerdir+" {
            "lowerdir+"
        } else {
            "lowerdir"
        };
        let mut all = vec![
            (key, lower.as_str()),
            ("upperdir", upper.as_str()),
            ("workdir", work.as_str()),
        ];
        all.extend(options);
        mount::simple("overlay", &all, mount::MountFlags::empty())?;
        Ok("an overlay was mounted with it".to_owned())
    };
    vec![
        Finding::new(
            "overlay lowerdir+",
            tried("lowerdir+", &[]),
            "use Linux 6.5 or newer: stacks of many layers need it",
        ),
        Finding::new(
            "overlay redirect_dir=nofollow",
            tried("redirect", &[("redirect_dir", "nofollow")]),
            "use a kernel with CONFIG_OVERLAY_FS_REDIRECT_DIR compiled in (its default may be off)",
        ),
        Finding::new(
            "overlay volatile",
            tried("volatile", &[("volatile", "")]),
            "use Linux 5.10 or newer: writable mounts need it",
        ),
        Finding::optional(
            "overlay userxattr",
            tried("userxattr", &[("userxattr", "")]),
            "marks in trusted attributes, as everywhere here",
            "nothing: layerpack does not use it",
        ),
    ]
}

/// What becomes of reads when the daemon's process is replaced: worth knowing, and no fault.
fn restarts(node: &Node) -> &'static str {
    if node.can_resend() {
        "reads go on while the daemon is restarted or upgraded"
    } else {
        "when the daemon dies, reads of what is not cached fail, and layers are mounted anew: this kernel does not send requests again (Linux 6.9 does)"
    }
}

/// Merges the layer with an upper and writes through the result, without attaching it anywhere
/// that others see.
fn overlay(lower: &Path, scratch: &Path) -> anyhow::Result<String> {
    let point = scratch.join("merged");
    let (upper, work) = (scratch.join("upper"), scratch.join("work"));
    for directory in [&point, &upper, &work] {
        fs_err::create_dir(directory)?;
    }
    let tree = mount::overlay(&OverlaySpec {
        lowers: vec![lower.to_owned().into()],
        upper: Some((upper, work)),
        volatile: true,
        xino: true,
        source: "layerpack".to_owned(),
    })?;
    mount::attach(tree.as_fd(), &point)?;
    drop(tree);
    let written = fs_err::write(point.join("file"), b"changed");
    let unmounted = mount::unmount(&point, true);
    written?;
    unmounted?;
    Ok("a file of a layer was changed in an upper".to_owned())
}

/// Clones the layer's mount and shifts its ids, as sandboxes do.
fn shifted(lower: &Path) -> anyhow::Result<String> {
    let clone = mount::bind(lower)?;
    mount::set_idmap(clone.as_fd(), user_namespace()?.as_fd())?;
    Ok("a layer was shown with the ids of a sandbox".to_owned())
}
