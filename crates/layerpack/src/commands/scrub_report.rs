//! What rules did, for people.

use std::collections::BTreeMap;

use layerpack_packer::{Findings, ScrubReport, Tally};

use crate::output::{note, warning};
use crate::units::human_bytes;

/// Findings that are named.
const SHOWN: usize = 20;
/// Files of one layer that are named.
const FEW: usize = 5;

/// The report on stderr; nothing without rules.
pub(crate) fn note_all(report: &ScrubReport) {
    if report.rules.is_none() {
        return;
    }
    let figures =
        |tally: &Tally| format!("{} entries, {}", tally.entries, human_bytes(tally.bytes));
    note(&format!("kept {}", figures(&report.kept)));
    for (word, findings) in [
        ("kept by rule", &report.kept_by_rule),
        ("scrubbed", &report.scrubbed),
        ("shortened", &report.shortened),
        ("suspicious", &report.suspicious),
        ("forbidden", &report.forbidden),
    ] {
        list(word, findings);
    }
    for below in report.still_below.iter().take(SHOWN) {
        // What was left out takes nothing away; what was removed is hidden by the snapshot.
        let remedy = if below.visible {
            "shows in what is made of the snapshot; to hide it, remove it in the sandbox first"
        } else if !below.links.is_empty() {
            "hidden, but there; remove its other names in the sandbox too"
        } else {
            "hidden, but there; `layerpack snapshot squash --all` makes one layer without it to push"
        };
        let links = match below.links.is_empty() {
            true => String::new(),
            false => format!("; the same file shows as {}", below.links.join(", ")),
        };
        warning(&format!(
            "{} ({}) is still in {}: {remedy}{links}",
            below.path,
            below.rule,
            below.layers.join(", "),
        ));
    }
    for rule in &report.idle_git {
        warning(&format!(
            "{rule} did nothing: no repository that was changed has its commit"
        ));
    }
    let mut shown: BTreeMap<(&str, String), Vec<&str>> = BTreeMap::new();
    for below in &report.git_below {
        let place = (below.rule.as_str(), below.layers.join(", "));
        shown.entry(place).or_default().push(&below.path);
    }
    for ((rule, layers), paths) in shown {
        let more = match paths.len().saturating_sub(FEW) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let first: Vec<&str> = paths.into_iter().take(FEW).collect();
        warning(&format!(
            "{layers} shows commits that {rule} is to leave out, by {}{more}; `--squash` takes that layer in, and the rule holds for it",
            first.join(", ")
        ));
    }
    for layer in &report.git_unseen {
        warning(&format!(
            "{layer} has too many entries to be looked through for newer commits: use `--squash`, which applies the rules to all of it"
        ));
    }
    list("not looked into for their size", &report.too_large);
}

fn list(word: &str, findings: &Findings) {
    if findings.is_empty() {
        return;
    }
    let total = &findings.total;
    note(&format!(
        "{word}: {} entries, {}",
        total.entries,
        human_bytes(total.bytes)
    ));
    for found in findings.named.iter().take(SHOWN) {
        let pattern = found
            .pattern
            .as_ref()
            .map_or_else(String::new, |pattern| format!(": {pattern}"));
        note(&format!(
            "  {} ({}{pattern}) {}",
            found.path,
            found.rule,
            human_bytes(found.bytes)
        ));
    }
    if findings.named.len() > SHOWN {
        note(&format!("  and {} more", findings.named.len() - SHOWN));
    }
}
