//! Arguments of `diff`, `du`, `cat` and `find`.

use std::ffi::OsString;

use clap::Args;
use layerpack_packer::SizeTest;

#[derive(Debug, Args)]
#[command(override_usage = "layerpack diff [OPTIONS] <REF[,REF...]> <REF[,REF...]>")]
pub(crate) struct DiffArgs {
    /// What it was: a layer, or a stack of layers from the bottom up, separated by commas
    #[arg(value_name = "OLD")]
    pub(crate) old: String,
    /// What it is now
    #[arg(value_name = "NEW")]
    pub(crate) new: String,
    /// Look at diffs alone, without the layers that they were made on
    #[arg(long)]
    pub(crate) alone: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DuArgs {
    /// Layers to show; all layers of the store count for what is shared [default: all]
    #[arg(value_name = "REF")]
    pub(crate) refs: Vec<String>,
}

#[derive(Debug, Args)]
#[command(override_usage = "layerpack cat [OPTIONS] <REF>... <PATH>")]
pub(crate) struct CatArgs {
    /// A layer, or a stack of layers from the bottom up, then the path of a file in it
    #[arg(required = true, num_args = 2.., value_names = ["REF", "PATH"])]
    pub(crate) refs_and_path: Vec<OsString>,
    /// Look at a diff alone, without the layers that it was made on
    #[arg(long)]
    pub(crate) alone: bool,
}

#[derive(Debug, Args)]
#[command(override_usage = "layerpack find [OPTIONS] <REF>... [PATTERN]")]
pub(crate) struct FindArgs {
    /// A layer, or a stack of layers from the bottom up, then a pattern: with a / for the whole
    /// path, else for the name; * stops at /, ** does not
    #[arg(required = true, value_names = ["REF"])]
    pub(crate) refs_and_pattern: Vec<String>,
    /// Only these types: f file, d directory, l symlink, c and b devices, p fifo, s socket,
    /// w whiteout (several letters, or repeatable)
    #[arg(long = "type", value_name = "LETTERS")]
    pub(crate) kinds: Vec<String>,
    /// Only files of at least +N, at most -N or exactly N bytes (N with k, m, g or t)
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    pub(crate) size: Option<SizeTest>,
    /// Only entries whose name matches
    #[arg(long, value_name = "PATTERN")]
    pub(crate) name: Option<String>,
    /// Look at a diff alone, without the layers that it was made on
    #[arg(long)]
    pub(crate) alone: bool,
}
