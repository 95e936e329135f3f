//! The hooks of the `longjmp` functions. `rdmasock_shims::signals::jump` implements them. They are not declared by
//! redhook, because a jump would leave redhook's `catch_unwind` in the middle.

use libc::{c_int, c_void};
use rdmasock_shims::signals::jump::before;
use rdmasock_shims::sys::real;

macro_rules! jumps {
    ($($name:ident),+) => {
        $(
            /// Jumps as libc's function of this name does, and does not return.
            ///
            /// # Safety
            /// As for libc's function: `environment` was filled by setjmp, and the caller of setjmp has not returned.
            #[unsafe(no_mangle)]
            pub(crate) unsafe extern "C" fn $name(environment: *mut c_void, value: c_int) {
                // SAFETY: by this function's contract. Both calls get the caller's arguments.
                unsafe {
                    before(environment, value);
                    real::$name()(environment, value);
                }
            }
        )+
    };
}

jumps!(longjmp, _longjmp, siglongjmp, __longjmp_chk);
