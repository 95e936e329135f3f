//! A simulated end: the product's own connection (`stream::connection`) on simulated media, with the least that a
//! process has around a connection. A program reads, writes and shuts down; a service thread carries out its tasks.
//! Single-threaded.

mod io;
mod program;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::ops::Deref;
use std::rc::Rc;
use std::sync::atomic::Ordering::SeqCst;

pub use io::Link;
use rdmasock_core::fabric::mem::{Clock, Medium};
use rdmasock_core::ids::{InstanceId, Nonce, Tuple, Vqpn};
use rdmasock_core::stats::Reason;
use rdmasock_core::stream::connection;
use rdmasock_core::stream::connection::{Connection, ConnectionOf, ControlOf, StreamLink as _, Task};
use rdmasock_core::stream::handshake::{Handshake, Phase, Role};
use rdmasock_core::stream::mode::Mode;
use rdmasock_core::wire;
use rdmasock_core::wire::Message;

use super::tcp::Tcp;

/// How an attempt to promote the connection ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// Both directions are on the link.
    Promoted,
    /// The connection is on TCP, and may be tried again.
    Abandoned,
    /// The connection is to stay on TCP once it is back there.
    Pinned,
}

/// The outside world of an end.
#[derive(Debug)]
pub struct Net {
    /// The time.
    pub clock: Clock,
    /// This end's sending direction.
    pub out: Rc<RefCell<Tcp>>,
    /// This end's receiving direction.
    pub inn: Rc<RefCell<Tcp>>,
    /// Out of band, to the other end.
    pub oob: Rc<Medium>,
}

/// A simulated end.
pub struct Endpoint {
    connection: ConnectionOf<Endpoint>,
    id: InstanceId,
    /// Which end this is.
    pub role: Role,
    net: Rc<Net>,
    /// This end of the current link, whether or not the connection is on it.
    link: RefCell<Link>,
    /// The link that the connection is on.
    its_link: RefCell<Option<Link>>,
    /// The tasks of the service thread.
    tasks: RefCell<VecDeque<Task>>,
    /// The connection has asked for the link.
    pub wants_link: Cell<bool>,
    request: Cell<u64>,
    /// The YES that is out, and when to repeat it.
    yes: RefCell<Option<(Message, u64)>>,
    /// Nonces that a HELLO was written for: never to be cancelled, however late a YES comes again.
    greeted: RefCell<Vec<Nonce>>,
    outcomes: RefCell<Vec<Outcome>>,
    /// The program has shut its sending direction down.
    fin: Cell<bool>,
    /// A read of the program's is in the kernel.
    inside: Cell<bool>,
    /// The bytes that the program has received, and whether it has received EOF.
    received: RefCell<Vec<u8>>,
    eof: Cell<bool>,
}

impl Deref for Endpoint {
    type Target = ConnectionOf<Endpoint>;

    fn deref(&self) -> &ConnectionOf<Endpoint> {
        &self.connection
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let control = self.control();
        f.debug_struct("Endpoint")
            .field("role", &self.role)
            .field("tx", &self.tx())
            .field("rx", &self.rx())
            .field("handshake", &control.handshake)
            .field("stay", &control.stay)
            .field("outcomes", &self.outcomes)
            .field("fin", &self.fin)
            .field("eof", &self.eof)
            .finish_non_exhaustive()
    }
}

impl Endpoint {
    /// An end of a connection that is on TCP.
    pub fn new(role: Role, net: Net, link: Link) -> Self {
        Self {
            connection: Connection::default(),
            id: id_of(role),
            role,
            net: Rc::new(net),
            link: RefCell::new(link),
            its_link: RefCell::new(None),
            tasks: RefCell::default(),
            wants_link: Cell::new(false),
            request: Cell::new(0),
            yes: RefCell::default(),
            greeted: RefCell::default(),
            outcomes: RefCell::default(),
            fin: Cell::new(false),
            inside: Cell::new(false),
            received: RefCell::default(),
            eof: Cell::new(false),
        }
    }

