//! Snapshots of sandboxes: time, frozen time and bytes by what changed and by what did not, beside
//! what else makes layers of changes.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use layerpack_fixtures::find_tool;
use layerpack_fixtures::rng::Rng;
use serde_json::Value;

use super::buildah::Storage;
use super::measure::{self, Spread, float};
use super::report::Report;
use super::{Bench, inputs, remove};
use crate::process;
use crate::steps::say;

/// Host id of a sandbox's root.
const ID_BASE: u32 = 1 << 20;

/// Files that change, and the size of each in bytes.
const CHANGES: [(u32, usize); 5] = [
    (1, 10 << 10),
    (100, 10 << 10),
    (1_000, 10 << 10),
    (10_000, 1 << 10),
    (100_000, 100),
];

/// A node of its own with the layers that sandboxes lie on.
pub(super) struct Node<'a> {
    pub(super) bench: &'a Bench,
    pub(super) root: PathBuf,
    pub(super) store: PathBuf,
}

/// What a snapshot took.
#[derive(Default)]
struct Taken {
    wall_ms: Vec<f64>,
    frozen_ms: Vec<f64>,
    new_bytes: u64,
}

impl Taken {
    fn row(&self, what: String) -> Vec<String> {
        vec![
            what,
            Spread::of(self.wall_ms.iter().copied()).to_string(),
            match self.frozen_ms.is_empty() {
                true => "-".to_owned(),
                false => Spread::of(self.frozen_ms.iter().copied()).to_string(),
            },
            self.new_bytes.to_string(),
        ]
    }

    fn wall(&self) -> f64 {
        Spread::of(self.wall_ms.iter().copied()).median
    }
}

impl Node<'_> {
    fn command(&self) -> Command {
        let mut command = Command::new(&self.bench.binary);
        command
            .env("LAYERPACK_ROOT", &self.root)
            .env("LAYERPACK_STORE", &self.store)
            .env("LAYERPACK_CACHE", self.root.with_file_name("cache"));
        command
    }

    pub(super) fn output(&self, arguments: &[&str]) -> Result<String> {
        process::output(self.command().args(arguments))
    }

    pub(super) fn json(&self, arguments: &[&str]) -> Result<Value> {
        let mut all = vec!["-o", "json"];
        all.extend(arguments);
        Ok(serde_json::from_str(&self.output(&all)?)?)
    }

    pub(super) fn build(
        &self,
        kind: &str,
        name: &str,
        source: &Path,
        extra: &[&str],
    ) -> Result<()> {
        let from = format!("dir:{}", source.display());
        let mut arguments = vec!["-q", "build", "--kind", kind, "--name", name];
        arguments.extend(["--version", "1", "--from", &from]);
        arguments.extend(extra);
        self.output(&arguments).map(drop)
    }

    /// A sandbox on these layers: its id, and where its tree and its upper are.
    fn sandbox(&self, layers: &[&str]) -> Result<(String, PathBuf, PathBuf)> {
        let mut arguments = vec!["sandbox", "create"];
        arguments.extend(layers);
        let made = self.json(&arguments)?;
        let id = made.get("id").and_then(Value::as_str).context("no id")?;
        let pid = made.get("pid").and_then(Value::as_i64).context("no pid")?;
        let upper = self.root.join("sandboxes").join(id).join("upper");
        Ok((
            id.to_owned(),
            PathBuf::from(format!("/proc/{pid}/root")),
            upper,
        ))
    }

    /// Makes a snapshot and notes what it took.
    fn pack(&self, id: &str, version: usize, taken: &mut Taken) -> Result<()> {
        let (name, version) = (format!("s-{id}"), version.to_string());
        let arguments = ["pack-diff", id, "--name", &name, "--version", &version];
        let begun = Instant::now();
        let report = self.json(&arguments)?;
        taken.wall_ms.push(begun.elapsed().as_secs_f64() * 1e3);
        let frozen = report.get("frozen_ms").and_then(Value::as_array);
        let frozen = frozen.into_iter().flatten().filter_map(Value::as_f64);
        taken.frozen_ms.push(frozen.sum());
        let bytes = report.pointer("/store/new_bytes").and_then(Value::as_u64);
        taken.new_bytes = bytes.context("the report has no bytes")?;
        Ok(())
    }
}

