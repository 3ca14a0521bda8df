//! What the kernel offers that is used where it is there, and done without where it is not; and
//! what a user without privileges needs for `mount --fuse`.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::{anyhow, bail};
use layerpack_sys::mountinfo;
use layerpack_sys::probe::{self, FuseOffer};

use super::Finding;
use crate::context::Context;

/// The set-uid program that mounts FUSE for everybody.
const HELPER: &str = "fusermount3";

/// What it opens.
const DEVICE: &str = "/dev/fuse";
/// How others than root are let in.
const OPEN_DEVICE: &str = "load the kernel's fuse module, and let everybody open /dev/fuse: `chmod 666 /dev/fuse`, and for good the udev rule KERNEL==\"fuse\", MODE=\"0666\"";

/// Findings of a node, for root.
pub(super) fn of_node() -> Vec<Finding> {
    let mut findings = fuse();
    findings.push(cgroups());
    findings.extend(security());
    findings.push(Finding::optional(
        "KVM",
        kvm(),
        "containers alone: no sandbox runs in a virtual machine",
        "turn virtualisation on in the firmware, or nested virtualisation in the host, and load the kernel's kvm module",
    ));
    findings.push(helper(true));
    findings
}

/// Findings of a user who may only mount by FUSE.
pub(super) fn of_user(context: &Context) -> Vec<Finding> {
    vec![
        Finding::optional(
            "privileges",
            Err(anyhow!("this is not root")),
            "layers are mounted with `layerpack mount --fuse`, and stores read and written; no node daemon, no sandboxes",
            "run it with sudo to check what a node can do",
        ),
        Finding::new(
            "store",
            super::store(context),
            "choose another store with --store or LAYERPACK_STORE",
        ),
        Finding::new(
            "cache",
            cache(context),
            "name a directory of your own with --cache-dir or LAYERPACK_CACHE",
        ),
        Finding::new(
            "FUSE",
            super::trial::fuse(),
            "have root load the kernel's module (modprobe fuse) and let everybody open /dev/fuse (mode 666, as udev sets it)",
        ),
        helper(false),
    ]
}

fn fuse() -> Vec<Finding> {
    let offer = probe::fuse_offer();
    let version = offer
        .as_ref()
        .map(|o| format!("FUSE 7.{}", o.minor))
        .unwrap_or_default();
    let has = |bit: u64, missing: &str| -> anyhow::Result<String> {
        match &offer {
            Ok(offer) if offer.has(bit) => Ok(format!("offered by {version}")),
            Ok(_) => bail!("{version} does not offer it{missing}"),
            Err(e) => bail!("the kernel cannot be asked: {e}"),
        }
    };
    let ring = "/sys/module/fuse/parameters/enable_uring";
    let off = fs_err::read_to_string(ring).is_ok_and(|text| text.trim() == "N");
    vec![
        Finding::optional(
            "FUSE resend",
            has(FuseOffer::RESEND, ""),
            "reads that are under way when the daemon dies fail with an I/O error",
            "use Linux 6.9 or newer",
        ),
        Finding::optional(
            "FUSE passthrough",
            has(FuseOffer::PASSTHROUGH, ""),
            "the daemon also serves layers that are here as a whole",
            "use Linux 6.9 or newer with CONFIG_FUSE_PASSTHROUGH",
        ),
        Finding::optional(
            "FUSE over io_uring",
            has(
                FuseOffer::IO_URING,
                if off { ": it is switched off" } else { "" },
            ),
            "requests are read from /dev/fuse, which is all that layerpack does so far",
            "nothing",
        ),
    ]
}

/// Where control groups are, old and new.
fn cgroups() -> Finding {
    let found = || -> anyhow::Result<String> {
        let mounts = mountinfo::read()?;
        let of = |kind: &str| -> Vec<String> {
            mounts
                .iter()
                .filter(|m| m.fstype == kind)
                .map(|m| m.target.display().to_string())
                .collect()
        };
        let (new, old) = (of("cgroup2"), of("cgroup"));
        let Some(first) = new.first() else {
            bail!(
                "cgroup2 is not mounted; version 1 is at {} places",
                old.len()
            );
        };
        let controllers =
            fs_err::read_to_string(Path::new(first).join("cgroup.controllers")).unwrap_or_default();
        let controllers = match controllers.trim() {
            "" => "no controllers".to_owned(),
            text => text.replace(' ', ", "),
        };
        Ok(format!(
            "version 2 on {first} with {controllers}; version 1 at {} places",
            old.len()
        ))
    };
    Finding::optional(
        "control groups version 2",
        found(),
        "version 1, where its controllers are mounted; no freezing and killing of whole groups",
        "boot with systemd.unified_cgroup_hierarchy=1, or mount cgroup2",
    )
}

