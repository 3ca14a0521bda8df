//! Keys of signatures: ed25519, as text. What a key signs is fixed here.

use std::fmt;
use std::str::FromStr;

use ed25519_dalek::{Signature, Signer as _};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::digest::Digest;
use crate::error::StoreError;

/// Separates these signatures from any other use of the same key.
const DOMAIN: &[u8] = b"layerpack signature v1\0";
const PUBLIC_PREFIX: &str = "ed25519:";
const SECRET_PREFIX: &str = "ed25519-secret:";

fn message(manifest: &Digest) -> Vec<u8> {
    let mut message = DOMAIN.to_vec();
    message.extend_from_slice(manifest.as_bytes());
    message
}

fn invalid(why: impl Into<String>) -> StoreError {
    StoreError::InvalidSigningKey { why: why.into() }
}

/// A key that checks signatures. As text: `ed25519:` and 64 lowercase hex digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PublicKey([u8; 32]);

impl PublicKey {
    /// The 64 hex digits that stand for the key in names of objects.
    #[must_use]
    pub fn hex(&self) -> String {
        hex::encode(self.0)
    }

    /// The key with these 64 lowercase hex digits; `None` if they are none of a usable key.
    #[must_use]
    pub fn from_hex(text: &str) -> Option<Self> {
        if text.len() != 64 || text.bytes().any(|b| b.is_ascii_uppercase()) {
            return None;
        }
        let bytes: [u8; 32] = hex::decode(text).ok()?.try_into().ok()?;
        let key = ed25519_dalek::VerifyingKey::from_bytes(&bytes).ok()?;
        // A weak key would accept one signature for many messages.
        (!key.is_weak()).then_some(Self(bytes))
    }

    /// Whether `signature` (128 hex digits) is this key's of the manifest.
    #[must_use]
    pub fn verify(&self, manifest: &Digest, signature: &str) -> bool {
        let Ok(key) = ed25519_dalek::VerifyingKey::from_bytes(&self.0) else {
            return false;
        };
        let bytes: Option<[u8; 64]> = hex::decode(signature).ok().and_then(|b| b.try_into().ok());
        bytes.is_some_and(|bytes| {
            key.verify_strict(&message(manifest), &Signature::from_bytes(&bytes))
                .is_ok()
        })
    }
}

impl FromStr for PublicKey {
    type Err = StoreError;

    fn from_str(text: &str) -> Result<Self, StoreError> {
        text.trim()
            .strip_prefix(PUBLIC_PREFIX)
            .and_then(Self::from_hex)
            .ok_or_else(|| invalid("a public key is ed25519: and 64 lowercase hexadecimal digits"))
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PUBLIC_PREFIX}{}", self.hex())
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for PublicKey {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for PublicKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(de::Error::custom)
    }
}

/// A key that signs. Never printed by `Debug`; wiped from memory when dropped.
pub struct SigningKey(ed25519_dalek::SigningKey);

impl SigningKey {
    /// A new key from the system's random numbers.
    ///
    /// # Errors
    /// If the system has none to give.
    pub fn generate() -> Result<Self, StoreError> {
        let mut seed = [0_u8; 32];
        getrandom::fill(&mut seed).map_err(|e| invalid(format!("no random numbers: {e}")))?;
        Ok(Self(ed25519_dalek::SigningKey::from_bytes(&seed)))
    }

    /// The key in the text of a key file: the first line that is neither empty nor a comment
    /// (`#`) is `ed25519-secret:` and 64 lowercase hex digits, and there is no other.
    ///
    /// # Errors
    /// [`StoreError::InvalidSigningKey`], which never repeats the text.
    pub fn from_text(text: &str) -> Result<Self, StoreError> {
        let mut lines = text
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty() && !line.starts_with('#'));
        let (Some(line), None) = (lines.next(), lines.next()) else {
            return Err(invalid("a key file has one line besides comments"));
        };
        if line.starts_with(PUBLIC_PREFIX) {
            return Err(invalid("this is a public key, which cannot sign"));
        }
        let seed: Option<[u8; 32]> = line
            .strip_prefix(SECRET_PREFIX)
            .filter(|text| text.len() == 64)
            .and_then(|text| hex::decode(text).ok())
            .and_then(|bytes| bytes.try_into().ok());
        let seed = seed.ok_or_else(|| {
            invalid("a secret key is ed25519-secret: and 64 lowercase hexadecimal digits")
        })?;
        Ok(Self(ed25519_dalek::SigningKey::from_bytes(&seed)))
    }

    /// The text of a key file: a secret.
    #[must_use]
    pub fn to_text(&self) -> String {
        format!(
            "# A secret: whoever has it signs layers in its name. Public key: {}\n{SECRET_PREFIX}{}\n",
            self.public(),
            hex::encode(self.0.to_bytes())
        )
    }

    /// The key that checks what this one signs.
    #[must_use]
    pub fn public(&self) -> PublicKey {
        PublicKey(self.0.verifying_key().to_bytes())
    }

    /// The signature of a manifest: 128 hex digits.
    #[must_use]
    pub fn sign(&self, manifest: &Digest) -> String {
        hex::encode(self.0.sign(&message(manifest)).to_bytes())
    }
}

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SigningKey({})", self.public())
    }
}
