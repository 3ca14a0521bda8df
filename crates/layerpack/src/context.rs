//! What every command starts from: format, node root, store.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context as _, bail};
use layerpack_store::blob::{addresses, has_scheme};
use layerpack_store::{LayerStore, ReadCacheOptions, StoreError};

use crate::args::Global;
use crate::client::{self, Client};
use crate::failure::usage;
use crate::output::{Format, warning};
use crate::stores;

/// The variable that names the store.
const STORE: &str = "LAYERPACK_STORE";
/// Most bytes of remote stores' objects in the cache directory.
const MAX_OBJECTS: u64 = 1 << 30;

/// The command's surroundings, resolved from options and environment.
#[derive(Debug)]
pub(crate) struct Context {
    /// How results are printed.
    pub(crate) format: Format,
    /// No progress and no warnings on stderr.
    pub(crate) quiet: bool,
    root: PathBuf,
    store_url: String,
    /// The store was named, by an option or the environment.
    is_named: bool,
    cache_dir: Option<PathBuf>,
    /// Warnings about stores that were printed.
    told: Mutex<BTreeSet<String>>,
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
            // An empty variable is as good as none; an empty option is a slip.
            Some("") if std::env::var_os(STORE).is_none_or(|value| !value.is_empty()) => {
                return Err(usage("--store is empty: name a store, or leave it out"));
            }
            None | Some("") => default_store(&root)?,
            Some(url) => absolute_url(url)?,
        };
        let is_named = global.store.as_deref().is_some_and(|url| !url.is_empty());
        let cache_dir = match &global.cache_dir {
            Some(path) if path.is_empty() => None,
            Some(path) => Some(
                std::path::absolute(Path::new(path))
                    .with_context(|| format!("cannot resolve --cache-dir {}", path.display()))?,
            ),
            None => default_cache(
                rustix::process::geteuid().is_root(),
                std::env::var_os("XDG_CACHE_HOME"),
                std::env::var_os("HOME"),
            ),
        };
        Ok(Self {
            format: global.output,
            quiet: global.quiet,
            root,
            store_url,
            is_named,
            cache_dir,
            told: Mutex::default(),
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

    /// The directory of what can be made again, absolute; it need not exist. `None`: keep nothing,
    /// and do without.
    pub(crate) fn cache_dir(&self) -> Option<&Path> {
        self.cache_dir.as_deref()
    }

    /// The directory of a build's unnamed temporary files, of which nothing is left: in the cache
    /// directory, or where programs have theirs if there is to be no cache.
    pub(crate) fn scratch_dir(&self) -> PathBuf {
        match self.cache_dir() {
            Some(cache) => cache.join("build"),
            None => std::env::temp_dir(),
        }
    }

    /// Whether warnings go to stderr: with `-o json` they are part of the document.
    pub(crate) fn says_warnings(&self) -> bool {
        !self.quiet && self.format == Format::Text
    }

    /// Opens the store. Its index is copied to the cache directory when something is written.
    pub(crate) fn store(&self) -> anyhow::Result<LayerStore> {
        self.open(&self.store_url)
    }

    /// Opens the store for a command that works on what is there. One that was named must be there:
    /// a typing error must not look like an empty store. The node's own may come with the first
    /// layer.
    pub(crate) fn store_that_is(&self) -> anyhow::Result<LayerStore> {
        let store = self.store()?;
        self.must_be(&store)?;
        Ok(store)
    }

    /// The same for a command that mends a store, also the marker by which it is known for one.
    pub(crate) fn store_to_mend(&self) -> anyhow::Result<LayerStore> {
        let store = self.store()?;
        match self.must_be(&store) {
            Err(error) if matches!(error.downcast_ref(), Some(StoreError::NoStore { .. })) => {
                Err(error)
            }
            _ => Ok(store),
        }
    }

    fn must_be(&self, store: &LayerStore) -> anyhow::Result<()> {
        if self.is_named {
            store.must_exist()?;
        }
        Ok(())
    }

    /// Opens the store for a command that only looks: manifests, metadata and maps of a remote one
    /// come from the cache directory when they were read before. What exists, and where, is always
    /// asked of the store.
    pub(crate) fn store_to_read(&self) -> anyhow::Result<LayerStore> {
        let cache = self.cache_dir().map(|dir| ReadCacheOptions {
            dir: dir.join("objects"),
            max_bytes: MAX_OBJECTS,
        });
        let store = LayerStore::new(stores::open_store(&self.store_url, cache)?);
        self.tell_passed_over(&store);
        Ok(store)
    }

    /// The same for a command that shows all there is, for which a store must be there.
    pub(crate) fn store_to_list(&self) -> anyhow::Result<LayerStore> {
        let store = self.store_to_read()?;
        self.must_be(&store)?;
        Ok(store)
    }

    /// Opens another store than the one of `--store`.
    pub(crate) fn store_at(&self, url: &str) -> anyhow::Result<LayerStore> {
        self.open(&absolute_url(url)?)
    }

    fn open(&self, url: &str) -> anyhow::Result<LayerStore> {
        let store = LayerStore::new(stores::open_store(url, None)?);
        self.tell_passed_over(&store);
        Ok(match self.cache_dir() {
            Some(dir) => store.with_index_cache(dir.join("index")),
            None => store,
        })
    }

    /// Warns once of each address that is no store and comes before one that is.
    fn tell_passed_over(&self, store: &LayerStore) {
        if !self.says_warnings() {
            return;
        }
        for line in store.blobs().passed_over() {
            let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
            if told.insert(line.clone()) {
                warning(&line);
            }
        }
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

/// Where caches lie by default: root's with the system, anybody else's with the user, as the XDG
/// base directory specification says: a relative `XDG_CACHE_HOME` counts as unset.
fn default_cache(
    is_root: bool,
    xdg_cache_home: Option<OsString>,
    home: Option<OsString>,
) -> Option<PathBuf> {
    if is_root {
        return Some(PathBuf::from("/var/cache/layerpack"));
    }
    let usable = |path: Option<OsString>| path.map(PathBuf::from).filter(|path| path.is_absolute());
    usable(xdg_cache_home)
        .or_else(|| usable(home).map(|home| home.join(".cache")))
        .map(|base| base.join("layerpack"))
}

/// A store's addresses as given on the command line: paths become absolute URLs. A relative path with
/// a comma is a directory of that name where there is one, else several directories: who writes `a,b`
/// for two copies of a store must not get a third by that name.
fn absolute_url(text: &str) -> anyhow::Result<String> {
    let mut urls = Vec::new();
    for address in addresses(text)? {
        if has_scheme(address) {
            urls.push(address.to_owned());
            continue;
        }
        let paths = if address.starts_with('/') || Path::new(address).is_dir() {
            vec![address]
        } else {
            address.split(',').collect()
        };
        for path in paths {
            if path.is_empty() {
                return Err(usage(format!(
                    "one of the addresses in {text:?} is empty; a directory whose name has a comma is written as file:///DIR"
                )));
            }
            let path = std::path::absolute(path)
                .with_context(|| format!("cannot resolve store {path:?}"))?;
            urls.push(file_url(&path)?);
        }
    }
    Ok(urls.join(","))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_are_told_apart_like_addresses() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().to_str().unwrap();
        let url = |text: &str| absolute_url(&text.replace('~', base)).unwrap();
        let wanted = |text: &str| text.replace('~', base);
        for (text, expected) in [
            ("~/a", "file://~/a"),
            ("~/a,~/b", "file://~/a,file://~/b"),
            ("s3://b/x?region=r", "s3://b/x?region=r"),
            ("~/a,s3://b/x", "file://~/a,s3://b/x"),
            ("s3://b/x,~/a", "s3://b/x,file://~/a"),
            ("file://~/a,b", "file://~/a,b"),
        ] {
            assert_eq!(url(text), wanted(expected), "{text}");
        }
        // Relative ones are several too, unless there is a directory of the whole name.
        let here = std::env::current_dir().unwrap();
        let here = here.to_str().unwrap();
        assert_eq!(url("mA,mB"), format!("file://{here}/mA,file://{here}/mB"));
        assert_eq!(
            url("mA,s3://b/x,~/c"),
            wanted(&format!("file://{here}/mA,s3://b/x,file://~/c"))
        );
        assert_eq!(url("~/c,d"), wanted("file://~/c,d"));
        for text in ["", ",", ",/a", "/a,", "mA,", ",mA", "mA,,mB"] {
            absolute_url(text).unwrap_err();
        }
    }

    #[test]
    fn caches_lie_with_the_system_or_with_the_user() {
        let cache = |root, xdg: Option<&str>, home: Option<&str>| {
            default_cache(root, xdg.map(OsString::from), home.map(OsString::from))
        };
        let path = |text: &str| Some(PathBuf::from(text));
        assert_eq!(
            cache(true, Some("/x"), Some("/h")),
            path("/var/cache/layerpack")
        );
        assert_eq!(cache(false, Some("/x"), Some("/h")), path("/x/layerpack"));
        for xdg in [None, Some(""), Some("relative")] {
            assert_eq!(cache(false, xdg, Some("/h")), path("/h/.cache/layerpack"));
        }
        assert_eq!(cache(false, None, Some("")), None);
        assert_eq!(cache(false, None, None), None);
    }
}
