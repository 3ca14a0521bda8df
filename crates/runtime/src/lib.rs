//! See the crate's specification.
