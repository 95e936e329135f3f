//! The verbs fabric as a plugin: queue pairs between hosts by libibverbs and librdmacm, behind the tables of
//! `rdmasock_core::fabric::plugin`. It is a library of its own, because a program that is linked with rdma-core cannot
//! start on a host without it. The caller defines the bytes that are sent, and decides when to connect.

#![warn(unreachable_pub)]

mod conn;
mod connect;
mod device;
mod error;
mod explain;
mod listen;
mod memory;
mod probe_target;
mod provider;
mod queue;
mod sizes;
mod sys;
mod sysfs;

use rdmasock_core::fabric::plugin;
use rdmasock_core::fabric::plugin::Host;
use rdmasock_core::fabric::plugin::serve::{Plugin, table};

static TABLE: Plugin = table::<provider::Verbs>();

/// Stores the library's table, and writes the address of the plugin's to `table`. Returns 0 or a negative errno.
///
/// # Safety
/// As described at `rdmasock_core::fabric::plugin::serve::Entry`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdmasock_verbs_plugin(host: *const Host, table: *mut *const Plugin) -> i32 {
    if table.is_null() {
        return -libc::EINVAL;
    }
    // SAFETY: by this function's contract.
    if let Err(errno) = unsafe { plugin::attach(host) } {
        return errno.code();
    }
    // SAFETY: not null, and valid for a write by this function's contract.
    unsafe { table.write(&raw const TABLE) };
    0
}
