//! The hook of `syscall`. It jumps to the handler for the number of the system call (`rdmasock_shims::hooks::syscall`).
//! If there is no handler, it jumps to libc's own `syscall`.
//!
//! The hook is a naked function, because it may not have a stack frame of its own. The child of `syscall(SYS_vfork)` or
//! of a clone returns on its parent's stack, or on another stack, where such a frame would be destroyed or missing. So
//! the hook only jumps, with an unchanged stack. A handler is a function of the system call's six arguments, so the
//! hook moves them to the registers of the first six arguments.

use core::arch::naked_asm;
use core::ffi::c_long;

use rdmasock_shims::hooks::syscall::{HANDLERS, LIBC, NUMBERS};

/// Makes the system call with the given number, as `syscall(2)`.
///
/// # Safety
/// As for libc's function: the arguments fit the number.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn syscall(number: c_long) -> c_long {
    naked_asm!(
        ".cfi_startproc",
        "cmp rdi, {NUMBERS}",
        "jae 2f",
        "lea rax, [rip + {HANDLERS}]",
        "mov rax, [rax + 8 * rdi]",
        "test rax, rax",
        "jz 2f",
        "mov rdi, rsi",
        "mov rsi, rdx",
        "mov rdx, rcx",
        "mov rcx, r8",
        "mov r8, r9",
        "mov r9, [rsp + 8]",
        "jmp rax",
        "2: jmp [rip + {LIBC}]",
        ".cfi_endproc",
        NUMBERS = const NUMBERS,
        HANDLERS = sym HANDLERS,
        LIBC = sym LIBC,
    )
}
