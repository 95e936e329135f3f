//! The end of the process, while it can still say something.

use std::sync::atomic::Ordering::Acquire;

use rdmasock_core::stats::Reason;

use crate::objects::library::Library;
use crate::objects::socket::{self, Mode};
use crate::process::close;
use crate::process::pass;
use crate::sys::errno;
use crate::sys::remains;
use crate::sys::time::now_ns;
use crate::sys::vfork;
use rdmasock_core::stream::connection::{self, resume};

/// How long the end of a process waits for promotions under way, and then for other hosts to have what was sent to
/// them, ns: for longer than a busy machine keeps a peer's thread from running.
const LAST_WORDS: u64 = 2_000_000_000;

/// Before this process ends: what other processes hold too goes back to TCP.
pub extern "C" fn at_exit() {
    if vfork::is_child() {
        return;
    }
    let errno = errno::get();
    let until = now_ns() + LAST_WORDS;
    // The service thread, which lives on until the end, begins no more promotions.
    Library::keep_on_tcp(Reason::Closed);
    for socket in socket::in_use() {
        // A marker that is left unread would make the kernel reset the connection: a promotion that is
        // under way gets the moment that it needs.
        while connection::is_scanning(socket) && !socket.promotion.holders.are_several() {
            connection::look(socket);
            // The last look comes after the last sleep, which may have been longer.
            if now_ns() >= until {
                break;
            }
            let _ = rustix::thread::nanosleep(&rustix::time::Timespec {
                tv_sec: 0,
                tv_nsec: 100_000,
            });
        }
        let shared = socket.promotion.holders.are_several();
        let is_foreign = socket.tx_mode.load(Acquire) == Mode::Foreign;
        if shared && !is_foreign && socket.may_be_on_link() {
            pass::release(socket, Reason::Inherited);
        }
        // Not what another process goes on with.
        if !shared && !socket.numbers.left_behind.load(Acquire) {
            let resets = close::resets_at_exit(socket);
            if !resets && let Some(mut control) = socket.control.lock() {
                resume::end(socket, &mut control);
            }
        }
        socket.promotion.holders.let_go(socket.is_plain());
    }
    // What is on its way to other hosts dies with the queue pair: until they have it, or TCP has. And what was closed
    // in the middle of a promotion the kernel would reset when the peer's markers come.
    let is_owed = || {
        socket::all().any(|socket| {
            let control = socket.control.lock();
            let is_staying = control.is_some_and(|c| resume::is_staying(&c));
            let is_open = socket.numbers.fd.load(Acquire) >= 0;
            is_open && is_staying && !close::is_hard(socket)
        })
    };
    let until = now_ns() + LAST_WORDS;
    while (is_owed() || remains::are_any()) && now_ns() < until {
        let _ = rustix::thread::nanosleep(&rustix::time::Timespec {
            tv_sec: 0,
            tv_nsec: 100_000,
        });
    }
    errno::set(errno);
}
