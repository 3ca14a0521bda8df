//! The scenario `cold-peers`: the same cold starts beside what others put together for the same
//! end, an image or archive that stays on a web server and is fetched while programs read it.
//!
//! Peers are what Debian and `PyPI` have: httpdirfs and nbdkit with nbdfuse show a remote file as a
//! local one, squashfuse or the kernel's EROFS mounts that; ratarmount mounts a remote archive by
//! itself. Beside them stand the same programs over local files, which is how fast they are when
//! nothing has to be fetched. What is not installed, and what fails, is said in the report.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use layerpack_fixtures::find_tool;
use layerpack_fixtures::guards::MountGuard;

use super::{CLAIMED, ENTER, Ground, STACK, Start, Starts, WORKLOADS, Workload, mib};
use crate::bench::measure::{self, float};
use crate::bench::node::{Node, need_root};
use crate::bench::origin::{Origin, Relay};
use crate::bench::report::Report;
use crate::bench::served::{self, Served};
use crate::bench::{Bench, remove, roots};
use crate::process;
use crate::steps::say;

/// Programs that are run; what works on files that it also changes, as git on its index, would
/// measure how well the image remembers inode numbers and times.
const PROGRAMS: [&str; 4] = [
    "import numpy, pandas, sklearn",
    "import of Python's own modules",
    "pytest of click",
    "gcc hello",
];
/// The version that is installed: another one is another peer.
const RATARMOUNT: &str = "ratarmount==1.3.0";
/// Seconds that a program may take on a peer.
const LIMIT: &str = "300";
/// The images' names, below their web server.
const SQUASHFS: &str = "environment.sqfs";
const EROFS: &str = "environment.erofs";
const ARCHIVE: &str = "environment.tar.gz";

/// How a peer shows the environment, and what it reads.
struct Peer {
    name: &'static str,
    /// Programs that it is made of.
    programs: &'static [&'static str],
    /// What is warm at the origin; nothing for peers with local files, which begin cold.
    remote: Option<&'static str>,
    /// Takes so long that it has a part in the first program alone, once.
    slow: bool,
    /// Starts it, and says where the tree is and whether it can be written to as it is.
    show: fn(&Peers<'_>, &mut Served) -> Result<Tree>,
}

/// A tree that a peer shows.
enum Tree {
    /// A writable overlay is to be put on it.
    Lower(PathBuf),
    /// It has been.
    Writable(PathBuf),
}

const PEERS: [Peer; 9] = [
    Peer {
        name: "layerpack mount --fuse",
        programs: &["fusermount3"],
        remote: None,
        slow: false,
        show: own,
    },
    Peer {
        name: "httpdirfs, squashfuse",
        programs: &["httpdirfs", "squashfuse_ll", "mksquashfs"],
        remote: Some(SQUASHFS),
        slow: false,
        show: |peers, served| {
            let file = served::httpdirfs(served, &peers.url(SQUASHFS))?;
            squashfuse(served, &file)
        },
    },
    Peer {
        name: "nbdkit, nbdfuse, squashfuse",
        programs: &["nbdkit", "nbdfuse", "squashfuse_ll", "mksquashfs"],
        remote: Some(SQUASHFS),
        slow: false,
        show: |peers, served| {
            let file = served::nbdfuse(served, &peers.url(SQUASHFS))?;
            squashfuse(served, &file)
        },
    },
    Peer {
        name: "nbdkit, nbdfuse, kernel EROFS",
        programs: &["nbdkit", "nbdfuse"],
        remote: Some(EROFS),
        slow: false,
        show: |peers, served| {
            let file = served::nbdfuse(served, &peers.url(EROFS))?;
            let target = served.place("tree")?;
            served.mounted(MountGuard::erofs(&file, &[], &target)?);
            Ok(Tree::Lower(target))
        },
    },
    Peer {
        name: "ratarmount of tar.gz",
        programs: &["python3", "fusermount3"],
        remote: Some(ARCHIVE),
        slow: true,
        show: |peers, served| {
            let ratarmount = peers.ratarmount.as_ref().context("it is not installed")?;
            let target = served.place("tree")?;
            let mut command = ratarmount.command();
            command.arg("-f").arg("--index-file").arg(&peers.index);
            command.arg(peers.url(ARCHIVE)).arg(&target);
            served.mounting(&mut command, &target)?;
            Ok(Tree::Lower(target))
        },
    },
    Peer {
        name: "squashfuse, local",
        programs: &["squashfuse_ll", "mksquashfs"],
        remote: None,
        slow: false,
        show: |peers, served| squashfuse(served, &peers.images.join(SQUASHFS)),
    },
    Peer {
        name: "kernel squashfs, local",
        programs: &["mksquashfs", "mount"],
        remote: None,
        slow: false,
        show: |peers, served| {
            let target = served.place("tree")?;
            let mut mount = Command::new("mount");
            mount.args(["-t", "squashfs", "-o", "ro,loop"]);
            mount.arg(peers.images.join(SQUASHFS)).arg(&target);
            process::quietly(&mut mount)?;
            served.mounted(MountGuard::new(&target));
            Ok(Tree::Lower(target))
        },
    },
    Peer {
        name: "erofsfuse, local",
        programs: &["erofsfuse"],
        remote: None,
        slow: false,
        show: |peers, served| {
            let target = served.place("tree")?;
            let mut command = Command::new("erofsfuse");
            command.arg("-f").arg(peers.images.join(EROFS)).arg(&target);
            served.mounting(&mut command, &target)?;
            Ok(Tree::Lower(target))
        },
    },
    Peer {
        name: "fuse-overlayfs, directory",
        programs: &["fuse-overlayfs"],
        remote: None,
        slow: false,
        show: |peers, served| {
            let target = served.place("tree")?;
            let (upper, work) = (served.place("upper")?, served.place("work")?);
            let mut command = Command::new("fuse-overlayfs");
            command.arg("-f").arg("-o").arg(format!(
                "lowerdir={},upperdir={},workdir={}",
                peers.ground.tree.display(),
                upper.display(),
                work.display()
            ));
            served.mounting(command.arg(&target), &target)?;
            Ok(Tree::Writable(target))
        },
    },
];

