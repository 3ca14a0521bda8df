//! Cold starts: real programs in a real environment that is not on the node, fetched from nginx
//! with a delay on each request; beside the same environment on the local disk, and beside a full
//! pull and unpack.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use layerpack_fixtures::find_tool;
use layerpack_fixtures::guards::MountGuard;
use layerpack_fixtures::servers::DockerRegistry;
use serde_json::Value;

use super::measure::{self, Spread, float};
use super::node::{Node, drop_caches, need_root};
use super::origin::{Origin, Relay};
use super::report::Report;
use super::{Bench, remove, roots};
use crate::process;
use crate::steps::say;

pub(super) mod peers;

/// The environment, bottom first.
const STACK: [&str; 2] = ["base/root:1", "workspace/work:1"];
/// Delays of a request, in milliseconds.
const DELAYS: [u64; 3] = [0, 5, 20];
/// The delay for which M4 makes its claim, and at which all workloads run.
const CLAIMED: u64 = 5;

/// What is run in the environment.
struct Workload {
    name: &'static str,
    script: &'static str,
    /// A file of the root without which it is left out.
    needs: &'static str,
    /// Whether it reads data, so that a profile says anything.
    reads: bool,
}

const WORKLOADS: [Workload; 9] = [
    Workload {
        name: "import numpy, pandas, sklearn",
        script: "python3 -c 'import numpy, pandas, sklearn'",
        needs: "usr/lib/python3/dist-packages/sklearn",
        reads: true,
    },
    Workload {
        name: "import of Python's own modules",
        script: "python3 -c 'import json, email, http.client, sqlite3, xml.dom.minidom, asyncio'",
        needs: "usr/bin/python3",
        reads: true,
    },
    Workload {
        name: "pytest of click",
        script: "cd /workspace/project && PYTHONPATH=src \
                 python3 -m pytest -q -p no:cacheprovider tests/test_basic.py tests/test_options.py",
        needs: "usr/lib/python3/dist-packages/pytest",
        reads: true,
    },
    Workload {
        name: "git status",
        script: "cd /workspace/clone && git -c safe.directory='*' status --porcelain",
        needs: "usr/bin/git",
        reads: true,
    },
    Workload {
        name: "gcc hello",
        script: "gcc -O1 -o /tmp/hello /workspace/hello.c && /tmp/hello",
        needs: "usr/bin/gcc",
        reads: true,
    },
    Workload {
        name: "node -v",
        script: "node -v",
        needs: "usr/bin/node",
        reads: true,
    },
    Workload {
        name: "tsc",
        script: "cd /tmp && tsc --outDir /tmp /workspace/hello.ts && node /tmp/hello.js",
        needs: "usr/bin/tsc",
        reads: true,
    },
    Workload {
        name: "find /",
        script: "find / -xdev | wc -l",
        needs: "usr/bin/find",
        reads: false,
    },
    Workload {
        name: "tar c /usr",
        script: "tar -C / --one-file-system -cf - usr | wc -c",
        needs: "usr/bin/tar",
        reads: true,
    },
];

/// Binds what programs expect, in a mount namespace that ends with them.
const ENTER: &str = "mount --bind /dev \"$1/dev\" && mount -t proc proc \"$1/proc\" && \
    exec chroot \"$1\" /usr/bin/env -i PATH=/usr/bin:/bin:/usr/sbin:/sbin HOME=/root \
    LC_ALL=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 /bin/sh -ec \"$2\"";

/// What one cold start took.
#[derive(Debug, Clone, Copy, Default)]
struct Start {
    seconds: f64,
    requests: u64,
    /// As stored: data and metadata, by the relay, heads of replies included.
    fetched: u64,
    /// After decompression, of the data alone.
    fetched_raw: f64,
    /// The same with the metadata.
    all_raw: f64,
    written: u64,
    cpu: f64,
    peak: u64,
    stall_ms: Option<f64>,
}

/// What all measurements need.
struct Ground<'a> {
    bench: &'a Bench,
    scratch: PathBuf,
    store: PathBuf,
    origin: Origin,
    flat: PathBuf,
    tree: PathBuf,
}

