//! Arguments of `push`, `pull` and `copy`.

use clap::Args;

/// Which layers are copied, and how.
#[derive(Debug, Args)]
pub(crate) struct TransferArgs {
    /// Layers: kind/name:version, or patterns such as 'workspace/*:1', in which * stands for
    /// anything but a colon
    #[arg(value_name = "REF", required_unless_present = "all")]
    pub(crate) refs: Vec<String>,
    /// Every layer
    #[arg(long, conflicts_with = "refs")]
    pub(crate) all: bool,
    /// Also the parents of layers that are not diffs (those of diffs always come along)
    #[arg(long)]
    pub(crate) with_parents: bool,
    /// Without the parents of diffs
    #[arg(long, conflicts_with = "with_parents")]
    pub(crate) no_parents: bool,
    /// Look at layers that the target has, too, and write again what is damaged there
    #[arg(long)]
    pub(crate) recheck: bool,
    /// Make frames anew that hold more than their layer, so that nothing else goes along
    ///
    /// Layers share frames, which move whole: one that was built after a file was removed can share
    /// a frame with what that file held. With this only the layer's own contents move, which costs
    /// compressing those frames again. What the target has already stays as it is.
    #[arg(long)]
    pub(crate) reframe: bool,
    /// Requests under way at once
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) connections: u16,
}

#[derive(Debug, Args)]
pub(crate) struct PushArgs {
    #[command(flatten)]
    pub(crate) transfer: TransferArgs,
    /// Store to copy to: a directory or URL
    #[arg(long, value_name = "URL")]
    pub(crate) to: String,
}

#[derive(Debug, Args)]
pub(crate) struct PullArgs {
    #[command(flatten)]
    pub(crate) transfer: TransferArgs,
    /// Store to copy from: a directory or URL
    #[arg(long, value_name = "URL")]
    pub(crate) from: String,
}

#[derive(Debug, Args)]
pub(crate) struct CopyArgs {
    #[command(flatten)]
    pub(crate) transfer: TransferArgs,
    /// Store to copy from: a directory or URL
    #[arg(long, value_name = "URL")]
    pub(crate) from: String,
    /// Store to copy to: a directory or URL
    #[arg(long, value_name = "URL")]
    pub(crate) to: String,
}
