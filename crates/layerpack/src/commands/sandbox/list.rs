//! `layerpack sandbox ls`.

use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use layerpack_layerfs::is_lost;
use layerpack_runtime::{Sandbox, SandboxState};
use serde::Serialize;

use super::super::Outcome;
use crate::context::{Context, require_root};
use crate::launch::sandboxes;
use crate::output::{Table, print};
use crate::units::human_age;

/// A sandbox in `-o json`.
#[derive(Debug, Serialize)]
struct Row {
    id: String,
    name: Option<String>,
    /// `running`, `frozen` or `dead`.
    state: &'static str,
    /// Process id of its first process on the node.
    pid: Option<i32>,
    /// Names of its layers, bottom first.
    stack: Vec<String>,
    /// Seconds since 1970.
    created: u64,
    /// Directory that takes its writes.
    upper: String,
    /// It belongs to a `layerpack run` that is under way.
    one_shot: bool,
    /// Its layers were served by a daemon that died with its holder: what is not cached of them
    /// cannot be read.
    lost: bool,
}

pub(super) fn run(context: &Context) -> Outcome {
    require_root("listing sandboxes")?;
    let rows: Vec<Row> = if context.root().join("sandboxes").exists() {
        sandboxes(context.root())?
            .list()?
            .into_iter()
            .map(|sandbox| {
                let mut row = Row::from(sandbox);
                row.lost = row.state != "dead" && is_lost(context.root(), &row.id);
                row
            })
            .collect()
    } else {
        Vec::new()
    };
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_secs());
    print(context.format, &rows, |out| {
        let mut table = Table::new(&["ID", "NAME", "STATE", "PID", "AGE", "STACK"]);
        for row in &rows {
            table.row([
                row.id.clone(),
                row.name.clone().unwrap_or_default(),
                match row.lost {
                    true => format!("{}, lost", row.state),
                    false => row.state.to_owned(),
                },
                row.pid.map(|pid| pid.to_string()).unwrap_or_default(),
                human_age(now.saturating_sub(row.created)),
                row.stack.join(" "),
            ]);
        }
        table.write(out)?;
        if rows.iter().any(|row| row.lost) {
            writeln!(
                out,
                "lost: on layers of a daemon that died with its holder (`layerpack daemon status` says what to do)"
            )?;
        }
        Ok(())
    })?;
    Ok(ExitCode::SUCCESS)
}

impl From<Sandbox> for Row {
    fn from(sandbox: Sandbox) -> Self {
        Self {
            id: sandbox.spec.id.to_string(),
            name: sandbox.spec.name.map(|name| name.to_string()),
            state: match sandbox.state {
                SandboxState::Running => "running",
                SandboxState::Frozen => "frozen",
                SandboxState::Dead => "dead",
            },
            pid: sandbox.pid.map(|pid| pid.as_raw_nonzero().get()),
            stack: sandbox
                .spec
                .stack
                .into_iter()
                .map(|layer| layer.reference)
                .collect(),
            created: sandbox
                .created
                .duration_since(UNIX_EPOCH)
                .map_or(0, |d| d.as_secs()),
            upper: sandbox.upper.display().to_string(),
            one_shot: sandbox.one_shot,
            lost: false,
        }
    }
}
