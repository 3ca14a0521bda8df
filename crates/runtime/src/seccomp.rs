//! The system call filter of sandboxes: an allow list with the meaning of
//! docker's default profile, compiled to classic BPF.
//!
//! The program is a binary search over intervals of call numbers, so that a
//! call costs about eight comparisons (and none once the kernel has cached
//! that a number is always allowed). Answers:
//! * listed calls pass, some only with harmless arguments;
//! * other calls up to [`profile::NEWEST_KNOWN`] fail with `EPERM`;
//! * newer calls, `clone3` (whose flags a filter cannot see), x32 and 32-bit
//!   calls fail with `ENOSYS`, on which libraries fall back to older calls.

mod profile;

use std::collections::BTreeMap;

use layerpack_sys::process::BpfInstruction;

const LOAD_WORD: u16 = 0x20; // BPF_LD | BPF_W | BPF_ABS
const JUMP_EQUAL: u16 = 0x15; // BPF_JMP | BPF_JEQ | BPF_K
const JUMP_AT_LEAST: u16 = 0x35; // BPF_JMP | BPF_JGE | BPF_K
const JUMP_ANY_BIT: u16 = 0x45; // BPF_JMP | BPF_JSET | BPF_K
const RETURN: u16 = 0x06; // BPF_RET | BPF_K

const ALLOW: u32 = 0x7fff_0000;
const ERRNO: u32 = 0x0005_0000;
const EPERM: u32 = 1;
const ENOSYS: u32 = 38;

// Offsets in `struct seccomp_data`.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const ARGUMENTS: u32 = 16;

#[cfg(target_arch = "x86_64")]
const NATIVE: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const NATIVE: u32 = 0xc000_00b7;

/// Numbers from here on are x32 calls.
#[cfg(target_arch = "x86_64")]
const FOREIGN_FROM: u32 = 0x4000_0000;
#[cfg(target_arch = "aarch64")]
const FOREIGN_FROM: u32 = 0xffff_ffff;

/// What happens on a system call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    Allow,
    Deny,
    Unknown,
    /// Allowed if argument 0 has none of these bits.
    WithoutBits(u32),
    /// Allowed if argument 0 is one of these values.
    OneOf(&'static [u32]),
    /// Allowed if argument 0 is not this value.
    NotValue(u32),
}

const fn op(code: u16, k: u32, jt: u8, jf: u8) -> BpfInstruction {
    BpfInstruction { code, jt, jf, k }
}

impl Action {
    /// The instructions that decide; each path ends in a return.
    fn emit(self) -> Vec<BpfInstruction> {
        let argument = op(LOAD_WORD, ARGUMENTS, 0, 0);
        let allow = op(RETURN, ALLOW, 0, 0);
        let deny = op(RETURN, ERRNO | EPERM, 0, 0);
        match self {
            Self::Allow => vec![allow],
            Self::Deny => vec![deny],
            Self::Unknown => vec![op(RETURN, ERRNO | ENOSYS, 0, 0)],
            Self::WithoutBits(bits) => {
                vec![argument, op(JUMP_ANY_BIT, bits, 1, 0), allow, deny]
            }
            Self::NotValue(value) => vec![argument, op(JUMP_EQUAL, value, 1, 0), allow, deny],
            Self::OneOf(values) => {
                let mut out = vec![argument];
                for value in values {
                    out.extend([op(JUMP_EQUAL, *value, 0, 1), allow]);
                }
                out.push(deny);
                out
            }
        }
    }
}

/// The default filter.
pub(crate) fn default_filter() -> Vec<BpfInstruction> {
    let mut out = vec![
        op(LOAD_WORD, ARCHITECTURE, 0, 0),
        op(JUMP_EQUAL, NATIVE, 1, 0),
        op(RETURN, ERRNO | ENOSYS, 0, 0),
        op(LOAD_WORD, NUMBER, 0, 0),
    ];
    out.extend(search(&intervals()));
    out
}

/// Where the action changes, by ascending call number, beginning with 0.
fn intervals() -> Vec<(u32, Action)> {
    let actions: BTreeMap<u32, Action> = profile::actions().collect();
    let mut out: Vec<(u32, Action)> = Vec::new();
    let mut push = |from: u32, action: Action| {
        if out.last().is_none_or(|(_, last)| *last != action) {
            out.push((from, action));
        }
    };
    let mut next = 0;
    for (&number, &action) in &actions {
        if number > next {
            push(next, Action::Deny);
        }
        push(number, action);
        next = number + 1;
    }
    if next <= profile::NEWEST_KNOWN {
        push(next, Action::Deny);
    }
    push(profile::NEWEST_KNOWN + 1, Action::Unknown);
    push(FOREIGN_FROM, Action::Unknown);
    out
}

