//! Arguments of `cache`.

use clap::{Args, Subcommand};

use crate::units::Bytes;

#[derive(Debug, Args)]
pub(crate) struct CacheArgs {
    #[command(subcommand)]
    pub(crate) command: CacheCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum CacheCommand {
    /// List the layers in this node's cache
    Ls,
    /// Show what the cache takes up, and its limit
    Du,
    /// Keep layers from being evicted; what is missing of them is still fetched when it is read
    Pin(CacheLayersArgs),
    /// Let layers be evicted again
    Unpin(CacheLayersArgs),
    /// Evict layers, as far as they are not pinned or being read
    Evict(CacheEvictArgs),
    /// Compare what is cached with its digests, and drop what is wrong
    Verify(CacheVerifyArgs),
}

#[derive(Debug, Args)]
pub(crate) struct CacheLayersArgs {
    /// Layers by name, or by the first digits of their id (b3:...)
    #[arg(required = true, value_name = "LAYER")]
    pub(crate) layers: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct CacheEvictArgs {
    /// Layers by name, or by the first digits of their id (b3:...)
    #[arg(value_name = "LAYER", required_unless_present_any = ["all", "bytes"])]
    pub(crate) layers: Vec<String>,
    /// All layers
    #[arg(long, conflicts_with_all = ["layers", "bytes"])]
    pub(crate) all: bool,
    /// As much as frees so many bytes of disk, what is used least first
    #[arg(long, value_name = "BYTES", conflicts_with = "layers")]
    pub(crate) bytes: Option<Bytes>,
}

#[derive(Debug, Args)]
pub(crate) struct CacheVerifyArgs {
    /// Layers by name, or by the first digits of their id (b3:...) [default: all]
    #[arg(value_name = "LAYER")]
    pub(crate) layers: Vec<String>,
}
