//! Tests which peer may answer which question: the rules P10, P11, P14 and P15, and the memory of attempts, on one
//! worker. Also tests alarms, and what a panic of the thread costs.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Mutex;

use rdmasock_core::ids::{Cookie, InstanceId, Nonce};
use rdmasock_core::os::channel::Channel;
use rdmasock_core::rendezvous::diag;
use rdmasock_core::rendezvous::diag::Owner;
use rdmasock_core::stream::connection::Task;
use rdmasock_core::stream::handshake::{Handshake, Role};
use rdmasock_core::wire;
use rdmasock_core::wire::{MAX_MESSAGE, Message};

use crate::objects::listener::Listener;
use crate::objects::mailbox::{Command, Ref};
use crate::objects::socket::{Mode, Socket, Stage};
use crate::service::ask::Asking;
use crate::service::{Peer, *};

/// Returns a worker beside which no service thread runs.
pub(super) fn worker() -> Worker {
    without_thread();
    // SAFETY: an all-zero `sigset_t` is a valid set, without signals.
    Worker::new(unsafe { std::mem::zeroed() }, None).unwrap()
}

/// Prevents the start of a service thread, so that submitted commands stay in the queue.
pub(crate) fn without_thread() {
    assert!(crate::startup::is_on());
    Library::get().service.claim_start();
}

/// Returns how often the task `what` was submitted for `socket` so far.
pub(crate) fn left_to_do(socket: &'static Socket, what: Task) -> usize {
    static TAKEN: Mutex<VecDeque<Command>> = Mutex::new(VecDeque::new());
    let mut taken = TAKEN.lock().unwrap();
    Library::get().service.queue.take_all(&mut taken);
    let is_this = |r: &Ref| r.get().is_some_and(|s| std::ptr::eq(s, socket));
    let count = |c: &&Command| matches!(c, Command::Do(r, task) if *task == what && is_this(r));
    taken.iter().filter(count).count()
}

/// Returns a connected socket, and the stream that keeps it open.
pub(crate) fn connected() -> (&'static Socket, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let socket = Socket::allocate(stream.as_raw_fd(), true).unwrap();
    socket.promotion.set_stage(Stage::Busy);
    (socket, stream)
}

/// Sends a question about `socket` on a channel of its own. Returns the request's number, the channel's id and the
/// other end of the channel.
fn asked(worker: &mut Worker, socket: &'static Socket, by_name: bool) -> (u64, u64, Channel) {
    let (ours, theirs) = Channel::pair().unwrap();
    let request = crate::objects::library::random_u64();
    let nonce = Nonce::random().unwrap();
    socket.control.lock().unwrap().handshake = Some(Handshake::connector(nonce));
    let conn = worker
        .register(
            ours,
            Peer::Asked {
                request,
                by_name,
                greets: None,
            },
            1_000_000_000,
        )
        .unwrap();
    worker
        .asks
        .insert(request, Asking::for_test(Ref::new(socket), nonce, conn));
    (request, conn, theirs)
}

/// Opens a channel to the worker. Returns the channel's id and its other end.
pub(super) fn guest(worker: &mut Worker) -> (u64, Channel) {
    let (ours, theirs) = Channel::pair().unwrap();
    let peer = Peer::Incoming {
        listener: None,
        uid: 0,
        offered: None,
    };
    let id = worker.register(ours, peer, channels::SILENT_FOR);
    (id.unwrap(), theirs)
}

pub(super) fn say(channel: &Channel, message: &Message) {
    let mut buf = [0u8; MAX_MESSAGE];
    channel.send(message.encode(&mut buf).unwrap(), &[]).unwrap();
}

pub(super) fn received(channel: &Channel) -> Option<Message> {
    let mut buf = [0u8; MAX_MESSAGE];
    let received = channel.recv(&mut buf).ok()?;
    Some(Message::decode(received.bytes).unwrap())
}

fn yes(request: u64) -> Message {
    Message::Yes {
        request,
        nonce_s: Nonce::random().unwrap(),
        instance_s: InstanceId::random().unwrap(),
    }
}

