//! What `run` and `sandbox` share: from options to the runtime's specifications, and the lease
//! that keeps a sandbox's layers mounted.
//!
//! The client and its runtime are gone before anything is launched: a launcher has one thread.

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsString;
use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use layerpack_layerfs::LeaseSpec;
use layerpack_runtime::{
    ExecSpec, IdMap, Limits, Network, SandboxId, SandboxSpec, Sandboxes, SandboxesOptions, Terminal,
};

use crate::INIT_NAME;
use crate::api::StackRequest;
use crate::args::{NetworkArg, PrefetchArgs, ProcessArgs, ShapeArgs};
use crate::client::{Client, ClientError};
use crate::context::Context;
use crate::depth;
use crate::known;
use crate::output::warning;
use crate::stack::{self, StackLayer};
use crate::stores;

/// Host id of a sandbox's root: far above what a machine gives its own users.
const ID_BASE: u32 = 1 << 20;
/// Ids of a sandbox: 0 to 65535, `nobody` included.
const ID_COUNT: u32 = 1 << 16;
/// Control group below which each sandbox gets its own.
const CGROUP_PARENT: &str = "layerpack";
/// Label that keeps a lasting sandbox's default user.
const USER_LABEL: &str = "layerpack.user";
/// Label that keeps a lasting sandbox's default working directory.
const WORKDIR_LABEL: &str = "layerpack.workdir";

/// Label that names the snapshots which a sandbox's own processes may publish, as a pattern.
pub(crate) const PACK_DIFF_LABEL: &str = "layerpack.pack-diff";
/// Label that keeps the address of the store that a sandbox was made from.
pub(crate) const STORE_LABEL: &str = "layerpack.store";
/// Name of the file of a sandbox's own rules for snapshots, in its directory.
pub(crate) const RULES_FILE: &str = "rules.toml";

/// The node's sandboxes.
pub(crate) fn sandboxes(root: &Path) -> anyhow::Result<Sandboxes> {
    Ok(Sandboxes::open(SandboxesOptions {
        root: root.join("sandboxes"),
        init: init(),
        agent: None,
        cgroup_parent: CGROUP_PARENT.to_owned(),
        stop_by_signals: false,
    })?)
}

/// The program of PID 1: a small one beside this one, if it is there.
fn init() -> Option<PathBuf> {
    let own = env::current_exe().ok()?;
    // This one was replaced or removed while it runs: what lies beside it is of another version.
    if own.as_os_str().as_encoded_bytes().ends_with(b" (deleted)") {
        return None;
    }
    let init = own.with_file_name(INIT_NAME);
    (init != own && init.is_file()).then_some(init)
}

/// A stack that is mounted for one sandbox; ended on drop unless it is kept.
#[derive(Debug)]
pub(crate) struct SandboxLease {
    root: PathBuf,
    id: String,
    kept: bool,
}

impl SandboxLease {
    /// Resolves `references`, has the daemon mount them, and begins the specification of a
    /// sandbox on them. With `watched` the lease ends with this process at the latest.
    pub(crate) fn take(
        context: &Context,
        references: &[String],
        shape: &ShapeArgs,
        prefetch: &PrefetchArgs,
        watched: bool,
    ) -> anyhow::Result<(Self, SandboxSpec)> {
        let store = context.store()?;
        let layers = known::resolve(context, &store, references)?;
        let mounted = depth::bounded(&store, &layers)?;
        let prefetch = prefetch.spec(context, &store, &layers)?;
        drop(store);
        // A process that forks a sandbox has one thread: a remote store's end here. The daemon
        // asks it for everything else.
        stores::quiesce()?;
        let id = SandboxId::random()?;
        // Before anything is mounted: what is wrong with the options is wrong without layers too.
        let mut spec = specification(id, shape, &layers)?;
        let client = context.daemon("running a sandbox")?;
        let lease = Self {
            root: context.root().to_owned(),
            id: spec.id.to_string(),
            kept: false,
        };
        let owner = if watched { "run" } else { "sandbox" }.to_owned();
        let pid = watched.then(std::process::id);
        let request = |layers: &[StackLayer]| StackRequest {
            store: context.store_url().to_owned(),
            layers: layers
                .iter()
                .map(|layer| layer.digest.to_string())
                .collect(),
            lease: LeaseSpec {
                id: lease.id.clone(),
                owner: owner.clone(),
                pid,
            },
            prefetch: prefetch.clone(),
            manifests: stack::manifests(layers),
        };
        let reply = match client.stack_up(&request(&mounted)) {
            // What the node merged itself is signed by nobody, say.
            Err(ClientError::Refused { .. }) if mounted.len() != layers.len() => {
                client.stack_up(&request(&layers))?
            }
            reply => reply?,
        };
        if context.says_warnings() {
            reply.warnings.iter().for_each(|text| warning(text));
        }
        spec.lowers = reply.lowers;
        let store = context.store_url().to_owned();
        spec.labels.insert(STORE_LABEL.to_owned(), store);
        spec.lease = Some(lease.id.clone());
        Ok((lease, spec))
    }

