//! Finds the RDMA device that has a local address, and opens each device once.
//!
//! [`find`] only reads sysfs. So a process that forks its workers can find out whether there is a device without
//! opening it. A child cannot use librdmacm if its parent has used it: the child's librdmacm still has the parent's
//! state.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::atomic::{AtomicBool, Ordering};

use rdmasock_core::fabric::plugin;
use rdmasock_core::fabric::plugin::Address;
use rdmasock_core::lock::Lock;

use crate::error::{Errno, Result};
use crate::explain::{debug, explain};
use crate::sys::{Context, Id, prepare_for_fork};
use crate::sysfs::device_on;

/// Whether this process, or a process that it was forked from, has called librdmacm.
static USED: AtomicBool = AtomicBool::new(false);
/// Whether this process was forked from a process that had called librdmacm.
static INHERITED: AtomicBool = AtomicBool::new(false);

/// The open devices. For each device an id is kept for ever, so that librdmacm keeps the device's context, which all
/// ids share.
static OPEN: Lock<Vec<(Context, Id)>> = Lock::new(Vec::new());

/// Checks that a device has this local address. ENODEV if none has it. EOPNOTSUPP if this process was forked from a
/// process that had called librdmacm, which cannot be initialised again.
pub(crate) fn find(local: &Address) -> Result<()> {
    if INHERITED.load(Ordering::Relaxed) {
        debug(format_args!(
            "verbs: the parent has opened the device, so this process cannot"
        ));
        return Err(Errno(libc::EOPNOTSUPP));
    }
    let interface = interface_of(local.socket().ip())?;
    let device = device_on(plugin::sys_class(), &interface);
    device.map(drop).ok_or(Errno(libc::ENODEV))
}

/// Opens the device that has this local address, unless it is open already. Returns its context.
pub(crate) fn open(local: &Address) -> Result<Context> {
    find(local)?;
    let mut open = OPEN.lock().ok_or(Errno(libc::EDEADLK))?;
    if !USED.swap(true, Ordering::Relaxed) {
        prepare_for_fork();
    }
    // This is done under the lock, so that no other thread uses a context before its fds have their final numbers.
    let id = Id::new().map_err(|errno| explain("opening the connection manager", errno))?;
    id.bind(&Address { port: 0, ..*local })
        .map_err(|errno| explain("opening the device", errno))?;
    let context = id.context().ok_or(Errno(libc::ENODEV))?;
    if !open.iter().any(|(known, _)| *known == context) {
        context
            .hide()
            .map_err(|errno| explain("hiding the device's fds", errno))?;
        open.push((context, id));
    }
    Ok(context)
}

/// Forgets the parent's devices in a fork child, which never uses them.
///
/// # Safety
/// No other thread exists.
pub(crate) unsafe fn forget() {
    if USED.load(Ordering::Relaxed) {
        INHERITED.store(true, Ordering::Relaxed);
    }
    // SAFETY: by this function's contract. If the list may have entries, `find` fails from now on, so no code uses the
    // list again.
    unsafe { OPEN.reset() };
}

/// Returns the name of the network interface with this address; ENODEV if none has it.
fn interface_of(wanted: IpAddr) -> Result<String> {
    let mut list = std::ptr::null_mut();
    // SAFETY: the list is written on success.
    crate::error::check(unsafe { libc::getifaddrs(&mut list) })?;
    let mut found = None;
    let mut at = list;
    // SAFETY: `at` is null or an entry of the list that getifaddrs has made. The list is freed after the loop.
    while let Some(entry) = unsafe { at.as_ref() } {
        // SAFETY: `ifa_addr` is null, or points to a socket address that getifaddrs has made, with all fields of its
        // address family.
        if unsafe { address_of(entry.ifa_addr) } == Some(wanted) {
            // SAFETY: every entry has a name that ends with a zero.
            let name = unsafe { std::ffi::CStr::from_ptr(entry.ifa_name) };
            // The name of an alias has the form eth0:1.
            found = name
                .to_str()
                .ok()
                .and_then(|name| name.split(':').next())
                .map(str::to_owned);
            break;
        }
        at = entry.ifa_next;
    }
    // SAFETY: the list was made by getifaddrs and is freed once.
    unsafe { libc::freeifaddrs(list) };
    found.ok_or(Errno(libc::ENODEV))
}

/// # Safety
/// `at` is null, or points to a socket address with all fields of its address family.
unsafe fn address_of(at: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: by this function's contract.
    unsafe {
        match libc::c_int::from(at.as_ref()?.sa_family) {
            libc::AF_INET => {
                let v4 = at.cast::<libc::sockaddr_in>().read_unaligned();
                Some(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr)).into())
            }
            libc::AF_INET6 => {
                let v6 = at.cast::<libc::sockaddr_in6>().read_unaligned();
                Some(Ipv6Addr::from(v6.sin6_addr.s6_addr).into())
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_leads_to_its_interface() {
        assert_eq!(interface_of(Ipv4Addr::LOCALHOST.into()).unwrap(), "lo");
        assert_eq!(interface_of(Ipv4Addr::BROADCAST.into()), Err(Errno(libc::ENODEV)));
    }
}
