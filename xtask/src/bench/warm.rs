//! Warm operations through a layer's mount, beside native EROFS over the same image as local
//! files; and what the page cache holds of what was read.

use fs_err::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use layerpack_fixtures::guards::MountGuard;
use layerpack_fixtures::rng::Rng;

use super::cold::cached_bytes;
use super::measure::{Spread, float};
use super::node::{Node, drop_caches, memory, need_root};
use super::origin::Origin;
use super::report::{Report, Verdict};
use super::served::{self, Served};
use super::{Bench, roots};
use crate::process;

/// Bytes of a read at a random place.
const BLOCK: usize = 4096;

/// One kind of operation.
struct Operation {
    name: &'static str,
    run: fn(&Tree) -> Result<u64>,
}

const OPERATIONS: [Operation; 5] = [
    Operation {
        name: "open, read whole, close (files)",
        run: whole,
    },
    Operation {
        name: "read at random places (4 KiB)",
        run: random,
    },
    Operation {
        name: "read in order (MiB)",
        run: stream,
    },
    Operation {
        name: "stat",
        run: stat,
    },
    Operation {
        name: "readdir (entries)",
        run: list,
    },
];

/// A mounted tree, and what is in it.
struct Tree {
    files: Vec<PathBuf>,
    large: Vec<PathBuf>,
    directories: Vec<PathBuf>,
    rounds: u32,
}

impl Tree {
    fn of(root: &Path, rounds: u32) -> Result<Self> {
        let files = roots::plain_files(root)?;
        let mut directories = Vec::new();
        for entry in fs_err::read_dir(root)? {
            directories.push(entry?.path());
        }
        let mut large = Vec::new();
        for file in &files {
            if fs_err::metadata(file)?.len() >= 1 << 20 {
                large.push(file.clone());
            }
        }
        if large.is_empty() || directories.is_empty() {
            bail!("{} holds no large files or no directories", root.display());
        }
        Ok(Self {
            files,
            large,
            directories,
            rounds,
        })
    }
}

fn whole(tree: &Tree) -> Result<u64> {
    let mut buffer = vec![0; 1 << 20];
    let mut count = 0;
    for path in &tree.files {
        let file = fs_err::File::open(path)?;
        let mut at = 0;
        loop {
            let got = file.read_at(&mut buffer, at)?;
            if got == 0 {
                break;
            }
            at += u64::try_from(got)?;
        }
        count += 1;
    }
    Ok(count)
}

fn random(tree: &Tree) -> Result<u64> {
    let mut rng = Rng::new(7);
    let mut open = Vec::new();
    for path in &tree.large {
        let file = fs_err::File::open(path)?;
        let blocks = file.metadata()?.len() / u64::try_from(BLOCK)?;
        open.push((file, blocks));
    }
    let mut buffer = [0; BLOCK];
    let count = u64::from(tree.rounds) * 20_000;
    for _ in 0..count {
        let (file, blocks) = rng.pick(&open).context("no files")?;
        let at = rng.below(*blocks) * u64::try_from(BLOCK)?;
        file.read_exact_at(&mut buffer, at)?;
    }
    Ok(count)
}

fn stream(tree: &Tree) -> Result<u64> {
    let mut buffer = vec![0; 1 << 20];
    let mut bytes = 0;
    for _ in 0..tree.rounds {
        for path in &tree.large {
            let file = fs_err::File::open(path)?;
            let mut at = 0;
            loop {
                let got = file.read_at(&mut buffer, at)?;
                if got == 0 {
                    break;
                }
                at += u64::try_from(got)?;
            }
            bytes += at;
        }
    }
    Ok(bytes >> 20)
}

fn stat(tree: &Tree) -> Result<u64> {
    let mut count = 0;
    for _ in 0..tree.rounds * 5 {
        for path in &tree.files {
            fs_err::symlink_metadata(path)?;
            count += 1;
        }
    }
    Ok(count)
}

fn list(tree: &Tree) -> Result<u64> {
    let mut count = 0;
    for _ in 0..tree.rounds * 10 {
        for path in &tree.directories {
            for entry in fs_err::read_dir(path)? {
                entry?;
                count += 1;
            }
        }
    }
    Ok(count)
}

/// A node with one layer of generated files, from nginx.
struct Ground {
    node: Node,
    target: PathBuf,
    origin: Origin,
    scratch: PathBuf,
}

fn ground(bench: &Bench, name: &str, bytes: u64) -> Result<Ground> {
    let scratch = bench.scratch(name)?;
    let (source, store) = (scratch.join("source"), scratch.join("store"));
    fs_err::create_dir_all(&source)?;
    roots::files(&source, bytes, 11)?;
    let builder = Node::new(
        bench,
        &scratch.join("builder"),
        &store.display().to_string(),
    )?;
    builder.build("workspace", "files", &source, &[])?;
    let origin = Origin::start(&store)?;
    let mut node = Node::new(bench, &scratch.join("node"), &origin.url())?;
    node.start()?;
    let target = node.place("mounted");
    Ok(Ground {
        node,
        target,
        origin,
        scratch,
    })
}

