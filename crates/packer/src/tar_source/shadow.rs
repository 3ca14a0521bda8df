//! Symbolic links among the entries that are set aside, where patterns leave something out: whether an
//! entry is left out is also a matter of where its path leads, through links that are not in the tree
//! yet.
//!
//! Only links matter for that, so those alone are known here. What else would change where paths lead,
//! or has to be looked up in the tree, ends setting aside: see `TarSource::needs_tree`.

use std::collections::BTreeMap;
use std::ops::Bound;

/// More than so many links and the tree takes less memory.
const MOST: usize = 50_000;

/// See the module's documentation. Targets by where the links lie.
#[derive(Debug, Default)]
pub(super) struct Shadow(BTreeMap<Vec<u8>, Vec<u8>>);

impl Shadow {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn is_full(&self) -> bool {
        self.0.len() >= MOST
    }

    pub(super) fn target(&self, path: &[u8]) -> Option<Vec<u8>> {
        self.0.get(path).cloned()
    }

    /// Something lies at a path now: a symbolic link with a target, or anything else.
    pub(super) fn put(&mut self, path: &[u8], target: Option<&[u8]>) {
        match target {
            Some(target) => {
                self.0.insert(path.to_vec(), target.to_vec());
            }
            None if self.0.is_empty() => {}
            None => {
                self.0.remove(path);
            }
        }
    }

    /// Whether there is a link below a path.
    pub(super) fn is_above(&self, path: &[u8]) -> bool {
        if self.0.is_empty() {
            return false;
        }
        let below = [path, b"/"].concat();
        let bounds = (Bound::Included(below.as_slice()), Bound::Unbounded);
        let first = self.0.range::<[u8], _>(bounds).next();
        first.is_some_and(|(link, _)| link.starts_with(&below))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_known_until_something_else_lies_there() {
        let mut shadow = Shadow::default();
        assert!(shadow.is_empty() && !shadow.is_above(b"a"));
        shadow.put(b"a", None);
        for path in [&b"a/l"[..], b"a.b", b"b"] {
            shadow.put(path, Some(b"t"));
        }
        assert_eq!(shadow.target(b"a/l"), Some(b"t".to_vec()));
        assert_eq!(shadow.target(b"a"), None);
        assert!(shadow.is_above(b"a"));
        for path in [&b"a/l"[..], b"b", b"", b"a.", b"c"] {
            assert!(!shadow.is_above(path));
        }
        shadow.put(b"a/l", Some(b"u"));
        assert_eq!(shadow.target(b"a/l"), Some(b"u".to_vec()));
        shadow.put(b"a/l", None);
        assert!(shadow.target(b"a/l").is_none() && !shadow.is_above(b"a"));
        assert!(!shadow.is_full());
    }
}
