//! Arguments of `top` and `trace`.

use clap::Args;

use crate::units::Age;

#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// Show it once: the rates of one interval (also when the output is no terminal)
    #[arg(long)]
    pub(crate) once: bool,
    /// Time that rates are of, and between two looks
    #[arg(long, value_name = "TIME", default_value = "2s")]
    pub(crate) interval: Age,
}

#[derive(Debug, Args)]
pub(crate) struct TraceArgs {
    /// A directory that `mount` mounted on, or a sandbox
    #[arg(value_name = "MOUNT")]
    pub(crate) target: String,
    /// End after this time, such as 30s [default: until it is interrupted, or the mount goes]
    #[arg(long = "for", value_name = "TIME")]
    pub(crate) time: Option<Age>,
}
