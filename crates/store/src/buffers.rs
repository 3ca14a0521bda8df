//! Buffers that are used again while frames are read: bodies of requests and raw frames. Fresh
//! memory for each would have to be cleared by the system page by page, which costs as much as
//! decompressing does. Kept only while somebody reads, and no more than [`MOST`].

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Most bytes that lie unused.
const MOST: usize = 32 << 20;
/// Smaller ones are not worth keeping.
const LEAST: usize = 32 << 10;
/// Capacities are multiples of this, so that one fits the next frame too.
const STEP: usize = 64 << 10;

#[derive(Debug)]
struct Pool {
    /// Reads under way.
    readers: usize,
    /// Capacity of all that is free.
    bytes: usize,
    free: Vec<Vec<u8>>,
}

static POOL: Mutex<Pool> = Mutex::new(Pool {
    readers: 0,
    bytes: 0,
    free: Vec::new(),
});

fn pool() -> MutexGuard<'static, Pool> {
    // What it holds is of no meaning, and its sum is right between two calls of `Vec`.
    POOL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A read under way: buffers are kept until the last one ends.
#[derive(Debug)]
pub(crate) struct Reading(());

impl Reading {
    pub(crate) fn begin() -> Self {
        pool().readers += 1;
        Self(())
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        let mut pool = pool();
        pool.readers = pool.readers.saturating_sub(1);
        if pool.readers > 0 {
            return;
        }
        pool.bytes = 0;
        let free = std::mem::take(&mut pool.free);
        drop(pool);
        drop(free);
    }
}

/// An empty buffer of at least this capacity.
pub(crate) fn take(capacity: usize) -> Vec<u8> {
    if capacity < LEAST {
        return Vec::with_capacity(capacity);
    }
    let mut pool = pool();
    if pool.readers == 0 {
        drop(pool);
        return Vec::with_capacity(capacity);
    }
    let fits = |buffer: &Vec<u8>| {
        (capacity..=capacity.saturating_mul(2).saturating_add(STEP)).contains(&buffer.capacity())
    };
    if let Some(at) = pool.free.iter().rposition(fits) {
        let mut buffer = pool.free.swap_remove(at);
        pool.bytes = pool.bytes.saturating_sub(buffer.capacity());
        buffer.clear();
        return buffer;
    }
    drop(pool);
    Vec::with_capacity(capacity.checked_next_multiple_of(STEP).unwrap_or(capacity))
}

/// Gives a buffer back that nobody needs any more, such as a frame that
/// [`LayerStore::read_frames_with`](crate::LayerStore::read_frames_with) handed out. Dropping it
/// instead is right too, and slower.
pub fn recycle(buffer: Vec<u8>) {
    let capacity = buffer.capacity();
    if capacity < LEAST {
        return;
    }
    let mut pool = pool();
    if pool.readers == 0 || capacity > MOST {
        return;
    }
    // The oldest is of a size that nobody asks for.
    while pool.bytes.saturating_add(capacity) > MOST && !pool.free.is_empty() {
        let old = pool.free.remove(0);
        pool.bytes = pool.bytes.saturating_sub(old.capacity());
    }
    pool.bytes += capacity;
    pool.free.push(buffer);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One test, since there is one pool.
    #[test]
    fn buffers_are_kept_while_somebody_reads() {
        let outer = Reading::begin();
        let inner = Reading::begin();
        let mut buffer = take(100_000);
        assert!(buffer.is_empty() && buffer.capacity() >= 100_000);
        buffer.extend_from_slice(&[1; 100_000]);
        let place = buffer.as_ptr();
        recycle(buffer);
        let larger = take(1 << 20);
        assert!(larger.as_ptr() != place, "it is too small");
        drop(larger);
        let again = take(90_000);
        assert!(again.is_empty() && again.as_ptr() == place);
        recycle(again);
        drop(inner);
        assert_eq!(pool().free.len(), 1);
        for _ in 0..100 {
            recycle(Vec::with_capacity(1 << 20));
        }
        assert!(pool().bytes <= MOST);
        drop(outer);
        assert_eq!(pool().bytes, 0);
        assert_eq!(pool().free.len(), 0);
        recycle(Vec::with_capacity(1 << 20));
        assert_eq!(pool().free.len(), 0, "nobody reads");
    }
}
