//! Questions about a store that are answered from manifests, maps and locators: no chunk is read.

mod usage;

pub use usage::{Amount, KindUsage, LayerUsage, Shared, Usage, shared_with, usage};
