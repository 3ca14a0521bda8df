//! Owners that no file can have.

use layerpack_erofs::Metadata;

use crate::error::{PackError, Result};

/// To every call that sets an owner this means: leave it as it is.
const NOBODY: u32 = u32::MAX;

/// Refuses an owner or a group of -1, which no system can set and the kernel would show as
/// another.
pub(crate) fn check(path: &[u8], metadata: &Metadata) -> Result<()> {
    for (what, id, option) in [
        ("user id", metadata.uid, "--owner"),
        ("group id", metadata.gid, "--group"),
    ] {
        if id == NOBODY {
            let why = format!(
                "its {what} is {id} (-1), which no file can have; change it (chown, or {option} when making an archive with tar), or exclude it"
            );
            return Err(PackError::unsupported(path, why));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_minus_one_is_refused() {
        let owned = |uid, gid| Metadata {
            uid,
            gid,
            ..Metadata::default()
        };
        check(b"a", &owned(u32::MAX - 1, u32::MAX - 1)).unwrap();
        for (uid, gid, part) in [(u32::MAX, 0, "user id"), (0, u32::MAX, "group id")] {
            let error = check(b"a/b", &owned(uid, gid)).unwrap_err().to_string();
            for part in ["a/b", part, "4294967295", "chown", "exclude"] {
                assert!(error.contains(part), "{part} not in {error}");
            }
        }
    }
}
