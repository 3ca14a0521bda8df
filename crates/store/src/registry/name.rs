//! Names of repositories, tags and digests: `HOST[:PORT]/REPOSITORY[:TAG][@DIGEST]` (OCI
//! distribution specification 1.1, "Pulling manifests", for the grammar of each part).
//!
//! The host is always spelled out: no name means a public registry by omission. `docker.io` is the
//! one alias that tools agree on: its interface is at another host, and a repository of one segment
//! is below `library/`.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use super::sha::Sha256;

/// Longest repository name in bytes.
const MAX_REPOSITORY: usize = 255;
/// Longest tag in bytes.
pub(crate) const MAX_TAG: usize = 128;

/// A manifest's name within its repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ManifestName {
    /// A tag, which may come to mean another manifest.
    Tag(String),
    /// The digest of the manifest's bytes.
    Digest(Sha256),
}

impl ManifestName {
    /// A tag, if it is one: 1 to 128 bytes of `A-Z a-z 0-9 _ . -`, not beginning with `.` or `-`.
    #[must_use]
    pub fn tag(text: &str) -> Option<Self> {
        is_tag(text).then(|| Self::Tag(text.to_owned()))
    }
}

impl fmt::Display for ManifestName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tag(tag) => f.write_str(tag),
            Self::Digest(digest) => fmt::Display::fmt(digest, f),
        }
    }
}

/// A repository of a registry and, it may be, a manifest in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegistryName {
    host: String,
    repository: String,
    manifest: Option<ManifestName>,
}

/// Text that is no [`RegistryName`], with the reason.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{why}; expected HOST[:PORT]/REPOSITORY[:TAG] or HOST[:PORT]/REPOSITORY@sha256:DIGEST")]
pub struct NotRegistryName {
    /// The rule that it breaks.
    pub why: &'static str,
}

impl RegistryName {
    /// Host and port as given.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The repository's name.
    #[must_use]
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// The manifest named; a digest beats a tag in front of it.
    #[must_use]
    pub fn manifest(&self) -> Option<&ManifestName> {
        self.manifest.as_ref()
    }

    /// The same with another manifest, or none.
    #[must_use]
    pub fn with_manifest(mut self, manifest: Option<ManifestName>) -> Self {
        self.manifest = manifest;
        self
    }

    /// Where the registry's interface is.
    #[must_use]
    pub fn interface_host(&self) -> &str {
        match self.host.as_str() {
            "docker.io" | "index.docker.io" => "registry-1.docker.io",
            host => host,
        }
    }

    /// Whether the host is this machine, which may be spoken to without TLS.
    #[must_use]
    pub fn is_loopback(&self) -> bool {
        is_loopback(self.interface_host())
    }
}

/// Whether a host, with or without a port, is this machine by its spelling.
pub(super) fn is_loopback(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    name.eq_ignore_ascii_case("localhost")
        || name.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

impl FromStr for RegistryName {
    type Err = NotRegistryName;

    fn from_str(text: &str) -> Result<Self, NotRegistryName> {
        let bad = |why| NotRegistryName { why };
        let (host, rest) = text
            .split_once('/')
            .ok_or_else(|| bad("it has no repository after its host"))?;
        if !is_host(host) {
            return Err(bad(
                "its host is not a host name or address with an optional port",
            ));
        }
        let (rest, digest) = match rest.split_once('@') {
            None => (rest, None),
            Some((rest, digest)) => {
                let digest = digest
                    .parse()
                    .map_err(|_| bad("its digest is not sha256: and 64 hexadecimal digits"))?;
                (rest, Some(ManifestName::Digest(digest)))
            }
        };
        let (repository, tag) = match rest.split_once(':') {
            None => (rest, None),
            Some((repository, tag)) => {
                let tag = ManifestName::tag(tag).ok_or_else(|| {
                    bad("its tag is not 1 to 128 of A-Z a-z 0-9 _ . - beginning with none of . -")
                })?;
                (repository, Some(tag))
            }
        };
        if !is_repository(repository) {
            return Err(bad(
                "its repository is not segments of a-z 0-9 with single separators . _ - between, joined by /",
            ));
        }
        let library = host == "docker.io" && !repository.contains('/');
        Ok(Self {
            host: host.to_owned(),
            repository: if library {
                format!("library/{repository}")
            } else {
                repository.to_owned()
            },
            manifest: digest.or(tag),
        })
    }
}

impl fmt::Display for RegistryName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.host, self.repository)?;
        match &self.manifest {
            None => Ok(()),
            Some(ManifestName::Tag(tag)) => write!(f, ":{tag}"),
            Some(ManifestName::Digest(digest)) => write!(f, "@{digest}"),
        }
    }
}

