//! A connection: how it is made, and its state.

use std::os::fd::AsFd;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rdmasock_core::fabric::plugin::serve::Connection;
use rdmasock_core::fabric::plugin::{Address, Errno, Fate, Hidden, Info, Result, serve};
use rdmasock_core::fabric::remote::qp::{Completed, Limits, Read, Region, Role, Write};
use rdmasock_core::lock::Lock;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use crate::domain::Table;
use crate::greeting::{Greeting, Kind, Private, files};
use crate::pair::{BUFFER_BYTES, Pair, RECEIVES, Shared};
use crate::queue::{Far, Queue, READS};
use crate::settings::Settings;
use crate::{domain, greeting, names, nic, pair};

/// The time between attempts to connect while the listener's queue is full.
const AGAIN: Duration = Duration::from_millis(1);

/// A connection; see the module.
pub struct Conn {
    settings: Settings,
    channel: Arc<Hidden>,
    fate: Arc<Fate>,
    /// Set by `accept` or `connect`.
    queue: OnceLock<Arc<Queue>>,
    /// The request, until `accept`.
    request: Lock<Option<Greeting>>,
    /// The private data of the answer.
    private: Private,
}

impl Conn {
    /// Makes a connection of a received request.
    pub fn requested(settings: Settings, channel: Hidden, request: Greeting) -> Self {
        Self {
            settings,
            channel: Arc::new(channel),
            fate: Arc::default(),
            queue: OnceLock::new(),
            request: Lock::new(Some(request)),
            private: Private::NONE,
        }
    }

    /// Connects to a listener. A connection `beside` another one shares that one's completion fd.
    pub fn connect(
        settings: Settings,
        remote: &Address,
        private: &[u8],
        timeout: Duration,
        beside: Option<&Self>,
    ) -> Result<Self> {
        nic::check()?;
        let (begun, until) = (
            Instant::now(),
            Instant::now().checked_add(timeout).ok_or(Errno(libc::EINVAL))?,
        );
        let private = Private::of(private)?;
        let channel = dial(remote, until)?;
        let (memory, memory_file) = Shared::create(pair::BYTES)?;
        let (domain, bell) = (domain::of_process()?, bell_of(beside)?);
        greeting::send(
            &channel,
            Kind::Request,
            &private,
            &files([&memory_file, domain.file(), &bell]),
        )?;
        let answer = loop {
            match greeting::receive(&channel) {
                Ok(Some(answer)) => break answer,
                Ok(None) => wait(&channel, until)?,
                Err(Errno(libc::ECONNRESET)) => return Err(Errno(libc::ECONNREFUSED)),
                Err(error) => return Err(error),
            }
        };
        if answer.kind != Kind::Accept {
            return Err(Errno(libc::ECONNREFUSED));
        }
        // The answer arrives `late_ms` after the request.
        let there = begun + Duration::from_millis(settings.late_ms);
        std::thread::sleep(there.min(until).saturating_duration_since(Instant::now()));
        if there > until {
            return Err(Errno(libc::ETIMEDOUT));
        }
        let [table, theirs] = <[Hidden; 2]>::try_from(answer.files).map_err(|_| Errno(libc::EPROTO))?;
        let channel = Arc::new(channel);
        let fate = Arc::<Fate>::default();
        let far = Far {
            pid: answer.pid,
            table: Table::new(Shared::map(table.as_fd(), domain::BYTES)?)?,
        };
        let pair = Pair::new(memory, 0, [bell, Arc::new(theirs)])?;
        let queue = Arc::new(Queue::new(
            settings,
            pair,
            far,
            domain,
            Arc::clone(&channel),
            Arc::clone(&fate),
            most_bytes(beside),
        ));
        queue.enter_device()?;
        greeting::send(&channel, Kind::Ready, &Private::NONE, &[])?;
        fate.up();
        Ok(Self {
            settings,
            channel,
            fate,
            queue: OnceLock::from(queue),
            request: Lock::new(None),
            private: answer.private,
        })
    }

    fn queue(&self) -> Result<&Arc<Queue>> {
        self.queue.get().ok_or(Errno(libc::ENOTCONN))
    }

    /// Handles the messages of the other end after the request.
    fn take_in(&self) {
        loop {
            match greeting::receive(&self.channel) {
                Ok(Some(greeting)) if greeting.kind == Kind::Ready => self.fate.up(),
                Ok(Some(_)) => {
                    self.fate.end(Errno(libc::EPROTO));
                }
                Ok(None) => return,
                Err(_) => {
                    self.fate.end(Errno(libc::ECONNRESET));
                    return;
                }
            }
        }
    }
}

