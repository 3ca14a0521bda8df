//! Arguments of `tag` and `untag`.

use clap::Args;

#[derive(Debug, Args)]
#[command(
    override_usage = "layerpack tag [OPTIONS] <REF> <CHANNEL>\n       layerpack tag [OPTIONS]"
)]
pub(crate) struct TagArgs {
    /// The version that the channel moves to; without it, all channels are listed
    #[arg(value_name = "REF", requires = "channel")]
    pub(crate) reference: Option<String>,
    /// Name of the channel, such as latest: it is then known as KIND/NAME@latest
    #[arg(value_name = "CHANNEL")]
    pub(crate) channel: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct UntagArgs {
    /// Channels to remove: kind/name@channel
    #[arg(required = true, value_name = "CHANNEL")]
    pub(crate) channels: Vec<String>,
}
