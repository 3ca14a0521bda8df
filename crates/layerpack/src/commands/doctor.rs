//! `layerpack doctor`: what this node can do, tried rather than guessed, and what to change.

use std::process::ExitCode;

use anyhow::anyhow;
use serde::Serialize;

use super::Outcome;
use crate::client::{Client, ClientError};
use crate::context::{Context, prepare_root, require_root};
use crate::output::{note, print, printable};

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
    /// Layerpack does not work without it.
    required: bool,
    detail: String,
    /// What to do; empty when it is fine.
    remedy: String,
}

pub(super) fn run(_context: &Context) -> Outcome {
    todo!()
}
