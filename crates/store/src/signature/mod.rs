//! Signatures of layers: who vouches for a manifest.
//!
//! A signature is ed25519 (RFC 8032) over a fixed prefix and the manifest's digest; the manifest
//! names everything else by digest, so it covers every byte of the layer and its name. It lies
//! beside the layer as an object of its own (FORMAT.md, section "Signatures"): signing changes no
//! digest, and several keys can sign one layer. Which keys are to be trusted is the caller's
//! business; nothing here decides it.

mod keys;

use serde::{Deserialize, Serialize};

pub use keys::{PublicKey, SigningKey};

use crate::blob::{PutMode, PutOutcome};
use crate::digest::Digest;
use crate::error::{Result, StoreError};
use crate::key::Key;
use crate::layer::LayerStore;

/// Largest signature object in bytes.
const MAX_SIGNATURE: u64 = 4 << 10;
/// Most signatures of one manifest that are looked at.
const MAX_SIGNATURES: usize = 1024;

#[derive(Debug, Serialize, Deserialize)]
struct Object {
    format: u32,
    key: PublicKey,
    signature: String,
}

/// One signature of a manifest as it was found.
#[derive(Debug)]
pub struct SignatureEntry {
    /// The object.
    pub object: Key,
    /// Whose valid signature it is, or why it is none.
    pub signer: Result<PublicKey>,
}

impl LayerStore {
    /// Signs the manifest with this digest, which must be in the store and whole. `false` if a
    /// good signature by this key was there.
    ///
    /// # Errors
    /// As [`LayerStore::manifest`], or if the signature cannot be written.
    pub fn sign(&self, manifest: &Digest, key: &SigningKey) -> Result<bool> {
        self.manifest(manifest)?;
        let public = key.public();
        let object_key = Key::signature(manifest, &public);
        let object = Object {
            format: 1,
            key: public,
            signature: key.sign(manifest),
        };
        let bytes = serde_json::to_vec(&object).unwrap_or_default();
        if self.blobs().put(&object_key, &bytes, PutMode::IfAbsent)? == PutOutcome::Created {
            return Ok(true);
        }
        match self.is_signed_by(manifest, &public) {
            Ok(true) => Ok(false),
            Ok(false) => self.replace_signature(&object_key, &bytes), // deleted meanwhile
            Err(error) if error.is_damage() => self.replace_signature(&object_key, &bytes),
            Err(error) => Err(error),
        }
    }

    fn replace_signature(&self, key: &Key, bytes: &[u8]) -> Result<bool> {
        self.blobs().put(key, bytes, PutMode::Overwrite)?;
        Ok(true)
    }

    /// Whether the store holds a good signature of the manifest by this key. Needs no list, so it
    /// works on every backend.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] if there is a signature that is none of this key and manifest; or
    /// if the backend fails.
    pub fn is_signed_by(&self, manifest: &Digest, public: &PublicKey) -> Result<bool> {
        let key = Key::signature(manifest, public);
        let good = self.get_checked(&key, MAX_SIGNATURE, &mut |bytes| {
            self.check_signature(manifest, public, &key, bytes)
        })?;
        Ok(good.is_some())
    }

    /// All signatures of a manifest, sorted by key, each with its own error: a damaged or foreign
    /// one hides no other.
    ///
    /// # Errors
    /// If the store cannot list, or there are more than 1,024.
    pub fn signatures(&self, manifest: &Digest) -> Result<Vec<SignatureEntry>> {
        let prefix = format!("signatures/{}/", manifest.hex());
        let objects = self.blobs().list(&prefix)?;
        if objects.len() > MAX_SIGNATURES {
            return Err(StoreError::InvalidInput {
                object: format!("manifest {manifest}"),
                what: format!(
                    "it has {} signatures, at most {MAX_SIGNATURES} are looked at",
                    objects.len()
                ),
            });
        }
        let mut entries = Vec::with_capacity(objects.len());
        for object in objects {
            let signer = self.signer(manifest, &object.key);
            if let Some(signer) = signer.transpose() {
                entries.push(SignatureEntry {
                    object: object.key,
                    signer,
                });
            }
        }
        Ok(entries)
    }

    /// Whose signature an object is; `None` if it was deleted meanwhile.
    pub(crate) fn signer(&self, manifest: &Digest, key: &Key) -> Result<Option<PublicKey>> {
        let named = key
            .as_str()
            .rsplit('/')
            .next()
            .and_then(PublicKey::from_hex)
            .ok_or_else(|| self.bad_signature(key, "its name is no public key"))?;
        let good = self.get_checked(key, MAX_SIGNATURE, &mut |bytes| {
            self.check_signature(manifest, &named, key, bytes)
        })?;
        Ok(good.map(|()| named))
    }

    fn check_signature(
        &self,
        manifest: &Digest,
        public: &PublicKey,
        key: &Key,
        bytes: &[u8],
    ) -> Result<()> {
        let object: Object =
            serde_json::from_slice(bytes).map_err(|e| self.bad_signature(key, e.to_string()))?;
        if object.format != 1 {
            return Err(StoreError::Unsupported {
                object: format!("object {key} in store {}", self.url()),
                what: format!("its format is {}, known is 1", object.format),
            });
        }
        if object.key != *public {
            return Err(self.bad_signature(key, "it names another key than its own name does"));
        }
        if public.verify(manifest, &object.signature) {
            Ok(())
        } else {
            Err(self.bad_signature(key, format!("it is no signature of {manifest} by its key")))
        }
    }

    fn bad_signature(&self, key: &Key, what: impl Into<String>) -> StoreError {
        StoreError::Corrupt {
            store: self.url().to_owned(),
            key: key.as_str().to_owned(),
            range: None,
            what: what.into(),
        }
    }
}