/// Starts of one kind, of one workload.
#[derive(Default)]
struct Starts(Vec<Start>);

impl Starts {
    fn seconds(&self) -> Spread {
        Spread::of(self.0.iter().map(|start| start.seconds))
    }

    /// The start in the middle.
    fn median(&self) -> Start {
        let mut starts = self.0.clone();
        starts.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        starts.get(starts.len() / 2).copied().unwrap_or_default()
    }

    fn row(&self, workload: &str, delay: Option<u64>, what: &str, touched: &str) -> Vec<String> {
        let middle = self.median();
        let served = middle.requests > 0 || middle.cpu > 0.0;
        let shown = |text: String| if served { text } else { "-".to_owned() };
        vec![
            workload.to_owned(),
            delay.map_or_else(|| "-".to_owned(), |delay| delay.to_string()),
            what.to_owned(),
            self.seconds().to_string(),
            shown(middle.requests.to_string()),
            shown(mib(float(middle.fetched))),
            shown(mib(middle.fetched_raw)),
            touched.to_owned(),
            shown(mib(float(middle.written))),
            shown(format!("{:.2}", middle.cpu)),
            shown(mib(float(middle.peak))),
            shown(
                middle
                    .stall_ms
                    .map_or_else(|| "-".to_owned(), |stall| format!("{stall:.0}")),
            ),
        ]
    }
}

fn mib(bytes: f64) -> String {
    format!("{:.1}", bytes / 1048576.0)
}

/// Runs a workload's script in a tree.
fn enter(tree: &Path, workload: &Workload) -> Result<()> {
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "--", "sh", "-ec", ENTER, "sh"])
        .arg(tree)
        .arg(workload.script);
    process::quietly(&mut command)
}

