//! The steps that the quickstart shows, in order.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use layerpack_fixtures::treecmp;
use serde_json::Value;

use super::Places;
use super::inputs::{self, Input};
use super::node::{Node, number, text};
use super::report::{LayerRow, PhaseRow, Report};
use crate::process;
use crate::steps::{Steps, bytes, say, seconds};

/// The sandbox in which the change is made, and the snapshot of it.
const SANDBOX: &str = "quickstart";
const SNAPSHOT: &str = "diff/click-change:1";
const HARNESS: &str = "/opt/tools/bin/harness";

/// Differences of trees that are printed before the rest is only counted.
const SHOWN: usize = 10;

/// How to build one layer.
struct Recipe<'a> {
    kind: &'a str,
    name: &'a str,
    at: Option<&'a str>,
    input: &'a Input,
}

impl Recipe<'_> {
    fn reference(&self) -> String {
        format!("{}/{}:{}", self.kind, self.name, self.input.version)
    }

    /// Arguments of `layerpack build`.
    fn arguments(&self) -> Result<Vec<String>> {
        let path = self
            .input
            .path
            .to_str()
            .context("the work folder's path is not UTF-8")?;
        let mut arguments: Vec<String> = [
            "build",
            "-o",
            "json",
            "--kind",
            self.kind,
            "--name",
            self.name,
            "--version",
        ]
        .map(str::to_owned)
        .to_vec();
        arguments.extend([
            self.input.version.clone(),
            "--from".to_owned(),
            format!("dir:{path}"),
        ]);
        if let Some(at) = self.at {
            arguments.extend(["--at".to_owned(), at.to_owned()]);
        }
        Ok(arguments)
    }
}

/// Runs all steps after the tools.
pub(super) fn everything(steps: &mut Steps, places: &Places, node: &Node) -> Result<Report> {
    let mut report = Report::default();

    steps.begin("a Debian root filesystem");
    let base = inputs::base(places)?;
    steps.done();
    steps.begin("a Python project with its tests, as a git repository");
    let workspace = inputs::workspace(places, &base.path)?;
    steps.done();
    steps.begin("a toolkit: ripgrep and a harness");
    let toolkit = inputs::toolkit(places)?;
    steps.done();

    let recipes = [
        Recipe {
            kind: "base",
            name: "debian",
            at: None,
            input: &base,
        },
        Recipe {
            kind: "workspace",
            name: "click",
            at: Some("workspace"),
            input: &workspace,
        },
        Recipe {
            kind: "toolkit",
            name: "harness",
            at: Some("opt/tools"),
            input: &toolkit,
        },
    ];
    steps.begin("three layers built");
    let mut digests = Vec::new();
    for recipe in &recipes {
        let (row, digest) = build(node, recipe)?;
        report.layers.push(row);
        digests.push(digest);
    }
    steps.done();
    let references: Vec<String> = recipes.iter().map(Recipe::reference).collect();
    let stack: Vec<&str> = references.iter().map(String::as_str).collect();

    let mut meter = Meter::new(node);
    steps.begin("the environment mounted, nothing copied");
    let environment = places.mounts().join("environment");
    mount(node, &stack, &environment)?;
    let mut names: Vec<String> = Vec::new();
    for entry in fs_err::read_dir(&environment)? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    say(format!(
        "{} holds {}",
        environment.display(),
        names.join(" ")
    ));
    report.phases.push(meter.phase("environment mounted")?);
    steps.done();

    steps.begin("the project's own tests, in a container sandbox");
    let mut run = vec!["run", "--rm", "-w", "/workspace"];
    run.extend(&stack);
    run.extend(["--", HARNESS, "test"]);
    node.show(&run)?;
    report
        .phases
        .push(meter.phase("tests passed in a sandbox")?);
    steps.done();

    steps.begin("a change in a lasting sandbox, packed as a diff layer");
    let before = change(node, &stack, &mut report, &mut meter)?;
    steps.done();

    steps.begin("a new sandbox, restored from the snapshot");
    node.show(&[
        "run",
        "--rm",
        "-w",
        "/workspace",
        SNAPSHOT,
        "--",
        HARNESS,
        "check",
    ])?;
    report
        .phases
        .push(meter.phase("snapshot restored and checked")?);
    let after = node.output(&["run", "--rm", SNAPSHOT, "--", HARNESS, "tree"])?;
    same_listing(&before, &after)?;
    say(format!(
        "its tree equals that of the first sandbox: {} lines compared",
        after.lines().count()
    ));
    steps.done();

    steps.begin("proof: digests, trees, fsck.erofs, every stored byte");
    second_build(node, places, &recipes, &digests)?;
    source_against_mount(node, places, &recipes[0])?;
    verify(node, &stack, &mut report)?;
    steps.done();

    unmount(node, &environment)?;
    Ok(report)
}

