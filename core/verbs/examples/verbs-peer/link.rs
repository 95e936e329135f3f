//! The tests' access to the plugin: code that loads it, a host table for it, and connections whose calls wait.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rdmasock_core::fabric::plugin::serve::{Entry, Plugin};
use rdmasock_core::fabric::plugin::{ABI, Address, Completion, Conn, ENTRY, Host, Info, Listener, Request, completion};
use rdmasock_core::fabric::remote::qp::{Region, Role, Write};

use crate::memory::Memory;

/// The lowest number of a hidden fd.
pub const HIDDEN: c_int = 900;

/// The longest time that a wait may take.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// The lines that the plugin has logged.
pub static LOG: Mutex<Vec<String>> = Mutex::new(Vec::new());

static HOST: Host = Host {
    abi: ABI,
    size: size_of::<Host>() as u32,
    log,
    hide_fd,
    close_fd,
    sys_class,
};

unsafe extern "C" fn sys_class() -> *const c_char {
    c"/sys/class".as_ptr()
}

unsafe extern "C" fn log(level: u32, text: *const u8, len: usize) {
    // SAFETY: by the interface, `text` and `len` describe a line of text.
    let line = String::from_utf8_lossy(unsafe { std::slice::from_raw_parts(text, len) }).into_owned();
    if !line.contains("connection over: event 10") {
        eprintln!("log {level}: {line}");
    }
    LOG.lock().unwrap().push(line);
}

unsafe extern "C" fn hide_fd(fd: c_int) -> i32 {
    // SAFETY: the calls take fds. If the plugin gets a new fd, it does not use the old one again.
    unsafe {
        let hidden = libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, HIDDEN);
        if hidden < 0 {
            return -std::io::Error::last_os_error().raw_os_error().unwrap();
        }
        libc::close(fd);
        hidden
    }
}

unsafe extern "C" fn close_fd(fd: c_int) {
    // SAFETY: `hide_fd` has returned the fd, and the plugin does not use it again.
    assert_eq!(unsafe { libc::close(fd) }, 0, "closing {fd}");
}

/// Returns how many open fds this process has below `HIDDEN`, and how many from there on.
pub fn count_fds() -> (usize, usize) {
    let numbers = std::fs::read_dir("/proc/self/fd").unwrap();
    let numbers = numbers.map(|entry| entry.unwrap().file_name().to_str().unwrap().parse::<c_int>().unwrap());
    let (low, high): (Vec<_>, Vec<_>) = numbers.partition(|fd| *fd < HIDDEN);
    // The low fds include the fd of /proc/self/fd itself.
    (low.len() - 1, high.len())
}

pub fn address(text: &str, port: u16) -> Address {
    std::net::SocketAddr::new(text.parse().expect("an IP address"), port).into()
}

/// The loaded plugin.
#[derive(Clone)]
pub struct Api {
    pub table: &'static Plugin,
    /// The path of the plugin, for child processes that load it too.
    pub path: String,
}

impl Api {
    pub fn load(path: &str) -> Self {
        let name = CString::new(path).unwrap();
        let before = count_fds();
        // SAFETY: the plugin's initialisers have no preconditions, and its symbol `ENTRY` is an `Entry`.
        let table = unsafe {
            let handle = libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
            assert!(
                !handle.is_null(),
                "dlopen: {:?}",
                std::ffi::CStr::from_ptr(libc::dlerror())
            );
            let symbol = libc::dlsym(handle, ENTRY.as_ptr());
            assert!(!symbol.is_null(), "no entry");
            let entry: Entry = std::mem::transmute::<*mut c_void, Entry>(symbol);
            let mut table = std::ptr::null();
            let old = Host { abi: ABI - 1, ..HOST };
            assert_eq!(entry(&old, &mut table), -libc::EPROTO, "another version");
            assert_eq!(entry(&HOST, &mut table), 0);
            &*table
        };
        assert_eq!((table.abi, table.size as usize), (ABI, size_of::<Plugin>()));
        assert_eq!(count_fds(), before, "loading opens nothing");
        Self {
            table,
            path: path.to_owned(),
        }
    }

