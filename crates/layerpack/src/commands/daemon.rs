//! `layerpack daemon`: run, stop, ask.

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::bail;
use serde::Serialize;

use super::Outcome;
use crate::api;
use crate::args::{DaemonArgs, DaemonCommand};
use crate::client::{Client, ClientError};
use crate::context::{Context, prepare_root, require_root};
use crate::output::{Table, print, printable};
use crate::units::human_bytes;

/// How long `stop` waits for the process to be gone after it agreed to go.
const GONE: Duration = Duration::from_secs(30);

pub(super) fn run(context: &Context, args: DaemonArgs) -> Outcome {
    match args
        .command
        .unwrap_or(DaemonCommand::Run { detached: false })
    {
        DaemonCommand::Run { detached } => serve(context, detached),
        DaemonCommand::Stop { force } => stop(context, force),
        DaemonCommand::Status => status(context),
    }
}

fn serve(context: &Context, detached: bool) -> Outcome {
    require_root("the daemon")?;
    prepare_root(context.root())?;
    if detached {
        // Fails only for a process group leader, which a child that was just started is not.
        let _ = rustix::process::setsid();
    }
    crate::daemon::run(context.root())?;
    Ok(ExitCode::SUCCESS)
}

#[derive(Debug, Serialize)]
struct Stopped {
    /// False when no daemon ran and none had left anything.
    stopped: bool,
}

fn stop(context: &Context, force: bool) -> Outcome {
    require_root("stopping the daemon")?;
    let client = Client::new(context.root())?;
    let stopped = match client.stop(force) {
        Ok(_) => {
            wait_until_gone(&client, context.root())?;
            true
        }
        // A killed daemon leaves its mounts: the next one knows how to clean up after it.
        Err(ClientError::NotRunning { .. }) if left_mounts(context.root())? => {
            let next = context.daemon("cleaning up")?;
            next.stop(force)?;
            wait_until_gone(&next, context.root())?;
            true
        }
        Err(ClientError::NotRunning { .. }) => false,
        Err(error) => return Err(error.into()),
    };
    print(context.format, &Stopped { stopped }, |out| {
        if stopped {
            Ok(())
        } else {
            writeln!(out, "no daemon runs for {}", context.root().display())
        }
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Whether anything of a daemon is mounted below the node's root.
fn left_mounts(root: &Path) -> anyhow::Result<bool> {
    let Ok(root) = fs_err::canonicalize(root) else {
        return Ok(false);
    };
    let mounts = layerpack_sys::mountinfo::read()?;
    Ok(mounts
        .iter()
        .any(|mount| mount.target != root && mount.target.starts_with(&root)))
}

fn wait_until_gone(client: &Client, root: &Path) -> anyhow::Result<()> {
    let begun = Instant::now();
    while begun.elapsed() < GONE {
        match client.info() {
            Err(ClientError::NotRunning { .. }) => return Ok(()),
            _ => std::thread::sleep(Duration::from_millis(10)),
        }
    }
    bail!(
        "the daemon for {} agreed to stop but is still there after {} s",
        root.display(),
        GONE.as_secs()
    );
}

fn status(context: &Context) -> Outcome {
    require_root("asking the daemon")?;
    let status = Client::new(context.root())?.status()?;
    print(context.format, &status, |out| describe(out, &status))?;
    Ok(ExitCode::SUCCESS)
}

fn describe(out: &mut dyn Write, status: &api::Status) -> io::Result<()> {
    let daemon = &status.daemon;
    writeln!(
        out,
        "layerpack {} runs as process {} for {}",
        daemon.version,
        daemon.pid,
        daemon.root.display()
    )?;
    let totals = &status.node.totals;
    writeln!(
        out,
        "fetched {} of data ({} uncompressed) in {} requests and {} of metadata; cached {}; served {}; {} failed reads",
        human_bytes(totals.fetched_bytes),
        human_bytes(totals.fetched_raw_bytes),
        totals.requests,
        human_bytes(totals.meta_fetched_bytes),
        human_bytes(totals.cached_bytes),
        human_bytes(totals.served_bytes),
        totals.errors
    )?;
    if !status.node.layers.is_empty() {
        writeln!(out)?;
        let mut table = Table::new(&[
            "LAYER", "LEASES", "DATA", "CACHED", "FETCHED", "SERVED", "ERRORS",
        ]);
        for layer in &status.node.layers {
            table.row([
                layer.reference.clone(),
                layer.leases.to_string(),
                human_bytes(layer.data_bytes),
                human_bytes(layer.cached_bytes),
                human_bytes(layer.fetched_bytes),
                human_bytes(layer.served_bytes),
                layer.errors.to_string(),
            ]);
        }
        table.write(out)?;
    }
    if !status.leases.is_empty() {
        writeln!(out)?;
        let mut table = Table::new(&["LEASE", "OWNER", "PID", "LAYERS"]);
        for lease in &status.leases {
            table.row([
                lease.spec.id.clone(),
                lease.spec.owner.clone(),
                lease
                    .spec
                    .pid
                    .map(|pid| pid.to_string())
                    .unwrap_or_default(),
                lease.manifests.len().to_string(),
            ]);
        }
        table.write(out)?;
    }
    for problem in &status.node.problems {
        writeln!(out, "problem: {}", printable(problem))?;
    }
    Ok(())
}