#[test]
fn an_answer_counts_only_from_whom_was_asked() {
    let mut worker = worker();
    let (socket, _stream) = connected();
    let (request, conn, _holder) = asked(&mut worker, socket, true);

    let (incoming, stranger) = guest(&mut worker);
    say(&stranger, &yes(request));
    worker.on_channel(incoming);
    assert!(
        !worker.conns.contains_key(&incoming),
        "the stranger's channel is closed"
    );

    // This channel was asked, but about another connection.
    let (other, _other_stream) = connected();
    let (_, other_conn, other_holder) = asked(&mut worker, other, true);
    say(&other_holder, &yes(request));
    worker.on_channel(other_conn);
    assert!(!worker.conns.contains_key(&other_conn));

    assert!(worker.asks.contains_key(&request) && worker.conns.contains_key(&conn));
    assert!(socket.control.lock().unwrap().handshake.as_ref().unwrap().is_asking());
}

#[test]
fn a_yes_after_the_program_has_given_up_gets_cancel() {
    let mut worker = worker();
    let (socket, _stream) = connected();
    let (request, conn, holder) = asked(&mut worker, socket, true);
    let later = Nonce::random().unwrap();
    socket.control.lock().unwrap().handshake = Some(Handshake::connector(later));

    say(&holder, &yes(request));
    worker.on_channel(conn);
    assert!(matches!(received(&holder), Some(Message::Cancel { .. })));
    assert_eq!(socket.rx_mode.load(Acquire), Mode::Tcp, "nothing is scanned");
    let control = socket.control.lock().unwrap();
    assert!(
        control
            .handshake
            .as_ref()
            .is_some_and(|h| h.is_asking() && h.mine == later),
        "the newer attempt goes on"
    );
}

#[test]
fn a_question_is_dropped_with_its_attempt() {
    let mut worker = worker();
    let (socket, _stream) = connected();
    let (request, conn, holder) = asked(&mut worker, socket, true);
    socket.control.lock().unwrap().handshake = None;
    worker.settle(Ref::new(socket));
    assert!(!worker.asks.contains_key(&request));
    say(&holder, &yes(request));
    worker.on_channel(conn);
    assert!(matches!(received(&holder), Some(Message::Cancel { .. })));
    assert!(!worker.conns.contains_key(&conn));
}

#[test]
fn a_redirect_leads_on_from_a_service_name_only() {
    for by_name in [false, true] {
        let mut worker = worker();
        let (socket, _stream) = connected();
        let (request, conn, holder) = asked(&mut worker, socket, by_name);
        let id = InstanceId::random().unwrap();
        let name = names::Listener::instance(&id).unwrap();
        say(&holder, &Message::Redirect { request, instance: id });
        worker.on_channel(conn);
        assert_eq!(matches!(name.accept(), Ok(Some(_))), by_name);
        assert_eq!(worker.asks.contains_key(&request), by_name);
    }
}

#[test]
fn a_message_with_fds_that_it_does_not_carry_ends_the_channel() {
    let mut worker = worker();
    let (conn, theirs) = guest(&mut worker);
    let nonce_s = Nonce::random().unwrap();
    let mut buf = [0u8; MAX_MESSAGE];
    let cancel = Message::Cancel { nonce_s };
    theirs
        .send(cancel.encode(&mut buf).unwrap(), &[theirs.as_fd()])
        .unwrap();
    worker.on_channel(conn);
    assert!(!worker.conns.contains_key(&conn));
}

/// Returns the accepting end of a connection as a used socket of the library, with both streams.
pub(super) fn accepted() -> (&'static Socket, TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (server, _) = listener.accept().unwrap();
    let socket = Socket::allocate(server.as_raw_fd(), true).unwrap();
    // Makes it count as a socket for whose readiness the program asks by a call with a hook.
    socket.blocking.set_polled();
    socket.promotion.set_acceptor(None);
    socket.promotion.set_stage(Stage::Watching);
    socket
        .promotion
        .progress
        .on_sent(1, crate::objects::library::threshold_of(Role::Connector));
    (socket, client, server)
}

