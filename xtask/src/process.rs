//! Running other programs: every failure names the command and how it ended.

use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Mutex;

use anyhow::{Context as _, Result, bail};

/// The command line, for messages.
pub(crate) fn line(command: &Command) -> String {
    let mut text = command.get_program().to_string_lossy().into_owned();
    for argument in command.get_args() {
        text.push(' ');
        text.push_str(&argument.to_string_lossy());
    }
    text
}

/// Runs with this process's own output, and waits.
///
/// # Errors
/// When it cannot be started.
pub(crate) fn status(command: &mut Command) -> Result<ExitStatus> {
    command
        .status()
        .with_context(|| format!("cannot start `{}`", line(command)))
}

/// Runs with this process's own output; success is asked for.
///
/// # Errors
/// When it cannot be started or fails.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = status(command)?;
    if !status.success() {
        bail!("`{}` failed: {status}", line(command));
    }
    Ok(())
}

/// Runs without showing what it prints, unless it fails.
///
/// # Errors
/// When it cannot be started or fails.
pub(crate) fn quietly(command: &mut Command) -> Result<()> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot start `{}`", line(command)))?;
    if !output.status.success() {
        print!("{}", String::from_utf8_lossy(&output.stdout));
        eprint!("{}", String::from_utf8_lossy(&output.stderr));
        bail!("`{}` failed: {}", line(command), output.status);
    }
    Ok(())
}

/// Runs and hands out what it prints on stdout; stderr is shown.
///
/// # Errors
/// When it cannot be started, fails or prints something that is not UTF-8.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot start `{}`", line(command)))?;
    if !output.status.success() {
        bail!("`{}` failed: {}", line(command), output.status);
    }
    String::from_utf8(output.stdout)
        .with_context(|| format!("`{}` printed something that is not UTF-8", line(command)))
}

/// Whether it can be started and succeeds; prints nothing.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// Runs with all its output kept in the file `log` and, line by line and indented, shown.
///
/// # Errors
/// When it cannot be started or fails, or the log cannot be written.
pub(crate) fn logged(command: &mut Command, log: &Path) -> Result<()> {
    let file = Mutex::new(fs_err::File::create(log)?);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start `{}`", line(command)))?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    std::thread::scope(|scope| {
        scope.spawn(|| pump(stdout, &file));
        scope.spawn(|| pump(stderr, &file));
    });
    let status = child.wait()?;
    if !status.success() {
        bail!(
            "`{}` failed: {status}; its output is in {}",
            line(command),
            log.display()
        );
    }
    Ok(())
}

fn pump(stream: Option<impl Read>, log: &Mutex<fs_err::File>) {
    let Some(stream) = stream else { return };
    for text in BufReader::new(stream).split(b'\n').map_while(Result::ok) {
        let text = String::from_utf8_lossy(&text);
        // Progress bars redraw one line; the last state is enough.
        let shown = text
            .rsplit('\r')
            .find(|part| !part.trim().is_empty())
            .unwrap_or_default();
        if shown.is_empty() {
            continue;
        }
        println!("     | {shown}");
        if let Ok(mut log) = log.lock() {
            // The log is a convenience: a full disk shows in what the command itself does.
            let _ = writeln!(log, "{text}");
        }
    }
}
