//! Settings of the daemon: options first, then variables, then a file.
//!
//! The file is what `--config` or `LAYERPACK_CONFIG` names, else `/etc/layerpack/config.toml` if it
//! is there. A file that is there and cannot be understood is an error: a limit must not vanish by a
//! typing error.

pub(crate) mod node;

use std::io::Read as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context as _, bail};
use layerpack_layerfs::ErofsBacking;
use serde::{Deserialize, Serialize};

use crate::args::NodeArgs;
use crate::failure::of_toml;
use crate::units::Bytes;
use node::{NodeSettings, NodeTable};

/// The file that is read when none is named.
const DEFAULT_FILE: &str = "/etc/layerpack/config.toml";
/// Largest file in bytes.
const MAX_FILE: u64 = 1 << 20;

/// A number of bytes, or `none`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limit(pub(crate) Option<u64>);

impl FromStr for Limit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(Self(None));
        }
        let bytes: Bytes = text
            .parse()
            .map_err(|e| format!("{e}, or none for no limit"))?;
        Ok(Self(Some(bytes.0)))
    }
}

/// What a fill fetches a second unless something else is said.
const FILL_RATE: Limit = Limit(Some(64 << 20));

/// An address to listen on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Address(SocketAddr);

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.parse().map(Self).map_err(|_| {
            format!(
                "{text:?} is not an address to listen on: write IP:PORT, such as 127.0.0.1:9464"
            )
        })
    }
}

/// What the options say.
#[derive(Debug, Default, Clone)]
pub(crate) struct Given {
    /// The file.
    pub(crate) config: Option<PathBuf>,
    /// Limit of the cache.
    pub(crate) cache_max: Option<Limit>,
    /// Limit of what a fill fetches a second.
    pub(crate) fill_rate: Option<Limit>,
    /// Where metrics are served besides the socket.
    pub(crate) metrics_listen: Option<SocketAddr>,
    /// Of the node itself.
    pub(crate) node: NodeArgs,
}

/// What is in force. Kept over restarts of the daemon's process: a file that was edited meanwhile must
/// not keep it from starting.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Settings {
    /// Limit of the node's cache in bytes of disk.
    pub(crate) cache_max: Option<u64>,
    /// Bytes a second that a fill fetches at most.
    pub(crate) fill_rate: Option<u64>,
    /// Where metrics are served besides the socket.
    pub(crate) metrics_listen: Option<SocketAddr>,
    /// How layers are mounted.
    pub(crate) erofs: ErofsBacking,
    /// Of the node itself.
    pub(crate) node: NodeSettings,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    daemon: DaemonTable,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct DaemonTable {
    cache_max: Option<String>,
    fill_rate: Option<String>,
    metrics_listen: Option<String>,
    erofs: Option<String>,
    #[serde(flatten)]
    node: NodeTable,
}

/// One setting: the option, else the variable, else the file's word.
fn pick<T: FromStr<Err = String>>(
    option: Option<T>,
    variable: &str,
    value: Option<String>,
    key: &str,
    word: Option<String>,
) -> anyhow::Result<Option<T>> {
    if option.is_some() {
        return Ok(option);
    }
    let (origin, text) = match (value.filter(|v| !v.is_empty()), word) {
        (Some(value), _) => (variable, value),
        (None, Some(word)) => (key, word),
        (None, None) => return Ok(None),
    };
    match text.parse() {
        Ok(value) => Ok(Some(value)),
        Err(why) => bail!("{origin}: {why}"),
    }
}

impl Settings {
    /// Puts options, environment and file together.
    ///
    /// # Errors
    /// When the file that is named, or found, cannot be read or understood, or a value is wrong.
    pub(crate) fn load(given: Given) -> anyhow::Result<Self> {
        Self::from_parts(
            given,
            |name| std::env::var(name).ok(),
            Path::new(DEFAULT_FILE),
        )
    }

