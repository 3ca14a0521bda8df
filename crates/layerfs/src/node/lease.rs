//! Leases on disk: `ROOT/leases/ID.json`, one small file each, replaced atomically.
//!
//! A lease is alive while the machine runs under the same boot and, if it names a process, that
//! process lives (told apart from a later one of the same number by its start time).

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::types::{LeaseInfo, LeaseSpec};
use crate::error::{IoContext, LayerfsError, Result};

const FORMAT: u32 = 1;
/// No lease record is near this long, whatever the stack.
const MAX_BYTES: u64 = 4 << 20;

/// A lease as stored.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Record {
    format: u32,
    /// Boot under which it was made.
    boot: String,
    /// Start time of the process, in clock ticks after boot.
    #[serde(default)]
    process_start: Option<u64>,
    pub(super) info: LeaseInfo,
}

/// Checks that an identifier can be a file name.
pub(super) fn check_id(id: &str) -> Result<()> {
    let fine = !id.is_empty()
        && id.len() <= 128
        && !id.starts_with('.')
        && id
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'));
    if fine {
        Ok(())
    } else {
        Err(LayerfsError::InvalidLease {
            id: id.chars().take(200).collect(),
        })
    }
}

/// Identity of the running kernel's boot, as text.
pub(super) fn boot_text() -> Result<String> {
    let path = Path::new("/proc/sys/kernel/random/boot_id");
    Ok(fs_err::read_to_string(path)
        .at("read", path)?
        .trim()
        .to_owned())
}

/// When a process started, in clock ticks after boot; `None` if there is none (zombies count
/// as gone).
fn process_start(pid: u32) -> Option<u64> {
    let stat = fs_err::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the command in parentheses and may hold anything.
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace();
    if matches!(fields.next()?, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

/// How long a lease lives, beside what its owner said.
#[derive(Debug, Clone)]
pub(super) struct Life {
    boot: String,
    process_start: Option<u64>,
}

impl Life {
    /// Whether anybody can still be using the stack.
    pub(super) fn is_alive(&self, spec: &LeaseSpec, boot: &str) -> bool {
        self.boot == boot
            && match spec.pid {
                None => true,
                Some(pid) => {
                    self.process_start.is_some() && process_start(pid) == self.process_start
                }
            }
    }
}

impl Record {
    pub(super) fn new(info: LeaseInfo, boot: &str) -> Self {
        let process_start = info.spec.pid.and_then(process_start);
        Self {
            format: FORMAT,
            boot: boot.to_owned(),
            process_start,
            info,
        }
    }

    /// Whether anybody can still be using the stack.
    pub(super) fn is_alive(&self, boot: &str) -> bool {
        let life = Life {
            boot: self.boot.clone(),
            process_start: self.process_start,
        };
        life.is_alive(&self.info.spec, boot)
    }

    pub(super) fn into_parts(self) -> (Life, LeaseInfo) {
        let life = Life {
            boot: self.boot,
            process_start: self.process_start,
        };
        (life, self.info)
    }

    pub(super) fn from_parts(life: Life, info: LeaseInfo) -> Self {
        Self {
            format: FORMAT,
            boot: life.boot,
            process_start: life.process_start,
            info,
        }
    }

    pub(super) fn spec(&self) -> &LeaseSpec {
        &self.info.spec
    }

    fn path(dir: &Path, id: &str) -> PathBuf {
        dir.join(format!("{id}.json"))
    }

    /// Writes the record. Not durably: what a crash of the machine loses was of that boot.
    pub(super) fn save(&self, dir: &Path) -> Result<()> {
        let path = Self::path(dir, &self.info.spec.id);
        let bytes = serde_json::to_vec(self)
            .map_err(std::io::Error::other)
            .at("write", &path)?;
        crate::files::replace(dir, &path, &[&bytes], false)
    }

    /// Removes a record; it may be gone already.
    pub(super) fn remove(dir: &Path, id: &str) -> Result<()> {
        let path = Self::path(dir, id);
        match fs_err::remove_file(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(e).at("remove", &path),
            _ => Ok(()),
        }
    }

    /// All records. Unreadable ones are reported and left where they are, but for those that a
    /// crash of the machine emptied.
    pub(super) fn load_all(dir: &Path, problems: &mut Vec<String>) -> Result<Vec<Self>> {
        let mut records = Vec::new();
        for entry in fs_err::read_dir(dir).at("list", dir)? {
            let path = entry.at("list", dir)?.path();
            if path.extension().is_none_or(|e| e != "json") {
                continue;
            }
            if fs_err::metadata(&path).is_ok_and(|metadata| metadata.len() == 0) {
                fs_err::remove_file(&path).at("remove", &path)?;
                continue;
            }
            match Self::load(&path) {
                Ok(record) => records.push(record),
                Err(what) => problems.push(format!("lease {} is ignored: {what}", path.display())),
            }
        }
        records.sort_by(|a, b| a.info.spec.id.cmp(&b.info.spec.id));
        Ok(records)
    }

    fn load(path: &Path) -> Result<Self, String> {
        let len = fs_err::metadata(path).map_err(|e| e.to_string())?.len();
        if len > MAX_BYTES {
            return Err(format!("it has {len} bytes"));
        }
        let bytes = fs_err::read(path).map_err(|e| e.to_string())?;
        let record: Self = serde_json::from_slice(&bytes).map_err(|e| e.to_string())?;
        if record.format != FORMAT {
            return Err(format!("its format {} is not known", record.format));
        }
        check_id(&record.info.spec.id).map_err(|e| e.to_string())?;
        Ok(record)
    }
}
