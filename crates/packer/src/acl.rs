//! POSIX ACLs: from the text in archives to the attribute's bytes, and the ids within them.
//!
//! The attribute (`system.posix_acl_access` and `_default`): a version word of 2, then entries
//! of tag u16, permissions u16, id u32, little endian, sorted by tag and id.

use crate::error::PackError;

const VERSION: u32 = 2;
const NO_ID: u32 = u32::MAX;
const USER_OBJ: u16 = 0x01;
const USER: u16 = 0x02;
const GROUP_OBJ: u16 = 0x04;
const GROUP: u16 = 0x08;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;

/// Reads the text that tar writers put into `SCHILY.acl.*`: entries `tag:qualifier:permissions`
/// with an optional fourth field for the qualifier's number (star), separated by commas or line
/// ends. Names without a number cannot be resolved here: they are an error.
///
/// None: the ACL says nothing that the mode does not say.
pub(crate) fn from_text(text: &[u8]) -> Result<Option<Vec<u8>>, String> {
    let mut entries: Vec<(u16, u32, u16)> = Vec::new();
    for line in text.split(|&byte| byte == b',' || byte == b'\n') {
        let line = line
            .split(|&byte| byte == b'#')
            .next()
            .unwrap_or_default()
            .trim_ascii();
        if line.is_empty() {
            continue;
        }
        let bad = || format!("ACL entry {:?} is not one", crate::show(line));
        let mut fields = line.split(|&byte| byte == b':').map(<[u8]>::trim_ascii);
        let (tag, qualifier, permissions) = (fields.next(), fields.next(), fields.next());
        let number = fields.next();
        let (Some(tag), Some(mut qualifier), permissions) = (tag, qualifier, permissions) else {
            return Err(bad());
        };
        // `mask:rwx` and `other:rwx` may come with one colon.
        let permissions = match permissions {
            Some(permissions) => permissions,
            None => std::mem::take(&mut qualifier),
        };
        let permissions = permission_bits(permissions).ok_or_else(bad)?;
        let id = match (qualifier, number) {
            (b"", _) => None,
            (_, Some(number)) => Some(crate::tar::decimal(number).ok_or_else(bad)?),
            (name, None) => Some(crate::tar::decimal(name).ok_or_else(|| {
                format!("ACL entry {:?} names an account by name; make the archive with --numeric-owner", crate::show(line))
            })?),
        };
        let id = id.map(u32::try_from).transpose().map_err(|_| bad())?;
        let (tag, id) = match (tag, id) {
            (b"user" | b"u", None) => (USER_OBJ, NO_ID),
            (b"user" | b"u", Some(id)) => (USER, id),
            (b"group" | b"g", None) => (GROUP_OBJ, NO_ID),
            (b"group" | b"g", Some(id)) => (GROUP, id),
            (b"mask" | b"m", None) => (MASK, NO_ID),
            (b"other" | b"o", None) => (OTHER, NO_ID),
            _ => return Err(bad()),
        };
        entries.push((tag, id, permissions));
    }
    entries.sort_unstable();
    if entries
        .windows(2)
        .any(|pair| matches!(pair, [a, b] if (a.0, a.1) == (b.0, b.1)))
    {
        return Err("an ACL has an entry twice".to_owned());
    }
    if entries
        .iter()
        .all(|entry| matches!(entry.0, USER_OBJ | GROUP_OBJ | OTHER))
    {
        return Ok(None);
    }
    let mut bytes = VERSION.to_le_bytes().to_vec();
    for (tag, id, permissions) in entries {
        bytes.extend_from_slice(&tag.to_le_bytes());
        bytes.extend_from_slice(&permissions.to_le_bytes());
        bytes.extend_from_slice(&id.to_le_bytes());
    }
    Ok(Some(bytes))
}

