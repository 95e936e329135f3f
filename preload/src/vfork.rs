//! The hook of `vfork`, by which `rdmasock_shims::sys::vfork` recognises a vfork child.
//!
//! The child returns from vfork on its parent's stack, and its next call overwrites the frame that it
//! returned from. So that frame holds nothing that the parent needs after the system call: the return
//! address stays in a register that the system call preserves, as in glibc's own vfork.

use core::arch::naked_asm;

use rdmasock_shims::sys::vfork::{done, prepare};

/// Makes a child that shares this process's memory until it execs or ends, as `vfork(2)`.
///
/// # Safety
/// As vfork: the child may only exec or `_exit`.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn vfork() -> libc::pid_t {
    #[cfg(target_arch = "x86_64")]
    naked_asm!(
        ".cfi_startproc",
        "sub rsp, 8", // A call needs rsp at a multiple of 16.
        ".cfi_adjust_cfa_offset 8",
        "call {prepare}",
        "add rsp, 8",
        ".cfi_adjust_cfa_offset -8",
        "pop rdi",
        ".cfi_adjust_cfa_offset -8",
        ".cfi_register rip, rdi",
        "mov eax, {SYS_vfork}",
        "syscall",
        "push rdi",
        ".cfi_adjust_cfa_offset 8",
        ".cfi_offset rip, -8",
        "test rax, rax",
        "jz 2f",
        "mov rdi, rax",
        "jmp {done}",
        "2: ret",
        ".cfi_endproc",
        prepare = sym prepare,
        done = sym done,
        SYS_vfork = const libc::SYS_vfork,
    );
    #[cfg(target_arch = "aarch64")]
    naked_asm!(
        ".cfi_startproc",
        "stp x29, x30, [sp, #-16]!",
        ".cfi_def_cfa_offset 16",
        ".cfi_offset x29, -16",
        ".cfi_offset x30, -8",
        "mov x29, sp",
        "bl {prepare}",
        "ldp x29, x30, [sp], #16",
        ".cfi_def_cfa_offset 0",
        ".cfi_restore x29",
        ".cfi_restore x30",
        "mov x0, {flags}",
        "mov x1, xzr", // The parent's stack.
        "mov x8, {SYS_clone}",
        "svc #0",
        "cbz x0, 2f",
        "b {done}",
        "2: ret",
        ".cfi_endproc",
        prepare = sym prepare,
        done = sym done,
        flags = const libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD,
        SYS_clone = const libc::SYS_clone,
    );
}

/// Does the same under glibc's other name for `vfork`.
///
/// # Safety
/// As vfork: the child may only exec or `_exit`.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn __vfork() -> libc::pid_t {
    #[cfg(target_arch = "x86_64")]
    naked_asm!("jmp {vfork}", vfork = sym vfork);
    #[cfg(target_arch = "aarch64")]
    naked_asm!("b {vfork}", vfork = sym vfork);
}