/// Where `PyPI`'s ratarmount was installed.
struct Ratarmount(PathBuf);

impl Ratarmount {
    /// Installs it among the bench's own tools, unless it is there.
    fn find(bench: &Bench) -> Result<Self> {
        let directory = bench.work.join("tools").join(RATARMOUNT);
        if !directory.is_dir() {
            say("installing ratarmount");
            let partial = bench.work.join("tools/ratarmount.partial");
            remove(&partial)?;
            let mut pip = Command::new("python3");
            pip.args(["-m", "pip", "install", "--quiet", "--target"])
                .arg(&partial)
                .args([RATARMOUNT, "fsspec[http]"]);
            process::logged(&mut pip, &bench.work.join("pip.log"))?;
            fs_err::rename(&partial, &directory)?;
        }
        let found = Self(directory);
        let mut version = found.command();
        if !process::succeeds(version.arg("--version")) {
            bail!("what lies in {} does not run", found.0.display());
        }
        Ok(found)
    }

    fn command(&self) -> Command {
        let mut command = Command::new("python3");
        command.args(["-m", "ratarmount"]);
        command.env("PYTHONPATH", &self.0);
        command
    }
}

/// What peers are given.
struct Peers<'a> {
    ground: &'a Ground<'a>,
    images: PathBuf,
    origin: Origin,
    ratarmount: Option<Ratarmount>,
    /// The archive's index, made before.
    index: PathBuf,
    /// What is not there.
    missing: Vec<String>,
}

fn squashfuse(served: &mut Served, image: &Path) -> Result<Tree> {
    let target = served.place("tree")?;
    served.mounting(&mut served::squashfuse(image, &target), &target)?;
    Ok(Tree::Lower(target))
}

/// Our own mount without a daemon, of the layers as they are in the store.
fn own(peers: &Peers<'_>, served: &mut Served) -> Result<Tree> {
    let (target, cache) = (served.place("tree")?, served.place("cache")?);
    let url = peers.ground.origin.url();
    let node = Node::new(peers.ground.bench, &served.place("node")?, &url)?;
    let mut command = node.command();
    command.env("LAYERPACK_CACHE", cache);
    command.args(["mount", "--fuse", "--foreground", "--prefetch", "none"]);
    command.args(STACK).arg(&target);
    served.mounting(&mut command, &target)?;
    Ok(Tree::Lower(target))
}

impl<'a> Peers<'a> {
    /// Makes the images and what stands before them.
    fn prepare(ground: &'a Ground<'a>) -> Result<Self> {
        let images = ground.scratch.join("images");
        fs_err::create_dir_all(&images)?;
        let mut missing: Vec<String> = PEERS
            .iter()
            .filter_map(|peer| {
                let program = served::lacking(peer.programs)?;
                Some(format!("{} ({program} is not installed)", peer.name))
            })
            .collect();
        for program in ["nydusd", "stargz-snapshotter", "soci"] {
            let why = match find_tool(program) {
                Some(_) => "is installed, but nothing here runs it",
                None => "is not installed",
            };
            missing.push(format!("{program} {why}"));
        }
        fs_err::hard_link(&ground.flat, images.join(EROFS))?;
        if find_tool("mksquashfs").is_some() {
            served::squashfs(&ground.tree, &images.join(SQUASHFS))?;
        }
        let origin = Origin::start(&images)?;
        let ratarmount = match Ratarmount::find(ground.bench) {
            Ok(ratarmount) => Some(ratarmount),
            Err(error) => {
                missing.push(format!("ratarmount ({error:#})"));
                None
            }
        };
        let mut peers = Self {
            ground,
            origin,
            ratarmount,
            index: ground.scratch.join("archive.index"),
            images,
            missing,
        };
        peers.archive()?;
        Ok(peers)
    }