/// The text that [`from_text`] makes these bytes of, as GNU tar writes it: entries with commas
/// between them, ids as numbers. `None`: they are no ACL.
pub(crate) fn to_text(value: &[u8]) -> Option<String> {
    let (_, entries) = value.split_first_chunk::<4>()?;
    if !is_valid(value) || entries.is_empty() {
        return None;
    }
    let mut parts = Vec::new();
    for &[t0, t1, p0, p1, i0, i1, i2, i3] in entries.as_chunks::<8>().0 {
        let id = u32::from_le_bytes([i0, i1, i2, i3]);
        let (tag, qualifier) = match u16::from_le_bytes([t0, t1]) {
            USER_OBJ => ("user", String::new()),
            USER => ("user", id.to_string()),
            GROUP_OBJ => ("group", String::new()),
            GROUP => ("group", id.to_string()),
            MASK => ("mask", String::new()),
            _ => ("other", String::new()),
        };
        let bits = u16::from_le_bytes([p0, p1]);
        let letter = |bit, letter| if bits & bit != 0 { letter } else { '-' };
        let (r, w, x) = (letter(4, 'r'), letter(2, 'w'), letter(1, 'x'));
        parts.push(format!("{tag}:{qualifier}:{r}{w}{x}"));
    }
    Some(parts.join(","))
}

fn permission_bits(text: &[u8]) -> Option<u16> {
    text.iter().try_fold(0, |bits, &byte| {
        Some(
            bits | match byte {
                b'r' => 4,
                b'w' => 2,
                b'x' => 1,
                b'-' => 0,
                _ => return None,
            },
        )
    })
}

/// Whether the kernel takes the bytes for an ACL (its `posix_acl_valid`). It fails every access to a
/// file with another one by anybody but its owner.
pub(crate) fn is_valid(value: &[u8]) -> bool {
    let Some((version, entries)) = value.split_first_chunk::<4>() else {
        return false;
    };
    let (entries, rest) = entries.as_chunks::<8>();
    if u32::from_le_bytes(*version) != VERSION || !rest.is_empty() {
        return false;
    }
    // The tags that may come next; named entries need a mask.
    let (mut next, mut masked) = (USER_OBJ, true);
    for &[t0, t1, p0, p1, i0, i1, i2, i3] in entries {
        let tag = u16::from_le_bytes([t0, t1]);
        let id = u32::from_le_bytes([i0, i1, i2, i3]);
        let named = matches!(tag, USER | GROUP);
        if u16::from_le_bytes([p0, p1]) > 7 || next & tag == 0 || (named && id == NO_ID) {
            return false;
        }
        next = match tag {
            USER_OBJ | USER => USER | GROUP_OBJ,
            GROUP_OBJ | GROUP => GROUP | MASK | OTHER,
            MASK => OTHER,
            OTHER => 0,
            _ => return false, // several tags at once
        };
        masked = (masked && !named) || tag == MASK;
    }
    masked && (next == 0 || entries.is_empty())
}

