//! Settings of the node itself: what it learns, and the nodes that it shares data with.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context as _, bail};
use layerpack_layerfs::fetch::FetchConfig;
use layerpack_layerfs::peers::PeersConfig;
use layerpack_store::peer::{PeerSource, PeerToken};
use serde::{Deserialize, Serialize};

use super::{Address, pick};
use crate::args::NodeArgs;
use crate::units::Age;

/// How long a node learns from a mount unless something else is said.
const LEARN: Window = Window(Some(Duration::from_secs(60)));

/// A length of time, or `none`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Window(pub(crate) Option<Duration>);

impl FromStr for Window {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(Self(None));
        }
        let age: Age = text.parse().map_err(|e| format!("{e}, or none"))?;
        Ok(Self(Some(age.0).filter(|time| !time.is_zero())))
    }
}

/// `true` or `false`.
struct Switch(bool);

impl FromStr for Switch {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "true" | "1" | "yes" => Ok(Self(true)),
            "false" | "0" | "no" => Ok(Self(false)),
            _ => Err(format!("{text:?} is neither true nor false")),
        }
    }
}

/// Peers, separated by commas.
struct List(Vec<PeerSource>);

impl FromStr for List {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let words = text.split(',').map(str::trim).filter(|w| !w.is_empty());
        words.map(str::parse).collect::<Result<_, _>>().map(Self)
    }
}

/// A path.
struct File(PathBuf);

impl FromStr for File {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(Self(PathBuf::from(text)))
    }
}

/// Largest file with a token in bytes.
const MAX_TOKEN_FILE: u64 = 4096;

/// The token in a file that only its owner can read.
fn read_token(path: &Path) -> anyhow::Result<PeerToken> {
    use std::os::unix::fs::PermissionsExt as _;
    let found = fs_err::metadata(path).context("cannot read the token of peers")?;
    if found.len() > MAX_TOKEN_FILE {
        bail!("{} is too large for a token of peers", path.display());
    }
    if found.permissions().mode() & 0o077 != 0 {
        bail!(
            "{} holds the token of peers and can be read by others: chmod 600 it",
            path.display()
        );
    }
    let text = fs_err::read_to_string(path).context("cannot read the token of peers")?;
    match PeerToken::new(&text) {
        Ok(token) => Ok(token),
        Err(why) => bail!("{}: {why}", path.display()),
    }
}

/// What is in force.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct NodeSettings {
    /// How long after a mount the node learns.
    pub(crate) learn: Option<Duration>,
    /// Whether stores are given what is learnt.
    pub(crate) publish_profiles: bool,
    /// Where other nodes are answered.
    pub(crate) peer_listen: Option<SocketAddr>,
    /// Other nodes.
    pub(crate) peers: Vec<PeerSource>,
    /// What they show to each other.
    pub(crate) peer_token: Option<PeerToken>,
    /// How reads wait for a store.
    pub(crate) reads: Reads,
}

/// How reads wait for a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Reads {
    /// At most so long; `None`: without end.
    timeout: Option<Duration>,
    /// Also for one that cannot be reached.
    wait: bool,
}

impl Default for Reads {
    fn default() -> Self {
        let usual = FetchConfig::RECOMMENDED;
        Self {
            timeout: Some(usual.read_timeout),
            wait: usual.wait_for_store,
        }
    }
}

impl Reads {
    /// Puts them into limits of fetching.
    pub(crate) fn apply(self, config: &mut FetchConfig) {
        config.read_timeout = self.timeout.unwrap_or(FetchConfig::LONGEST);
        config.wait_for_store = self.wait;
    }
}

/// The file's words, in the table `[daemon]`.
#[derive(Debug, Default, Deserialize)]
pub(super) struct NodeTable {
    learn: Option<String>,
    publish_profiles: Option<bool>,
    peer_listen: Option<String>,
    peers: Option<Vec<String>>,
    peer_token_file: Option<String>,
    read_timeout: Option<String>,
    wait_for_store: Option<bool>,
}

impl NodeSettings {
    pub(super) fn from_parts(
        given: &NodeArgs,
        variable: &impl Fn(&str) -> Option<String>,
        table: NodeTable,
    ) -> anyhow::Result<Self> {
        let learn = pick(
            given.learn,
            "LAYERPACK_LEARN",
            variable("LAYERPACK_LEARN"),
            "learn in the configuration file",
            table.learn,
        )?;
        let publish = pick(
            given.publish_profiles.then_some(Switch(true)),
            "LAYERPACK_PUBLISH_PROFILES",
            variable("LAYERPACK_PUBLISH_PROFILES"),
            "publish_profiles in the configuration file",
            table.publish_profiles.map(|on| on.to_string()),
        )?;
        let listen = pick(
            given.peer_listen.map(Address),
            "LAYERPACK_PEER_LISTEN",
            variable("LAYERPACK_PEER_LISTEN"),
            "peer_listen in the configuration file",
            table.peer_listen,
        )?;
        let peers = pick(
            Some(List(given.peers.clone())).filter(|list| !list.0.is_empty()),
            "LAYERPACK_PEERS",
            variable("LAYERPACK_PEERS"),
            "peers in the configuration file",
            table.peers.map(|list| list.join(",")),
        )?;
        let token = pick(
            given.peer_token_file.clone().map(File),
            "LAYERPACK_PEER_TOKEN_FILE",
            variable("LAYERPACK_PEER_TOKEN_FILE"),
            "peer_token_file in the configuration file",
            table.peer_token_file,
        )?;
        let timeout = pick(
            given.read_timeout,
            "LAYERPACK_READ_TIMEOUT",
            variable("LAYERPACK_READ_TIMEOUT"),
            "read_timeout in the configuration file",
            table.read_timeout,
        )?;
        let wait = pick(
            given.wait_for_store.then_some(Switch(true)),
            "LAYERPACK_WAIT_FOR_STORE",
            variable("LAYERPACK_WAIT_FOR_STORE"),
            "wait_for_store in the configuration file",
            table.wait_for_store.map(|on| on.to_string()),
        )?;
        let usual = Reads::default();
        Ok(Self {
            reads: Reads {
                timeout: timeout.map_or(usual.timeout, |window| window.0),
                wait: wait.map_or(usual.wait, |on| on.0),
            },
            peer_listen: listen.map(|address| address.0),
            peers: peers.map(|list| list.0).unwrap_or_default(),
            peer_token: token.map(|file| read_token(&file.0)).transpose()?,
            learn: learn.unwrap_or(LEARN).0,
            publish_profiles: publish.is_some_and(|on| on.0),
        })
    }