    pub fn listen(&self, local: &Address) -> (Waiting, u16) {
        let (mut listener, mut port, mut fd) = (null_mut(), 0, -1);
        // SAFETY: valid pointers.
        let code = unsafe { (self.table.listen)(local, &mut listener, &mut port, &mut fd) };
        assert_eq!(code, 0, "listen");
        assert!(fd >= HIDDEN);
        (
            Waiting {
                api: self.clone(),
                listener,
                fd,
            },
            port,
        )
    }

    /// Connects. If there is a connection `beside`, the new one shares its resources. Fails with the plugin's code, a
    /// negative errno.
    pub fn connect(
        &self,
        local: &Address,
        remote: &Address,
        private: &[u8],
        timeout: Duration,
        beside: Option<&Link>,
    ) -> Result<Link, i32> {
        let mut conn = null_mut();
        // SAFETY: valid pointers.
        let code = unsafe {
            (self.table.connect)(
                local,
                remote,
                private.as_ptr(),
                private.len(),
                timeout.as_millis() as u32,
                handle(beside),
                &mut conn,
            )
        };
        if code == 0 {
            Ok(Link::new(self, conn))
        } else {
            Err(code)
        }
    }
}

/// Returns the handle of `beside` for the interface; null if there is none.
fn handle(beside: Option<&Link>) -> *mut Conn {
    beside.map_or(null_mut(), |link| link.conn)
}

/// A listener whose calls wait.
pub struct Waiting {
    api: Api,
    listener: *mut Listener,
    fd: c_int,
}

impl Waiting {
    pub fn next(&self, patience: Duration) -> Request {
        let until = Instant::now() + patience;
        loop {
            let mut request = std::mem::MaybeUninit::uninit();
            // SAFETY: valid pointers; the request is written on success.
            match unsafe { (self.api.table.next_request)(self.listener, request.as_mut_ptr()) } {
                // SAFETY: the call has succeeded, so the request was written.
                0 => return unsafe { request.assume_init() },
                code => assert_eq!(code, -libc::EAGAIN, "next_request"),
            }
            let left = until.saturating_duration_since(Instant::now());
            assert!(wait_readable(&[self.fd], left), "no request came");
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        // SAFETY: the listener is not used after this.
        unsafe { (self.api.table.close_listener)(self.listener) };
    }
}

/// Sleeps until one of the fds is readable. Returns `false` if none is after `time`.
pub fn wait_readable(fds: &[c_int], time: Duration) -> bool {
    let mut list: Vec<_> = fds
        .iter()
        .map(|fd| libc::pollfd {
            fd: *fd,
            events: libc::POLLIN,
            revents: 0,
        })
        .collect();
    // SAFETY: pointer and length describe `list`.
    unsafe { libc::poll(list.as_mut_ptr(), list.len() as libc::nfds_t, time.as_millis() as c_int) > 0 }
}

#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    Message(Vec<u8>),
    Written(u32, u32),
    Room,
    Probed,
}

/// A connection, established or pending, with credits for messages. A receiver grants credits back when a quarter of
/// its receive buffers has been used.
pub struct Link {
    api: Api,
    conn: *mut Conn,
    pub info: Info,
    events: RefCell<VecDeque<Event>>,
    /// The credits of this end: the number of free receive buffers of the peer.
    credits: Cell<u32>,
    /// The number of this end's receive buffers that were used since its last grant.
    used: Cell<u32>,
}

/// The kinds of messages. The kind is the first byte of a message.
const DATA: u8 = 1;
const GRANT: u8 = 2;

impl Link {
    pub fn new(api: &Api, conn: *mut Conn) -> Self {
        let mut info = std::mem::MaybeUninit::uninit();
        // SAFETY: the pointers are valid, and `info` is written on success.
        let info = unsafe {
            assert_eq!((api.table.info)(conn, info.as_mut_ptr()), 0, "info");
            info.assume_init()
        };
        assert!(info.state_fd >= HIDDEN && info.completion_fd >= HIDDEN);
        Self {
            api: api.clone(),
            conn,
            info,
            events: RefCell::default(),
            credits: Cell::new(info.limits.receive_buffers.into()),
            used: Cell::new(0),
        }
    }

