//! Options of `mount --fuse`.

use clap::Args;

#[derive(Debug, Clone, Args)]
pub(crate) struct FuseArgs {
    /// Serve the tree by FUSE from this machine's layerpack alone, with no daemon and no
    /// privilege but fusermount3; read-only
    #[arg(long, conflicts_with = "rw")]
    pub(crate) fuse: bool,
    /// With --fuse: stay in the foreground until it is unmounted
    #[arg(long, requires = "fuse")]
    pub(crate) foreground: bool,
    /// With --fuse: let other users in, by the tree's own modes and owners
    #[arg(long, requires = "fuse")]
    pub(crate) allow_other: bool,
    /// With --fuse: set by the command that goes into the background
    #[arg(long, requires = "foreground", hide = true)]
    pub(crate) detached: bool,
}
