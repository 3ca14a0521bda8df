//! `cargo xtask bench`: the product beside its peers, in one run on one machine.
//!
//! A scenario is a function from a [`Bench`] to a [`Report`], entered in [`SCENARIOS`]; it is run
//! by its name. Candidates of a scenario alternate, round after round, each from a page cache that
//! was warmed right before; every process is measured whole, with its children, by a fresh process
//! that waits for it ([`measure`]). Reports go to `bench/results` as Markdown with a chart; their
//! verdicts are what `bench/SPEC.md` may call met or missed. Inputs are made once and kept under
//! `target/bench`.

mod build;
mod buildah;
mod cold;
mod conformance;
mod endurance;
mod family;
mod frames;
mod git;
mod inputs;
mod large;
pub(crate) mod measure;
mod mounts;
mod node;
mod origin;
mod report;
mod roots;
mod sandboxes;
mod served;
mod snapshot;
mod warm;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use crate::steps::{Steps, say};
use crate::{process, workspace};
use report::Report;

/// A scenario: its name, what it shows, and how it runs.
struct Scenario {
    name: &'static str,
    about: &'static str,
    run: fn(&Bench) -> Result<Report>,
}

/// All scenarios, in the order in which they run.
const SCENARIOS: [Scenario; 17] = [
    Scenario {
        name: "build",
        about: "building from a directory, beside mkfs.erofs, mksquashfs and tar with zstd",
        run: build::directory,
    },
    Scenario {
        name: "rebuild",
        about: "building again with nothing changed, and with one file changed",
        run: build::again,
    },
    Scenario {
        name: "frames",
        about: "frame and chunk sizes: stored bytes, processor time, bytes fetched",
        run: frames::table,
    },
    Scenario {
        name: "million",
        about: "a million small files: time, memory, metadata",
        run: large::million,
    },
    Scenario {
        name: "file",
        about: "one file of 10 GiB, part data and part hole: time and memory",
        run: large::file,
    },
    Scenario {
        name: "family",
        about: "similar environments in one store, beside OCI layers compressed with gzip",
        run: family::table,
    },
    Scenario {
        name: "git-status",
        about: "what the first git status on a mounted workspace fetches, with and without --git-index",
        run: git::table,
    },
    Scenario {
        name: "pack-diff",
        about: "snapshots by what changed and what did not, beside umoci repack and tar",
        run: snapshot::table,
    },
    Scenario {
        name: "cold",
        about: "programs in an environment that is not on the node, beside local disks and a full pull",
        run: cold::table,
    },
    Scenario {
        name: "cold-peers",
        about: "the same beside FUSE peers that fetch images and archives while they are read",
        run: cold::peers::table,
    },
    Scenario {
        name: "first-mount",
        about: "mounting a layer that is not on the node: requests, bytes, time",
        run: mounts::first,
    },
    Scenario {
        name: "mounts",
        about: "stacks whose layers are up, a thousand layers, very many stacks",
        run: mounts::table,
    },
    Scenario {
        name: "warm",
        about: "reads, stat and readdir in memory, beside native EROFS over the same image",
        run: warm::table,
    },
    Scenario {
        name: "page-cache",
        about: "bytes of page cache for each byte read",
        run: warm::pages,
    },
    Scenario {
        name: "sandboxes",
        about: "containers: time to the first command, how many a second, memory of idle ones",
        run: sandboxes::table,
    },
    Scenario {
        name: "endurance",
        about: "random reads with kills, a small cache and a failing store; ten minutes",
        run: endurance::table,
    },
    Scenario {
        name: "conformance",
        about: "pjdfstest and fsx on a writable mount, beside an overlay over a plain directory",
        run: conformance::table,
    },
];

/// What scenarios work with.
pub(crate) struct Bench {
    /// Smaller inputs and fewer rounds: to see that everything works, not to claim anything.
    pub(crate) quick: bool,
    /// The release binary.
    pub(crate) binary: PathBuf,
    /// Where inputs and outputs lie.
    pub(crate) work: PathBuf,
}

impl Bench {
    /// Rounds in which the candidates alternate.
    pub(crate) fn rounds(&self) -> usize {
        if self.quick { 1 } else { 5 }
    }

    /// A directory of this run alone, empty.
    pub(crate) fn scratch(&self, name: &str) -> Result<PathBuf> {
        let path = self.work.join("scratch").join(name);
        remove(&path)?;
        fs_err::create_dir_all(&path)?;
        Ok(path)
    }

    /// A release build of an example of the store's crate, which shows what only its library can.
    pub(crate) fn example(&self, name: &str) -> Result<PathBuf> {
        let mut command = workspace::cargo();
        command
            .args(["build", "--quiet", "--release", "--package"])
            .args(["layerpack-store", "--example", name])
            .current_dir(workspace::root()?);
        process::run(&mut command)?;
        Ok(workspace::target_dir()?.join("release/examples").join(name))
    }
}

/// Removes a directory with all that is in it, or a file, if it is there.
fn remove(path: &Path) -> Result<()> {
    if path.is_dir() {
        fs_err::remove_dir_all(path)?;
    } else if path.exists() {
        fs_err::remove_file(path)?;
    }
    Ok(())
}

/// Runs the scenarios `only`, or all; with the binary that is named, else with a release build.
///
/// # Errors
/// When a scenario cannot run. A claim that is missed is no error: it is what is to be found out.
pub(crate) fn run(quick: bool, binary: Option<&Path>, only: &[String]) -> Result<()> {
    for name in only {
        if !SCENARIOS.iter().any(|scenario| scenario.name == name) {
            for scenario in &SCENARIOS {
                say(format!("{:12} {}", scenario.name, scenario.about));
            }
            bail!("there is no scenario {name}");
        }
    }
    let chosen: Vec<&Scenario> = SCENARIOS
        .iter()
        .filter(|scenario| only.is_empty() || only.iter().any(|name| name == scenario.name))
        .collect();
    let mut steps = Steps::new(chosen.len() + 1);
    steps.begin("the release binary");
    let target = workspace::target_dir()?;
    let binary = match binary {
        Some(binary) => fs_err::canonicalize(binary)?,
        None => {
            let mut command = workspace::cargo();
            command
                .args(["build", "--quiet", "--release", "--package", "layerpack"])
                .current_dir(workspace::root()?);
            process::run(&mut command)?;
            target.join("release/layerpack")
        }
    };
    let bench = Bench {
        quick,
        binary,
        work: target.join("bench"),
    };
    fs_err::create_dir_all(&bench.work)?;
    let host = report::host(&bench.work)?;
    say(&host);
    steps.done();
    let results = match quick {
        // Figures of a quick run claim nothing, so they do not take the place of real ones.
        true => bench.work.join("results-quick"),
        false => workspace::root()?.join("bench/results"),
    };
    fs_err::create_dir_all(&results)?;
    for scenario in chosen {
        steps.begin(scenario.about);
        let report = (scenario.run)(&bench)
            .with_context(|| format!("scenario {} could not run", scenario.name))?;
        report.show();
        report.write(&results, scenario.name, scenario.about, &host)?;
        steps.done();
    }
    remove(&bench.work.join("scratch"))?;
    println!("\nReports are in {}.", results.display());
    Ok(())
}
