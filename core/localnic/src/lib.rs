//! A device for machines that have none: queue pairs between processes of one host and one user, at the host's own
//! speed, without privileges, behind the tables of `rdmasock_core::fabric::plugin`. For developers and tests, in the
//! place of the verbs plugin (CONTRIBUTING.md, "The local device"); it trusts the process at the other end.
//!
//! A pair shares memory for its messages and completions (`pair`). A WRITE goes from one process's memory into the
//! other's by process_vm_writev(2), if the target has registered it (`domain`). Who carries work requests out is the
//! thread that posts them, or a thread a process that is the NIC (`nic`); they can be made late, and fail (`settings`,
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

use rdmasock_core::fabric::plugin::serve::{Plugin, table};
use rdmasock_core::fabric::plugin::{Host, host};

pub use conn::Conn;
pub use device::LocalNic;
pub use listen::Listener;

static TABLE: Plugin = table::<LocalNic>();

/// Takes the library's table and gives the plugin's: 0, or a negative errno.
///
/// # Safety
/// As described at `rdmasock_core::fabric::plugin::serve::Entry`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdmasock_verbs_plugin(host: *const Host, table: *mut *const Plugin) -> i32 {
    if table.is_null() {
        return -libc::EINVAL;
    }
    // SAFETY: by this function's contract.
    if let Err(errno) = unsafe { host::attach(host) } {
        return errno.code();
    }
    // SAFETY: not null, and valid for a write by this function's contract.
    unsafe { table.write(&raw const TABLE) };
    0
}
