//! Blobs that are here as a whole, lent to the kernel: it reads the cache file by itself.

use std::os::fd::OwnedFd;

use super::blob::Blob;
use crate::cache::ConnectionId;

impl Blob {
    /// The cache file, if the kernel may read it by itself from now on: all of it is here and
    /// verified, nobody records reads, and the cache is far from its limit (what is lent is not
    /// evicted).
    #[must_use]
    pub fn lend(&self, connection: Option<ConnectionId>) -> Option<OwnedFd> {
        if self.taps.loud() {
            return None;
        }
        let space = self.fetcher.space();
        if space.max.is_some_and(|max| space.used > max / 2) {
            return None;
        }
        self.cache.lend(connection)
    }

    /// The kernel has closed all that was lent over this connection, by whatever process.
    pub(crate) fn thaw(&self, connection: ConnectionId) {
        self.cache.thaw(connection);
    }

    /// The kernel has closed what was lent.
    pub fn give_back(&self) {
        self.cache.give_back();
    }
}
