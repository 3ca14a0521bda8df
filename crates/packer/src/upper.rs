//! An overlay's upper directory: what its entries mean to the layers below.
//!
//! overlayfs marks removals as character devices 0:0 or as files with an attribute, directories
//! that hide what lies below with another, and keeps notes of its own in more of them. Only the
//! two meanings leave the node; see SEMANTICS.md.

use std::collections::BTreeMap;

use rustix::fs::{FileType, Stat};

use crate::dir::{Meaning, View, metadata};
use crate::error::{PackError, Result};
use crate::options::OverlayXattrs;
use crate::owner::Ownership;
use crate::scrub::{Scrub, Verdict};
use crate::warnings::Warnings;
use crate::xattrs::{Allowed, is_overlay};

/// See the module's documentation.
pub(crate) struct Upper<'a> {
    /// Attributes to keep.
    pub xattrs: &'a Allowed,
    /// Which attributes are the overlay's own.
    pub marks: OverlayXattrs,
    /// How ids on disk become those of the layer.
    pub owners: Ownership,
    /// What must not leave.
    pub scrub: Option<&'a Scrub<'a>>,
}

impl Upper<'_> {
    fn prefix(&self) -> &'static [u8] {
        match self.marks {
            OverlayXattrs::Trusted => b"trusted.overlay.",
            OverlayXattrs::User => b"user.overlay.",
        }
    }

    /// Removals stay, whatever the rules say of their paths: nothing would come of them but that
    /// something shows which the sandbox took away.
    fn removed(&self, path: &[u8]) -> Meaning {
        if let Some(scrub) = self.scrub {
            scrub.removed(path);
        }
        Meaning::Whiteout
    }

    /// Splits the overlay's own attributes off, by the name after their prefix.
    fn take_marks(
        &self,
        path: &[u8],
        xattrs: &mut BTreeMap<Vec<u8>, Vec<u8>>,
        warnings: &mut Warnings,
    ) -> BTreeMap<Vec<u8>, Vec<u8>> {
        let mut marks = BTreeMap::new();
        xattrs.retain(|name, value| {
            if let Some(mark) = name.strip_prefix(self.prefix()) {
                marks.insert(mark.to_vec(), std::mem::take(value));
                return false;
            }
            if is_overlay(name) {
                // Not of this mount, but another kind of mount would obey it.
                warnings.add(format!(
                    "dropped attribute {} of {}",
                    crate::show(name),
                    crate::show(path)
                ));
                return false;
            }
            true
        });
        marks
    }
}

impl View for Upper<'_> {
    fn wants(&self, name: &[u8]) -> bool {
        self.xattrs.keeps(name) || is_overlay(name)
    }

    fn meaning(
        &self,
        path: &[u8],
        stat: &Stat,
        mut xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
        warnings: &mut Warnings,
    ) -> Result<Meaning> {
        let kind = FileType::from_raw_mode(stat.st_mode);
        if kind == FileType::CharacterDevice && stat.st_rdev == 0 {
            return Ok(self.removed(path));
        }
        let marks = self.take_marks(path, &mut xattrs, warnings);
        let mark = |name: &str| marks.get(name.as_bytes());
        if kind == FileType::RegularFile && stat.st_size == 0 && mark("whiteout").is_some() {
            return Ok(self.removed(path));
        }
        if mark("metacopy").is_some() {
            let why =
                "only its metadata is in the upper directory; mount the overlay with metacopy=off";
            return Err(PackError::unsupported(path, why));
        }
        if mark("redirect").is_some() {
            let why = "it was renamed and its contents are still in a lower layer; mount the overlay with redirect_dir=nofollow";
            return Err(PackError::unsupported(path, why));
        }
        // "x" says that there are whiteouts of the attribute kind inside, not that it is opaque.
        let opaque = kind == FileType::Directory
            && mark("opaque").is_some_and(|value| value.as_slice() == b"y");
        self.xattrs.filter(path, &mut xattrs, warnings)?;
        let mut metadata = metadata(stat, xattrs);
        self.owners.apply(path, &mut metadata, warnings)?;
        if let Some(scrub) = self.scrub {
            let size = u64::try_from(stat.st_size).unwrap_or_default();
            let verdict = scrub.entry(path, kind, size, &metadata);
            if kind == FileType::RegularFile && stat.st_nlink > 1 {
                scrub.name_of((stat.st_dev, stat.st_ino), path, size, verdict);
            }
            if verdict == Verdict::Leave {
                return Ok(Meaning::Nothing);
            }
        }
        Ok(Meaning::Entry { metadata, opaque })
    }
}
