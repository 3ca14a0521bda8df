//! Which extended attributes a layer keeps.

use std::collections::BTreeMap;

use crate::error::{PackError, Result};
use crate::warnings::Warnings;

/// Longest name of an attribute, in bytes.
const MAX_NAME: usize = 255;
const OVERLAY: [&[u8]; 2] = [b"trusted.overlay.", b"user.overlay."];

/// Names to keep.
#[derive(Debug, Clone)]
pub(crate) struct Allowed {
    names: Vec<Vec<u8>>,
    prefixes: Vec<Vec<u8>>,
    max_value: u64,
}

impl Allowed {
    /// Full names, or prefixes that end with `*`.
    pub(crate) fn new(list: &[String], max_value: u64) -> Result<Self> {
        let (mut names, mut prefixes) = (Vec::new(), Vec::new());
        for item in list {
            let text = item.as_bytes();
            let invalid = |why: String| {
                Err(PackError::InvalidOption {
                    option: "xattrs".to_owned(),
                    why,
                })
            };
            match text.strip_suffix(b"*") {
                _ if text.is_empty() => return invalid("a name is empty".to_owned()),
                start if start.unwrap_or(text).contains(&b'*') => {
                    let why = "`*` stands for what follows, and only at the end of a name";
                    return invalid(format!("{item:?}: {why}"));
                }
                Some(prefix) => prefixes.push(prefix.to_vec()),
                None => names.push(text.to_vec()),
            }
        }
        Ok(Self {
            names,
            prefixes,
            max_value,
        })
    }

    /// Whether the layer keeps the attribute. Never true for overlayfs' own.
    pub(crate) fn keeps(&self, name: &[u8]) -> bool {
        !is_overlay(name)
            && (self.names.iter().any(|own| own == name)
                || self.prefixes.iter().any(|prefix| name.starts_with(prefix)))
    }

    /// Refuses what no filesystem could show.
    pub(crate) fn check(&self, path: &[u8], name: &[u8], value: &[u8]) -> Result<()> {
        if value.len() as u64 > self.max_value {
            let why = format!(
                "extended attribute {} has {} bytes, at most {} are possible; remove or exclude it",
                crate::show(name),
                value.len(),
                self.max_value
            );
            return Err(PackError::unsupported(path, why));
        }
        if name.len() > MAX_NAME || name.contains(&0) {
            let why = format!(
                "extended attribute {} has no possible name",
                crate::show(name)
            );
            return Err(PackError::unsupported(path, why));
        }
        Ok(())
    }

    /// Drops from `xattrs` what the layer does not keep and says so: for each of overlayfs' own,
    /// which would hide or move files of the layers below, in sum for the others.
    pub(crate) fn filter(
        &self,
        path: &[u8],
        xattrs: &mut BTreeMap<Vec<u8>, Vec<u8>>,
        warnings: &mut Warnings,
    ) -> Result<()> {
        xattrs.retain(|name, _| {
            if is_overlay(name) {
                warnings.add(format!(
                    "dropped attribute {} of {}",
                    crate::show(name),
                    crate::show(path)
                ));
            }
            let keeps = self.keeps(name);
            if !keeps && !is_overlay(name) {
                warnings.dropped(name);
            }
            keeps
        });
        xattrs.retain(|name, value| {
            let well = is_well_formed(name, value);
            if !well {
                warnings.add(format!(
                    "dropped attribute {} of {}: its value has no form that the kernel takes",
                    crate::show(name),
                    crate::show(path)
                ));
            }
            well
        });
        xattrs
            .iter()
            .try_for_each(|(name, value)| self.check(path, name, value))
    }
}

/// Whether the kernel takes the value of an attribute that it acts on. It refuses access to the
/// file otherwise.
fn is_well_formed(name: &[u8], value: &[u8]) -> bool {
    match name {
        b"system.posix_acl_access" | b"system.posix_acl_default" => crate::acl::is_valid(value),
        b"security.capability" => {
            crate::capability::map_root(value, Ok).is_ok_and(|known| known.is_some())
        }
        _ => true,
    }
}

/// Whether overlayfs would take the attribute as one of its own marks.
pub(crate) fn is_overlay(name: &[u8]) -> bool {
    OVERLAY.iter().any(|prefix| name.starts_with(prefix))
}