    /// The archive, and its index as ratarmount wants it; without them there is no ratarmount.
    fn archive(&mut self) -> Result<()> {
        let Some(ratarmount) = &self.ratarmount else {
            return Ok(());
        };
        let mut tar = Command::new("tar");
        tar.args(["--numeric-owner", "-C"]).arg(&self.ground.tree);
        tar.args(["-I", "gzip -6", "-cf"]);
        process::quietly(tar.arg(self.images.join(ARCHIVE)).arg("."))?;
        let mut index = ratarmount.command();
        index.args(["--no-mount", "--index-file"]).arg(&self.index);
        index.arg(self.url(ARCHIVE));
        if let Err(error) = process::quietly(&mut index) {
            self.missing.push(format!("ratarmount ({error:#})"));
            self.ratarmount = None;
        }
        Ok(())
    }

    fn url(&self, image: &str) -> String {
        format!("{}{image}", self.origin.url())
    }

    fn relays(&self) -> [&Relay; 2] {
        [self.origin.relay(), self.ground.origin.relay()]
    }

    /// Requests and bytes since the last call.
    fn counted(&self) -> (u64, u64) {
        let both = self.relays().map(Relay::counted);
        both.iter()
            .fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
    }

    /// From the start of the peer's programs to the end of the workload.
    fn start(&self, peer: &Peer, workload: &Workload) -> Result<Start> {
        for relay in self.relays() {
            relay.delay(CLAIMED);
        }
        let mut served = Served::new(&self.ground.scratch.join("peer"))?;
        self.ground.chill()?;
        if let Some(image) = peer.remote {
            let mut file = fs_err::File::open(self.images.join(image))?;
            std::io::copy(&mut file, &mut std::io::sink())?;
        }
        self.counted();
        let begun = Instant::now();
        let tree = (peer.show)(self, &mut served)?;
        let (overlay, merged) = match tree {
            Tree::Writable(tree) => (None, tree),
            Tree::Lower(lower) => {
                let merged = self.ground.scratch.join("merged");
                (Some(self.ground.writable(&lower, &merged)?), merged)
            }
        };
        run(&merged, workload)?;
        let seconds = begun.elapsed().as_secs_f64();
        let (requests, fetched) = self.counted();
        let used = served.usage()?;
        if let Some(overlay) = overlay {
            overlay.unmount()?;
        }
        served.end()?;
        Ok(Start {
            seconds,
            requests,
            fetched,
            written: used.written,
            cpu: used.cpu,
            peak: used.peak,
            ..Start::default()
        })
    }
}

/// Runs a workload as `enter` does, but not without end: a peer may hang.
fn run(tree: &Path, workload: &Workload) -> Result<()> {
    let mut command = Command::new("timeout");
    command.args(["--kill-after=10", LIMIT, "unshare", "--mount", "--"]);
    command.args(["sh", "-ec", ENTER, "sh"]).arg(tree);
    let output = command
        .arg(workload.script)
        .stdin(Stdio::null())
        .output()
        .context("cannot start timeout")?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let last = said.lines().last().unwrap_or_default();
    bail!("{}: {}: {last}", workload.name, output.status)
}

