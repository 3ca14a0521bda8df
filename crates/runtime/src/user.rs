//! Users and groups by the sandbox's own `/etc/passwd` and `/etc/group`.
//!
//! Those files are the sandbox's: they are opened below its root only, must be
//! regular files, and are read up to a limit; lines that make no sense are
//! skipped.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::error::{Result, RuntimeError};

/// How much of each file is read, in bytes.
const FILE_LIMIT: usize = 4 << 20;

/// Most supplementary groups taken: the kernel's limit.
const GROUPS_LIMIT: usize = 65_536;

/// Who a command runs as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct User {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) groups: Vec<u32>,
    pub(crate) home: Vec<u8>,
}

/// Opens `path` inside the tree at `root`, whose links cannot lead out of it.
pub(crate) fn open_inside(
    root: BorrowedFd<'_>,
    path: &str,
    flags: OFlags,
) -> rustix::io::Result<OwnedFd> {
    rustix::fs::openat2(
        root,
        path,
        flags | OFlags::CLOEXEC,
        Mode::empty(),
        ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS,
    )
}

fn read_table(root: BorrowedFd<'_>, path: &str) -> Vec<u8> {
    let Ok(fd) = open_inside(
        root,
        path,
        OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY,
    ) else {
        return Vec::new();
    };
    let regular = rustix::fs::fstat(&fd)
        .is_ok_and(|s| FileType::from_raw_mode(s.st_mode) == FileType::RegularFile);
    let mut text = Vec::new();
    let mut buffer = [0u8; 8192];
    while regular && text.len() < FILE_LIMIT {
        match rustix::io::read(fd.as_fd(), &mut buffer) {
            Ok(n) if n > 0 => text.extend_from_slice(buffer.get(..n).unwrap_or_default()),
            Err(Errno::INTR) => {}
            _ => break,
        }
    }
    text
}

/// A line of `/etc/passwd` or `/etc/group`.
fn entries(text: &[u8]) -> impl Iterator<Item = Vec<&[u8]>> {
    text.split(|&b| b == b'\n')
        .map(|line| line.split(|&b| b == b':').collect())
}

fn number(field: Option<&&[u8]>) -> Option<u32> {
    std::str::from_utf8(field?).ok()?.parse().ok()
}

/// Looks `user` (`user[:group]`, names or numbers; root if `None`) up in the
/// tree at `root`. `count`: how many ids the sandbox has.
pub(crate) fn look_up(root: BorrowedFd<'_>, user: Option<&str>, count: u32) -> Result<User> {
    let passwd = read_table(root, "etc/passwd");
    let group = read_table(root, "etc/group");
    find(&passwd, &group, user.unwrap_or("0"), count)
}

fn find(passwd: &[u8], group: &[u8], user: &str, count: u32) -> Result<User> {
    let error = |problem: String| RuntimeError::User {
        user: user.to_owned(),
        problem,
    };
    let (name, group_name) = match user.split_once(':') {
        Some((name, group)) => (name, Some(group)),
        None => (user, None),
    };
    if name.is_empty() || group_name == Some("") {
        return Err(error("give it as user or user:group".to_owned()));
    }
    let as_number = name.parse::<u32>().ok();
    let mut found = User {
        uid: 0,
        gid: 0,
        groups: Vec::new(),
        home: b"/".to_vec(),
    };
    let mut login: Option<&[u8]> = None;
    for entry in entries(passwd) {
        let uid = number(entry.get(2));
        let by_name = entry.first().is_some_and(|f| *f == name.as_bytes());
        if let (Some(uid), Some(gid)) = (uid, number(entry.get(3)))
            && (by_name || as_number == Some(uid))
        {
            found.uid = uid;
            found.gid = gid;
            login = entry.first().copied();
            if let Some(home) = entry.get(5).filter(|home| home.starts_with(b"/")) {
                found.home = home.to_vec();
            }
            break;
        }
    }
    match (login, as_number) {
        (Some(_), _) => {}
        (None, Some(uid)) => {
            found.uid = uid;
            if uid == 0 {
                found.home = b"/root".to_vec();
            }
        }
        (None, None) => {
            return Err(error(
                "not in the sandbox's /etc/passwd: use a number or a listed name".to_owned(),
            ));
        }
    }
    if let Some(group_name) = group_name {
        let by_number = || group_name.parse::<u32>().ok();
        found.gid = entries(group)
            .find(|e| e.first().is_some_and(|f| *f == group_name.as_bytes()))
            .and_then(|e| number(e.get(2)))
            .or_else(by_number)
            .ok_or_else(|| {
                error(format!(
                    "group {group_name} is not in the sandbox's /etc/group"
                ))
            })?;
    } else if let Some(login) = login {
        for entry in entries(group) {
            let member = entry
                .get(3)
                .is_some_and(|members| members.split(|&b| b == b',').any(|m| m == login));
            if let Some(gid) = number(entry.get(2)).filter(|gid| member && *gid < count)
                && found.groups.len() < GROUPS_LIMIT
                && !found.groups.contains(&gid)
            {
                found.groups.push(gid);
            }
        }
    }
    for (what, id) in [("user", found.uid), ("group", found.gid)] {
        if id >= count {
            return Err(error(format!(
                "{what} id {id} is not one of the sandbox's {count} ids"
            )));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &[u8] = b"root:x:0:0:root:/root:/bin/sh\nbad line\nbob:x:1000:1001::/home/bob:/bin/sh\nfar:x:70000:1::/:/\n";
    const GROUP: &[u8] =
        b"root:x:0:\nbob:x:1001:\nwheel:x:10:alice,bob\ndisk:x:6:bob\nfar:x:99999:bob\n";

    fn look(user: &str) -> Result<User> {
        find(PASSWD, GROUP, user, 65_536)
    }

    #[test]
    fn names_and_numbers() {
        let bob = look("bob").unwrap();
        assert_eq!(
            (bob.uid, bob.gid, bob.groups.as_slice()),
            (1000, 1001, &[10, 6][..])
        );
        assert_eq!(bob.home, b"/home/bob");
        assert_eq!(look("1000").unwrap(), bob);
        let with_group = look("bob:wheel").unwrap();
        assert_eq!((with_group.gid, with_group.groups.len()), (10, 0));
        assert_eq!(look("bob:77").unwrap().gid, 77);
        let unknown = look("4242").unwrap();
        assert_eq!(
            (unknown.uid, unknown.gid, unknown.home.as_slice()),
            (4242, 0, &b"/"[..])
        );
        assert_eq!(find(b"", b"", "0", 65_536).unwrap().home, b"/root");
    }

    #[test]
    fn refusals_name_the_user() {
        for user in [
            "nobody",
            "far",
            "bob:nogroup",
            "70000",
            ":",
            "",
            "bob:",
            ":wheel",
            "0:99999",
        ] {
            let text = look(user).unwrap_err().to_string();
            assert!(text.contains(user), "{text}");
        }
    }
}
