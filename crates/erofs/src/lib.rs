//! EROFS images: a tree in memory, a writer, a reader and a checker, all pure: bytes in, bytes
//! out, no files, no clock, no randomness.
//!
//! The images are the metadata half of the two-file form: superblock, inodes, directories,
//! xattrs and symbolic links. Contents of regular files lie in a second file, device 1 of the
//! device table, which this crate only addresses ([`BlockIndex`]). `FORMAT.md` next to the
//! sources says exactly what is written and what is accepted.
//!
//! * [`Tree`]: built by packing code, or read back by [`Tree::from_image`].
//! * [`write_image`]: same tree and options, same bytes.
//! * [`Image`]: reads any image in the accepted subset, whoever made it. Its input may be
//!   hostile: it returns errors, never panics, and works in bounded time and memory.
//! * [`check`]: lists every contradiction in an image.

mod budget;
mod check;
mod error;
mod format;
mod import;
mod node;
mod reader;
mod sparse;
mod tree;
mod writer;

pub use check::{MAX_PROBLEMS, Problem, check};
pub use error::{Error, Result};
pub use format::{BLOCK_BITS, BLOCK_SIZE, FileType, MAX_CHUNK_BITS};
pub use node::{Node, NodeRef};
pub use reader::{DataExtent, Device, DirEntry, Extents, Image, Inode, Place, ReadDir, Superblock};
pub use sparse::{SparsePlan, plan_sparse};
pub use tree::{
    BlockIndex, FileData, FileLayout, MAX_NAME, Metadata, NodeId, NodeKind, Parked, Rdev,
    Timestamp, Tree, WalkEntry,
};
pub use writer::{ImageInfo, WriteOptions, write_image};
