//! A daemon that does not stay up, in words.

use std::path::Path;
use std::time::Duration;

use layerpack_layerfs::holder::{Failing, Question, Reply, ask};

use super::start::last_error;
use crate::api;

/// How long the holder may take to answer: it has little to do.
const ANSWER: Duration = Duration::from_secs(2);
/// Deaths in a row, and milliseconds in which none served, before anybody is told: else it is over in
/// a moment, and waiting for it is right.
const DEATHS: u64 = 3;
const DOWN_MS: u64 = 10_000;

/// Says how it is with the daemon of the node at `root` if its processes end one after another, by
/// what its holder knows. `None` while one serves, and where nobody can be asked.
pub(crate) fn failing(root: &Path) -> Option<String> {
    let Ok(Reply::Standing { failing, .. }) = ask(root, &Question::Status, None, ANSWER) else {
        return None;
    };
    let failing = failing.filter(|f| f.deaths >= DEATHS && f.down_ms >= DOWN_MS)?;
    let log = root.join(api::LOG_NAME);
    Some(words(root, &failing, last_error(&log, 0).as_deref()))
}

fn words(root: &Path, failing: &Failing, said: Option<&str>) -> String {
    let seconds = |ms: u64| match ms {
        0..100 => "a moment".to_owned(),
        100..10_000 => format!("{}.{} s", ms / 1000, ms % 1000 / 100),
        _ => format!("{} s", ms / 1000),
    };
    let reason = said.map_or_else(String::new, |said| format!(" ({said})"));
    let next = failing.next_ms.map_or_else(
        || "another one is starting".to_owned(),
        |ms| format!("the next one starts in {}", seconds(ms)),
    );
    let reads = failing.patience_ms.map_or_else(
        || "reads of what the kernel has not cached wait".to_owned(),
        |ms| {
            format!(
                "reads of what the kernel has not cached wait for {}, then fail ({} so far)",
                seconds(ms),
                failing.given_up
            )
        },
    );
    format!(
        "the daemon for {root} does not stay up: {} processes in a row ended within {}, the last one {}{reason}; {next}, and {reads}; it goes on by itself when the cause is gone: see {}, or end it with `layerpack daemon stop --force`",
        failing.deaths,
        seconds(failing.since_ms),
        failing.last,
        root.join(api::LOG_NAME).display(),
        root = root.display(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn says_what_is_and_what_to_do() {
        let failing = Failing {
            deaths: 7,
            last: "with code 1".to_owned(),
            since_ms: 12_345,
            down_ms: 12_000,
            next_ms: Some(3_260),
            patience_ms: Some(60_000),
            given_up: 2,
        };
        let text = words(Path::new("/node"), &failing, Some("no room"));
        for part in [
            "/node does not stay up: 7 processes in a row ended within 12 s",
            "the last one with code 1 (no room)",
            "the next one starts in 3.2 s",
            "wait for 60 s, then fail (2 so far)",
            "/node/daemon.log",
            "`layerpack daemon stop --force`",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let failing = Failing {
            next_ms: None,
            patience_ms: None,
            ..failing
        };
        let text = words(Path::new("/node"), &failing, None);
        assert!(text.contains("with code 1; another one is starting, and reads"));
        assert!(text.contains("has not cached wait; it goes on"), "{text}");
    }
}
