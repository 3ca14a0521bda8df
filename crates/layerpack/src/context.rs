//! What every command starts from: format, node root, store.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use layerpack_store::LayerStore;

use crate::args::Global;
use crate::client::{self, Client};
use crate::output::Format;

/// The command's surroundings, resolved from options and environment.
#[derive(Debug)]
pub(crate) struct Context {
    /// How results are printed.
    pub(crate) format: Format,
    /// No progress and no warnings on stderr.
    pub(crate) quiet: bool,
    root: PathBuf,
    store_url: String,
}

impl Context {
    /// Resolves the global options; paths become absolute, since the daemon has another working
    /// directory.
    pub(crate) fn new(global: &Global) -> anyhow::Result<Self> {
        if global.root.as_os_str().is_empty() {
            bail!(
                "the node root is empty: set --root or LAYERPACK_ROOT to a directory, or leave both unset"
            );
        }
        let root = std::path::absolute(&global.root)
            .with_context(|| format!("cannot resolve --root {}", global.root.display()))?;
        let store_url = match global.store.as_deref() {
            None | Some("") => default_store(&root)?,
            Some(url) if url.contains("://") => url.to_owned(),
            Some(path) => file_url(
                &std::path::absolute(path)
                    .with_context(|| format!("cannot resolve --store {path}"))?,
            )?,
        };
        Ok(Self {
            format: global.output,
            quiet: global.quiet,
            root,
            store_url,
        })
    }

    /// The node's root directory, absolute.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// The store's URL, absolute.
    pub(crate) fn store_url(&self) -> &str {
        &self.store_url
    }

    /// Whether warnings go to stderr: with `-o json` they are part of the document.
    pub(crate) fn says_warnings(&self) -> bool {
        !self.quiet && self.format == Format::Text
    }

    /// Opens the store.
    pub(crate) fn store(&self) -> anyhow::Result<LayerStore> {
        Ok(LayerStore::new(layerpack_store::open_url(&self.store_url)?))
    }

    /// A client of this node's daemon, which is started if it does not run.
    ///
    /// `task` names what needs it, for the error of a caller who is not root.
    pub(crate) fn daemon(&self, task: &str) -> anyhow::Result<Client> {
        require_root(task)?;
        prepare_root(&self.root)?;
        client::ensure(&self.root)
    }
}

/// Fails early, with the remedy, when the caller cannot mount.
pub(crate) fn require_root(task: &str) -> anyhow::Result<()> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    bail!("{task} needs root, since the kernel lets nobody else mount layers: run it with sudo");
}

/// Creates the node's root, readable by its owner only: it holds what sandboxes wrote.
pub(crate) fn prepare_root(root: &Path) -> anyhow::Result<()> {
    use std::os::unix::fs::DirBuilderExt as _;
    if root.is_dir() {
        return Ok(());
    }
    if let Some(parent) = root.parent() {
        fs_err::create_dir_all(parent)?;
    }
    match std::fs::DirBuilder::new().mode(0o700).create(root) {
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => Err(e).with_context(|| {
            format!(
                "cannot create the node root {} (choose another with --root)",
                root.display()
            )
        }),
        _ => Ok(()),
    }
}

fn default_store(root: &Path) -> anyhow::Result<String> {
    file_url(&root.join("store"))
}

fn file_url(path: &Path) -> anyhow::Result<String> {
    match path.to_str() {
        Some(path) => Ok(format!("file://{path}")),
        None => bail!(
            "the store's path {} is not UTF-8: choose another with --store",
            path.display()
        ),
    }
}
