//! The C interface between the library and a plugin that has queue pairs, which is opened on first need. It consists of
//! two tables of functions, each with a version and its size. Both sides are built from this file, which has no code of
//! either. The modules below are common to all plugins: [`serve`] makes a plugin's table.
//!
//! A function of type `i32` returns 0, a count, or a negative errno. No panic, and no exception, crosses the interface.
//! Pointers are valid for the call alone unless it says otherwise.

pub mod errno;
pub mod fate;
pub mod fds;
pub mod host;
pub mod serve;
pub mod slots;

use std::ffi::{c_char, c_int};

/// Version of the tables; changes with any change to this file.
pub const ABI: u32 = 8;

/// The plugin's only symbol, an [`Entry`](serve::Entry).
pub const ENTRY: &std::ffi::CStr = c"rdmasock_verbs_plugin";

/// Private data of a connection request or its answer, in bytes. Every transport can carry 56; the rest is the
/// plugin's own.
pub const PRIVATE_BYTES: usize = 44;

/// The functions of the library that the plugin calls.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Host {
    /// [`ABI`].
    pub abi: u32,
    /// Bytes of this table.
    pub size: u32,
    /// Writes a line of UTF-8 to the log; level 1 (error) to 5 (trace).
    pub log: unsafe extern "C" fn(level: u32, text: *const u8, len: usize),
    /// Moves an fd to a number that the program does not see. Returns that number, or a negative errno (then `fd` is as
    /// before).
    pub hide_fd: unsafe extern "C" fn(fd: c_int) -> i32,
    /// Closes an fd that `hide_fd` returned. (libc's close, called in the program's place, does not see it.)
    pub close_fd: unsafe extern "C" fn(fd: c_int),
    /// Returns the folder where the kernel shows network interfaces and RDMA devices; tests may replace it. The path
    /// lives as long as the process.
    pub sys_class: unsafe extern "C" fn() -> *const c_char,
}

/// An IP address and a port, in host byte order. IPv4 is in the first four bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Address {
    /// 4 or 6.
    pub family: u16,
    /// 0: any.
    pub port: u16,
    /// Scope of a link-local IPv6 address.
    pub scope: u32,
    /// The address in network order.
    pub ip: [u8; 16],
}

/// A device's port as the library shows it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Device {
    /// Its name, padded with zeroes.
    pub name: [u8; 64],
    /// iWARP: no immediates, and a message without a receive buffer ends the connection.
    pub is_iwarp: u8,
}

/// A connection request that a listener has received.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// The connection: to be accepted or rejected.
    pub conn: *mut Conn,
    /// The private data of the peer's request; transports may pad it with zeroes.
    pub private: [u8; PRIVATE_BYTES],
    /// Bytes of `private`.
    pub private_len: u32,
}

/// The limits of a connection, and the fds of its events.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Info {
    /// Readable when [`Plugin::state`](serve::Plugin::state) has an event to take in.
    pub state_fd: c_int,
    /// Readable when a completion has come after [`Plugin::arm`](serve::Plugin::arm).
    pub completion_fd: c_int,
    /// As [`Limits::buffer_bytes`](super::remote::qp::Limits::buffer_bytes).
    pub buffer_bytes: u32,
    /// As [`Limits::receive_buffers`](super::remote::qp::Limits::receive_buffers).
    pub receive_buffers: u16,
    /// As [`Limits::immediate`](super::remote::qp::Limits::immediate).
    pub immediate: u8,
    /// As [`Limits::reads`](super::remote::qp::Limits::reads).
    pub reads: u8,
    /// As [`Limits::packet_bytes`](super::remote::qp::Limits::packet_bytes).
    pub packet_bytes: u32,
    /// Number of the queue pair.
    pub qp_number: u32,
    /// The device.
    pub device: Device,
    /// The private data of the peer's accept.
    pub private: [u8; PRIVATE_BYTES],
    /// Bytes of `private`.
    pub private_len: u32,
}

/// A completion that [`Plugin::poll`](serve::Plugin::poll) hands over.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Completion {
    /// A constant of [`completion`].
    pub kind: u32,
    /// The immediate, in host order.
    pub immediate: u32,
    /// The message; null if there is none.
    pub bytes: *const u8,
    /// Bytes of the message, or bytes placed.
    pub len: u32,
}

/// Kinds of [`Completion`].
pub mod completion {
    /// A message.
    pub const RECEIVED: u32 = 1;
    /// A WRITE with an immediate.
    pub const WRITTEN: u32 = 2;
    /// Room in the send queue.
    pub const ROOM: u32 = 3;
    /// The peer's device has answered a probe.
    pub const PROBED: u32 = 4;
    /// A READ has completed: its bytes have arrived.
    pub const READ: u32 = 5;
}

/// A piece of a message.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// Where.
    pub at: *const u8,
    /// Bytes.
    pub len: usize,
}

/// A WRITE, as [`Write`](super::remote::qp::Write).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct WriteRequest {
    /// Source.
    pub from: *const u8,
    /// Target.
    pub to: u64,
    /// Bytes.
    pub len: u32,
    /// Key of the source.
    pub local: u32,
    /// Key of the target.
    pub remote: u32,
    /// 0 or 1.
    pub has_immediate: u32,
    /// In host order.
    pub immediate: u32,
}

/// A READ, as [`Read`](super::remote::qp::Read).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ReadRequest {
    /// Target.
    pub to: *mut u8,
    /// Source.
    pub from: u64,
    /// Bytes.
    pub len: u32,
    /// Key of the target.
    pub local: u32,
    /// Key of the source.
    pub remote: u32,
}

/// Keys of registered memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Keys {
    /// lkey.
    pub local: u32,
    /// rkey.
    pub remote: u32,
    /// Names the memory to [`Plugin::deregister`](serve::Plugin::deregister).
    pub handle: u64,
}

/// The uses that memory is registered for, as [`Role`](super::remote::qp::Role).
pub mod role {
    /// The source of this end's WRITEs and the target of its READs, and the target of the peer's WRITEs.
    pub const BOTH: u32 = 0;
    /// The source of this end's WRITEs.
    pub const SOURCE: u32 = 1;
    /// The target of the peer's WRITEs and of this end's READs.
    pub const TARGET: u32 = 2;
    /// The source of the peer's READs.
    pub const OFFERED: u32 = 3;
}

/// A listener of the plugin.
#[repr(C)]
#[derive(Debug)]
pub struct Listener {
    _opaque: [u8; 0],
}

/// A connection of the plugin, with its queue pair and its buffers.
#[repr(C)]
#[derive(Debug)]
pub struct Conn {
    _opaque: [u8; 0],
}
