//! The capabilities of a sandbox's root: docker's default set.
//!
//! They count in the sandbox's user namespace only, so they give nothing over
//! the host; they are bounded further so that less of the kernel is in reach.

/// Capability numbers of `capabilities(7)`.
const CHOWN: u64 = 1 << 0;
const DAC_OVERRIDE: u64 = 1 << 1;
const FOWNER: u64 = 1 << 3;
const FSETID: u64 = 1 << 4;
const KILL_BIT: u64 = 1 << 5;
const SETGID: u64 = 1 << 6;
const SETUID: u64 = 1 << 7;
const SETPCAP: u64 = 1 << 8;
const NET_BIND_SERVICE: u64 = 1 << 10;
const NET_RAW: u64 = 1 << 13;
const SYS_CHROOT: u64 = 1 << 18;
const MKNOD: u64 = 1 << 27;
const AUDIT_WRITE: u64 = 1 << 29;
const SETFCAP: u64 = 1 << 31;

/// What commands get.
pub(crate) const DEFAULT: u64 = CHOWN
    | DAC_OVERRIDE
    | FOWNER
    | FSETID
    | KILL_BIT
    | SETGID
    | SETUID
    | SETPCAP
    | NET_BIND_SERVICE
    | NET_RAW
    | SYS_CHROOT
    | MKNOD
    | AUDIT_WRITE
    | SETFCAP;

/// What PID 1 keeps: it passes signals on to commands of any user.
pub(crate) const KILL: u64 = KILL_BIT;

/// Everything; used before the sandbox's own limits are in place.
pub(crate) const ALL: u64 = u64::MAX;

#[cfg(test)]
mod tests {
    #[test]
    fn default_set_is_dockers() {
        // CapBnd of a docker container with default options.
        assert_eq!(super::DEFAULT, 0xa804_25fb);
    }
}
