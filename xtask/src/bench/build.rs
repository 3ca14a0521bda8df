//! Building from a directory, once and again, beside what others make of the same directory.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use super::measure::{self, Sample, Spread, float};
use super::report::Report;
use super::{Bench, inputs, remove};
use crate::process;
use crate::steps::say;

/// Something that is run and measured in every round.
struct Candidate<'a> {
    name: &'static str,
    /// Before each round, not measured.
    prepare: Box<dyn Fn() -> Result<()> + 'a>,
    command: Command,
    /// What is left afterwards.
    output: PathBuf,
    /// Takes so long that it has a part in two rounds only.
    slow: bool,
}

/// What became of a candidate.
struct Outcome {
    name: &'static str,
    samples: Vec<Sample>,
    bytes: u64,
}

impl Outcome {
    fn wall(&self) -> Spread {
        Spread::of(self.samples.iter().map(|sample| sample.wall))
    }

    fn cpu(&self) -> Spread {
        Spread::of(self.samples.iter().map(|sample| sample.cpu))
    }

    fn peak(&self) -> u64 {
        let peaks = self.samples.iter().map(|sample| sample.peak);
        peaks.max().unwrap_or_default()
    }

    fn row(&self, gib: f64) -> Vec<String> {
        vec![
            self.name.to_owned(),
            self.wall().to_string(),
            self.cpu().to_string(),
            format!("{:.2}", self.cpu().median / gib),
            format!("{:.1}", float(self.peak()) / 1048576.0),
            self.bytes.to_string(),
        ]
    }
}

/// Rounds that slow candidates have a part in.
const SLOW_ROUNDS: usize = 2;

const COLUMNS: [&str; 6] = [
    "candidate",
    "wall s: median (least to most)",
    "processor s",
    "processor s/GiB",
    "peak MiB",
    "bytes",
];

/// The candidate that compresses as we do.
const EROFS_ZSTD: &str = "mkfs.erofs zstd";

/// A `mkfs.erofs` that knows zstd (1.8 and later): what `LAYERPACK_MKFS_EROFS` names, or the one on
/// `PATH`.
fn erofs_with_zstd() -> Option<String> {
    let named = std::env::var("LAYERPACK_MKFS_EROFS").ok();
    named
        .into_iter()
        .chain(["mkfs.erofs".to_owned()])
        .find(|name| {
            let output = Command::new(name).arg("-V").output();
            output.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("zstd"))
        })
}

/// `layerpack build` of a directory into a store of its own.
pub(super) fn pack(bench: &Bench, source: &Path, store: &Path, cache: &Path) -> Command {
    let mut command = Command::new(&bench.binary);
    command
        .args(["--quiet", "build", "--kind", "base", "--name", "bench"])
        .args(["--version", "1", "--from"])
        .arg(format!("dir:{}", source.display()))
        .arg("--store")
        .arg(store)
        .arg("--cache-dir")
        .arg(cache);
    command
}

fn program(name: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(name);
    command.args(arguments);
    command
}

fn rounds(bench: &Bench, candidates: &[Candidate<'_>]) -> Result<Vec<Outcome>> {
    let mut outcomes: Vec<Outcome> = candidates
        .iter()
        .map(|candidate| Outcome {
            name: candidate.name,
            samples: Vec::new(),
            bytes: 0,
        })
        .collect();
    for round in 0..bench.rounds() {
        for (candidate, outcome) in candidates.iter().zip(&mut outcomes) {
            if candidate.slow && round >= SLOW_ROUNDS {
                continue;
            }
            (candidate.prepare)()?;
            // What others wrote is on the disk, so that nobody pays for it.
            process::quietly(&mut Command::new("sync"))?;
            let sample = measure::run(&candidate.command)
                .with_context(|| format!("candidate {} failed", candidate.name))?;
            outcome.samples.push(sample);
            outcome.bytes = measure::size(&candidate.output)?;
        }
        say(format!("round {} of {}", round + 1, bench.rounds()));
    }
    Ok(outcomes)
}

fn find<'a>(outcomes: &'a [Outcome], name: &str) -> Result<&'a Outcome> {
    let mut found = outcomes.iter().filter(|outcome| outcome.name == name);
    found
        .next()
        .with_context(|| format!("no candidate is called {name}"))
}

