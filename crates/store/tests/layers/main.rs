//! Layers in stores: formats, publishing, reading, verifying, faults, damage, races.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    clippy::print_stderr,
    missing_docs,
    reason = "tests"
)]

mod abandoned;
mod builders;
mod channels;
mod chunker;
mod collecting;
mod compacting;
mod copies;
mod damage;
mod faults;
mod full_disk;
mod golden;
mod healing;
mod hostile;
mod index_cache;
mod mirrors;
mod publishing;
mod queries;
mod reading;
mod references;
mod remembered;
mod requests;
mod seeding;
mod signatures;
mod staged;
mod support;
mod sweeps;
mod transfer;
mod writers;