    /// Puts them into a node's settings.
    pub(crate) fn apply(&self, config: &mut layerpack_layerfs::NodeConfig) {
        config.learn = self.learn;
        self.reads.apply(&mut config.fetch);
        config.publish_profiles = self.publish_profiles;
        config.peers = PeersConfig {
            listen: self.peer_listen,
            sources: self.peers.clone(),
            token: self.peer_token.clone(),
            ..PeersConfig::default()
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn peers_come_from_options_variables_or_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let secret = dir.path().join("token");
        fs_err::write(&secret, "0123456789abcdef\n").unwrap();
        let table = || NodeTable {
            peers: Some(vec!["http://a:1".to_owned(), "dns:b:2".to_owned()]),
            peer_listen: Some("127.0.0.1:7070".to_owned()),
            peer_token_file: Some(secret.display().to_string()),
            ..NodeTable::default()
        };
        let load = |given: &NodeArgs, value: Option<&str>| {
            let variable = |name: &str| match name {
                "LAYERPACK_PEERS" => value.map(str::to_owned),
                _ => None,
            };
            NodeSettings::from_parts(given, &variable, table())
        };
        let error = load(&NodeArgs::default(), None).unwrap_err().to_string();
        assert!(error.contains("chmod 600"), "{error}");
        fs_err::set_permissions(&secret, std::fs::Permissions::from_mode(0o600)).unwrap();
        let names = |settings: NodeSettings| {
            let names: Vec<_> = settings.peers.iter().map(ToString::to_string).collect();
            names.join(" ")
        };
        let settings = load(&NodeArgs::default(), None).unwrap();
        assert_eq!(settings.peer_listen.unwrap().port(), 7070);
        assert!(settings.peer_token.is_some() && settings.learn.is_some());
        assert_eq!(names(settings), "http://a:1 dns:b:2");
        let settings = load(&NodeArgs::default(), Some("http://c:3, http://d:4")).unwrap();
        assert_eq!(names(settings), "http://c:3 http://d:4");
        let given = NodeArgs {
            peers: vec!["http://e:5".parse().unwrap()],
            ..NodeArgs::default()
        };
        assert_eq!(
            names(load(&given, Some("http://c:3")).unwrap()),
            "http://e:5"
        );
        assert!(load(&NodeArgs::default(), Some("https://c:3")).is_err());
    }

    #[test]
    fn reads_wait_as_they_are_told() {
        let load = |given: &NodeArgs, value: Option<&str>, table: NodeTable| {
            let variable = |name: &str| match name {
                "LAYERPACK_READ_TIMEOUT" => value.map(str::to_owned),
                _ => None,
            };
            let settings = NodeSettings::from_parts(given, &variable, table)?;
            let mut config = FetchConfig::RECOMMENDED;
            settings.reads.apply(&mut config);
            anyhow::Ok((config.read_timeout, config.wait_for_store))
        };
        let none = NodeArgs::default();
        let table = || NodeTable {
            read_timeout: Some("5m".to_owned()),
            wait_for_store: Some(true),
            ..NodeTable::default()
        };
        let usual = load(&none, None, NodeTable::default()).unwrap();
        assert_eq!(usual, (Duration::from_secs(60), false));
        let seconds = Duration::from_secs;
        assert_eq!(load(&none, None, table()).unwrap(), (seconds(300), true));
        assert_eq!(
            load(&none, Some("7s"), table()).unwrap(),
            (seconds(7), true)
        );
        let given = NodeArgs {
            read_timeout: Some("none".parse().unwrap()),
            ..NodeArgs::default()
        };
        let endless = (FetchConfig::LONGEST, false);
        assert_eq!(
            load(&given, Some("7s"), NodeTable::default()).unwrap(),
            endless
        );
        assert!(load(&none, Some("soon"), table()).is_err());
        // What an earlier version wrote down knows nothing of it.
        let old: NodeSettings = serde_json::from_str("{\"peers\":[]}").unwrap();
        assert_eq!(old.reads, Reads::default());
    }
}
