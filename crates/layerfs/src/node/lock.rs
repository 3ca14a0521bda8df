//! The lock on a node's directory: one process serves it at a time.

use std::io::{Read as _, Seek as _, Write as _};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::error::{IoContext as _, LayerfsError, Result};

/// How long the lock is waited for that a process has which is ending.
const ENDING: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(10);
/// Bit of SIGKILL in the masks of `/proc/PID/status`.
const KILL: u64 = 1 << 8;

/// Takes the lock file of a node directory. One that belongs to a process which was killed and is not
/// quite gone is waited for.
///
/// # Errors
/// [`LayerfsError::Owned`] if another process has it.
pub(super) fn take(root: &Path) -> Result<fs_err::File> {
    let path = root.join("node.lock");
    let mut file = fs_err::OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .at("open", &path)?;
    let begun = Instant::now();
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return sign(file),
            Err(Errno::WOULDBLOCK) => {}
            Err(e) => return Err(e).at("lock", &path),
        }
        let mut owner = String::new();
        let _ = file.rewind();
        let _ = std::io::Read::by_ref(&mut file)
            .take(100)
            .read_to_string(&mut owner);
        let owner = owner.trim();
        if is_ending(owner) && begun.elapsed() < ENDING {
            std::thread::sleep(LOOK);
            continue;
        }
        return Err(LayerfsError::Owned {
            root: root.to_path_buf(),
            holder: if owner.is_empty() {
                "process unknown".to_owned()
            } else {
                owner.to_owned()
            },
        });
    }
}

/// Writes who has the lock.
pub(super) fn sign(mut file: fs_err::File) -> Result<fs_err::File> {
    let path = file.path().to_owned();
    file.set_len(0)
        .and_then(|()| file.rewind())
        .and_then(|()| writeln!(file, "process {}", std::process::id()))
        .at("write", &path)?;
    Ok(file)
}

/// Whether the process that signed the lock was killed, or is gone already. One of another process
/// namespace looks so, too.
fn is_ending(owner: &str) -> bool {
    let Some(pid) = owner
        .strip_prefix("process ")
        .and_then(|pid| pid.parse::<u32>().ok())
    else {
        return false;
    };
    let Ok(status) = fs_err::read_to_string(format!("/proc/{pid}/status")) else {
        return true;
    };
    status.lines().any(|line| {
        let Some((name, value)) = line.split_once(':') else {
            return false;
        };
        let value = value.trim();
        match name {
            "State" => value.starts_with(['Z', 'X']),
            "SigPnd" | "ShdPnd" => {
                u64::from_str_radix(value, 16).is_ok_and(|pending| pending & KILL != 0)
            }
            _ => false,
        }
    })
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;

    /// Ends it however the test does.
    struct Ended(Child);

    impl Drop for Ended {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn a_living_owner_counts_and_a_killed_one_does_not() {
        let dir = layerpack_fixtures::ScratchDir::new("lock").unwrap();
        // The lock is that of what is open, and goes with the last process that has it open.
        let lock = take(dir.path()).unwrap();
        let (file, _) = lock.into_parts();
        let child = Command::new("sleep")
            .arg("600")
            .stdin(file)
            .spawn()
            .unwrap();
        let mut child = Ended(child);
        let text = format!("process {}\n", child.0.id());
        fs_err::write(dir.path().join("node.lock"), text).unwrap();
        let refused = take(dir.path()).unwrap_err().to_string();
        assert!(
            refused.contains(&format!("process {}", child.0.id())),
            "{refused}"
        );
        child.0.kill().unwrap();
        take(dir.path()).unwrap();
    }

    #[test]
    fn who_is_unknown_counts() {
        assert!(!is_ending(""));
        assert!(!is_ending("process x"));
        assert!(!is_ending(&format!("process {}", std::process::id())));
        // No process has that number.
        assert!(is_ending("process 4194305"));
    }
}
