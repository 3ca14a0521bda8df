//! Extended attributes by directory and name: `listxattrat`, Linux 6.13. The older calls take a
//! path, which for a file in an open directory leads through `/proc` and costs four times as much.

use std::ffi::CStr;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;

/// The call's number, which is the same on all architectures that we know.
#[cfg(any(
    target_arch = "x86_64",
    target_arch = "aarch64",
    target_arch = "riscv64"
))]
const LISTXATTRAT: Option<libc::c_long> = Some(465);
#[cfg(not(any(
    target_arch = "x86_64",
    target_arch = "aarch64",
    target_arch = "riscv64"
)))]
const LISTXATTRAT: Option<libc::c_long> = None;

/// Names of the attributes of `name` in `directory`, each ended by a NUL, put into `buffer`; their
/// bytes. A symbolic link is not followed.
///
/// # Errors
/// [`Errno::NOSYS`] before Linux 6.13, [`Errno::PERM`] under some filters of system calls: ask by
/// path then. [`Errno::RANGE`] if the buffer is too small, [`Errno::OPNOTSUPP`] if the filesystem has
/// no attributes, else what the kernel says of the file.
pub fn list_at(
    directory: BorrowedFd<'_>,
    name: &CStr,
    buffer: &mut [u8],
) -> rustix::io::Result<usize> {
    let Some(number) = LISTXATTRAT else {
        return Err(Errno::NOSYS);
    };
    // SAFETY: `directory` is an open descriptor and `name` ends with NUL for as long as the call
    // takes; the kernel writes at most `buffer.len()` bytes to `buffer`, which is borrowed for writing.
    let result = unsafe {
        libc::syscall(
            number,
            directory.as_raw_fd(),
            name.as_ptr(),
            libc::AT_SYMLINK_NOFOLLOW,
            buffer.as_mut_ptr(),
            buffer.len(),
        )
    };
    usize::try_from(result).map_err(|_| {
        let errno = std::io::Error::last_os_error().raw_os_error();
        Errno::from_raw_os_error(errno.unwrap_or(libc::EIO))
    })
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn names_are_those_that_the_path_has() {
        let dir = std::env::temp_dir().join(format!("layerpack-xattr-{}", std::process::id()));
        fs_err::create_dir_all(&dir).unwrap();
        let file = dir.join("file");
        fs_err::write(&file, b"").unwrap();
        fs_err::os::unix::fs::symlink("file", dir.join("link")).unwrap();
        let set = rustix::fs::setxattr(&file, "user.a", b"1", rustix::fs::XattrFlags::empty());
        let fd = fs_err::File::open(&dir).unwrap();
        let list = |name: &str, len: usize| {
            let mut buffer = vec![0; len];
            let found = list_at(fd.file().as_fd(), &CString::new(name).unwrap(), &mut buffer);
            found.map(|len| buffer[..len].to_vec())
        };
        match list("file", 100) {
            Err(Errno::NOSYS | Errno::PERM) => {} // an old kernel
            found => {
                let found = found.unwrap_or_default();
                if set.is_ok() {
                    assert!(found.split(|byte| *byte == 0).any(|name| name == b"user.a"));
                    assert_eq!(list("file", 3), Err(Errno::RANGE));
                }
                let link = list("link", 100).unwrap_or_default();
                assert!(!link.split(|byte| *byte == 0).any(|name| name == b"user.a"));
                assert_eq!(list("absent", 100), Err(Errno::NOENT));
            }
        }
        fs_err::remove_dir_all(&dir).unwrap();
    }
}
