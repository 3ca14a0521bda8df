//! What a caller says about a sandbox and about a command in it.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::{Result, RuntimeError};

/// Longest name or id, in bytes: a host name label.
const NAME_MAX: usize = 63;

fn check_name(what: &'static str, value: &str) -> Result<()> {
    let ok = value.len() <= NAME_MAX
        && value
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"._-".contains(&b))
        && value
            .bytes()
            .next()
            .is_some_and(|b| b.is_ascii_alphanumeric());
    if ok {
        Ok(())
    } else {
        Err(RuntimeError::InvalidName {
            what,
            value: value.to_owned(),
        })
    }
}

macro_rules! name_type {
    ($(#[$doc:meta])* $name:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// The text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = RuntimeError;

            fn from_str(value: &str) -> Result<Self> {
                check_name($what, value)?;
                Ok(Self(value.to_owned()))
            }
        }

        impl TryFrom<String> for $name {
            type Error = RuntimeError;

            fn try_from(value: String) -> Result<Self> {
                check_name($what, &value)?;
                Ok(Self(value))
            }
        }

        impl From<$name> for String {
            fn from(value: $name) -> Self {
                value.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

name_type!(
    /// Identity of a sandbox on its node; also the name of its directory and control group.
    SandboxId,
    "sandbox id"
);
name_type!(
    /// A name that a user gave to a sandbox; unique on the node.
    SandboxName,
    "sandbox name"
);

impl SandboxId {
    /// A new id of 12 random hexadecimal digits.
    ///
    /// # Errors
    /// If the kernel gives no random bytes.
    pub fn random() -> Result<Self> {
        use std::io::Read as _;
        let mut bytes = [0u8; 6];
        fs_err::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
        let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
        Self::try_from(hex)
    }
}

/// A layer of the environment, for the record: the runtime itself only uses [`SandboxSpec::lowers`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StackLayer {
    /// `kind/name:version` as resolved.
    pub reference: String,
    /// Digest of its manifest.
    pub manifest: String,
}

/// Which host ids a sandbox's ids are: ids `0..count` inside are `base..base+count` outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdMap {
    /// Host id of the sandbox's root.
    pub base: u32,
    /// How many ids the sandbox has.
    pub count: u32,
}

/// Limits of a sandbox. `None`: no limit of its own.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// Memory, page cache included, in bytes; swap is not given in addition.
    pub memory_bytes: Option<u64>,
    /// Processor time, in processors (1.5: one and a half).
    pub cpus: Option<f64>,
    /// Processes and threads.
    pub pids: Option<u64>,
}

/// What network a sandbox sees.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Network {
    /// Only a loopback device of its own.
    #[default]
    None,
    /// The host's network, its listening sockets on localhost and its abstract unix sockets included.
    Host,
}

/// A sandbox to make.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SandboxSpec {
    /// Its identity.
    pub id: SandboxId,
    /// Its name.
    pub name: Option<SandboxName>,
    /// The layers, bottom first, for the record.
    pub stack: Vec<StackLayer>,
    /// Directories to stack, **top first**; they must stay as they are for the
    /// sandbox's life.
    pub lowers: Vec<PathBuf>,
    /// Host name inside; the id if there is none.
    pub hostname: Option<String>,
    /// Limits.
    pub limits: Limits,
    /// Network.
    pub network: Network,
    /// Ids.
    pub id_map: IdMap,
    /// No writes at all to the root filesystem.
    pub read_only: bool,
    /// Set-id programs and file capabilities give nothing.
    pub no_new_privileges: bool,
    /// Environment that every command starts from; after the built-in `PATH` and so on.
    pub env: Vec<(String, String)>,
    /// Show the directory [`crate::Sandbox::channel`] inside as `/dev/layerpack`, with the launching
    /// program in it as `pack_diff`, both read-only.
    #[serde(default)]
    pub channel: bool,
    /// The caller's name of what keeps the lower directories there (a lease), for the record.
    pub lease: Option<String>,
    /// Free for the caller, for the record.
    pub labels: BTreeMap<String, String>,
}

