//! Options of `mount` about owners.

use clap::Args;
use layerpack_packer::IdMapRange;

#[derive(Debug, Clone, Default, Args)]
pub(crate) struct IdArgs {
    /// User ids INSIDE, INSIDE+1, ... of the layers are shown as OUTSIDE, OUTSIDE+1, ..., COUNT of
    /// them, others as the overflow id, mostly 65534 (repeatable)
    #[arg(long, value_name = "INSIDE:OUTSIDE:COUNT", conflicts_with = "fuse")]
    pub(crate) uid_map: Vec<IdMapRange>,
    /// The same for group ids (repeatable)
    #[arg(long, value_name = "INSIDE:OUTSIDE:COUNT", conflicts_with = "fuse")]
    pub(crate) gid_map: Vec<IdMapRange>,
}
