//! The connection's traits for the outside world, on simulated media.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::net::IpAddr;
use std::rc::Rc;

use rdmasock_core::fabric::mem::End;
use rdmasock_core::fabric::ring::{Consumer, Producer, Wake};
use rdmasock_core::fabric::{LinkEnd as _, NoProducer, Opened, SendError};
use rdmasock_core::ids::{InstanceId, Vqpn};
use rdmasock_core::region::Region;
use rdmasock_core::stats::{Reason, Why};
use rdmasock_core::stream::connection::{Gone, Half, Peeked, SocketIo, StreamLink, Task, Tcp, TxOf, Unsent};
use rdmasock_core::stream::handshake::Role;
use rdmasock_core::wire::{LinkOffer, Message};

use super::{Endpoint, Net, Outcome, id_of};

/// An end of the link between the two endpoints.
#[derive(Clone, Debug)]
pub struct Link(Rc<Ends>);

/// Files that were sent on the way in one direction.
type Files = Rc<RefCell<VecDeque<Vec<u8>>>>;

#[derive(Debug)]
struct Ends {
    end: End,
    peer: InstanceId,
    is_remote: bool,
    is_up: Cell<bool>,
    /// Files on the way to the other end, and files on the way to this end.
    files: [Files; 2],
}

impl Link {
    /// Returns the two ends, the connector's first.
    pub fn pair([c, s]: [End; 2], is_remote: bool) -> [Self; 2] {
        let (to_s, to_c) = (Files::default(), Files::default());
        let link = |end, peer, files| {
            Self(Rc::new(Ends {
                end,
                peer: id_of(peer),
                is_remote,
                is_up: Cell::new(true),
                files,
            }))
        };
        [
            link(c, Role::Acceptor, [Rc::clone(&to_s), Rc::clone(&to_c)]),
            link(s, Role::Connector, [to_c, to_s]),
        ]
    }

    /// The fabric's end.
    pub fn end(&self) -> &End {
        &self.0.end
    }

    /// Returns whether the link works at this end.
    pub fn is_up(&self) -> bool {
        self.0.is_up.get()
    }

    /// Marks the link as failed at this end. Returns false if it was marked already.
    pub fn go_down(&self) -> bool {
        self.0.is_up.replace(false)
    }

    /// Takes the file that came with a message.
    pub fn take_file(&self) -> Option<Vec<u8>> {
        self.0.files[1].borrow_mut().pop_front()
    }

    /// The peer has closed this end's stream.
    pub fn on_closed(&self, mine: Vqpn) {
        self.0.end.on_closed(mine);
    }
}

impl PartialEq for Link {
    fn eq(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }
}

impl StreamLink for Link {
    fn peer(&self) -> InstanceId {
        self.0.peer
    }

    fn is_alive(&self) -> bool {
        self.is_up()
    }

    fn is_remote(&self) -> bool {
        self.0.is_remote
    }

    fn open(&self, _slot: u32) -> Result<Opened, Reason> {
        self.0.end.open(12).map_err(|_| Reason::ArenaFull)
    }

    fn pair(&self, mine: Vqpn, theirs: Vqpn, first: Region) {
        self.0.end.pair(mine, theirs, first);
    }

    fn producer(&self, theirs: Vqpn) -> Result<Producer, NoProducer> {
        self.0.end.producer(theirs).ok_or(NoProducer::NoSuch)
    }

    fn done_with(&self, _theirs: Vqpn) {}

    fn close(&self, mine: Vqpn, theirs: Option<Vqpn>, consumer: Option<Consumer>) {
        // When a link has failed, its memory is lost with it.
        if self.is_up() {
            self.0.end.close(mine, theirs, consumer);
        }
    }

    fn close_unanswered(&self, mine: Vqpn, consumer: Option<Consumer>) {
        if self.is_up() {
            self.0.end.close_unanswered(mine, consumer);
        }
    }

    fn send(&self, message: &Message) -> Result<(), SendError> {
        if !self.is_up() {
            return Err(SendError::Down);
        }
        self.0.end.send(message)
    }

    fn send_with(&self, message: &Message, bytes: &[u8]) -> Result<(), SendError> {
        self.0.files[0].borrow_mut().push_back(bytes.to_vec());
        self.send(message)
    }

    fn notify(&self, _wake: Wake, _theirs: Vqpn) {}

    fn take_in(&self) {}

    fn doubt(&self) {}
}

/// Both directions of TCP.
pub struct Wires(Rc<Net>);

impl Tcp for Wires {
    fn has_failed(&self) -> bool {
        false
    }