/// Whether a program is installed.
fn found(name: &str) -> bool {
    std::env::var_os("PATH").is_some_and(|path| {
        std::env::split_paths(&path).any(|directory| directory.join(name).is_file())
    })
}

/// What chunking, hashing and compressing alone take on every core.
struct Limit {
    wall: f64,
    cpu: f64,
}

fn limit(bench: &Bench, source: &Path) -> Result<Limit> {
    let binary = bench.example("limit")?;
    let mut walls = Vec::new();
    let mut cpus = Vec::new();
    for _ in 0..bench.rounds() {
        let text = process::output(Command::new(&binary).arg(source))?;
        let mut numbers = text
            .split_whitespace()
            .filter_map(|word| word.parse::<f64>().ok());
        walls.push(numbers.next().context("the limit says no time")?);
        cpus.push(numbers.next().context("the limit says no processor time")?);
    }
    Ok(Limit {
        wall: Spread::of(walls).median,
        cpu: Spread::of(cpus).median,
    })
}

/// The scenario `build`.
pub(super) fn directory(bench: &Bench) -> Result<Report> {
    let source = inputs::debian(bench)?;
    let scratch = bench.scratch("build")?;
    let text = |name: &str| scratch.join(name).display().to_string();
    let from = source.display().to_string();
    let gone = |name: &'static str| {
        let path = scratch.join(name);
        Box::new(move || remove(&path)) as Box<dyn Fn() -> Result<()>>
    };
    let candidate = |name, output: &'static str, command| Candidate {
        name,
        prepare: gone(output),
        command,
        output: scratch.join(output),
        slow: false,
    };
    let slow = |name, output, command| Candidate {
        slow: true,
        ..candidate(name, output, command)
    };
    let (store, cache) = (scratch.join("store"), scratch.join("cache"));
    let squashfs = |output: &str, more: &[&str]| {
        let mut command = program("mksquashfs", &[&from, output, "-comp", "zstd"]);
        command.args(more).args(["-quiet", "-no-progress"]);
        command
    };
    let mut candidates = vec![
        Candidate {
            name: "layerpack",
            prepare: {
                let (store, cache) = (store.clone(), cache.clone());
                Box::new(move || remove(&store).and_then(|()| remove(&cache)))
            },
            command: pack(bench, &source, &store, &cache),
            output: store.clone(),
            slow: false,
        },
        candidate(
            "tar, zstd -3",
            "tar.zst",
            program(
                "tar",
                &[
                    "-I",
                    "zstd -3 -T0",
                    "-cf",
                    &text("tar.zst"),
                    "-C",
                    &from,
                    ".",
                ],
            ),
        ),
        candidate(
            "mksquashfs zstd, level 3",
            "level-3.sqfs",
            squashfs(&text("level-3.sqfs"), &["-Xcompression-level", "3"]),
        ),
        slow(
            "mksquashfs zstd, default",
            "default.sqfs",
            squashfs(&text("default.sqfs"), &[]),
        ),
        candidate(
            "mkfs.erofs",
            "plain.erofs",
            program("mkfs.erofs", &["--quiet", &text("plain.erofs"), &from]),
        ),
        slow(
            "mkfs.erofs lz4hc",
            "lz4hc.erofs",
            program(
                "mkfs.erofs",
                &["--quiet", "-zlz4hc", &text("lz4hc.erofs"), &from],
            ),
        ),
    ];
    let mut missing = Vec::new();
    let erofs_zstd = erofs_with_zstd();
    match &erofs_zstd {
        Some(program_name) => candidates.push(slow(
            EROFS_ZSTD,
            "zstd.erofs",
            program(
                program_name,
                &["--quiet", "-zzstd", &text("zstd.erofs"), &from],
            ),
        )),
        None => missing
            .push("mkfs.erofs with zstd (Debian 12 has none; LAYERPACK_MKFS_EROFS names one)"),
    }
    if found("umoci") {
        let layout = text("umoci");
        let image = format!("{layout}:bench");
        candidates.push(Candidate {
            prepare: {
                let (path, layout, image) = (scratch.join("umoci"), layout, image.clone());
                Box::new(move || {
                    remove(&path)?;
                    process::quietly(&mut program("umoci", &["init", "--layout", &layout]))?;
                    process::quietly(&mut program("umoci", &["new", "--image", &image]))
                })
            },
            ..slow(
                "umoci insert",
                "umoci",
                program("umoci", &["insert", "--image", &image, &from, "/"]),
            )
        });
    } else {
        missing.push("umoci (not installed)");
    }
    if found("nydus-image") {
        let (meta, data) = (text("nydus/meta"), text("nydus/data"));
        let arguments = ["create", "--type", "dir-rafs", "--fs-version", "6"];
        let mut command = program("nydus-image", &arguments);
        command.args(["--compressor", "zstd", "--bootstrap", &meta]);
        command.args(["--blob", &data, &from]);
        candidates.push(Candidate {
            prepare: {
                let path = scratch.join("nydus");
                Box::new(move || {
                    remove(&path)?;
                    Ok(fs_err::create_dir_all(&path)?)
                })
            },
            ..slow("nydus-image zstd", "nydus", command)
        });
    } else {
        missing.push("nydus-image (not installed)");
    }
    measure::warm(&source)?;
    let limit = limit(bench, &source)?;
    let outcomes = rounds(bench, &candidates)?;
    let bytes = float(measure::size(&source)?);
    let gib = bytes / 1073741824.0;
    let ours = find(&outcomes, "layerpack")?;
    let wall = |name: &str| Ok::<_, anyhow::Error>(find(&outcomes, name)?.wall().median);
    let mut report = Report {
        conditions: vec![
            format!(
                "a Debian root of {:.1} MiB of files, links counted each time, in the page cache; {} rounds",
                bytes / 1048576.0,
                bench.rounds()
            ),
            format!(
                "the hardware's limit, chunking, BLAKE3 and zstd -3 of the same bytes from memory on all cores: {:.2} s of wall, {:.2} s of processor time, {:.2} s/GiB",
                limit.wall,
                limit.cpu,
                limit.cpu / gib
            ),
            format!(
                "written data synced before each run; slow candidates had a part in {SLOW_ROUNDS} rounds"
            ),
            format!("peers that are missing: {}", missing.join(", ")),
        ],
        columns: COLUMNS.to_vec(),
        rows: outcomes.iter().map(|outcome| outcome.row(gib)).collect(),
        chart: "Wall time in seconds, median",
        bars: outcomes
            .iter()
            .map(|outcome| (outcome.name.to_owned(), outcome.wall().median))
            .collect(),
        ..Report::default()
    };
    let own = ours.wall().median;
    report.at_most(
        "B1",
        "time beside mksquashfs zstd, default",
        own / wall("mksquashfs zstd, default")?,
        0.2,
        "",
    );
    if erofs_zstd.is_some() {
        report.at_most(
            "B1",
            "time beside mkfs.erofs zstd",
            own / wall(EROFS_ZSTD)?,
            0.2,
            "",
        );
    }
    report.at_most(
        "B2",
        "time beside mksquashfs zstd, level 3",
        own / wall("mksquashfs zstd, level 3")?,
        1.0,
        "",
    );
    report.at_most(
        "B3",
        "time beside the hardware's limit",
        own / limit.wall,
        1.25,
        "",
    );
    report.at_most(
        "B4",
        "processor time for each GiB",
        ours.cpu().median / gib,
        3.0,
        " s",
    );
    report.at_most(
        "B4",
        "processor time beside the hardware's limit",
        ours.cpu().median / limit.cpu,
        1.25,
        "",
    );
    report.at_most(
        "B5",
        "peak memory",
        float(ours.peak()) / 1048576.0,
        100.0,
        " MiB",
    );
    let tar = find(&outcomes, "tar, zstd -3")?;
    report.at_most(
        "B8",
        "bytes beside tar with zstd -3",
        float(ours.bytes) / float(tar.bytes),
        1.02,
        "",
    );
    Ok(report)
}