fn build(node: &Node, recipe: &Recipe<'_>) -> Result<(LayerRow, String)> {
    let arguments = recipe.arguments()?;
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let started = Instant::now();
    let built = node.json(&arguments)?;
    let row = layer_row(&built, started.elapsed())?;
    let digest = text(&built, "/digest")?.to_owned();
    say(format!(
        "{} {}: {} files, {}; {} new in the store; {}",
        row.reference,
        digest.get(..15).unwrap_or(&digest),
        number(&built, "/counts/files")?,
        bytes(row.contents),
        bytes(row.new),
        seconds(row.took)
    ));
    Ok((row, digest))
}

fn layer_row(published: &Value, took: Duration) -> Result<LayerRow> {
    Ok(LayerRow {
        reference: text(published, "/reference")?.to_owned(),
        contents: number(published, "/counts/bytes")?,
        stored: 0,
        new: number(published, "/store/new_bytes")?,
        took,
    })
}

/// Makes the change, packs it, ends the sandbox; hands out its tree as it was.
fn change(
    node: &Node,
    stack: &[&str],
    report: &mut Report,
    meter: &mut Meter<'_>,
) -> Result<String> {
    let published = node.json(&["ls", "-o", "json", "--kind", "diff"])?;
    let published = published
        .as_array()
        .context("`layerpack ls` printed no list")?;
    if published
        .iter()
        .any(|row| text(row, "/reference").is_ok_and(|name| name == SNAPSHOT))
    {
        // Of an earlier run: this one's differs, if only in its times.
        node.output(&["rm", SNAPSHOT])?;
        say(format!("{SNAPSHOT} of an earlier run removed"));
    }
    let mut create = vec!["sandbox", "create", "--name", SANDBOX, "-w", "/workspace"];
    create.extend(stack);
    let started = Instant::now();
    node.output(&create)?;
    say(format!("sandbox created in {}", seconds(started.elapsed())));
    node.show(&["sandbox", "exec", SANDBOX, "--", HARNESS, "change"])?;
    report
        .phases
        .push(meter.phase("sandbox created, change made")?);
    let tree = node.output(&["sandbox", "exec", SANDBOX, "--", HARNESS, "tree"])?;
    // What looking at it costs is no part of the change.
    meter.restart()?;
    let (name, version) = SNAPSHOT
        .strip_prefix("diff/")
        .and_then(|rest| rest.split_once(':'))
        .context("the snapshot's name is no reference")?;
    let started = Instant::now();
    let packed = node.json(&[
        "pack-diff",
        "-o",
        "json",
        SANDBOX,
        "--name",
        name,
        "--version",
        version,
        // The trees are compared byte by byte, git's index among them.
        "--no-git-index",
    ])?;
    let took = started.elapsed();
    let row = layer_row(&packed, took)?;
    say(format!(
        "{} packed in {}: {} files, {}",
        row.reference,
        seconds(took),
        number(&packed, "/counts/files")?,
        bytes(row.contents)
    ));
    report.layers.push(row);
    report.phases.push(meter.phase("change packed")?);
    node.output(&["sandbox", "rm", "--force", SANDBOX])?;
    Ok(tree)
}

fn same_listing(before: &str, after: &str) -> Result<()> {
    if before == after {
        return Ok(());
    }
    let old: Vec<&str> = before.lines().collect();
    let new: Vec<&str> = after.lines().collect();
    let gone = old
        .iter()
        .filter(|line| !new.contains(line))
        .map(|line| format!("- {line}"));
    let come = new
        .iter()
        .filter(|line| !old.contains(line))
        .map(|line| format!("+ {line}"));
    let lines: Vec<String> = gone.chain(come).collect();
    for line in lines.iter().take(2 * SHOWN) {
        say(line);
    }
    bail!(
        "the restored tree differs from the sandbox's in {} lines",
        lines.len()
    );
}

