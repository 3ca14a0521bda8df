//! Small JSON objects that a wrong bit must not change in silence: the first line is the digest of
//! the rest. A key that is misread here would be an object that is deleted or not protected.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::digest::Digest;
use crate::error::FormatError;

/// The object's bytes: `b3:HEX\n` and the JSON.
pub(super) fn seal<T: Serialize>(name: &'static str, value: &T) -> Result<Vec<u8>, FormatError> {
    let json = serde_json::to_vec(value).map_err(|e| FormatError::new(name, e.to_string()))?;
    let mut bytes = format!("{}\n", Digest::of(&json)).into_bytes();
    bytes.extend_from_slice(&json);
    Ok(bytes)
}

/// The value, if the bytes are exactly what was sealed.
pub(super) fn unseal<T: DeserializeOwned>(
    name: &'static str,
    bytes: &[u8],
) -> Result<T, FormatError> {
    let end = bytes.iter().position(|b| *b == b'\n');
    let (head, json) = end
        .and_then(|end| Some((bytes.get(..end)?, bytes.get(end + 1..)?)))
        .ok_or_else(|| FormatError::new(name, "it has no first line"))?;
    let digest = std::str::from_utf8(head)
        .ok()
        .and_then(|text| text.parse::<Digest>().ok())
        .ok_or_else(|| FormatError::new(name, "its first line is no digest"))?;
    if Digest::of(json) != digest {
        return Err(FormatError::new(
            name,
            "its bytes are not those of its digest",
        ));
    }
    serde_json::from_slice(json).map_err(|e| FormatError::new(name, e.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_changed_bit_is_noticed() {
        let sealed = seal("test", &vec!["packs/aa/bb".to_owned()]).unwrap();
        let value: Vec<String> = unseal("test", &sealed).unwrap();
        assert_eq!(value, ["packs/aa/bb"]);
        for at in 0..sealed.len() {
            for bit in 0..8 {
                let mut bent = sealed.clone();
                bent[at] ^= 1 << bit;
                assert!(
                    unseal::<Vec<String>>("test", &bent).is_err(),
                    "byte {at} bit {bit}"
                );
            }
            assert!(unseal::<Vec<String>>("test", &sealed[..at]).is_err());
        }
    }
}
