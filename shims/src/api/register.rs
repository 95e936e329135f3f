//! A program's own memory, registered ahead: `rdmasock_register` and `rdmasock_unregister`.

use std::ffi::c_int;

use libc::{c_void, size_t};

use crate::ahead::Known;
use crate::errno;
use crate::jump::within;
use crate::library::Library;

/// `rdmasock_register`.
pub unsafe extern "C" fn register(memory: *mut c_void, len: size_t, uses: c_int) -> c_int {
    let before = errno::get();
    // A device hears of it later, in another place.
    let start = memory.expose_provenance();
    answer(before, within(|| library()?.ahead.add(start, len, uses)))
}

/// `rdmasock_unregister`.
pub unsafe extern "C" fn unregister(memory: *mut c_void) -> c_int {
    let before = errno::get();
    answer(before, within(|| remove(memory.addr())))
}

fn remove(start: usize) -> Result<(), c_int> {
    let library = library()?;
    let registrations = library.ahead.remove(start)?;
    library.pinned.give_back(Known::end_all(registrations));
    Ok(())
}

/// `Err` where nothing is accelerated.
fn library() -> Result<&'static Library, c_int> {
    Library::ensure().ok_or(libc::ENOSYS)
}

fn answer(before: c_int, result: Result<(), c_int>) -> c_int {
    match result {
        Ok(()) => {
            errno::set(before);
            0
        }
        Err(error) => errno::fail(error),
    }
}
