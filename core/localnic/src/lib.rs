//! A device for machines without RDMA hardware, behind the tables of `rdmasock_core::fabric::plugin`. It offers queue
//! pairs between processes of one host and one user, at the host's own speed, without privileges. Developers and tests
//! use it in place of the verbs plugin (CONTRIBUTING.md, "The local device"). It trusts the process at the other end.
//!
//! A pair shares memory for its messages and completions (`pair`). A WRITE copies from one process's memory into the
//! other's by process_vm_writev(2), if the target is registered (`domain`). The posting thread executes work requests,
//! or a thread that serves as the process's NIC (`nic`). Work requests can be delayed, and can fail (`settings`,
//! `faults`).

mod conn;
mod contexts;
mod device;
mod domain;
mod faults;
mod greeting;
mod listen;
mod names;
mod nic;
mod pair;
mod pins;
mod queue;
pub mod settings;
#[cfg(test)]
mod tests;
pub mod within;

pub use conn::Conn;
pub use device::LocalNic;
pub use listen::Listener;
use rdmasock_core::fabric::plugin;
use rdmasock_core::fabric::plugin::Host;
use rdmasock_core::fabric::plugin::serve::{Plugin, table};

static TABLE: Plugin = table::<LocalNic>();

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
