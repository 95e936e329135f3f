//! The hooks of `longjmp` and its kin. Implementation: `rdmasock_shims::jump`. Not with redhook: its `catch_unwind`
//! would be jumped over.

use libc::{c_int, c_void};
use rdmasock_shims::jump::before;
use rdmasock_shims::real;

macro_rules! jumps {
    ($($name:ident),+) => {
        $(
            #[doc = concat!("`", stringify!($name), "(3)`; does not return.")]
            ///
            /// # Safety
            /// As libc's.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name(environment: *mut c_void, value: c_int) {
                // SAFETY: the caller's arguments, as they are.
                unsafe {
                    before(environment, value);
                    real::$name()(environment, value);
                }
            }
        )+
    };
}

jumps!(longjmp, _longjmp, siglongjmp, __longjmp_chk);
