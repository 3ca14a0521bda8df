//! What tests must not leave behind: mounts, loop devices, processes, scratch directories, cgroups.
//!
//! The state before is subtracted, so what was there already is nobody's fault.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Result;

/// How long the last processes and lazy unmounts get to finish.
const GRACE: Duration = Duration::from_secs(5);

/// One look at the machine; each item is text for people.
#[derive(Debug, Clone, Default)]
pub(crate) struct Leftovers {
    items: BTreeSet<String>,
    target: PathBuf,
}

impl Leftovers {
    /// Looks now; processes are looked for among programs below `target`.
    ///
    /// # Errors
    /// When `/proc` cannot be read.
    pub(crate) fn look(target: &Path) -> Result<Self> {
        let mut items = BTreeSet::new();
        mounts(&mut items)?;
        loops(&mut items);
        processes(target, &mut items)?;
        scratch(&mut items);
        cgroups(&mut items)?;
        Ok(Self {
            items,
            target: target.to_owned(),
        })
    }

    /// What is there now and was not then, after a short time to settle.
    ///
    /// # Errors
    /// As [`Leftovers::look`].
    pub(crate) fn new_since(&self) -> Result<Vec<String>> {
        let started = Instant::now();
        loop {
            let now = Self::look(&self.target)?;
            let new: Vec<String> = now.items.difference(&self.items).cloned().collect();
            if new.is_empty() || started.elapsed() > GRACE {
                return Ok(new);
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}

fn mounts(items: &mut BTreeSet<String>) -> Result<()> {
    let table = fs_err::read("/proc/self/mountinfo")?;
    for line in String::from_utf8_lossy(&table).lines() {
        // Fields: id parent device root MOUNTPOINT options [tags] - TYPE source superoptions.
        let Some((front, back)) = line.split_once(" - ") else {
            continue;
        };
        let mountpoint = front.split(' ').nth(4).unwrap_or_default();
        let filesystem = back.split(' ').next().unwrap_or_default();
        items.insert(format!("mount: {filesystem} on {mountpoint}"));
    }
    Ok(())
}

fn loops(items: &mut BTreeSet<String>) {
    // No /sys/block, as in some containers: then no loop devices to leave either.
    let Ok(listing) = fs_err::read_dir("/sys/block") else {
        return;
    };
    for entry in listing.filter_map(Result::ok) {
        if let Ok(file) = fs_err::read_to_string(entry.path().join("loop/backing_file")) {
            let device = entry.file_name().to_string_lossy().into_owned();
            items.insert(format!("loop device: {device} on {}", file.trim()));
        }
    }
}

fn processes(target: &Path, items: &mut BTreeSet<String>) -> Result<()> {
    let own = std::process::id().to_string();
    for entry in fs_err::read_dir("/proc")?.filter_map(Result::ok) {
        let pid = entry.file_name().to_string_lossy().into_owned();
        if pid == own || !pid.bytes().all(|byte| byte.is_ascii_digit()) {
            continue;
        }
        // A process that ends while we look is none that was left.
        let program = fs_err::read_link(entry.path().join("exe")).unwrap_or_default();
        let name = fs_err::read_to_string(entry.path().join("comm")).unwrap_or_default();
        let ours = program.starts_with(target) && program.file_name() != Some("xtask".as_ref());
        if ours || name.starts_with("layerpack") {
            let line = fs_err::read(entry.path().join("cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).replace('\0', " ");
            items.insert(format!("process: {pid} {} {}", name.trim(), line.trim()));
        }
    }
    Ok(())
}

fn scratch(items: &mut BTreeSet<String>) {
    let Ok(listing) = fs_err::read_dir(std::env::temp_dir()) else {
        return;
    };
    for entry in listing.filter_map(Result::ok) {
        let name = entry.file_name();
        if name.to_string_lossy().starts_with("layerpack-") {
            items.insert(format!("scratch: {}", entry.path().display()));
        }
    }
}

/// What is in groups called `layerpack`, and groups of tests (`layerpack-test-...`), in whichever
/// hierarchies are mounted. The empty group `layerpack` itself may stay.
fn cgroups(items: &mut BTreeSet<String>) -> Result<()> {
    let table = fs_err::read("/proc/self/mountinfo")?;
    for line in String::from_utf8_lossy(&table).lines() {
        let Some((front, back)) = line.split_once(" - ") else {
            continue;
        };
        if !back.starts_with("cgroup") {
            continue;
        }
        let mountpoint = Path::new(front.split(' ').nth(4).unwrap_or_default());
        for (folder, prefix) in [
            (mountpoint.join("layerpack"), ""),
            (mountpoint.to_owned(), "layerpack-"),
        ] {
            let Ok(listing) = fs_err::read_dir(&folder) else {
                continue;
            };
            for entry in listing.filter_map(Result::ok) {
                let name = entry.file_name();
                if name.to_string_lossy().starts_with(prefix) && entry.path().is_dir() {
                    items.insert(format!("cgroup: {}", entry.path().display()));
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_new_is_named_and_what_was_there_is_not() {
        let target = Path::new("/nonexistent");
        let before = Leftovers::look(target).unwrap();
        let scratch = layerpack_fixtures::ScratchDir::new("leftover").unwrap();
        let now = Leftovers::look(target).unwrap();
        let name = format!("scratch: {}", scratch.path().display());
        assert!(!before.items.contains(&name));
        assert!(now.items.contains(&name));
        assert!(
            now.items
                .iter()
                .any(|item| item.starts_with("mount: proc on /proc"))
        );
    }
}
