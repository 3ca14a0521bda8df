//! Snapshots that others ask the daemon for: by the API, and from inside a sandbox.
//!
//! They are made by a process of their own, `layerpack pack-diff`, as everybody's are: it outlives a
//! caller that hangs up, and the daemon lets the sandbox go on if it dies.

use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::extract::rejection::JsonRejection;
use axum::http::StatusCode;
use layerpack_runtime::Sandbox;
use tokio::sync::OwnedSemaphorePermit;

use super::handlers::{Refusal, Reply, Server, parsed};
use crate::api;
use crate::launch::{STORE_LABEL, sandboxes};

/// Most labels, and most patterns, of one request.
const MOST_ITEMS: usize = 100;

/// The sandbox of that id or name.
pub(super) async fn find(root: &Path, sandbox: String) -> Result<Sandbox, Refusal> {
    let root = root.to_owned();
    tokio::task::spawn_blocking(move || sandboxes(&root).and_then(|all| Ok(all.get(&sandbox)?)))
        .await
        .map_err(|error| Refusal::with(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))?
        .map_err(|error| Refusal::with(StatusCode::NOT_FOUND, format!("{error:#}")))
}

pub(super) async fn pack_diff(
    State(server): State<Arc<Server>>,
    body: Result<Json<api::PackRequest>, JsonRejection>,
) -> Reply<serde_json::Value> {
    let request = parsed(body)?;
    let root = server.root();
    let sandbox = find(root, request.sandbox.clone()).await?;
    pack(root, &sandbox, &request, None).await.map(Json)
}

/// Makes the snapshot; gives its report. `turn` is held until it has ended, also if the caller hangs up.
pub(super) async fn pack(
    root: &Path,
    sandbox: &Sandbox,
    request: &api::PackRequest,
    turn: Option<OwnedSemaphorePermit>,
) -> Result<serde_json::Value, Refusal> {
    if request.labels.len() > MOST_ITEMS || request.excludes.len() > MOST_ITEMS {
        let why = format!("more than {MOST_ITEMS} labels or patterns");
        return Err(Refusal::with(StatusCode::BAD_REQUEST, why));
    }
    let texts = [&request.name, &request.version];
    let texts = texts
        .into_iter()
        .chain(&request.labels)
        .chain(&request.excludes)
        .chain(&request.store);
    if texts.into_iter().any(|text| text.contains('\0')) {
        let why = "a value holds a zero byte".to_owned();
        return Err(Refusal::with(StatusCode::BAD_REQUEST, why));
    }
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0("layerpack")
        .arg("--root")
        .arg(root)
        .args(["-o", "json", "pack-diff", sandbox.spec.id.as_str()])
        // Joined, so that no value can be taken for an option.
        .arg(format!("--name={}", request.name))
        .arg(format!("--version={}", request.version))
        .args(request.labels.iter().map(|l| format!("--label={l}")))
        .args(request.excludes.iter().map(|g| format!("--exclude={g}")))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let own = sandbox.spec.labels.get(STORE_LABEL);
    if let Some(store) = request.store.as_ref().or(own) {
        command.arg("--store").arg(store);
    }
    for (flag, path) in [("--rules", &request.rules), ("--sign", &request.sign)] {
        if let Some(path) = path {
            command.arg(flag).arg(path);
        }
    }
    for (wanted, flag) in [
        (request.dry_run, "--dry-run"),
        (request.squash, "--squash"),
        (request.no_git_index, "--no-git-index"),
        (request.no_rules, "--no-rules"),
    ] {
        if wanted {
            command.arg(flag);
        }
    }
    // It outlives a caller that hangs up: what it began is finished or undone by itself.
    let output = tokio::task::spawn_blocking(move || {
        let output = command.output();
        drop(turn);
        output
    })
    .await
    .map_err(|error| Refusal::with(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))?
    .map_err(|error| {
        let why = format!("cannot start packing: {error}");
        Refusal::with(StatusCode::INTERNAL_SERVER_ERROR, why)
    })?;
    let said = String::from_utf8_lossy(&output.stderr);
    let report = serde_json::from_slice(&output.stdout);
    match report {
        Ok(report) if output.status.success() => Ok(report),
        _ => Err(Refusal::with(StatusCode::CONFLICT, last_error(&said))),
    }
}

/// The message of the error document that a command ends with.
fn last_error(said: &str) -> String {
    said.lines()
        .rev()
        .find_map(|line| serde_json::from_str::<api::ErrorReply>(line).ok())
        .map_or_else(
            || "packing failed without a word; see the daemon's log".to_owned(),
            |reply| reply.error.message,
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_is_the_last_document() {
        let said = "note\n{\"error\":{\"message\":\"one\"}}\n{\"error\":{\"message\":\"two\"}}\n";
        assert_eq!(last_error(said), "two");
        assert!(last_error("killed").contains("without a word"));
    }
}
