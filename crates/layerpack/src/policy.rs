//! Which layers a node takes: whose signatures it asks for. The format is in API.md, section
//! "Signature policy".
//!
//! The daemon reads the file at each request that brings layers up, so that a change needs no
//! restart; it is small. A file that is there and cannot be read or understood refuses
//! everything: a policy must not vanish by a typing error. Without a file everything is taken.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, bail};
use layerpack_store::{Digest, LayerStore, Manifest, PublicKey, Reference, StoreError};
use serde::Deserialize;

use crate::failure::of_toml;

/// Name of the policy in the node's root directory.
pub(crate) const FILE_NAME: &str = "policy.toml";
/// Largest policy file in bytes.
const MAX_FILE: u64 = 1 << 20;

/// Layers that are checked at once.
pub(crate) const CHECKS: usize = 8;

/// What happens to a layer without the signature that is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Mode {
    /// Nothing is asked for.
    Off,
    /// It is taken, with a warning.
    Warn,
    /// It is refused.
    #[default]
    Require,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    /// Pattern of references, where `*` is any run of characters.
    layers: String,
    /// Names of keys any of which will do; absent: all of them.
    keys: Option<Vec<String>>,
    /// Absent: that of the file.
    mode: Option<Mode>,
}

/// A node's rules about signatures.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Policy {
    #[serde(default)]
    mode: Mode,
    #[serde(default)]
    keys: BTreeMap<String, PublicKey>,
    #[serde(default)]
    rule: Vec<Rule>,
}

impl Policy {
    /// The policy in a file; `None` if there is no file.
    ///
    /// # Errors
    /// If it cannot be read or understood.
    pub(crate) fn load(path: &Path) -> anyhow::Result<Option<Self>> {
        let size = match fs_err::metadata(path) {
            Ok(meta) => meta.len(),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e).context("cannot read the signature policy"),
        };
        if size > MAX_FILE {
            bail!("the signature policy {} is too large", path.display());
        }
        let text = fs_err::read_to_string(path).context("cannot read the signature policy")?;
        Self::parse(&text)
            .with_context(|| format!("the signature policy {} is wrong", path.display()))
            .map(Some)
    }

    fn parse(text: &str) -> anyhow::Result<Self> {
        let policy: Self = toml::from_str(text).map_err(|e| of_toml(&e, text))?;
        for rule in &policy.rule {
            for name in rule.keys.iter().flatten() {
                if !policy.keys.contains_key(name) {
                    bail!(
                        "the rule for {:?} names the key {name:?}, which is not under [keys]",
                        rule.layers
                    );
                }
            }
        }
        Ok(policy)
    }

    /// Checks a layer, whose manifest is read unless it is `known`. A warning where the policy only
    /// warns.
    ///
    /// # Errors
    /// If the layer has no signature that the policy asks for, or it cannot be told.
    pub(crate) fn check(
        &self,
        store: &LayerStore,
        digest: &Digest,
        known: Option<&Manifest>,
    ) -> anyhow::Result<Option<String>> {
        let reference = match known {
            Some(manifest) => manifest.reference(),
            None => store.manifest(digest)?.reference(),
        };
        let (mode, keys) = self.asked(&reference);
        if mode == Mode::Off {
            return Ok(None);
        }
        let complaint = match signed_by_one(store, digest, &keys) {
            Ok(true) => return Ok(None),
            Ok(false) => format!(
                "{reference} ({digest}) is not signed by a key that this node's policy trusts for it ({}): sign it (layerpack sign), or change the policy",
                if keys.is_empty() {
                    "there is none".to_owned()
                } else {
                    keys.iter()
                        .map(|(name, _)| *name)
                        .collect::<Vec<_>>()
                        .join(", ")
                }
            ),
            Err(error) if error.is_damage() => {
                format!("a signature of {reference} is wrong: {error}")
            }
            Err(error) => {
                return Err(error).context(format!("cannot check who signed {reference}"));
            }
        };
        match mode {
            Mode::Require => bail!("{complaint}"),
            Mode::Warn | Mode::Off => Ok(Some(complaint)),
        }
    }

    /// What the first rule that matches asks for, or the file as a whole.
    fn asked(&self, reference: &Reference) -> (Mode, Vec<(&str, PublicKey)>) {
        let name = reference.to_string();
        let rule = self.rule.iter().find(|rule| matches(&rule.layers, &name));
        let mode = rule.and_then(|rule| rule.mode).unwrap_or(self.mode);
        let all = self.keys.iter().map(|(name, key)| (name.as_str(), *key));
        let keys = match rule.and_then(|rule| rule.keys.as_ref()) {
            Some(wanted) => all
                .filter(|(name, _)| wanted.iter().any(|other| other == name))
                .collect(),
            None => all.collect(),
        };
        (mode, keys)
    }
}

