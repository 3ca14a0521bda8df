//! Progress of a build on stderr: one live line on a terminal, a plain line now and then
//! elsewhere, nothing with `--quiet`.

use std::io::IsTerminal as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::context::Context;
use crate::output::{note, printable, printable_bytes, warning};
use crate::units::human_bytes;

/// Between two redraws of the live line.
const REDRAW: Duration = Duration::from_millis(100);
/// Between two plain lines.
const PLAIN: Duration = Duration::from_secs(10);
/// A path is shown with at most this many characters.
const PATH_WIDTH: usize = 60;

/// Shows what the packer reports.
#[derive(Debug)]
pub(crate) struct Reporter {
    /// What is worked on, fit for a terminal.
    title: String,
    sink: Sink,
    /// Whether warnings of failed work are shown.
    warnings: bool,
    entries: AtomicU64,
    bytes: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug)]
enum Sink {
    Live(ProgressBar),
    Plain,
    Silent,
}

#[derive(Debug)]
struct State {
    phase: String,
    path: String,
    shown: Instant,
}

impl Reporter {
    /// A reporter for work on what is called `title`.
    pub(crate) fn new(title: &str, context: &Context) -> Self {
        let sink = if context.quiet {
            Sink::Silent
        } else if std::io::stderr().is_terminal() {
            let bar = ProgressBar::new_spinner();
            if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed} {wide_msg}") {
                bar.set_style(style);
            }
            Sink::Live(bar)
        } else {
            Sink::Plain
        };
        let state = State {
            phase: printable(title),
            path: String::new(),
            shown: Instant::now(),
        };
        Self {
            title: printable(title),
            sink,
            warnings: context.says_warnings(),
            entries: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            state: Mutex::new(state),
        }
    }

    /// Takes the live line away; called once the work is over, well or not.
    pub(crate) fn finish(&self) {
        if let Sink::Live(bar) = &self.sink {
            bar.finish_and_clear();
        }
    }

    fn counts(&self) -> String {
        let entries = self.entries.load(Ordering::Relaxed);
        let bytes = self.bytes.load(Ordering::Relaxed);
        format!("{entries} entries, {}", human_bytes(bytes))
    }

    /// Shows the counts when the last time is long enough ago.
    fn tick(&self, path: Option<&[u8]>) {
        let pause = match self.sink {
            Sink::Live(_) => REDRAW,
            Sink::Plain => PLAIN,
            Sink::Silent => return,
        };
        // Another thread that shows something right now makes this call superfluous.
        let Ok(mut state) = self.state.try_lock() else {
            return;
        };
        if state.shown.elapsed() < pause {
            return;
        }
        state.shown = Instant::now();
        if let Some(path) = path {
            state.path = tail(&printable_bytes(path));
        }
        match &self.sink {
            Sink::Live(bar) => {
                bar.set_message(format!(
                    "{}: {}  {}",
                    state.phase,
                    self.counts(),
                    state.path
                ));
                bar.tick();
            }
            Sink::Plain => note(&format!("{}: {}", state.phase, self.counts())),
            Sink::Silent => {}
        }
    }
}

impl Drop for Reporter {
    fn drop(&mut self) {
        self.finish();
    }
}

impl layerpack_packer::Progress for Reporter {
    fn entry(&self, path: &[u8]) {
        self.entries.fetch_add(1, Ordering::Relaxed);
        self.tick(Some(path));
    }

    fn bytes(&self, n: u64) {
        self.bytes.fetch_add(n, Ordering::Relaxed);
        self.tick(None);
    }

    fn warning(&self, text: &str) {
        if self.warnings {
            self.finish();
            warning(text);
        }
    }

    fn phase(&self, phase: &str) {
        let shown = format!("{}: {}", self.title, printable(phase));
        match &self.sink {
            Sink::Live(bar) => bar.set_message(format!("{shown}: {}", self.counts())),
            Sink::Plain => note(&shown),
            Sink::Silent => {}
        }
        if let Ok(mut state) = self.state.lock() {
            state.phase = shown;
            state.path.clear();
        }
    }
}

/// The end of a path that is too long to show.
fn tail(path: &str) -> String {
    let length = path.chars().count();
    if length <= PATH_WIDTH {
        return path.to_owned();
    }
    let kept: String = path.chars().skip(length - PATH_WIDTH + 1).collect();
    format!("…{kept}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_paths_keep_their_end() {
        assert_eq!(tail("a/b"), "a/b");
        let long = format!("{}/end", "é".repeat(100));
        let shown = tail(&long);
        assert_eq!(shown.chars().count(), PATH_WIDTH);
        assert!(shown.starts_with('…') && shown.ends_with("/end"));
    }
}
