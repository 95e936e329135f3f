//! The verbs fabric as a plugin: queue pairs between hosts by libibverbs and librdmacm (rdma-core). The preloaded
//! library calls it by the tables of functions in `rdmasock_core::fabric::plugin`. The plugin is a library of its own,
//! because a program with a library that is linked with rdma-core cannot start on a host without rdma-core. The
//! preloaded library defines the bytes that are sent, and decides when to connect.

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

/// Stores `host`, the library's table of functions, and writes the address of the plugin's own table to `table`.
/// Returns 0 or a negative errno.
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
    // SAFETY: `table` is not null, and valid for a write by this function's contract.
    unsafe { table.write(&raw const TABLE) };
    0
}
