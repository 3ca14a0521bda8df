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
    /// A closer look at what follows the needle.
    also: fn(&[u8]) -> bool,
}

const fn token(name: &'static str, needle: &'static str, tail: usize) -> Pattern {
    Pattern {
        name,
        needle,
        tail: (word, tail),
        before: "",
        also: nothing_more,
    }
}

/// A pattern that looks at what follows by itself, whatever stands before.
const fn looked_at(name: &'static str, needle: &'static str, also: fn(&[u8]) -> bool) -> Pattern {
    Pattern {
        name,
        needle,
        tail: (any, 1),
        before: "",
        also,
    }
}

fn nothing_more(_: &[u8]) -> bool {
    true
}

fn base64(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/' | b'=' | b'-' | b'_')
}

fn dotted(byte: u8) -> bool {
    word(byte) || byte == b'.'
}

/// How many bytes from the first on are such.
fn run(bytes: &[u8], fits: fn(u8) -> bool) -> usize {
    bytes.iter().take_while(|&&byte| fits(byte)).count()
}

/// `= VALUE`, `: "VALUE"` and the like, with a value of at least `least` characters of base64.
fn assigned(tail: &[u8], least: usize) -> bool {
    let value = run(tail, |byte| {
        matches!(byte, b' ' | b'\t' | b'=' | b':' | b'"' | b'\'')
    });
    let tail = tail.get(value..).unwrap_or_default();
    (1..=8).contains(&value) && run(tail, base64) >= least
}

fn assigned_secret(tail: &[u8]) -> bool {
    assigned(tail, 40)
}

fn assigned_login(tail: &[u8]) -> bool {
    assigned(tail, 16)
}

