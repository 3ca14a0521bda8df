//! Extended attributes of files, without opening them and without following links.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use rustix::fs::{lgetxattr, llistxattr};
use rustix::io::Errno;

/// Most bytes of one file's attribute names, and of one value: the kernel's limits.
const LARGEST: usize = 64 << 10;

/// Reads attributes; keeps its buffer.
#[derive(Default)]
pub(crate) struct Reader {
    names: Vec<u8>,
    value: Vec<u8>,
}

impl Reader {
    /// All attributes of the file at `path` whose name `wanted` wants.
    pub(crate) fn read(
        &mut self,
        path: &[u8],
        mut wanted: impl FnMut(&[u8]) -> bool,
    ) -> rustix::io::Result<BTreeMap<Vec<u8>, Vec<u8>>> {
        let mut found = BTreeMap::new();
        let path = OsStr::from_bytes(path);
        if self.names.is_empty() {
            self.names.resize(LARGEST, 0);
            self.value.resize(LARGEST, 0);
        }
        let len = match llistxattr(path, &mut self.names) {
            Ok(len) => len,
            // A filesystem without attributes has none.
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => return Ok(found),
            Err(errno) => return Err(errno),
        };
        let names = self.names.get(..len).unwrap_or_default();
        for name in names
            .split(|&byte| byte == 0)
            .filter(|name| !name.is_empty())
        {
            if !wanted(name) {
                continue;
            }
            match lgetxattr(path, OsStr::from_bytes(name), &mut self.value) {
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
}
