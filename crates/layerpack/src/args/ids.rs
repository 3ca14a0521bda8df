//! Options of `mount` about owners.

use clap::Args;
use layerpack_packer::IdMapRange;

#[derive(Debug, Clone, Default, Args)]
pub(crate) struct IdArgs {
    /// User ids INSIDE, INSIDE+1, ... of the layers are shown as OUTSIDE, OUTSIDE+1, ..., COUNT of
    /// them, others as the overflow id, mostly 65534 (repeatable)
    #[arg(long, value_name = "INSIDE:OUTSIDE:COUNT", value_parser = range, conflicts_with = "fuse")]
    pub(crate) uid_map: Vec<IdMapRange>,
    /// The same for group ids (repeatable)
    #[arg(long, value_name = "INSIDE:OUTSIDE:COUNT", value_parser = range, conflicts_with = "fuse")]
    pub(crate) gid_map: Vec<IdMapRange>,
}

/// Reads a range. What goes in and what comes out is the other way round than where layers are made.
fn range(text: &str) -> Result<IdMapRange, String> {
    let range: IdMapRange = text.parse().map_err(|_| {
        "write INSIDE:OUTSIDE:COUNT, three numbers, with ids below 4294967295: ids INSIDE, INSIDE+1, ... of the layers are shown as OUTSIDE, OUTSIDE+1, ..., COUNT of them".to_owned()
    })?;
    if range.count == 0 {
        return Err("COUNT is 0, which maps no id: write how many ids there are".to_owned());
    }
    Ok(range)
}

#[cfg(test)]
mod tests {
    use super::range;

    #[test]
    fn maps_of_a_mount_are_explained_as_a_mount_shows_them() {
        assert_eq!(range("0:1000:5").map(|r| r.count), Ok(5));
        assert!(range("0:0:0").unwrap_err().contains("COUNT is 0"));
        assert!(range("a:b:c").unwrap_err().contains("are shown as OUTSIDE"));
    }
}