/// The scenario `cold-peers`.
pub(in crate::bench) fn table(bench: &Bench) -> Result<Report> {
    need_root("mounting")?;
    let ground = Ground::prepare(bench)?;
    let root = roots::tools(bench)?;
    let workloads: Vec<&Workload> = WORKLOADS
        .iter()
        .filter(|workload| PROGRAMS.contains(&workload.name))
        .filter(|workload| fs_err::symlink_metadata(root.join(workload.needs)).is_ok())
        .collect();
    let mut peers = Peers::prepare(&ground)?;
    let bytes = |image: &str| match fs_err::metadata(peers.images.join(image)) {
        Ok(metadata) => mib(float(metadata.len())),
        Err(_) => "-".to_owned(),
    };
    let mut report = Report {
        conditions: vec![
            format!(
                "one environment in all forms: {} MiB in the store as two layers, {} as a squashfs image (zstd, level 3), {} as an EROFS image without compression, {} as tar.gz (level 6)",
                mib(float(measure::size(&ground.store)?)),
                bytes(SQUASHFS),
                bytes(EROFS),
                bytes(ARCHIVE)
            ),
            format!(
                "origins: nginx on this machine, files in memory, behind the same kind of relay with {CLAIMED} ms a request"
            ),
            "layerpack: from mount on, its daemon being up, on a node that has nothing; all others, and layerpack mount --fuse: from the start of their programs on; page cache dropped before; all below a writable overlay".to_owned(),
            "httpdirfs keeps pieces of 1 MiB on disk, nbdkit pieces of 256 KiB; ratarmount has the archive's index on the node's disk before it begins, and a part in the first program alone, once".to_owned(),
            "daemon: of all programs that serve, resident memory added up; what the kernel does itself is not counted".to_owned(),
            "touched: pages that the program itself reads, by the page cache of a loop mount without readahead".to_owned(),
        ],
        columns: vec![
            "program",
            "delay ms",
            "candidate",
            "s: median (least to most)",
            "requests",
            "MiB fetched",
            "MiB raw",
            "MiB touched / frames",
            "MiB written",
            "daemon s",
            "daemon MiB",
            "p99 wait ms",
        ],
        chart: "seconds to the end of the first program, 5 ms a request",
        ..Report::default()
    };
    for (index, workload) in workloads.iter().enumerate() {
        one(&mut peers, workload, index == 0, &mut report)?;
    }
    if workloads.is_empty() {
        bail!("the environment has none of the programs");
    }
    let missing = peers.missing.join(", ");
    report.conditions.push(format!("not beside it: {missing}"));
    Ok(report)
}

/// One workload by all candidates.
fn one(peers: &mut Peers<'_>, workload: &Workload, first: bool, report: &mut Report) -> Result<()> {
    let ground = peers.ground;
    let rounds = match (ground.bench.quick, first) {
        (true, _) => 1,
        (false, true) => 3,
        (false, false) => 2,
    };
    let pages = ground.touched(workload)?;
    let (profile, frames) = ground.record(workload)?;
    let touched = format!(
        "{} / {}",
        pages.map_or_else(|| "-".to_owned(), mib),
        mib(frames)
    );
    let (mut plain, mut ahead) = (Starts::default(), Starts::default());
    let (mut local, mut directory) = (Starts::default(), Starts::default());
    let mut others: Vec<(&Peer, Starts)> = PEERS
        .iter()
        .filter(|peer| served::lacking(peer.programs).is_none())
        .filter(|peer| peer.remote != Some(ARCHIVE) || peers.ratarmount.is_some())
        .filter(|peer| first || !peer.slow)
        .map(|peer| (peer, Starts::default()))
        .collect();
    for round in 0..rounds {
        plain.0.push(ground.lazy(workload, CLAIMED, None)?);
        ahead
            .0
            .push(ground.lazy(workload, CLAIMED, Some(&profile))?);
        let mut failed = Vec::new();
        for (peer, starts) in &mut others {
            if peer.slow && round > 0 {
                continue;
            }
            match peers.start(peer, workload) {
                Ok(start) => starts.0.push(start),
                Err(error) => failed.push((peer.name, format!("{error:#}"))),
            }
        }
        // One that failed is not tried again with this program.
        for (name, error) in failed {
            say(format!("{name} failed: {error}"));
            others.retain(|(peer, _)| peer.name != name);
            let error = error.replace('\n', " ");
            peers
                .missing
                .push(format!("{name} ({}: {error})", workload.name));
        }
        local.0.push(ground.local(workload)?);
        directory.0.push(ground.directory(workload)?);
    }
    ground.forget(&profile)?;
    let mut add = |name: &str, starts: &Starts, delay: Option<u64>, raw: bool| {
        let mut row = starts.row(workload.name, delay, name, &touched);
        if let (false, Some(cell)) = (raw, row.get_mut(6)) {
            "-".clone_into(cell);
        }
        report.rows.push(row);
        if first {
            report.bars.push((name.to_owned(), starts.seconds().median));
        }
    };
    add("layerpack, profile", &ahead, Some(CLAIMED), true);
    add("layerpack, no profile", &plain, Some(CLAIMED), true);
    for (peer, starts) in &others {
        let remote = peer.remote.is_some() || peer.name.starts_with("layerpack");
        add(peer.name, starts, remote.then_some(CLAIMED), false);
    }
    add("kernel EROFS, local", &local, None, false);
    add("directory", &directory, None, false);
    say(format!("{}: done", workload.name));
    Ok(())
}
