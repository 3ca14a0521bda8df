//! The `layerpack` command: wiring, printing and exit codes.
//!
//! The libraries do the work; this crate parses arguments, chooses defaults (store, state
//! directory), talks to the node daemon, and turns results into text or JSON. It is also the
//! binary of the daemon itself (`layerpack daemon`) and, when started under the name
//! `layerpack-init`, the first process of a sandbox; as `layerpack-holder` it keeps the daemon's mounts
//! while that is restarted; as `pack_diff` it is what processes inside a
//! sandbox ask for snapshots with.
//!
//! | module | owns |
//! |---|---|
//! | [`args`] | the command line |
//! | [`commands`] | one file per command |
//! | [`api`] | the types of the daemon's HTTP API (described in `API.md`) |
//! | [`client`] | the API's client, and starting the daemon when it is not running |
//! | [`daemon`] | the API's server |
//! | [`holder`] | the process that keeps the daemon's mounts alive, and the daemon's link to it |
//! | [`inside`] | the command `pack_diff` inside of sandboxes |
//! | [`context`], [`stores`], [`stack`], [`depth`] | what commands share: root, store, references to layers |
//! | [`registries`] | where registries' credentials are |
//! | [`output`], [`progress`], [`failure`] | all that is ever printed |

mod api;
mod args;
mod client;
mod commands;
mod context;
mod daemon;
mod depth;
mod failure;
mod holder;
mod inside;
mod known;
mod launch;
mod logging;
mod mounts;
mod output;
mod paths;
mod policy;
mod progress;
mod published;
mod registries;
mod settings;
mod signing;
mod stack;
mod stores;
mod thaw;
mod units;

use std::process::ExitCode;

/// The name under which the binary is started as a sandbox's first process.
const INIT_NAME: &str = "layerpack-init";

fn main() -> ExitCode {
    // Before anything else: a sandbox's init must not parse arguments, read the environment or
    // start threads.
    let program = std::env::args_os().next().unwrap_or_default();
    if program == INIT_NAME {
        layerpack_runtime::init_main();
    }
    if program == holder::NAME {
        return holder::main();
    }
    if inside::is_meant(&program) {
        return inside::main();
    }
    commands::main()
}
