//! The hook of `vfork`. `rdmasock_shims::sys::vfork` recognises a vfork child by the record that the hook makes.
//!
//! The child returns from vfork on its parent's stack, and its next call overwrites the frame of vfork. So the parent
//! may need nothing in that frame after the system call. The return address stays in a register that the system call
//! preserves, as in glibc's own vfork.

use core::arch::naked_asm;

use rdmasock_shims::sys::vfork::{done, prepare};

/// Makes a child that shares this process's memory until it execs or ends, as vfork(2) does.
///
/// # Safety
/// As vfork: the child may only exec or `_exit`.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn vfork() -> libc::pid_t {
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
    )
}

/// Does the same under glibc's other name for `vfork`.
///
/// # Safety
/// As vfork: the child may only exec or `_exit`.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn __vfork() -> libc::pid_t {
    naked_asm!("jmp {vfork}", vfork = sym vfork);
}
