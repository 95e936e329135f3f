//! The end of the process, while the library can still send: promotions and links are brought to an end.

use std::sync::atomic::Ordering::Acquire;

use rdmasock_core::stats::Reason;
use rdmasock_core::stream::connection;
use rdmasock_core::stream::connection::stay;

use crate::objects::library::Library;
use crate::objects::socket::Mode;
use crate::objects::{mailbox, socket};
use crate::process::{close, pass};
use crate::sys::time::now_ns;
use crate::sys::{errno, time, vfork};

/// Bound on each of two waits at the end of a process, ns. The first is for promotions under way, the second for other
/// hosts to receive their bytes. Longer than a busy machine keeps a peer's thread from running.
const LAST_WORDS: u64 = 2_000_000_000;

/// Runs before this process ends. Takes streams that other processes hold too back to TCP, ends the others, and waits
/// until other hosts have received their bytes.
pub(crate) extern "C" fn at_exit() {
    if vfork::is_child() {
        return;
    }
    let errno = errno::get();
    let until = now_ns() + LAST_WORDS;
    // The service thread runs until the end, and begins no more promotions.
    Library::keep_on_tcp(Reason::Closed);
    for socket in socket::in_use() {
        // An unread marker would make the kernel reset the connection, so a promotion under way gets time to finish.
        while connection::is_scanning(socket) && !socket.promotion.holders.are_several() {
            connection::look(socket);
            // Checked after the last look, which comes after a sleep that may have been longer.
            if now_ns() >= until {
                break;
            }
            time::sleep(100_000);
        }
        let shared = socket.promotion.holders.are_several();
        let is_foreign = socket.tx_mode.load(Acquire) == Mode::Foreign;
        if shared && !is_foreign && socket.may_be_on_link() {
            pass::release(socket, Reason::Inherited);
        }
        // Not for a stream that another process continues.
        if !shared && !socket.numbers.left_behind.load(Acquire) {
            let resets = close::resets_at_exit(socket);
            if !resets && let Some(mut control) = socket.control.lock() {
                stay::end(socket, &mut control);
            }
        }
        socket.promotion.holders.let_go(socket.is_plain());
    }
    // Bytes on their way to other hosts are lost with the queue pair, so the process waits until the peers or TCP have
    // them. The kernel would also reset a connection that was closed during a promotion, when the peer's markers come.
    let is_owed = || {
        socket::all().any(|socket| {
            let control = socket.control.lock();
            let is_staying = control.is_some_and(|c| stay::is_staying(&c));
            let is_open = socket.numbers.fd.load(Acquire) >= 0;
            is_open && is_staying && !close::is_hard(socket)
        })
    };
    let until = now_ns() + LAST_WORDS;
    while (is_owed() || mailbox::are_any()) && now_ns() < until {
        time::sleep(100_000);
    }
    errno::set(errno);
}
