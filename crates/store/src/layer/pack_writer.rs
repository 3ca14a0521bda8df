//! Part of the writer.
