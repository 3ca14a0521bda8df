//! Lists what is wrong with an image.

use std::collections::HashMap;
use std::fmt;

use crate::budget::Budget;
use crate::error::{Error, Result};
use crate::reader::{Image, Inode};
use crate::{BLOCK_SIZE, FileType};

/// Problems listed before [`check`] gives up.
pub const MAX_PROBLEMS: usize = 1000;

/// Longer paths are cut at the front.
const MAX_PATH: usize = 4096;

/// A contradiction in an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Path of the inode or directory where it was met; empty for the root and for the image as
    /// a whole.
    pub path: Vec<u8>,
    /// What is wrong, with the structure and its byte offset.
    pub what: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "/{}: {}", self.path.escape_ascii(), self.what)
    }
}

const ROOT: PathId<'static> = PathId {
    parent: None,
    name: b"",
};

/// Reads everything there is in an image and lists the contradictions, at most
/// [`MAX_PROBLEMS`]; none means that the image is good. Beyond what reading finds: the entries
/// `.` and `..`, link counts, the number of inodes, a tag for each device, structures that
/// overlap, and inodes that cross a block boundary.
pub fn check(bytes: &[u8]) -> Vec<Problem> {
    let mut problems = Vec::new();
    let image = match Image::open(bytes) {
        Ok(image) => image,
        Err(error) => {
            return vec![Problem {
                path: Vec::new(),
                what: error.to_string(),
            }];
        }
    };
    let mut checker = Checker {
        image: &image,
        problems: &mut problems,
        budget: Budget::once(&image),
        seen: HashMap::new(),
        directories: Vec::new(),
        ranges: Vec::new(),
    };
    checker.run();
    problems
}

/// An inode that was met, with the names counted so far.
struct Seen<'a> {
    claimed: u32,
    names: u32,
    file_type: FileType,
    path: PathId<'a>,
}

/// A path as its last name and the number of the directory before it: whole paths would take
/// memory that grows with the square of the depth.
#[derive(Clone, Copy)]
struct PathId<'a> {
    parent: Option<usize>, // in `Checker::directories`
    name: &'a [u8],
}

struct Checker<'i, 'a> {
    image: &'i Image<'a>,
    problems: &'i mut Vec<Problem>,
    budget: Budget,
    seen: HashMap<u64, Seen<'a>>,
    directories: Vec<PathId<'a>>,
    ranges: Vec<(u64, u64, u64)>, // start, end, nid
}

