//! Data in front of a marker when the connection is handed to somebody who reads the kernel alone: the marker would become his data
//! (P85). It is set aside, so that the marker has its turn and the attempt goes on to its end. Then the peer, which
//! has sent it, takes it back, and sends it again in TCP before all else.
//!
//! Within a host. Between hosts, and to a peer that cannot, such a connection is reset: a gap in the data would be worse than its end.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering::{Acquire, SeqCst};

use rdmasock_core::os::memfd;
use rdmasock_core::os::privatefd::PrivateFd;
use rdmasock_core::stats::Path;
use rdmasock_core::stream::handshake::Handshake;
use rdmasock_core::wire::Message;
use rdmasock_core::wire::scan::{Found, scan};
use rustix::net::RecvFlags;

use super::scan::{AtMark, look_ahead, take};
use super::{feed, leave, readable};
use crate::library::Library;
use crate::ready;
use crate::service::Command;
use crate::socket::{Control, Mode, Receiving, Rx, Socket};

/// No more is set aside, or taken back.
const MOST: usize = 16 * 1024 * 1024;
/// How long a marker may take that the peer can write at once, ns. One that waits for the end of a send does so until TCP has room.
const AT_ONCE: u64 = 10_000_000;

/// Brings the attempt under way within the host nearer to its end. True if there is none whose markers may come any more.
pub fn press_on(socket: &'static Socket) -> bool {
    super::flush(socket);
    while let Some(mut control) = socket.control.lock() {
        let handshake = control.handshake.as_ref();
        if handshake.is_none_or(Handshake::is_between_hosts) {
            return true;
        }
        let Some(mut rx) = socket.rx.lock() else {
            return true;
        };
        if socket.rx_mode.load(Acquire) != Mode::Marked || rx.scan.is_none() {
            return true;
        }
        let now = crate::time::now_ns();
        let since = *control.handed_since.get_or_insert(now);
        let makes_room = now.saturating_sub(since) > AT_ONCE;
        match set_aside(socket, &mut rx, makes_room) {
            front @ (Front::Marker | Front::Part) => {
                // It has its turn. A part does not stay in the kernel, whose window it might keep closed (P34).
                let _ = look_ahead(socket, &mut control, rx, AtMark::HandOver, || {
                    socket.rx.lock()
                });
                if matches!(front, Front::Part) {
                    break;
                }
            }
            Front::Room => {}
            Front::LastData => {
                drop(rx);
                feed(socket, &mut control, |h| Ok(h.on_end()));
                return true;
            }
            Front::Unknown => {
                drop(rx);
                drop(control);
                readable(socket);
                break;
            }
        }
    }
    !super::is_scanning(socket)
}

/// What is in front when data has been set aside.
enum Front {
    Marker,
    /// What may become one.
    Part,
    /// TCP has room for more data.
    Room,
    /// Data, with no marker before TCP's end. It is where it was.
    LastData,
    /// Data or nothing, and a marker may come.
    Unknown,
}

fn set_aside(socket: &Socket, rx: &mut Rx, makes_room: bool) -> Front {
    // A call that was in the kernel before the scan began has the first turn.
    let (Some(nonce), Some(fd), 0) = (rx.scan, socket.anchor_fd(), socket.rx_inside.load(SeqCst))
    else {
        return Front::Unknown;
    };
    let has_ended = ready::has_peer_ended(fd);
    let waiting = rustix::io::ioctl_fionread(fd).map_or(0, |n| n as usize);
    let carried = rx.carry.len();
    let mut seen = Vec::new();
    if carried + waiting > MOST || seen.try_reserve_exact(carried + waiting).is_err() {
        return Front::Unknown;
    }
    seen.extend_from_slice(rx.carry.as_slice());
    seen.resize(carried + waiting, 0);
    let room = seen.get_mut(carried..).unwrap_or_default();
    let peeked = match rustix::net::recv(fd, room, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok((_, n)) => n.min(waiting),
        Err(_) => 0,
    };
    seen.truncate(carried + peeked);
    let found = scan(&nonce, &seen);
    let front = match found.what {
        Found::Payload if has_ended && found.payload > 0 => return Front::LastData,
        Found::PartialMarker { .. } if found.payload == 0 => return Front::Part,
        Found::Payload | Found::PartialMarker { .. } if makes_room && found.payload > 0 => {
            Front::Room
        }
        Found::Payload | Found::PartialMarker { .. } => return Front::Unknown,
        Found::Marker { .. } | Found::Bad { .. } => Front::Marker,
    };
    seen.truncate(found.payload);
    if rx.aside.len() + seen.len() > MOST || !take(rx, fd, seen.len()) {
        return Front::Unknown;
    }
    rx.scanned = 0;
    rx.aside.append(&mut seen);
    socket.ledger.received.add_ours(found.payload);
    front
}

/// SWITCH has been read, and something is set aside: the peer is asked to take it back. The caller holds the control lock.
pub(super) fn give_back(socket: &'static Socket, control: &Control) {
    if ask_peer(socket, control).is_none() {
        tracing::warn!(target: "rdmasock", slot = socket.slot, "the peer cannot take back what was not read: reset");
        crate::socket::reset(socket);
        if let Some(mut rx) = socket.rx.lock() {
            end(socket, &mut rx, Receiving::Abandoned);
        }
    }
}

