//! The command line: names and options follow docker, podman and restic where they have one.

mod build;
mod cache;
mod channels;
mod flatten;
mod fuse;
mod ids;
mod node;
mod pack_diff;
mod prefetch;
mod profile;
mod query;
mod signing;
mod snapshot;
mod transfer;
mod upkeep;
mod watch;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{ArgAction, Args, Parser, Subcommand};

pub(crate) use self::build::BuildArgs;
pub(crate) use self::cache::{CacheArgs, CacheCommand, CacheEvictArgs};
pub(crate) use self::flatten::FlattenArgs;
pub(crate) use self::fuse::FuseArgs;
pub(crate) use self::ids::IdArgs;
pub(crate) use self::pack_diff::PackDiffArgs;
pub(crate) use upkeep::{GcArgs, PruneArgs, RepairArgs};

pub(crate) use self::node::NodeArgs;
pub(crate) use self::signing::{KeyArgs, KeyCommand, SignArgs, SignWithArgs};
pub(crate) use self::snapshot::{
    CheckoutArgs, SnapshotArgs, SnapshotCommand, SnapshotDiffArgs, SnapshotExportArgs,
    SnapshotInspectArgs, SnapshotLsArgs, SnapshotRebaseArgs, SnapshotSquashArgs, StrategyArg,
};
use crate::output::Format;
use crate::settings::Limit;
use crate::units::{Age, Bytes, Cpus};
pub(crate) use channels::{TagArgs, UntagArgs};
pub(crate) use prefetch::PrefetchArgs;
pub(crate) use profile::{
    ProfileArgs, ProfileCommand, ProfileMergeArgs, ProfilePublishArgs, ProfileRecordArgs,
    ProfileShowArgs, SeedArgs,
};
pub(crate) use query::{CatArgs, DiffArgs, DuArgs, FindArgs};
pub(crate) use transfer::{CopyArgs, PullArgs, PushArgs, TransferArgs};
pub(crate) use watch::{TopArgs, TraceArgs};

/// Where node state lies when neither `--root` nor `LAYERPACK_ROOT` says so.
pub(crate) const DEFAULT_ROOT: &str = "/var/lib/layerpack";

const EXIT_CODES: &str = "\
Exit codes: 0 done; 1 failed (one line that starts with `error:` says why); 2 a command line that is
not understood. `run` and `sandbox exec` pass on the code of the command (128 + number when a signal
ended it), 125 when layerpack itself failed, 126 when the command cannot be started, 127 when it is
missing.";

