//! Logs: to stderr, for commands only what `-v` asks for, for the daemon from `info` up.

use tracing_subscriber::EnvFilter;

/// Variable that overrides the level, in the syntax of `tracing_subscriber::EnvFilter`.
const VARIABLE: &str = "LAYERPACK_LOG";

/// Variable that has logs written as JSON, an object a line: `json`.
const FORMAT: &str = "LAYERPACK_LOG_FORMAT";

/// Starts logging for a command (`daemon` false) or the daemon.
pub(crate) fn start(verbose: u8, quiet: bool, daemon: bool) {
    let level = match (verbose, daemon) {
        (0, false) if quiet => "error",
        (0, false) => "warn",
        (0, true) => "info",
        (1, false) => "info",
        (1, true) | (2, _) => "debug",
        _ => "trace",
    };
    // Our own crates only: at `trace` the HTTP stack would drown them.
    // What the store warns of comes with its results too, and commands print it from there.
    let store = match (verbose, daemon) {
        (0, false) => "error",
        _ => level,
    };
    let others = if quiet { "error" } else { "warn" };
    // Of credentials that it does not find it warns at length; the error that follows says it too.
    let aws = if verbose == 0 { "error" } else { others };
    let default = format!(
        "{others},aws_config={aws},layerpack={level},layerpack_store={store},layerpack_packer={level},layerpack_layerfs={level},layerpack_runtime={level},layerpack_sys={level}"
    );
    let filter = EnvFilter::try_from_env(VARIABLE).unwrap_or_else(|_| EnvFilter::new(default));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        // A log that cannot be written (its disk is full, say) is no reason to fail: telling of it on
        // stderr, where it goes, would be a panic.
        .log_internal_errors(false)
        .with_writer(std::io::stderr);
    let json = std::env::var(FORMAT).is_ok_and(|format| format == "json");
    let started = if json {
        builder.json().try_init()
    } else if daemon {
        builder.with_ansi(false).try_init()
    } else {
        builder.without_time().with_ansi(false).try_init()
    };
    if started.is_err() {
        tracing::debug!("logging was already started");
    }
}
