//! Options of the commands that keep a store in order: `gc`, `prune`, `repair`.

use clap::Args;

use crate::units::Span;

#[derive(Debug, Clone, Args)]
pub(crate) struct GraceArgs {
    /// How long what is unused stays, from the first collection that finds it unused
    #[arg(long, value_name = "TIME", default_value = "24h")]
    pub(crate) grace: Span,
    /// Change nothing, only say what would be done
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Stay until the grace period is over, then delete
    #[arg(long, conflicts_with = "dry_run")]
    pub(crate) wait: bool,
}

#[derive(Debug, Args)]
pub(crate) struct GcArgs {
    #[command(flatten)]
    pub(crate) grace: GraceArgs,
}

#[derive(Debug, Args)]
pub(crate) struct PruneArgs {
    /// Rewrite packs of which less than this share is used
    #[arg(long, value_name = "PERCENT", default_value_t = 50, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub(crate) min_live: u8,
    #[command(flatten)]
    pub(crate) grace: GraceArgs,
}

#[derive(Debug, Args)]
pub(crate) struct RepairArgs {
    /// Change nothing, only say what would be done
    #[arg(long)]
    pub(crate) dry_run: bool,
}
