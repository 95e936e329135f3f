//! The hooks of the variadic functions `execl`, `execlp`, `execle` and `dprintf`. They are needed, because libc's
//! versions call `execve` and similar functions inside libc, where no hook sees the call.
//!
//! Stable Rust cannot define a variadic function, and the number of arguments has no bound. So each hook is a naked
//! function that stores its register arguments in memory. Then it calls an ordinary function of this file, which finds
//! all arguments in memory:
//!
//! - `execl*`: the hook removes the return address from the stack, and stores the argument registers right below the
//!   arguments that are on the stack. Both parts together are the argv of `execv`, with its terminator, for any number
//!   of arguments. No memory is copied or allocated, so these hooks are async-signal-safe.
//! - `dprintf`: the hook builds a `va_list` in the layout of the ABI (System V psABI, "Variable Argument Lists", figure
//!   3.34).
//!
//! `fcntl` and `ioctl` are ordinary hooks: they have at most one variable argument, which is passed in the same way as
//! a named argument.

use core::arch::naked_asm;

use libc::{c_char, c_int, c_void};
use rdmasock_shims::config::environment;
use rdmasock_shims::hooks::{io, process};
use rdmasock_shims::sys::real;

/// Does the work of `execl`, whose arguments are in `argv`. Returns only on failure: -1 with errno.
unsafe extern "C" fn execl_argv(path: *const c_char, argv: *const *const c_char) -> c_int {
    // SAFETY: `argv` ends with the null pointer that the caller of execl had to pass.
    unsafe { process::execv(environment::execv, path, argv) }
}

/// Does the work of `execlp`, whose arguments are in `argv`. Returns only on failure: -1 with errno.
unsafe extern "C" fn execlp_argv(file: *const c_char, argv: *const *const c_char) -> c_int {
    // SAFETY: as in `execl_argv`.
    unsafe { process::execv(environment::execvp, file, argv) }
}

/// Does the work of `execle`, whose arguments are in `argv`. The pointer to the environment follows the terminator of
/// `argv`. Returns only on failure: -1 with errno.
unsafe extern "C" fn execle_argv(path: *const c_char, argv: *const *const c_char) -> c_int {
    let mut end = argv;
    // SAFETY: `argv` ends with a null pointer, and the caller of execle passed one more pointer behind it.
    unsafe {
        while !(*end).is_null() {
            end = end.add(1);
        }
        let envp = (*end.add(1)).cast::<*const c_char>();
        process::execve(environment::execve, path, argv, envp)
    }
}

/// Does the work of `dprintf`, whose variable arguments are in `list`, a `va_list`.
unsafe extern "C" fn dprintf_list(fd: c_int, format: *const c_char, list: *mut c_void) -> c_int {
    // SAFETY: `list` is a `va_list`, and its first argument is the argument after `format`.
    unsafe { io::vdprintf(real::vdprintf(), fd, format, list) }
}

/// Does the work of `__dprintf_chk`, whose variable arguments are in `list`, a `va_list`.
unsafe extern "C" fn dprintf_chk_list(fd: c_int, flag: c_int, format: *const c_char, list: *mut c_void) -> c_int {
    // SAFETY: as in `dprintf_list`.
    unsafe { io::vdprintf_chk(real::__vdprintf_chk(), fd, flag, format, list) }
}

/// Defines the hook `$name(path, arg0, …, NULL, …)`, which calls `$argv(path, &arg0)`.
macro_rules! exec_hook {
    ($name:ident, $argv:ident) => {
        /// Does what libc's function of this name does.
        ///
        /// # Safety
        /// As for libc's function: C strings, then a null pointer.
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub(crate) unsafe extern "C" fn $name(path: *const c_char, arg0: *const c_char) -> c_int {
            naked_asm!(
                ".cfi_startproc",
                "pop rax", // The return address. The stack arguments are now at rsp.
                ".cfi_adjust_cfa_offset -8",
                ".cfi_register rip, rax",
                "push r9",
                "push r8",
                "push rcx",
                "push rdx",
                "push rsi",
                ".cfi_adjust_cfa_offset 40",
                "mov rsi, rsp",
                "push rax", // This also brings rsp back to a multiple of 16.
                ".cfi_adjust_cfa_offset 8",
                ".cfi_offset rip, -56",
                "call {argv}",
                "pop rcx",
                ".cfi_adjust_cfa_offset -8",
                ".cfi_register rip, rcx",
                "add rsp, 40",
                ".cfi_adjust_cfa_offset -40",
                "push rcx",
                ".cfi_adjust_cfa_offset 8",
                ".cfi_offset rip, -8",
                "ret",
                ".cfi_endproc",
                argv = sym $argv,
            )
        }
    };
}

exec_hook!(execl, execl_argv);
exec_hook!(execlp, execlp_argv);
exec_hook!(execle, execle_argv);

/// Defines the hook `$name`, which has `$named` named arguments and then variable ones. It calls `$list` with the named
/// arguments and a `va_list`. `$register` is the register of the argument behind the named ones, in which the address
/// of the `va_list` is passed.
macro_rules! printf_hook {
    ($name:ident($($arg:ident: $type:ty),*), $named:literal, $register:literal, $list:ident) => {
        #[doc = concat!("`", stringify!($name), "`.")]
        ///
        /// # Safety
        #[doc = concat!("As `", stringify!($name), "` in C: arguments as the format says.")]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub(crate) unsafe extern "C" fn $name($($arg: $type),*) -> c_int {
            // The frame has 216 bytes. At 0 is the va_list { u32 gp_offset, u32 fp_offset, address of the stack
            // arguments, address of the saved registers }. At 32 are the saved registers: six general and eight vector
            // registers. The last 8 bytes align the stack.
            naked_asm!(
                ".cfi_startproc",
                "sub rsp, 216",
                ".cfi_adjust_cfa_offset 216",
                "mov [rsp + 32], rdi",
                "mov [rsp + 40], rsi",
                "mov [rsp + 48], rdx",
                "mov [rsp + 56], rcx",
                "mov [rsp + 64], r8",
                "mov [rsp + 72], r9",
                "test al, al", // An upper bound for the vector registers used.
                "je 2f",
                "movaps [rsp + 80], xmm0",
                "movaps [rsp + 96], xmm1",
                "movaps [rsp + 112], xmm2",
                "movaps [rsp + 128], xmm3",
                "movaps [rsp + 144], xmm4",
                "movaps [rsp + 160], xmm5",
                "movaps [rsp + 176], xmm6",
                "movaps [rsp + 192], xmm7",
                "2:",
                "mov dword ptr [rsp], 8 * {named}",
                "mov dword ptr [rsp + 4], 48",
                "lea rax, [rsp + 224]",
                "mov [rsp + 8], rax",
                "lea rax, [rsp + 32]",
                "mov [rsp + 16], rax",
                concat!("mov ", $register, ", rsp"),
                "call {list}",
                "add rsp, 216",
                ".cfi_adjust_cfa_offset -216",
                "ret",
                ".cfi_endproc",
                named = const $named,
                list = sym $list,
            )
        }
    };
}

printf_hook!(dprintf(fd: c_int, format: *const c_char), 2, "rdx", dprintf_list);
printf_hook!(__dprintf_chk(fd: c_int, flag: c_int, format: *const c_char), 3, "rcx", dprintf_chk_list);
