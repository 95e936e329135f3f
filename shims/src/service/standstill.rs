//! TCP_USER_TIMEOUT on a link: times a connection out whose other end reads nothing for that time, although bytes wait
//! for it (tcp(7)). TCP counts from when the window is closed, this file from when a send has found no room. On TCP the
//! kernel counts.

use std::sync::atomic::Ordering::Acquire;

use crate::data::tx;
use crate::notify::reset;
use crate::objects::mailbox::Ref;
use crate::objects::socket::Socket;

fn patience(socket: &Socket) -> u64 {
    u64::from(socket.options.user_timeout.load(Acquire)) * 1_000_000
}

/// A sender that has found no room, and waits at most TCP_USER_TIMEOUT for its reader.
struct Standing {
    r: Ref,
    /// The position of the reader at the last check.
    reader_at: u64,
    /// Since when the reader has not moved, monotonic ns.
    since: u64,
    /// The time of the next check, monotonic ns.
    deadline: u64,
}

/// The senders whose readers are timed.
#[derive(Default)]
pub struct Standstill {
    standing: Vec<Standing>,
}

impl Standstill {
    /// Begins to time the reader of a sender that has found no room.
    pub fn on_standing(&mut self, r: Ref) {
        if let Some(socket) = r.get()
            && let Some(reader_at) = tx::stands_still(socket)
        {
            let since = crate::sys::time::now_ns();
            self.standing.push(Standing {
                r,
                reader_at,
                since,
                deadline: since + patience(socket),
            });
        }
    }

    /// Returns the time of the next check, monotonic ns; `None` if no reader is timed.
    pub fn next_timeout(&self) -> Option<u64> {
        self.standing.iter().map(|standing| standing.deadline).min()
    }

    /// Times out the connections whose readers have not moved for too long.
    pub fn on_timeout(&mut self, now: u64) {
        self.standing.retain_mut(|standing| {
            if standing.deadline > now {
                return true;
            }
            let Some(socket) = standing.r.get() else {
                return false;
            };
            let Some(reader_at) = tx::stands_still(socket) else {
                return false;
            };
            if std::mem::replace(&mut standing.reader_at, reader_at) != reader_at {
                standing.since = now;
            }
            // The program may have set another time meanwhile, or none.
            let patience = patience(socket);
            standing.deadline = standing.since + patience;
            let is_over = patience != 0 && standing.deadline <= now;
            if is_over {
                tracing::debug!(target: "rdmasock", slot = socket.slot, "timed out");
                reset::time_out(socket);
            }
            if is_over || patience == 0 {
                tx::forget_standing(socket);
            }
            patience != 0 && !is_over
        });
    }
}
