//! The verbs plugin, opened when it is first needed, and its connections as queue pairs.
//!
//! The library must load on a host without rdma-core, so nothing here is linked to rdma-core. The plugin lies beside
//! the library. If the plugin cannot be opened, connections to other hosts stay on TCP.

use std::ffi::{c_char, c_int, c_void};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::sync::atomic::{AtomicPtr, AtomicU64};

use libloading::os::unix::{Library as Object, RTLD_LOCAL, RTLD_NOW};
use once_cell::race::OnceBox;
use rdmasock_core::fabric::plugin::serve::{Entry, Plugin};
use rdmasock_core::fabric::plugin::{
    ABI, Address, Completion, Conn, ENTRY, Host, Info, Listener, PRIVATE_BYTES, Request, completion,
};
use rdmasock_core::fabric::remote::qp::{Completed, Down, Limits, PostError, QueuePair, Read, Region, Role, Write};
use rdmasock_core::os::dir;
use rdmasock_core::os::privatefd::PrivateFd;
use rdmasock_core::wire::Introduction;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::config::config;
use crate::sys::real;

/// The plugin's file name, in the folder of the library.
const FILE: &str = "librdmasock_verbs.so";

static PLUGIN: OnceBox<Result<&'static Plugin, String>> = OnceBox::new();

static HOST: Host = Host {
    abi: ABI,
    size: size_of::<Host>() as u32,
    log,
    hide_fd,
    close_fd,
    sys_class,
};

/// The folder where the kernel shows RDMA devices.
const DEVICES: &str = "/sys/class/infiniband";
/// How long the answer "no device" is kept, ns.
const NONE_FOR: u64 = 10_000_000_000;

/// The last answer about RDMA devices. It is [`SOME`](Self::SOME), or the time until which "no device" is kept,
/// monotonic ns.
struct Seen(AtomicU64);

static SEEN: Seen = Seen(AtomicU64::new(0));

impl Seen {
    /// The answer "there is a device", which is kept for good.
    const SOME: u64 = u64::MAX;

    /// Returns whether there is a device; `look` finds that out. Threads that call this at the same moment all call
    /// `look`. A connection that gets the answer "no device" stays on TCP for good. So a thread gets it only from a
    /// call of `look` that has returned.
    fn ask(&self, now: u64, look: impl FnOnce() -> bool) -> bool {
        let mut until = self.0.load(Relaxed);
        if until <= now {
            let answer = if look() { Self::SOME } else { now + NONE_FOR };
            until = answer.max(self.0.fetch_max(answer, Relaxed));
        }
        until == Self::SOME
    }
}

/// Returns whether this host may have an RDMA device, without opening the plugin: whether the kernel's folder of
/// devices has an entry. Reading the folder takes a descriptor for a moment, and meanwhile the program cannot get its
/// number. So the folder is read rarely, and never where the kernel does not know RDMA.
pub fn is_possible() -> bool {
    if SEEN.0.load(Relaxed) == Seen::SOME || config().local_device.is_some() {
        return true;
    }
    // If the folder is missing, the kernel does not know RDMA. That answer is not kept, because the kernel may load a
    // module later.
    if rustix::fs::stat(DEVICES).is_err() {
        return false;
    }
    SEEN.ask(crate::sys::time::now_ns(), || {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = PrivateFd::open(|| rustix::fs::open(DEVICES, flags, Mode::empty()));
        directory.is_ok_and(|at| dir::names(at.as_fd()).is_ok_and(|all| !all.is_empty()))
    })
}

/// Returns the plugin, and opens it at the first call. `Err` says why it cannot be opened.
pub fn plugin() -> Result<&'static Plugin, &'static str> {
    let opened = PLUGIN.get_or_init(|| {
        let opened = open();
        match &opened {
            Ok(_) => tracing::debug!(target: "rdmasock::verbs", "plugin opened"),
            Err(why) => tracing::warn!(target: "rdmasock", %why, "no verbs: connections to other hosts stay on TCP"),
        }
        Box::new(opened)
    });
    opened.as_ref().map(|p| *p).map_err(String::as_str)
}

