//! What a caller should be told without the work being stopped, in bounded number.

use std::collections::BTreeMap;

use layerpack_store::Published;

use crate::error::{PackError, Result};
use crate::options::{EntryCounts, Progress};

/// Warnings kept in full, and attribute names counted one by one.
const KEPT: usize = 100;
/// ACLs under the names that XFS also lists them by: they are kept, under their usual names.
const ALIASES: [&[u8]; 2] = [b"trusted.SGI_ACL_FILE", b"trusted.SGI_ACL_DEFAULT"];

/// What was published, what is in it, and the size of its metadata image in bytes.
type Made = (Published, EntryCounts, u64);

/// A list that stops growing.
#[derive(Debug, Default)]
pub(crate) struct Warnings {
    kept: Vec<String>,
    more: u64,
    /// Entries that lost an attribute, by its name.
    dropped: BTreeMap<Vec<u8>, u64>,
    /// The same for names beyond those.
    dropped_more: u64,
}

impl Warnings {
    /// Adds one.
    pub(crate) fn add(&mut self, text: String) {
        if self.kept.len() < KEPT {
            self.kept.push(text);
        } else {
            self.more += 1;
        }
    }

    /// Counts an entry whose attribute is not among those to keep.
    pub(crate) fn dropped(&mut self, name: &[u8]) {
        self.count(name, 1);
    }

    fn count(&mut self, name: &[u8], entries: u64) {
        if ALIASES.contains(&name) {
            return;
        }
        if let Some(count) = self.dropped.get_mut(name) {
            *count += entries;
        } else if self.dropped.len() < KEPT {
            self.dropped.insert(name.to_vec(), entries);
        } else {
            self.dropped_more += entries;
        }
    }

    /// Takes over what another list holds.
    pub(crate) fn absorb(&mut self, other: Self) {
        other.kept.into_iter().for_each(|text| self.add(text));
        self.more += other.more;
        for (name, entries) in other.dropped {
            self.count(&name, entries);
        }
        self.dropped_more += other.dropped_more;
    }

    /// Joins the warnings with what the store says, for the report. If the work failed there is no
    /// report, and `progress` is told.
    pub(crate) fn close(
        self,
        made: Result<Made>,
        progress: &dyn Progress,
    ) -> Result<(Made, Vec<String>)> {
        match made {
            Ok(made) => {
                let mut lines = self.into_vec();
                lines.extend(made.0.warnings.iter().cloned());
                Ok((made, lines))
            }
            Err(error) => Err(self.tell(error, progress)),
        }
    }

    /// Tells `progress` all, since the work ends with `error`.
    pub(crate) fn tell(self, error: PackError, progress: &dyn Progress) -> PackError {
        for line in self.into_vec() {
            progress.warning(&line);
        }
        error
    }

    /// All that were kept, a line for those that were not, and one for each attribute name.
    pub(crate) fn into_vec(mut self) -> Vec<String> {
        if self.more > 0 {
            self.kept
                .push(format!("{} more warnings like these", self.more));
        }
        for (name, entries) in self.dropped {
            if name.is_empty() {
                self.kept.push(format!(
                    "dropped attributes without a name of {entries} entries"
                ));
                continue;
            }
            let name = crate::show(&name);
            self.kept.push(format!(
                "dropped attribute {name} of {entries} entries; to keep it, build with --xattr {name}"
            ));
        }
        if self.dropped_more > 0 {
            self.kept.push(format!(
                "dropped {} more attributes, of other names; to keep some, build with --xattr",
                self.dropped_more
            ));
        }
        self.kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_counted_by_name_and_bounded() {
        let (mut all, mut other) = (Warnings::default(), Warnings::default());
        all.dropped(b"trusted.t");
        all.dropped(b"trusted.SGI_ACL_FILE");
        other.dropped(b"trusted.t");
        for name in 0..KEPT + 5 {
            other.dropped(format!("z.{name:03}").as_bytes());
        }
        all.absorb(other);
        let lines = all.into_vec();
        assert_eq!(lines.len(), KEPT + 1, "{lines:?}");
        assert_eq!(
            lines[0],
            "dropped attribute trusted.t of 2 entries; to keep it, build with --xattr trusted.t"
        );
        assert!(lines[KEPT].starts_with("dropped 6 more"), "{lines:?}");
    }
}
