//! The mount table, `/proc/self/mountinfo` (proc(5)).

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

use crate::error::{Context, Result};

/// One mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountEntry {
    /// Id of the mount; reused after an unmount.
    pub id: u64,
    /// Id of the mount it is attached to.
    pub parent: u64,
    /// Device number of the filesystem.
    pub device: (u32, u32),
    /// Which directory of the filesystem is the mount's root.
    pub root: PathBuf,
    /// Where it is attached, seen from this process's root.
    pub target: PathBuf,
    /// Options of this mount.
    pub options: String,
    /// Optional fields: `shared:N`, `master:N`, ...
    pub propagation: Vec<String>,
    /// Filesystem type.
    pub fstype: String,
    /// Source as given when it was mounted.
    pub source: OsString,
    /// Options of the filesystem.
    pub super_options: OsString,
}

/// Reads the mount table of this process.
///
/// # Errors
/// If `/proc` is not mounted or cannot be read. Lines that do not parse are left out.
pub fn read() -> Result<Vec<MountEntry>> {
    read_file(Path::new("/proc/self/mountinfo"))
}

/// Reads the mount table in `path`, of another process for instance.
///
/// # Errors
/// As for [`read`].
pub fn read_file(path: &Path) -> Result<Vec<MountEntry>> {
    let fd = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .context("open", || path.display())?;
    let mut text = Vec::with_capacity(16 * 1024);
    let mut buffer = vec![0u8; 64 * 1024];
    loop {
        let n = rustix::io::retry_on_intr(|| rustix::io::read(&fd, &mut buffer))
            .context("read", || path.display())?;
        if n == 0 {
            break;
        }
        text.extend_from_slice(buffer.get(..n).unwrap_or_default());
    }
    Ok(parse(&text))
}

/// Parses the text of a mount table; lines that do not parse are left out.
pub fn parse(text: &[u8]) -> Vec<MountEntry> {
    text.split(|&b| b == b'\n').filter_map(parse_line).collect()
}

fn parse_line(line: &[u8]) -> Option<MountEntry> {
    let mut fields = line.split(|&b| b == b' ');
    let mut next = || fields.next();
    let id = number(next()?)?;
    let parent = number(next()?)?;
    let device = std::str::from_utf8(next()?).ok()?;
    let (major, minor) = device.split_once(':')?;
    let device = (major.parse().ok()?, minor.parse().ok()?);
    let root = PathBuf::from(unescape(next()?));
    let target = PathBuf::from(unescape(next()?));
    let options = String::from_utf8_lossy(next()?).into_owned();
    let mut propagation = Vec::new();
    loop {
        let field = next()?;
        if field == b"-" {
            break;
        }
        propagation.push(String::from_utf8_lossy(field).into_owned());
    }
    let fstype = String::from_utf8_lossy(next()?).into_owned();
    let source = unescape(next()?);
    let super_options = unescape(next().unwrap_or_default());
    Some(MountEntry {
        id,
        parent,
        device,
        root,
        target,
        options,
        propagation,
        fstype,
        source,
        super_options,
    })
}

fn number(field: &[u8]) -> Option<u64> {
    std::str::from_utf8(field).ok()?.parse().ok()
}

/// Undoes the kernel's `\ooo` escapes of space, tab, newline and backslash.
fn unescape(field: &[u8]) -> OsString {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, tail)) = rest.split_first() {
        if first == b'\\'
            && let Some(digits) = tail.get(..3)
            && digits.iter().all(|d| (b'0'..=b'7').contains(d))
        {
            let value = digits
                .iter()
                .fold(0u32, |acc, d| acc * 8 + u32::from(d - b'0'));
            out.push(u8::try_from(value & 0xff).unwrap_or(b'?'));
            rest = tail.get(3..).unwrap_or_default();
        } else {
            out.push(first);
            rest = tail;
        }
    }
    OsString::from_vec(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_a_line_with_escapes_and_optional_fields() {
        let text = b"36 35 98:0 /mnt1 /a\\040b\\134c rw,noatime shared:1 master:2 - ext3 /dev/root rw,errors=continue\nnonsense\n";
        let entries = parse(text);
        assert_eq!(entries.len(), 1);
        let entry = &entries[0];
        assert_eq!((entry.id, entry.parent, entry.device), (36, 35, (98, 0)));
        assert_eq!(entry.target, Path::new("/a b\\c"));
        assert_eq!(entry.propagation, ["shared:1", "master:2"]);
        assert_eq!(entry.fstype, "ext3");
        assert_eq!(entry.super_options, "rw,errors=continue");
    }

    #[test]
    fn never_panics_on_damaged_text() {
        let line = b"36 35 98:0 /r /t\\04 rw - ext3 src opts";
        for end in 0..line.len() {
            let _ = parse(&line[..end]);
        }
        assert_eq!(parse(line)[0].target, Path::new("/t\\04"));
    }

    #[test]
    fn own_table_has_a_root() {
        assert!(read().unwrap().iter().any(|m| m.target == Path::new("/")));
    }
}