/// Notifies the plugin of a fork, in the child, before any other use of the plugin. All handles that the plugin has
/// returned before are void in the child.
pub fn after_fork() {
    if let Some(Ok(plugin)) = PLUGIN.get() {
        // SAFETY: this is the child's only thread, and the child uses no handle that the plugin has returned before.
        unsafe { (plugin.after_fork)() };
    }
}

fn open() -> Result<&'static Plugin, String> {
    let path = match &config().local_device {
        Some(path) => path.clone(),
        None => beside_library().ok_or("the library's own path is not known")?,
    };
    let file = path.display();
    // SAFETY: the file is the library's own plugin. Its only constructors are rdma-core's.
    let object = unsafe { Object::open(Some(&path), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| {
        let text = std::error::Error::source(&error).map_or_else(String::new, |s| format!(": {s}"));
        format!("{file} cannot be opened{text}")
    })?;
    // SAFETY: the symbol has this type by the interface's contract, whose version is checked below.
    let entry = unsafe { object.get::<Entry>(ENTRY.to_bytes_with_nul()) }
        .map(|entry| *entry)
        .map_err(|_| format!("{file} is not the plugin of this library"))?;
    let mut table = std::ptr::null();
    // SAFETY: the host's table lives for ever, and the plugin writes one pointer.
    let result = unsafe { entry(&raw const HOST, &raw mut table) };
    if result < 0 {
        return Err(format!("{file} refuses: {}", Errno::from_raw_os_error(-result)));
    }
    // SAFETY: null, or a table that lives as long as the process, by the interface's contract.
    let table = unsafe { table.as_ref() }.ok_or("the plugin gives no table")?;
    if table.abi != ABI || table.size as usize != size_of::<Plugin>() {
        return Err(format!(
            "{file} is of another version (interface {}, wanted {ABI})",
            table.abi
        ));
    }
    // The plugin is never unloaded, because rdma-core has threads and handlers of its own.
    std::mem::forget(object);
    Ok(table)
}

fn beside_library() -> Option<PathBuf> {
    let own = real::find(|object| object.is_own().then(|| object.path().to_owned()))?;
    Some(Path::new(own.to_str().ok()?).parent()?.join(FILE))
}

unsafe extern "C" fn log(level: u32, text: *const u8, len: usize) {
    // SAFETY: `text` has `len` readable bytes by the interface's contract.
    let text = unsafe { std::slice::from_raw_parts(text, len) };
    let text = String::from_utf8_lossy(text);
    match level {
        1 => tracing::error!(target: "rdmasock::verbs", "{text}"),
        _ => tracing::debug!(target: "rdmasock::verbs", "{text}"),
    }
}

unsafe extern "C" fn hide_fd(fd: c_int) -> i32 {
    // SAFETY: the plugin's own fd, which stays open during the call.
    let hidden = match PrivateFd::duplicate(unsafe { BorrowedFd::borrow_raw(fd) }) {
        Ok(hidden) => hidden.release(),
        Err(error) => return -error.raw_os_error(),
    };
    // SAFETY: the plugin has given the fd away, so this is its only close.
    unsafe { rustix::io::close(fd) };
    hidden
}

unsafe extern "C" fn close_fd(fd: c_int) {
    drop(PrivateFd::adopt(fd));
}

unsafe extern "C" fn sys_class() -> *const c_char {
    config().sys_class.as_deref().unwrap_or(c"/sys/class").as_ptr()
}

fn check(result: i32) -> Result<i32, Errno> {
    if result < 0 {
        Err(Errno::from_raw_os_error(-result))
    } else {
        Ok(result)
    }
}

/// Returns whether an RDMA device has this local address.
pub fn has_device(local: IpAddr) -> bool {
    let Some(plugin) = is_possible().then(plugin).and_then(Result::ok) else {
        return false;
    };
    let local = Address::from(SocketAddr::new(local, 0));
    // SAFETY: a valid pointer for the call.
    unsafe { (plugin.device)(&raw const local) >= 0 }
}

