//! How a command ends: exit codes, and the one line that says what went wrong.

use std::io;
use std::process::ExitCode;

use layerpack_runtime::RuntimeError;
use serde::Serialize;

use crate::output::{Format, note, printable};

/// Exit code of a command that failed.
pub(crate) const FAILED: u8 = 1;
/// Exit code of `run` and `exec` when layerpack, not the command, failed.
pub(crate) const LAUNCH_FAILED: u8 = 125;
/// Exit code when the reader of our output went away: 128 + SIGPIPE, as if the signal had acted.
const BROKEN_PIPE: u8 = 141;

/// A failed command: what went wrong and the code to exit with.
#[derive(Debug)]
pub(crate) struct Failure {
    code: u8,
    error: anyhow::Error,
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self {
            code: FAILED,
            error: error.into(),
        }
    }
}

impl Failure {
    /// A failed launch, with the code that says whether the command or layerpack is to blame.
    pub(crate) fn of_runtime(error: RuntimeError) -> Self {
        Self {
            code: error.exit_code(),
            error: error.into(),
        }
    }

    /// The same failure with another exit code, unless it has one of its own.
    pub(crate) fn or_code(self, code: u8) -> Self {
        if self.code == FAILED {
            Self { code, ..self }
        } else {
            self
        }
    }

    /// Prints the failure and gives the exit code.
    pub(crate) fn report(&self, format: Format) -> ExitCode {
        if is_broken_pipe(&self.error) {
            return ExitCode::from(BROKEN_PIPE);
        }
        let message = one_line(&self.error);
        match format {
            Format::Text => note(&format!("error: {message}")),
            Format::Json => {
                let document = ErrorDocument {
                    error: ErrorText { message: &message },
                };
                note(&serde_json::to_string(&document).unwrap_or(message.clone()));
            }
        }
        ExitCode::from(self.code)
    }
}

#[derive(Serialize)]
struct ErrorDocument<'a> {
    error: ErrorText<'a>,
}

#[derive(Serialize)]
struct ErrorText<'a> {
    message: &'a str,
}

/// The error and its causes, joined by `: `. A cause that the text before it already tells is
/// left out, since some libraries put it into their own message too.
pub(crate) fn one_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        let text = printable(cause.to_string().trim());
        if text.is_empty() || line.contains(&text) {
            continue;
        }
        if !line.is_empty() {
            line.push_str(": ");
        }
        line.push_str(&text);
    }
    line
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<io::Error>()
        .is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_are_joined_once() {
        let cause = anyhow::anyhow!("no such file");
        let error = cause
            .context("cannot open x: no such file")
            .context("building base/a:1");
        assert_eq!(
            one_line(&error),
            "building base/a:1: cannot open x: no such file"
        );
    }

    #[test]
    fn an_error_is_one_line() {
        assert_eq!(
            one_line(&anyhow::anyhow!("bad name a\nb")),
            "bad name a\\nb"
        );
    }
}