fn ask_peer(socket: &Socket, control: &Control) -> Option<()> {
    let opened = control
        .opened
        .filter(|o| control.takes_back && !o.link.is_remote())?;
    let yours = control.peer?;
    let rx = socket.rx.lock()?;
    let bytes = u32::try_from(rx.aside.len()).ok()?;
    let file = memfd::create_file("rdmasock-back", bytes.into()).ok()?;
    let mut at = 0;
    while let Some(rest) = rx.aside.get(at..).filter(|rest| !rest.is_empty()) {
        at += rustix::io::write(&file, rest).ok().filter(|n| *n > 0)?;
    }
    tracing::debug!(target: "rdmasock::promote", slot = socket.slot, bytes, "to be taken back");
    let message = Message::TakeBack { yours, bytes };
    opened.link.send(&message, &[file.as_fd()]).ok()
}

/// What the peer has taken out of TCP, and what is on the link, is to be sent in TCP again.
pub fn on_take_back(socket: &'static Socket, control: &mut Control, bytes: u32, file: &PrivateFd) {
    let done = read_back(bytes, file).is_some_and(|bytes| {
        let Some(mut tx) = socket.tx.lock() else {
            return false;
        };
        // If the program has ended the direction meanwhile, it is too late.
        let is_on_link = socket.tx_mode.load(Acquire) == Mode::Link && tx.producer.is_some();
        if is_on_link {
            tx.marker.extend_from_slice(&bytes);
            tx.again += bytes.len();
            // The program has sent it once.
            socket.ledger.sent.add_ours(bytes.len());
            leave::send_again(socket, &mut tx);
        }
        is_on_link
    });
    super::flush(socket);
    if let (true, Some(opened), Some(yours)) = (done, control.opened, control.peer) {
        let _ = opened.link.send(&Message::TakenBack { yours }, &[]);
    } else {
        tracing::warn!(target: "rdmasock", slot = socket.slot, "cannot send again what was not read: reset");
        crate::socket::reset(socket);
    }
}

fn read_back(bytes: u32, file: &PrivateFd) -> Option<Vec<u8>> {
    // Nothing that could make this thread wait, nor a file that shrinks.
    memfd::check_received(file.as_fd(), bytes.into(), memfd::Access::ReadOnly).ok()?;
    let len = usize::try_from(bytes).ok().filter(|n| *n <= MOST)?;
    let mut read = Vec::new();
    read.try_reserve_exact(len).ok()?;
    read.resize(len, 0);
    let mut at = 0;
    while let Some(rest) = read.get_mut(at..).filter(|rest| !rest.is_empty()) {
        at += rustix::io::pread(file, rest, at as u64)
            .ok()
            .filter(|n| *n > 0)?;
    }
    Some(read)
}

/// The peer has what was set aside, and sends it, and all that it has sent on the link, in TCP.
pub fn on_taken_back(socket: &'static Socket) {
    let Some(mut rx) = socket.rx.lock() else {
        return;
    };
    if socket.rx_mode.load(Acquire) == Mode::Marked && rx.scan.is_none() && !rx.aside.is_empty() {
        if let Some(consumer) = rx.consumer.as_mut() {
            let _ = consumer.stop();
        }
        end(socket, &mut rx, Receiving::Settled);
        drop(rx);
        if let Some(stats) = socket.stats() {
            stats.set_rx_path(Path::Tcp);
        }
        Library::get().service.submit(Command::drained(socket));
        Library::get().service.submit(Command::notify(socket));
    }
}

fn end(socket: &Socket, rx: &mut Rx, event: Receiving) {
    rx.aside = Vec::new();
    socket.rx_mode.go(event);
}

/// What a peer gives back is data, whatever it sends.
#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, Mode, OFlags, memfd_create, open};

    use super::*;

    fn file(bytes: &[u8]) -> PrivateFd {
        let file = memfd::create_file("test-back", bytes.len() as u64).unwrap();
        assert_eq!(rustix::io::write(&file, bytes), Ok(bytes.len()));
        file
    }

    #[test]
    fn a_file_is_read_from_its_beginning_wherever_the_peer_has_left_it() {
        assert_eq!(read_back(4, &file(b"unread")), Some(b"unre".to_vec()));
    }

    /// What is no memfd might keep the service thread waiting, and one that is not sealed could shrink.
    #[test]
    fn nothing_but_a_sealed_file_of_that_size_is_read() {
        let device = PrivateFd::open(|| open("/dev/zero", OFlags::RDONLY, Mode::empty()));
        assert_eq!(read_back(1, &device.unwrap()), None);
        let unsealed = PrivateFd::open(|| memfd_create("test-back", MemfdFlags::ALLOW_SEALING));
        let unsealed = unsealed.unwrap();
        rustix::fs::ftruncate(&unsealed, 4096).unwrap();
        assert_eq!(read_back(1, &unsealed), None);
        assert_eq!(read_back(7, &file(b"unread")), None);
        assert_eq!(read_back(0, &file(b"unread")), None);
        let large = memfd::create_file("test-back", MOST as u64 + 1).unwrap();
        assert_eq!(read_back(MOST as u32 + 1, &large), None);
    }
}