impl Ground {
    fn mount(&self) -> Result<()> {
        let options = ["--prefetch", "none"];
        self.node
            .mount(&["workspace/files:1"], &self.target, &options)
    }
}

/// The scenario `warm`.
pub(super) fn table(bench: &Bench) -> Result<Report> {
    need_root("mounting")?;
    let bytes = if bench.quick { 16 << 20 } else { 192 << 20 };
    let ground = ground(bench, "warm", bytes)?;
    ground.mount()?;
    // All of it, so that the cache file is whole and can be the peer's data file too.
    super::measure::warm(&ground.target)?;
    let cached = ground.node.cached_layer()?;
    let (meta, data) = (ground.scratch.join("meta"), ground.scratch.join("data"));
    for (from, to) in [("meta.erofs", &meta), ("data", &data)] {
        fs_err::copy(cached.join(from), to)?;
    }
    let native = ground.scratch.join("native");
    fs_err::create_dir_all(&native)?;
    let guard = MountGuard::erofs(&meta, &[&data], &native)?;
    let differences = process::succeeds(
        std::process::Command::new("diff")
            .args(["--recursive", "--brief"])
            .arg(&native)
            .arg(&ground.target),
    );
    if !differences {
        bail!("the two mounts of one image show different trees");
    }
    let rounds = if bench.quick { 1 } else { 5 };
    let mut trees = vec![
        Tree::of(&ground.target, rounds)?,
        Tree::of(&native, rounds)?,
    ];
    let peers = Peers::mount(&ground, &native, bench)?;
    for (_, served) in &peers.served {
        trees.push(Tree::of(&served.place("tree")?, rounds)?);
    }
    let mut report = Report {
        conditions: vec![
            format!(
                "{} files, {} MiB, in memory on all sides; one thread; ours and native alternate, each warmed right before",
                trees.first().map_or(0, |tree| tree.files.len()),
                bytes >> 20
            ),
            "native: the kernel's EROFS over copies of the same metadata image and data file"
                .to_owned(),
            "by FUSE, in half of the rounds: layerpack mount --fuse of the same layer, squashfuse of a squashfs image (zstd, level 3) of it".to_owned(),
        ],
        columns: vec![
            "operation",
            "layerpack, per second",
            "native EROFS, per second",
            "ratio of medians",
            "ratios of rounds: median (least to most)",
            OWN,
            SQUASHFUSE,
        ],
        chart: "rate beside native EROFS",
        ..Report::default()
    };
    report.conditions.extend(peers.missing.iter().cloned());
    for operation in &OPERATIONS {
        let mut rates = vec![Vec::new(); trees.len()];
        // The first of a pair changes from round to round.
        for round in 0..bench.rounds() * 2 {
            let order = if round % 2 == 0 { [0, 1] } else { [1, 0] };
            let others = if round % 2 == 0 { 2..trees.len() } else { 0..0 };
            for side in order.into_iter().chain(others) {
                let (Some(tree), Some(rates)) = (trees.get(side), rates.get_mut(side)) else {
                    bail!("there are as many rates as trees");
                };
                (operation.run)(tree)?;
                let begun = Instant::now();
                let count = (operation.run)(tree)?;
                rates.push(float(count) / begun.elapsed().as_secs_f64());
            }
        }
        let mut rates = rates.into_iter();
        let (ours, natives) = (
            rates.next().unwrap_or_default(),
            rates.next().unwrap_or_default(),
        );
        let ratios = Spread::of(ours.iter().zip(&natives).map(|(our, other)| our / other));
        let (our, other) = (Spread::of(ours), Spread::of(natives));
        let ratio = our.median / other.median;
        let mut row = vec![
            operation.name.to_owned(),
            format!("{:.0}", our.median),
            format!("{:.0}", other.median),
            format!("{ratio:.3}"),
            ratios.to_string(),
        ];
        let by_fuse: Vec<(&str, f64)> = peers
            .served
            .iter()
            .map(|(name, _)| *name)
            .zip(rates.map(|rates| Spread::of(rates).median))
            .collect();
        for column in [OWN, SQUASHFUSE] {
            let rate = by_fuse.iter().find(|(name, _)| *name == column);
            row.push(rate.map_or_else(|| "-".to_owned(), |(_, rate)| format!("{rate:.0}")));
        }
        report.rows.push(row);
        report.verdicts.push(Verdict {
            claim: "M5",
            found: format!(
                "{}: {ratio:.3} of native, 0.95 is asked for",
                operation.name
            ),
            met: ratio >= 0.95,
        });
        report
            .bars
            .push((format!("layerpack: {}", operation.name), ratio));
    }
    for (_, served) in peers.served {
        served.end()?;
    }
    drop(guard);
    ground.node.umount(&ground.target)?;
    Ok(report)
}

