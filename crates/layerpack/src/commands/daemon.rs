//! `layerpack daemon`: run, stop, ask.

use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use layerpack_layerfs::LeaseSpec;
use layerpack_layerfs::holder::{Question, Reply, Who, ask};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Pid;
use serde::Serialize;

use super::Outcome;
use crate::api;
use crate::args::{DaemonArgs, DaemonCommand};
use crate::client::{Client, ClientError};
use crate::context::{Context, prepare_root, require_root};
use crate::holder::{self, Linked};
use crate::mounts::Place;
use crate::output::{Table, print, printable};
use crate::policy::{self, Policy};
use crate::settings::{Given, Settings};
use crate::units::human_bytes;

/// How long `stop` waits for the process to be gone after it agreed to go.
const GONE: Duration = Duration::from_secs(30);

pub(super) fn run(context: &Context, args: DaemonArgs) -> Outcome {
    match args.command.unwrap_or(DaemonCommand::Run {
        detached: false,
        policy: None,
        cache_max: None,
        fill_rate: None,
        metrics_listen: None,
        node: Box::default(),
        config: None,
        no_holder: false,
    }) {
        DaemonCommand::Run {
            detached,
            policy,
            cache_max,
            fill_rate,
            metrics_listen,
            node,
            config,
            no_holder,
        } => {
            let given = Given {
                config,
                cache_max,
                fill_rate,
                metrics_listen,
                node: *node,
            };
            serve(context, detached, no_holder, policy, given)
        }
        DaemonCommand::Upgrade => upgrade(context),
        DaemonCommand::Stop { force } => stop(context, force),
        DaemonCommand::Status => status(context),
    }
}

fn serve(
    context: &Context,
    detached: bool,
    no_holder: bool,
    policy: Option<PathBuf>,
    given: Given,
) -> Outcome {
    require_root("the daemon")?;
    if let Some(mut linked) = Linked::open(context.root())? {
        // What was checked when the holder began is not checked again: a file that was edited since
        // must not keep a daemon from starting that died.
        let settings = linked.settings(|| Settings::load(given))?;
        let policy = policy.map_or_else(
            || context.root().join(policy::FILE_NAME),
            |path| fs_err::canonicalize(&path).unwrap_or(path),
        );
        crate::daemon::run(context.root(), policy, &settings, Some(linked))?;
        return Ok(ExitCode::SUCCESS);
    }
    let settings = Settings::load(given)?;
    prepare_root(context.root())?;
    if detached {
        // Fails only for a process group leader, which a child that was just started is not.
        let _ = rustix::process::setsid();
    }
    let policy = match policy {
        // Named, so it must be there: a policy must not vanish by a typing error.
        Some(path) => {
            let path = fs_err::canonicalize(path)?;
            Policy::load(&path)?;
            path
        }
        None => context.root().join(policy::FILE_NAME),
    };
    if !no_holder {
        return Err(holder::become_holder(context.root()).into());
    }
    crate::daemon::run(context.root(), policy, &settings, None)?;
    Ok(ExitCode::SUCCESS)
}

#[derive(Debug, Serialize)]
struct Upgraded {
    /// Absent if none lived at that moment.
    old: Option<Who>,
    new: Who,
}