/// A listener for connections from other instances.
pub struct Acceptor {
    plugin: &'static Plugin,
    listener: *mut Listener,
    /// The local address, with the port on which the listener listens.
    pub address: SocketAddr,
    /// An fd that is readable when another instance connects.
    pub fd: c_int,
}

// SAFETY: the plugin's listeners may be used from any thread.
unsafe impl Send for Acceptor {}

impl Acceptor {
    /// Listens at the local address, on a port that the system chooses.
    pub fn new(local: IpAddr) -> Result<Self, Errno> {
        let plugin = plugin().map_err(|_| Errno::NODEV)?;
        let at = Address::from(SocketAddr::new(local, 0));
        let (mut listener, mut port, mut fd) = (null_mut(), 0, -1);
        // SAFETY: valid pointers for the call.
        check(unsafe { (plugin.listen)(&raw const at, &raw mut listener, &raw mut port, &raw mut fd) })?;
        Ok(Self {
            plugin,
            listener,
            address: SocketAddr::new(local, port),
            fd,
        })
    }

    /// Returns the next connection that another instance has requested; `None` if no request is waiting. After `Err` no
    /// more requests will come.
    pub fn next(&self) -> Result<Option<Incoming>, Errno> {
        // SAFETY: zeroes are a value of this plain struct.
        let mut request: Request = unsafe { std::mem::zeroed() };
        // SAFETY: the listener lives as long as this value, and the plugin writes one request.
        match check(unsafe { (self.plugin.next_request)(self.listener, &raw mut request) }) {
            Ok(_) => Ok(Some(Incoming {
                pair: Pair::new(self.plugin, request.conn),
                private: request.private,
            })),
            Err(Errno::AGAIN) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        // SAFETY: this value owns the listener and is being dropped, so no other code uses it.
        unsafe { (self.plugin.close_listener)(self.listener) };
    }
}

/// A connection that another instance has requested.
pub struct Incoming {
    pair: Pair,
    /// The bytes of the library in the other instance's connection request (rdma_cm calls them private data).
    pub private: [u8; PRIVATE_BYTES],
}

impl Incoming {
    /// Accepts the connection with `answer` as private data. `beside` is a pair to the same peer, with which the new
    /// pair shares registrations and the completion fd. It outlives the new pair.
    pub fn accept(self, answer: &[u8], beside: Option<&Pair>) -> Result<Pair, Errno> {
        let (plugin, conn) = (self.pair.plugin, self.pair.conn()?);
        let beside = beside.map_or(null_mut(), |pair| pair.conn.load(Acquire));
        // SAFETY: this value owns the connection, the answer is readable, and `beside` outlives the new pair by this
        // function's contract.
        check(unsafe { (plugin.accept)(conn, answer.as_ptr(), answer.len(), beside) })?;
        Ok(self.pair)
    }

    /// Refuses the connection.
    pub fn reject(self) {
        let pair = std::mem::ManuallyDrop::new(self.pair);
        if let Ok(conn) = pair.conn() {
            // SAFETY: the call frees the connection, and `ManuallyDrop` keeps `pair` from freeing it again.
            unsafe { (pair.plugin.reject)(conn) };
        }
    }
}

/// Connects to `remote`, and blocks meanwhile. `timeout_ms` bounds the search for a route, and again the wait for the
/// peer's answer, ms. On siw the call may take longer, because rdma_connect itself waits for a TCP connection. `beside`
/// is a pair to the same peer, with which the new pair shares registrations and the completion fd. It outlives the new
/// pair.
pub fn connect(
    local: IpAddr,
    remote: SocketAddr,
    private: &[u8],
    timeout_ms: u32,
    beside: Option<&Pair>,
) -> Result<Pair, Errno> {
    let plugin = plugin().map_err(|_| Errno::NODEV)?;
    let (local, remote) = (Address::from(SocketAddr::new(local, 0)), Address::from(remote));
    let mut conn = null_mut();
    let beside = beside.map_or(null_mut(), |pair| pair.conn.load(Acquire));
    // SAFETY: valid pointers for the call.
    check(unsafe {
        (plugin.connect)(
            &raw const local,
            &raw const remote,
            private.as_ptr(),
            private.len(),
            timeout_ms,
            beside,
            &raw mut conn,
        )
    })?;
    Ok(Pair::new(plugin, conn))
}

/// The state of a pair's connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// The connection is not established yet.
    Connecting,
    /// The connection is established.
    Up,
    /// The connection has ended, for this reason.
    Down(Errno),
}