    fn from_parts(
        given: Given,
        variable: impl Fn(&str) -> Option<String>,
        default_file: &Path,
    ) -> anyhow::Result<Self> {
        let named = given.config.or_else(|| {
            variable("LAYERPACK_CONFIG")
                .filter(|v| !v.is_empty())
                .map(PathBuf::from)
        });
        let daemon = match named {
            Some(path) => read(&path)?,
            None if default_file.exists() => read(default_file)?,
            None => File::default(),
        }
        .daemon;
        let cache_max = pick(
            given.cache_max,
            "LAYERPACK_CACHE_MAX",
            variable("LAYERPACK_CACHE_MAX"),
            "cache_max in the configuration file",
            daemon.cache_max,
        )?;
        let fill_rate = pick(
            given.fill_rate,
            "LAYERPACK_FILL_RATE",
            variable("LAYERPACK_FILL_RATE"),
            "fill_rate in the configuration file",
            daemon.fill_rate,
        )?;
        let metrics_listen = pick(
            given.metrics_listen.map(Address),
            "LAYERPACK_METRICS_LISTEN",
            variable("LAYERPACK_METRICS_LISTEN"),
            "metrics_listen in the configuration file",
            daemon.metrics_listen,
        )?;
        let erofs = pick(
            None,
            "LAYERPACK_EROFS",
            variable("LAYERPACK_EROFS"),
            "erofs in the configuration file",
            daemon.erofs,
        )?;
        Ok(Self {
            erofs: erofs.unwrap_or_default(),
            node: NodeSettings::from_parts(&given.node, &variable, daemon.node)?,
            fill_rate: fill_rate.unwrap_or(FILL_RATE).0,
            metrics_listen: metrics_listen.map(|address| address.0),
            cache_max: cache_max.and_then(|limit| limit.0),
        })
    }
}

fn read(path: &Path) -> anyhow::Result<File> {
    let what = "cannot read the configuration";
    // Also a pipe or /dev/null, as long as it ends.
    let mut bytes = Vec::new();
    fs_err::File::open(path)
        .and_then(|file| file.take(MAX_FILE + 1).read_to_end(&mut bytes))
        .context(what)?;
    if bytes.len() as u64 > MAX_FILE {
        bail!(
            "the configuration {} is longer than {MAX_FILE} bytes",
            path.display()
        );
    }
    let text = String::from_utf8(bytes)
        .with_context(|| format!("the configuration {} is not UTF-8", path.display()))?;
    toml::from_str(&text)
        .map_err(|e| of_toml(&e, &text))
        .with_context(|| format!("the configuration {} is wrong", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_come_before_variables_before_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.toml");
        fs_err::write(&file, "[daemon]\ncache_max = \"1g\"\n").unwrap();
        let absent = dir.path().join("absent");
        let load = |option: Option<&str>, value: Option<&str>, file: &Path| {
            let given = Given {
                config: None,
                cache_max: option.map(|text| text.parse().unwrap()),
                ..Given::default()
            };
            let variable = |name: &str| match name {
                "LAYERPACK_CACHE_MAX" => value.map(str::to_owned),
                _ => None,
            };
            Settings::from_parts(given, variable, file)
        };
        let max = |option, value, file| load(option, value, file).unwrap().cache_max;
        assert_eq!(max(None, None, &absent), None);
        assert_eq!(max(None, None, &file), Some(1 << 30));
        assert_eq!(max(None, Some(""), &file), Some(1 << 30));
        assert_eq!(max(None, Some("2m"), &file), Some(2 << 20));
        assert_eq!(max(Some("3m"), Some("2m"), &file), Some(3 << 20));
        assert_eq!(max(Some("none"), Some("2m"), &file), None);
        assert!(load(None, Some("many"), &file).is_err());
        for wrong in [
            "[daemon]\ncache_mx = \"1g\"",
            "cache_max = 1",
            "[daemon]\ncache_max = \"x\"",
            "[daemon]\nerofs = \"floppy\"",
        ] {
            fs_err::write(&file, wrong).unwrap();
            let said = format!("{:#}", load(None, None, &file).unwrap_err());
            assert!(!said.contains('\n'), "{said}");
        }
        // Nor is anything else than a file of a bearable length read.
        fs_err::write(&file, "# ".repeat(600_000)).unwrap();
        for (wrong, why) in [
            (file.as_path(), "is longer than"),
            (Path::new("/dev/zero"), "is longer than"),
            (dir.path(), "directory"),
        ] {
            let said = format!("{:#}", load(None, None, wrong).unwrap_err());
            assert!(said.contains(why), "{said}");
        }
        load(None, None, Path::new("/dev/null")).unwrap();
        // A file that is named must be there.
        let given = Given {
            config: Some(absent),
            ..Given::default()
        };
        assert!(Settings::from_parts(given, |_| None, &file).is_err());
    }
}
