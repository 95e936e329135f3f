//! The calls by which a program can get libc's functions past the hooks. They are `dlopen(3)` with RTLD_DEEPBIND,
//! `dlmopen`, and `dlsym(3)` on the handle of a library that depends on libc.
//!
//! libc identifies the caller of `dlopen`, and of `dlsym` with RTLD_NEXT or RTLD_DEFAULT, by the return address. So a
//! hook cannot call libc's function. Each function `before_…` returns a function to which the hook then jumps, with its
//! caller's arguments and stack.

use core::ffi::{CStr, c_char, c_int, c_void};

use rdmasock_core::stats::Reason;

use crate::process::pass;
use crate::startup;
use crate::sys::real;
use crate::sys::real::Lmid;

/// Returns libc's `dlopen`. With RTLD_DEEPBIND the opened library finds libc's functions before the preloaded ones, so
/// no hook sees its calls. So all connections go back to TCP first. PHP opens its extensions with this flag.
pub extern "C" fn before_dlopen(_path: *const c_char, flags: c_int) -> *const c_void {
    if flags & libc::RTLD_DEEPBIND != 0 {
        no_more_links();
    }
    real::dlopen() as *const c_void
}

/// Returns libc's `dlmopen`. A library in another namespace has a libc of its own, so no hook sees its calls. So all
/// connections go back to TCP first.
pub extern "C" fn before_dlmopen(namespace: Lmid, _path: *const c_char, flags: c_int) -> *const c_void {
    if namespace != LM_ID_BASE || flags & libc::RTLD_DEEPBIND != 0 {
        no_more_links();
    }
    real::dlmopen() as *const c_void
}

fn no_more_links() {
    if startup::is_on() {
        pass::all_on_tcp(Reason::DeepBind);
    }
}

/// Returns the function that serves this `dlsym`: libc's, if the lookup depends on its caller. Otherwise a function
/// that returns the hook in place of glibc's function.
pub extern "C" fn before_dlsym(handle: *mut c_void, _name: *const c_char) -> *const c_void {
    if is_pseudo(handle) {
        return real::dlsym() as *const c_void;
    }
    dlsym_in as *const c_void
}

/// Returns the function that serves this `dlvsym`. The hooks have no symbol versions, so libc's `dlvsym` would not find
/// them. If the lookup depends on its caller, and the version is the default one of a hooked function, returns libc's
/// `dlsym`. That finds the hook, or the function of a library that precedes it.
///
/// # Safety
/// As `dlvsym`: `name` and `version` are C strings.
pub unsafe extern "C" fn before_dlvsym(
    handle: *mut c_void,
    name: *const c_char,
    version: *const c_char,
) -> *const c_void {
    if !is_pseudo(handle) {
        return dlvsym_in as *const c_void;
    }
    // SAFETY: `name` and `version` are C strings of the program.
    let found = unsafe { real::dlvsym()(libc::RTLD_NEXT, name, version) };
    // SAFETY: `name` is a C string of the program.
    if unsafe { hook_of(name, found) } == found {
        return real::dlvsym() as *const c_void;
    }
    real::dlsym() as *const c_void
}

/// `LM_ID_BASE` of dlfcn.h: the program's own namespace.
const LM_ID_BASE: Lmid = 0;

fn is_pseudo(handle: *mut c_void) -> bool {
    handle == libc::RTLD_DEFAULT || handle == libc::RTLD_NEXT
}

unsafe extern "C" fn dlsym_in(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: the caller's arguments are passed on unchanged.
    unsafe { hook_of(name, real::dlsym()(handle, name)) }
}

unsafe extern "C" fn dlvsym_in(handle: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void {
    // SAFETY: the caller's arguments are passed on unchanged.
    unsafe { hook_of(name, real::dlvsym()(handle, name, version)) }
}

/// Returns the hook of this name if `found` is the glibc function that the hook replaces, otherwise `found`.
///
/// # Safety
/// If `found` is not null, `name` is a C string.
unsafe fn hook_of(name: *const c_char, found: *mut c_void) -> *mut c_void {
    if found.is_null() {
        return found;
    }
    // SAFETY: `name` is a C string, by the contract.
    let name = unsafe { CStr::from_ptr(name) };
    let mut hook = None;
    let hook = real::find(|object| {
        if object.is_own() {
            hook = object.function(name);
            // Most names have no hook: the search ends here.
            return hook.is_none().then_some(found);
        }
        hook.filter(|_| object.is_glibc() && object.function(name) == Some(found))
    });
    hook.unwrap_or(found)
}
