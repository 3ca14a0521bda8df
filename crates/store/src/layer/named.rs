//! The object of a reference: which manifest a version is, and a copy of that manifest.
//!
//! The copy saves readers a round trip: who has resolved a name has the manifest too. It is believed
//! for its digest, which is the one that the reference names, and for nothing else. A reference without
//! a copy, or with one that is something else, is read as ever: the object under `manifests/` is the
//! manifest, and is durable before the reference is written.

use serde::{Deserialize, Deserializer, Serialize};

use super::{LayerStore, MAX_SMALL};
use crate::digest::Digest;
use crate::error::{FormatError, Result, StoreError};
use crate::key::Key;
use crate::manifest::Manifest;
use crate::reference::Reference;

/// Largest reference object in bytes that is written with a copy of its manifest.
const MAX_WITH_COPY: usize = 16 << 10;

/// A reference as it is stored.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Named {
    format: u32,
    /// Digest of the version's manifest.
    pub(super) manifest: Digest,
    /// The manifest's bytes, as text. What is no text counts as none.
    #[serde(
        default,
        deserialize_with = "text_or_none",
        skip_serializing_if = "Option::is_none"
    )]
    text: Option<String>,
}

fn text_or_none<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    Ok(match serde_json::Value::deserialize(deserializer)? {
        serde_json::Value::String(text) => Some(text),
        _ => None,
    })
}

impl Named {
    /// The bytes of a reference to the manifest with these bytes. They depend on nothing else.
    pub(super) fn object(manifest: &[u8]) -> Vec<u8> {
        let bytes_of = |text: Option<&str>| {
            serde_json::to_vec(&Self {
                format: 1,
                manifest: Digest::of(manifest),
                text: text.map(str::to_owned),
            })
            .unwrap_or_default()
        };
        let text = std::str::from_utf8(manifest).ok();
        let with_copy = text
            .filter(|text| text.len() < MAX_WITH_COPY)
            .map(|text| bytes_of(Some(text)))
            .filter(|bytes| bytes.len() <= MAX_WITH_COPY);
        with_copy.unwrap_or_else(|| bytes_of(None))
    }

    /// Whether what it has as a copy is another text than the manifest.
    fn has_wrong_copy(&self) -> bool {
        self.text
            .as_ref()
            .is_some_and(|text| Digest::of(text.as_bytes()) != self.manifest)
    }

    /// The manifest by the copy, if that is the manifest, and one of this reference.
    pub(super) fn copy_for(&self, reference: &Reference) -> Option<Manifest> {
        let text = self.text.as_ref()?;
        if self.has_wrong_copy() {
            tracing::debug!(%reference, "its copy of the manifest is not that manifest; it is read");
            return None;
        }
        let manifest = Manifest::from_bytes(text.as_bytes()).ok()?;
        (&manifest.reference() == reference).then_some(manifest)
    }
}

impl LayerStore {
    /// What a reference says; `None` if there is none.
    pub(super) fn read_named(&self, reference: &Reference) -> Result<Option<Named>> {
        self.read_named_if(reference, &|_| Ok(()))
    }

    /// As [`LayerStore::read_named`]. One that `check` finds wrong is read again.
    fn read_named_if(
        &self,
        reference: &Reference,
        check: &dyn Fn(&Named) -> Result<()>,
    ) -> Result<Option<Named>> {
        let key = Key::reference(reference);
        let read = self.get_checked(&key, MAX_SMALL, &mut |bytes| {
            let named: Named = serde_json::from_slice(bytes)
                .map_err(|e| self.damaged_ref(reference, e.to_string()))?;
            if named.format != 1 {
                let what = format!("its format is {}, known is 1", named.format);
                return Err(self.bad(&key, &FormatError::newer("reference", what)));
            }
            check(&named)?;
            Ok(named)
        });
        match read {
            Err(StoreError::TooLarge { size, .. }) => {
                Err(self.damaged_ref(reference, format!("it has {size} bytes")))
            }
            read => read,
        }
    }

    /// The manifest that a reference names, with its digest, by the copy in it alone; `None` if it
    /// has no right one.
    pub(crate) fn copy_in(&self, reference: &Reference) -> Result<Option<(Digest, Manifest)>> {
        let named = self.read_named(reference)?;
        Ok(named.and_then(|named| Some((named.manifest, named.copy_for(reference)?))))
    }

    /// That the copy of the manifest in a reference, if there is one, is that manifest. Readers do
    /// without a wrong one, so it is damage that costs nobody a byte.
    ///
    /// # Errors
    /// [`StoreError::DamagedReference`]; else what the backend fails with.
    pub(crate) fn check_copy(&self, reference: &Reference) -> Result<()> {
        let sound = |named: &Named| match named.has_wrong_copy() {
            true => Err(self.damaged_ref(
                reference,
                "its copy of the manifest is not that manifest; readers pass over it".to_owned(),
            )),
            false => Ok(()),
        };
        self.read_named_if(reference, &sound).map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_goes_along_while_the_object_stays_small() {
        let small = Named::object(b"{\"a\":\"b\"}");
        let digest = Digest::of(b"{\"a\":\"b\"}");
        let expected = format!(r#"{{"format":1,"manifest":"{digest}","text":"{{\"a\":\"b\"}}"}}"#);
        assert_eq!(String::from_utf8(small).unwrap(), expected);
        // Its quotes take two bytes each.
        for (manifest, copied) in [
            (vec![b'x'; MAX_WITH_COPY - 103], true),
            (vec![b'x'; MAX_WITH_COPY - 102], false),
            (vec![b'"'; MAX_WITH_COPY / 2], false),
            (vec![b'x'; MAX_WITH_COPY * 10], false),
            (vec![0xff; 10], false),
        ] {
            let object = Named::object(&manifest);
            assert!(object.len() <= MAX_WITH_COPY);
            let named: Named = serde_json::from_slice(&object).unwrap();
            assert_eq!(named.manifest, Digest::of(&manifest));
            assert_eq!(named.text.is_some(), copied, "{}", object.len());
        }
    }

    #[test]
    fn what_is_no_text_is_no_copy() {
        let digest = Digest::of(b"x");
        for value in ["null", "5", "{}", "[\"x\"]", "true"] {
            let object = format!(r#"{{"format":1,"manifest":"{digest}","text":{value},"b":1}}"#);
            let named: Named = serde_json::from_str(&object).unwrap();
            assert!(named.text.is_none() && !named.has_wrong_copy());
        }
    }
}
