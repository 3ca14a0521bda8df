//! Installs what the gates and the quickstart need beyond Rust.

use anyhow::{Context as _, Result, bail};

use crate::{apt, process, workspace};

/// The test runner's version: pinned, since newer ones may ask for a newer Rust than ours.
const NEXTEST: &str = "0.9.143";

/// A Debian package and the program by which it is known to be there, whoever installed it.
struct Tool {
    package: &'static str,
    program: Option<&'static str>,
    /// What uses it.
    purpose: &'static str,
}

const fn tool(package: &'static str, program: &'static str, purpose: &'static str) -> Tool {
    Tool {
        package,
        program: Some(program),
        purpose,
    }
}

const TOOLS: &[Tool] = &[
    tool(
        "git",
        "git",
        "the quickstart's workspace; listing files for tidy",
    ),
    tool("mmdebstrap", "mmdebstrap", "the quickstart's base layer"),
    tool("python3-pip", "pip3", "the quickstart's workspace"),
    tool("erofs-utils", "fsck.erofs", "referee of images"),
    tool("attr", "setfattr", "tests of xattrs"),
    tool("acl", "getfacl", "tests of access control lists"),
    tool("libcap2-bin", "getcap", "tests of file capabilities"),
    tool("squashfs-tools", "mksquashfs", "a peer in benches"),
    tool("squashfuse", "squashfuse_ll", "a peer in benches"),
    tool("fuse-overlayfs", "fuse-overlayfs", "a peer in benches"),
    tool("httpdirfs", "httpdirfs", "a peer in benches"),
    tool("nbdkit", "nbdkit", "a peer in benches"),
    tool("libnbd-bin", "nbdfuse", "a peer in benches"),
    tool(
        "nginx-light",
        "nginx",
        "a web server for stores to be read from",
    ),
    tool("umoci", "umoci", "a second reader of OCI layers"),
    tool(
        "buildah",
        "buildah",
        "commits of changes, to be measured beside",
    ),
    Tool {
        package: "busybox-static",
        program: None,
        purpose: "a root filesystem of one file",
    },
    tool("docker-registry", "docker-registry", "a registry in tests"),
    tool("skopeo", "skopeo", "a second client of registries"),
    tool("fuse3", "fusermount3", "mounts by users without privileges"),
    tool("tar", "tar", "referee of archives"),
    tool("zstd", "zstd", "compressed archives in tests"),
    tool("procps", "ps", "looking for processes left behind"),
];

/// Installs what is missing.
///
/// # Errors
/// When something is missing and cannot be installed.
pub(crate) fn run() -> Result<()> {
    packages(|_| true)?;
    nextest()
}

/// The same for the quickstart alone, which needs less.
///
/// # Errors
/// As [`run`].
pub(crate) fn for_quickstart() -> Result<()> {
    packages(|tool| tool.purpose.contains("quickstart") || tool.package == "erofs-utils")
}

fn packages(wanted: impl Fn(&Tool) -> bool) -> Result<()> {
    let missing = missing(wanted);
    if !missing.is_empty() {
        if layerpack_fixtures::find_tool("apt-get").is_none() {
            let list: Vec<String> = missing
                .iter()
                .map(|tool| format!("{} ({})", tool.package, tool.purpose))
                .collect();
            bail!(
                "missing, and there is no apt-get to install them: {}",
                list.join(", ")
            );
        }
        let packages: Vec<&str> = missing.iter().map(|tool| tool.package).collect();
        apt::install(&packages)?;
    }
    Ok(())
}

fn missing(wanted: impl Fn(&Tool) -> bool) -> Vec<&'static Tool> {
    TOOLS
        .iter()
        .filter(|tool| wanted(tool))
        .filter(|tool| {
            let there = tool
                .program
                .is_some_and(|program| layerpack_fixtures::find_tool(program).is_some());
            !there && !apt::installed(tool.package)
        })
        .collect()
}

fn nextest() -> Result<()> {
    if process::succeeds(workspace::cargo().args(["nextest", "--version"])) {
        return Ok(());
    }
    println!("     installing cargo-nextest {NEXTEST} (a few minutes)");
    process::run(
        workspace::cargo()
            .args([
                "install",
                "--locked",
                "--quiet",
                "cargo-nextest",
                "--version",
                NEXTEST,
            ])
            // This workspace's settings are not nextest's. A test runner has little to do itself:
            // without its release profile's full optimisation it is there in a third of the time.
            .env_remove("RUSTFLAGS")
            .env("CARGO_PROFILE_RELEASE_LTO", "off")
            .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16")
            .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1")
            .current_dir("/"),
    )
    .with_context(|| format!("cargo-nextest {NEXTEST} is missing and cannot be installed"))
}
