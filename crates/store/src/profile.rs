//! Access profiles in a store: `profiles/<layer id of the stack's top>/<digest of the profile>`.
//! They are found by the layer that they lie with and go along when it is copied.

pub use crate::format::profile::{
    MAX_PROFILE_BYTES, MAX_PROFILE_ENTRIES, MAX_PROFILE_LAYERS, MAX_PROFILE_NAME, Profile,
    ProfileEntry, ProfileLayer,
};

use crate::blob::PutMode;
use crate::digest::Digest;
use crate::error::{Result, StoreError};
use crate::key::Key;
use crate::layer::LayerStore;
use crate::manifest::LayerId;

/// A profile in a list.
#[derive(Debug)]
pub struct StoredProfile {
    /// Digest of its bytes.
    pub digest: Digest,
    /// The profile, or why it cannot be read.
    pub profile: Result<Profile>,
}

impl LayerStore {
    /// Stores a profile. Its digest.
    ///
    /// # Errors
    /// If an invariant of [`Profile`] does not hold or the backend fails.
    pub fn put_profile(&self, profile: &Profile) -> Result<Digest> {
        let bytes = profile.to_bytes()?;
        let digest = Digest::of(&bytes);
        let top = profile.layers.last().ok_or_else(|| {
            StoreError::from(crate::error::FormatError::new("LPPROF", "it has no layers"))
        })?;
        let key = Key::profile(&top.layer, &digest);
        self.blobs().put(&key, &bytes, PutMode::IfAbsent)?;
        Ok(digest)
    }

    /// The store's profiles, of one layer's or of all stacks, in the order of their keys. A
    /// damaged one does not hide the others.
    ///
    /// # Errors
    /// If the list cannot be read.
    pub fn profiles(&self, top: Option<&LayerId>) -> Result<Vec<StoredProfile>> {
        let prefix = match top {
            Some(layer) => format!("profiles/{}/", layer.hex()),
            None => "profiles/".to_owned(),
        };
        let mut profiles = Vec::new();
        for object in self.blobs().list(&prefix)? {
            let Some(digest) = object.key.digest() else {
                continue;
            };
            match self.read_profile(&object.key, &digest) {
                Ok(None) => {} // removed meanwhile
                Ok(Some(profile)) => profiles.push(StoredProfile {
                    digest,
                    profile: Ok(profile),
                }),
                Err(error) => profiles.push(StoredProfile {
                    digest,
                    profile: Err(error),
                }),
            }
        }
        Ok(profiles)
    }

    /// The profile with this name, or whose digest begins with this text (`b3:` and at least 6
    /// digits). Of several with one name the last in the order of their digests is not better
    /// than the others: that is an error.
    ///
    /// # Errors
    /// [`StoreError::NoProfile`] if none or several match, [`StoreError::NoStore`] if there is no
    /// store; damage of the one that matches.
    pub fn find_profile(&self, text: &str) -> Result<(Digest, Profile)> {
        let prefix = text.strip_prefix("b3:").filter(|hex| hex.len() >= 6);
        let mut found = Vec::new();
        for stored in self.profiles(None)? {
            match (prefix, stored.profile) {
                (Some(prefix), profile) if stored.digest.hex().starts_with(prefix) => {
                    found.push((stored.digest, profile?));
                }
                (None, Ok(profile)) if profile.name == text => found.push((stored.digest, profile)),
                _ => {}
            }
        }
        let invalid = |what: String| StoreError::NoProfile {
            name: text.chars().take(300).collect(),
            store: self.url().to_owned(),
            what,
        };
        match (found.pop(), found.len()) {
            (Some(one), 0) => Ok(one),
            (None, _) => {
                Err(self.not_here(invalid("there is none with this name or digest".to_owned())))
            }
            (Some(_), more) => Err(invalid(format!("{} match it", more + 1))),
        }
    }

    /// As [`LayerStore::find_profile`], for a stack: with a whole digest no list is asked for if
    /// the profile lies with one of these layers, so that it is found where nothing can be listed.
    ///
    /// # Errors
    /// As [`LayerStore::find_profile`].
    pub fn find_profile_of(&self, text: &str, stack: &[LayerId]) -> Result<(Digest, Profile)> {
        if let Ok(digest) = text.parse::<Digest>() {
            for top in stack.iter().rev() {
                if let Some(profile) = self.read_profile(&Key::profile(top, &digest), &digest)? {
                    return Ok((digest, profile));
                }
            }
        }
        self.find_profile(text)
    }

    /// Removes a profile; `false` if there was none.
    ///
    /// # Errors
    /// If the backend fails.
    pub fn remove_profile(&self, digest: &Digest, profile: &Profile) -> Result<bool> {
        match profile.layers.last() {
            Some(top) => self.blobs().delete(&Key::profile(&top.layer, digest)),
            None => Ok(false),
        }
    }

    fn read_profile(&self, key: &Key, digest: &Digest) -> Result<Option<Profile>> {
        let wrong = |what: String| StoreError::Corrupt {
            store: self.url().to_owned(),
            key: key.to_string(),
            range: None,
            what,
        };
        self.get_checked(key, MAX_PROFILE_BYTES, &mut |bytes| {
            let found = Digest::of(bytes);
            if &found != digest {
                return Err(wrong(format!("its digest is {found}")));
            }
            let profile = Profile::parse(bytes)
                .map_err(|e| StoreError::format(self.url(), key.as_str(), &e))?;
            let top = profile.layers.last();
            if top.is_none_or(|top| &Key::profile(&top.layer, digest) != key) {
                return Err(wrong("it is of another layer than its key says".to_owned()));
            }
            Ok(profile)
        })
    }
}
