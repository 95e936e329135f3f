//! libc's own `syscall`, which gets the calls that are not served.

use core::ffi::c_void;
use core::sync::atomic::{AtomicPtr, Ordering};

use crate::sys::real::SyscallFn;

/// libc's own `syscall`. Until it is known, a function that finds it and goes on there.
pub static LIBC: AtomicPtr<c_void> = AtomicPtr::new(unresolved as *mut c_void);

/// Finds libc's own `syscall`.
pub extern "C" fn resolve() -> SyscallFn {
    let function = crate::sys::real::syscall();
    LIBC.store(function as *mut c_void, Ordering::Relaxed);
    function
}

/// Stands in for libc's `syscall` before the library's constructor has run.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
unsafe extern "C" fn unresolved() {
    core::arch::naked_asm!(
        ".cfi_startproc",
        "push rdi",
        "push rsi",
        "push rdx",
        "push rcx",
        "push r8",
        "push r9",
        "sub rsp, 8", // A call needs rsp at a multiple of 16.
        ".cfi_adjust_cfa_offset 56",
        "call {resolve}",
        "add rsp, 8",
        "pop r9",
        "pop r8",
        "pop rcx",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        ".cfi_adjust_cfa_offset -56",
        "jmp rax",
        ".cfi_endproc",
        resolve = sym resolve,
    )
}

/// Stands in for libc's `syscall` before the library's constructor has run.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
unsafe extern "C" fn unresolved() {
    core::arch::naked_asm!(
        ".cfi_startproc",
        "stp x29, x30, [sp, #-80]!",
        ".cfi_def_cfa_offset 80",
        ".cfi_offset x29, -80",
        ".cfi_offset x30, -72",
        "mov x29, sp",
        "stp x0, x1, [sp, #16]",
        "stp x2, x3, [sp, #32]",
        "stp x4, x5, [sp, #48]",
        "str x6, [sp, #64]",
        "bl {resolve}",
        "mov x16, x0",
        "ldp x0, x1, [sp, #16]",
        "ldp x2, x3, [sp, #32]",
        "ldp x4, x5, [sp, #48]",
        "ldr x6, [sp, #64]",
        "ldp x29, x30, [sp], #80",
        ".cfi_def_cfa_offset 0",
        ".cfi_restore x29",
        ".cfi_restore x30",
        "br x16",
        ".cfi_endproc",
        resolve = sym resolve,
    )
}
