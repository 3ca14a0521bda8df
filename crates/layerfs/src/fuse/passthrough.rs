//! Which blobs are open, and how: all opens of one blob at a time are of one kind.
//!
//! The kernel reads a blob either through us, keeping pages of the blob's file, or by itself from
//! a file that we gave it (passthrough), and refuses to do both at a time. So the first open of a
//! blob decides, and the others follow until the last one is closed.
//!
//! A session that goes on with another process's connection begins with nothing known here: a
//! blob that is open already is then taken for one that is read through us. If it is not, the
//! kernel refuses further opens of it (EIO) until it is closed. Its file is given back when its last
//! open ends, whoever answered that.

use std::collections::HashMap;
use std::os::fd::AsFd as _;

use layerpack_sys::fusedev;

use super::BlobSource;
use super::channel::Channel;
use crate::sync::{AtomicBool, Mutex, Ordering};

#[derive(Debug)]
struct Open {
    /// The kernel's number of the file that it reads by itself.
    backing: Option<u32>,
    count: u64,
}

/// The blobs that are open.
#[derive(Debug, Default)]
pub(crate) struct Opens {
    blobs: Mutex<HashMap<u64, Open>>,
    /// The kernel took no file: it is not asked again.
    refused: AtomicBool,
}

impl Opens {
    /// Counts an open. Gives the number of the file that the kernel is to read by itself, if it
    /// is. `may_lend` says whether a blob that nobody has open may be read so.
    pub(crate) fn begin(
        &self,
        channel: &Channel,
        source: &dyn BlobSource,
        node: u64,
        may_lend: bool,
    ) -> Option<u32> {
        let mut blobs = self.blobs.lock();
        if let Some(open) = blobs.get_mut(&node) {
            open.count += 1;
            return open.backing;
        }
        let backing = if may_lend && !self.refused.load(Ordering::Relaxed) {
            self.lend(channel, source, node)
        } else {
            None
        };
        blobs.insert(node, Open { backing, count: 1 });
        backing
    }

    fn lend(&self, channel: &Channel, source: &dyn BlobSource, node: u64) -> Option<u32> {
        let file = source.lend(node)?;
        match fusedev::backing_open(channel.as_fd(), file.as_fd()) {
            Ok(backing) => Some(backing),
            Err(e) => {
                source.give_back(node);
                if !self.refused.swap(true, Ordering::Relaxed) {
                    tracing::info!(error = %e,
                        "the kernel takes no files to read by itself: all data goes through this process");
                }
                None
            }
        }
    }

    /// Counts the end of an open.
    pub(crate) fn end(&self, channel: &Channel, source: &dyn BlobSource, node: u64) {
        let mut blobs = self.blobs.lock();
        let Some(open) = blobs.get_mut(&node) else {
            // An earlier process answered that open.
            return source.closed(node);
        };
        open.count -= 1;
        if open.count > 0 {
            return;
        }
        if let Some(backing) = open.backing {
            if let Err(e) = fusedev::backing_close(channel.as_fd(), backing) {
                tracing::debug!(node, error = %e, "the kernel keeps a file that it need not read");
            }
            source.give_back(node);
        }
        blobs.remove(&node);
        source.closed(node);
    }
}