    /// Leaves the stack mounted, for a sandbox that outlives this process.
    pub(crate) fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for SandboxLease {
    fn drop(&mut self) {
        if !self.kept
            && let Err(error) = release(&self.root, &self.id)
        {
            tracing::warn!(lease = %self.id, error = %format!("{error:#}"), "cannot release the layers");
        }
    }
}

/// Ends a lease. A daemon that is not there, or dies meanwhile, holds none.
pub(crate) fn release(root: &Path, lease: &str) -> anyhow::Result<()> {
    match Client::new(root)?.release(lease) {
        Ok(_)
        | Err(
            ClientError::NotRunning { .. } | ClientError::Lost { .. } | ClientError::Failing(_),
        ) => Ok(()),
        Err(error) => Err(error).with_context(|| format!("the daemon keeps the layers of {lease}")),
    }
}

fn specification(
    id: SandboxId,
    shape: &ShapeArgs,
    layers: &[StackLayer],
) -> anyhow::Result<SandboxSpec> {
    Ok(SandboxSpec {
        id,
        name: shape.name.as_deref().map(str::parse).transpose()?,
        stack: layers
            .iter()
            .map(|layer| layerpack_runtime::StackLayer {
                reference: layer.name.clone(),
                manifest: layer.digest.to_string(),
            })
            .collect(),
        lowers: Vec::new(),
        hostname: shape.hostname.clone(),
        limits: Limits {
            memory_bytes: shape.memory.map(|bytes| bytes.0),
            cpus: shape.cpus.map(|cpus| cpus.as_f64()),
            pids: shape.pids_limit,
        },
        network: match shape.network {
            NetworkArg::None => Network::None,
            NetworkArg::Host => Network::Host,
        },
        id_map: IdMap {
            base: ID_BASE,
            count: ID_COUNT,
        },
        read_only: false,
        no_new_privileges: false,
        env: Vec::new(),
        channel: false,
        lease: None,
        labels: BTreeMap::new(),
    })
}

/// Records the default user and directory of a lasting sandbox's commands.
pub(crate) fn set_defaults(
    spec: &mut SandboxSpec,
    user: Option<String>,
    workdir: Option<&Path>,
) -> anyhow::Result<()> {
    if let Some(user) = user {
        spec.labels.insert(USER_LABEL.to_owned(), user);
    }
    if let Some(workdir) = workdir {
        let Some(text) = workdir.to_str() else {
            bail!("the working directory {} is not UTF-8", workdir.display())
        };
        spec.labels
            .insert(WORKDIR_LABEL.to_owned(), text.to_owned());
    }
    Ok(())
}

/// A command with the options given for it, else the sandbox's defaults.
pub(crate) fn command(
    argv: Vec<OsString>,
    process: &ProcessArgs,
    defaults: &BTreeMap<String, String>,
) -> anyhow::Result<ExecSpec> {
    Ok(ExecSpec {
        argv,
        env: environment(&process.env)?,
        cwd: process
            .workdir
            .clone()
            .or_else(|| defaults.get(WORKDIR_LABEL).map(PathBuf::from)),
        user: process
            .user
            .clone()
            .or_else(|| defaults.get(USER_LABEL).cloned()),
        terminal: if process.tty {
            Some(terminal(process.interactive)?)
        } else {
            None
        },
        timeout: None,
        forward_signals: true,
    })
}

/// Reads `KEY=VALUE`; `KEY` alone passes the caller's variable on, if it is set.
pub(crate) fn environment(given: &[String]) -> anyhow::Result<Vec<(OsString, OsString)>> {
    let mut variables = Vec::with_capacity(given.len());
    for text in given {
        let (key, value) = match text.split_once('=') {
            Some((key, value)) => (key, Some(OsString::from(value))),
            None => (text.as_str(), env::var_os(text)),
        };
        if key.is_empty() {
            bail!("variable {text:?} has no name: write KEY=VALUE");
        }
        if let Some(value) = value {
            variables.push((OsString::from(key), value));
        }
    }
    Ok(variables)
}

fn terminal(interactive: bool) -> anyhow::Result<Terminal> {
    if interactive && !std::io::stdin().is_terminal() {
        bail!("stdin is no terminal: leave -t out, or -i if the command needs no input");
    }
    // The size follows the caller's terminal; without one the classic size will do.
    let size = rustix::termios::tcgetwinsize(std::io::stdin())
        .or_else(|_| rustix::termios::tcgetwinsize(std::io::stdout()));
    Ok(match size {
        Ok(size) if size.ws_row > 0 && size.ws_col > 0 => Terminal {
            rows: size.ws_row,
            columns: size.ws_col,
        },
        _ => Terminal {
            rows: 24,
            columns: 80,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_read_as_docker_reads_them() {
        let given = [
            "A=1".to_owned(),
            "B=".to_owned(),
            "C=x=y".to_owned(),
            "LAYERPACK_TEST_UNSET_VARIABLE".to_owned(),
        ];
        let read = environment(&given).unwrap();
        let expected: Vec<(OsString, OsString)> = [("A", "1"), ("B", ""), ("C", "x=y")]
            .map(|(k, v)| (k.into(), v.into()))
            .into();
        assert_eq!(read, expected);
        assert!(environment(&["=x".to_owned()]).is_err());
    }
}
