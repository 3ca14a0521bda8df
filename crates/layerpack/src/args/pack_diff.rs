//! Options of `pack-diff`.

use std::path::PathBuf;

use clap::Args;

use super::SignWithArgs;

#[derive(Debug, Args)]
pub(crate) struct PackDiffArgs {
    /// Id or name
    pub(crate) sandbox: String,
    /// Name of the snapshot, published as diff/NAME:VERSION
    #[arg(long)]
    pub(crate) name: String,
    /// Version of the snapshot; once published it never changes
    #[arg(long)]
    pub(crate) version: String,
    /// What must not leave: a file of rules, or `standard` for all built-in ones [default:
    /// ROOT/scrub.toml, if it is there]
    #[arg(long, value_name = "FILE", conflicts_with = "no_rules")]
    pub(crate) rules: Option<PathBuf>,
    /// Use no rules, whatever the node has
    #[arg(long)]
    pub(crate) no_rules: bool,
    /// Leave these paths as the layers below have them; with --squash, as those have them that are not
    /// taken in (repeatable)
    #[arg(long, value_name = "PATTERN")]
    pub(crate) exclude: Vec<String>,
    /// Do everything but publish, and report
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Take the diffs that the sandbox was made from into the snapshot; rules and excludes hold for
    /// what comes from them too
    #[arg(long)]
    pub(crate) squash: bool,
    /// Leave the indexes of git repositories as the sandbox wrote them. They are refreshed
    /// otherwise, so that `git status` in a restored sandbox reads no contents
    #[arg(long)]
    pub(crate) no_git_index: bool,
    /// Keep this extended attribute too, or with `*` at its end all that begin so (repeatable)
    #[arg(long, value_name = "NAME")]
    pub(crate) xattr: Vec<String>,
    #[command(flatten)]
    pub(crate) sign: SignWithArgs,
    /// Label for people and tools (repeatable)
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) label: Vec<String>,
    /// Compression level of new data
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(i32).range(1..=19))]
    pub(crate) level: i32,
    /// Compression threads [default: one per processor]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) jobs: Option<u16>,
}
