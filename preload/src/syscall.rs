//! The hook of `syscall`. It jumps to the handler of the call's number (`rdmasock_shims::hooks::syscall`), or to libc's
//! own `syscall`.
//!
//! The hook is a naked function, because no frame may lie between the caller and libc: the child of
//! `syscall(SYS_vfork)` or of a clone returns on its parent's stack, or on another one. So both ways are jumps with an
//! unchanged stack. A handler takes the arguments in the registers of a function with six arguments, as libc's does.

use core::arch::naked_asm;
use core::ffi::c_long;

use rdmasock_shims::hooks::syscall::{HANDLERS, LIBC, NUMBERS};

/// Makes the system call with the given number, as `syscall(2)`.
///
/// # Safety
/// As `syscall` in C: the arguments fit the number.
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
