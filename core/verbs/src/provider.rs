//! The plugin's functions over rdma-core, by name.

use std::ffi::c_void;
use std::time::Duration;

use rdmasock_core::fabric::plugin::errno::Result;
use rdmasock_core::fabric::plugin::serve::{Connection, Incoming, Listen, Provider};
use rdmasock_core::fabric::plugin::{Address, Device, Info, Keys, PRIVATE_BYTES, fds};
use rdmasock_core::fabric::remote::qp::{Completed, Read, Role, Write};

use crate::conn::{Conn, words};
use crate::connect;
use crate::device;
use crate::listen::Listener;
use crate::sys::{Context, Piece};

/// See the module.
pub struct Verbs;

impl Provider for Verbs {
    type Listener = Listener;
    type Conn = Conn;

    fn device(local: &Address) -> Result<Device> {
        device::find(local)
    }

    fn listen(local: &Address) -> Result<Listener> {
        Listener::new(local)
    }

    fn connect(
        local: &Address,
        remote: &Address,
        private: &[u8],
        timeout: Duration,
        beside: Option<&Conn>,
    ) -> Result<Conn> {
        connect::connect(local, remote, private, timeout, beside)
    }

    fn after_fork() {
        fds::take_all(|fd| {
            // SAFETY: the number is of an fd that this plugin had in the parent, and the child has closed none yet
            // ("before anything else"). By the raw system call: libc's may be hooked.
            unsafe { rustix::io::close(fd) };
        });
        Context::forget_all();
        // SAFETY: a fork child has one thread.
        unsafe { device::forget() };
    }
}

impl Listen for Listener {
    type Conn = Conn;

    fn port(&self) -> u16 {
        self.port()
    }

    fn fd(&self) -> i32 {
        self.fd()
    }

    fn next(&self) -> Result<Option<Incoming<Conn>>> {
        let next = self.next()?;
        Ok(next.map(|(conn, private)| Incoming {
            conn,
            private: words(&private),
            private_len: private.len.min(PRIVATE_BYTES as u32),
        }))
    }
}

impl Connection for Conn {
    fn accept(&self, private: &[u8], beside: Option<&Self>) -> Result<()> {
        self.accept(private, beside)
    }

    fn reject(self) {
        self.reject();
    }

    fn info(&self) -> Result<Info> {
        self.info()
    }

    fn state(&self) -> i32 {
        self.state()
    }

    unsafe fn register(&self, at: *mut c_void, len: usize, role: Role) -> Result<Keys> {
        // SAFETY: by this function's contract.
        unsafe { self.queue()?.register(at, len, role) }
    }

    fn deregister(&self, handle: u64) {
        if let Ok(queue) = self.queue() {
            queue.deregister(handle);
        }
    }

    unsafe fn write(&self, write: &Write, immediate: Option<u32>) -> Result<()> {
        let source = Piece {
            at: write.from,
            len: write.len,
            key: write.local,
        };
        // SAFETY: by this function's contract.
        unsafe { self.queue()?.write(source, write.to, write.remote, immediate) }
    }

    unsafe fn read(&self, read: &Read) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.queue()?.read(read) }
    }

    fn send<'a>(&self, parts: impl Iterator<Item = &'a [u8]> + Clone) -> Result<()> {
        self.queue()?.send(parts)
    }

    fn probe(&self) -> Result<()> {
        self.probe()
    }

    fn poll(&self, each: &mut dyn FnMut(Completed<'_>)) -> Result<usize> {
        self.queue()?.poll(each)
    }

    fn arm(&self) -> Result<()> {
        self.queue()?.arm()
    }

    fn disconnect(&self) {
        self.disconnect();
    }
}
