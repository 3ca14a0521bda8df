//! The registry client and the store in a registry, against Debian's `docker-registry` and against
//! servers that do what they should not.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "tests"
)]

mod auth;
mod client;
mod faults;
mod store;
mod support;
