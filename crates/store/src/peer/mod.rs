//! What nodes say to each other: extents of layers, over plain HTTP. Both sides of it; who is asked
//! for what is not decided here.
//!
//! ```text
//! GET /v1/node                                    200, layerpack-node: ID
//! GET /v1/extents/LAYER?of=0-14,17&fill=1         200, layerpack-extents: 0-14, the bytes
//! ```
//!
//! `of` are numbers of extents in the layer's map, ascending. The answer names those that it has
//! and gives their bytes, one after the other, uncompressed. With `fill=1` the node asked may fetch
//! what it lacks from the store, never from another node. 404: it does not serve that layer; 503: it
//! has too much to do; 401: the token is missing or wrong (`authorization: Bearer TOKEN`).
//!
//! **An answer is not to be believed.** Who asks compares each extent with the layer's map, which the
//! manifest's digest covers. The token says who may read, and travels in the clear: peers belong on a
//! network of their own.

mod client;
mod server;
mod wire;

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::str::FromStr;

use crate::digest::Digest;
use crate::manifest::LayerId;

pub use client::{PeerClient, PeerError};
pub use server::{PeerServer, PeerService, Served};

/// Most extents that one request names.
pub const MAX_ASKED: usize = 4096;
/// Most ranges of extents that one request names.
pub const MAX_RANGES: usize = 512;
/// Longest token in bytes.
pub const MAX_TOKEN: usize = 512;

/// A request for extents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerAsk {
    /// The layer.
    pub layer: LayerId,
    /// Numbers of extents in its map, ascending.
    pub extents: Vec<u32>,
    /// Whether the node may fetch what it lacks from the store.
    pub fill: bool,
}

/// What a node has of it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PeerAnswer {
    /// Numbers of extents, ascending.
    pub extents: Vec<u32>,
    /// Their bytes, one after the other.
    pub bytes: Vec<u8>,
}

/// Where peers are.
#[derive(Debug, Clone, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct PeerSource {
    host: String,
    port: u16,
    /// All addresses of the name are peers, instead of one that has several.
    all: bool,
}

impl PeerSource {
    /// The addresses as the name has them now.
    ///
    /// # Errors
    /// When the name cannot be resolved.
    pub fn resolve(&self) -> io::Result<Vec<SocketAddr>> {
        let found = (self.host.as_str(), self.port).to_socket_addrs()?;
        let take = if self.all { MAX_PEERS } else { 1 };
        Ok(found.take(take).collect())
    }
}

/// Most peers that one name stands for.
const MAX_PEERS: usize = 1024;

impl std::fmt::Display for PeerSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = if self.all { "dns:" } else { "http://" };
        if self.host.contains(':') {
            write!(f, "{kind}[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{kind}{}:{}", self.host, self.port)
        }
    }
}

impl FromStr for PeerSource {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "{text:?} is no peer: write http://HOST:PORT, or dns:NAME:PORT for all addresses of a name"
            )
        };
        let (rest, all) = match (text.strip_prefix("http://"), text.strip_prefix("dns:")) {
            (Some(rest), _) => (rest.strip_suffix('/').unwrap_or(rest), false),
            (None, Some(rest)) => (rest, true),
            (None, None) => return Err(wrong()),
        };
        let (host, port) = rest.rsplit_once(':').ok_or_else(wrong)?;
        let port = port
            .parse::<u16>()
            .ok()
            .filter(|port| *port != 0)
            .ok_or_else(wrong)?;
        let bare = host
            .strip_prefix('[')
            .and_then(|host| host.strip_suffix(']'))
            .filter(|host| host.contains(':'));
        let plain = |host: &&str| {
            !host.is_empty()
                && host
                    .bytes()
                    .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
        };
        let host = bare
            .or_else(|| Some(host).filter(plain))
            .ok_or_else(wrong)?;
        Ok(Self {
            host: host.to_owned(),
            port,
            all,
        })
    }
}

/// What all peers know, and show to each other. It is serialised as it is, for those who keep it from one
/// process of a daemon to the next; it belongs into no file that others read.
#[derive(Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct PeerToken(String);

impl PeerToken {
    /// A token; white space around it does not count.
    ///
    /// # Errors
    /// If it has not 16 to [`MAX_TOKEN`] printable characters.
    pub fn new(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let fits = (16..=MAX_TOKEN).contains(&text.len());
        if !fits || !text.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(format!(
                "a token of peers has 16 to {MAX_TOKEN} letters, digits and signs, without spaces"
            ));
        }
        Ok(Self(text.to_owned()))
    }

    /// Whether that is it; takes as long for any other.
    fn is(&self, shown: &str) -> bool {
        Digest::of(self.0.as_bytes()) == Digest::of(shown.as_bytes())
    }
}

impl std::fmt::Debug for PeerToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PeerToken(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_are_named_by_address_or_name() {
        for text in [
            "http://10.0.0.1:7070",
            "http://[::1]:7070",
            "dns:peers.local:70",
        ] {
            assert_eq!(text.parse::<PeerSource>().unwrap().to_string(), text);
        }
        assert_eq!(
            "http://a:1/".parse::<PeerSource>().unwrap().to_string(),
            "http://a:1"
        );
        let all = "dns:localhost:7070".parse::<PeerSource>().unwrap();
        assert!(all.resolve().unwrap().iter().all(|a| a.ip().is_loopback()));
        for text in [
            "",
            "https://a:1",
            "http://a",
            "http://a:0",
            "http://:1",
            "a:1",
            "http://a b:1",
            "http://a:1/x",
            "dns:a",
            "http://u@h:1",
        ] {
            let error = text.parse::<PeerSource>().unwrap_err();
            assert!(error.contains("http://HOST:PORT"), "{error}");
        }
    }

    #[test]
    fn tokens_are_not_shown() {
        let token = PeerToken::new(" 0123456789abcdef\n").unwrap();
        assert!(token.is("0123456789abcdef") && !token.is("0123456789abcdeg"));
        assert!(!format!("{token:?}").contains("0123"));
        for text in ["", "short", "0123456789 abcdef", "0123456789\u{e9}abcdef"] {
            assert!(PeerToken::new(text).is_err(), "{text}");
        }
    }
}
