//! Settings of the node itself: what it learns.

use std::str::FromStr;
use std::time::Duration;

use serde::Deserialize;

use super::pick;
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

/// What is in force.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct NodeSettings {
    /// How long after a mount the node learns.
    pub(crate) learn: Option<Duration>,
    /// Whether stores are given what is learnt.
    pub(crate) publish_profiles: bool,
}

/// The file's words, in the table `[daemon]`.
#[derive(Debug, Default, Deserialize)]
pub(super) struct NodeTable {
    learn: Option<String>,
    publish_profiles: Option<bool>,
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
        Ok(Self {
            learn: learn.unwrap_or(LEARN).0,
            publish_profiles: publish.is_some_and(|on| on.0),
        })
    }

    /// Puts them into a node's settings.
    pub(crate) fn apply(&self, config: &mut layerpack_layerfs::NodeConfig) {
        config.learn = self.learn;
        config.publish_profiles = self.publish_profiles;
    }
}
