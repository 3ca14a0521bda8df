//! Packs sources and reads the layers back: through our own reader, and through the kernel.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_possible_wrap,
    unreachable_pub,
    missing_docs
)]

mod archive;
mod archive_damage;
mod archive_sparse;
mod aside;
mod cache;
mod compressed;
mod difference;
mod directory;
mod export;
mod faults;
mod git;
mod hostile;
mod image;
mod image_place;
mod limits_of_meaning;
mod meaning;
mod merge;
mod parents;
mod peer;
mod privileged_export;
mod privileged_flatten;
mod privileged_kernel;
mod privileged_meaning;
mod privileged_merge;
mod privileged_model;
mod privileged_real;
mod privileged_upper;
mod privileged_wide;
mod rebase;
mod same_digest;
mod scrub;
mod scrub_squash;
mod selection;
mod snapshot;
mod split;
mod support;