/// The scenario `rebuild`.
pub(super) fn again(bench: &Bench) -> Result<Report> {
    let original = inputs::debian(bench)?;
    let scratch = bench.scratch("rebuild")?;
    let source = scratch.join("source");
    // A copy, since a file of it is changed; links, times and owners kept.
    process::quietly(Command::new("cp").arg("-a").arg(&original).arg(&source))?;
    measure::warm(&source)?;
    // Files changed within a clock's tick of being read are not remembered.
    std::thread::sleep(std::time::Duration::from_secs(3));
    let (store, cache) = (scratch.join("store"), scratch.join("cache"));
    let changed = source.join("usr/bin/dpkg");
    let nothing = || Box::new(|| Ok(())) as Box<dyn Fn() -> Result<()>>;
    let ours = |name, prepare, command| Candidate {
        name,
        prepare,
        command,
        output: store.clone(),
        slow: false,
    };
    let named = |version: &'static str| {
        let mut command = pack(bench, &source, &store, &cache);
        // The last value given counts for a store of many versions.
        command.args(["--label", version]);
        command
    };
    let candidates = [
        ours(
            "layerpack, first",
            {
                let (store, cache) = (store.clone(), cache.clone());
                Box::new(move || remove(&store).and_then(|()| remove(&cache)))
            },
            named("a=1"),
        ),
        ours("layerpack, nothing changed", nothing(), named("a=1")),
    ];
    let mut outcomes = rounds(bench, &candidates)?;
    let before = measure::size(&store)?;
    let third = {
        let mut command = pack(bench, &source, &store, &cache);
        let arguments: Vec<_> = command.get_args().map(ToOwned::to_owned).collect();
        command = Command::new(command.get_program());
        command.args(arguments.iter().map(|argument| {
            if argument == "bench" {
                "changed".into()
            } else {
                argument.clone()
            }
        }));
        command
    };
    let mut bytes = fs_err::read(&changed)?;
    bytes.extend_from_slice(b"one more line\n");
    fs_err::write(&changed, bytes)?;
    let sample = measure::run(&third)?;
    let grown = measure::size(&store)? - before;
    outcomes.push(Outcome {
        name: "layerpack, one file changed",
        samples: vec![sample],
        bytes: before + grown,
    });
    let gib = float(measure::size(&source)?) / 1073741824.0;
    let first = find(&outcomes, "layerpack, first")?;
    let same = find(&outcomes, "layerpack, nothing changed")?;
    let mut report = Report {
        conditions: vec![
            format!(
                "the same root as in `build`, copied; {} rounds, the change once",
                bench.rounds()
            ),
            format!(
                "one file changed: {} with 14 bytes appended, published under another name: {grown} new bytes in the store",
                changed.file_name().unwrap_or_default().display()
            ),
        ],
        columns: COLUMNS.to_vec(),
        rows: outcomes.iter().map(|outcome| outcome.row(gib)).collect(),
        chart: "Processor time in seconds, median",
        bars: outcomes
            .iter()
            .map(|outcome| (outcome.name.to_owned(), outcome.cpu().median))
            .collect(),
        ..Report::default()
    };
    report.at_most(
        "B6",
        "processor time beside the first build",
        same.cpu().median / first.cpu().median,
        0.05,
        "",
    );
    report.at_most(
        "B6",
        "new bytes with nothing changed",
        float(same.bytes) - float(first.bytes),
        0.0,
        "",
    );
    Ok(report)
}
