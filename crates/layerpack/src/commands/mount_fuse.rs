//! `layerpack mount --fuse REF... DIR`: a stack of layers as one tree, served by this process.
//!
//! Without `--foreground` the command starts itself again and ends when that process says that the
//! mount is up: by a line on its standard output, which it closes then. What goes wrong before
//! that is reported by it, on the standard error that both share.

use std::io::{ErrorKind, Read as _, Write as _};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use layerpack_layerfs::whole::{Whole, WholeConfig, unmount};
use layerpack_store::{Digest, LayerStore, Manifest, at_once};
use tokio::signal::unix::{SignalKind, signal};

use super::Outcome;
use super::mount::{Mounted, mount_point, split};
use crate::args::MountArgs;
use crate::context::Context;
use crate::output::{Format, print};
use crate::policy::{self, Policy};
use crate::settings::{Given, Settings};
use crate::stack;
use crate::stores;

/// Directory of these mounts' caches, below the cache directory.
const CACHE: &str = "fuse";
/// Where a process in the background logs to, in that directory.
const LOG: &str = "log";
/// A log longer than this is begun anew.
const MAX_LOG: u64 = 1 << 20;
/// How long an end by signal waits for the mount to be gone.
const END_LIMIT: Duration = Duration::from_secs(10);

pub(super) fn run(context: &Context, args: MountArgs) -> Outcome {
    if args.fuse.foreground {
        return serve(context, args);
    }
    start(context, args)
}

/// Starts a process that serves in the background, and waits until its mount is up.
fn start(context: &Context, args: MountArgs) -> Outcome {
    let program = std::env::current_exe().context("cannot find the program itself")?;
    let mut command = Command::new(program);
    command
        .arg("--store")
        .arg(context.store_url())
        .arg("--root")
        .arg(context.root())
        .arg("--cache-dir")
        .arg(context.cache_dir().unwrap_or(Path::new("")))
        .args(context.quiet.then_some("--quiet"))
        .args((context.format == Format::Json).then_some("--output=json"))
        .args(["mount", "--fuse", "--foreground", "--detached"])
        .args(args.fuse.allow_other.then_some("--allow-other"))
        .arg("--prefetch")
        .arg(args.prefetch.prefetch.name())
        .args(
            args.prefetch
                .profile
                .map(|name| format!("--profile={name}")),
        )
        .arg("--")
        .args(args.refs_and_dir)
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let mut child = command.spawn().context("cannot start the server")?;
    let mut said = String::new();
    if let Some(mut out) = child.stdout.take() {
        out.read_to_string(&mut said)
            .context("cannot hear of the server")?;
    }
    if let Ok(mounted) = serde_json::from_str::<serde_json::Value>(&said) {
        print(context.format, &mounted, |_| Ok(()))?;
        return Ok(ExitCode::SUCCESS);
    }
    let status = child.wait().context("cannot wait for the server")?;
    match status.code().and_then(|code| u8::try_from(code).ok()) {
        // It said why.
        Some(code) if code != 0 => Ok(ExitCode::from(code)),
        _ => Err(anyhow!("the server ended before its mount was up: {status}").into()),
    }
}

/// Holds the layers to the node's signature policy; warnings where it only warns. Whoever may not
/// look into the node's directory has no node to mount for.
fn signed(
    context: &Context,
    store: &LayerStore,
    layers: &[stack::StackLayer],
) -> anyhow::Result<Vec<String>> {
    let path = context.root().join(policy::FILE_NAME);
    match fs_err::File::open(&path) {
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied) => {
            return Ok(Vec::new());
        }
        _ => {}
    }
    let Some(policy) = Policy::load(&path)? else {
        return Ok(Vec::new());
    };
    let warnings = at_once(layers, policy::CHECKS, |layer| {
        policy.check(store, &layer.digest, Some(&layer.manifest))
    })?;
    Ok(warnings.into_iter().flatten().collect())
}

