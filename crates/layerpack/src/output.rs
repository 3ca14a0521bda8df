//! What goes to stdout: text for people, JSON for programs.

use std::io::{self, Write};

use serde::Serialize;

/// How results are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    /// Lines and tables for people.
    Text,
    /// One JSON document.
    Json,
}

/// Prints a result: `value` as JSON, or what `text` writes.
///
/// # Errors
/// Whatever stdout says; a closed pipe is told apart in `failure`.
pub(crate) fn print<T: Serialize>(
    format: Format,
    value: &T,
    text: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match format {
        Format::Text => text(&mut out)?,
        Format::Json => {
            serde_json::to_writer_pretty(&mut out, value)?;
            writeln!(out)?;
        }
    }
    out.flush()
}

/// Writes one line to stderr; a stderr that is gone is no reason to fail.
pub(crate) fn note(line: &str) {
    let _ = writeln!(io::stderr().lock(), "{line}");
}

/// Writes a warning to stderr, made safe for a terminal.
pub(crate) fn warning(text: &str) {
    note(&format!("warning: {}", printable(text)));
}

/// Left-aligned columns, two spaces apart.
#[derive(Debug)]
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these column titles.
    pub(crate) fn new(titles: &[&str]) -> Self {
        Self {
            rows: vec![titles.iter().map(|t| (*t).to_owned()).collect()],
        }
    }

    /// Adds a row; its cells are made safe for a terminal.
    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows
            .push(cells.into_iter().map(|c| printable(&c)).collect());
    }

    /// Writes title and rows.
    pub(crate) fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns)
            .map(|c| {
                self.rows
                    .iter()
                    .filter_map(|r| r.get(c))
                    .map(|s| s.chars().count())
                    .max()
                    .unwrap_or(0)
            })
            .collect();
        for row in &self.rows {
            let mut line = String::new();
            for (cell, width) in row.iter().zip(&widths) {
                line.push_str(&format!("{cell:<width$}  "));
            }
            writeln!(out, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// Replaces control characters by escapes: names come from images and must not drive the
/// reader's terminal, nor break the one line that an error is.
pub(crate) fn printable(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() {
            safe.extend(c.escape_default())
        } else {
            safe.push(c)
        }
    }
    safe
}

/// The same for a path's bytes; what is not UTF-8 shows as `\xNN`.
pub(crate) fn printable_bytes(bytes: &[u8]) -> String {
    let mut safe = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        safe.push_str(&printable(chunk.valid()));
        for byte in chunk.invalid() {
            safe.push_str(&format!("\\x{byte:02x}"));
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(&["A", "LONGER"]);
        table.row(["wide cell".to_owned(), "x".to_owned()]);
        let mut out = Vec::new();
        table.write(&mut out).unwrap();
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "A          LONGER\nwide cell  x\n"
        );
    }

    #[test]
    fn names_cannot_drive_the_terminal() {
        assert_eq!(printable("a\u{1b}[2Jb\n"), "a\\u{1b}[2Jb\\n");
        assert_eq!(printable_bytes(b"ok/\xff\n"), "ok/\\xff\\n");
    }
}
