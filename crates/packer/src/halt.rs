//! What a snapshot needs of whoever runs the sandbox: that it comes to rest, and goes on.

use std::time::{Duration, Instant};

use crate::error::{PackError, Result};

/// What went wrong, in the words of whoever halts.
pub type HaltError = Box<dyn std::error::Error + Send + Sync>;

/// Brings what writes to an upper to rest.
pub trait Halt: Sync {
    /// Called right before [`Halt::halt`], for what shortens that and can be done while everything
    /// runs. Nothing by default.
    fn prepare(&self) {}

    /// Whether anything waits while it is halted, so that it should be halted for as short as can be.
    fn waits(&self) -> bool {
        true
    }

    /// Stops everything that writes to the upper. What is written afterwards changes a file's change
    /// time: what was written through memory maps must have been written back for that.
    ///
    /// # Errors
    /// If it cannot be stopped. It goes on then.
    fn halt(&self) -> Result<(), HaltError>;

    /// Lets it go on.
    ///
    /// # Errors
    /// If it may stay halted.
    fn resume(&self) -> Result<(), HaltError>;
}

/// A [`Halt`] for what is at rest already.
#[derive(Debug, Clone, Copy, Default)]
pub struct AtRest;

impl Halt for AtRest {
    fn waits(&self) -> bool {
        false
    }

    fn halt(&self) -> Result<(), HaltError> {
        Ok(())
    }

    fn resume(&self) -> Result<(), HaltError> {
        Ok(())
    }
}

/// Keeps something halted until it is dropped.
pub(crate) struct Halted<'a> {
    halt: &'a dyn Halt,
    since: Instant,
    over: bool,
}

impl<'a> Halted<'a> {
    /// Halts.
    pub(crate) fn begin(halt: &'a dyn Halt) -> Result<Self> {
        halt.prepare();
        let since = Instant::now();
        halt.halt().map_err(|source| PackError::Halt { source })?;
        Ok(Self {
            halt,
            since,
            over: false,
        })
    }

    /// Lets go; for how long it was halted, halting itself included.
    pub(crate) fn end(mut self) -> Result<Duration> {
        self.over = true;
        self.halt
            .resume()
            .map_err(|source| PackError::Halt { source })?;
        Ok(self.since.elapsed())
    }
}

impl Drop for Halted<'_> {
    fn drop(&mut self) {
        if !self.over {
            // Whatever ended the work says more than this could.
            let _ = self.halt.resume();
        }
    }
}
