//! Which layers are meant: references, patterns over them, parents.

use std::collections::HashSet;

use crate::digest::Digest;
use crate::error::{Result, StoreError};
use crate::layer::LayerStore;
use crate::manifest::Manifest;
use crate::reference::{Kind, Reference};

/// Deepest chain of parents that is followed.
const MAX_DEPTH: usize = 400;

/// What to select.
#[derive(Debug, Clone, Default)]
pub struct Selection {
    /// References, or patterns in which `*` stands for any characters but `:` and `?` for one.
    pub patterns: Vec<String>,
    /// Every layer of the store.
    pub all: bool,
    /// Parents of all layers selected, not only of diffs.
    pub parents: bool,
    /// No parents, not even of diffs.
    pub alone: bool,
}

/// Whether `text` matches `pattern`: `*` is any run of characters but `:`, `?` any one but `:`.
#[must_use]
pub fn matches(pattern: &str, text: &str) -> bool {
    // The usual two-pointer walk with one point to go back to: time is the product of the
    // lengths, whatever the pattern.
    let (pattern, text): (Vec<char>, Vec<char>) =
        (pattern.chars().collect(), text.chars().collect());
    let (mut p, mut t) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while let Some(&c) = text.get(t) {
        match pattern.get(p) {
            Some('*') => {
                star = Some((p, t));
                p += 1;
            }
            Some('?') if c != ':' => {
                p += 1;
                t += 1;
            }
            Some(&literal) if literal == c && literal != '?' => {
                p += 1;
                t += 1;
            }
            _ => match star {
                Some((at, from)) if text.get(from).is_some_and(|&c| c != ':') => {
                    star = Some((at, from + 1));
                    p = at + 1;
                    t = from + 1;
                }
                _ => return false,
            },
        }
    }
    pattern.iter().skip(p).all(|&c| c == '*')
}

/// Whether the text is a pattern rather than a reference.
#[must_use]
pub fn is_pattern(text: &str) -> bool {
    text.contains(['*', '?'])
}

/// The layers meant, each once, parents before the layers made on them.
///
/// # Errors
/// [`StoreError::NoStore`] if there is no store, [`StoreError::UnknownReference`] for a reference
/// that is not there, [`StoreError::NoMatch`] for a pattern that nothing matches; damage of
/// references and manifests that are selected.
pub fn select(store: &LayerStore, selection: &Selection) -> Result<Vec<(Digest, Manifest)>> {
    let mut wanted: Vec<Reference> = Vec::new();
    let mut entries = None;
    if selection.all || selection.patterns.iter().any(|p| is_pattern(p)) {
        store.must_exist()?;
        entries = Some(store.entries()?);
    }
    for entry in entries.iter().flatten().filter(|_| selection.all) {
        wanted.push(entry.reference.clone());
    }
    for pattern in &selection.patterns {
        if !is_pattern(pattern) {
            wanted.push(pattern.parse()?);
            continue;
        }
        let before = wanted.len();
        let found = entries.iter().flatten().map(|e| &e.reference);
        wanted.extend(found.filter(|r| matches(pattern, &r.to_string())).cloned());
        if wanted.len() == before {
            return Err(StoreError::NoMatch {
                pattern: pattern.chars().take(300).collect(),
                store: store.url().to_owned(),
            });
        }
    }
    let mut order = Order {
        store,
        selection,
        seen: HashSet::new(),
        layers: Vec::new(),
    };
    for reference in wanted {
        let (digest, manifest) = store.load(&reference)?;
        order.add(digest, manifest, 0)?;
    }
    Ok(order.layers)
}

struct Order<'a> {
    store: &'a LayerStore,
    selection: &'a Selection,
    seen: HashSet<Digest>,
    layers: Vec<(Digest, Manifest)>,
}

impl Order<'_> {
    /// Adds a layer after its parents. Digests name their content, so there are no cycles, but a
    /// hostile store may have long chains.
    fn add(&mut self, digest: Digest, manifest: Manifest, depth: usize) -> Result<()> {
        if !self.seen.insert(digest) {
            return Ok(());
        }
        let follow =
            !self.selection.alone && (self.selection.parents || manifest.kind == Kind::Diff);
        if follow && depth < MAX_DEPTH {
            for parent in &manifest.parents {
                if !self.seen.contains(&parent.manifest) {
                    let below = self.store.manifest(&parent.manifest)?;
                    self.add(parent.manifest, below, depth + 1)?;
                }
            }
        }
        self.layers.push((digest, manifest));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns() {
        for (pattern, text) in [
            ("workspace/*:1", "workspace/a/b:1"),
            ("*", "abc"),
            ("*:*", "base/debian:12"),
            ("base/deb?an:1*", "base/debian:12"),
            ("base/debian:12", "base/debian:12"),
            ("a*b*c", "a1b2b3c"),
            ("*/*:*", "base/a:1"),
        ] {
            assert!(matches(pattern, text), "{pattern} {text}");
        }
        for (pattern, text) in [
            ("workspace/*", "workspace/a:1"),
            ("base/?:1", "base/ab:1"),
            ("base/a?1", "base/a:1"),
            ("*:1", "base/a:2"),
            ("", "a"),
            ("a*b*c", "a1b2b3"),
        ] {
            assert!(!matches(pattern, text), "{pattern} {text}");
        }
        // No blow-up.
        assert!(!matches(&"*a".repeat(200), &"a".repeat(199)));
    }
}
