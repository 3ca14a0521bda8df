//! A look at contents that are too large for memory, a piece at a time.

use super::rules::Rule;
use super::secrets;

/// Bytes that are looked at together.
const WINDOW: usize = 1 << 20;
/// Bytes of the window before that are looked at again, beside the longest text: patterns are far
/// shorter.
const AGAIN: usize = 4096;
/// What begins in so many of them was seen with more of what stands before it.
const SEEN: usize = 128;

/// See the module's documentation.
pub(crate) struct Search<'r> {
    /// Rules in their order, each with what it found.
    rules: Vec<(&'r Rule, Option<String>)>,
    window: Vec<u8>,
    /// Bytes at its start that were looked at before.
    again: usize,
    /// Bytes to look at again.
    keep: usize,
}

impl<'r> Search<'r> {
    pub(super) fn new(rules: Vec<&'r Rule>) -> Self {
        let texts = rules.iter().flat_map(|rule| &rule.text);
        let longest = texts.map(String::len).max().unwrap_or_default();
        Self {
            rules: rules.into_iter().map(|rule| (rule, None)).collect(),
            window: Vec::new(),
            again: 0,
            keep: AGAIN + longest,
        }
    }

    /// Takes the next bytes.
    pub(crate) fn feed(&mut self, mut bytes: &[u8]) {
        let full = self.keep + WINDOW;
        while !bytes.is_empty() {
            let room = full.saturating_sub(self.window.len()).min(bytes.len());
            let (now, later) = bytes.split_at_checked(room).unwrap_or((bytes, &[]));
            self.window.extend_from_slice(now);
            bytes = later;
            if self.window.len() >= full {
                self.look();
                self.again = self.keep;
                self.window.drain(..self.window.len() - self.keep);
            }
        }
    }

    /// Takes zero bytes. More of them than two looks share tell nothing.
    pub(crate) fn hole(&mut self, len: u64) {
        let most = self.keep + SEEN;
        let len = usize::try_from(len).unwrap_or(most).min(most);
        self.feed(&vec![0; len]);
    }

    fn look(&mut self) {
        let from = self.again.min(SEEN);
        for (rule, found) in &mut self.rules {
            if found.is_none() {
                let hit = secrets::find_from(&self.window, from, &rule.content);
                let text = || {
                    let held = |text: &&String| secrets::holds(&self.window, text.as_bytes());
                    rule.text.iter().find(held).map(|_| "text")
                };
                *found = hit.map(|hit| hit.pattern).or_else(text).map(str::to_owned);
            }
        }
    }

    /// The first rule that found something, and what.
    pub(super) fn found(mut self) -> Option<(&'r Rule, String)> {
        self.look();
        let mut found = self.rules.into_iter();
        found.find_map(|(rule, found)| Some((rule, found?)))
    }
}
