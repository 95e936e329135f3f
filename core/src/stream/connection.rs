//! An end of a connection: what its two directions run on, and the code that carries out promotion, the stay on a link
//! and the way back. A process uses this object on the kernel's socket and a real link. The simulation of the tests
//! uses the same object. All calls to the socket, the link and the process go through [`SocketIo`]. No code here
//! blocks, reads a clock or makes a system call.
//!
//! The state machines of [`super::handshake`] and [`super::resume`] decide what is to be done. [`super::mode`] decides
//! what a direction may run on. The modules here hold the state that the machines act on, and carry the steps out:
//!
//! | module, lowest first | what it does |
//! |---|---|
//! | `object`, `carry`, `io` | the state; bytes held back from the program; the interface to socket, link and process |
//! | `receiving`, `sending` | the operations on either direction |
//! | `stay` | carries out the way back from a link between hosts |
//! | `streams`, `aside` | this end's stream on the link; data that was set aside for another holder |
//! | `attempt` | carries out the handshake's steps |
//! | `scan` | scans what TCP delivers for markers, and hands them over |
//! | `resume`, `leave`, `close` | requests of the program or its peer: the way back, shutdown() and close() |
//! | `ahead` | markers behind data that the program does not read |
//! | `hand_over` | data in front of a marker when the connection is handed to another holder |
//! | `messages` | messages of the peer on the link about the stream |
//!
//! Lock order: `control`, `rx`, `tx`. Each function's comment names the locks that its caller holds.

#![forbid(unsafe_code)]

mod ahead;
mod aside;
mod attempt;
mod carry;
mod close;
mod hand_over;
mod io;
mod leave;
mod messages;
mod object;
mod receiving;
pub mod resume;
mod scan;
mod sending;
mod stay;
mod streams;

pub use ahead::{drop_unread, read_ahead};
pub use aside::MOST as MOST_ASIDE;
pub use attempt::{begin_asking, begin_offering, end_attempt, feed, look_for_resume, on_link_up};
pub use carry::{Carry, after_fork};
pub use close::{Awaited, close_if_over, close_tx, return_unread, scan_left, shut};
pub use hand_over::{on_take_back, on_taken_back, press_on};
pub use io::{ConnectionOf, ControlOf, Half, Peeked, RxOf, SocketIo, StreamLink, Task, Tcp, TxOf, Unsent};
pub use leave::{leave, prefer_tcp, return_to_tcp};
pub use messages::{Broken, OpenNonces, on_demote_request, on_open, on_open_ack, on_open_refused};
pub use object::{Connection, Control, Opened, Rx, Tx};
pub use receiving::{
    hand_over_rest, is_over, is_scanning, leave_link_at_end, look_for_reset, on_end_told, refuse, shut_receiving,
    start_scan, stop_scan,
};
pub use scan::{Ahead, AtMark, has_marker, look, look_ahead, scan_taken, seen_ahead};
pub use sending::{Farewell, flush, resend, wait_for_tcp};
pub use streams::close_stream;