/// Whether one of the keys signed the manifest. One damaged signature does not undo a good one.
fn signed_by_one(
    store: &LayerStore,
    digest: &Digest,
    keys: &[(&str, PublicKey)],
) -> Result<bool, StoreError> {
    let mut damage = None;
    for (_, key) in keys {
        match store.is_signed_by(digest, key) {
            Ok(true) => return Ok(true),
            Ok(false) => {}
            Err(error) if error.is_damage() => damage = Some(error),
            Err(error) => return Err(error),
        }
    }
    damage.map_or(Ok(false), Err)
}

/// Whether `text` is what `pattern` says, where `*` stands for any run of characters.
pub(crate) fn matches(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| text.strip_prefix(first)) else {
        return false;
    };
    let mut last: Option<&str> = None;
    for part in parts {
        if let Some(part) = last.replace(part) {
            match rest.split_once(part) {
                Some((_, after)) => rest = after,
                None => return false,
            }
        }
    }
    last.map_or(rest.is_empty(), |last| rest.ends_with(last))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_is_one_line() {
        let error = Policy::parse("mode = \"warn\"\n[[rule]]\nlayers = 3\n").unwrap_err();
        let said = format!("{error:#}");
        assert!(said.contains("expected a string"), "{said}");
        assert!(!said.contains('\n'), "{said}");
    }

    #[test]
    fn a_star_is_any_run_of_characters() {
        for (pattern, text, expected) in [
            ("*", "base/a:1", true),
            ("base/*", "base/a:1", true),
            ("base/*", "diff/a:1", false),
            ("*/a:*", "base/a:1", true),
            ("*/a:*", "base/b:1", false),
            ("base/a:1", "base/a:1", true),
            ("base/a:1", "base/a:12", false),
            ("base/a*1", "base/a1", true),
            ("base/aa*aa", "base/aaa", false),
            ("", "base/a:1", false),
        ] {
            assert_eq!(matches(pattern, text), expected, "{pattern} {text}");
        }
    }

    #[test]
    fn the_first_rule_that_matches_decides() {
        let key = |byte: u8| {
            layerpack_store::SigningKey::from_text(&format!("ed25519-secret:{}", hex(byte)))
                .unwrap()
                .public()
        };
        let text = format!(
            "mode = \"warn\"\n[keys]\nci = \"{}\"\nops = \"{}\"\n[[rule]]\nlayers = \"diff/*\"\nmode = \"off\"\n[[rule]]\nlayers = \"base/*\"\nkeys = [\"ops\"]\nmode = \"require\"\n",
            key(1),
            key(2)
        );
        let policy = Policy::parse(&text).unwrap();
        let asked = |text: &str| policy.asked(&text.parse().unwrap());
        assert_eq!(asked("diff/x:1").0, Mode::Off);
        assert_eq!(asked("base/x:1"), (Mode::Require, vec![("ops", key(2))]));
        assert_eq!(
            asked("toolkit/x:1"),
            (Mode::Warn, vec![("ci", key(1)), ("ops", key(2))])
        );
    }

    fn hex(byte: u8) -> String {
        format!("{byte:02x}").repeat(32)
    }

    #[test]
    fn what_is_not_understood_is_an_error_and_nothing_means_require() {
        assert_eq!(Policy::parse("").unwrap().mode, Mode::Require);
        for bad in [
            "mode = \"maybe\"",
            "modes = \"off\"",
            "[keys]\nci = \"ed25519:00\"",
            "[[rule]]\nlayers = \"*\"\nkeys = [\"ci\"]",
            "[[rule]]\nkeys = []",
        ] {
            assert!(Policy::parse(bad).is_err(), "{bad}");
        }
    }
}