    fn control(&self) -> rdmasock_core::lock::Guard<'_, ControlOf<Self>> {
        self.connection.control.lock().expect("nobody holds it")
    }

    /// Returns the mode of the sending direction.
    pub fn tx(&self) -> Mode {
        self.tx_mode.load(SeqCst)
    }

    /// Returns the mode of the receiving direction.
    pub fn rx(&self) -> Mode {
        self.rx_mode.load(SeqCst)
    }

    /// Returns whether the connection is on TCP alone, without an attempt or a stream.
    pub fn is_plain(&self) -> bool {
        self.connection.is_plain() && self.control().handshake.is_none()
    }

    /// Returns whether the connection has a vQPN on the link.
    pub fn has_stream(&self) -> bool {
        let control = self.control();
        let has_producer = self.tx.lock().is_none_or(|tx| tx.producer.is_some());
        let has_consumer = self.rx.lock().is_none_or(|rx| rx.consumer.is_some());
        control.opened.is_some() || has_producer || has_consumer
    }

    /// Returns the phase of the attempt under way; `None` if there is no attempt.
    pub fn phase(&self) -> Option<Phase> {
        self.control().handshake.as_ref().map(Handshake::phase)
    }

    /// Returns how attempts ended.
    pub fn outcomes(&self) -> Vec<Outcome> {
        self.outcomes.borrow().clone()
    }

    /// Returns the bytes that TCP has to bring before it may end.
    pub fn owed(&self) -> u64 {
        self.rx.lock().map_or(0, |rx| rx.owed)
    }

    /// Returns this end of the current link.
    pub fn link_here(&self) -> Link {
        self.link.borrow().clone()
    }

    // ---- out of band ----

    /// The connector asks.
    pub fn ask(&self, nonce: Nonce, tuple: Tuple) {
        if !self.is_plain() || self.has_stream() || self.fin.get() {
            return;
        }
        let mut control = self.control();
        control.leave = None;
        connection::begin_asking(&mut control, nonce, self.link_here().is_remote());
        self.request.set(self.request.get() + 1);
        let message = Message::Ask {
            request: self.request.get(),
            tuple,
            nonce_c: nonce,
            instance_c: self.id,
        };
        self.net.oob.send(&message).unwrap();
    }

    /// The answer did not come in time.
    pub fn ask_times_out(&self) {
        let mut control = self.control();
        if control.handshake.as_ref().is_some_and(Handshake::is_asking) {
            connection::end_attempt(self, &mut control);
        }
    }

    /// Handles a message out of band; `fresh` is a nonce for an answer that needs one.
    pub fn on_oob(&self, message: Message, fresh: Nonce) {
        match message {
            Message::Ask {
                request,
                nonce_c,
                instance_c,
                ..
            } => self.answer(request, nonce_c, instance_c, fresh),
            Message::Yes { request, nonce_s, .. } => self.on_yes(request, nonce_s),
            Message::No { request, .. } if request == self.request.get() => self.ask_times_out(),
            Message::Cancel { nonce_s } => {
                let mut control = self.control();
                if control.handshake.as_ref().is_some_and(|h| h.mine == nonce_s) {
                    connection::feed(self, &mut control, Handshake::on_cancel);
                }
            }
            _ => {}
        }
    }

    fn answer(&self, request: u64, nonce_c: Nonce, asker: InstanceId, fresh: Nonce) {
        let is_free = self.is_plain() && !self.has_stream();
        let mut control = self.control();
        let again = control
            .handshake
            .as_ref()
            .filter(|h| h.theirs == Some(nonce_c))
            .map(|h| h.mine);
        let nonce_s = match again {
            Some(nonce_s) => Some(nonce_s),
            None if is_free && connection::start_scan(self, fresh).is_ok() => {
                let reached_at = self.link_here().is_remote().then_some(IpAddr::V4(Ipv4Addr::LOCALHOST));
                control.leave = None;
                connection::begin_offering(&mut control, (fresh, nonce_c), asker, reached_at);
                Some(fresh)
            }
            None => None,
        };
        let Some(nonce_s) = nonce_s else {
            let reason = wire::Reason::Use;
            self.net.oob.send(&Message::No { request, reason }).unwrap();
            return;
        };
        let yes = Message::Yes {
            request,
            nonce_s,
            instance_s: self.id,
        };
        self.net.oob.send(&yes).unwrap();
        *self.yes.borrow_mut() = Some((yes, u64::MAX));
    }

    fn on_yes(&self, request: u64, nonce_s: Nonce) {
        if self.greeted.borrow().contains(&nonce_s) {
            return;
        }
        let mut control = self.control();
        let attempt = control.handshake.as_ref();
        let mine = attempt
            .filter(|h| h.is_asking() && request == self.request.get())
            .map(|h| h.mine);
        if let Some(nonce) = mine
            && !self.fin.get()
            && connection::start_scan(self, nonce).is_ok()
        {
            self.greeted.borrow_mut().push(nonce_s);
            return connection::feed(self, &mut control, |h| h.on_yes(nonce_s));
        }
        if mine.is_some() {
            connection::end_attempt(self, &mut control);
        }
        self.net.oob.send(&Message::Cancel { nonce_s }).unwrap();
    }

    /// While nothing has come for this end's YES, it or the answer may be lost. A tail of the data that
    /// could be the beginning of a HELLO must not be held back for ever (P16).
    pub fn repeat_yes(&self, every: u64) {
        if self.phase() != Some(Phase::Offered) {
            return;
        }
        let mut yes = self.yes.borrow_mut();
        let Some((yes, due)) = yes.as_mut() else { return };
        let now = self.net.clock.now();
        if *due == u64::MAX {
            *due = now + every;
        } else if now >= *due {
            *due = now + every;
            self.net.oob.send(yes).unwrap();
        }
    }

    // ---- the link ----

    /// Handles the result of the request for a link: the link is up, or there will be none.
    pub fn on_link(&self, is_up: bool) {
        self.wants_link.set(false);
        if is_up {
            connection::on_link_up(self, &self.link_here());
        } else {
            self.give_up();
        }
    }

    /// Handles a message on the link's side channel.
    pub fn on_side(&self, message: Message) {
        let link = self.link_here();
        if !link.is_up() {
            return;
        }
        match message {
            Message::Open {
                nonce_mine,
                nonce_yours,
                vqpn,
                ring,
            } => {
                connection::on_open(Some(self), &link, (nonce_mine, nonce_yours), vqpn, ring).unwrap();
            }
            Message::OpenAck { yours, mine, ring } => {
                connection::on_open_ack(self.of_stream(yours), &link, yours, mine, ring).unwrap();
            }
            Message::OpenRefuse { yours, .. } => {
                let me = self.of_stream(yours);
                if me.is_none_or(|me| connection::on_open_refused(me, yours).is_err()) {
                    link.on_closed(yours);
                }
            }
            Message::DemoteRequest { yours, resend_from } => {
                if let Some(me) = self.of_stream(yours) {
                    connection::on_demote_request(me, &link, resend_from);
                    me.settle();
                }
            }
            Message::TakeBack { yours, .. } => {
                let bytes = link.take_file();
                if let Some(me) = self.of_stream(yours) {
                    let mut control = me.control();
                    connection::on_take_back(me, &mut control, bytes.as_deref());
                    connection::leave(me, &mut control, Reason::PeerAsked);
                    drop(control);
                    me.settle();
                }
            }
            Message::TakenBack { yours } => {
                if let Some(me) = self.of_stream(yours) {
                    connection::on_taken_back(me);
                    me.settle();
                }
            }
            Message::Closed { yours } => link.on_closed(yours),
            other => panic!("{other:?}"),
        }
    }

    /// Returns this end if `mine` is its stream's vQPN.
    fn of_stream(&self, mine: Vqpn) -> Option<&Self> {
        let control = self.control();
        control.opened.as_ref().is_some_and(|o| o.mine == mine).then_some(self)
    }

    /// Fails this end's side of the link. Of the bytes that are in the ring and unread, only `keep` have really come.
    pub fn link_failed(&self, keep: u64) {
        if !self.link_here().go_down() {
            return;
        }
        let mut control = self.control();
        if let Some(mut rx) = self.rx.lock()
            && let Some(consumer) = rx.consumer.as_mut()
        {
            let until = consumer.position().saturating_add(keep);
            let _ = consumer.freeze(until).unwrap();
        }
        connection::stay::link_failed(self, &mut control);
        drop(control);
        self.settle();
    }

    /// Replaces the link by another.
    pub fn set_fresh_link(&self, link: Link) {
        *self.link.borrow_mut() = link;
    }

    // ---- the service thread ----

    /// Does all that the service thread does by itself at this instant.
    pub fn poll(&self) {
        self.on_tcp();
        while let Some(task) = { self.tasks.borrow_mut().pop_front() } {
            match task {
                Task::Notify => {}
                Task::Flush => {
                    connection::flush(self);
                }
                Task::ReadAhead => {
                    connection::read_ahead(self, false);
                }
                Task::Settle | Task::Drained => self.settle(),
            }
        }
    }

    /// Handles bytes or room in TCP.
    fn on_tcp(&self) {
        if self.tx() == Mode::Marked {
            connection::flush(self);
        }
        if self.rx() == Mode::Marked {
            connection::look(self);
            connection::read_ahead(self, self.is_full());
        }
        if self.rx() == Mode::Link {
            connection::look_for_resume(self, &mut self.control());
        }
    }

    /// Returns whether the link has no room for more.
    fn is_full(&self) -> bool {
        let has_space = || Some(self.tx.lock()?.producer.as_mut()?.has_space() == Ok(false));
        self.tx() == Mode::Link && has_space() == Some(true)
    }

    fn settle(&self) {
        let _ = connection::close_if_over(self, &mut self.control());
    }

    /// Returns whether the connection's stay on a link between hosts lasts on.
    fn is_staying(&self) -> bool {
        connection::stay::is_staying(&self.control())
    }
}

fn id_of(role: Role) -> InstanceId {
    InstanceId::from_bytes([role as u8; 16])
}
