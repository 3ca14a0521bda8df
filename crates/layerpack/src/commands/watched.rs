//! A service manager starts the daemon again whose holder, the service's main process, was killed. The
//! daemon itself lives on then, with a holder that it made: the manager is told to watch that one.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use sd_notify::NotifyState;

use crate::api;
use crate::client::Client;
use crate::context::Context;

/// Set by a manager that wants to hear from the service.
const MANAGER: &str = "NOTIFY_SOCKET";
/// How long the daemon may take to make another holder.
const HOLDER: Duration = Duration::from_secs(10);
/// Time between two looks.
const LOOK: Duration = Duration::from_millis(50);

/// Tells the service manager about the daemon that serves this node already. `false` where there is no
/// manager, or no such daemon.
///
/// # Errors
/// When that daemon has no holder and gets none, or the manager cannot be told.
pub(super) fn hand_over(context: &Context) -> anyhow::Result<bool> {
    if std::env::var_os(MANAGER).is_none() {
        return Ok(false);
    }
    let Ok(client) = Client::new(context.root()) else {
        return Ok(false);
    };
    let begun = Instant::now();
    loop {
        let Ok(info) = client.info() else {
            return Ok(false);
        };
        if let Some(holder) = info.holder.filter(lives) {
            tracing::info!(
                holder = holder.pid,
                daemon = info.pid,
                "a daemon serves already: the service manager watches it from now on"
            );
            sd_notify::notify(&[
                NotifyState::MainPid(holder.pid),
                NotifyState::Ready,
                NotifyState::Status("taken over while it was serving"),
            ])
            .context("cannot tell the service manager (NOTIFY_SOCKET)")?;
            return Ok(true);
        }
        if begun.elapsed() > HOLDER {
            bail!(
                "a daemon (process {}) serves {} without a holder: stop it (`layerpack daemon stop`) and start the service again",
                info.pid,
                context.root().display()
            );
        }
        std::thread::sleep(LOOK);
    }
}

/// Whether a holder that the daemon named has not just died.
fn lives(holder: &api::Holder) -> bool {
    let stat = fs_err::read_to_string(format!("/proc/{}/stat", holder.pid));
    // The state follows the name, which is in parentheses.
    stat.is_ok_and(|stat| {
        let state = stat.rsplit(')').next().map(str::trim_start);
        state.is_some_and(|state| !state.starts_with(['Z', 'X']))
    })
}
