//! What a caller should be told without the work being stopped, in bounded number.

/// Warnings kept in full.
const KEPT: usize = 100;

/// A list that stops growing.
#[derive(Debug, Default)]
pub(crate) struct Warnings {
    kept: Vec<String>,
    more: u64,
}

impl Warnings {
    /// Adds one.
    pub(crate) fn add(&mut self, text: String) {
        if self.kept.len() < KEPT {
            tracing::warn!("{text}");
            self.kept.push(text);
        } else {
            self.more += 1;
        }
    }

    /// All that were kept, and a last line for those that were not.
    pub(crate) fn into_vec(mut self) -> Vec<String> {
        if self.more > 0 {
            self.kept
                .push(format!("{} more warnings like these", self.more));
        }
        self.kept
    }
}