impl Drop for Node<'_> {
    fn drop(&mut self) {
        let list = self.json(&["sandbox", "ls"]).unwrap_or_default();
        for sandbox in list.as_array().into_iter().flatten() {
            if let Some(id) = sandbox.get("id").and_then(Value::as_str) {
                let _ = self.output(&["sandbox", "rm", "-f", id]);
            }
        }
        let _ = self.output(&["daemon", "stop", "--force"]);
    }
}

/// Writes `count` files of `size` bytes that nothing compresses; `owner` is who they belong to.
fn change(directory: &Path, (count, size): (u32, usize), seed: u64, owner: u32) -> Result<()> {
    let mut rng = Rng::new(seed);
    let own = |path: &Path| std::os::unix::fs::lchown(path, Some(owner), Some(owner));
    for file in 0..count {
        let inside = directory.join(format!("changed-{:03}", file / 1000));
        if file % 1000 == 0 {
            fs_err::create_dir_all(&inside)?;
            own(&inside)?;
        }
        let path = inside.join(format!("file-{file}"));
        fs_err::write(&path, rng.bytes(size))?;
        own(&path)?;
    }
    Ok(())
}

/// A root that is just enough to run a program.
fn small_root(bench: &Bench) -> Result<PathBuf> {
    let busybox = find_tool("busybox").context("needs a static busybox")?;
    inputs::cached(bench, "small-root", "busybox alone\n", |partial| {
        for directory in ["bin", "etc", "tmp", "work", "data"] {
            fs_err::create_dir_all(partial.join(directory))?;
        }
        fs_err::copy(&busybox, partial.join("bin/busybox"))?;
        for program in ["sh", "true", "dd"] {
            std::os::unix::fs::symlink("busybox", partial.join("bin").join(program))?;
        }
        Ok(())
    })
}

/// The scenario `pack-diff`.
pub(super) fn table(bench: &Bench) -> Result<Report> {
    if !rustix::process::geteuid().is_root() {
        bail!("sandboxes need root");
    }
    let scratch = bench.scratch("pack-diff")?;
    let node = Node {
        bench,
        root: scratch.join("node"),
        store: scratch.join("store"),
    };
    let root = small_root(bench)?;
    node.build("base", "root", &root, &[])?;
    let few = inputs::many(bench, 10)?;
    node.build("workspace", "few", &few, &["--at", "/data"])?;
    let changes: Vec<(u32, usize)> = CHANGES
        .into_iter()
        .filter(|(count, _)| !bench.quick || *count <= 1000)
        .collect();
    let mut report = Report {
        conditions: vec![
            "files that do not compress, written through the sandbox right before; a store that lacks their contents".to_owned(),
            "10,000 files untouched below unless said; time of the whole command, process start and publishing included".to_owned(),
            "umoci repack and tar get the same files, umoci in an unpacked image of the same tree".to_owned(),
            "buildah commit gets them in a container of that image, storage driver overlay, without compressing".to_owned(),
        ],
        columns: vec!["what", "wall ms: median (least to most)", "frozen ms", "bytes written"],
        chart: "ms for 1,000 changed files of 10 KiB",
        ..Report::default()
    };
    let mut thousand = 0.0;
    for (index, case) in changes.iter().enumerate() {
        let (id, tree, _) = node.sandbox(&["base/root:1", "workspace/few:1"])?;
        let mut taken = Taken::default();
        // Writing very many files takes longest of all.
        let rounds = bench.rounds().min(if case.0 < 10_000 { 9 } else { 3 });
        for round in 0..rounds {
            change(
                &tree.join("work"),
                *case,
                (index * 100 + round) as u64,
                ID_BASE,
            )?;
            node.pack(&id, round, &mut taken)?;
        }
        node.output(&["sandbox", "rm", "-f", &id])?;
        if case.0 == 1000 {
            thousand = taken.wall();
            report.at_most("S4", "1,000 files of 10 KiB", thousand, 100.0, " ms");
        }
        if case.0 == 10_000 {
            let frozen = Spread::of(taken.frozen_ms.iter().copied());
            report.at_most(
                "S4",
                "frozen for 10,000 files, longest",
                frozen.most,
                50.0,
                " ms",
            );
        }
        report
            .rows
            .push(taken.row(format!("layerpack, {} files of {} bytes", case.0, case.1)));
        say(format!("{} changed files", case.0));
    }
    untouched(&node, &mut report)?;
    large(&node, &scratch, &mut report)?;
    restored(&node, &mut report)?;
    report
        .bars
        .push(("layerpack pack-diff".to_owned(), thousand));
    peers(&node, &scratch, &mut report, thousand)?;
    Ok(report)
}