impl SandboxSpec {
    /// The host name inside.
    pub fn hostname(&self) -> &str {
        self.hostname.as_deref().unwrap_or(self.id.as_str())
    }

    /// Refuses settings that make no sense, before anything is done.
    ///
    /// # Errors
    /// [`RuntimeError::InvalidSpec`] that names the setting.
    pub fn check(&self) -> Result<()> {
        let invalid = |what, problem: &str| {
            Err(RuntimeError::InvalidSpec {
                what,
                problem: problem.to_owned(),
            })
        };
        let hostname = self.hostname();
        if hostname.is_empty()
            || hostname.len() > 64
            || hostname.bytes().any(|b| !b.is_ascii_graphic())
        {
            return invalid(
                "host name",
                "use 1 to 64 printable characters without blanks",
            );
        }
        if self.lowers.is_empty() {
            return invalid("layers", "a sandbox needs at least one");
        }
        if self.id_map.base < 65_536 || self.id_map.base.checked_add(self.id_map.count).is_none() {
            return invalid(
                "id range",
                "it must begin at 65536 or above, clear of the host's users, and end below 2^32",
            );
        }
        if self.id_map.count < 65_536 {
            return invalid("id range", "a sandbox needs at least 65536 ids");
        }
        if self
            .limits
            .cpus
            .is_some_and(|cpus| !(0.01..=4096.0).contains(&cpus))
        {
            return invalid("limit of processors", "use 0.01 to 4096");
        }
        if self
            .limits
            .memory_bytes
            .is_some_and(|bytes| bytes < 6 << 20)
        {
            return invalid("limit of memory", "use at least 6 MiB");
        }
        if self.limits.pids.is_some_and(|pids| pids < 2) {
            return invalid("limit of processes", "use at least 2");
        }
        Ok(())
    }
}

/// Size of the terminal that a command gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terminal {
    /// Rows.
    pub rows: u16,
    /// Columns.
    pub columns: u16,
}

/// A command to run in a sandbox.
#[derive(Debug, Clone, Default)]
pub struct ExecSpec {
    /// Program (looked up in the sandbox's `PATH` unless it has a slash) and arguments.
    pub argv: Vec<OsString>,
    /// Added to the sandbox's environment, which never includes the caller's.
    pub env: Vec<(OsString, OsString)>,
    /// Working directory; `/` if `None`.
    pub cwd: Option<PathBuf>,
    /// `user[:group]` by name or number, looked up in the sandbox; root if `None`.
    pub user: Option<String>,
    /// Give the command a terminal of its own.
    pub terminal: Option<Terminal>,
    /// Kill it after this long.
    pub timeout: Option<Duration>,
    /// Pass SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2 and SIGWINCH of
    /// the calling process on. Only in a process without other threads.
    pub forward_signals: bool,
}

/// Where a command's streams go. The descriptors are read and written by the
/// caller's process; the command itself only gets pipes or a terminal.
#[derive(Debug, Default)]
pub struct Streams {
    /// Passed on to the command; `None`: it reads end of file at once.
    pub stdin: Option<OwnedFd>,
    /// Gets its standard output; `None`: thrown away.
    pub stdout: Option<OwnedFd>,
    /// Gets its standard error; `None`: thrown away. Unused with a terminal.
    pub stderr: Option<OwnedFd>,
}

impl Streams {
    /// Duplicates of the caller's own streams; standard input only if `stdin`.
    ///
    /// # Errors
    /// If a stream is closed or there are too many open files.
    pub fn inherit(stdin: bool) -> Result<Self> {
        use std::os::fd::AsFd as _;
        Ok(Self {
            stdin: if stdin {
                Some(std::io::stdin().as_fd().try_clone_to_owned()?)
            } else {
                None
            },
            stdout: Some(std::io::stdout().as_fd().try_clone_to_owned()?),
            stderr: Some(std::io::stderr().as_fd().try_clone_to_owned()?),
        })
    }
}

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exit {
    /// Its exit code; 128 and the signal's number if a signal ended it; 124 after a timeout.
    pub code: u8,
    /// The kernel killed something in the sandbox for want of memory meanwhile.
    pub oom_killed: bool,
    /// It was killed because its time was over.
    pub timed_out: bool,
}