fn serve(context: &Context, args: MountArgs) -> Outcome {
    if args.fuse.detached {
        // Fails only for a process group leader, which a child that was just started is not.
        let _ = rustix::process::setsid();
    }
    let (references, dir) = split(args.refs_and_dir)?;
    let Some(cache) = context.cache_dir() else {
        return Err(anyhow!(
            "a mount needs a directory for its cache: name one with --cache-dir or LAYERPACK_CACHE"
        )
        .into());
    };
    let cache = cache.join(CACHE);
    let store = context.store()?;
    let layers = stack::resolve(&store, &references)?;
    let prefetch = args.prefetch.spec(context, &store, &layers)?;
    for warning in signed(context, &store, &layers)? {
        crate::output::warning(&warning);
    }
    let directory = mount_point(&dir)?;
    if super::umount::is_tree(&directory)? {
        return Err(anyhow!(
            "a tree is mounted on {} already: `layerpack umount` it first",
            directory.display()
        )
        .into());
    }
    let settings = Settings::load(Given::default())?;
    let mut config = WholeConfig::recommended(cache.clone());
    config.fetch.cache_max = settings.cache_max;
    settings.node.reads.apply(&mut config.fetch);
    config.allow_other = args.fuse.allow_other;
    config.prefetch = prefetch;
    config.fill_bytes_per_second = settings.fill_rate;
    config.open_store = stores::opener(config.fetch.read_timeout);
    // As it is to be asked for readers.
    let store = (config.open_store)(context.store_url())?;
    let manifests: Vec<(Digest, Manifest)> = layers
        .iter()
        .map(|layer| (layer.digest, layer.manifest.clone()))
        .collect();
    let whole = Whole::open(&store, &manifests, config)?;
    drop(manifests);
    // One thread takes signals; it begins before the mount, so that none is missed.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the server's threads")?;
    let ended = runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let session = whole.mount(&directory)?;
        let mounted = Mounted::new(directory.clone(), layers, false);
        if args.fuse.detached {
            let mut out = std::io::stdout().lock();
            serde_json::to_writer(&mut out, &mounted)?;
            out.flush()?;
            drop(out);
            leave(&cache)?;
        } else {
            print(context.format, &mounted, |_| Ok(()))?;
        }
        let mut served = tokio::task::spawn_blocking(move || session.wait());
        tokio::select! {
            ended = &mut served => return joined(ended),
            _ = terminate.recv() => tracing::info!("ended by SIGTERM"),
            _ = interrupt.recv() => tracing::info!("ended by SIGINT"),
        }
        if let Err(error) = unmount(&directory, false) {
            tracing::info!(%error, "unmounting it under the hands of its users");
            unmount(&directory, true)?;
        }
        match tokio::time::timeout(END_LIMIT, served).await {
            Ok(ended) => joined(ended),
            // Its last users hold it: they get errors from now on.
            Err(_) => Ok(()),
        }
    });
    runtime.shutdown_background();
    ended?;
    Ok(ExitCode::SUCCESS)
}

fn joined(
    ended: Result<layerpack_layerfs::Result<()>, tokio::task::JoinError>,
) -> anyhow::Result<()> {
    match ended {
        Ok(result) => Ok(result?),
        Err(error) => bail!("the serving thread failed: {error}"),
    }
}

/// Lets go of the caller's terminal and directory.
fn leave(cache: &Path) -> anyhow::Result<()> {
    let path = cache.join(LOG);
    let long = fs_err::metadata(&path).is_ok_and(|log| log.len() > MAX_LOG);
    if long {
        fs_err::remove_file(&path)?;
    }
    let log = fs_err::OpenOptions::new()
        .create(true)
        .append(true)
        .open(&path)?;
    rustix::stdio::dup2_stderr(&log)?;
    let null = fs_err::OpenOptions::new().write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdout(&null)?;
    std::env::set_current_dir("/")?;
    Ok(())
}