/// Binary search for the last interval that begins at or before the number.
fn search(intervals: &[(u32, Action)]) -> Vec<BpfInstruction> {
    let (low, high) = intervals.split_at(intervals.len() / 2);
    let Some(&(from, action)) = high.first() else {
        return Vec::new();
    };
    if low.is_empty() {
        return action.emit();
    }
    let (low, high) = (search(low), search(high));
    // Halves stay below 255 instructions: there are about 120 intervals. A
    // longer list would fail every test that runs the filter.
    let skip = u8::try_from(low.len()).unwrap_or(u8::MAX);
    let mut out = vec![op(JUMP_AT_LEAST, from, skip, 0)];
    out.extend(low);
    out.extend(high);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Interprets the program as the kernel does.
    fn run(program: &[BpfInstruction], arch: u32, number: u32, argument: u32) -> u32 {
        let (mut at, mut accumulator) = (0usize, 0u32);
        for _ in 0..program.len() {
            let i = program[at];
            at += 1;
            let jump = |holds: bool| usize::from(if holds { i.jt } else { i.jf });
            match i.code {
                LOAD_WORD => {
                    accumulator = match i.k {
                        NUMBER => number,
                        ARCHITECTURE => arch,
                        ARGUMENTS => argument,
                        other => panic!("load of {other}"),
                    }
                }
                JUMP_EQUAL => at += jump(accumulator == i.k),
                JUMP_AT_LEAST => at += jump(accumulator >= i.k),
                JUMP_ANY_BIT => at += jump(accumulator & i.k != 0),
                RETURN => return i.k,
                other => panic!("operation {other:#x}"),
            }
        }
        panic!("no return");
    }

    fn sys(number: libc::c_long) -> u32 {
        u32::try_from(number).unwrap()
    }

    #[test]
    fn every_number_gets_the_action_of_the_profile() {
        let program = default_filter();
        assert!(program.len() < 1000, "{}", program.len());
        let actions: BTreeMap<u32, Action> = profile::actions().collect();
        for number in 0..1000u32 {
            let expected = match actions.get(&number) {
                Some(Action::Allow) => ALLOW,
                None if number > profile::NEWEST_KNOWN => ERRNO | ENOSYS,
                None | Some(Action::Deny) => ERRNO | EPERM,
                Some(Action::Unknown) => ERRNO | ENOSYS,
                Some(_) => continue,
            };
            assert_eq!(run(&program, NATIVE, number, 0), expected, "call {number}");
        }
    }

    #[test]
    fn arguments_decide_where_they_must() {
        let program = default_filter();
        let ask = |number, argument| run(&program, NATIVE, sys(number), argument);
        let deny = ERRNO | EPERM;
        assert_eq!(ask(libc::SYS_clone, 0x0012_0f11 & !0x2_0000), ALLOW);
        for flag in [
            0x2_0000,
            0x200_0000,
            0x400_0000,
            0x800_0000,
            0x1000_0000,
            0x2000_0000,
            0x4000_0000,
        ] {
            assert_eq!(ask(libc::SYS_clone, flag | 17), deny, "{flag:#x}");
        }
        assert_eq!(ask(libc::SYS_personality, 0), ALLOW);
        assert_eq!(ask(libc::SYS_personality, 0xffff_ffff), ALLOW);
        assert_eq!(ask(libc::SYS_personality, 0x004_0000), deny);
        assert_eq!(ask(libc::SYS_socket, 2), ALLOW);
        assert_eq!(ask(libc::SYS_socket, 40), deny);
    }

    #[test]
    fn dangerous_calls_are_refused_and_new_ones_unknown() {
        let program = default_filter();
        let ask = |number| run(&program, NATIVE, sys(number), 0);
        for number in [
            libc::SYS_mount,
            libc::SYS_umount2,
            libc::SYS_pivot_root,
            libc::SYS_move_mount,
            libc::SYS_open_tree,
            libc::SYS_fsopen,
            libc::SYS_mount_setattr,
            libc::SYS_keyctl,
            libc::SYS_add_key,
            libc::SYS_request_key,
            libc::SYS_bpf,
            libc::SYS_perf_event_open,
            libc::SYS_unshare,
            libc::SYS_setns,
            libc::SYS_init_module,
            libc::SYS_kexec_load,
            libc::SYS_reboot,
            libc::SYS_swapon,
            libc::SYS_open_by_handle_at,
            libc::SYS_userfaultfd,
            libc::SYS_io_uring_setup,
            libc::SYS_settimeofday,
            libc::SYS_acct,
            libc::SYS_quotactl,
        ] {
            assert_eq!(ask(number), ERRNO | EPERM, "call {number}");
        }
        assert_eq!(ask(libc::SYS_clone3), ERRNO | ENOSYS);
        assert_eq!(run(&program, 0x4000_0003, 1, 0), ERRNO | ENOSYS);
        assert_eq!(run(&program, NATIVE, 0x4000_0001, 0), ERRNO | ENOSYS);
        assert_eq!(run(&program, NATIVE, 100_000, 0), ERRNO | ENOSYS);
    }
}