/// Whether `text` is a tag.
pub(crate) fn is_tag(text: &str) -> bool {
    (1..=MAX_TAG).contains(&text.len())
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-'))
        && !text.starts_with(['.', '-'])
}

fn is_host(text: &str) -> bool {
    let (name, port) = match text.strip_prefix('[') {
        Some(rest) => match rest.split_once(']') {
            Some((address, port)) if address.parse::<IpAddr>().is_ok_and(|ip| ip.is_ipv6()) => {
                ("", port)
            }
            _ => return false,
        },
        None => match text.find(':') {
            Some(at) => text.split_at_checked(at).unwrap_or((text, "")),
            None => (text, ""),
        },
    };
    let port_is_good = port.is_empty()
        || port
            .strip_prefix(':')
            .is_some_and(|port| !port.starts_with('+') && port.parse::<u16>().is_ok_and(|p| p > 0));
    let label = |label: &str| {
        !label.is_empty()
            && label
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'))
    };
    port_is_good && text.len() <= 260 && (text.starts_with('[') || name.split('.').all(label))
}

fn is_repository(text: &str) -> bool {
    let segment = |segment: &str| {
        let bytes = segment.as_bytes();
        let alphanumeric = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit();
        let ends =
            bytes.first().is_some_and(alphanumeric) && bytes.last().is_some_and(alphanumeric);
        let between = segment
            .split(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit())
            .all(|gap| matches!(gap, "" | "." | "_" | "__") || gap.bytes().all(|b| b == b'-'));
        ends && between
    };
    (1..=MAX_REPOSITORY).contains(&text.len()) && text.split('/').all(segment)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_written() {
        let digest = Sha256::of(b"x");
        for (text, host, repository, manifest) in [
            ("a.example/b", "a.example", "b", None),
            (
                "h:5000/a/b-c--d/e_f__g.h:T.-_1",
                "h:5000",
                "a/b-c--d/e_f__g.h",
                Some("T.-_1".to_owned()),
            ),
            ("[::1]:5000/x:1", "[::1]:5000", "x", Some("1".to_owned())),
            (&format!("h/x@{digest}"), "h", "x", Some(digest.to_string())),
            (
                &format!("h/x:1@{digest}"),
                "h",
                "x",
                Some(digest.to_string()),
            ),
            (
                "docker.io/debian:12",
                "docker.io",
                "library/debian",
                Some("12".to_owned()),
            ),
            ("docker.io/a/b", "docker.io", "a/b", None),
        ] {
            let name: RegistryName = text.parse().unwrap();
            assert_eq!(name.host(), host, "{text}");
            assert_eq!(name.repository(), repository, "{text}");
            assert_eq!(name.manifest().map(ToString::to_string), manifest, "{text}");
            assert_eq!(name.to_string().parse(), Ok(name), "{text}");
        }
        let hub: RegistryName = "docker.io/debian".parse().unwrap();
        assert_eq!(hub.interface_host(), "registry-1.docker.io");
    }

    #[test]
    fn what_is_no_name_is_refused() {
        for bad in [
            "",
            "debian",
            "debian:12",
            "/x",
            "h/",
            "h/X",
            "h/a//b",
            "h/-a",
            "h/a-",
            "h/a..b",
            "h/a___b",
            "h/a:",
            "h/a:.x",
            "h/a:-x",
            "h/a@sha256:12",
            "h/a@",
            "h:0/a",
            "h:x/a",
            "h:99999/a",
            "h:/a",
            "h:+1/a",
            "u@h/a",
            "http://h/a",
            "h?x/a",
            "[::1/a",
            "[x]/a",
            "h..x/a",
            "h/a b",
            "h/a?x=1",
            "h/a#x",
        ] {
            assert!(bad.parse::<RegistryName>().is_err(), "{bad:?}");
        }
        assert!(
            format!("h/{}", "a".repeat(256))
                .parse::<RegistryName>()
                .is_err()
        );
        assert!(
            format!("h/a:{}", "a".repeat(129))
                .parse::<RegistryName>()
                .is_err()
        );
    }

    #[test]
    fn loopback_is_known_by_its_spelling() {
        for (host, loopback) in [
            ("localhost", true),
            ("localhost:5000", true),
            ("127.0.0.1:1", true),
            ("127.9.9.9", true),
            ("[::1]:5000", true),
            ("10.0.0.1", false),
            ("localhost.example", false),
            ("127.0.0.1.example", false),
            ("[::2]", false),
            ("example:127", false),
        ] {
            assert_eq!(is_loopback(host), loopback, "{host}");
        }
    }
}
