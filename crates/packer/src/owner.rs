//! Whose files are: ids of the source, ids of the layer, and owners that no file can have.

use std::collections::BTreeMap;
use std::str::FromStr;

use layerpack_erofs::Metadata;

use crate::error::{PackError, Result};
use crate::idmap::IdMap;
use crate::options::IdMapRange;
use crate::warnings::Warnings;
use crate::{acl, capability};

const ACCESS: &[u8] = b"system.posix_acl_access";
const DEFAULT: &[u8] = b"system.posix_acl_default";
const CAPABILITY: &[u8] = b"security.capability";

/// How owners of the source become owners of the layer. By default they stay as they are.
///
/// Maps are read as `/proc/PID/uid_map` is: `inside` is the id that the layer gets, `outside` the
/// id that the source has. Owner, group, the ids in ACLs and the root user of file capabilities
/// are mapped; one that no range has is an error that names the file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Owners {
    /// For user ids; empty: they stay.
    pub uid_map: Vec<IdMapRange>,
    /// For group ids; empty: they stay.
    pub gid_map: Vec<IdMapRange>,
    /// Everything belongs to user 0 and group 0. ACLs that name other accounts are dropped, with
    /// a warning. Not together with maps.
    pub all_root: bool,
}

impl FromStr for IdMapRange {
    type Err = PackError;

    /// `INSIDE:OUTSIDE:COUNT`, all decimal.
    fn from_str(text: &str) -> Result<Self> {
        let bad = || {
            PackError::InvalidOption {
            option: format!("id map {text:?}"),
            why: "it is INSIDE:OUTSIDE:COUNT, three numbers, with ids below 4294967295: ids OUTSIDE, OUTSIDE+1, ... of the source become INSIDE, INSIDE+1, ... in the layer".to_owned(),
        }
        };
        let number = |part: Option<&str>| {
            part.filter(|part| part.bytes().all(|byte| byte.is_ascii_digit()))
                .and_then(|part| part.parse().ok())
                .ok_or_else(bad)
        };
        let mut parts = text.split(':');
        let range = Self {
            inside: number(parts.next())?,
            outside: number(parts.next())?,
            count: number(parts.next())?,
        };
        // The last id is -1 to every call that sets an owner.
        for first in [range.inside, range.outside] {
            if u64::from(first) + u64::from(range.count) > u64::from(NOBODY) {
                return Err(bad());
            }
        }
        match parts.next() {
            None => Ok(range),
            Some(_) => Err(bad()),
        }
    }
}

/// [`Owners`], checked.
#[derive(Debug, Clone)]
pub(crate) struct Ownership {
    users: IdMap,
    groups: IdMap,
    all_root: bool,
}

impl Ownership {
    /// Checks the maps.
    pub(crate) fn new(owners: &Owners) -> Result<Self> {
        if owners.all_root && !(owners.uid_map.is_empty() && owners.gid_map.is_empty()) {
            return Err(PackError::InvalidOption {
                option: "all_root".to_owned(),
                why: "it does not go with id maps".to_owned(),
            });
        }
        Ok(Self {
            users: IdMap::new("owner", &owners.uid_map)?,
            groups: IdMap::new("group", &owners.gid_map)?,
            all_root: owners.all_root,
        })
    }

    /// Gives an entry the owners that it has in the layer, and refuses those that none can have.
    pub(crate) fn apply(
        &self,
        path: &[u8],
        metadata: &mut Metadata,
        warnings: &mut Warnings,
    ) -> Result<()> {
        if self.all_root {
            (metadata.uid, metadata.gid) = (0, 0);
            self.only_root(path, &mut metadata.xattrs, warnings)?;
        } else if !(self.users.is_identity() && self.groups.is_identity()) {
            self.map_values(path, &mut metadata.xattrs)?;
            metadata.uid = self.users.inside(path, metadata.uid)?;
            metadata.gid = self.groups.inside(path, metadata.gid)?;
        }
        check(path, metadata)
    }

