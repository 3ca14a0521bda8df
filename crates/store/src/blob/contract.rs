//! What every backend and wrapper must do.
