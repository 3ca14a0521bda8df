//! Extended attributes of files, without opening them and without following links.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use rustix::fs::{lgetxattr, llistxattr};
use rustix::io::Errno;

/// Most bytes of one file's attribute names, and of one value: the kernel's limits.
const LARGEST: usize = 64 << 10;
/// Bytes that nearly always do. The kernel allocates what it is given room for, each time.
const USUAL: usize = 1 << 10;

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
        let len = match within(&mut self.names, |room| llistxattr(path, room)) {
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
            let name_of = OsStr::from_bytes(name);
            match within(&mut self.value, |room| lgetxattr(path, name_of, room)) {
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

/// Calls with as much room as usual, and again with all that can be needed if that was too little.
fn within(
    buffer: &mut Vec<u8>,
    mut call: impl FnMut(&mut [u8]) -> rustix::io::Result<usize>,
) -> rustix::io::Result<usize> {
    if buffer.len() < USUAL {
        buffer.resize(USUAL, 0);
    }
    match call(buffer.get_mut(..USUAL).unwrap_or_default()) {
        Err(Errno::RANGE) => {
            buffer.resize(LARGEST, 0);
            call(buffer)
        }
        other => other,
    }
}
