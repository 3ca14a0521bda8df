//! Options of `snapshot` and `checkout`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::SignWithArgs;

#[derive(Debug, Args)]
pub(crate) struct SnapshotArgs {
    #[command(subcommand)]
    pub(crate) command: SnapshotCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum SnapshotCommand {
    /// List snapshots
    Ls(SnapshotLsArgs),
    /// Show what a snapshot is made on and what is in it
    Inspect(SnapshotInspectArgs),
    /// Show what a snapshot changes, or how two of them differ
    Diff(SnapshotDiffArgs),
    /// Make one layer of a snapshot and those below it; copies only what is stored together with what
    /// the result does not have
    Squash(SnapshotSquashArgs),
    /// Put a snapshot on other layers, such as a newer base
    Rebase(SnapshotRebaseArgs),
    /// Write a snapshot as a layer of a container image, or as an image
    Export(SnapshotExportArgs),
    /// Take snapshots out of the store; those made on them stay whole
    Rm(SnapshotRmArgs),
}

#[derive(Debug, Args)]
pub(crate) struct SnapshotLsArgs {
    /// Only snapshots whose name matches; * stands for anything
    #[arg(long, value_name = "PATTERN")]
    pub(crate) name: Option<String>,
    /// Only snapshots made on this layer, at any depth
    #[arg(long, value_name = "REF")]
    pub(crate) on: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct SnapshotInspectArgs {
    /// The snapshot
    #[arg(value_name = "REF")]
    pub(crate) reference: String,
}

#[derive(Debug, Args)]
pub(crate) struct SnapshotDiffArgs {
    /// The snapshot; or the older one of two
    #[arg(value_name = "REF")]
    pub(crate) reference: String,
    /// The newer one
    #[arg(value_name = "NEW")]
    pub(crate) new: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct SnapshotSquashArgs {
    /// The snapshot
    #[arg(value_name = "REF")]
    pub(crate) reference: String,
    /// Name of the result
    #[arg(long)]
    pub(crate) name: String,
    /// Version of the result
    #[arg(long)]
    pub(crate) version: String,
    /// Take in all layers down to the base, which makes a base: what was removed is gone from it,
    /// and does not go along when it is pushed
    #[arg(long)]
    pub(crate) all: bool,
    /// What must not be in the result, whichever of the layers has it: a file of rules, or `standard`
    /// for all built-in ones [default: ROOT/scrub.toml, if it is there]
    #[arg(long, value_name = "FILE", conflicts_with = "no_rules")]
    pub(crate) rules: Option<PathBuf>,
    /// Use no rules, whatever the node has
    #[arg(long)]
    pub(crate) no_rules: bool,
    /// Leave the indexes of git repositories as the layers have them
    #[arg(long)]
    pub(crate) no_git_index: bool,
    #[command(flatten)]
    pub(crate) sign: SignWithArgs,
    /// Label for people and tools (repeatable)
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) label: Vec<String>,
}

/// Whose word stands in a conflict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum StrategyArg {
    /// Nobody's: the conflicts are listed and nothing is published.
    Fail,
    /// The snapshot's.
    Snapshot,
    /// That of the layers that it is put on.
    Base,
}

#[derive(Debug, Args)]
pub(crate) struct SnapshotRebaseArgs {
    /// The snapshot
    #[arg(value_name = "REF")]
    pub(crate) reference: String,
    /// The layers to put it on, bottom first (repeatable); a diff brings its parents along
    #[arg(long, required = true, value_name = "REF")]
    pub(crate) onto: Vec<String>,
    /// Name of the result
    #[arg(long)]
    pub(crate) name: String,
    /// Version of the result
    #[arg(long)]
    pub(crate) version: String,
    /// Whose word stands where both sides changed something
    #[arg(long, value_enum, default_value_t = StrategyArg::Fail)]
    pub(crate) strategy: StrategyArg,
    #[command(flatten)]
    pub(crate) sign: SignWithArgs,
    /// Label for people and tools (repeatable)
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) label: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct SnapshotExportArgs {
    /// The snapshot
    #[arg(value_name = "REF")]
    pub(crate) reference: String,
    /// The archive to write, of this one layer; oci:DIR, docker-archive:FILE or
    /// `registry:HOST/REPOSITORY[:TAG]` for an image with the layers below, as of `layerpack export`
    #[arg(long, value_name = "TARGET")]
    pub(crate) to: String,
}

#[derive(Debug, Args)]
pub(crate) struct SnapshotRmArgs {
    /// Snapshots to remove
    #[arg(required = true, value_name = "REF")]
    pub(crate) refs: Vec<String>,
}

#[derive(Debug, Args)]
#[command(override_usage = "layerpack checkout [OPTIONS] <REF>... <DIR>")]
pub(crate) struct CheckoutArgs {
    /// A stack of layers from the bottom up, then a directory that is new or empty
    #[arg(required = true, num_args = 2.., value_names = ["REF", "DIR"])]
    pub(crate) refs_and_dir: Vec<std::ffi::OsString>,
}
