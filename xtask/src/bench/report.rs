//! What a scenario found: a table, verdicts, a chart; on the terminal, as Markdown, as SVG.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use anyhow::Result;

use super::measure::float;
use crate::process;

/// Height of a chart's bar with its gap, in pixels.
const BAR: usize = 26;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Report {
    /// What was run on what, one line each.
    pub(crate) conditions: Vec<String>,
    /// Headings of the table.
    pub(crate) columns: Vec<&'static str>,
    /// Its rows, as long as the headings.
    pub(crate) rows: Vec<Vec<String>>,
    /// What became of claims.
    pub(crate) verdicts: Vec<Verdict>,
    /// What the chart shows, with its unit.
    pub(crate) chart: &'static str,
    /// Its bars.
    pub(crate) bars: Vec<(String, f64)>,
}

/// A claim of `bench/SPEC.md`, and what this run says of it.
#[derive(Debug)]
pub(crate) struct Verdict {
    /// The claim's number there.
    pub(crate) claim: &'static str,
    /// What was found, beside what is asked for.
    pub(crate) found: String,
    /// Whether that is enough.
    pub(crate) met: bool,
}

impl Report {
    /// Adds a verdict: `found` must be at most `limit`.
    pub(crate) fn at_most(
        &mut self,
        claim: &'static str,
        what: &str,
        found: f64,
        limit: f64,
        unit: &str,
    ) {
        self.verdicts.push(Verdict {
            claim,
            found: format!("{what}: {found:.3}{unit}, at most {limit:.3}{unit} is asked for"),
            met: found <= limit,
        });
    }

    fn table(&self) -> String {
        let mut text = String::new();
        let line = |cells: &mut dyn Iterator<Item = &str>| {
            let cells: Vec<&str> = cells.collect();
            format!("| {} |\n", cells.join(" | "))
        };
        text.push_str(&line(&mut self.columns.iter().copied()));
        text.push_str(&line(&mut self.columns.iter().map(|_| "---")));
        for row in &self.rows {
            text.push_str(&line(&mut row.iter().map(String::as_str)));
        }
        text
    }

    fn verdict_lines(&self) -> impl Iterator<Item = String> {
        self.verdicts.iter().map(|verdict| {
            let word = if verdict.met { "met" } else { "missed" };
            format!("{} **{word}**: {}", verdict.claim, verdict.found)
        })
    }

    /// On the terminal.
    pub(crate) fn show(&self) {
        for line in &self.conditions {
            println!("     {line}");
        }
        println!();
        for line in self.table().lines() {
            println!("     {line}");
        }
        println!();
        for line in self.verdict_lines() {
            println!("     {line}");
        }
    }

    /// As files in `directory`.
    pub(crate) fn write(
        &self,
        directory: &Path,
        name: &str,
        about: &str,
        host: &str,
    ) -> Result<()> {
        let mut text = format!("# {name}: {about}\n\n{host}\n\n");
        for line in &self.conditions {
            let _ = writeln!(text, "- {line}"); // to a String: cannot fail
        }
        text.push('\n');
        text.push_str(&self.table());
        text.push('\n');
        for line in self.verdict_lines() {
            let _ = writeln!(text, "- {line}");
        }
        if !self.bars.is_empty() {
            let _ = write!(text, "\n![{}]({name}.svg)\n", self.chart);
            fs_err::write(directory.join(format!("{name}.svg")), self.svg())?;
        }
        fs_err::write(directory.join(format!("{name}.md")), text)?;
        Ok(())
    }

    /// Horizontal bars, as wide as their values.
    fn svg(&self) -> String {
        let most = self.bars.iter().map(|bar| bar.1).fold(0.0, f64::max);
        let height = 40 + BAR * self.bars.len();
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"760\" height=\"{height}\" \
             font-family=\"sans-serif\" font-size=\"13\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
             <text x=\"8\" y=\"20\" font-weight=\"bold\">{}</text>\n",
            escape(self.chart)
        );
        for (index, (label, value)) in self.bars.iter().enumerate() {
            let y = 34 + BAR * index;
            let width = if most > 0.0 {
                value / most * 420.0
            } else {
                0.0
            };
            let ours = label.starts_with("layerpack");
            let colour = if ours { "#2f6f4f" } else { "#9aa5b1" };
            let text = y + 14;
            let _ = writeln!(
                svg,
                "<text x=\"238\" y=\"{text}\" text-anchor=\"end\">{}</text>\
                 <rect x=\"246\" y=\"{y}\" width=\"{width:.1}\" height=\"18\" fill=\"{colour}\"/>\
                 <text x=\"{:.1}\" y=\"{text}\">{value:.2}</text>",
                escape(label),
                252.0 + width
            );
        }
        svg.push_str("</svg>\n");
        svg
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

/// Processor, kernel, memory and file system, in one line.
///
/// # Errors
/// When the kernel does not say.
pub(crate) fn host(work: &Path) -> Result<String> {
    let cpus = fs_err::read_to_string("/proc/cpuinfo")?;
    let model = cpus
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
        .map_or("unknown processor", |(_, model)| model);
    let cores = std::thread::available_parallelism()?;
    let kernel = fs_err::read_to_string("/proc/sys/kernel/osrelease")?;
    let memory = fs_err::read_to_string("/proc/meminfo")?;
    let kib: u64 = memory
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:")?.trim().split(' ').next())
        .and_then(|number| number.parse().ok())
        .unwrap_or_default();
    let load = fs_err::read_to_string("/proc/loadavg")?;
    let load = load.split(' ').next().unwrap_or_default();
    let mut command = Command::new("findmnt");
    command.args(["--noheadings", "--output", "FSTYPE", "--target"]);
    let disk = process::output(command.arg(work))?;
    Ok(format!(
        "Host: {model}, {cores} threads, {:.0} GiB of memory; Linux {}; {}; load before: {load}.",
        float(kib) / 1048576.0,
        kernel.trim(),
        disk.trim()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_has_its_rows_bars_and_verdicts() {
        let mut report = Report {
            columns: vec!["a", "b"],
            rows: vec![vec!["1".to_owned(), "2".to_owned()]],
            chart: "seconds <wall>",
            bars: vec![("layerpack".to_owned(), 1.0), ("tar".to_owned(), 2.0)],
            ..Report::default()
        };
        report.at_most("B0", "ratio", 0.5, 0.4, "");
        assert_eq!(report.table(), "| a | b |\n| --- | --- |\n| 1 | 2 |\n");
        let lines: Vec<String> = report.verdict_lines().collect();
        assert_eq!(
            lines,
            ["B0 **missed**: ratio: 0.500, at most 0.400 is asked for"]
        );
        let svg = report.svg();
        assert!(svg.contains("seconds &lt;wall>"));
        assert!(svg.contains("width=\"210.0\"") && svg.contains("width=\"420.0\""));
    }
}
