//! Answers how a seccomp filter would treat a system call, without a call that the filter could punish. Runs the part
//! of classic BPF that the kernel accepts in filters (seccomp(2); Linux, kernel/seccomp.c, `seccomp_check_filter`).

use libc::{c_long, sock_filter};

/// A system call as a filter sees it.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// The number of the system call.
    pub number: c_long,
    /// The arguments, as far as filters may check them.
    pub arguments: [u64; 6],
}

/// This machine's word for filters (linux/audit.h): the ELF machine, 64 bits, little-endian.
#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: u32 = 62 | 0xc000_0000;
#[cfg(target_arch = "aarch64")]
const ARCHITECTURE: u32 = 183 | 0xc000_0000;

/// The actions in a filter's result (linux/seccomp.h).
const ACTION: u32 = 0xffff_0000;
const ALLOW: u32 = 0x7fff_0000;
const LOG: u32 = 0x7ffc_0000;
const ERRNO: u32 = 0x0005_0000;

/// A filter's answer to a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The call is carried out.
    Allowed,
    /// The call fails with an errno.
    Fails,
    /// The call ends the thread or the process, raises a signal, or goes to another process; or the answer is not
    /// known.
    Other,
}

/// Returns what `filter` answers to `call`.
pub fn answer(filter: &[sock_filter], call: &Call) -> Answer {
    match run(filter, call).map(|word| word & ACTION) {
        Some(ALLOW | LOG) => Answer::Allowed,
        Some(ERRNO) => Answer::Fails,
        _ => Answer::Other,
    }
}

/// Returns a word of `struct seccomp_data`. The caller's address is not known, and is 0. `None` for an offset that the
/// kernel refuses.
fn load(call: &Call, offset: u32) -> Option<u32> {
    let half = |of: u64| (of >> (offset % 8 * 8)) as u32;
    match offset {
        0 => Some(call.number as u32),
        4 => Some(ARCHITECTURE),
        8 | 12 => Some(0),
        16..64 if offset.is_multiple_of(4) => call.arguments.get((offset as usize - 16) / 8).map(|a| half(*a)),
        _ => None,
    }
}

/// Runs the filter. It ends, since jumps only lead forward. `None` if the kernel would not accept the filter.
fn run(filter: &[sock_filter], call: &Call) -> Option<u32> {
    /// `sizeof(struct seccomp_data)`
    const LENGTH: u32 = 64;
    let (mut a, mut x) = (0u32, 0u32);
    let mut memory = [0u32; 16];
    let mut at = 0usize;
    loop {
        let step = filter.get(at)?;
        at += 1;
        let k = step.k;
        // linux/bpf_common.h: the lowest three bits are the class.
        match step.code {
            0x20 => a = load(call, k)?,
            0x80 => a = LENGTH,
            0x81 => x = LENGTH,
            0x00 => a = k,
            0x01 => x = k,
            0x60 => a = *memory.get(k as usize)?,
            0x61 => x = *memory.get(k as usize)?,
            0x02 => *memory.get_mut(k as usize)? = a,
            0x03 => *memory.get_mut(k as usize)? = x,
            0x07 => x = a,
            0x87 => a = x,
            0x84 => a = a.wrapping_neg(),
            0x06 => return Some(k),
            0x16 => return Some(a),
            code if code & 7 == 4 => {
                let by = if code & 8 == 0 { k } else { x };
                a = match code & 0xf0 {
                    0x00 => a.wrapping_add(by),
                    0x10 => a.wrapping_sub(by),
                    0x20 => a.wrapping_mul(by),
                    0x30 => a.checked_div(by)?,
                    0x40 => a | by,
                    0x50 => a & by,
                    0x60 => a.checked_shl(by)?,
                    0x70 => a.checked_shr(by)?,
                    0xa0 => a ^ by,
                    _ => return None,
                };
            }
            0x05 => at = at.checked_add(k as usize)?,
            code if code & 7 == 5 => {
                let with = if code & 8 == 0 { k } else { x };
                let is_true = match code & 0xf0 {
                    0x10 => a == with,
                    0x20 => a > with,
                    0x30 => a >= with,
                    0x40 => a & with != 0,
                    _ => return None,
                };
                at += usize::from(if is_true { step.jt } else { step.jf });
            }
            _ => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn step(code: u16, jt: u8, jf: u8, k: u32) -> sock_filter {
        sock_filter { code, jt, jf, k }
    }

    fn call(number: c_long, first: u64) -> Call {
        Call {
            number,
            arguments: [first, 0, 0, 0, 0, 0],
        }
    }

    const KILL: u32 = 0x8000_0000;

    #[test]
    fn an_allow_list_allows_what_is_on_it() {
        let filter = [
            step(0x20, 0, 0, 4),
            step(0x15, 1, 0, ARCHITECTURE),
            step(0x06, 0, 0, KILL),
            step(0x20, 0, 0, 0),
            step(0x15, 0, 1, libc::SYS_read as u32),
            step(0x06, 0, 0, ALLOW),
            step(0x15, 0, 1, libc::SYS_clone3 as u32),
            step(0x06, 0, 0, ERRNO | 38),
            step(0x06, 0, 0, KILL),
        ];
        let of = |number| answer(&filter, &call(number, 0));
        assert_eq!(of(libc::SYS_read), Answer::Allowed);
        assert_eq!(of(libc::SYS_clone3), Answer::Fails);
        assert_eq!(of(libc::SYS_write), Answer::Other);
    }

    #[test]
    fn arguments_are_seen_in_halves() {
        // The upper half of the first argument has to be 7, and the lower half to have bit 1 after a shift.
        let filter = [
            step(0x20, 0, 0, 20),
            step(0x15, 0, 5, 7),
            step(0x20, 0, 0, 16),
            step(0x74, 0, 0, 3),
            step(0x07, 0, 0, 0),
            step(0x87, 0, 0, 0),
            step(0x45, 1, 0, 1),
            step(0x06, 0, 0, KILL),
            step(0x06, 0, 0, LOG),
        ];
        let of = |first| answer(&filter, &call(0, first));
        assert_eq!(of(7 << 32 | 8), Answer::Allowed);
        assert_eq!(of(7 << 32 | 4), Answer::Other);
        assert_eq!(of(8), Answer::Other);
    }

    #[test]
    fn what_is_no_filter_allows_nothing() {
        for odd in [
            &[][..],
            &[step(0x00, 0, 0, ALLOW)],
            &[step(0x05, 0, 0, u32::MAX)],
            &[step(0x15, 200, 200, 0)],
            &[step(0x20, 0, 0, 2)],
            &[step(0x20, 0, 0, 64)],
            &[step(0x34, 0, 0, 0), step(0x06, 0, 0, ALLOW)],
            &[step(0x02, 0, 0, 16), step(0x06, 0, 0, ALLOW)],
            &[step(0x28, 0, 0, 0), step(0x06, 0, 0, ALLOW)],
        ] {
            assert_eq!(answer(odd, &call(0, 0)), Answer::Other);
        }
    }
}
