//! The allocator of the C library, which keeps what is freed for later unless it is told.

/// Allocations from this size on have pages of their own, which go back to the system when they are
/// freed.
#[cfg(target_env = "gnu")]
const OWN_PAGES: libc::c_int = 2 << 20;
/// Free bytes at the end of a heap that are kept. Threads have heaps of their own.
#[cfg(target_env = "gnu")]
const KEPT: libc::c_int = 1 << 20;

/// Has the allocator give large pieces of memory back when they are freed. glibc else takes the
/// first of them that is freed for a sign that more of its size will come, and keeps up to 64 MiB.
/// For the whole process; does nothing with another C library.
pub fn return_large() {
    #[cfg(target_env = "gnu")]
    // SAFETY: `mallopt` takes numbers, may be called at any time, and refuses what it does not know.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, OWN_PAGES);
        libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT);
    }
}

/// Gives all whole free pages back to the system: for the moment after much was freed. Does nothing
/// with another C library than glibc.
pub fn trim() {
    #[cfg(target_env = "gnu")]
    // SAFETY: `malloc_trim` takes a number, may be called from any thread at any time, and touches
    // nothing that is in use.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Resident bytes of this process.
    fn resident() -> u64 {
        let text = fs_err::read_to_string("/proc/self/status").unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.unwrap().trim().trim_end_matches(" kB");
        kib.parse::<u64>().unwrap() << 10
    }

    #[test]
    #[cfg(target_env = "gnu")]
    fn what_is_freed_goes_back() {
        return_large();
        // Many small pieces with one that stays after them, so that the heap does not shrink by
        // itself.
        let many: Vec<Box<[u8]>> = (0..40_000)
            .map(|_| vec![1; 2000].into_boxed_slice())
            .collect();
        let last = std::hint::black_box(vec![1_u8; 2000].into_boxed_slice());
        let full = resident();
        drop(many);
        trim();
        let after = resident();
        assert!(after + (40 << 20) < full, "{full} bytes, then {after}");
        drop(last);
    }
}
