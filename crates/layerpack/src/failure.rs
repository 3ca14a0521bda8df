//! How a command ends: exit codes, and the one line that says what went wrong.

use std::io;
use std::process::ExitCode;

use layerpack_packer::PackError;
use layerpack_runtime::RuntimeError;
use layerpack_store::StoreError;
use serde::Serialize;

use crate::output::{Format, note, printable};

/// Exit code of a command that failed.
pub(crate) const FAILED: u8 = 1;
/// Exit code of a command line that is not understood: clap's own.
const USAGE: u8 = 2;
/// Exit code of `run` and `exec` when layerpack, not the command, failed.
pub(crate) const LAUNCH_FAILED: u8 = 125;
/// Exit code when the reader of our output went away: 128 + SIGPIPE, as if the signal had acted.
const BROKEN_PIPE: u8 = 141;

/// A command line that cannot be meant, found out after it was parsed.
#[derive(Debug)]
pub(crate) struct Usage(pub(crate) String);

impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// An error about the command line: the command exits with 2.
pub(crate) fn usage(text: impl Into<String>) -> anyhow::Error {
    anyhow::Error::new(Usage(text.into()))
}

/// What the packer names where a file with rules is to blame, or what it does to a tree: no command
/// line.
const RULES: [&str; 4] = ["split file", "split", "strict", "rules"];

/// What the packer says of a command's options.
pub(crate) fn of_options(error: PackError) -> anyhow::Error {
    match &error {
        PackError::InvalidOption { option, .. } if !RULES.contains(&option.as_str()) => {
            usage(error.to_string())
        }
        _ => error.into(),
    }
}

/// What is wrong with a TOML file's text, in one line: its parser's own words are a picture.
pub(crate) fn of_toml(error: &toml::de::Error, text: &str) -> anyhow::Error {
    let said = error.message().replace('\n', " ");
    match error.span().and_then(|span| text.get(..span.start)) {
        Some(before) => {
            let line = before.matches('\n').count() + 1;
            anyhow::anyhow!("line {line}: {said}")
        }
        None => anyhow::anyhow!(said),
    }
}

/// Whether the command line is to blame, by what the libraries say of it.
fn is_usage(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause.is::<Usage>()
            || cause.downcast_ref::<StoreError>().is_some_and(of_names)
            || match cause.downcast_ref::<PackError>() {
                Some(PackError::InvalidSource { .. }) => true,
                // It shows its cause as itself, which so is none in the chain.
                Some(PackError::Store(error)) => of_names(error),
                _ => false,
            }
    })
}

/// Whether what the store says is about a name or an address as it was given.
fn of_names(error: &StoreError) -> bool {
    matches!(
        error,
        StoreError::InvalidReference { .. } | StoreError::InvalidUrl { .. }
    )
}

/// A failed command: what went wrong and the code to exit with.
#[derive(Debug)]
pub(crate) struct Failure {
    code: u8,
    error: anyhow::Error,
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        let error = error.into();
        let code = if is_usage(&error) { USAGE } else { FAILED };
        Self { code, error }
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
        if matches!(self.code, FAILED | USAGE) {
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
        let message = match self.code {
            // What the system says of the command inside a sandbox is the command's own matter.
            126 | 127 => causes(&self.error),
            _ => one_line(&self.error),
        };
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

/// The error and its causes, and what to do about it where they do not say it.
pub(crate) fn one_line(error: &anyhow::Error) -> String {
    let mut line = causes(error);
    if let Some(remedy) = remedy(error, &line) {
        line.push_str("; ");
        line.push_str(remedy);
    }
    line
}

/// The error and its causes, joined by `: `. A cause that the text before it already tells is
/// left out, since some libraries put it into their own message too.
fn causes(error: &anyhow::Error) -> String {
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

/// What to do about a failure of the system whose message only names the file.
fn remedy(error: &anyhow::Error, line: &str) -> Option<&'static str> {
    // Only what files say: a refused mount or process has other reasons.
    let kind = error
        .chain()
        .find_map(|cause| cause.downcast_ref::<io::Error>())?
        .kind();
    let (remedy, told) = match kind {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => (
            "free space there, or choose another place (--root for the node's state)",
            &["free space", "there is room"][..],
        ),
        io::ErrorKind::PermissionDenied => (
            "run as root or fix the permissions",
            &[
                "run as root",
                "root only",
                "with sudo",
                "may be read",
                "may be written",
            ][..],
        ),
        io::ErrorKind::ReadOnlyFilesystem => (
            "make it writable, or choose another place (--store for layers, --root for the node's state)",
            &["may be written", "make it writable"][..],
        ),
        io::ErrorKind::ConnectionRefused
        | io::ErrorKind::ConnectionReset
        | io::ErrorKind::ConnectionAborted
            if line.contains(" in store ") =>
        {
            (
                "check the address, and that its server runs and can be reached from here",
                &["check the address", "check the connection"][..],
            )
        }
        _ => return None,
    };
    (!told.iter().any(|words| line.contains(words))).then_some(remedy)
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
    fn failures_of_the_system_have_a_remedy_once() {
        let line = |errno: i32, context: &'static str| {
            one_line(&anyhow::Error::from(io::Error::from_raw_os_error(errno)).context(context))
        };
        // ENOSPC, EDQUOT
        for errno in [28, 122] {
            let error = line(errno, "cannot write /node/leases/x");
            assert!(
                error.contains("free space") && error.contains("--root"),
                "{error}"
            );
        }
        // EACCES
        let error = line(13, "cannot read refs/base/a/1 in store file:///s");
        assert!(
            error.ends_with("; run as root or fix the permissions"),
            "{error}"
        );
        // EROFS
        let error = line(30, "cannot write refs/base/a/1 in store file:///s");
        assert!(error.contains("--store"), "{error}");
        // ECONNREFUSED: of a store, not of anything else that is connected to.
        let error = line(111, "cannot read layerpack.json in store http://h/x");
        assert!(error.contains("can be reached"), "{error}");
        assert!(!line(111, "cannot connect to daemon.sock").contains("reached"));
        // One that says it itself, and one that there is nothing to say about (EIO).
        let told = "cannot use it (run as root, or choose another --root)";
        assert!(line(13, told).ends_with(")"), "{}", line(13, told));
        assert!(!line(5, "cannot read it").contains(';'));
        // The same through a library that wraps the system's error.
        let wrapped = io::Error::new(io::ErrorKind::StorageFull, "failed to write /node/x");
        assert!(one_line(&wrapped.into()).contains("free space"));
    }

    #[test]
    fn a_bad_address_is_wrong_usage_wherever_it_is_found_out() {
        let bad = || StoreError::InvalidUrl {
            url: "x".to_owned(),
            why: "y".to_owned(),
        };
        assert!(is_usage(&bad().into()));
        assert!(is_usage(&PackError::from(bad()).into()));
        assert!(is_usage(&anyhow::Error::from(bad()).context("building")));
        let gone = StoreError::NoStore {
            wanted: String::new(),
            store: "x".to_owned(),
        };
        assert!(!is_usage(&PackError::from(gone).into()));
    }

    #[test]
    fn an_error_is_one_line() {
        assert_eq!(
            one_line(&anyhow::anyhow!("bad name a\nb")),
            "bad name a\\nb"
        );
    }
}
