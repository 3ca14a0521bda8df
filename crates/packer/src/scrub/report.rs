//! What was packed, what was not, and why.

use serde::{Deserialize, Serialize};

/// Most findings of one kind that a report names; the totals count all.
const MOST: usize = 1000;

/// So many entries, with so many bytes of file contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Tally {
    /// Entries that are no directories.
    pub entries: u64,
    /// Apparent bytes of files.
    pub bytes: u64,
}

impl Tally {
    pub(super) fn add(&mut self, bytes: u64) {
        self.entries += 1;
        self.bytes = self.bytes.saturating_add(bytes);
    }

    pub(super) fn take(&mut self, bytes: u64) {
        self.entries = self.entries.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(bytes);
    }
}

/// Something that a rule matched.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// Path in the layer with a leading `/`, escaped for people; a directory ends with `/`.
    pub path: String,
    /// The rule or built-in set.
    pub rule: String,
    /// What its contents looked like, if that was the reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pattern: Option<String>,
    /// Entries that are no directories: more than one below a directory.
    pub entries: u64,
    /// Apparent bytes of files.
    pub bytes: u64,
}

/// A path that rules speak of and that a layer below holds: whoever has the layers has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StillBelow {
    /// Path in the layer with a leading `/`, escaped for people.
    pub path: String,
    /// The rule or built-in set.
    pub rule: String,
    /// The layers that hold it, topmost first.
    pub layers: Vec<String>,
    /// Whether the restored sandbox shows it: not if the snapshot removes it.
    pub visible: bool,
    /// Other names of the same file in the topmost of these layers that the restored sandbox shows: the
    /// first of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<String>,
}

/// Findings, of which the first are named.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Findings {
    /// All of them.
    pub total: Tally,
    /// The first, in the order of the scan.
    pub named: Vec<Finding>,
}

impl Findings {
    /// Adds one; its place among those that are named.
    pub(super) fn push(&mut self, finding: Finding) -> Option<usize> {
        self.total.entries += finding.entries;
        self.total.bytes = self.total.bytes.saturating_add(finding.bytes);
        if self.named.len() >= MOST {
            return None;
        }
        self.named.push(finding);
        Some(self.named.len() - 1)
    }

    /// Counts one more entry below the directory that was named at `place`.
    pub(super) fn below(&mut self, place: Option<usize>, bytes: u64) {
        self.total.add(bytes);
        if let Some(finding) = place.and_then(|place| self.named.get_mut(place)) {
            finding.entries += 1;
            finding.bytes = finding.bytes.saturating_add(bytes);
        }
    }

    /// True if there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.named.is_empty()
    }
}

/// What the rules did.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ScrubReport {
    /// Digest of the rules' text; none were given if it is absent.
    pub rules: Option<String>,
    /// What was packed.
    pub kept: Tally,
    /// What a rule kept that others would have scrubbed, or not.
    pub kept_by_rule: Findings,
    /// What was left out.
    pub scrubbed: Findings,
    /// What was packed without some of its lines; the bytes are those that went.
    pub shortened: Findings,
    /// What was packed and looks as if it should not have been.
    pub suspicious: Findings,
    /// What made the pack fail.
    pub forbidden: Findings,
    /// What is in layers below, whatever this one says.
    pub still_below: Vec<StillBelow>,
    /// Files that were too large for a rule that suspects to look at their contents, with the first
    /// such rule.
    pub too_large: Findings,
    /// Rules about git's history whose commit no repository has that the sandbox, or a diff below it,
    /// wrote to: they did nothing.
    pub idle_git: Vec<String>,
    /// Files of git in diffs below that name newer commits and that the restored sandbox shows: rules
    /// hold for what diffs have only where the snapshot takes them in.
    pub git_below: Vec<StillBelow>,
    /// Diffs below that were not looked through for such files to the end.
    pub git_unseen: Vec<String>,
}
