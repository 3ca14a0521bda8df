//! Which process of this machine holds something, and whether it is dead: so that what a killed
//! writer left need not be waited for.
//!
//! Written as `<boot id>.<pid namespace>.<pid>.<start>`: the kernel's boot id without dashes, the
//! inode of the process's pid namespace, its number there, and its start in clock ticks since the
//! boot. Only a process of the same boot and the same namespace can tell; for all others the holder
//! is alive. In doubt it is alive, too.

use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::str::FromStr;
use std::sync::OnceLock;

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

/// A process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Holder {
    boot: String,
    namespace: u64,
    pid: i32,
    start: u64,
}

impl Holder {
    /// This process; `None` where the system does not say enough.
    pub(crate) fn own() -> Option<Self> {
        static OWN: OnceLock<Option<Holder>> = OnceLock::new();
        let own = OWN.get_or_init(Self::look).clone()?;
        // A child that was forked has another number.
        (u32::try_from(own.pid) == Ok(std::process::id())).then_some(own)
    }

    fn look() -> Option<Self> {
        let pid = i32::try_from(std::process::id()).ok()?;
        // Else /proc is that of another namespace.
        let link = fs_err::read_link("/proc/self").ok()?;
        if link.to_str()?.parse() != Ok(pid) {
            return None;
        }
        let boot = fs_err::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        let boot: String = boot.trim().chars().filter(|c| *c != '-').collect();
        let is_hex = boot.len() == 32 && boot.bytes().all(|b| b.is_ascii_hexdigit());
        Some(Self {
            boot: is_hex.then_some(boot)?,
            namespace: fs_err::metadata("/proc/self/ns/pid").ok()?.ino(),
            pid,
            start: start_of(pid)?,
        })
    }

    /// Whether the process is known to have ended.
    pub(crate) fn is_dead(&self) -> bool {
        let Some(own) = Self::own() else {
            return false;
        };
        if (&own.boot, own.namespace) != (&self.boot, self.namespace) {
            return false;
        }
        let Some(pid) = Pid::from_raw(self.pid) else {
            return false;
        };
        match test_kill_process(pid) {
            Err(Errno::SRCH) => true,
            // Its number may be another's by now. What /proc hides is alive.
            _ => start_of(self.pid).is_some_and(|start| start != self.start),
        }
    }
}

/// When a process was started: the 22nd field of its `stat`. The second is a name in brackets that
/// may hold anything.
fn start_of(pid: i32) -> Option<u64> {
    let stat = fs_err::read(format!("/proc/{pid}/stat")).ok()?;
    let end = stat.iter().rposition(|b| *b == b')')?;
    let rest = std::str::from_utf8(stat.get(end + 1..)?).ok()?;
    rest.split_ascii_whitespace().nth(19)?.parse().ok()
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            boot,
            namespace,
            pid,
            start,
        } = self;
        write!(f, "{boot}.{namespace}.{pid}.{start}")
    }
}

impl FromStr for Holder {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut fields = text.split('.');
        let boot = fields.next().unwrap_or_default();
        if boot.len() != 32 || !boot.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(());
        }
        let mut number = || fields.next().ok_or(())?.parse::<u64>().map_err(|_| ());
        let holder = Self {
            boot: boot.to_owned(),
            namespace: number()?,
            pid: i32::try_from(number()?).map_err(|_| ())?,
            start: number()?,
        };
        match fields.next() {
            None if holder.pid > 0 => Ok(holder),
            _ => Err(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_living_and_the_dead_are_told_apart() {
        let own = Holder::own().unwrap();
        assert!(!own.is_dead());
        assert_eq!(own.to_string().parse(), Ok(own.clone()));
        // Its number is another's now.
        let reused = Holder {
            start: own.start + 1,
            ..own.clone()
        };
        assert!(reused.is_dead());
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let other = Holder {
            pid,
            start: start_of(pid).unwrap(),
            ..own.clone()
        };
        assert!(!other.is_dead());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(other.is_dead());
        // Of another machine, or another container: nobody here can tell.
        for foreign in [
            Holder {
                boot: "0".repeat(32),
                ..other.clone()
            },
            Holder {
                namespace: 1,
                ..other.clone()
            },
        ] {
            assert!(!foreign.is_dead());
        }
        for text in [
            "",
            "1.2.3",
            "x.1.2.3",
            &format!("{own}.1"),
            &format!("{}.1.0.1", own.boot),
        ] {
            assert!(text.parse::<Holder>().is_err(), "{text}");
        }
    }
}
