//! Patterns over the contents of files: what keys and tokens look like.
//!
//! Each is a run of bytes that is rare, and a look at what stands around it. What is found is a
//! suspicion, not a proof, in both directions.

use memchr::memmem;

/// What a file's content looked like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hit {
    /// Name of the pattern.
    pub pattern: &'static str,
    /// Where it begins, in bytes.
    pub offset: usize,
}

struct Pattern {
    name: &'static str,
    needle: &'static str,
    /// What may follow the needle, and how many of it must.
    tail: (fn(u8) -> bool, usize),
    /// What must stand right before the needle; empty: anything that is no part of a word.
    before: &'static str,
}

const fn token(name: &'static str, needle: &'static str, tail: usize) -> Pattern {
    Pattern {
        name,
        needle,
        tail: (word, tail),
        before: "",
    }
}

fn word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-'
}

fn upper(byte: u8) -> bool {
    byte.is_ascii_uppercase() || byte.is_ascii_digit()
}

fn any(_: u8) -> bool {
    true
}

/// All patterns.
const PATTERNS: [Pattern; 18] = [
    Pattern {
        name: "private-key",
        needle: "PRIVATE KEY-----",
        tail: (any, 40),
        before: "-----BEGIN ",
    },
    Pattern {
        name: "private-key",
        needle: "PRIVATE KEY BLOCK-----",
        tail: (any, 40),
        before: "-----BEGIN ",
    },
    token("private-key", "PuTTY-User-Key-File-", 1),
    token("private-key", "AGE-SECRET-KEY-1", 40),
    Pattern {
        name: "aws-key",
        needle: "AKIA",
        tail: (upper, 16),
        before: "",
    },
    Pattern {
        name: "aws-key",
        needle: "ASIA",
        tail: (upper, 16),
        before: "",
    },
    token("github-token", "ghp_", 36),
    token("github-token", "gho_", 36),
    token("github-token", "ghs_", 36),
    token("github-token", "github_pat_", 30),
    token("gitlab-token", "glpat-", 20),
    token("slack-token", "xoxb-", 20),
    token("slack-token", "xoxp-", 20),
    token("api-key", "sk-ant-", 20),
    token("api-key", "sk-proj-", 20),
    token("google-key", "AIza", 35),
    token("npm-token", "npm_", 36),
    token("huggingface-token", "hf_", 34),
];

/// Whether there is a pattern of this name.
pub(super) fn is_known(name: &str) -> bool {
    name == "all" || PATTERNS.iter().any(|pattern| pattern.name == name)
}

/// The names of all patterns, for messages.
pub(super) fn names() -> Vec<&'static str> {
    let mut names: Vec<&'static str> = PATTERNS.iter().map(|pattern| pattern.name).collect();
    names.dedup();
    names
}

/// The first thing in `bytes` that a pattern of these names matches. `all` is every one.
pub(super) fn find(bytes: &[u8], names: &[String]) -> Option<Hit> {
    PATTERNS
        .iter()
        .filter(|pattern| {
            names
                .iter()
                .any(|name| name == "all" || name == pattern.name)
        })
        .find_map(|pattern| pattern.find(bytes))
}

/// Whether `bytes` holds a piece of text.
pub(super) fn holds(bytes: &[u8], text: &[u8]) -> bool {
    memmem::find(bytes, text).is_some()
}

impl Pattern {
    fn find(&self, bytes: &[u8]) -> Option<Hit> {
        memmem::find_iter(bytes, self.needle.as_bytes())
            .find(|&at| self.fits(bytes, at))
            .map(|offset| Hit {
                pattern: self.name,
                offset,
            })
    }

    fn fits(&self, bytes: &[u8], at: usize) -> bool {
        let before = bytes.get(..at).unwrap_or_default();
        let ahead = if self.before.is_empty() {
            before
                .last()
                .is_none_or(|&byte| !byte.is_ascii_alphanumeric())
        } else {
            // Anything of one line may stand between, as in `BEGIN RSA PRIVATE KEY`.
            let line = before.len().saturating_sub(64);
            let line = before.get(line..).unwrap_or_default();
            let line = line
                .rsplit(|&byte| byte == b'\n')
                .next()
                .unwrap_or_default();
            memmem::find(line, self.before.as_bytes()).is_some()
        };
        let tail = bytes.get(at + self.needle.len()..).unwrap_or_default();
        let (fits, least) = self.tail;
        ahead
            && tail
                .iter()
                .take_while(|&&byte| fits(byte))
                .take(least)
                .count()
                == least
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hit(text: &str) -> Option<&'static str> {
        find(text.as_bytes(), &["all".to_owned()]).map(|hit| hit.pattern)
    }

    #[test]
    fn what_looks_like_a_secret_and_what_does_not() {
        let key = |head: &str| format!("x\n-----BEGIN {head}-----\n{}\n", "QUJD".repeat(20));
        for (text, pattern) in [
            (key("RSA PRIVATE KEY"), "private-key"),
            (key("OPENSSH PRIVATE KEY"), "private-key"),
            (key("PGP PRIVATE KEY BLOCK"), "private-key"),
            ("id = AKIAIOSFODNN7EXAMPLE\n".to_owned(), "aws-key"),
            (format!("token: ghp_{}", "a1".repeat(18)), "github-token"),
            (format!("\"sk-ant-{}\"", "x9".repeat(15)), "api-key"),
            (format!("hf_{}", "Ab".repeat(17)), "huggingface-token"),
        ] {
            assert_eq!(hit(&text), Some(pattern), "{text}");
        }
        for text in [
            key("PUBLIC KEY"),
            key("CERTIFICATE"),
            "grep 'PRIVATE KEY-----' file".to_owned(),
            "PRIVATE KEY-----".to_owned(),
            "AKIAIOSFODNN7exampl".to_owned(),
            "XAKIAIOSFODNN7EXAMPLE".to_owned(),
            "ghp_short".to_owned(),
            "def hf_load(): pass".to_owned(),
        ] {
            assert_eq!(hit(&text), None, "{text}");
        }
        assert_eq!(find(b"AKIAIOSFODNN7EXAMPLE", &["api-key".to_owned()]), None);
    }

    #[test]
    fn names_are_known() {
        for name in names() {
            assert!(is_known(name), "{name}");
        }
        assert!(is_known("all") && !is_known("nonsense"));
    }
}
