//! Packs directories, archives and overlay uppers into layers.
//!
//! A source is read into one tree (`model`), its contents go through the store's writer as they
//! are read (`content`), then the tree gets its data addresses, its map and its EROFS metadata
//! (`layout`) and is published. Same tree, same bytes: nothing depends on the order in which a
//! source lists its entries, on threads, on the clock or on what the store already has.
//!
//! SEMANTICS.md says what each source means, what is dropped and where the limits are.

mod acl;
mod build;
mod cache;
mod capability;
mod checkout;
mod content;
mod cpu;
mod dir;
mod dir_view;
mod error;
mod export;
mod filter;
mod git;
mod glob;
mod halt;
mod idmap;
mod image;
mod layout;
mod merge;
mod model;
mod options;
mod owner;
mod pack_diff;
mod park;
mod path;
mod scrub;
mod split;
mod squash;
mod stored;
mod tar;
mod tar_source;
mod upper;
mod view;
mod warnings;
mod xattrs;

pub use build::{build, build_split};
pub use checkout::{CheckoutReport, checkout};
pub use error::{PackError, Result};
pub use export::{
    Compression, ExportOptions, ExportReport, ExportTarget, FlattenOptions, FlattenReport, export,
    export_layer, export_tar, flatten,
};
pub use git::GitIndex;
pub use halt::{AtRest, Halt, HaltError};
pub use image::{ImageSource, ImportOptions, ImportReport, import, import_split};
pub use merge::{MergeOptions, MergeWithRulesReport, merge, merge_with_rules};
pub use options::{
    BuildOptions, BuildReport, DEFAULT_XATTRS, EntryCounts, IdMapRange, Limits, Moved, Moves,
    OverlayXattrs, PackDiffOptions, PackDiffReport, Progress, Silent, Source,
};
pub use owner::Owners;
pub use pack_diff::{pack_diff, snapshot};
pub use scrub::{Finding, Findings, LowerLayer, Rules, ScrubReport, StillBelow, Tally};
pub use split::{LeftOver, Split, SplitReport};
pub use view::{
    Change, ChangeKind, ConflictKind, Difference, EntryKind, Find, RebaseConflict, RebaseOptions,
    RebaseReport, SizeTest, Strategy, View, ViewEntry, rebase,
};

/// A path's or name's bytes for a message: control characters and what is not UTF-8 escaped, cut
/// to a readable length.
pub(crate) fn show(path: &[u8]) -> String {
    const LONGEST: usize = 300;
    if path.is_empty() {
        return "the root".to_owned();
    }
    let mut text = String::new();
    for chunk in path.utf8_chunks() {
        for c in chunk.valid().chars() {
            if c.is_control() || c == '\\' {
                text.extend(c.escape_default());
            } else {
                text.push(c);
            }
        }
        for byte in chunk.invalid() {
            text.push_str(&format!("\\x{byte:02x}"));
        }
        if text.len() > LONGEST {
            let end = (0..=LONGEST)
                .rev()
                .find(|&i| text.is_char_boundary(i))
                .unwrap_or(0);
            text.truncate(end);
            text.push_str("...");
            break;
        }
    }
    text
}
