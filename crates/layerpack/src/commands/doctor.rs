//! `layerpack doctor`: what this node can do, tried rather than guessed, and what to change.

mod features;
mod trial;

use std::process::ExitCode;

use anyhow::anyhow;
use serde::Serialize;

use super::Outcome;
use crate::api;
use crate::client::{Client, ClientError};
use crate::context::{Context, prepare_root};
use crate::failure::one_line;
use crate::launch::sandboxes;
use crate::output::{print, printable};

/// The whole report in `-o json`.
#[derive(Debug, Serialize)]
struct Report {
    /// Nothing that layerpack needs is missing.
    ok: bool,
    findings: Vec<Finding>,
}

/// One thing that was tried.
#[derive(Debug, Serialize)]
struct Finding {
    name: String,
    ok: bool,
    /// What was seen.
    detail: String,
    /// What to do; empty when it is fine.
    remedy: String,
    /// What is used in place of a feature that is not there; empty when it is there or needed.
    #[serde(skip_serializing_if = "String::is_empty")]
    fallback: String,
}

impl Finding {
    fn new(name: &str, tried: anyhow::Result<String>, remedy: &str) -> Self {
        match tried {
            Ok(detail) => Self {
                name: name.to_owned(),
                ok: true,
                detail,
                remedy: String::new(),
                fallback: String::new(),
            },
            Err(error) => Self {
                name: name.to_owned(),
                ok: false,
                detail: one_line(&error),
                remedy: remedy.to_owned(),
                fallback: String::new(),
            },
        }
    }

    /// Something that is made use of where it is there, and done without where it is not.
    fn optional(name: &str, tried: anyhow::Result<String>, fallback: &str, remedy: &str) -> Self {
        let mut finding = Self::new(name, tried, remedy);
        if !finding.ok {
            finding.ok = true;
            finding.fallback = fallback.to_owned();
        }
        finding
    }
}

pub(super) fn run(context: &Context) -> Outcome {
    if !rustix::process::geteuid().is_root() {
        return report(context, features::of_user(context));
    }
    let mut findings = vec![
        Finding::new(
            "node root",
            node_root(context),
            "choose a directory on a local disk with --root or LAYERPACK_ROOT",
        ),
        Finding::new(
            "store",
            store(context),
            "choose another store with --store or LAYERPACK_STORE",
        ),
        Finding::new(
            "daemon",
            daemon(context),
            "look into daemon.log in the node root, then `layerpack daemon stop --force`",
        ),
        Finding::new(
            "control groups",
            control_groups(context),
            "mount cgroup2 on /sys/fs/cgroup",
        ),
    ];
    findings.extend(trial::run(context.root()));
    findings.extend(features::of_node());
    report(context, findings)
}

fn report(context: &Context, findings: Vec<Finding>) -> Outcome {
    let missing: Vec<String> = findings
        .iter()
        .filter(|f| !f.ok)
        .map(|f| f.name.clone())
        .collect();
    let report = Report {
        ok: missing.is_empty(),
        findings,
    };
    print(context.format, &report, |out| {
        for finding in &report.findings {
            let mark = match (finding.ok, finding.fallback.is_empty()) {
                (true, true) => "ok     ",
                (true, false) => "without",
                (false, _) => "MISSING",
            };
            writeln!(
                out,
                "{mark} {}: {}",
                printable(&finding.name),
                printable(&finding.detail)
            )?;
            if !finding.fallback.is_empty() {
                writeln!(out, "        instead: {}", printable(&finding.fallback))?;
            }
            if !finding.remedy.is_empty() {
                writeln!(out, "        to do: {}", printable(&finding.remedy))?;
            }
        }
        Ok(())
    })?;
    if report.ok {
        return Ok(ExitCode::SUCCESS);
    }
    Err(anyhow!(
        "this node lacks {}: do what the report above says",
        missing.join(", ")
    )
    .into())
}

fn node_root(context: &Context) -> anyhow::Result<String> {
    prepare_root(context.root())?;
    let statistics = rustix::fs::statvfs(context.root()).map_err(|e| {
        anyhow!(
            "cannot ask for the free space of {}: {e}",
            context.root().display()
        )
    })?;
    let free = statistics.f_bavail.saturating_mul(statistics.f_frsize);
    Ok(format!(
        "{}, {} free",
        context.root().display(),
        crate::units::human_bytes(free)
    ))
}

fn store(context: &Context) -> anyhow::Result<String> {
    let store = context.store_that_is()?;
    if !store.exists()? {
        return Ok(format!(
            "none at {} yet: the first `layerpack build` or `pull` makes it",
            context.store_url()
        ));
    }
    let layers = store.entries()?.len();
    Ok(format!("{} with {layers} layers", context.store_url()))
}

fn daemon(context: &Context) -> anyhow::Result<String> {
    match Client::new(context.root())?.status() {
        Ok(status) => Ok(describe(&status)),
        Err(ClientError::NotRunning { .. }) => {
            Ok("not running; commands start it when they need it".to_owned())
        }
        Err(error) => Err(error.into()),
    }
}

/// Who runs, and what of its start and since then deserves a look.
fn describe(status: &api::Status) -> String {
    let (daemon, node) = (&status.daemon, &status.node);
    let mut text = format!("version {} runs as process {}", daemon.version, daemon.pid);
    let restarts = daemon.holder.as_ref().map_or(0, |holder| holder.restarts);
    if restarts > 0 {
        text.push_str(&format!(", {restarts} times started again after its death"));
    }
    for (count, what) in [
        (node.swept.len(), "left-overs of former lives dealt with"),
        (node.problems.len(), "problems"),
    ] {
        if count > 0 {
            text.push_str(&format!(", {count} {what}"));
        }
    }
    if !node.swept.is_empty() || !node.problems.is_empty() {
        text.push_str(" (listed by `layerpack daemon status`)");
    }
    text
}

fn control_groups(context: &Context) -> anyhow::Result<String> {
    sandboxes(context.root())?;
    Ok("found".to_owned())
}
