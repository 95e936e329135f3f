//! fork and clone by number. A child with memory and descriptors of its own is treated like a child of fork(3): the
//! library's handlers run, though no handler of `pthread_atfork` does. A call whose child shares either with its parent
//! goes on to libc by a jump.

use core::ffi::c_long;

use libc::c_int;
use rdmasock_core::os::kernel;
use rustix::io::Errno;

use super::own::LIBC;
use super::ways::{Handler, result};
use crate::notify::fork;
use crate::sys::vfork;

pub(super) const FORKS: &[(c_long, Handler)] = &[
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_fork, fork_by_number),
    (libc::SYS_clone, clone),
    (libc::SYS_clone3, clone3),
];

/// The flags by which a child shares memory or descriptors with its parent.
const SHARES: c_int = libc::CLONE_VM | libc::CLONE_FILES;

/// `by_number!(NAME NUMBER OWN: X86_64; AARCH64)`: a handler that goes to `OWN` if the instructions find that the child
/// is like a child of fork(3). It jumps to libc's `syscall` if they come to the label 2.
///
/// Naked, since the child of a clone that shares the memory, or is given a stack, returns on another stack (see
/// `preload/src/syscall.rs`). The moves of the arguments there are undone here.
macro_rules! by_number {
    ($name:ident $number:ident $own:ident: $($x86_64:literal)*; $($aarch64:literal)*) => {
        #[cfg(target_arch = "x86_64")]
        #[unsafe(naked)]
        unsafe extern "C" fn $name(_: usize, _: usize, _: usize, _: usize, _: usize, _: usize) -> c_long {
            core::arch::naked_asm!(
                ".cfi_startproc",
                $($x86_64,)*
                "jz {own}",
                "2: mov r9, r8",
                "mov r8, rcx",
                "mov rcx, rdx",
                "mov rdx, rsi",
                "mov rsi, rdi",
                "mov edi, {NUMBER}",
                "jmp [rip + {LIBC}]",
                ".cfi_endproc",
                SHARES = const SHARES,
                NUMBER = const libc::$number,
                own = sym $own,
                LIBC = sym LIBC,
            )
        }

        #[cfg(target_arch = "aarch64")]
        #[unsafe(naked)]
        unsafe extern "C" fn $name(_: usize, _: usize, _: usize, _: usize, _: usize, _: usize) -> c_long {
            core::arch::naked_asm!(
                ".cfi_startproc",
                "mov w16, {SHARES}",
                $($aarch64,)*
                "b {own}",
                "2: mov x5, x4",
                "mov x4, x3",
                "mov x3, x2",
                "mov x2, x1",
                "mov x1, x0",
                "mov x0, {NUMBER}",
                "adrp x16, {LIBC}",
                "ldr x16, [x16, :lo12:{LIBC}]",
                "br x16",
                ".cfi_endproc",
                SHARES = const SHARES,
                NUMBER = const libc::$number,
                own = sym $own,
                LIBC = sym LIBC,
            )
        }
    };
}

by_number! { clone SYS_clone clone_of_its_own:
    "test edi, {SHARES}" "jnz 2f" "test rsi, rsi";
    "tst w0, w16" "b.ne 2f" "cbnz x1, 2f"
}

// Of clone_args, the flags lie at 0 and the stack at 40 (linux/sched.h).
by_number! { clone3 SYS_clone3 clone3_of_its_own:
    "test rdi, rdi" "jz 2f" "test dword ptr [rdi], {SHARES}" "jnz 2f" "cmp qword ptr [rdi + 40], 0";
    "cbz x0, 2f" "ldr w17, [x0]" "tst w17, w16" "b.ne 2f" "ldr x17, [x0, #40]" "cbnz x17, 2f"
}

unsafe extern "C" fn clone_of_its_own(a: usize, b: usize, c: usize, d: usize, e: usize, _: usize) -> c_long {
    // SAFETY: the program's own call; nothing is shared, and the child goes on here, on a copy of this stack.
    forked(|| unsafe { kernel::call(libc::SYS_clone, [a, b, c, d, e, 0]) })
}

unsafe extern "C" fn clone3_of_its_own(a: usize, b: usize, _: usize, _: usize, _: usize, _: usize) -> c_long {
    // SAFETY: as in `clone_of_its_own`.
    forked(|| unsafe { kernel::call(libc::SYS_clone3, [a, b, 0, 0, 0, 0]) })
}

#[cfg(target_arch = "x86_64")]
unsafe extern "C" fn fork_by_number(_: usize, _: usize, _: usize, _: usize, _: usize, _: usize) -> c_long {
    // SAFETY: the program's own call.
    forked(|| unsafe { kernel::call(libc::SYS_fork, [0; 6]) })
}

/// Makes the call as `_Fork(3)` does, with the library's handlers around it. No handler runs if the calling process
/// began unseen by any hook, and so runs on memory that may not be its own.
fn forked(call: impl FnOnce() -> Result<usize, Errno>) -> c_long {
    if vfork::is_stranger() {
        return result(call());
    }
    // The kernel's value, as is, in which an errno is negative.
    let made = fork::around(|| call().map_or_else(|e| -e.raw_os_error() as isize, |pid| pid as isize));
    result(usize::try_from(made).map_err(|_| Errno::from_raw_os_error(-made as i32)))
}
