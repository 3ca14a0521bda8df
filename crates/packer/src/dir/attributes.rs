//! Extended attributes of files, without opening them and without following links.

use std::collections::BTreeMap;
use std::ffi::{CStr, OsStr};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;

use layerpack_sys::xattr::list_at;
use rustix::fs::{lgetxattr, llistxattr};
use rustix::io::Errno;

use super::open::proc_path;

/// Most bytes of one file's attribute names, and of one value: the kernel's limits.
const LARGEST: usize = 64 << 10;
/// Bytes that nearly always do. The kernel takes the buffer's size of its own memory, each time.
const FIRST: usize = 1 << 10;

/// Reads attributes; keeps its buffers.
#[derive(Default)]
pub(crate) struct Reader {
    /// A file's name with a NUL.
    file: Vec<u8>,
    names: Vec<u8>,
    value: Vec<u8>,
    /// The kernel wants a path.
    by_path: bool,
}

impl Reader {
    /// All attributes of `file` in `directory` whose name `wanted` wants.
    pub(crate) fn read(
        &mut self,
        directory: BorrowedFd<'_>,
        file: &[u8],
        mut wanted: impl FnMut(&[u8]) -> bool,
    ) -> rustix::io::Result<BTreeMap<Vec<u8>, Vec<u8>>> {
        let mut found = BTreeMap::new();
        if self.names.is_empty() {
            self.names.resize(FIRST, 0);
        }
        let mut listed = self.list(directory, file);
        if listed == Err(Errno::RANGE) {
            self.names.resize(LARGEST, 0);
            listed = self.list(directory, file);
        }
        let len = match listed {
            Ok(0) => return Ok(found),
            Ok(len) => len,
            // A filesystem without attributes has none.
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => return Ok(found),
            Err(errno) => return Err(errno),
        };
        let path = proc_path(directory, file);
        let path = OsStr::from_bytes(&path);
        if self.value.is_empty() {
            self.value.resize(FIRST, 0);
        }
        let names = self.names.get(..len).unwrap_or_default();
        for name in names
            .split(|&byte| byte == 0)
            .filter(|name| !name.is_empty())
        {
            if !wanted(name) {
                continue;
            }
            let name_of = OsStr::from_bytes(name);
            let mut value = lgetxattr(path, name_of, &mut self.value);
            if value == Err(Errno::RANGE) {
                self.value.resize(LARGEST, 0);
                value = lgetxattr(path, name_of, &mut self.value);
            }
            match value {
                Ok(len) => {
                    found.insert(
                        name.to_vec(),
                        self.value.get(..len).unwrap_or_default().to_vec(),
                    );
                }
                // Gone since it was listed: the change of ctime will tell if it matters.
                Err(Errno::NODATA) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(found)
    }

    fn list(&mut self, directory: BorrowedFd<'_>, file: &[u8]) -> rustix::io::Result<usize> {
        if !self.by_path {
            self.file.clear();
            self.file.extend_from_slice(file);
            self.file.push(0);
            let file = CStr::from_bytes_with_nul(&self.file).map_err(|_| Errno::INVAL)?;
            match list_at(directory.as_fd(), file, &mut self.names) {
                // Before Linux 6.13, or under a filter that does not know the call.
                Err(Errno::NOSYS | Errno::PERM) => self.by_path = true,
                listed => return listed,
            }
        }
        let path = proc_path(directory, file);
        llistxattr(OsStr::from_bytes(&path), &mut self.names)
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{XattrFlags, setxattr};

    use super::*;

    #[test]
    fn both_ways_find_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let paths = ["plain", "one", "many"].map(|name| dir.path().join(name));
        for path in &paths {
            fs_err::write(path, b"").unwrap();
        }
        let set = |path: &std::path::Path, name: &str| {
            setxattr(path, name, name.as_bytes(), XattrFlags::empty()).is_ok()
        };
        // More names than are asked for first, where the filesystem takes them.
        if set(&paths[1], "user.one") {
            for i in 0..20 {
                set(&paths[2], &format!("user.{i}-{}", "x".repeat(90)));
            }
        }
        let fd = fs_err::File::open(dir.path()).unwrap();
        for path in &paths {
            let name = path.file_name().unwrap().as_bytes();
            let read = |by_path| {
                let mut reader = Reader {
                    by_path,
                    ..Reader::default()
                };
                let read = reader.read(fd.file().as_fd(), name, |name| name.starts_with(b"user."));
                read.unwrap()
            };
            let found = read(false);
            assert_eq!(found, read(true));
            assert!(found.iter().all(|(name, value)| name == value));
        }
    }
}