/// Builds all layers again, with one thread and into an empty store: the digests must be equal.
fn second_build(
    node: &Node,
    places: &Places,
    recipes: &[Recipe<'_>],
    digests: &[String],
) -> Result<()> {
    let store = places.second_store();
    for (recipe, first) in recipes.iter().zip(digests) {
        let mut arguments = recipe.arguments()?;
        arguments.extend(["--jobs", "1"].map(str::to_owned));
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let built = node.json_in(&store, &arguments)?;
        let second = text(&built, "/digest")?;
        if second != first {
            bail!(
                "{}: a second build gave {second}, the first {first}",
                recipe.reference()
            );
        }
    }
    fs_err::remove_dir_all(&store)?;
    say("a second build with one thread into an empty store gave the same digests");
    Ok(())
}

/// Compares the base layer, mounted alone, with the folder it was made from, entry by entry and
/// byte by byte; has Debian's `fsck.erofs` read it all too.
fn source_against_mount(node: &Node, places: &Places, base: &Recipe<'_>) -> Result<()> {
    let reference = base.reference();
    let target = places.mounts().join("base");
    mount(node, &[&reference], &target)?;
    let options = treecmp::Options::default();
    let source = treecmp::snapshot(&base.input.path, &options)?;
    let mounted = treecmp::snapshot(&target, &options)?;
    let differences = treecmp::diff(&source, &mounted);
    for line in differences.iter().take(SHOWN) {
        say(line);
    }
    if !differences.is_empty() {
        bail!(
            "{} differences between {reference} and its source",
            differences.len()
        );
    }
    say(format!(
        "{reference} as mounted equals its source: {} entries, {} of contents",
        mounted.entries.len(),
        bytes(mounted.file_bytes())
    ));
    let status = node.json(&["daemon", "status", "-o", "json"])?;
    let layers = status.pointer("/node/layers").and_then(Value::as_array);
    let layer = layers
        .into_iter()
        .flatten()
        .find(|layer| text(layer, "/reference").is_ok_and(|name| name == reference))
        .with_context(|| format!("the daemon does not list {reference}"))?;
    let id = text(layer, "/layer_id")?;
    let id = id.strip_prefix("b3:").unwrap_or(id);
    fsck(
        &node.root().join("cache").join(id).join("meta.erofs"),
        &node.root().join("blobs").join(id),
        &places.logs().join("fsck.log"),
    )?;
    unmount(node, &target)
}

fn fsck(meta: &Path, data: &Path, log: &Path) -> Result<()> {
    let program = layerpack_fixtures::find_tool("fsck.erofs").context("fsck.erofs is missing")?;
    let mut command = Command::new(program);
    let mut device = std::ffi::OsString::from("--device=");
    device.push(data);
    command.arg("--extract").arg(device).arg(meta);
    process::logged(&mut command, log)?;
    say("fsck.erofs finds no fault in it, contents included");
    Ok(())
}

fn verify(node: &Node, stack: &[&str], report: &mut Report) -> Result<()> {
    let mut arguments = vec!["verify", "-o", "json"];
    arguments.extend(stack);
    arguments.push(SNAPSHOT);
    let verified = node.json(&arguments)?;
    let verified = verified
        .as_array()
        .context("`layerpack verify` printed no list")?;
    for row in &mut report.layers {
        let layer = verified
            .iter()
            .find(|layer| text(layer, "/reference").is_ok_and(|name| name == row.reference))
            .with_context(|| format!("`layerpack verify` says nothing of {}", row.reference))?;
        row.stored = number(layer, "/stored_bytes")?;
    }
    say("every byte of the four layers in the store was read and is what its digest says");
    Ok(())
}

fn mount(node: &Node, stack: &[&str], target: &Path) -> Result<()> {
    fs_err::create_dir_all(target)?;
    let path = target
        .to_str()
        .context("the work folder's path is not UTF-8")?;
    let mut arguments = vec!["mount"];
    arguments.extend(stack);
    arguments.push(path);
    node.output(&arguments)?;
    Ok(())
}

fn unmount(node: &Node, target: &Path) -> Result<()> {
    let path = target
        .to_str()
        .context("the work folder's path is not UTF-8")?;
    node.output(&["umount", path])?;
    Ok(())
}

/// Reads the node's counters between phases.
struct Meter<'a> {
    node: &'a Node,
    fetched: u64,
    written: u64,
    since: Instant,
}

impl<'a> Meter<'a> {
    fn new(node: &'a Node) -> Self {
        Self {
            node,
            fetched: 0,
            written: 0,
            since: Instant::now(),
        }
    }

    /// Ends a phase: what it fetched, wrote and took.
    fn phase(&mut self, name: &'static str) -> Result<PhaseRow> {
        let took = self.since.elapsed();
        let (fetched, written) = (self.fetched, self.written);
        self.restart()?;
        let row = PhaseRow {
            name,
            fetched: self.fetched.saturating_sub(fetched),
            written: self.written.saturating_sub(written),
            took,
        };
        say(format!(
            "fetched {}, written {}",
            bytes(row.fetched),
            bytes(row.written)
        ));
        Ok(row)
    }

    /// Begins a phase.
    fn restart(&mut self) -> Result<()> {
        let status = self.node.json(&["daemon", "status", "-o", "json"])?;
        let total = |field: &str| number(&status, &format!("/node/totals/{field}"));
        if total("errors")? != 0 {
            bail!("the daemon counts {} failed reads", total("errors")?);
        }
        self.fetched = total("meta_fetched_bytes")? + total("fetched_bytes")?;
        self.written = total("written_bytes")?;
        self.since = Instant::now();
        Ok(())
    }
}
