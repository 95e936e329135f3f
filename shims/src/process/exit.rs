//! Runs at the end of the process, while the library can still send: ends promotions and streams in order.

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

/// Bounds each of two waits at the end of a process, ns. The first is for promotions under way, the second for other
/// hosts to receive their bytes. It is longer than a busy machine delays a peer's thread.
const LAST_WORDS: u64 = 2_000_000_000;

/// Runs before this process ends. Takes a stream whose socket other processes hold too back to TCP, ends all other
/// streams, and waits until other hosts have received their bytes.
pub(crate) extern "C" fn at_exit() {
    if vfork::is_child() {
        return;
    }
    let errno = errno::get();
    let until = now_ns() + LAST_WORDS;
    // From here on the service thread, which runs until the end, begins no promotion.
    Library::keep_on_tcp(Reason::Closed);
    for socket in socket::in_use() {
        // An unread marker would make the kernel reset the connection, so a promotion under way gets time to finish.
        while connection::is_scanning(socket) && !socket.promotion.holders.are_several() {
            connection::look(socket);
            // The time is checked after `look`, so that there is one more look after a sleep that has overrun `until`.
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
        // A stream that another process holds, or that the program has closed before, is not ended here.
        if !shared && !socket.numbers.left_behind.load(Acquire) {
            let resets = close::resets_at_exit(socket);
            if !resets && let Some(mut control) = socket.control.lock() {
                stay::end(socket, &mut control);
            }
        }
        socket.promotion.holders.let_go(socket.is_plain());
    }
    // Bytes on their way to other hosts would be lost with the queue pair, so the process waits until the peers or TCP
    // have them. It also waits for the peer's markers on connections that were closed during a promotion. If they came
    // after the process has ended, the kernel would reset the connection.
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