impl Ground<'_> {
    /// Publishes the environment, and makes the local forms of it.
    fn prepare(bench: &Bench) -> Result<Ground<'_>> {
        let scratch = bench.scratch("cold")?;
        let store = scratch.join("store");
        let (root, work) = (roots::tools(bench)?, roots::work(bench)?);
        let node = Node::new(
            bench,
            &scratch.join("builder"),
            &store.display().to_string(),
        )?;
        node.build("base", "root", &root, &[])?;
        let at = ["--at", "/workspace", "--git-index"];
        node.build("workspace", "work", &work, &at)?;
        let (flat, tree) = (scratch.join("flat.erofs"), scratch.join("tree"));
        let mut flatten = node.command();
        flatten.args(["flatten", "--to"]).arg(&flat).args(STACK);
        process::quietly(&mut flatten)?;
        let mut checkout = node.command();
        checkout.arg("checkout").args(STACK).arg(&tree);
        process::quietly(&mut checkout)?;
        drop(node);
        // The index of the layer is refreshed for the layer; that of the copy is for the copy.
        if tree.join("usr/bin/git").exists() {
            let git = WORKLOADS
                .iter()
                .find(|workload| workload.name == "git status");
            enter(&tree, git.context("there is git status")?)?;
        }
        let origin = Origin::start(&store)?;
        Ok(Ground {
            bench,
            scratch,
            store,
            origin,
            flat,
            tree,
        })
    }

    /// Cold caches here, warm ones at the origin: another machine's disk is not what is measured.
    fn chill(&self) -> Result<()> {
        drop_caches()?;
        measure::warm(&self.store)?;
        self.origin.relay().counted();
        Ok(())
    }

    /// A node that has nothing, with its daemon up.
    fn fresh(&self, name: &str) -> Result<Node> {
        let url = self.origin.url();
        let mut node = Node::new(self.bench, &self.scratch.join(name), &url)?;
        node.start()?;
        Ok(node)
    }

    /// From `mount` to the end of the workload, on a node that has nothing.
    fn lazy(&self, workload: &Workload, delay: u64, profile: Option<&str>) -> Result<Start> {
        self.origin.relay().delay(delay);
        let mut node = self.fresh("node")?;
        self.chill()?;
        let start = self.on_node(&node, workload, profile)?;
        node.stop()?;
        Ok(start)
    }

    /// The same on a node that has all of it on its disk, and was started anew.
    fn complete(&self, workload: &Workload, rounds: usize) -> Result<Starts> {
        self.origin.relay().delay(0);
        let mut node = self.fresh("node")?;
        let target = node.place("all");
        node.mount(&STACK, &target, &["--prefetch", "all"])?;
        measure::warm(&target)?;
        node.wait_until_whole()?;
        node.umount(&target)?;
        let mut starts = Starts::default();
        for _ in 0..rounds {
            node.stop()?;
            node.start()?;
            self.chill()?;
            starts.0.push(self.on_node(&node, workload, None)?);
        }
        node.stop()?;
        Ok(starts)
    }

    fn on_node(&self, node: &Node, workload: &Workload, profile: Option<&str>) -> Result<Start> {
        let target = node.place("environment");
        let options = match profile {
            Some(profile) => vec!["--rw", "--prefetch", "profile", "--profile", profile],
            None => vec!["--rw", "--prefetch", "none"],
        };
        let before = node.usage()?;
        let begun = Instant::now();
        node.mount(&STACK, &target, &options)?;
        enter(&target, workload)?;
        let seconds = begun.elapsed().as_secs_f64();
        let (requests, fetched) = self.origin.relay().counted();
        let (metrics, after) = (node.metrics()?, node.usage()?);
        let errors = metrics.sum("layerpack_read_errors_total");
        if errors > 0.0 {
            bail!("{errors} reads failed");
        }
        node.umount(&target)?;
        let fetched_raw = metrics.get("layerpack_fetched_raw_bytes_total");
        let metadata = metrics.get("layerpack_metadata_fetched_bytes_total");
        Ok(Start {
            seconds,
            requests,
            fetched,
            fetched_raw,
            all_raw: fetched_raw + metadata,
            written: after.written - before.written,
            cpu: after.cpu - before.cpu,
            peak: after.peak,
            stall_ms: metrics
                .quantile("layerpack_read_wait_seconds", 0.99)
                .map(|seconds| seconds * 1e3),
        })
    }

    /// On the kernel's own EROFS over a local file with all layers in one.
    fn local(&self, workload: &Workload) -> Result<Start> {
        let (lower, merged) = (self.scratch.join("lower"), self.scratch.join("merged"));
        fs_err::create_dir_all(&lower)?;
        self.chill()?;
        let begun = Instant::now();
        let erofs = MountGuard::erofs(&self.flat, &[], &lower)?;
        let overlay = self.writable(&lower, &merged)?;
        enter(&merged, workload)?;
        let seconds = begun.elapsed().as_secs_f64();
        drop((overlay, erofs));
        Ok(Start {
            seconds,
            ..Start::default()
        })
    }

    /// On a directory of the machine's disk.
    fn directory(&self, workload: &Workload) -> Result<Start> {
        let merged = self.scratch.join("merged");
        self.chill()?;
        let begun = Instant::now();
        let overlay = self.writable(&self.tree, &merged)?;
        enter(&merged, workload)?;
        let seconds = begun.elapsed().as_secs_f64();
        drop(overlay);
        Ok(Start {
            seconds,
            ..Start::default()
        })
    }

    fn writable(&self, lower: &Path, merged: &Path) -> Result<MountGuard> {
        let (upper, work) = (
            self.scratch.join("upper"),
            self.scratch.join("overlay-work"),
        );
        for path in [&upper, &work] {
            remove(path)?;
            fs_err::create_dir_all(path)?;
        }
        fs_err::create_dir_all(merged)?;
        Ok(MountGuard::overlay(
            &[lower],
            Some((&upper, &work)),
            merged,
        )?)
    }

    /// Records what a workload reads, in a sandbox of a node beside the store. The profile's
    /// digest, and the bytes, as stored, of the frames that hold what was read.
    fn record(&self, workload: &Workload) -> Result<(String, f64)> {
        let store = self.store.display().to_string();
        let mut node = Node::new(self.bench, &self.scratch.join("recorder"), &store)?;
        node.start()?;
        let mut arguments = vec!["profile", "record"];
        arguments.extend(["-e", "LC_ALL=C.UTF-8", "-e", "PYTHONDONTWRITEBYTECODE=1"]);
        arguments.extend(STACK);
        arguments.extend(["--", "/bin/sh", "-ec", workload.script]);
        let mut command = node.command();
        process::quietly(command.args(arguments))?;
        // Found by what it is of: `record` prints the command's own output.
        let known = node.json(&["profile", "ls"])?;
        let digest = known
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|profile| profile.get("digest").and_then(Value::as_str))
            .map(str::to_owned)
            .next()
            .context("no profile was stored")?;
        let elsewhere = self.scratch.join("elsewhere").display().to_string();
        let mut seed = vec!["seed", "--profile", &digest, "--max-bytes", "100g"];
        seed.extend(["--dry-run", "--to", &elsewhere]);
        let seeded = node.json(&seed)?;
        let frames = seeded.get("frame_bytes").and_then(Value::as_u64);
        let metadata = seeded.get("metadata_bytes").and_then(Value::as_u64);
        node.stop()?;
        Ok((
            digest,
            float(frames.context("no bytes of frames")?)
                + float(metadata.context("no bytes of metadata")?),
        ))
    }

    /// Takes the profile away again, so that it is not taken for that of the next workload.
    fn forget(&self, digest: &str) -> Result<()> {
        let store = self.store.display().to_string();
        let node = Node::new(self.bench, &self.scratch.join("recorder"), &store)?;
        node.output(&["profile", "rm", digest]).map(drop)
    }

    /// Bytes of files that a workload itself reads, in pages: the page cache of a loop mount
    /// without readahead. `None` where there are no loop devices.
    fn touched(&self, workload: &Workload) -> Result<Option<f64>> {
        let lower = self.scratch.join("lower");
        fs_err::create_dir_all(&lower)?;
        let mut mount = Command::new("mount");
        mount
            .args(["-t", "erofs", "-o", "ro,loop"])
            .arg(&self.flat)
            .arg(&lower);
        if !process::succeeds(&mut mount) || find_tool("fincore").is_none() {
            return Ok(None);
        }
        let guard = MountGuard::new(&lower);
        let mut findmnt = Command::new("findmnt");
        findmnt.args(["--noheadings", "--output", "SOURCE"]);
        let device = process::output(findmnt.arg(&lower))?;
        let name = device.trim().rsplit('/').next().unwrap_or_default();
        fs_err::write(format!("/sys/block/{name}/queue/read_ahead_kb"), "0")?;
        drop_caches()?;
        let merged = self.scratch.join("merged");
        let overlay = self.writable(&lower, &merged)?;
        enter(&merged, workload)?;
        drop(overlay);
        let bytes = cached_bytes(&roots::plain_files(&lower)?)?;
        guard.unmount()?;
        Ok(Some(float(bytes)))
    }
}

