//! Entries of a view by path, name, type and size.

use std::str::FromStr;

use super::{EntryKind, View, ViewEntry};
use crate::error::{PackError, Result};
use crate::glob::Globs;

/// A bound on a file's size in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SizeTest {
    /// At least so many.
    AtLeast(u64),
    /// At most so many.
    AtMost(u64),
    /// Exactly so many.
    Exactly(u64),
}

impl FromStr for SizeTest {
    type Err = String;

    /// `+N` at least, `-N` at most, `N` exactly; `N` may end in k, m, g or t.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "{text:?} is not a size: write +N, -N or N bytes, N with k, m, g or t if you like"
            )
        };
        let (sign, number) = match text.strip_prefix('+') {
            Some(rest) => ('+', rest),
            None => text
                .strip_prefix('-')
                .map_or((' ', text), |rest| ('-', rest)),
        };
        let digits = number.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let shift = match number.get(digits.len()..).unwrap_or_default() {
            "" | "c" => 0,
            "k" | "K" => 10,
            "m" | "M" => 20,
            "g" | "G" => 30,
            "t" | "T" => 40,
            _ => return Err(wrong()),
        };
        if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
            return Err(wrong());
        }
        let bytes = digits
            .parse::<u64>()
            .ok()
            .and_then(|n| n.checked_mul(1 << shift))
            .ok_or_else(wrong)?;
        Ok(match sign {
            '+' => Self::AtLeast(bytes),
            '-' => Self::AtMost(bytes),
            _ => Self::Exactly(bytes),
        })
    }
}

/// What to find. Everything given must hold.
#[derive(Debug, Clone, Default)]
pub struct Find {
    /// A pattern as those of `build --exclude`: with a `/` for the whole path, else for the name.
    pub pattern: Option<String>,
    /// A pattern for the name alone.
    pub name: Option<String>,
    /// Types; empty: all.
    pub kinds: Vec<EntryKind>,
    /// A size; then only files are found.
    pub size: Option<SizeTest>,
}

impl View {
    /// The entries that match, directories before what is in them.
    ///
    /// # Errors
    /// [`PackError::InvalidOption`] if a pattern cannot be read.
    pub fn find(&self, find: &Find) -> Result<Vec<ViewEntry>> {
        let pattern = Globs::new("pattern", find.pattern.as_slice())?;
        let name = Globs::new("name", find.name.as_slice())?;
        if find.name.as_ref().is_some_and(|n| n.contains('/')) {
            return Err(PackError::InvalidOption {
                option: "name".to_owned(),
                why: "a name has no /; give a pattern for the path".to_owned(),
            });
        }
        let mut found = Vec::new();
        for walked in self.tree().walk() {
            let kind = self.kind(walked.id);
            if !find.kinds.is_empty() && !find.kinds.contains(&kind) {
                continue;
            }
            let size = self.layer.size(walked.id);
            let fits = find.size.is_none_or(|test| {
                kind == EntryKind::File
                    && match test {
                        SizeTest::AtLeast(n) => size >= n,
                        SizeTest::AtMost(n) => size <= n,
                        SizeTest::Exactly(n) => size == n,
                    }
            });
            if !fits {
                continue;
            }
            let names: Vec<&[u8]> = walked
                .path
                .split(|&b| b == b'/')
                .filter(|n| !n.is_empty())
                .collect();
            let directory = kind == EntryKind::Directory;
            let matches = |globs: &Globs| globs.is_empty() || globs.matches(&names, directory);
            if matches(&pattern) && matches(&name) {
                found.push(self.entry(walked.path, walked.id));
            }
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!("+1k".parse(), Ok(SizeTest::AtLeast(1024)));
        assert_eq!("-2M".parse(), Ok(SizeTest::AtMost(2 << 20)));
        assert_eq!("7".parse(), Ok(SizeTest::Exactly(7)));
        for bad in ["", "+", "x", "1x", "--1", "99999999t", "1.5k"] {
            assert!(bad.parse::<SizeTest>().is_err(), "{bad}");
        }
    }
}
