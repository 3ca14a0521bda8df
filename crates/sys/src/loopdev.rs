//! Loop devices: a file as a read-only block device, for kernels whose EROFS mounts nothing else.
//!
//! A device is made with the autoclear flag: it goes when its last user does. So who fails, or
//! dies, between attaching and mounting leaves nothing, and after a mount the mount is the only
//! user.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::error::{Context, Result, SysError};

const CONTROL: &str = "/dev/loop-control";
/// `LOOP_CTL_GET_FREE`.
const CTL_GET_FREE: libc::c_ulong = 0x4C82;
/// `LOOP_CONFIGURE`, from Linux 5.8.
const CONFIGURE: libc::c_ulong = 0x4C0A;
const READ_ONLY: u32 = 1;
const AUTOCLEAR: u32 = 4;
/// How often another process may take the free device before us.
const ATTEMPTS: u32 = 64;

/// `struct loop_info64` of `linux/loop.h`.
#[repr(C)]
struct Info {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}
const _: () = assert!(size_of::<Info>() == 232);

/// `struct loop_config`.
#[repr(C)]
struct Config {
    fd: u32,
    block_size: u32,
    info: Info,
    reserved: [u64; 8],
}
const _: () = assert!(size_of::<Config>() == 304);

/// A file as a block device, for as long as this value or anything else uses the device.
#[derive(Debug)]
pub struct LoopDevice {
    path: PathBuf,
    _fd: OwnedFd,
}

impl LoopDevice {
    /// Attaches `file`, read-only, its size as it is now (a rest of less than 512 bytes is not
    /// seen).
    ///
    /// # Errors
    /// `ENOENT` or `ENXIO` if the kernel has no loop devices, `EACCES` or `EPERM` without
    /// privileges, `ENOTTY` or `EINVAL` before Linux 5.8.
    pub fn attach(file: &Path) -> Result<Self> {
        let backing = rustix::fs::open(file, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
            .context("open", || file.display())?;
        let control = rustix::fs::open(CONTROL, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .context("open", || CONTROL)?;
        for _ in 0..ATTEMPTS {
            // SAFETY: the request takes no argument and touches no memory of ours.
            let number = unsafe { libc::ioctl(control.as_raw_fd(), CTL_GET_FREE) };
            if number < 0 {
                return Err(SysError::last("ioctl LOOP_CTL_GET_FREE", CONTROL));
            }
            let path = PathBuf::from(format!("/dev/loop{number}"));
            let flags = OFlags::RDONLY | OFlags::CLOEXEC;
            let device = match rustix::fs::open(&path, flags, Mode::empty()) {
                Ok(device) => device,
                // Its node is made by devtmpfs or udev, a little later perhaps.
                Err(Errno::NOENT) => {
                    std::thread::sleep(std::time::Duration::from_millis(10));
                    continue;
                }
                Err(e) => return Err(e).context("open", || path.display()),
            };
            match configure(&device, &backing) {
                Ok(()) => return Ok(Self { path, _fd: device }),
                // Somebody else was faster.
                Err(Errno::BUSY) => {}
                Err(e) => {
                    return Err(SysError::new(
                        "ioctl LOOP_CONFIGURE",
                        format!("{} for {}", path.display(), file.display()),
                        e,
                    ));
                }
            }
        }
        Err(SysError::new(
            "attach",
            format!("a loop device to {}", file.display()),
            Errno::BUSY,
        ))
    }

    /// The device's name.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn configure(device: &OwnedFd, backing: &OwnedFd) -> std::result::Result<(), Errno> {
    let config = Config {
        fd: u32::try_from(backing.as_raw_fd()).map_err(|_| Errno::BADF)?,
        block_size: 0,
        info: Info {
            device: 0,
            inode: 0,
            rdevice: 0,
            offset: 0,
            size_limit: 0,
            number: 0,
            encrypt_type: 0,
            encrypt_key_size: 0,
            flags: READ_ONLY | AUTOCLEAR,
            file_name: [0; 64],
            crypt_name: [0; 64],
            encrypt_key: [0; 32],
            init: [0; 2],
        },
        reserved: [0; 8],
    };
    // SAFETY: the request reads one `Config` of the kernel's layout, which lives for the time of
    // the call; both descriptors are open for that long.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), CONFIGURE, &raw const config) };
    if result < 0 {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO));
    }
    Ok(())
}

/// Files that loop devices of this machine are attached to, with the devices' names.
///
/// # Errors
/// When `/sys` cannot be read.
pub fn attached() -> Result<Vec<(PathBuf, PathBuf)>> {
    use std::os::unix::ffi::OsStringExt as _;
    let dir = Path::new("/sys/block");
    let read = |path: &Path| -> std::result::Result<Vec<u8>, Errno> {
        let fd = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let mut bytes = vec![0; 8192];
        let len = rustix::io::retry_on_intr(|| rustix::io::read(&fd, &mut bytes))?;
        bytes.truncate(len);
        Ok(bytes)
    };
    let fd = rustix::fs::open(dir, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .context("open", || dir.display())?;
    let mut found = Vec::new();
    for entry in rustix::fs::Dir::new(fd).context("read", || dir.display())? {
        let entry = entry.context("read", || dir.display())?;
        let name = entry.file_name().to_bytes();
        if !name.starts_with(b"loop") {
            continue;
        }
        let name = std::ffi::OsString::from_vec(name.to_vec());
        // Gone, or not attached.
        let Ok(mut file) = read(&dir.join(&name).join("loop/backing_file")) else {
            continue;
        };
        if file.last() == Some(&b'\n') {
            file.pop();
        }
        let file = PathBuf::from(std::ffi::OsString::from_vec(file));
        found.push((file, Path::new("/dev").join(&name)));
    }
    Ok(found)
}