/// Bytes that the page cache holds of some files.
pub(super) fn cached_bytes(files: &[PathBuf]) -> Result<u64> {
    let mut bytes = 0_u64;
    for some in files.chunks(500) {
        let mut command = Command::new("fincore");
        command.args(["--bytes", "--raw", "--noheadings", "--output", "RES"]);
        let text = process::output(command.args(some))?;
        bytes += text
            .lines()
            .filter_map(|line| line.trim().parse::<u64>().ok())
            .sum::<u64>();
    }
    Ok(bytes)
}

/// The scenario `cold`.
pub(super) fn table(bench: &Bench) -> Result<Report> {
    need_root("mounting")?;
    let ground = Ground::prepare(bench)?;
    let root = roots::tools(bench)?;
    let present =
        |workload: &&Workload| fs_err::symlink_metadata(root.join(workload.needs)).is_ok();
    let workloads: Vec<&Workload> = WORKLOADS.iter().filter(present).collect();
    let size = measure::size(&ground.store)?;
    let mut report = Report {
        conditions: vec![
            format!(
                "an environment of two layers, {} MiB in the store; {} MiB as one local image",
                mib(float(size)),
                mib(float(measure::size(&ground.flat)?))
            ),
            "origin: nginx on this machine, its files in memory, behind a relay of the bench that delays each request".to_owned(),
            "time from mount to the end of the program, the daemon being up; page cache dropped before, the node's directory new".to_owned(),
            "touched: pages that the program itself reads, by the page cache of a loop mount without readahead; frames: those that hold what a recording names, with metadata, as stored".to_owned(),
            "local EROFS: one image of all layers, a kernel mount of a local file; directory: on the machine's disk; both below a writable overlay, as ours".to_owned(),
            "daemon: processor seconds, largest resident MiB, and the 99th percentile of the waits of reads, as the bound of its histogram's bucket".to_owned(),
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
        chart: "seconds from mount to the end of the first program, 5 ms a request",
        ..Report::default()
    };
    for (index, workload) in workloads.iter().enumerate() {
        one(&ground, workload, index == 0, &mut report)?;
    }
    pull(
        &ground,
        workloads.first().context("no workloads")?,
        &mut report,
    )?;
    Ok(report)
}

/// One workload by all candidates.
fn one(ground: &Ground<'_>, workload: &Workload, first: bool, report: &mut Report) -> Result<()> {
    // The first program tells most; what reads everything takes longest.
    let rounds_at = |delay: u64| match (ground.bench.quick, first, delay == CLAIMED) {
        (true, ..) => 1,
        (false, true, true) => 3,
        (false, true, false) => 2,
        (false, false, _) if workload.name.starts_with("tar") => 1,
        (false, false, _) => 2,
    };
    let pages = ground.touched(workload)?;
    let recorded = match workload.reads {
        true => Some(ground.record(workload)?),
        false => None,
    };
    let touched = format!(
        "{} / {}",
        pages.map_or_else(|| "-".to_owned(), mib),
        recorded
            .as_ref()
            .map_or_else(|| "-".to_owned(), |recorded| mib(recorded.1))
    );
    let mut local = Starts::default();
    let mut directory = Starts::default();
    for delay in DELAYS {
        if delay != CLAIMED && !first {
            continue;
        }
        let (mut plain, mut ahead) = (Starts::default(), Starts::default());
        for _ in 0..rounds_at(delay) {
            plain.0.push(ground.lazy(workload, delay, None)?);
            if let Some((profile, _)) = &recorded {
                ahead.0.push(ground.lazy(workload, delay, Some(profile))?);
            }
            if delay == CLAIMED {
                local.0.push(ground.local(workload)?);
                directory.0.push(ground.directory(workload)?);
            }
        }
        let name = workload.name;
        report
            .rows
            .push(plain.row(name, Some(delay), "layerpack, no profile", &touched));
        if recorded.is_some() {
            report
                .rows
                .push(ahead.row(name, Some(delay), "layerpack, profile", &touched));
        }
        if delay == CLAIMED {
            verdicts(
                workload,
                &plain,
                &ahead,
                &local,
                pages,
                recorded.as_ref(),
                report,
            );
            if first {
                report.bars.extend([
                    ("layerpack, no profile".to_owned(), plain.seconds().median),
                    ("layerpack, profile".to_owned(), ahead.seconds().median),
                ]);
            }
        }
    }
    if let Some((digest, _)) = &recorded {
        ground.forget(digest)?;
    }
    if first {
        let complete = ground.complete(workload, rounds_at(CLAIMED))?;
        report
            .rows
            .push(complete.row(workload.name, None, "layerpack, all cached", &touched));
        report.bars.extend([
            (
                "layerpack, all cached".to_owned(),
                complete.seconds().median,
            ),
            ("local EROFS".to_owned(), local.seconds().median),
            ("directory".to_owned(), directory.seconds().median),
        ]);
    }
    report
        .rows
        .push(local.row(workload.name, None, "local EROFS", "-"));
    report
        .rows
        .push(directory.row(workload.name, None, "directory", "-"));
    say(format!("{}: done", workload.name));
    Ok(())
}

fn verdicts(
    workload: &Workload,
    plain: &Starts,
    ahead: &Starts,
    local: &Starts,
    pages: Option<f64>,
    recorded: Option<&(String, f64)>,
    report: &mut Report,
) {
    let name = workload.name;
    let start = plain.median();
    if let Some((_, frames)) = recorded {
        let what = format!("{name}: bytes fetched beside the frames that a recording names");
        report.at_most("M3", &what, float(start.fetched) / frames, 1.2, "x");
        let ratio = ahead.seconds().median / local.seconds().median;
        let what = format!("{name}: time with a profile beside local EROFS");
        report.at_most("M4", &what, ratio, 1.15, "x");
    }
    if let Some(pages) = pages.filter(|pages| *pages > 0.0 && recorded.is_some()) {
        let what = format!("{name}: raw bytes fetched beside pages touched");
        report.at_most("M3", &what, start.fetched_raw / pages, 1.2, "x");
    }
    if start.all_raw > 0.0 {
        let what = format!("{name}: bytes written beside bytes fetched, uncompressed");
        let ratio = float(start.written) / start.all_raw;
        report.at_most("M6", &what, ratio, 1.1, "x");
    }
}

/// All of it pulled from a registry behind the same delay, unpacked, and run.
fn pull(ground: &Ground<'_>, workload: &Workload, report: &mut Report) -> Result<()> {
    let missing = ["skopeo", "umoci", "docker-registry"]
        .into_iter()
        .find(|tool| find_tool(tool).is_none());
    if let Some(tool) = missing {
        report
            .conditions
            .push(format!("no full pull: {tool} is not installed"));
        return Ok(());
    }
    let registry = DockerRegistry::start()?;
    let relay = Relay::start(registry.address())?;
    let store = ground.store.display().to_string();
    let node = Node::new(ground.bench, &ground.scratch.join("exporter"), &store)?;
    let mut arguments = vec!["export"];
    arguments.extend(STACK);
    let to = format!("registry:{}/environment:1", registry.host());
    arguments.extend(["--to", &to, "--plain-http"]);
    node.output(&arguments)?;
    relay.delay(CLAIMED);
    let (image, bundle) = (ground.scratch.join("oci"), ground.scratch.join("bundle"));
    // Once: it takes far longer than everything else.
    drop_caches()?;
    measure::warm(&registry.data())?;
    relay.counted();
    let begun = Instant::now();
    let mut copy = Command::new("skopeo");
    copy.args(["copy", "--quiet", "--src-tls-verify=false"])
        .arg(format!("docker://{}/environment:1", relay.host()))
        .arg(format!("oci:{}:1", image.display()));
    process::quietly(&mut copy)?;
    let pulled = begun.elapsed().as_secs_f64();
    let mut unpack = Command::new("umoci");
    unpack
        .args(["unpack", "--image"])
        .arg(format!("{}:1", image.display()))
        .arg(&bundle);
    process::quietly(&mut unpack)?;
    enter(&bundle.join("rootfs"), workload)?;
    let seconds = begun.elapsed().as_secs_f64();
    let (requests, fetched) = relay.counted();
    let starts = Starts(vec![Start {
        seconds,
        requests,
        fetched,
        ..Start::default()
    }]);
    let mut row = starts.row(workload.name, Some(CLAIMED), "skopeo, umoci", "-");
    // Bytes before compression, and what it takes of the machine: not measured.
    for (index, cell) in row.iter_mut().enumerate() {
        if [6, 8, 9, 10].contains(&index) {
            "-".clone_into(cell);
        }
    }
    report.rows.push(row);
    report.conditions.push(format!(
        "skopeo copies from docker-registry behind the same relay ({pulled:.1} s of the pull), umoci unpacks; gzip layers; once"
    ));
    let ahead = report
        .bars
        .iter()
        .find(|bar| bar.0 == "layerpack, profile")
        .map_or(0.0, |bar| bar.1);
    report.bars.push(("skopeo, umoci".to_owned(), seconds));
    let what = format!(
        "{}: time with a profile beside pull and unpack",
        workload.name
    );
    report.at_most("M4", &what, ahead / seconds, 0.15, "x");
    Ok(())
}
