//! Rings of the wrong size: too small for a sender whose reader stands still, or large and idle.

use std::sync::atomic::Ordering::Acquire;

use rdmasock_core::stream::connection;
use rdmasock_core::wire::Message;

use super::alarms::Alarm;
use crate::data::rx::{self, Shrunk};
use crate::data::tx;
use crate::notify::ready;
use crate::objects::cgroup;
use crate::objects::mailbox::Ref;
use crate::objects::socket::{self, Mode};

/// A reader that has not read for this time, ns, stands still: its ring grows without it.
const STILL_FOR: u64 = 2_000_000;

/// The longest time between two checks of a sender that stands still, ns.
const LONGEST: u64 = 1_000_000_000;

/// How often idle rings are searched for after a ring has grown, ns.
const SHRINK_EVERY: u64 = 1_000_000_000;

/// A sender that found no room, and the position of its reader then.
struct Blocked {
    r: Ref,
    reader_at: u64,
    /// Time between two checks of the sender, ns.
    every: u64,
    /// The time of the next check, monotonic ns.
    deadline: u64,
}

/// The rings whose size may have to change.
#[derive(Default)]
pub struct Rings {
    blocked: Vec<Blocked>,
    /// When idle rings are searched for.
    shrink: Alarm,
}

impl Rings {
    /// Begins to check a sender that has found no room.
    pub fn on_blocked(&mut self, r: Ref) {
        if let Some(socket) = r.get()
            && let Some(reader_at) = tx::reader_at(socket)
        {
            self.blocked.push(Blocked {
                r,
                reader_at,
                every: STILL_FOR,
                deadline: crate::sys::time::now_ns() + STILL_FOR,
            });
        }
    }

    /// Returns the time of the next check, monotonic ns; `None` if there is none.
    pub fn next_timeout(&self) -> Option<u64> {
        let blocked = self.blocked.iter().map(|blocked| blocked.deadline);
        blocked.chain(self.shrink.next()).min()
    }

    /// Helps senders that have found no room for a while, and shrinks idle rings.
    pub fn on_timeout(&mut self, now: u64) {
        self.relieve(now);
        if self.shrink.rings(now) {
            cgroup::look();
            self.shrink(now);
        }
    }

    fn relieve(&mut self, now: u64) {
        let late: Vec<Blocked> = self.blocked.extract_if(.., |p| p.deadline <= now).collect();
        for blocked in late {
            let Some(socket) = blocked.r.get() else {
                continue;
            };
            if let Some(reader_at) = tx::ask_for_room(socket, blocked.reader_at) {
                let every = match reader_at == blocked.reader_at {
                    true => (blocked.every * 2).min(LONGEST),
                    false => STILL_FOR,
                };
                self.blocked.push(Blocked {
                    reader_at,
                    every,
                    deadline: now + every,
                    ..blocked
                });
            } else if connection::read_ahead(socket, true) {
                ready::notify_local(socket);
            }
        }
    }

    /// Schedules a search for idle rings, after a ring has grown.
    pub fn on_grown(&mut self) {
        self.shrink.set_if_off(|| {
            cgroup::look();
            crate::sys::time::now_ns() + SHRINK_EVERY
        });
    }

    /// Gives idle rings their first size, and searches again later if some are in use.
    fn shrink(&mut self, now: u64) {
        let mut again = false;
        for socket in socket::all() {
            again |= !tx::give_back(socket);
            if socket.rx_mode.load(Acquire) != Mode::Link {
                continue;
            }
            let Some(link) = socket.link() else { continue };
            match rx::shrink(socket, link) {
                Shrunk::Small => {}
                Shrunk::Busy => again = true,
                Shrunk::Offered => {
                    again = true;
                    let peer = socket.control.lock().and_then(|c| c.peer);
                    if let Some(yours) = peer {
                        let _ = link.send(&Message::Adopt { yours }, &[]);
                    }
                }
            }
        }
        if again {
            self.shrink.set(now + SHRINK_EVERY);
        }
    }
}
