//! The tree of a large layer lies in an unnamed temporary file while contents are read: 40 bytes a
//! file and its name, of which nobody asks anything then.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::path::Path;

use layerpack_erofs::{Parked, Tree};

use crate::error::{PackError, Result};

/// A smaller tree stays in memory.
const WORTH_IT: usize = 4 << 20;

/// A tree that is in a file.
#[derive(Debug)]
pub(crate) struct Away {
    parked: Parked,
    file: File,
    place: String,
}

/// Puts the tree into a file in the directory `scratch`, and leaves an empty one. `None`: it stays,
/// since it is small or no file can be made or written.
pub(crate) fn away(tree: &mut Tree, scratch: Option<&Path>) -> Option<Away> {
    away_from(WORTH_IT, tree, scratch)
}

fn away_from(least: usize, tree: &mut Tree, scratch: Option<&Path>) -> Option<Away> {
    let scratch = scratch.filter(|_| tree.parked_len() >= least)?;
    fs_err::create_dir_all(scratch).ok()?;
    let mut file = tempfile::tempfile_in(scratch).ok()?;
    let parked = tree.park(&mut file).ok()?;
    layerpack_sys::memory::trim();
    Some(Away {
        parked,
        file,
        place: format!("a temporary file in {}", scratch.display()),
    })
}

impl Away {
    /// The tree as it was.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub(crate) fn back(self) -> Result<Tree> {
        let Self {
            parked,
            mut file,
            place,
        } = self;
        let read = |file: &mut File| -> io::Result<Tree> {
            file.seek(SeekFrom::Start(0))?;
            parked.unpark(file)
        };
        read(&mut file).map_err(|source| PackError::Write {
            path: place,
            source,
        })
    }
}

#[cfg(test)]
mod tests {
    use layerpack_erofs::{Metadata, NodeId, NodeKind};

    use super::*;

    #[test]
    fn a_tree_comes_back_from_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let scratch = dir.path().join("made");
        let mut tree = Tree::new(Metadata::default());
        for name in [b"a", b"b"] {
            let fifo = NodeKind::Fifo;
            tree.insert(NodeId::ROOT, name, Metadata::default(), fifo)
                .unwrap();
        }
        assert!(away(&mut tree, Some(&scratch)).is_none(), "it is small");
        assert!(away_from(1, &mut tree, None).is_none());
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(away_from(1, &mut tree, Some(file.path())).is_none());
        assert_eq!(tree.len(), 3);
        let gone = away_from(1, &mut tree, Some(&scratch)).unwrap();
        assert!(tree.is_empty());
        assert_eq!(fs_err::read_dir(&scratch).unwrap().count(), 0);
        let tree = gone.back().unwrap();
        assert!(tree.resolve(b"a").is_some() && tree.resolve(b"b").is_some());
        let mut tree = tree;
        let gone = away_from(1, &mut tree, Some(&scratch)).unwrap();
        gone.file.set_len(3).unwrap();
        assert!(matches!(gone.back(), Err(PackError::Write { .. })));
    }
}
