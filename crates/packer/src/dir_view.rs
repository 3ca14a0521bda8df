//! A directory taken as it is: every entry means itself.

use std::collections::BTreeMap;

use rustix::fs::{FileType, Stat};

use crate::dir::{Meaning, View, metadata};
use crate::error::Result;
use crate::owner::Ownership;
use crate::warnings::Warnings;
use crate::xattrs::{Allowed, is_overlay};

/// See the module's documentation.
pub(crate) struct Plain<'a> {
    /// Attributes to keep.
    pub xattrs: &'a Allowed,
    /// Whose things are.
    pub owners: &'a Ownership,
}

impl View for Plain<'_> {
    fn wants(&self, name: &[u8]) -> bool {
        // overlayfs' own are dropped with a warning, so they have to be seen.
        self.xattrs.keeps(name) || is_overlay(name)
    }

    fn meaning(
        &self,
        path: &[u8],
        stat: &Stat,
        mut xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
        warnings: &mut Warnings,
    ) -> Result<Meaning> {
        if FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice && stat.st_rdev == 0 {
            let shown = crate::show(path);
            warnings.add(format!(
                "dropped {shown}: a character device 0:0 would act as a whiteout"
            ));
            return Ok(Meaning::Nothing);
        }
        self.xattrs.filter(path, &mut xattrs, warnings)?;
        let mut metadata = metadata(stat, xattrs);
        self.owners.apply(path, &mut metadata, warnings)?;
        Ok(Meaning::Entry {
            metadata,
            opaque: false,
        })
    }
}