    /// Accepts a request and waits until the connection is up. If there is a connection `beside`, the new one shares
    /// its resources.
    pub fn accept(api: &Api, request: &Request, private: &[u8], beside: Option<&Self>) -> Self {
        // SAFETY: valid pointers.
        let code = unsafe { (api.table.accept)(request.conn, private.as_ptr(), private.len(), handle(beside)) };
        assert_eq!(code, 0, "accept");
        let link = Self::new(api, request.conn);
        let until = Instant::now() + PATIENCE;
        while link.state() == 0 {
            assert!(Instant::now() < until, "not up");
            wait_readable(&[link.info.state_fd], Duration::from_secs(1));
        }
        assert_eq!(link.state(), 1);
        link
    }

    pub fn state(&self) -> i32 {
        // SAFETY: the connection lives.
        unsafe { (self.api.table.state)(self.conn) }
    }

    pub fn register(&self, memory: &Memory) -> Region {
        self.register_as(memory, Role::Both).expect("register")
    }

    /// Registers memory for a role. Fails with the plugin's code, a negative errno.
    pub fn register_as(&self, memory: &Memory, role: Role) -> Result<Region, i32> {
        let mut region = Region::default();
        // SAFETY: the tests access this memory through raw pointers. They unmap it only if accesses to it are meant to
        // fail.
        match unsafe { (self.api.table.register)(self.conn, memory.at.cast(), memory.len, role, &mut region) } {
            0 => Ok(region),
            code => Err(code),
        }
    }

    pub fn deregister(&self, region: Region) {
        // SAFETY: the connection lives.
        unsafe { (self.api.table.deregister)(self.conn, region.handle) };
    }

    pub fn write(&self, write: &Write, immediate: Option<u32>) -> i32 {
        let immediate = immediate.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: the source of the request is within registered memory.
        unsafe { (self.api.table.write)(self.conn, write, immediate) }
    }

    /// Posts a WRITE. Waits for a credit if it has an immediate, and for room in the queue.
    pub fn write_all(&self, write: &Write, immediate: Option<u32>) {
        if immediate.is_some() {
            self.take_credit();
        }
        self.retry(|| self.write(write, immediate));
    }

    /// Posts a message that consists of `parts`. Does not wait for a credit or for room.
    pub fn send_parts(&self, parts: &[&[u8]]) -> i32 {
        let message = parts.concat();
        // SAFETY: the message is readable.
        unsafe { (self.api.table.send)(self.conn, message.as_ptr(), message.len()) }
    }

    /// Sends a message of the kind `DATA`. Waits for a credit and for room in the queue.
    pub fn send(&self, message: &[u8]) {
        self.take_credit();
        self.retry(|| self.send_parts(&[&[DATA], message]));
    }

    fn take_credit(&self) {
        let until = Instant::now() + PATIENCE;
        // The last credit is kept for a grant.
        while self.credits.get() < 2 {
            assert!(Instant::now() < until, "no credit");
            self.sleep().expect("over while waiting for credit");
        }
        self.credits.set(self.credits.get() - 1);
    }

    fn retry(&self, post: impl Fn() -> i32) {
        let until = Instant::now() + PATIENCE;
        loop {
            match post() {
                0 => return,
                code => assert_eq!(code, -libc::EAGAIN, "posting"),
            }
            assert!(Instant::now() < until, "no room");
            self.sleep().expect("over while waiting for room");
        }
    }

    /// Posts a probe, and checks that a second probe is refused while the first is under way.
    pub fn probe(&self) {
        // SAFETY: the connection lives.
        let probe = || unsafe { (self.api.table.probe)(self.conn) };
        assert_eq!(probe(), 0, "probe");
        assert_eq!(probe(), -libc::EAGAIN, "a second probe");
    }

    /// Handles the completions, and grants credits back. Returns the number of completions. Fails with the plugin's
    /// code, a negative errno.
    pub fn poll(&self) -> Result<usize, i32> {
        unsafe extern "C" fn each(context: *mut c_void, done: *const Completion) {
            // SAFETY: the context is this link. The completion and its bytes are valid during the call.
            unsafe {
                let (link, done) = (&*context.cast::<Link>(), &*done);
                match done.kind {
                    completion::RECEIVED => link.on_message(std::slice::from_raw_parts(done.bytes, done.len as usize)),
                    completion::WRITTEN => {
                        link.used.set(link.used.get() + 1);
                        link.events
                            .borrow_mut()
                            .push_back(Event::Written(done.immediate, done.len));
                    }
                    completion::ROOM => link.events.borrow_mut().push_back(Event::Room),
                    completion::PROBED => link.events.borrow_mut().push_back(Event::Probed),
                    kind => panic!("completion of kind {kind}"),
                }
            }
        }
        let context = std::ptr::from_ref(self).cast_mut().cast();
        // SAFETY: the connection and the context live during the call.
        let code = unsafe { (self.api.table.poll)(self.conn, context, each) };
        if code < 0 {
            return Err(code);
        }
        if self.used.get() >= u32::from(self.info.limits.receive_buffers) / 4 {
            let used = self.used.replace(0);
            // `take_credit` keeps one credit for grants, and grants are rare, so this never waits for a credit.
            assert_eq!(self.send_parts(&[&[GRANT], &used.to_le_bytes()]), 0, "grant");
        }
        Ok(code as usize)
    }