/// Maps the ids in an ACL's bytes. Ids that `user` or `group` cannot map are its error.
pub(crate) fn map_ids(
    value: &[u8],
    user: impl Fn(u32) -> Result<u32, PackError>,
    group: impl Fn(u32) -> Result<u32, PackError>,
) -> Result<Option<Vec<u8>>, PackError> {
    let Some((version, entries)) = value.split_first_chunk::<4>() else {
        return Ok(None);
    };
    let (entries, rest) = entries.as_chunks::<8>();
    if u32::from_le_bytes(*version) != VERSION || !rest.is_empty() {
        return Ok(None);
    }
    let mut mapped = Vec::new();
    for &[t0, t1, p0, p1, i0, i1, i2, i3] in entries {
        let tag = u16::from_le_bytes([t0, t1]);
        let id = u32::from_le_bytes([i0, i1, i2, i3]);
        let id = match tag {
            USER => user(id)?,
            GROUP => group(id)?,
            _ => id,
        };
        mapped.push((tag, id, [p0, p1]));
    }
    mapped.sort_unstable();
    let mut bytes = version.to_vec();
    for (tag, id, permissions) in mapped {
        bytes.extend_from_slice(&tag.to_le_bytes());
        bytes.extend_from_slice(&permissions);
        bytes.extend_from_slice(&id.to_le_bytes());
    }
    Ok(Some(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_becomes_the_kernels_bytes() {
        let acl = from_text(b"user::rw-,user:1000:r--,group::r--,mask::r--,other::---")
            .unwrap()
            .unwrap();
        let mut expected = vec![2, 0, 0, 0];
        for (tag, permissions, id) in [
            (1u16, 6u16, NO_ID),
            (2, 4, 1000),
            (4, 4, NO_ID),
            (16, 4, NO_ID),
            (32, 0, NO_ID),
        ] {
            expected.extend_from_slice(&tag.to_le_bytes());
            expected.extend_from_slice(&permissions.to_le_bytes());
            expected.extend_from_slice(&id.to_le_bytes());
        }
        assert_eq!(acl, expected);
        assert_eq!(
            to_text(&acl).as_deref(),
            Some("user::rw-,user:1000:r--,group::r--,mask::r--,other::---")
        );
        let all =
            "user::rwx,user:0:--x,user:4294967294:-w-,group::r-x,group:7:rwx,mask::rwx,other::r--";
        let bytes = from_text(all.as_bytes()).unwrap().unwrap();
        assert_eq!(to_text(&bytes).as_deref(), Some(all));
        for bad in [&b""[..], &[2, 0, 0, 0], &expected[..11], &[7; 28]] {
            assert_eq!(to_text(bad), None);
        }
        let star =
            from_text(b"other::---\nuser::rw-\nuser:joe:r--:1000\ngroup::r--\nmask::r-- # all\n")
                .unwrap()
                .unwrap();
        assert_eq!(star, expected);
        assert_eq!(from_text(b"u::rw-,g::r--,o:r--").unwrap(), None);
        for bad in [
            "user:joe:rw-",
            "user::rz-",
            "x::rwx",
            "user",
            "user:1:r--,user:1:rw-",
            "user:4294967296:r--",
        ] {
            assert!(from_text(bad.as_bytes()).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_the_kernel_takes_is_valid() {
        let acl = |entries: &[(u16, u16, u32)]| {
            let mut bytes = VERSION.to_le_bytes().to_vec();
            for (tag, permissions, id) in entries {
                bytes.extend_from_slice(&tag.to_le_bytes());
                bytes.extend_from_slice(&permissions.to_le_bytes());
                bytes.extend_from_slice(&id.to_le_bytes());
            }
            bytes
        };
        let (user, group, mask) = (
            (USER_OBJ, 7, NO_ID),
            (GROUP_OBJ, 5, NO_ID),
            (MASK, 7, NO_ID),
        );
        let other = (OTHER, 0, NO_ID);
        let (named, names) = ((USER, 4, 1000), (GROUP, 4, 1000));
        for good in [
            &[user, group, other][..],
            &[user, group, mask, other],
            &[user, named, named, group, names, mask, other],
            &[],
        ] {
            assert!(is_valid(&acl(good)), "{good:?}");
        }
        for bad in [
            &[user, group][..],
            &[group, other],
            &[user, other],
            &[user, named, group, other],
            &[user, group, named, mask, other],
            &[user, group, mask, mask, other],
            &[user, group, other, other],
            &[(USER_OBJ, 8, NO_ID), group, other],
            &[user, (USER, 4, NO_ID), group, mask, other],
            &[(USER_OBJ | USER, 7, NO_ID), group, other],
        ] {
            assert!(!is_valid(&acl(bad)), "{bad:?}");
        }
        let good = acl(&[user, group, other]);
        assert!(!is_valid(&good[..good.len() - 1]) && !is_valid(b"zz") && !is_valid(b""));
        assert!(!is_valid(&[&[1], &good[1..]].concat()));
    }

    #[test]
    fn ids_are_mapped_and_sorted_again() {
        let acl = from_text(b"u::rw-,u:5:r--,u:9:rwx,g::r--,g:7:r--,m::rwx,o::---")
            .unwrap()
            .unwrap();
        let mapped = map_ids(&acl, |id| Ok(20 - id), |id| Ok(id + 1))
            .unwrap()
            .unwrap();
        let expected = from_text(b"u::rw-,u:15:r--,u:11:rwx,g::r--,g:8:r--,m::rwx,o::---")
            .unwrap()
            .unwrap();
        assert_eq!(mapped, expected);
        assert_eq!(map_ids(b"\x02\0\0", Ok, Ok).unwrap(), None);
        assert_eq!(map_ids(b"\x03\0\0\0", Ok, Ok).unwrap(), None);
    }
}