/// A connected queue pair, and the peer at its other end.
pub struct Dialled {
    /// The queue pair.
    pub pair: Pair,
    /// The peer's introduction of itself.
    pub introduction: Introduction,
    /// The local address.
    pub local: IpAddr,
    /// The peer's address.
    pub remote: SocketAddr,
}

/// A connected queue pair.
pub struct Pair {
    plugin: &'static Plugin,
    /// The plugin's connection; null once it is taken out.
    conn: AtomicPtr<Conn>,
}

// SAFETY: the plugin's connections may be used from any thread under the rules of its table. The engine keeps these
// rules by its locks.
unsafe impl Send for Pair {}
// SAFETY: any thread may use a connection under the rules of the plugin's table, which the engine keeps by its locks.
unsafe impl Sync for Pair {}

impl Pair {
    fn new(plugin: &'static Plugin, conn: *mut Conn) -> Self {
        Self {
            plugin,
            conn: AtomicPtr::new(conn),
        }
    }

    fn conn(&self) -> Result<*mut Conn, Errno> {
        let conn = self.conn.load(Acquire);
        if conn.is_null() { Err(Errno::NOTCONN) } else { Ok(conn) }
    }

    /// Moves the queue pair of `other` into this value, whose own queue pair was [taken](Self::take) before.
    pub fn stand_for(&self, other: &Self) {
        let before = self.conn.swap(other.conn.swap(null_mut(), AcqRel), AcqRel);
        debug_assert!(before.is_null());
    }

    /// Returns facts about the queue pair.
    pub fn info(&self) -> Result<Info, Errno> {
        // SAFETY: zeroes are a value of this plain struct.
        let mut info: Info = unsafe { std::mem::zeroed() };
        // SAFETY: the connection lives as long as this value.
        check(unsafe { (self.plugin.info)(self.conn()?, &raw mut info) })?;
        Ok(info)
    }

    /// Handles pending events of the connection, and returns its state.
    pub fn state(&self) -> State {
        // SAFETY: the connection lives as long as this value.
        match self.conn().and_then(|conn| check(unsafe { (self.plugin.state)(conn) })) {
            Ok(0) => State::Connecting,
            Ok(_) => State::Up,
            Err(error) => State::Down(error),
        }
    }

    /// Ends the connection. Both ends then find it down.
    pub fn disconnect(&self) {
        if let Ok(conn) = self.conn() {
            // SAFETY: the connection lives as long as this value.
            unsafe { (self.plugin.disconnect)(conn) };
        }
    }

    /// Moves the queue pair out of this value into a new one. Later calls on this value fail as on a connection that is
    /// down.
    pub fn take(&self) -> Self {
        Self::new(self.plugin, self.conn.swap(null_mut(), AcqRel))
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        let conn = *self.conn.get_mut();
        if !conn.is_null() {
            // SAFETY: this value alone owned the connection, and it is dropped once.
            unsafe { (self.plugin.destroy)(conn) };
        }
    }
}

impl Pair {
    /// Posts a work request by `call`, which calls a function of the plugin.
    fn post(&self, call: impl FnOnce(*mut Conn) -> i32) -> Result<(), PostError> {
        match self.conn().map(call) {
            Ok(0..) => Ok(()),
            Ok(full) if -full == libc::EAGAIN => Err(PostError::Full),
            Ok(_) | Err(_) => Err(PostError::Down),
        }
    }

    /// Makes a call of the plugin that posts nothing, and returns its result. `Err` has ENOTCONN if the queue pair was
    /// taken out.
    fn ask(&self, call: impl FnOnce(*mut Conn) -> i32) -> Result<usize, Down> {
        let conn = self.conn().map_err(|error| Down(error.raw_os_error()))?;
        let result = call(conn);
        usize::try_from(result).map_err(|_| Down(-result))
    }
}

