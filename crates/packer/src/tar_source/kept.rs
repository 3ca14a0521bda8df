//! Small files that are kept back until there are many, so that they lie next to each other in the
//! store too.

use layerpack_erofs::NodeId;

/// Bytes that are kept back at most, about, with what is noted of each file.
const MOST: usize = 4 << 20;

/// Whose a content is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    /// A file in the tree.
    Node(NodeId),
    /// The file of this number among those that were set aside.
    Later(usize),
}

/// See the module's documentation.
#[derive(Default)]
pub(super) struct KeptBack {
    /// Names and contents, one after the other.
    bytes: Vec<u8>,
    files: Vec<Kept>,
}

struct Kept {
    owner: Owner,
    name: usize,
    len: usize,
}

impl KeptBack {
    /// Keeps a file's bytes, which `read` appends to what it is given.
    pub(super) fn push<E>(
        &mut self,
        owner: Owner,
        name: &[u8],
        read: impl FnOnce(&mut Vec<u8>) -> Result<usize, E>,
    ) -> Result<(), E> {
        self.bytes.extend_from_slice(name);
        let len = read(&mut self.bytes)?;
        self.files.push(Kept {
            owner,
            name: name.len(),
            len,
        });
        Ok(())
    }

    /// Whether they are to be stored now.
    pub(super) fn is_full(&self) -> bool {
        self.bytes.len() + self.files.len() * size_of::<Kept>() >= MOST
    }

    /// Forgets all, and gives each to `each`: whose it is, its name, its bytes.
    pub(super) fn drain<E>(
        &mut self,
        mut each: impl FnMut(Owner, &[u8], &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut rest = self.bytes.as_slice();
        let mut take = |len: usize| {
            let (taken, behind) = rest.split_at_checked(len).unwrap_or_default();
            rest = behind;
            taken
        };
        for file in self.files.drain(..) {
            let (name, bytes) = (take(file.name), take(file.len));
            each(file.owner, name, bytes)?;
        }
        self.bytes.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_come_back_as_they_were_given() {
        let mut kept = KeptBack::default();
        for round in 0..2 {
            let files: [(&[u8], &[u8]); 3] = [(b"a", b"xyz"), (b"", b""), (b"name", b"1")];
            for (i, (name, bytes)) in files.into_iter().enumerate() {
                let read = |out: &mut Vec<u8>| {
                    out.extend_from_slice(bytes);
                    Ok::<_, ()>(bytes.len())
                };
                kept.push(Owner::Later(i + round), name, read).unwrap();
            }
            let mut all = files.into_iter().enumerate();
            kept.drain(|owner, name, bytes| {
                let (i, file) = all.next().unwrap();
                assert_eq!((owner, (name, bytes)), (Owner::Later(i + round), file));
                Ok::<_, ()>(())
            })
            .unwrap();
            assert!(all.next().is_none() && !kept.is_full());
        }
        let much = |out: &mut Vec<u8>| {
            out.resize(MOST, 0);
            Ok::<_, ()>(MOST)
        };
        kept.push(Owner::Node(NodeId::ROOT), b"a", much).unwrap();
        assert!(kept.is_full());
        kept.drain(|_, _, _| Err(())).unwrap_err();
        // Many without bytes are much too.
        let mut kept = KeptBack::default();
        let mut files = 0;
        while !kept.is_full() {
            kept.push(Owner::Later(files), b"", |_| Ok::<_, ()>(0))
                .unwrap();
            files += 1;
        }
        assert_eq!(files, MOST.div_ceil(size_of::<Kept>()));
        kept.drain(|_, _, _| Ok::<_, ()>(())).unwrap();
        assert!(!kept.is_full());
    }
}
