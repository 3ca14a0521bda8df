//! Small files of the node's state, replaced as a whole.

use std::io::Write;
use std::path::Path;

use crate::error::{IoContext, Result};
use crate::sync::{AtomicU64, Ordering};

/// Numbers the temporaries of this process.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// Replaces `path` (in `dir`) by the joined `parts`, atomically; durably if `sync`.
pub(crate) fn replace(dir: &Path, path: &Path, parts: &[&[u8]], sync: bool) -> Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    // Two threads may replace one file at a time: each has a temporary of its own.
    name.push(format!(".{}.new", NEXT.fetch_add(1, Ordering::Relaxed)));
    let temporary = dir.join(name);
    let mut file = fs_err::File::create(&temporary).at("create", &temporary)?;
    let written = parts
        .iter()
        .try_for_each(|part| file.write_all(part))
        .and_then(|()| if sync { file.sync_all() } else { Ok(()) })
        .and_then(|()| fs_err::rename(&temporary, path));
    if let Err(e) = written {
        let _ = fs_err::remove_file(&temporary);
        return Err(e).at("write", path);
    }
    if sync {
        fs_err::File::open(dir)
            .and_then(|d| d.sync_all())
            .at("sync", dir)?;
    }
    Ok(())
}
