//! Options of `daemon run` about what the node learns.

use clap::Args;

use crate::settings::node::Window;

#[derive(Debug, Clone, Default, PartialEq, Eq, Args)]
pub(crate) struct NodeArgs {
    /// How long after a mount the node learns what is read first, such as 60s; none: it does not
    /// [default: LAYERPACK_LEARN, else learn in the configuration, else 60s]
    #[arg(long, value_name = "TIME")]
    pub(crate) learn: Option<Window>,
    /// Give what the node learns to the stacks' stores, for other nodes [default:
    /// LAYERPACK_PUBLISH_PROFILES, else publish_profiles in the configuration, else no]
    #[arg(long)]
    pub(crate) publish_profiles: bool,
}