impl Connection for Conn {
    fn accept(&self, private: &[u8], beside: Option<&Self>) -> Result<()> {
        let request = self.request.lock().and_then(|mut request| request.take());
        let request = request.ok_or(Errno(libc::EISCONN))?;
        let [memory, table, theirs] = <[Hidden; 3]>::try_from(request.files).map_err(|_| Errno(libc::EPROTO))?;
        let (domain, bell) = (domain::of_process()?, bell_of(beside)?);
        let far = Far {
            pid: request.pid,
            table: Table::new(Shared::map(table.as_fd(), domain::BYTES)?)?,
        };
        let private = Private::of(private)?;
        let sent = greeting::send(&self.channel, Kind::Accept, &private, &files([domain.file(), &bell]));
        sent.inspect_err(|error| {
            self.fate.end(*error);
        })?;
        let pair = Pair::new(Shared::map(memory.as_fd(), pair::BYTES)?, 1, [bell, Arc::new(theirs)])?;
        let queue = Queue::new(
            self.settings,
            pair,
            far,
            domain,
            Arc::clone(&self.channel),
            Arc::clone(&self.fate),
            most_bytes(beside),
        );
        let queue = Arc::new(queue);
        queue.enter_device()?;
        self.queue.set(queue).map_err(|_| Errno(libc::EISCONN))
    }

    fn reject(self) {
        let _ = greeting::send(&self.channel, Kind::Reject, &Private::NONE, &[]);
    }

    fn info(&self) -> Result<Info> {
        let (queue, settings) = (self.queue()?, &self.settings);
        Ok(Info {
            state_fd: self.channel.number(),
            completion_fd: queue.bell().number(),
            limits: Limits {
                receive_buffers: RECEIVES,
                buffer_bytes: BUFFER_BYTES as u32,
                immediate: !settings.is_iwarp,
                packet_bytes: if settings.is_iwarp { 0 } else { 4096 },
                reads: READS,
            },
            private: self.private.bytes,
        })
    }

    fn state(&self) -> i32 {
        self.take_in();
        self.fate.code()
    }

    unsafe fn register(&self, at: *mut std::ffi::c_void, len: usize, role: Role) -> Result<Region> {
        self.queue()?.register(at.expose_provenance() as u64, len as u64, role)
    }

    fn deregister(&self, handle: u64) {
        if let Ok(queue) = self.queue() {
            queue.deregister(handle);
        }
    }

    unsafe fn write(&self, write: &Write, immediate: Option<u32>) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.queue()?.write(write, immediate) }
    }

    unsafe fn read(&self, read: &Read) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.queue()?.read(read) }
    }

    fn send(&self, message: &[u8]) -> Result<()> {
        self.queue()?.send(message)
    }

    fn probe(&self) -> Result<()> {
        self.queue()?.probe()
    }

    fn poll(&self, each: &mut dyn FnMut(Completed<'_>)) -> Result<usize> {
        self.queue()?.poll(each)
    }

    fn arm(&self) -> Result<()> {
        self.queue()?.arm()
    }

    fn disconnect(&self) {
        if let Ok(queue) = self.queue() {
            queue.fail("disconnected", libc::ENOTCONN);
        }
    }
}

impl Drop for Conn {
    fn drop(&mut self) {
        self.disconnect();
        if let Ok(queue) = self.queue() {
            queue.close();
        }
    }
}

/// Returns the bound on the bytes in the send queue, for a connection beside another one or not.
fn most_bytes(beside: Option<&Conn>) -> u64 {
    match beside {
        Some(_) => serve::FOR_BULK,
        None => serve::FOR_MESSAGES,
    }
}

/// Returns the bell of this end, shared with `beside` if there is one.
fn bell_of(beside: Option<&Conn>) -> Result<Arc<Hidden>> {
    match beside {
        Some(other) => Ok(Arc::clone(other.queue()?.bell())),
        None => Ok(Arc::new(Hidden::place(eventfd(
            0,
            EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK,
        )?)?)),
    }
}

fn dial(remote: &Address, until: Instant) -> Result<Hidden> {
    let name = names::name_of(remote)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let channel = Hidden::place(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)?;
    loop {
        match rustix::net::connect(&channel, &name) {
            Ok(()) => return Ok(channel),
            Err(rustix::io::Errno::AGAIN) if Instant::now() < until => std::thread::sleep(AGAIN),
            Err(rustix::io::Errno::AGAIN) => return Err(Errno(libc::ETIMEDOUT)),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Sleeps until a message arrives, or until the deadline; ETIMEDOUT if that has passed.
fn wait(channel: &Hidden, until: Instant) -> Result<()> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(Errno(libc::ETIMEDOUT));
    }
    let timeout = Timespec::try_from(left).map_err(|_| Errno(libc::EINVAL))?;
    match poll(&mut [PollFd::new(channel, PollFlags::IN)], Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