/// Columns of those that serve by FUSE.
const OWN: &str = "layerpack mount --fuse, per second";
const SQUASHFUSE: &str = "squashfuse, per second";

/// The same tree, served by programs through FUSE; each at the place `tree` of its own.
struct Peers {
    served: Vec<(&'static str, Served)>,
    /// Lines on what is not there.
    missing: Vec<String>,
}

impl Peers {
    fn mount(ground: &Ground, native: &Path, bench: &Bench) -> Result<Self> {
        let mut peers = Self {
            served: Vec::new(),
            missing: Vec::new(),
        };
        for (name, programs) in [
            (OWN, ["fusermount3"].as_slice()),
            (SQUASHFUSE, &["mksquashfs", "squashfuse_ll"]),
        ] {
            if let Some(program) = served::lacking(programs) {
                let line = format!("missing: {name} ({program} is not installed)");
                peers.missing.push(line);
                continue;
            }
            let directory = if name == OWN { "own" } else { "squashfuse" };
            let mut served = Served::new(&ground.scratch.join(directory))?;
            let target = served.place("tree")?;
            let mut command = if name == OWN {
                let url = ground.origin.url();
                let node = Node::new(bench, &served.place("node")?, &url)?;
                let mut command = node.command();
                command.env("LAYERPACK_CACHE", served.place("cache")?);
                command.args(["mount", "--fuse", "--foreground", "--prefetch", "none"]);
                command.arg("workspace/files:1").arg(&target);
                command
            } else {
                let image = served.place("image")?.join("files.sqfs");
                served::squashfs(native, &image)?;
                served::squashfuse(&image, &target)
            };
            served.mounting(&mut command, &target)?;
            peers.served.push((name, served));
        }
        Ok(peers)
    }
}

/// The scenario `page-cache`.
pub(super) fn pages(bench: &Bench) -> Result<Report> {
    need_root("mounting")?;
    if layerpack_fixtures::find_tool("fincore").is_none() {
        bail!("fincore is missing (Debian's util-linux)");
    }
    let bytes = if bench.quick { 16 << 20 } else { 256 << 20 };
    let mut ground = ground(bench, "page-cache", bytes)?;
    let mut report = Report {
        conditions: vec![
            format!("{} MiB of files read once, whole; the origin's files are in memory before", bytes >> 20),
            "by file: what fincore finds of the mounted files, of the blob that the daemon serves, and of the cache's data file, for each byte read".to_owned(),
            "by machine: growth of Cached, Buffers and SReclaimable in /proc/meminfo; right only where nothing else runs".to_owned(),
        ],
        columns: vec!["reading", "mounted files", "blob", "data file", "sum", "by machine"],
        chart: "bytes of page cache for each byte read",
        ..Report::default()
    };
    let mut read = |ground: &Ground, what: &str| -> Result<()> {
        drop_caches()?;
        super::measure::warm(&ground.scratch.join("store"))?;
        let machine = || -> Result<u64> {
            Ok(memory("Cached")? + memory("Buffers")? + memory("SReclaimable")?)
        };
        let before = machine()?;
        ground.mount()?;
        super::measure::warm(&ground.target)?;
        let after = machine()?;
        let files = roots::plain_files(&ground.target)?;
        let mut all = 0;
        for file in &files {
            all += fs_err::metadata(file)?.len();
        }
        let cached = ground.node.cached_layer()?;
        let id = cached
            .file_name()
            .context("a layer's directory")?
            .to_owned();
        let per = |bytes: u64| float(bytes) / float(all);
        let mounted = per(cached_bytes(&files)?);
        let blob = per(cached_bytes(&[ground.node.root().join("blobs").join(id)])?);
        let data = per(cached_bytes(&[cached.join("data")])?);
        let sum = mounted + blob + data;
        report.rows.push(vec![
            what.to_owned(),
            format!("{mounted:.2}"),
            format!("{blob:.2}"),
            format!("{data:.2}"),
            format!("{sum:.2}"),
            format!("{:.2}", per(after.saturating_sub(before))),
        ]);
        report.at_most("M7", what, sum, 1.1, " bytes for each byte read");
        report.bars.push((format!("layerpack: {what}"), sum));
        ground.node.umount(&ground.target)?;
        Ok(())
    };
    read(&ground, "from the origin")?;
    ground.node.stop()?;
    ground.node.start()?;
    read(&ground, "from the node's cache")?;
    ground.origin.relay().counted();
    Ok(report)
}
