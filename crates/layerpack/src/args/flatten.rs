//! Arguments of `layerpack flatten`.

use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
pub(crate) struct FlattenArgs {
    /// The stack, bottom first; a diff in front brings its parents along
    #[arg(required = true, value_name = "REF")]
    pub(crate) refs: Vec<String>,
    /// The image's file; an existing one is replaced
    #[arg(long, value_name = "FILE")]
    pub(crate) to: PathBuf,
}