#[test]
fn a_yes_that_reaches_nobody_begins_nothing() {
    let mut worker = worker();
    let (socket, _client, _server) = accepted();
    let tuple = socket::tuple_of(socket).unwrap();
    let (nonce, instance) = (Nonce::random().unwrap(), InstanceId::random().unwrap());
    // The asker's channel was closed before.
    worker.on_ask(u64::MAX, 1, tuple, nonce, instance);
    assert_eq!(socket.rx_mode.load(SeqCst), Mode::Tcp);
    assert_eq!(socket.promotion.stage(), Stage::Watching);
    worker.settle(Ref::new(socket));
    let (conn, theirs) = guest(&mut worker);
    worker.on_ask(conn, 1, tuple, nonce, instance);
    assert!(matches!(received(&theirs), Some(Message::Yes { .. })));
    assert_eq!(socket.rx_mode.load(SeqCst), Mode::Marked);
}

#[test]
fn a_scan_ends_with_its_askers_channel() {
    let mut worker = worker();
    let (socket, client, mut server) = accepted();
    let tuple = socket::tuple_of(socket).unwrap();
    // Asks on a new channel, closes the channel after the YES, and then sends the bytes that `says` makes of the nonce.
    // Returns the mode of the receiving direction.
    let mut ask = |says: fn(&Nonce) -> Vec<u8>| {
        let (conn, theirs) = guest(&mut worker);
        worker.on_ask(conn, 1, tuple, Nonce::random().unwrap(), InstanceId::random().unwrap());
        let Some(Message::Yes { nonce_s, .. }) = received(&theirs) else {
            panic!("no YES");
        };
        drop(theirs);
        worker.on_channel(conn);
        let said = says(&nonce_s);
        (&client).write_all(&said).unwrap();
        worker.handshakes.on_timeout(u64::MAX / 2);
        assert_eq!(worker.handshakes.next_timeout(), None);
        let mode = socket.rx_mode.load(SeqCst);
        worker.on_cancel(nonce_s);
        worker.settle(Ref::new(socket));
        server.read_exact(&mut vec![0; said.len()]).unwrap();
        mode
    };
    let greets = |nonce: &Nonce| {
        let mut buf = [0; wire::MAX_MARKER];
        wire::Marker::Switch.encode(nonce, &mut buf).unwrap().to_vec()
    };
    assert_eq!(ask(greets), Mode::Marked, "what has come is looked for");
    assert_eq!(ask(|nonce| nonce.as_bytes()[..1].to_vec()), Mode::Tcp);
    assert_eq!(ask(|_| Vec::new()), Mode::Tcp);
}

#[test]
fn who_asks_owns_the_connectors_end() {
    let mut worker = worker();
    let (socket, _client, _server) = accepted();
    let tuple = socket::tuple_of(socket).unwrap();
    let own = rustix::process::geteuid().as_raw();
    let ask = |worker: &mut Worker, tuple, owner_of| {
        worker.owner_of = owner_of;
        let (conn, theirs) = guest(worker);
        worker.on_ask(conn, 1, tuple, Nonce::random().unwrap(), InstanceId::random().unwrap());
        received(&theirs)
    };
    let elsewhere = tuple.at(tuple.namespace() + 1, 0);
    let is_no = |answer: &Option<Message>| matches!(answer, Some(Message::No { .. }));
    assert!(is_no(&ask(&mut worker, elsewhere, |_| Owner::Unknown)));
    assert!(is_no(&ask(&mut worker, tuple.at(tuple.namespace(), 1), |_| {
        Owner::Unknown
    })));
    if own != 0 {
        assert!(is_no(&ask(&mut worker, tuple, |_| Owner::Uid(0))));
    }
    assert!(matches!(
        ask(&mut worker, tuple, diag::connector_owner),
        Some(Message::Yes { .. })
    ));
}

