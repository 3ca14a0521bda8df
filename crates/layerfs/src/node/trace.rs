//! Watching the reads of a lease's layers.

use std::time::Duration;

use layerpack_store::LayerId;

use super::Node;
use crate::error::{LayerfsError, Result};
use crate::trace::TraceBatch;

/// Longest wait for events.
const MAX_WAIT: Duration = Duration::from_secs(5);

impl Node {
    /// Begins to watch the reads of a lease's layers: the trace's number and the layers, bottom
    /// first. Layers that others use too show their reads as well.
    ///
    /// # Errors
    /// [`LayerfsError::UnknownLease`]; [`LayerfsError::Trace`] if too many traces run.
    pub fn trace_begin(&self, lease: &str) -> Result<(u64, Vec<LayerId>)> {
        let layers = self
            .leases
            .lock()
            .get(lease)
            .map(|info| info.stack.layers)
            .ok_or_else(|| LayerfsError::UnknownLease {
                id: lease.to_owned(),
            })?;
        let id = self
            .recordings
            .traces
            .begin(layers.clone())
            .ok_or_else(|| LayerfsError::Trace {
                what: "too many run already: end one".to_owned(),
            })?;
        for layer in &layers {
            self.registry.tap(*layer, &self.recordings);
        }
        Ok((id, layers))
    }

    /// What was read since the last call, or since the trace began; waits for something at most
    /// `wait` (or five seconds).
    ///
    /// # Errors
    /// [`LayerfsError::Trace`] if no such trace runs: it ends when it is not asked for half a minute.
    pub fn trace_next(&self, id: u64, wait: Duration) -> Result<TraceBatch> {
        let tracer = self
            .recordings
            .traces
            .get(id)
            .ok_or_else(|| LayerfsError::Trace {
                what: format!("there is none with number {id}"),
            })?;
        Ok(tracer.take(wait.min(MAX_WAIT)))
    }

    /// Ends a trace; whether it ran.
    pub fn trace_end(&self, id: u64) -> bool {
        let Some(layers) = self.recordings.traces.end(id) else {
            return false;
        };
        for layer in layers {
            self.registry.tap(layer, &self.recordings);
        }
        true
    }

    /// Ends traces that nobody watches any more.
    pub(super) fn end_forgotten_traces(&self) {
        for id in self.recordings.traces.forgotten() {
            tracing::info!(trace = id, "nobody watches it any more");
            self.trace_end(id);
        }
    }
}