fn upgrade(context: &Context) -> Outcome {
    require_root("upgrading the daemon")?;
    let upgraded = take_over(context.root())?;
    let version = |who: &Who| format!("{} (process {})", who.version, who.pid);
    print(context.format, &upgraded, |out| {
        let old = upgraded.old.as_ref().map_or("none".to_owned(), version);
        writeln!(
            out,
            "layerpack {old} gave way to {}",
            version(&upgraded.new)
        )
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Has this program take over from the daemon.
fn take_over(root: &Path) -> anyhow::Result<Upgraded> {
    let program = holder::program()?;
    match ask(root, &Question::Upgrade, Some(&program)) {
        Ok(Reply::Upgraded { old, new }) => Ok(Upgraded { old, new }),
        Ok(Reply::Refused { why }) => bail!("the daemon was not upgraded: {why}"),
        Ok(other) => bail!("the holder gave no answer to this: {other:?}"),
        Err(e) if is_absent(&e) => {
            let info = Client::new(root)?.info()?;
            bail!(
                "the daemon for {} (process {}) runs without a holder: stop it (`layerpack daemon stop`) and start it again",
                root.display(),
                info.pid
            );
        }
        Err(e) => Err(e).context("the daemon was not upgraded"),
    }
}

/// Whether nobody listens there.
fn is_absent(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
    )
}

#[derive(Debug, Serialize)]
struct Stopped {
    /// False when no daemon ran and none had left anything.
    stopped: bool,
}

fn stop(context: &Context, force: bool) -> Outcome {
    require_root("stopping the daemon")?;
    let client = Client::new(context.root())?;
    let stopped = match end(&client, context.root(), force) {
        Ok(()) => true,
        // A killed daemon leaves its mounts: the next one knows how to clean up after it.
        Err(StopError::Client(ClientError::NotRunning { .. })) if left_mounts(context.root())? => {
            end(&context.daemon("cleaning up")?, context.root(), force)?;
            true
        }
        Err(StopError::Client(ClientError::NotRunning { .. })) => false,
        // One that dies again and again answers nothing; its holder does.
        Err(StopError::Client(ClientError::Lost { .. })) => end_holder(context.root())?,
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

/// Whether a daemon's own mounts are there.
fn left_mounts(root: &Path) -> anyhow::Result<bool> {
    let Ok(root) = fs_err::canonicalize(root) else {
        return Ok(false);
    };
    let own = ["blobs", "layers", "stacks"].map(|name| root.join(name));
    let mounts = layerpack_sys::mountinfo::read()?;
    Ok(mounts
        .iter()
        .any(|mount| own.iter().any(|own| mount.target.starts_with(own))))
}

/// Why a daemon does not stop.
#[derive(Debug, thiserror::Error)]
enum StopError {
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error("the daemon for {root} agreed to stop but is still there after {} s (process {pid})", GONE.as_secs())]
    Stays { root: String, pid: u32 },
}

/// A descriptor of a process. Taken before it is told to stop, so that it cannot be of a later
/// process of that number.
fn process(pid: u32) -> Option<OwnedFd> {
    i32::try_from(pid)
        .ok()
        .and_then(Pid::from_raw)
        .and_then(|pid| layerpack_sys::ns::pidfd_open(pid).ok())
}

/// Waits until these processes have ended.
fn wait_gone(root: &Path, pid: u32, processes: &[OwnedFd]) -> Result<(), StopError> {
    let begun = Instant::now();
    let mut left = processes;
    while let Some((first, rest)) = left.split_first() {
        if has_ended(first) {
            left = rest;
        } else if begun.elapsed() >= GONE {
            return Err(StopError::Stays {
                root: root.display().to_string(),
                pid,
            });
        }
    }
    Ok(())
}

/// Stops the daemon and waits until its process and its holder have ended.
fn end(client: &Client, root: &Path, force: bool) -> Result<(), StopError> {
    let info = client.info()?;
    let pid = info.pid;
    let holder = info.holder.map(|holder| holder.pid);
    let processes: Vec<OwnedFd> = [Some(pid), holder]
        .into_iter()
        .flatten()
        .filter_map(process)
        .collect();
    client.stop(force)?;
    if !processes.is_empty() {
        return wait_gone(root, pid, &processes);
    }
    // In another pid namespace its number says nothing, and its socket has to do.
    let begun = Instant::now();
    while begun.elapsed() < GONE {
        if matches!(client.info(), Err(ClientError::NotRunning { .. })) {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Err(StopError::Stays {
        root: root.display().to_string(),
        pid,
    })
}

/// Ends a daemon that does not answer, by its holder. `false` if there is none.
fn end_holder(root: &Path) -> anyhow::Result<bool> {
    let holder = match ask(root, &Question::Status, None) {
        Ok(Reply::Standing { holder, .. }) => holder,
        Ok(other) => bail!("the holder gave no answer to this: {other:?}"),
        Err(e) if is_absent(&e) => return Ok(false),
        Err(e) => return Err(e).context("the daemon's holder cannot be asked"),
    };
    let processes: Vec<OwnedFd> = process(holder.pid).into_iter().collect();
    ask(root, &Question::Stop, None).context("the daemon's holder cannot be asked")?;
    wait_gone(root, holder.pid, &processes)?;
    Ok(true)
}

/// Waits a moment for the end of the process behind a descriptor.
fn has_ended(process: &OwnedFd) -> bool {
    let moment = Timespec {
        tv_sec: 0,
        tv_nsec: 50_000_000,
    };
    poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&moment)).is_ok_and(|ready| ready > 0)
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
    match &daemon.holder {
        Some(holder) => writeln!(
            out,
            "kept by process {} (version {}): {} restarts, {} upgrades",
            holder.pid, holder.version, holder.restarts, holder.upgrades
        )?,
        None => writeln!(out, "no holder: if the process dies, reads fail")?,
    }
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
    let limit = match totals.cache_max_bytes {
        0 => String::new(),
        max => format!(" of {}", human_bytes(max)),
    };
    writeln!(
        out,
        "cache on disk {}{limit}; {} evictions",
        human_bytes(totals.cache_used_bytes),
        totals.evictions
    )?;
    if !status.node.peers.is_empty() {
        let used = status.node.peers.iter().filter(|peer| peer.used).count();
        writeln!(
            out,
            "{used} of {} peers are asked before the store",
            status.node.peers.len()
        )?;
    }
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
        let mut table = Table::new(&["LEASE", "OWNER", "ON", "LAYERS"]);
        for lease in &status.leases {
            table.row([
                lease.spec.id.clone(),
                lease.spec.owner.clone(),
                holder(&daemon.root, &lease.spec),
                lease.manifests.len().to_string(),
            ]);
        }
        table.write(out)?;
    }
    for swept in &status.node.swept {
        writeln!(out, "swept: {}", printable(swept))?;
    }
    for problem in &status.node.problems {
        writeln!(out, "problem: {}", printable(problem))?;
    }
    Ok(())
}

/// What people know a lease's owner by: the mount point, the sandbox, the process.
pub(super) fn holder(root: &Path, lease: &LeaseSpec) -> String {
    match (lease.owner.as_str(), lease.pid) {
        ("mount", _) => match Place::of_lease(root, &lease.id).record() {
            Ok(Some(record)) => record.directory.display().to_string(),
            _ => "unknown".to_owned(),
        },
        (_, Some(pid)) => format!("process {pid}"),
        _ => lease.id.clone(),
    }
}