    fn send(&self, bytes: &[u8]) -> Result<usize, Unsent> {
        let mut out = self.0.out.borrow_mut();
        if out.is_shut() {
            return Err(Unsent::Dead);
        }
        match out.write(bytes) {
            0 => Err(Unsent::Full),
            n => Ok(n),
        }
    }

    fn written(&self) -> Option<u64> {
        Some(self.0.out.borrow().total as u64)
    }

    fn push(&self) {}

    fn peek(&self, buf: &mut [u8]) -> Peeked {
        match self.peek_all(buf) {
            0 if self.0.inn.borrow().is_ended() => Peeked::Ended,
            0 => Peeked::Nothing,
            n => Peeked::Bytes(n),
        }
    }

    fn peek_all(&self, buf: &mut [u8]) -> usize {
        let bytes = self.0.inn.borrow_mut().peek();
        let n = bytes.len().min(buf.len());
        buf[..n].copy_from_slice(&bytes[..n]);
        n
    }

    fn unread(&self) -> usize {
        self.0.inn.borrow_mut().peek().len()
    }

    fn take(&self, len: usize) -> Result<(), Gone> {
        let mut inn = self.0.inn.borrow_mut();
        if len > inn.arrived() {
            return Err(Gone);
        }
        inn.take(len);
        Ok(())
    }

    fn receive(&self, buf: &mut [u8]) -> Peeked {
        let seen = self.peek(buf);
        if let Peeked::Bytes(n) = seen {
            self.0.inn.borrow_mut().take(n);
        }
        seen
    }

    fn is_at_mark(&self) -> bool {
        false
    }

    fn has_peer_ended(&self) -> bool {
        self.0.inn.borrow().is_ended()
    }

    fn end(&self) {
        self.0.out.borrow_mut().shut();
    }

    /// The programs here read to the end.
    fn end_receiving(&self) {}
}

/// The peers here are honest, and neither dies: no connection is reset.
impl SocketIo for Endpoint {
    type Link = Link;
    type Tcp = Wires;
    type Tx = ();
    type Rx = ();
    type Control = ();

    fn slot(&self) -> u32 {
        self.role as u32
    }

    fn instance(&self) -> InstanceId {
        self.id
    }

    fn now(&self) -> u64 {
        self.net.clock.now() * 1_000
    }

    fn later(&self, task: Task) {
        self.tasks.borrow_mut().push_back(task);
    }

    fn tcp(&self) -> Option<Wires> {
        Some(Wires(Rc::clone(&self.net)))
    }

    fn reset_on_close(&self) {
        panic!("nobody closes here");
    }

    fn reset(&self) {
        panic!("a connection is reset");
    }

    fn report_reset(&self, _is_shut: bool) {
        panic!("a reset is reported");
    }

    fn may_scan(&self, _tcp: &Wires) -> bool {
        true
    }

    fn bound_wait(&self) {}

    fn link(&self) -> Option<Link> {
        self.its_link.borrow().clone()
    }

    fn set_link(&self, link: Option<&Link>) {
        *self.its_link.borrow_mut() = link.cloned();
    }

    fn set_peer(&self, _theirs: Vqpn) {}

    fn notify_peer(&self, _wake: Wake) {}

    fn wakes_at_end(&self, _wake: Wake) -> Option<(Link, Wake, Vqpn)> {
        None
    }

    fn is_link_over(&self) -> bool {
        self.net.inn.borrow().is_ended() || self.its_link.borrow().as_ref().is_none_or(|link| !link.is_up())
    }

    fn offer_link(&self, _peer: InstanceId, _reached_at: Option<IpAddr>) -> Option<LinkOffer> {
        None
    }

    fn need_link(&self, _peer: InstanceId, _offer: Option<LinkOffer>) {
        self.wants_link.set(true);
    }

    fn on_link(&self, _tx: &mut TxOf<Self>) {}

    fn off_link(&self, _tx: &mut TxOf<Self>) {}

    fn on_marked(&self, _tx: &TxOf<Self>) {}

    fn promoted(&self) {
        self.outcomes.borrow_mut().push(Outcome::Promoted);
    }

    fn pin(&self) {
        self.outcomes.borrow_mut().push(Outcome::Pinned);
    }

    fn abandoned(&self, _is_unwanted: bool) {
        self.outcomes.borrow_mut().push(Outcome::Abandoned);
    }

    fn set_why(&self, _why: Why) {}

    fn set_path(&self, _direction: Half, _on_link: bool) {}

    fn show_link(&self, _link: Option<&Link>) {}

    fn count_again(&self, _bytes: usize) {}

    fn count_ours(&self, _direction: Half, _bytes: usize) {}
}
