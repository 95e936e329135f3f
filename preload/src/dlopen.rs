//! The hook of `dlopen`, which sees libraries that will call libc past this one (`rdmasock_shims::calls::dlopen`).
//!
//! Naked, because libc tells by the return address whose call it is, and looks for the library where that one's RUNPATH
//! says: libc's own is jumped to, with the stack as it came.

use core::arch::naked_asm;
use libc::{c_char, c_int, c_void};
use rdmasock_shims::calls::dlopen::before;

/// `dlopen(3)`.
///
/// # Safety
/// As dlopen: `path` is null or a C string.
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void {
    naked_asm!(
        ".cfi_startproc",
        "push rdi",
        ".cfi_adjust_cfa_offset 8",
        "push rsi",
        ".cfi_adjust_cfa_offset 8",
        "sub rsp, 8",
        ".cfi_adjust_cfa_offset 8",
        "mov edi, esi",
        "call {before}",
        "add rsp, 8",
        ".cfi_adjust_cfa_offset -8",
        "pop rsi",
        ".cfi_adjust_cfa_offset -8",
        "pop rdi",
        ".cfi_adjust_cfa_offset -8",
        "jmp rax",
        ".cfi_endproc",
        before = sym before,
    )
}

/// `dlopen(3)`.
///
/// # Safety
/// As dlopen: `path` is null or a C string.
#[cfg(target_arch = "aarch64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void {
    naked_asm!(
        ".cfi_startproc",
        "stp x29, x30, [sp, -32]!",
        ".cfi_adjust_cfa_offset 32",
        "stp x0, x1, [sp, 16]",
        "mov w0, w1",
        "bl {before}",
        "mov x16, x0",
        "ldp x0, x1, [sp, 16]",
        "ldp x29, x30, [sp], 32",
        ".cfi_adjust_cfa_offset -32",
        "br x16",
        ".cfi_endproc",
        before = sym before,
    )
}