/// The same change with many more files below.
fn untouched(node: &Node<'_>, report: &mut Report) -> Result<()> {
    if node.bench.quick {
        return Ok(());
    }
    let many = inputs::many(node.bench, 1000)?;
    node.build("workspace", "many", &many, &["--at", "/data"])?;
    let mut taken = [Taken::default(), Taken::default()];
    let mut sandboxes = Vec::new();
    for workspace in ["workspace/few:1", "workspace/many:1"] {
        sandboxes.push(node.sandbox(&["base/root:1", workspace])?);
    }
    for round in 0..node.bench.rounds() {
        for (index, ((id, tree, _), taken)) in sandboxes.iter().zip(&mut taken).enumerate() {
            let seed = (10_000 + round * 2 + index) as u64;
            change(&tree.join("work"), (1000, 10 << 10), seed, ID_BASE)?;
            node.pack(id, round, taken)?;
        }
    }
    let [few, many] = &taken;
    report
        .rows
        .push(many.row("layerpack, 1000 files of 10240 bytes, 1,000,000 below".to_owned()));
    let ratio = many.wall() / few.wall();
    report.at_most(
        "S5",
        "time with 1,000,000 files below beside 10,000",
        ratio,
        1.15,
        "x",
    );
    Ok(())
}

/// One file of 1 GiB, of which 4 KiB change.
fn large(node: &Node<'_>, scratch: &Path, report: &mut Report) -> Result<()> {
    let size = if node.bench.quick { 64 << 20 } else { 1 << 30 };
    let directory = scratch.join("large");
    fs_err::create_dir_all(&directory)?;
    let mut file = fs_err::File::create(directory.join("large"))?;
    let mut rng = Rng::new(4711);
    for _ in 0..size >> 20 {
        std::io::Write::write_all(&mut file, &rng.bytes(1 << 20))?;
    }
    drop(file);
    node.build("workspace", "large", &directory, &["--at", "/data"])?;
    remove(&directory)?;
    let (id, _, _) = node.sandbox(&["base/root:1", "workspace/large:1"])?;
    let mut taken = Taken::default();
    for round in 0..node.bench.rounds().min(3) {
        let script = format!(
            "dd if=/dev/urandom of=/data/large bs=4096 count=1 seek={} conv=notrunc 2>/dev/null",
            1000 + round * 5000
        );
        node.output(&["sandbox", "exec", &id, "--", "sh", "-c", &script])?;
        node.pack(&id, round, &mut taken)?;
    }
    report
        .rows
        .push(taken.row(format!("layerpack, 4 KiB of a file of {} MiB", size >> 20)));
    report.at_most(
        "S5",
        "bytes written for 4 KiB of a large file",
        float(taken.new_bytes),
        1048576.0,
        " bytes",
    );
    node.output(&["sandbox", "rm", "-f", &id]).map(drop)
}

/// From a snapshot to the first command in a sandbox of it.
fn restored(node: &Node<'_>, report: &mut Report) -> Result<()> {
    let (id, tree, _) = node.sandbox(&["base/root:1", "workspace/few:1"])?;
    change(&tree.join("work"), (1000, 10 << 10), 77, ID_BASE)?;
    let arguments = [
        "-q",
        "pack-diff",
        &id,
        "--name",
        "restored",
        "--version",
        "1",
    ];
    node.output(&arguments)?;
    let mut walls = Vec::new();
    for _ in 0..if node.bench.quick { 3 } else { 30 } {
        let begun = Instant::now();
        node.output(&["run", "--rm", "diff/restored:1", "--", "true"])?;
        walls.push(begun.elapsed().as_secs_f64() * 1e3);
    }
    let walls = Spread::of(walls);
    report.rows.push(vec![
        "layerpack, restore: `run --rm` of `true` in a new sandbox, its end included".to_owned(),
        walls.to_string(),
        "-".to_owned(),
        "-".to_owned(),
    ]);
    report.at_most(
        "S4",
        "restore to the first command's end",
        walls.median,
        20.0,
        " ms",
    );
    Ok(())
}

