//! Keys as tags and back (FORMAT.md, "Registries").
//!
//! A tag has one spelling of a key and can be read back: `/` becomes `.`, and what that takes away
//! is escaped by `_`. Keys that are too long are hashed; their manifests say which they are.

use crate::key::Key;
use crate::registry::{MAX_TAG, Sha256, is_tag};

/// What a tag of a repository stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Meaning {
    /// The object with this key.
    Object(Key),
    /// An object whose manifest says which.
    Hashed,
    /// Nothing of ours.
    Foreign,
}

/// The tag of a key.
pub(super) fn tag_of(key: &Key) -> String {
    let mut tag = String::with_capacity(key.as_str().len() + 8);
    for (at, c) in key.as_str().char_indices() {
        match c {
            '/' => tag.push('.'),
            '.' => tag.push_str("_."),
            '_' => tag.push_str("__"),
            // A tag does not begin with it.
            '-' if at == 0 => tag.push_str("_-"),
            c => tag.push(c),
        }
    }
    // Tags of this form list a manifest's referrers.
    if tag.len() > MAX_TAG || tag.starts_with("sha256-") {
        format!("_h{}", Sha256::of(key.as_str().as_bytes()).hex())
    } else {
        tag
    }
}

/// What a tag stands for.
pub(super) fn meaning(tag: &str) -> Meaning {
    let hashed = tag.strip_prefix("_h").is_some_and(|hex| {
        hex.len() == 64 && hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
    });
    if hashed {
        return Meaning::Hashed;
    }
    let mut key = String::with_capacity(tag.len());
    let mut chars = tag.chars();
    while let Some(c) = chars.next() {
        match c {
            '.' => key.push('/'),
            '_' => match chars.next() {
                Some(c @ ('.' | '_' | '-')) => key.push(c),
                _ => return Meaning::Foreign,
            },
            c => key.push(c),
        }
    }
    match Key::new(&key) {
        // One spelling only.
        Ok(key) if is_tag(tag) && tag_of(&key) == tag => Meaning::Object(key),
        _ => Meaning::Foreign,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key(text: &str) -> Key {
        Key::new(text).unwrap()
    }

    #[test]
    fn tags_are_as_the_format_says() {
        for (text, tag) in [
            ("layerpack.json", "layerpack_.json"),
            ("refs/base/debian/_12.1", "refs.base.debian.__12_.1"),
            ("packs/ab/abcd", "packs.ab.abcd"),
            ("-a/-b", "_-a.-b"),
            ("A/b", "A.b"),
        ] {
            assert_eq!(tag_of(&key(text)), tag);
            assert_eq!(meaning(tag), Meaning::Object(key(text)));
        }
        for text in [
            "sha256-0",
            &"a".repeat(129),
            &format!("a/{}", "_".repeat(64)),
        ] {
            let tag = tag_of(&key(text));
            assert!(tag.starts_with("_h") && tag.len() == 66, "{tag}");
            assert_eq!(meaning(&tag), Meaning::Hashed);
        }
        for foreign in [
            "latest_",
            "a..b",
            ".a",
            "_",
            "_x",
            "tmp.x",
            "a_-b",
            "sha256-00",
            "",
        ] {
            assert_eq!(meaning(foreign), Meaning::Foreign, "{foreign}");
        }
    }

    proptest! {
        #[test]
        fn every_key_has_its_own_tag(
            a in "[A-Za-z0-9_-][A-Za-z0-9._-]{0,20}(/[A-Za-z0-9_-][A-Za-z0-9._-]{0,20}){0,4}",
        ) {
            let Ok(key) = Key::new(&a) else { return Ok(()) };
            let tag = tag_of(&key);
            prop_assert!(is_tag(&tag));
            match meaning(&tag) {
                Meaning::Object(back) => prop_assert_eq!(back, key),
                Meaning::Hashed => prop_assert!(tag.len() == 66),
                Meaning::Foreign => prop_assert!(false, "{}", tag),
            }
        }
    }
}