/// Image layers and lazy filesystems for sandboxes.
#[derive(Debug, Parser)]
#[command(name = "layerpack", version, after_help = EXIT_CODES, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Options that every command takes.
#[derive(Debug, Clone, Args)]
pub(crate) struct Global {
    /// Where layers live: a directory, s3://BUCKET/PREFIX, https://HOST/PATH or other address;
    /// several of one store with commas between [default: ROOT/store]
    #[arg(
        long,
        global = true,
        env = "LAYERPACK_STORE",
        value_name = "URL",
        hide_env_values = true
    )]
    pub(crate) store: Option<String>,
    /// Directory of this node's state: cache, mounts, sandboxes, daemon socket
    #[arg(long, global = true, env = "LAYERPACK_ROOT", value_name = "DIR", default_value = DEFAULT_ROOT)]
    pub(crate) root: PathBuf,
    /// Directory of what can be made again: build cache, copies of indexes and manifests; empty: none [default:
    /// /var/cache/layerpack as root, else the user's cache directory]
    #[arg(
        long,
        global = true,
        env = "LAYERPACK_CACHE",
        value_name = "DIR",
        hide_env_values = true
    )]
    pub(crate) cache_dir: Option<OsString>,
    /// How results are printed
    #[arg(short, long, global = true, value_enum, value_name = "FORMAT", default_value_t = Format::Text)]
    pub(crate) output: Format,
    /// Log more to stderr (repeat for more still)
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub(crate) verbose: u8,
    /// No progress and no warnings on stderr
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub(crate) quiet: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Pack a directory or an archive into a layer and publish it
    Build(Box<BuildArgs>),
    /// Collapse consecutive layers into one over the same data
    Merge(MergeArgs),
    /// Write a stack of layers as an archive or a container image
    Export(ExportArgs),
    /// Write a stack of layers as one EROFS image that needs nothing else
    Flatten(FlattenArgs),
    /// List the store's layers
    Ls(LsArgs),
    /// Show a layer, or the conflicts of a stack of layers
    Inspect(InspectArgs),
    /// Read every byte of a layer, or of a whole store, and check it
    ///
    /// Damage, and with --signed a missing signature, exit with 1. That a layer is not there which
    /// another was made on is a warning: every byte is right, but a diff cannot be mounted without it.
    Verify(VerifyArgs),
    /// Make and show keys that sign layers
    Key(KeyArgs),
    /// Sign layers: vouch for them to nodes that ask for it
    Sign(SignArgs),
    /// Take a layer's reference out of the store
    Rm(RmArgs),
    /// Delete what no layer uses any more
    Gc(GcArgs),
    /// Copy what is used out of packs that hold little else, then collect garbage
    Prune(PruneArgs),
    /// Make lost indexes and locators again
    Repair(RepairArgs),
    /// Copy layers from the store to another
    ///
    /// Only what the target lacks moves, as it is stored. A frame that layers share moves whole, and can
    /// hold what was removed before a layer was built: see --reframe.
    Push(PushArgs),
    /// Copy layers from another store to the store
    ///
    /// Only what the store lacks moves, as it is stored. A frame that layers share moves whole: see
    /// --reframe.
    Pull(PullArgs),
    /// Copy layers between two other stores
    ///
    /// Only what the target lacks moves, as it is stored. A frame that layers share moves whole, and can
    /// hold what was removed before a layer was built: see --reframe.
    Copy(CopyArgs),
    /// Show how two layers or stacks differ
    Diff(DiffArgs),
    /// Show what layers take up and share
    Du(DuArgs),
    /// Write a file of a layer or stack to standard output
    Cat(CatArgs),
    /// Find entries of a layer or stack by path, type and size
    Find(FindArgs),
    /// What environments read: record, ls, show, merge, rm, learned, publish
    Profile(ProfileArgs),
    /// Copy what profiles use of some layers to another store, within a number of bytes
    Seed(SeedArgs),
    /// Move a channel to a version, or list channels
    Tag(TagArgs),
    /// Remove channels
    Untag(UntagArgs),
    /// Mount a stack of layers on a directory
    Mount(MountArgs),
    /// Unmount what `mount` mounted
    Umount(UmountArgs),
    /// What this node holds of layers: ls, du, pin, unpin, evict, verify
    Cache(CacheArgs),
    /// Show live mounts and their rates
    Top(TopArgs),
    /// Show which files of a mount are read, and what is fetched for them
    Trace(TraceArgs),
    /// Run, stop or ask the node daemon
    Daemon(DaemonArgs),
    /// Check what this node can do, and say what to change
    Doctor,
    /// Run one command in a fresh sandbox
    Run(RunArgs),
    /// Sandboxes that last: create, exec, ls, rm
    Sandbox(SandboxArgs),
    /// Publish what a sandbox changed as a diff layer
    PackDiff(PackDiffArgs),
    /// Snapshots: ls, inspect, diff, squash, rebase, export, rm
    Snapshot(SnapshotArgs),
    /// Write what a stack shows into a directory
    Checkout(CheckoutArgs),
}

#[derive(Debug, Args)]
pub(crate) struct MergeArgs {
    /// Layers to merge, bottom first
    #[arg(required = true, value_name = "REF")]
    pub(crate) refs: Vec<String>,
    /// Name of the merged layer
    #[arg(long)]
    pub(crate) name: String,
    /// Version of the merged layer; once published it never changes
    #[arg(long)]
    pub(crate) version: String,
    #[command(flatten)]
    pub(crate) sign: SignWithArgs,
    /// Leave the indexes of git repositories as the layers have them. They are refreshed otherwise, so
    /// that `git status` reads no more of the merged layer than of those that it is made of
    #[arg(long)]
    pub(crate) no_git_index: bool,
    /// Kind of the merged layer [default: that of the bottom layer]
    #[arg(long)]
    pub(crate) kind: Option<String>,
    /// Label for people and tools (repeatable)
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) label: Vec<String>,
}