/// What else makes layers of changes.
fn peers(node: &Node<'_>, scratch: &Path, report: &mut Report, ours: f64) -> Result<()> {
    let case = (1000, 10 << 10);
    let mut tar = Taken::default();
    let upper = scratch.join("upper");
    for round in 0..node.bench.rounds() {
        remove(&upper)?;
        fs_err::create_dir_all(&upper)?;
        change(&upper, case, 20_000 + round as u64, 0)?;
        let layer = scratch.join("layer.tar.zst");
        let mut command = Command::new("tar");
        command.args(["-I", "zstd -3 -T0", "-cf"]).arg(&layer);
        command.arg("-C").arg(&upper).arg(".");
        tar.wall_ms.push(measure::run(&command)?.wall * 1e3);
        tar.new_bytes = measure::size(&layer)?;
    }
    report
        .rows
        .push(tar.row("tar of the upper with zstd -3".to_owned()));
    report.bars.push(("tar, zstd -3".to_owned(), tar.wall()));
    let (umoci, buildah) = (find_tool("umoci").is_some(), find_tool("buildah").is_some());
    for (there, name) in [(umoci, "umoci"), (buildah, "buildah")] {
        if !there {
            report.conditions.push(format!("{name} is not installed"));
        }
    }
    if !umoci && !buildah {
        return Ok(());
    }
    let image = scratch.join("oci");
    let to = format!("oci:{}", image.display());
    let layers = [
        "base/root:1",
        "workspace/few:1",
        "--to",
        &to,
        "--tag",
        "base",
    ];
    let mut arguments = vec!["-q", "export"];
    arguments.extend(layers);
    node.output(&arguments)?;
    let named = |tag: &str| format!("{}:{tag}", image.display());
    if buildah {
        committed(node, scratch, report, &named("base"), ours)?;
    }
    if umoci {
        repacked(node, scratch, report, &image, ours)?;
    }
    Ok(())
}

/// `buildah commit` of the same change.
fn committed(
    node: &Node<'_>,
    scratch: &Path,
    report: &mut Report,
    image: &str,
    ours: f64,
) -> Result<()> {
    let storage = Storage::new(&scratch.join("buildah"))?;
    let image = storage.pull(image)?;
    let mut taken = Taken::default();
    for round in 0..node.bench.rounds().min(5) {
        let seed = 40_000 + round as u64;
        let (wall, bytes) = storage.commit(&image, |tree| {
            change(&tree.join("work"), (1000, 10 << 10), seed, 0)
        })?;
        taken.wall_ms.push(wall);
        taken.new_bytes = bytes;
    }
    report.rows.push(taken.row("buildah commit".to_owned()));
    report
        .bars
        .push(("buildah commit".to_owned(), taken.wall()));
    report.verdicts.push(super::report::Verdict {
        claim: "S6",
        found: format!(
            "buildah commit takes {:.1}x the time, at least 20x is asked for",
            taken.wall() / ours
        ),
        met: taken.wall() >= 20.0 * ours,
    });
    Ok(())
}

/// `umoci repack` of the same change.
fn repacked(
    node: &Node<'_>,
    scratch: &Path,
    report: &mut Report,
    image: &Path,
    ours: f64,
) -> Result<()> {
    let case = (1000, 10 << 10);
    let named = |tag: &str| format!("{}:{tag}", image.display());
    let bundle = scratch.join("bundle");
    let mut repack = Taken::default();
    for round in 0..node.bench.rounds().min(3) {
        remove(&bundle)?;
        let mut unpack = Command::new("umoci");
        unpack
            .args(["unpack", "--image", &named("base")])
            .arg(&bundle);
        process::quietly(&mut unpack)?;
        change(&bundle.join("rootfs/work"), case, 30_000 + round as u64, 0)?;
        let before = measure::size(image)?;
        let mut command = Command::new("umoci");
        command
            .args(["repack", "--image", &named(&format!("r{round}"))])
            .arg(&bundle);
        repack.wall_ms.push(measure::run(&command)?.wall * 1e3);
        repack.new_bytes = measure::size(image)? - before;
    }
    report.rows.push(repack.row("umoci repack".to_owned()));
    report.bars.push(("umoci repack".to_owned(), repack.wall()));
    report.verdicts.push(super::report::Verdict {
        claim: "S6",
        found: format!(
            "umoci repack takes {:.1}x the time, at least 20x is asked for",
            repack.wall() / ours
        ),
        met: repack.wall() >= 20.0 * ours,
    });
    Ok(())
}
