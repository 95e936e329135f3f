//! `dlopen(3)` with RTLD_DEEPBIND: the library that is opened so finds libc's functions before those that were
//! preloaded, and no hook sees its calls. On a connection that the rest of the program has made they would miss what is
//! on a link. PHP opens its extensions so, Apache its modules.

use std::ffi::c_int;

use rdmasock_core::stats::Reason;

use crate::real::DlopenFn;
use crate::{instance, pass};

/// What is to be done before a dlopen with these flags; gives libc's own, which goes on with it.
pub extern "C" fn before(flags: c_int) -> DlopenFn {
    if flags & libc::RTLD_DEEPBIND != 0 && instance::is_on() {
        pass::all_on_tcp(Reason::DeepBind);
    }
    crate::real::dlopen()
}