    /// Maps the ids within attributes.
    pub(crate) fn map_values(
        &self,
        path: &[u8],
        xattrs: &mut BTreeMap<Vec<u8>, Vec<u8>>,
    ) -> Result<()> {
        for name in [ACCESS, DEFAULT] {
            let Some(value) = xattrs.get_mut(name) else {
                continue;
            };
            let mapped = acl::map_ids(
                value,
                |id| self.users.inside(path, id),
                |id| self.groups.inside(path, id),
            )?;
            *value = mapped.ok_or_else(|| damaged_acl(path))?;
        }
        map_capability(path, xattrs, |id| self.users.inside(path, id))
    }

    /// The same where everything belongs to root: accounts in ACLs would all become one.
    fn only_root(
        &self,
        path: &[u8],
        xattrs: &mut BTreeMap<Vec<u8>, Vec<u8>>,
        warnings: &mut Warnings,
    ) -> Result<()> {
        for name in [ACCESS, DEFAULT] {
            let Some(value) = xattrs.get(name) else {
                continue;
            };
            let named = std::cell::Cell::new(false);
            let see = |id| {
                named.set(true);
                Ok(id)
            };
            acl::map_ids(value, see, see)?.ok_or_else(|| damaged_acl(path))?;
            if named.get() {
                xattrs.remove(name);
                warnings.add(format!(
                    "dropped an ACL of {}: it names accounts, and everything becomes root's",
                    crate::show(path)
                ));
            }
        }
        map_capability(path, xattrs, |_| Ok(0))
    }
}

fn damaged_acl(path: &[u8]) -> PackError {
    PackError::unsupported(path, "its ACL is damaged")
}

fn map_capability(
    path: &[u8],
    xattrs: &mut BTreeMap<Vec<u8>, Vec<u8>>,
    user: impl Fn(u32) -> Result<u32>,
) -> Result<()> {
    if let Some(value) = xattrs.get_mut(CAPABILITY) {
        let mapped = capability::map_root(value, user)?;
        *value = mapped
            .ok_or_else(|| PackError::unsupported(path, "its file capabilities are damaged"))?;
    }
    Ok(())
}

/// To every call that sets an owner this means: leave it as it is.
const NOBODY: u32 = u32::MAX;

/// Refuses an owner or a group of -1, which no system can set and the kernel would show as
/// another.
pub(crate) fn check(path: &[u8], metadata: &Metadata) -> Result<()> {
    for (what, id, option) in [
        ("user id", metadata.uid, "--owner"),
        ("group id", metadata.gid, "--group"),
    ] {
        if id == NOBODY {
            let why = format!(
                "its {what} is {id} (-1), which no file can have; change it (chown, or {option} when making an archive with tar), or exclude it"
            );
            return Err(PackError::unsupported(path, why));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_three_numbers() {
        let range: IdMapRange = "0:100000:65536".parse().unwrap();
        assert_eq!(
            (range.inside, range.outside, range.count),
            (0, 100_000, 65_536)
        );
        for bad in [
            "",
            "0",
            "0:1",
            "0:1:2:3",
            "a:1:1",
            "+1:1:1",
            "0:4294967296:1",
            "0:-1:1",
            "0::1",
        ] {
            let error = bad.parse::<IdMapRange>().unwrap_err().to_string();
            assert!(error.contains("INSIDE:OUTSIDE:COUNT"), "{bad}: {error}");
        }
        let both = Owners {
            uid_map: vec![range],
            gid_map: Vec::new(),
            all_root: true,
        };
        assert!(Ownership::new(&both).is_err());
    }

    #[test]
    fn only_minus_one_is_refused() {
        let owned = |uid, gid| Metadata {
            uid,
            gid,
            ..Metadata::default()
        };
        check(b"a", &owned(u32::MAX - 1, u32::MAX - 1)).unwrap();
        for (uid, gid, part) in [(u32::MAX, 0, "user id"), (0, u32::MAX, "group id")] {
            let error = check(b"a/b", &owned(uid, gid)).unwrap_err().to_string();
            for part in ["a/b", part, "4294967295", "chown", "exclude"] {
                assert!(error.contains(part), "{part} not in {error}");
            }
        }
    }
}
