//! Remote backends and wrappers, against servers that run in this process or beside it.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "tests"
)]

mod bad_servers;
mod buckets;
mod claims;
mod garage;
#[path = "../layers/support.rs"]
#[allow(dead_code, reason = "shared with other tests, which use more of it")]
mod layers;
mod support;
mod web;
mod wrappers;