#[test]
fn a_kernel_without_cookies_tells_namespaces_apart() {
    let mut worker = worker();
    worker.namespace = 0;
    let (socket, _client, _server) = accepted();
    let (other, _other_client, _other_server) = accepted();
    let [tuple, others] = [socket, other].map(|socket| socket::tuple_of(socket).unwrap().at(0, 0));
    assert!(worker.is_here(socket, &tuple) && worker.is_here(other, &others));
    // As if another socket had the same addresses in another namespace.
    assert!(!worker.is_here(socket, &others) && !worker.is_here(other, &tuple));
}

/// Another name of the port may belong to a listener that has accepted nothing, and does not answer.
#[test]
fn a_holders_no_ends_the_wait_for_others() {
    let mut worker = worker();
    for (reason, is_over) in [
        (wire::Reason::Rule, true),
        (wire::Reason::Limit, true),
        (wire::Reason::NotHeld, false),
    ] {
        let (socket, _stream) = connected();
        let (request, conn, holder) = asked(&mut worker, socket, true);
        worker.asks.get_mut(&request).unwrap().asked.insert(conn + 1);
        say(&holder, &Message::No { request, reason });
        worker.on_channel(conn);
        assert_eq!(!worker.asks.contains_key(&request), is_over, "{reason:?}");
        assert_eq!(socket.promotion.stage() != Stage::Busy, is_over, "{reason:?}");
    }
}

#[test]
fn all_listeners_are_served_with_the_first() {
    let mut worker = worker();
    let sockets = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    let listeners = sockets.each_ref().map(|socket| Listener::new(socket.as_raw_fd()));
    worker.on_command(Command::Listen);
    for listener in listeners {
        assert!(worker.listeners.iter().any(|l| std::ptr::eq(*l, listener)));
    }
}

#[test]
fn a_cookie_is_good_once_and_for_whom_it_was_made() {
    let worker = worker();
    let (peer, other) = (InstanceId::random().unwrap(), InstanceId::random().unwrap());
    let cookie = link::offer(peer, None).unwrap().cookie;
    assert!(!worker.library.offers.redeem(&cookie, &other));
    assert!(!worker.library.offers.redeem(&Cookie::random().unwrap(), &peer));
    // A request to connect may be lost, and come again.
    for _ in 0..2 {
        assert!(worker.library.offers.has(&cookie, &peer));
    }
    assert!(!worker.library.offers.has(&cookie, &other));
    assert!(worker.library.offers.redeem(&cookie, &peer));
    assert!(!worker.library.offers.has(&cookie, &peer));
    assert!(!worker.library.offers.redeem(&cookie, &peer));
}

#[test]
fn another_namespace_is_of_no_connection() {
    let mut worker = worker();
    let first = worker.namespace;
    worker.return_to_namespace();
    assert_eq!(worker.namespace, first);
    let (socket, _client, _server) = accepted();
    let tuple = socket::tuple_of(socket).unwrap();
    assert!(worker.is_here(socket, &tuple));
    worker.namespace = first + 1;
    worker.return_to_namespace();
    assert!(!worker.is_here(socket, &tuple.at(first, 0)));
    assert!(!worker.is_here(socket, &tuple.at(first + 1, 0)));
}

#[test]
fn an_alarm_rings_once() {
    let mut alarm = Some(7);
    assert!(!rings(&mut alarm, 6) && rings(&mut alarm, 7) && !rings(&mut alarm, 8));
}

/// A round that panics is not the last, and pauses grow up to their bound.
#[test]
fn a_panic_costs_one_round() {
    let (mut done, mut pauses) = (0, Vec::new());
    let round = || {
        done += 1;
        assert!(done % 2 == 0, "round {done}");
        if done < 40 {
            ControlFlow::Continue(())
        } else {
            ControlFlow::Break(())
        }
    };
    rounds(round, |pause| pauses.push(pause));
    assert_eq!((done, pauses.len()), (40, 20));
    assert_eq!(pauses.first(), Some(&FIRST_PAUSE));
    assert_eq!(pauses.last(), Some(&LAST_PAUSE));
    assert!(pauses.is_sorted());
}
