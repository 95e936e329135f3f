//! The hooks of the `longjmp` functions. `rdmasock_shims::signals::jump` implements them. redhook does not declare
//! these, as a jump would skip its `catch_unwind`.

use libc::{c_int, c_void};
use rdmasock_shims::signals::jump::before;
use rdmasock_shims::sys::real;

macro_rules! jumps {
    ($($name:ident),+) => {
        $(
            /// Jumps as libc's function of this name does, and does not return.
            ///
            /// # Safety
            /// As libc's.
            #[unsafe(no_mangle)]
            pub(crate) unsafe extern "C" fn $name(environment: *mut c_void, value: c_int) {
                // SAFETY: the arguments are the caller's, unchanged.
                unsafe {
                    before(environment, value);
                    real::$name()(environment, value);
                }
            }
        )+
    };
}

jumps!(longjmp, _longjmp, siglongjmp, __longjmp_chk);