/// Security modules that a policy could use.
fn security() -> Vec<Finding> {
    let active = fs_err::read_to_string("/sys/kernel/security/lsm").unwrap_or_default();
    let listed = |name: &str| active.trim().split(',').any(|module| module == name);
    let seen = |name: &str, boot: &'static str| -> (anyhow::Result<String>, &'static str) {
        if active.is_empty() {
            return (
                Err(anyhow!(
                    "securityfs is not mounted on /sys/kernel/security, so the kernel does not tell"
                )),
                "mount it (`mount -t securityfs securityfs /sys/kernel/security`) and run this again",
            );
        }
        if !listed(name) {
            return (
                Err(anyhow!("not among the active modules: {}", active.trim())),
                boot,
            );
        }
        (Ok("active".to_owned()), boot)
    };
    let bpf = seen(
        "bpf",
        "boot with lsm=...,bpf on a kernel with CONFIG_BPF_LSM",
    );
    let enabled = fs_err::read_to_string("/sys/module/apparmor/parameters/enabled")
        .is_ok_and(|text| text.trim() == "Y");
    let boot = "boot with lsm=...,apparmor";
    let apparmor = match enabled {
        true => (Ok("active".to_owned()), boot),
        false => seen("apparmor", boot),
    };
    vec![
        Finding::optional(
            "Landlock",
            probe::landlock_abi()
                .map(|abi| format!("version {abi} is enforced"))
                .ok_or_else(|| anyhow!("the kernel does not enforce it")),
            "sandboxes are confined by namespaces, capabilities and seccomp, as ever",
            "boot with lsm=landlock,... on Linux 5.13 or newer",
        ),
        Finding::optional(
            "BPF LSM",
            bpf.0,
            "sandboxes are confined by namespaces, capabilities and seccomp, as ever",
            bpf.1,
        ),
        Finding::optional(
            "AppArmor",
            apparmor.0,
            "sandboxes are confined by namespaces, capabilities and seccomp, as ever",
            apparmor.1,
        ),
    ]
}

fn kvm() -> anyhow::Result<String> {
    let version = probe::kvm_api()?;
    Ok(format!(
        "/dev/kvm answers with version {version}; whether a guest boots was not tried"
    ))
}

/// Whether users without privileges can mount. Root does without; a user cannot.
fn helper(root: bool) -> Finding {
    let (tried, remedy) = match find_helper() {
        Err(error) => (
            Err(error),
            "have fuse3 installed: fusermount3 must belong to root and be set-uid",
        ),
        Ok(found) => (
            device(root).map(|()| format!("{} mounts for everybody", found.display())),
            OPEN_DEVICE,
        ),
    };
    if root {
        let fallback = "only root mounts with `layerpack mount --fuse`";
        return Finding::optional(HELPER, tried, fallback, remedy);
    }
    Finding::new(HELPER, tried, remedy)
}

/// Where the helper is, if it is what it must be.
fn find_helper() -> anyhow::Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found: Option<PathBuf> = std::env::split_paths(&path)
        .map(|dir| dir.join(HELPER))
        .find(|file| file.is_file());
    let Some(found) = found else {
        bail!("{HELPER} is not in the search path");
    };
    let metadata = fs_err::metadata(&found)?;
    if metadata.uid() != 0 || metadata.mode() & 0o4000 == 0 {
        bail!(
            "{} is not a set-uid program of root, so it can mount nothing for others",
            found.display()
        );
    }
    Ok(found)
}

/// Whether the helper, which opens the device as whoever calls it, may do so: for this user, or, as
/// root looks at it, for everybody.
fn device(root: bool) -> anyhow::Result<()> {
    let metadata = fs_err::metadata(DEVICE)?;
    if root {
        return for_everybody(metadata.mode());
    }
    let both = rustix::fs::Access::READ_OK | rustix::fs::Access::WRITE_OK;
    rustix::fs::access(DEVICE, both).map_err(|_| {
        anyhow!(
            "this user may not open {DEVICE} (mode {:04o}), and {HELPER} opens it as this user",
            metadata.mode() & 0o7777
        )
    })
}

/// What a device's mode says of users that are neither its owner nor in its group.
fn for_everybody(mode: u32) -> anyhow::Result<()> {
    if mode & 0o006 == 0o006 {
        return Ok(());
    }
    let who = match mode & 0o060 {
        0o060 => "only root and its group",
        _ => "only root",
    };
    bail!(
        "{who} can open {DEVICE} (mode {:04o}), and {HELPER} opens it as whoever calls it",
        mode & 0o7777
    )
}

/// Whether the directory for caches can be made and written.
fn cache(context: &Context) -> anyhow::Result<String> {
    let Some(dir) = context.cache_dir() else {
        bail!("there is none: neither HOME nor XDG_CACHE_HOME says where it could be");
    };
    fs_err::create_dir_all(dir)?;
    let trial = dir.join(format!(".doctor-{}", std::process::id()));
    fs_err::write(&trial, b"layerpack")?;
    fs_err::remove_file(&trial)?;
    Ok(dir.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_not_for_everybody_is_named_with_its_mode() {
        for mode in [0o20666, 0o666, 0o606] {
            for_everybody(mode).unwrap();
        }
        let said = |mode| format!("{:#}", for_everybody(mode).unwrap_err());
        assert!(said(0o20600).starts_with("only root can open /dev/fuse (mode 0600)"));
        assert!(said(0o20660).starts_with("only root and its group can open"));
        // To read is not enough.
        assert!(said(0o20664).contains("mode 0664"));
    }
}
