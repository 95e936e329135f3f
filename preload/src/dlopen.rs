//! The hooks of `dlopen`, `dlmopen`, `dlsym` and `dlvsym`. `rdmasock_shims::hooks::dlopen` does the work.
//!
//! The hooks are naked functions, because libc finds the calling library by the return address: `dlopen` searches the
//! caller's RUNPATH, and RTLD_NEXT means the libraries behind the caller. So each hook first calls its `before_`
//! function. Then it jumps to the function that this has returned, with the caller's arguments and stack.

use core::arch::naked_asm;

use libc::{c_char, c_int, c_void};
use rdmasock_shims::hooks::dlopen::{before_dlmopen, before_dlopen, before_dlsym, before_dlvsym};
use rdmasock_shims::sys::real::Lmid;

macro_rules! jumps {
    ($($name:ident($($arg:ident: $type:ty),*) before $before:ident;)*) => {$(
        /// Does what libc's function of this name does.
        ///
        /// # Safety
        /// As for libc's function: names are C strings, and a handle is valid.
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub(crate) unsafe extern "C" fn $name($($arg: $type),*) -> *mut c_void {
            naked_asm!(
                ".cfi_startproc",
                "push rdi",
                "push rsi",
                "push rdx",
                ".cfi_adjust_cfa_offset 24",
                "call {before}",
                "pop rdx",
                "pop rsi",
                "pop rdi",
                ".cfi_adjust_cfa_offset -24",
                "jmp rax",
                ".cfi_endproc",
                before = sym $before,
            )
        }
    )*};
}

jumps! {
    dlopen(path: *const c_char, flags: c_int) before before_dlopen;
    dlmopen(namespace: Lmid, path: *const c_char, flags: c_int) before before_dlmopen;
    dlsym(handle: *mut c_void, name: *const c_char) before before_dlsym;
    dlvsym(handle: *mut c_void, name: *const c_char, version: *const c_char) before before_dlvsym;
}
