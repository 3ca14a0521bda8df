//! Arguments of `profile` and `seed`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{ProcessArgs, ShapeArgs};
use crate::units::Bytes;

#[derive(Debug, Args)]
pub(crate) struct ProfileArgs {
    #[command(subcommand)]
    pub(crate) command: ProfileCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ProfileCommand {
    /// Record what a command, or the users of a mount, read of a stack
    Record(Box<ProfileRecordArgs>),
    /// List the store's profiles
    Ls,
    /// Show a profile: its layers and what was read, in order
    Show(ProfileShowArgs),
    /// Make one profile of several of the same stack
    Merge(ProfileMergeArgs),
    /// Remove profiles
    Rm(ProfileShowArgs),
    /// List what this node has learnt by itself from the first reads of its mounts
    Learned,
    /// Store what this node has learnt beside the layers, merged with what other nodes learnt
    Publish(ProfilePublishArgs),
}

#[derive(Debug, Args)]
#[command(
    mut_arg("name", |arg| arg.hide(true)),
    override_usage = "layerpack profile record [OPTIONS] <REF>... -- <CMD>...\n       layerpack profile record --start <DIR>\n       layerpack profile record --stop <DIR> [--store-as <NAME>]"
)]
pub(crate) struct ProfileRecordArgs {
    /// Layers from the bottom up; a lone diff brings the layers it was made on
    #[arg(value_name = "REF", required_unless_present_any = ["start", "stop"])]
    pub(crate) refs: Vec<String>,
    /// Command and arguments, run in a sandbox that is deleted afterwards
    #[arg(last = true, value_name = "CMD", required_unless_present_any = ["start", "stop"])]
    pub(crate) command: Vec<OsString>,
    /// Name of the profile [default: none; it is found by its digest]
    #[arg(long, value_name = "NAME", conflicts_with = "start")]
    pub(crate) store_as: Option<String>,
    /// Begin to record what is read through a mount
    #[arg(long, value_name = "DIR", conflicts_with_all = ["stop", "refs", "command"])]
    pub(crate) start: Option<PathBuf>,
    /// End the recording of a mount and store the profile
    #[arg(long, value_name = "DIR", conflicts_with_all = ["refs", "command"])]
    pub(crate) stop: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) process: ProcessArgs,
    #[command(flatten)]
    pub(crate) shape: ShapeArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ProfileShowArgs {
    /// Names or digests of profiles (the first digits are enough)
    #[arg(required = true, value_name = "PROFILE")]
    pub(crate) profiles: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct ProfilePublishArgs {
    /// A stack, bottom first [default: all whose layers the store has]
    #[arg(value_name = "REF")]
    pub(crate) refs: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct ProfileMergeArgs {
    /// Names or digests of profiles
    #[arg(required = true, value_name = "PROFILE")]
    pub(crate) profiles: Vec<String>,
    /// Name of the merged profile
    #[arg(long, value_name = "NAME")]
    pub(crate) store_as: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct SeedArgs {
    /// Profiles of the environments to seed, by name or digest (repeatable)
    #[arg(
        long = "profile",
        value_name = "PROFILE",
        required_unless_present = "layers"
    )]
    pub(crate) profiles: Vec<String>,
    /// Layers to take whole, before anything else
    #[arg(long, value_name = "REF", num_args = 1..)]
    pub(crate) layers: Vec<String>,
    /// Most bytes to use there, metadata included, such as 500m or 2g
    #[arg(long, value_name = "BYTES")]
    pub(crate) max_bytes: Bytes,
    /// Store to seed: a directory or URL
    #[arg(long, value_name = "URL")]
    pub(crate) to: String,
    /// Only say what would be seeded and what it would cover
    #[arg(long)]
    pub(crate) dry_run: bool,
}