/// How an image's layers are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum LayerCompression {
    Gzip,
    Zstd,
    None,
}

#[derive(Debug, Args)]
pub(crate) struct ExportArgs {
    /// The stack, bottom first; a diff in front brings its parents along
    #[arg(required = true, value_name = "REF")]
    pub(crate) refs: Vec<String>,
    /// Where to: oci:DIR, docker-archive:FILE, `registry:HOST/REPOSITORY[:TAG]`, or tar:FILE for what
    /// the stack shows (tar:- on standard output)
    #[arg(long, value_name = "TARGET")]
    pub(crate) to: String,
    /// The image's tag in oci:DIR or a registry, its NAME:TAG in docker-archive:FILE [default: as
    /// the topmost layer]
    #[arg(long, value_name = "NAME")]
    pub(crate) tag: Option<String>,
    /// Compression of the layers in oci:DIR or a registry
    #[arg(long, value_enum, value_name = "NAME", default_value_t = LayerCompression::Gzip)]
    pub(crate) compression: LayerCompression,
    /// Speak to the registry without TLS (on this machine that needs no option)
    #[arg(long)]
    pub(crate) plain_http: bool,
    /// A repository of the same registry that may have the layers already (repeatable)
    #[arg(long, value_name = "HOST/REPOSITORY")]
    pub(crate) mount_from: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct LsArgs {
    /// Only layers of this kind: base, workspace, toolkit or diff
    #[arg(long)]
    pub(crate) kind: Option<String>,
    /// Only layers whose name matches; * stands for anything
    #[arg(long, value_name = "PATTERN")]
    pub(crate) name: Option<String>,
    /// Only layers published at most so long ago, such as 30m, 12h or 7d
    #[arg(long, value_name = "AGE")]
    pub(crate) since: Option<Age>,
    /// Only layers with this label (repeatable: all of them)
    #[arg(long, value_name = "KEY[=VALUE]")]
    pub(crate) label: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// Layers to show; with --stack, a stack from the bottom up
    #[arg(required = true, value_name = "REF")]
    pub(crate) refs: Vec<String>,
    /// List the paths that more than one layer of the stack defines
    #[arg(long)]
    pub(crate) stack: bool,
    /// Leave out what is shared with other layers, which reads the maps of all of them
    #[arg(long)]
    pub(crate) no_sharing: bool,
}

#[derive(Debug, Args)]
pub(crate) struct VerifyArgs {
    /// Layers to check
    #[arg(required_unless_present = "all", value_name = "REF")]
    pub(crate) refs: Vec<String>,
    /// Check everything in the store
    #[arg(long, conflicts_with = "refs")]
    pub(crate) all: bool,
    /// With --all: read the data of all packs too
    #[arg(long, requires = "all")]
    pub(crate) read_data: bool,
    /// Also ask for a good signature of each layer, by any key or by one of --key; with --all of
    /// every layer that the store holds
    #[arg(long)]
    pub(crate) signed: bool,
    /// A public key, as text or a key file, that counts for --signed (repeatable)
    #[arg(long, value_name = "KEY", requires = "signed")]
    pub(crate) key: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct RmArgs {
    /// Layers to remove
    #[arg(required = true, value_name = "REF")]
    pub(crate) refs: Vec<String>,
}

#[derive(Debug, Args)]
#[command(override_usage = "layerpack mount [OPTIONS] <REF>... <DIR>")]
pub(crate) struct MountArgs {
    /// Layers from the bottom up, then the directory to mount on
    #[arg(required = true, num_args = 2.., value_names = ["REF", "DIR"])]
    pub(crate) refs_and_dir: Vec<OsString>,
    /// Writable: changes go to a scratch directory of the node, which `umount` deletes
    #[arg(long)]
    pub(crate) rw: bool,
    #[command(flatten)]
    pub(crate) ids: IdArgs,
    #[command(flatten)]
    pub(crate) fuse: FuseArgs,
    #[command(flatten)]
    pub(crate) prefetch: PrefetchArgs,
}

#[derive(Debug, Args)]
pub(crate) struct UmountArgs {
    /// Directories to unmount
    #[arg(required = true, value_name = "DIR")]
    pub(crate) dirs: Vec<PathBuf>,
    /// Detach even while processes use it
    #[arg(long, short = 'l')]
    pub(crate) lazy: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DaemonArgs {
    #[command(subcommand)]
    pub(crate) command: Option<DaemonCommand>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum DaemonCommand {
    /// Serve in the foreground (the default; fit for systemd, Type=notify)
    Run {
        /// Leave the caller's session: set by commands that start the daemon themselves
        #[arg(long, hide = true)]
        detached: bool,
        /// Which signatures the node asks for [default: ROOT/policy.toml, if it is there]
        #[arg(long, value_name = "FILE")]
        policy: Option<PathBuf>,
        /// Most disk that the node's cache may take up, such as 20g; none: all there is [default:
        /// LAYERPACK_CACHE_MAX, else cache_max in the configuration, else none]
        #[arg(long, value_name = "BYTES")]
        cache_max: Option<Limit>,
        /// Bytes a second that `--prefetch all` fetches at most, such as 20m; none: as fast as it
        /// goes [default: LAYERPACK_FILL_RATE, else fill_rate in the configuration, else 64m]
        #[arg(long, value_name = "BYTES")]
        fill_rate: Option<Limit>,
        /// Also serve metrics on this address, such as 127.0.0.1:9464 [default:
        /// LAYERPACK_METRICS_LISTEN, else metrics_listen in the configuration, else none]
        #[arg(long, value_name = "ADDRESS")]
        metrics_listen: Option<std::net::SocketAddr>,
        #[command(flatten)]
        node: Box<NodeArgs>,
        /// Configuration file [default: LAYERPACK_CONFIG, else /etc/layerpack/config.toml]
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
        /// Serve in this process alone: when it dies, so do reads of what is not cached
        #[arg(long)]
        no_holder: bool,
    },
    /// Let this version of layerpack take over from the running daemon; mounts and reads go on
    Upgrade,
    /// Unmount the node's layers and end the daemon
    Stop {
        /// Also while mounts and sandboxes use layers: their unread data becomes I/O errors
        #[arg(long, short)]
        force: bool,
    },
    /// Show the daemon's layers, leases and counters
    Status,
}

/// Options that `run`, `sandbox create` and `sandbox exec` share.
#[derive(Debug, Clone, Args)]
pub(crate) struct ProcessArgs {
    /// Keep stdin open and pass it on
    #[arg(short, long)]
    pub(crate) interactive: bool,
    /// Give the command a terminal
    #[arg(short, long)]
    pub(crate) tty: bool,
    /// Set a variable; KEY alone takes the caller's value (repeatable)
    #[arg(short, long, value_name = "KEY[=VALUE]")]
    pub(crate) env: Vec<String>,
    /// User and group by name or number
    #[arg(short, long, value_name = "USER[:GROUP]")]
    pub(crate) user: Option<String>,
    /// Working directory
    #[arg(short, long, value_name = "DIR")]
    pub(crate) workdir: Option<PathBuf>,
}

/// Options that shape a new sandbox.
#[derive(Debug, Clone, Args)]
pub(crate) struct ShapeArgs {
    /// Name of the sandbox, unique on the node
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// Host name inside [default: the sandbox's id]
    #[arg(long)]
    pub(crate) hostname: Option<String>,
    /// Memory limit, such as 512m or 2g
    #[arg(short, long, value_name = "BYTES")]
    pub(crate) memory: Option<Bytes>,
    /// Processor limit, such as 1.5
    #[arg(long, value_name = "N")]
    pub(crate) cpus: Option<Cpus>,
    /// Limit on processes and threads
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) pids_limit: Option<u64>,
    /// none: only a loopback interface; host: the node's network
    #[arg(long, value_enum, default_value_t = NetworkArg::None)]
    pub(crate) network: NetworkArg,
}

/// Network of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum NetworkArg {
    /// A network namespace with nothing but a loopback interface.
    None,
    /// The node's own network.
    Host,
}

#[derive(Debug, Args)]
#[command(override_usage = "layerpack run [OPTIONS] <REF>... -- <CMD>...")]
pub(crate) struct RunArgs {
    /// Layers from the bottom up; a lone diff brings the layers it was made on
    #[arg(required = true, value_name = "REF")]
    pub(crate) refs: Vec<String>,
    /// Command and arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    pub(crate) command: Vec<OsString>,
    /// Delete what the sandbox wrote when the command ends
    #[arg(long)]
    pub(crate) rm: bool,
    #[command(flatten)]
    pub(crate) prefetch: PrefetchArgs,
    #[command(flatten)]
    pub(crate) process: ProcessArgs,
    #[command(flatten)]
    pub(crate) shape: ShapeArgs,
}

#[derive(Debug, Args)]
pub(crate) struct SandboxArgs {
    #[command(subcommand)]
    pub(crate) command: SandboxCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum SandboxCommand {
    /// Create a sandbox that lasts until `sandbox rm`; prints its id
    Create(SandboxCreateArgs),
    /// Run a command in a sandbox
    Exec(SandboxExecArgs),
    /// List sandboxes
    Ls,
    /// End sandboxes and delete what they wrote
    Rm(SandboxRmArgs),
}

#[derive(Debug, Args)]
pub(crate) struct SandboxCreateArgs {
    /// Layers from the bottom up; a lone diff brings the layers it was made on
    #[arg(required_unless_present = "from", value_name = "REF")]
    pub(crate) refs: Vec<String>,
    /// A snapshot to restore: the stack is the one that it records
    #[arg(long, value_name = "REF", conflicts_with = "refs")]
    pub(crate) from: Option<String>,
    /// Another store, from which the snapshot and its layers are copied where they are missing
    #[arg(long, value_name = "URL", requires = "from")]
    pub(crate) fetch_from: Option<String>,
    /// Set a variable for every command of the sandbox; KEY alone takes the caller's value
    #[arg(short, long, value_name = "KEY[=VALUE]")]
    pub(crate) env: Vec<String>,
    /// User and group of its commands by name or number, unless `exec` says otherwise
    #[arg(short, long, value_name = "USER[:GROUP]")]
    pub(crate) user: Option<String>,
    /// Working directory of its commands, unless `exec` says otherwise
    #[arg(short, long, value_name = "DIR")]
    pub(crate) workdir: Option<PathBuf>,
    /// Let its own processes publish snapshots of it under names like this, where * stands for
    /// anything, with /dev/layerpack/pack_diff
    #[arg(long, value_name = "NAMES")]
    pub(crate) allow_pack_diff: Option<String>,
    /// What must not leave by those: a file of rules, or `standard` [default: the node's rules]
    #[arg(long, value_name = "FILE", requires = "allow_pack_diff")]
    pub(crate) pack_diff_rules: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) prefetch: PrefetchArgs,
    #[command(flatten)]
    pub(crate) shape: ShapeArgs,
}

#[derive(Debug, Args)]
#[command(override_usage = "layerpack sandbox exec [OPTIONS] <SANDBOX> [--] <CMD>...")]
pub(crate) struct SandboxExecArgs {
    #[command(flatten)]
    pub(crate) process: ProcessArgs,
    /// Id or name
    pub(crate) sandbox: String,
    /// Command and arguments
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        required = true,
        value_name = "CMD"
    )]
    pub(crate) command: Vec<OsString>,
}

#[derive(Debug, Args)]
pub(crate) struct SandboxRmArgs {
    /// Ids or names
    #[arg(required = true, value_name = "SANDBOX")]
    pub(crate) sandboxes: Vec<String>,
    /// Also while it runs
    #[arg(long, short)]
    pub(crate) force: bool,
}
