//! `layerpack daemon`: run, stop, ask.

use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use layerpack_layerfs::LeaseSpec;
use layerpack_layerfs::holder::{Question, Reply, Who, ask, remedy};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal};
use serde::Serialize;

use super::Outcome;
use crate::api;
use crate::args::{DaemonArgs, DaemonCommand};
use crate::client::{Client, ClientError};
use crate::context::{Context, prepare_root, require_root};
use crate::holder::{self, Linked};
use crate::mounts::Place;
use crate::output::{Table, print, printable, warning};
use crate::policy::{self, Policy};
use crate::settings::{Given, Settings};
use crate::units::human_bytes;

/// How long `stop` waits for the process to be gone after it agreed to go.
const GONE: Duration = Duration::from_secs(30);
/// How long a holder may outlive the daemon before `stop --force` kills it: it has nothing to do.
const LAST: Duration = Duration::from_secs(5);
/// How long a holder may take to answer what costs it nothing.
const ANSWER: Duration = Duration::from_secs(10);
/// How long it may take to upgrade: by its own limits the new version has 20 s to greet, the old one
/// 10 s to leave, and the new one two minutes to be ready.
const UPGRADE: Duration = Duration::from_secs(180);

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
    if !detached && super::watched::hand_over(context)? {
        return Ok(ExitCode::SUCCESS);
    }
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
    /// The holder now; absent if it is the one from before.
    #[serde(skip_serializing_if = "Option::is_none")]
    holder: Option<Who>,
    /// Why it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    holder_stays: Option<String>,
}

fn upgrade(context: &Context) -> Outcome {
    require_root("upgrading the daemon")?;
    let (old, new) = take_over(context.root())?;
    // The new daemon is of this program, and so is the holder that it starts.
    let replaced = Client::new(context.root())?.replace_holder();
    let holder_stays = replaced.as_ref().err().map(ToString::to_string);
    if let Some(why) = &holder_stays
        && context.says_warnings()
    {
        warning(why);
    }
    let upgraded = Upgraded {
        old,
        new,
        holder: replaced.ok().map(|holder| Who {
            pid: holder.pid,
            version: holder.version,
        }),
        holder_stays,
    };
    let version = |who: &Who| format!("{} (process {})", who.version, who.pid);
    print(context.format, &upgraded, |out| {
        let old = upgraded.old.as_ref().map_or("none".to_owned(), version);
        writeln!(
            out,
            "layerpack {old} gave way to {}",
            version(&upgraded.new)
        )?;
        match &upgraded.holder {
            Some(holder) => writeln!(out, "kept by {}", version(holder)),
            None => Ok(()),
        }
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Has this program take over from the daemon.
fn take_over(root: &Path) -> anyhow::Result<(Option<Who>, Who)> {
    let program = holder::program()?;
    // First whether it answers at all, which needs no long wait.
    let upgraded = ask(root, &Question::Status, None, ANSWER)
        .and_then(|_| ask(root, &Question::Upgrade, Some(&program), UPGRADE));
    match upgraded {
        Ok(Reply::Upgraded { old, new }) => Ok((old, new)),
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
        Err(StopError::Client(ClientError::Lost { .. } | ClientError::Failing(_))) => {
            end_holder(context.root(), force)?
        }
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
    #[error("the daemon for {root} has stopped, but its holder (process {pid}) is still there after {} s: {remedy}", GONE.as_secs())]
    HolderStays {
        root: String,
        pid: u32,
        remedy: String,
    },
}

/// A process that is to end.
struct Ending {
    pid: u32,
    process: OwnedFd,
}

impl Ending {
    /// By a descriptor, taken before it is told to stop, so that it cannot be of a later process of
    /// that number. `None` if there is no such process here.
    fn of(pid: u32) -> Option<Self> {
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw)?;
        let process = layerpack_sys::ns::pidfd_open(number).ok()?;
        Some(Self { pid, process })
    }

    /// Waits for its end, at most until `end`; whether it came.
    fn wait(&self, end: Instant) -> bool {
        loop {
            if has_ended(&self.process) {
                return true;
            }
            if Instant::now() >= end {
                return false;
            }
        }
    }

    fn kill(&self) {
        let _ = rustix::process::pidfd_send_signal(&self.process, Signal::KILL);
    }
}

/// Waits until a holder has ended whose daemon has. It then holds nothing: with `force` it is killed
/// if it takes long.
fn wait_holder(root: &Path, holder: &Ending, force: bool) -> Result<(), StopError> {
    let begun = Instant::now();
    if force {
        if holder.wait(begun + LAST) {
            return Ok(());
        }
        holder.kill();
    }
    if holder.wait(begun + GONE) {
        return Ok(());
    }
    Err(StopError::HolderStays {
        root: root.display().to_string(),
        pid: holder.pid,
        remedy: remedy(i32::try_from(holder.pid).unwrap_or(0)),
    })
}

/// Stops the daemon and waits until its process and its holder have ended.
fn end(client: &Client, root: &Path, force: bool) -> Result<(), StopError> {
    let info = client.info()?;
    let pid = info.pid;
    let worker = Ending::of(pid);
    let holder = info.holder.and_then(|holder| Ending::of(holder.pid));
    client.stop(force)?;
    let stays = || StopError::Stays {
        root: root.display().to_string(),
        pid,
    };
    if worker.is_some() || holder.is_some() {
        if let Some(worker) = &worker
            && !worker.wait(Instant::now() + GONE)
        {
            return Err(stays());
        }
        return holder.map_or(Ok(()), |holder| wait_holder(root, &holder, force));
    }
    // In another pid namespace its number says nothing, and its socket has to do.
    let begun = Instant::now();
    while begun.elapsed() < GONE {
        if matches!(client.info(), Err(ClientError::NotRunning { .. })) {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Err(stays())
}

/// Ends a daemon that does not answer, by its holder. `false` if there is none.
fn end_holder(root: &Path, force: bool) -> anyhow::Result<bool> {
    let unasked = "the daemon does not answer, and its holder cannot be asked";
    let (holder, worker) = match ask(root, &Question::Status, None, ANSWER) {
        Ok(Reply::Standing { holder, worker, .. }) => (holder, worker),
        Ok(other) => bail!("the holder gave no answer to this: {other:?}"),
        Err(e) if is_absent(&e) => return Ok(false),
        Err(e) => return Err(e).context(unasked),
    };
    let worker = worker.and_then(|worker| Ending::of(worker.pid));
    let process = Ending::of(holder.pid);
    ask(root, &Question::Stop, None, ANSWER).context(unasked)?;
    let Some(process) = process else {
        return Ok(true);
    };
    // It ends after the worker, which may be another one by then.
    let end = Instant::now() + GONE;
    if !process.wait(end) {
        let alive = worker.filter(|worker| !worker.wait(Instant::now()));
        if let Some(worker) = alive {
            return Err(StopError::Stays {
                root: root.display().to_string(),
                pid: worker.pid,
            }
            .into());
        }
        wait_holder(root, &process, force)?;
    }
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
        let mut table = Table::new(&["LEASE", "OWNER", "ON", "LAYERS", "STATE"]);
        for lease in &status.leases {
            table.row([
                lease.spec.id.clone(),
                lease.spec.owner.clone(),
                holder(&daemon.root, &lease.spec),
                lease.manifests.len().to_string(),
                if lease.lost { "lost" } else { "served" }.to_owned(),
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