/// `USER:PASSWORD@HOST`, with a password that is no placeholder.
fn login(tail: &[u8]) -> bool {
    let end = run(tail.get(..256).unwrap_or(tail), |byte| {
        byte.is_ascii_graphic() && !matches!(byte, b'/' | b'"' | b'\'' | b'<' | b'>' | b'`')
    });
    let Some(at) = tail
        .get(..end)
        .and_then(|text| text.iter().rposition(|&byte| byte == b'@'))
    else {
        return false;
    };
    let Some((user, password)) = tail.get(..at).and_then(|login| {
        let colon = login.iter().position(|&byte| byte == b':')?;
        login.split_at_checked(colon)
    }) else {
        return false;
    };
    let password = password.get(1..).unwrap_or_default();
    let placeholder = password.iter().any(|byte| b"${}*()[]%,|;".contains(byte))
        || [
            &b"password"[..],
            b"passwd",
            b"pass",
            b"secret",
            b"pwd",
            b"xxx",
        ]
        .iter()
        .any(|word| password.eq_ignore_ascii_case(word));
    let host = tail.get(at + 1).is_some_and(u8::is_ascii_alphanumeric);
    user.iter().all(|&byte| dotted(byte) || byte == b'+')
        && password.len() >= 3
        && !placeholder
        && host
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
const PATTERNS: [Pattern; 39] = [
    Pattern {
        name: "private-key",
        needle: "PRIVATE KEY-----",
        tail: (any, 40),
        before: "-----BEGIN ",
        also: nothing_more,
    },
    Pattern {
        name: "private-key",
        needle: "PRIVATE KEY BLOCK-----",
        tail: (any, 40),
        before: "-----BEGIN ",
        also: nothing_more,
    },
    token("private-key", "PuTTY-User-Key-File-", 1),
    token("private-key", "AGE-SECRET-KEY-1", 40),
    Pattern {
        name: "aws-key",
        needle: "AKIA",
        tail: (upper, 16),
        before: "",
        also: nothing_more,
    },
    Pattern {
        name: "aws-key",
        needle: "ASIA",
        tail: (upper, 16),
        before: "",
        also: nothing_more,
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
    token("github-token", "ghu_", 36),
    token("github-token", "ghr_", 36),
    token("slack-token", "xoxa-", 20),
    token("slack-token", "xoxr-", 20),
    token("slack-token", "xoxs-", 20),
    token("slack-token", "hooks.slack.com/services/", 9),
    token("api-key", "sk-", 40),
    token("api-key", "sk_live_", 20),
    token("api-key", "rk_live_", 20),
    token("api-key", "dop_v1_", 60),
    token("api-key", "dapi", 32),
    token("pypi-token", "pypi-", 50),
    token("vault-token", "hvs.", 20),
    token("google-key", "ya29.", 30),
    Pattern {
        name: "api-key",
        needle: "SG.",
        tail: (dotted, 60),
        before: "",
        also: nothing_more,
    },
    Pattern {
        name: "json-web-token",
        needle: ".eyJ",
        tail: (dotted, 20),
        before: "eyJ",
        also: nothing_more,
    },
    looked_at("aws-key", "aws_secret_access_key", assigned_secret),
    looked_at("aws-key", "AWS_SECRET_ACCESS_KEY", assigned_secret),
    looked_at("azure-key", "AccountKey", assigned_secret),
    looked_at("registry-login", "\"auth\"", assigned_login),
    Pattern {
        name: "login-in-url",
        needle: "//",
        tail: (any, 1),
        before: ":",
        also: login,
    },
];

/// Whether there is a pattern of this name.
pub(super) fn is_known(name: &str) -> bool {
    name == "all" || PATTERNS.iter().any(|pattern| pattern.name == name)
}

/// The names of all patterns, for messages.
pub(super) fn names() -> Vec<&'static str> {
    let mut names: Vec<&'static str> = PATTERNS.iter().map(|pattern| pattern.name).collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// The first thing in `bytes` that a pattern of these names matches. `all` is every one.
pub(super) fn find(bytes: &[u8], names: &[String]) -> Option<Hit> {
    find_from(bytes, 0, names)
}

/// The same from the byte `from` on, with what stands before it at hand.
pub(super) fn find_from(bytes: &[u8], from: usize, names: &[String]) -> Option<Hit> {
    PATTERNS
        .iter()
        .filter(|pattern| {
            names
                .iter()
                .any(|name| name == "all" || name == pattern.name)
        })
        .find_map(|pattern| pattern.find(bytes, from))
}

/// Whether `bytes` holds a piece of text.
pub(super) fn holds(bytes: &[u8], text: &[u8]) -> bool {
    memmem::find(bytes, text).is_some()
}

impl Pattern {
    fn find(&self, bytes: &[u8], from: usize) -> Option<Hit> {
        memmem::find_iter(bytes, self.needle.as_bytes())
            .find(|&at| at >= from && self.fits(bytes, at))
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
            && (self.also)(tail)
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
            (
                format!("aws_secret_access_key = {}", "wJalrXUt".repeat(5)),
                "aws-key",
            ),
            (
                format!("AccountName=x;AccountKey={}==;", "Ab1/".repeat(21)),
                "azure-key",
            ),
            (
                format!(
                    "{{\"auths\": {{\"h\": {{\"auth\": \"{}\"}}}}}}",
                    "dXNl".repeat(6)
                ),
                "registry-login",
            ),
            (
                "postgres://bob:hunter2@db:5432/x".to_owned(),
                "login-in-url",
            ),
            (
                "git clone https://x:s3cr3t@host/r".to_owned(),
                "login-in-url",
            ),
            (
                format!(
                    "t = {}.{}.sig",
                    "eyJhbGciOiJIUzI1NiJ9", "eyJzdWIiOiIxMjM0NTY3ODkwIn0"
                ),
                "json-web-token",
            ),
            (format!("password = pypi-{}", "Ag".repeat(30)), "pypi-token"),
            (
                format!("SG.{}.{}", "a".repeat(22), "b".repeat(43)),
                "api-key",
            ),
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
            "aws_secret_access_key=None, aws_session_token=None, region_name=None".to_owned(),
            "postgres://user:password@localhost/x".to_owned(),
            "https://${USER}:${TOKEN}@host/r".to_owned(),
            "http://host:8080/a@b".to_owned(),
            "https://user@host/r".to_owned(),
            "\"auth\": \"none\"".to_owned(),
            "a.sk-folding-cube .sk-cube { }".to_owned(),
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
