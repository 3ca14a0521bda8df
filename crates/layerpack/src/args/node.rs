//! Options of `daemon run` about what the node learns, and the nodes that it shares data with.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;
use layerpack_store::peer::PeerSource;

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
    /// Give other nodes what this one has cached, on this address, such as 10.0.0.5:7070 [default:
    /// LAYERPACK_PEER_LISTEN, else peer_listen in the configuration, else no]
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) peer_listen: Option<SocketAddr>,
    /// A node to ask before the store, http://HOST:PORT, or dns:NAME:PORT for all addresses of a
    /// name (repeatable) [default: LAYERPACK_PEERS, separated by commas, else peers in the
    /// configuration]
    #[arg(long = "peer", value_name = "URL")]
    pub(crate) peers: Vec<PeerSource>,
    /// File with the token that all peers know [default: LAYERPACK_PEER_TOKEN_FILE, else
    /// peer_token_file in the configuration; needed to listen beyond the loopback]
    #[arg(long, value_name = "FILE")]
    pub(crate) peer_token_file: Option<PathBuf>,
    /// How long a read waits for a store before it fails, such as 60s; none: without end [default:
    /// LAYERPACK_READ_TIMEOUT, else read_timeout in the configuration, else 60s]
    #[arg(long, value_name = "TIME")]
    pub(crate) read_timeout: Option<Window>,
    /// Have reads wait that long for a store that cannot be reached, instead of failing at once
    /// [default: LAYERPACK_WAIT_FOR_STORE, else wait_for_store in the configuration, else no]
    #[arg(long)]
    pub(crate) wait_for_store: bool,
}