impl QueuePair for Pair {
    fn limits(&self) -> Limits {
        self.info().map_or(Limits::default(), |info| info.limits)
    }

    unsafe fn register(&self, at: *mut u8, len: usize, role: Role) -> Result<Region, Down> {
        let mut region = Region::default();
        // SAFETY: the memory is valid by the caller's contract, and the connection lives as long as this value.
        self.ask(|conn| unsafe { (self.plugin.register)(conn, at.cast(), len, role, &raw mut region) })?;
        Ok(region)
    }

    fn deregister(&self, region: Region) {
        if let Ok(conn) = self.conn() {
            // SAFETY: the connection lives as long as this value, and the plugin ignores a handle that it does not
            // know.
            unsafe { (self.plugin.deregister)(conn, region.handle) };
        }
    }

    unsafe fn write(&self, write: &Write, immediate: Option<u32>) -> Result<(), PostError> {
        let immediate = immediate.as_ref().map_or(null(), std::ptr::from_ref);
        // SAFETY: the memory is valid by the caller's contract, and the connection lives as long as this value.
        self.post(|conn| unsafe { (self.plugin.write)(conn, write, immediate) })
    }

    unsafe fn read(&self, read: &Read) -> Result<(), PostError> {
        // SAFETY: the memory is valid by the caller's contract, and the connection lives as long as this value.
        self.post(|conn| unsafe { (self.plugin.read)(conn, read) })
    }

    fn send(&self, message: &[u8]) -> Result<(), PostError> {
        // SAFETY: the message is readable during the call, and the connection lives as long as this value.
        self.post(|conn| unsafe { (self.plugin.send)(conn, message.as_ptr(), message.len()) })
    }

    fn probe(&self) -> Result<(), PostError> {
        // SAFETY: the connection lives as long as this value.
        self.post(|conn| unsafe { (self.plugin.probe)(conn) })
    }

    fn poll(&self, each: &mut dyn FnMut(Completed<'_>)) -> Result<usize, Down> {
        let mut each = each;
        // SAFETY: the context is the closure, which outlives the call; the connection lives as long as this value.
        self.ask(|conn| unsafe { (self.plugin.poll)(conn, (&raw mut each).cast(), on_completion) })
    }

    fn arm(&self) -> Result<(), Down> {
        // SAFETY: the connection lives as long as this value.
        self.ask(|conn| unsafe { (self.plugin.arm)(conn) }).map(|_| ())
    }
}

unsafe extern "C" fn on_completion(context: *mut c_void, completion: *const Completion) {
    // SAFETY: `poll` above passes a pointer of this type, and only this function uses the closure during the call.
    let each = unsafe { &mut *context.cast::<&mut dyn FnMut(Completed<'_>)>() };
    // SAFETY: the plugin's completion is valid during the call.
    let completion = unsafe { &*completion };
    match completion.kind {
        completion::RECEIVED if !completion.bytes.is_null() => {
            // SAFETY: the plugin's receive buffer, which the device does not write until it is posted again.
            let bytes = unsafe { std::slice::from_raw_parts(completion.bytes, completion.len as usize) };
            each(Completed::Received(bytes));
        }
        completion::WRITTEN => each(Completed::Written {
            immediate: completion.immediate,
            bytes: completion.len,
        }),
        completion::ROOM => each(Completed::Room),
        completion::READ => each(Completed::Read),
        completion::PROBED => each(Completed::Probed),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_while_another_looks_is_not_told_that_there_are_none() {
        let seen = Seen(AtomicU64::new(0));
        assert!(seen.ask(7, || {
            assert!(seen.ask(7, || true));
            true
        }));
        assert!(seen.ask(8, || unreachable!()));
    }

    #[test]
    fn that_there_are_none_is_good_for_a_while() {
        let seen = Seen(AtomicU64::new(0));
        assert!(!seen.ask(7, || false));
        assert!(!seen.ask(6 + NONE_FOR, || unreachable!()));
        assert!(seen.ask(7 + NONE_FOR, || true));
    }
}
