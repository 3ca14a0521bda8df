//! One binary for all integration tests: they share the builders and comparers of `common`.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::single_range_in_vec_init
)]

mod common;
mod damage;
mod errors;
mod gates;
mod golden;
mod kernel;
mod roundtrip;
mod sparse;
mod tools;
mod trees;
