//! The hook of `syscall`. Numbers that have a handler (`rdmasock_shims::calls::syscall`) go there, the others to libc's
//! own `syscall`.
//!
//! Naked, because nothing may lie between the caller and libc: the child of `syscall(SYS_vfork)` or of a clone returns
//! on its parent's stack, or on another one. So both ways are jumps, with the stack as it came. A handler takes
//! the arguments where a function of six has them, which is where libc's moves them too.

use core::arch::naked_asm;
use core::ffi::c_long;
use rdmasock_shims::calls::syscall::{HANDLERS, LIBC, NUMBERS};

/// `syscall(2)`.
///
/// # Safety
/// As `syscall` in C: the arguments are those of the call with this number.
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn syscall(number: c_long) -> c_long {
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

/// `syscall(2)`.
///
/// # Safety
/// As `syscall` in C: the arguments are those of the call with this number.
#[cfg(target_arch = "aarch64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn syscall(number: c_long) -> c_long {
    naked_asm!(
        ".cfi_startproc",
        "cmp x0, {NUMBERS}",
        "b.hs 2f",
        "adrp x16, {HANDLERS}",
        "add x16, x16, :lo12:{HANDLERS}",
        "ldr x16, [x16, x0, lsl #3]",
        "cbz x16, 2f",
        "mov x0, x1",
        "mov x1, x2",
        "mov x2, x3",
        "mov x3, x4",
        "mov x4, x5",
        "mov x5, x6",
        "br x16",
        "2: adrp x16, {LIBC}",
        "ldr x16, [x16, :lo12:{LIBC}]",
        "br x16",
        ".cfi_endproc",
        NUMBERS = const NUMBERS,
        HANDLERS = sym HANDLERS,
        LIBC = sym LIBC,
    )
}