    fn on_message(&self, message: &[u8]) {
        match message {
            [GRANT, count @ ..] => {
                let count = u32::from_le_bytes(count.try_into().unwrap());
                self.credits.set(self.credits.get() + count);
            }
            [DATA, bytes @ ..] => {
                self.used.set(self.used.get() + 1);
                self.events.borrow_mut().push_back(Event::Message(bytes.to_vec()));
            }
            _ => panic!("a message of kind {:?}", message.first()),
        }
    }

    pub fn arm(&self) {
        self.armer().arm();
    }

    /// Returns a value that arms the connection from any thread.
    pub fn armer(&self) -> Armer<'_> {
        Armer {
            api: &self.api,
            conn: self.conn,
        }
    }

    /// Polls. If there is no completion, arms the queue, polls once more, and sleeps if there is still none. Fails if
    /// the connection has ended.
    fn sleep(&self) -> Result<(), i32> {
        if self.poll()? == 0 {
            self.arm();
            if self.poll()? == 0 {
                wait_readable(&[self.info.completion_fd, self.info.state_fd], Duration::from_secs(1));
            }
        }
        match self.state() {
            code if code < 0 => Err(code),
            _ => Ok(()),
        }
    }

    /// Waits for the next event.
    pub fn event(&self) -> Event {
        let until = Instant::now() + PATIENCE;
        loop {
            let _ = self.poll();
            if let Some(event) = self.events.borrow_mut().pop_front() {
                return event;
            }
            assert!(Instant::now() < until, "no event");
            self.sleep().expect("over while waiting for an event");
        }
    }

    /// Returns an event that an earlier poll has received; `None` if there is none.
    pub fn event_now(&self) -> Option<Event> {
        self.events.borrow_mut().pop_front()
    }

    pub fn message(&self) -> Vec<u8> {
        loop {
            match self.event() {
                Event::Message(bytes) => return bytes,
                Event::Room => {}
                other => panic!("{other:?} instead of a message"),
            }
        }
    }

    /// Sends the address of `memory` and its remote key to the peer.
    pub fn send_keys(&self, memory: &Memory, region: Region) {
        let mut message = (memory.at.addr() as u64).to_le_bytes().to_vec();
        message.extend(region.key.remote.to_le_bytes());
        self.send(&message);
    }

    pub fn receive_keys(&self) -> (u64, u32) {
        let message = self.message();
        let (base, key) = message.split_at(8);
        (
            u64::from_le_bytes(base.try_into().unwrap()),
            u32::from_le_bytes(key.try_into().unwrap()),
        )
    }

    pub fn disconnect(&self) {
        // SAFETY: the connection lives.
        unsafe { (self.api.table.disconnect)(self.conn) };
    }

    /// Waits until the connection has ended. Returns the reason, a negative errno.
    pub fn end(&self) -> i32 {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Err(code) = self.sleep() {
                return code;
            }
            assert!(Instant::now() < until, "the end was not seen");
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // SAFETY: the connection is not used after this.
        unsafe { (self.api.table.destroy)(self.conn) };
    }
}

/// Arms a connection from any thread ([`Link::armer`]).
pub struct Armer<'a> {
    api: &'a Api,
    conn: *mut Conn,
}

// SAFETY: any thread may arm a connection, and the connection outlives this value.
unsafe impl Send for Armer<'_> {}
// SAFETY: as for Send.
unsafe impl Sync for Armer<'_> {}

impl Armer<'_> {
    pub fn arm(&self) {
        // SAFETY: the connection lives.
        assert_eq!(unsafe { (self.api.table.arm)(self.conn) }, 0, "arm");
    }
}