impl<'a> Checker<'_, 'a> {
    fn report(&mut self, path: PathId<'a>, what: impl Into<String>) {
        if self.problems.len() < MAX_PROBLEMS {
            let path = self.path(path);
            self.problems.push(Problem {
                path,
                what: what.into(),
            });
        }
    }

    fn path(&self, last: PathId<'a>) -> Vec<u8> {
        let mut names = vec![last.name];
        let mut len = last.name.len();
        let mut parent = last.parent;
        while let Some(directory) = parent.and_then(|parent| self.directories.get(parent)) {
            if len > MAX_PATH {
                names.push(b"...");
                break;
            }
            names.push(directory.name);
            len += directory.name.len() + 1;
            parent = directory.parent;
        }
        names.reverse();
        // The root has an empty name.
        let path = names.join(b"/".as_slice());
        path.strip_prefix(b"/").map(<[u8]>::to_vec).unwrap_or(path)
    }

    fn run(&mut self) {
        for (device, number) in self.image.devices().iter().zip(1_u32..) {
            if device.tag == [0; 64] {
                self.report(ROOT, format!("device {number} has no tag"));
            }
            if device.blocks == 0 {
                self.report(ROOT, format!("device {number} has no size"));
            }
            if device.mapped_block != 0 && device.mapped_block < self.image.superblock().blocks {
                self.report(ROOT, format!("device {number} is mapped onto the metadata"));
            }
        }
        let root = match self.image.root() {
            Ok(root) => root,
            Err(error) => return self.report(ROOT, error.to_string()),
        };
        let mut pending = vec![(ROOT, root, root.nid)];
        self.meet(ROOT, &root);
        while let Some((path, directory, parent)) = pending.pop() {
            if self.problems.len() >= MAX_PROBLEMS {
                return;
            }
            match self.directory(path, &directory, parent) {
                Ok(below) => pending.extend(below),
                Err(error) => self.report(path, error.to_string()),
            }
        }
        self.totals();
        self.overlaps();
    }

    /// Checks an inode met for the first time.
    fn meet(&mut self, path: PathId<'a>, inode: &Inode) {
        let seen = Seen {
            // Directories: "." and the name, or for the root "..".
            names: if inode.is_dir() { 2 } else { 1 },
            claimed: inode.nlink,
            file_type: inode.file_type,
            path,
        };
        self.seen.insert(inode.nid, seen);
        if let Err(error) = self.content(inode) {
            self.report(path, error.to_string());
        }
    }

    fn content(&mut self, inode: &Inode) -> Result<()> {
        self.budget.charge(inode, inode.own_len(self.image)?)?;
        let mut names = Vec::new();
        self.image.each_xattr(inode, &mut |xattr| {
            names.push(xattr.name());
            Ok(())
        })?;
        names.sort_unstable();
        if let Some([name, _]) = names.array_windows().find(|[a, b]| a == b) {
            return Err(inode.corrupt(format!("xattr {} is there twice", name.escape_ascii())));
        }
        let mut end = inode.end();
        match inode.file_type {
            FileType::Symlink => {
                self.image.symlink(inode)?;
                end += if inode.is_inline() { inode.size } else { 0 };
            }
            FileType::File => {
                self.image
                    .layout(inode)?
                    .try_for_each(|extent| extent.map(|_| ()))?;
                if inode.is_chunked() {
                    let index = self.image.chunk_index(inode)?;
                    end = index.offset + index.count * index.entry_len;
                } else if inode.is_inline() {
                    end += inode.size % BLOCK_SIZE;
                }
            }
            FileType::Directory if inode.is_inline() => end += inode.size % BLOCK_SIZE,
            _ => {}
        }
        self.ranges.push((inode.offset, end, inode.nid));
        if inode.offset / BLOCK_SIZE != (inode.offset + inode.core_len - 1) / BLOCK_SIZE {
            return Err(inode.corrupt("crosses a block boundary"));
        }
        Ok(())
    }

    /// Checks the entries of a directory; returns the directories in it.
    fn directory(
        &mut self,
        path: PathId<'a>,
        directory: &Inode,
        parent: u64,
    ) -> Result<Vec<(PathId<'a>, Inode, u64)>> {
        let here = self.directories.len();
        self.directories.push(path);
        let mut below = Vec::new();
        let mut dots = (None, None);
        for entry in self.image.read_dir_all(directory)? {
            let entry = entry?;
            if self.problems.len() >= MAX_PROBLEMS {
                break;
            }
            let is_dot = matches!(entry.name, b"." | b"..");
            if is_dot && entry.file_type != FileType::Directory {
                self.report(path, format!("\".\" or \"..\" is a {:?}", entry.file_type));
            }
            match entry.name {
                b"." => dots.0 = Some(entry.nid),
                b".." => dots.1 = Some(entry.nid),
                name => {
                    let child = PathId {
                        parent: Some(here),
                        name,
                    };
                    match self.entry(directory, child, entry.nid, entry.file_type) {
                        Ok(Some(inode)) => below.push((child, inode, directory.nid)),
                        Ok(None) => {}
                        Err(error) => self.report(child, error.to_string()),
                    }
                }
            }
        }
        if dots.0 != Some(directory.nid) {
            self.report(
                path,
                format!("\".\" is {:?}, not inode {}", dots.0, directory.nid),
            );
        }
        if dots.1 != Some(parent) {
            self.report(path, format!("\"..\" is {:?}, not inode {parent}", dots.1));
        }
        below.reverse();
        Ok(below)
    }

    fn entry(
        &mut self,
        directory: &Inode,
        path: PathId<'a>,
        nid: u64,
        file_type: FileType,
    ) -> Result<Option<Inode>> {
        let mismatch = |real: FileType| {
            Error::corrupt(
                format!("inode {}", directory.nid),
                directory.offset,
                format!("entry says {file_type:?}, its inode {nid} {real:?}"),
            )
        };
        if let Some(seen) = self.seen.get_mut(&nid) {
            seen.names = seen.names.saturating_add(1);
            return match seen.file_type {
                FileType::Directory => Err(directory.corrupt("hard link to a directory")),
                real if real != file_type => Err(mismatch(real)),
                _ => Ok(None),
            };
        }
        let inode = self.image.inode(nid)?;
        self.meet(path, &inode);
        if inode.file_type != file_type {
            return Err(mismatch(inode.file_type));
        }
        if !inode.is_dir() {
            return Ok(None);
        }
        if let Some(parent) = self.seen.get_mut(&directory.nid) {
            parent.names = parent.names.saturating_add(1);
        }
        Ok(Some(inode))
    }

    fn totals(&mut self) {
        let claimed = self.image.superblock().inodes;
        let found = self.seen.len();
        if claimed != found as u64 {
            self.report(
                ROOT,
                format!("superblock says {claimed} inodes, there are {found}"),
            );
        }
        let seen = std::mem::take(&mut self.seen);
        let mut wrong: Vec<_> = seen
            .into_iter()
            .filter(|(_, seen)| seen.names != seen.claimed)
            .collect();
        wrong.sort_by_key(|(nid, _)| *nid);
        for (_, seen) in wrong {
            self.report(
                seen.path,
                format!("says {} links, has {}", seen.claimed, seen.names),
            );
        }
    }

    fn overlaps(&mut self) {
        let mut ranges = std::mem::take(&mut self.ranges);
        ranges.sort_unstable();
        for [(_, end, first), (start, _, second)] in ranges.array_windows() {
            if end > start {
                self.report(
                    ROOT,
                    format!("inodes {first} and {second} overlap at byte {start}"),
                );
            }
        }
    }
}
