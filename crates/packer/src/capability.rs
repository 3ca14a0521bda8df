//! File capabilities (`security.capability`) under an id map.
//!
//! Revision 3 names the user who is root in the namespace that gave the capabilities, revision 2
//! means the root of wherever the file is mounted. In a layer that user is given as the sandbox
//! sees it, and the sandbox's own root as revision 2, so that a later sandbox with another map
//! honours them.

use crate::error::PackError;

const REVISION_MASK: u32 = 0xff00_0000;
const REVISION_1: u32 = 0x0100_0000;
const REVISION_2: u32 = 0x0200_0000;
const REVISION_3: u32 = 0x0300_0000;

/// Maps the root user of a value with `user`. None: the value has no known form.
pub(crate) fn map_root(
    value: &[u8],
    user: impl Fn(u32) -> Result<u32, PackError>,
) -> Result<Option<Vec<u8>>, PackError> {
    let Some((magic, rest)) = value.split_first_chunk::<4>() else {
        return Ok(None);
    };
    let magic = u32::from_le_bytes(*magic);
    match (magic & REVISION_MASK, rest.len()) {
        (REVISION_1, 8) | (REVISION_2, 16) => Ok(Some(value.to_vec())),
        (REVISION_3, 20) => {
            let Some((sets, root)) = rest.split_last_chunk::<4>() else {
                return Ok(None);
            };
            let root = user(u32::from_le_bytes(*root))?;
            let mut mapped = Vec::with_capacity(value.len());
            if root == 0 {
                mapped.extend_from_slice(&(magic & !REVISION_MASK | REVISION_2).to_le_bytes());
                mapped.extend_from_slice(sets);
            } else {
                mapped.extend_from_slice(&magic.to_le_bytes());
                mapped.extend_from_slice(sets);
                mapped.extend_from_slice(&root.to_le_bytes());
            }
            Ok(Some(mapped))
        }
        _ => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sandboxs_root_becomes_everybodys() {
        let mut value = (REVISION_3 | 1).to_le_bytes().to_vec();
        value.extend_from_slice(&[7; 16]);
        value.extend_from_slice(&100_000u32.to_le_bytes());
        let shift = |id: u32| Ok(id - 100_000);
        let mut expected = (REVISION_2 | 1).to_le_bytes().to_vec();
        expected.extend_from_slice(&[7; 16]);
        assert_eq!(map_root(&value, shift).unwrap().unwrap(), expected);
        assert_eq!(map_root(&expected, shift).unwrap().unwrap(), expected);
        let other = map_root(&value, |id| Ok(id - 99_999)).unwrap().unwrap();
        assert_eq!(other.len(), 24);
        assert_eq!(&other[20..], &1u32.to_le_bytes());
        assert_eq!(map_root(&value[..23], shift).unwrap(), None);
        assert_eq!(map_root(b"", shift).unwrap(), None);
    }
}
