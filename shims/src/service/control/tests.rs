//! Tests the control port on one worker: its answers and their receivers, and how it handles answers as an asker
//! (docs/protocol.md, P60–P69). Both ends are on this host; sockets of the test play the other host.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::time::Duration;

use rdmasock_core::ids::{InstanceId, Nonce, Tuple};
use rdmasock_core::os::datagram::Answerer;
use rdmasock_core::rendezvous::control::{Body, DATAGRAM, Datagram, QueryId, Stamp};
use rdmasock_core::rendezvous::diag;
use rdmasock_core::rendezvous::diag::Owner;
use rdmasock_core::stats::Event;
use rdmasock_core::stream::handshake::Handshake;

use crate::objects::mailbox::Ref;
use crate::objects::socket::{Socket, Stage};
use crate::service::ask::Asking;
use crate::service::tests::{accepted, connected, received, say, worker};
use crate::service::{Peer, *};

const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Returns a worker with a control port that the kernel has chosen, and another host's socket, connected to it.
fn answerer() -> (Worker, UdpSocket) {
    let mut worker = worker();
    let socket = Answerer::bind(0).unwrap();
    let port = socket.port().unwrap();
    worker.control.socket = Some(socket);
    // As if the connectors' sockets were on another host.
    worker.owner_of = |_| Owner::None;
    let asker = UdpSocket::bind((HERE, 0)).unwrap();
    asker.connect((HERE, port)).unwrap();
    asker.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    (worker, asker)
}

/// Returns how often `event` has been counted; other tests of this process count too.
fn counted(worker: &Worker, event: Event) -> u64 {
    worker.library.stats.counted(event)
}

/// Returns a question about a connection to a port without a listener.
fn question(stamp: Stamp, destination: SocketAddr) -> Datagram {
    Datagram {
        query: QueryId::random().unwrap(),
        stamp,
        body: Body::Ask {
            request: 7,
            tuple: Tuple::new(SocketAddr::new(HERE, 9), destination),
            nonce_c: Nonce::random().unwrap(),
            instance_c: InstanceId::random().unwrap(),
        },
    }
}

/// Returns a question about the connection whose connector's end is `stream`.
fn question_about(stamp: Stamp, stream: &TcpStream) -> Datagram {
    let (connector, acceptor) = (stream.local_addr().unwrap(), stream.peer_addr().unwrap());
    let mut datagram = question(stamp, acceptor);
    if let Body::Ask { tuple, .. } = &mut datagram.body {
        *tuple = Tuple::new(connector, acceptor);
    }
    datagram
}

fn send(worker: &mut Worker, asker: &UdpSocket, datagram: &Datagram) {
    asker.send(&datagram.encode(None)).unwrap();
    worker.on_control();
}

fn receive(asker: &UdpSocket) -> Datagram {
    let mut buf = [0; 2 * DATAGRAM];
    let n = asker.recv(&mut buf).unwrap();
    assert_eq!(n, DATAGRAM, "no answer is longer than its question");
    Datagram::decode(&buf[..n], None).unwrap()
}

fn is_silent(asker: &UdpSocket) -> bool {
    asker.set_nonblocking(true).unwrap();
    let silent = asker.recv(&mut [0; 1]).is_err();
    asker.set_nonblocking(false).unwrap();
    silent
}

fn closed_port() -> SocketAddr {
    let listener = std::net::TcpListener::bind((HERE, 0)).unwrap();
    listener.local_addr().unwrap()
}

/// Returns the stamp that the worker gives to `asker`.
fn stamp(worker: &mut Worker, asker: &UdpSocket) -> Stamp {
    send(worker, asker, &question(Stamp::NONE, closed_port()));
    let answer = receive(asker);
    assert_eq!(answer.body, Body::Stamp);
    answer.stamp
}

#[test]
fn a_question_is_taken_with_a_stamp_only() {
    let (mut worker, asker) = answerer();
    let stamp = stamp(&mut worker, &asker);
    let conns = worker.conns.len();
    send(
        &mut worker,
        &asker,
        &question(Stamp::from_bytes([9; 16]), closed_port()),
    );
    assert_eq!(receive(&asker).body, Body::Stamp);
    assert_eq!(worker.conns.len(), conns, "nothing is remembered of it");

    let ask = question(stamp, closed_port());
    send(&mut worker, &asker, &ask);
    let answer = receive(&asker);
    assert_eq!(answer.query, ask.query);
    let absent = Body::No {
        request: 7,
        reason: rdmasock_core::wire::Reason::Absent,
    };
    assert_eq!(answer.body, absent);
}

#[test]
fn a_question_that_is_sent_again_gets_the_same_answer_and_a_changed_one_none() {
    let (mut worker, asker) = answerer();
    let stamp = stamp(&mut worker, &asker);
    let ask = question(stamp, closed_port());
    send(&mut worker, &asker, &ask);
    let first = receive(&asker);
    send(&mut worker, &asker, &ask);
    assert_eq!(receive(&asker), first);

    let replays = counted(&worker, Event::ControlReplay);
    let other = Datagram {
        query: ask.query,
        ..question(stamp, closed_port())
    };
    send(&mut worker, &asker, &other);
    assert!(is_silent(&asker));
    assert!(counted(&worker, Event::ControlReplay) > replays);

    let got = Datagram { body: Body::Got, ..ask };
    send(&mut worker, &asker, &got);
    send(&mut worker, &asker, &ask);
    assert!(is_silent(&asker), "a copy of a question that is over");
}

#[test]
fn who_is_not_the_connector_gets_no_answer() {
    let (mut worker, asker) = answerer();
    let stamp = stamp(&mut worker, &asker);
    let elsewhere = SocketAddr::from(([10, 1, 2, 3], 80));
    let before = counted(&worker, Event::ControlMisplaced);
    send(&mut worker, &asker, &question(stamp, elsewhere));
    let mut ask = question(stamp, closed_port());
    if let Body::Ask { tuple, .. } = &mut ask.body {
        *tuple = Tuple::new(elsewhere, tuple.acceptor());
    }
    send(&mut worker, &asker, &ask);
    assert!(is_silent(&asker));
    assert!(counted(&worker, Event::ControlMisplaced) >= before + 2);
}

#[test]
fn garbage_is_counted_and_not_answered() {
    let (mut worker, asker) = answerer();
    let (length, kind) = (Event::ControlLength, Event::ControlKind);
    let before = [counted(&worker, length), counted(&worker, kind)];
    asker.send(&[7; 10]).unwrap();
    asker.send(&[7; DATAGRAM + 1]).unwrap();
    asker.send(&[7; 9000]).unwrap();
    asker.send(&[7; DATAGRAM]).unwrap();
    worker.on_control();
    assert!(is_silent(&asker));
    assert!(counted(&worker, length) >= before[0] + 3);
    assert!(counted(&worker, kind) > before[1]);
}

#[test]
fn a_flood_is_limited_and_the_socket_left_alone() {
    let (mut worker, asker) = answerer();
    let mut answers = 0;
    for _ in 0..40 {
        for _ in 0..50 {
            let ask = question(Stamp::NONE, closed_port());
            asker.send(&ask.encode(None)).unwrap();
        }
        worker.on_control();
        while !is_silent(&asker) {
            answers += 1;
        }
    }
    assert!((1..200).contains(&answers), "{answers}");
    assert!(worker.control.paused_until.is_some() || counted(&worker, Event::ControlRate) > 0);
    let now = crate::sys::time::now_ns() + 10_000_000_000;
    worker.control_on_time(now);
    assert_eq!(worker.control.paused_until, None);
}

#[test]
fn what_another_instance_holds_is_asked_there_and_its_yes_sent_until_it_is_taken() {
    let (mut worker, asker) = answerer();
    let stamp = stamp(&mut worker, &asker);
    let listener = std::net::TcpListener::bind((HERE, 0)).unwrap();
    let destination = listener.local_addr().unwrap();
    // Plays the instance that listens on the port.
    let (name, _) = names::Listener::service(destination.port()).unwrap();
    let ask = question(stamp, destination);
    send(&mut worker, &asker, &ask);
    let holder = name.accept().unwrap().unwrap();
    let Some(rdmasock_core::wire::Message::Ask {
        request,
        nonce_c,
        instance_c,
        ..
    }) = received(&holder)
    else {
        panic!("the question was not passed on");
    };
    let Body::Ask {
        nonce_c: nonce,
        instance_c: instance,
        ..
    } = ask.body
    else {
        unreachable!()
    };
    assert!(nonce_c == nonce && instance_c == instance, "for the asker, not for us");
    let (nonce_s, instance_s) = (Nonce::random().unwrap(), InstanceId::random().unwrap());
    say(
        &holder,
        &rdmasock_core::wire::Message::Yes {
            request,
            nonce_s,
            instance_s,
        },
    );
    let conn = *worker
        .conns
        .iter()
        .find(|(_, c)| matches!(c.peer, Peer::Asked { request: r, .. } if r == request))
        .unwrap()
        .0;
    worker.on_channel(conn);
    let yes = Body::Yes {
        request: 7,
        nonce_s,
        instance_s,
    };
    assert_eq!(receive(&asker).body, yes);

    let mut now = crate::sys::time::now_ns();
    for _ in 0..3 {
        now = worker.control.next_timeout().unwrap().max(now);
        worker.control_on_time(now);
        assert_eq!(receive(&asker).body, yes, "it may have been lost");
    }
    let name = names::Listener::instance(&instance_s).unwrap();
    let cancel = Datagram {
        body: Body::Cancel { nonce_s, instance_s },
        ..ask
    };
    send(&mut worker, &asker, &cancel);
    assert_eq!(worker.control.next_timeout(), None, "it is said no more");
    let passed_on = name.accept().unwrap().unwrap();
    assert!(matches!(
        received(&passed_on),
        Some(rdmasock_core::wire::Message::Cancel { nonce_s: n }) if n == nonce_s
    ));
}

#[test]
fn a_yes_is_not_repeated_for_ever() {
    let (mut worker, asker) = answerer();
    let stamp = stamp(&mut worker, &asker);
    let (_socket, stream, _server) = accepted();
    let ask = question_about(stamp, &stream);
    send(&mut worker, &asker, &ask);
    assert!(matches!(receive(&asker).body, Body::Yes { .. }));
    let mut repeats = 0;
    while let Some(at) = worker.control.next_timeout() {
        worker.control_on_time(at);
        repeats += 1;
        assert!(matches!(receive(&asker).body, Body::Yes { .. }));
    }
    assert_eq!(repeats, 8);
}

#[test]
fn nobody_asks_here_about_connections_within_the_host() {
    let (mut worker, asker) = answerer();
    worker.owner_of = diag::connector_owner;
    let stamp = stamp(&mut worker, &asker);
    let (_socket, stream, _server) = accepted();
    send(&mut worker, &asker, &question_about(stamp, &stream));
    assert!(matches!(receive(&asker).body, Body::No { .. }));
}

/// A worker that asks a host, which the test plays.
struct Asked {
    worker: Worker,
    host: u64,
    request: u64,
    socket: &'static Socket,
    _stream: TcpStream,
    answerer: UdpSocket,
    address: IpAddr,
}

/// Returns the answer to a YES that is not wanted.
fn cancel_of(yes: Body) -> Body {
    match yes {
        Body::Yes {
            nonce_s, instance_s, ..
        } => Body::Cancel { nonce_s, instance_s },
        other => panic!("{other:?} is no YES"),
    }
}

/// Returns an address of this host that no other test has.
fn own_address() -> IpAddr {
    let [a, b, c, ..] = crate::objects::library::random_u64().to_ne_bytes();
    IpAddr::from([127, a | 1, b, c | 1])
}

impl Asked {
    fn new() -> Self {
        let mut worker = worker();
        let (socket, stream) = connected();
        let nonce = Nonce::random().unwrap();
        socket.control.lock().unwrap().handshake = Some(Handshake::connector(nonce));
        let address = own_address();
        let port = worker.library.reach.port().unwrap();
        let answerer = UdpSocket::bind((address, port)).unwrap();
        answerer.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let (request, host) = ask(&mut worker, socket, nonce, address);
        Self {
            worker,
            host: host.unwrap(),
            request,
            socket,
            _stream: stream,
            answerer,
            address,
        }
    }

    /// Returns the worker's next datagram and its source.
    fn receive(&self) -> (Datagram, SocketAddr) {
        let mut buf = [0; 2 * DATAGRAM];
        let (n, from) = self.answerer.recv_from(&mut buf).unwrap();
        (Datagram::decode(&buf[..n], None).unwrap(), from)
    }

    fn send(&mut self, to: SocketAddr, query: QueryId, body: Body) {
        let stamp = Stamp::from_bytes([3; 16]);
        let datagram = Datagram { query, stamp, body };
        self.answerer.send_to(&datagram.encode(None), to).unwrap();
        self.worker.on_host(self.host);
    }

    fn is_asking(&self) -> bool {
        let control = self.socket.control.lock().unwrap();
        control.handshake.as_ref().is_some_and(Handshake::is_asking)
    }

    fn yes(&self) -> Body {
        Body::Yes {
            request: self.request,
            nonce_s: Nonce::random().unwrap(),
            instance_s: InstanceId::random().unwrap(),
        }
    }
}

/// Asks the host at `address`. Returns the number of the question, and the host's id if it is asked.
fn ask(worker: &mut Worker, socket: &'static Socket, nonce: Nonce, address: IpAddr) -> (u64, Option<u64>) {
    let request = crate::objects::library::random_u64();
    let tuple = Tuple::new(SocketAddr::new(HERE, 9), SocketAddr::new(address, 9));
    let asking = Asking::remote_for_test(Ref::new(socket), nonce, tuple);
    worker.ask_out(request, asking);
    worker.hosts_on_time(crate::sys::time::now_ns());
    let host = worker.asks.get(&request).and_then(|a| a.asked.iter().next());
    (request, host.copied())
}

#[test]
fn an_asker_sends_again_with_the_stamp_and_takes_its_yes_once() {
    let mut asked = Asked::new();
    let (first, from) = asked.receive();
    assert_eq!(first.stamp, Stamp::NONE);
    asked.send(from, first.query, Body::Stamp);
    asked.worker.hosts_on_time(crate::sys::time::now_ns());
    let (second, _) = asked.receive();
    assert_eq!((second.query, second.body), (first.query, first.body));
    assert_eq!(second.stamp, Stamp::from_bytes([3; 16]));

    let yes = asked.yes();
    asked.send(from, first.query, yes);
    assert!(!asked.is_asking(), "it has greeted");
    assert_eq!(asked.receive().0.body, Body::Got);
    asked.send(from, first.query, yes);
    assert_eq!(asked.receive().0.body, Body::Got, "the first was lost");
    assert!(!asked.worker.asks.contains_key(&asked.request));
}

#[test]
fn a_yes_that_is_not_wanted_any_more_gets_cancel_each_time() {
    let mut asked = Asked::new();
    let (first, from) = asked.receive();
    asked.socket.control.lock().unwrap().handshake = None;
    asked.worker.settle(Ref::new(asked.socket));
    asked.worker.hosts_on_time(crate::sys::time::now_ns());
    for _ in 0..2 {
        let yes = asked.yes();
        asked.send(from, first.query, yes);
        assert_eq!(asked.receive().0.body, cancel_of(yes));
    }
}

#[test]
fn an_answer_to_what_was_not_asked_is_ignored() {
    let mut asked = Asked::new();
    let (first, from) = asked.receive();
    let before = counted(&asked.worker, Event::ControlMisplaced);
    let yes = asked.yes();
    asked.send(from, QueryId::random().unwrap(), yes);
    let other = Body::Yes {
        request: asked.request ^ 1,
        nonce_s: Nonce::random().unwrap(),
        instance_s: InstanceId::random().unwrap(),
    };
    asked.send(from, first.query, other);
    asked.send(from, first.query, first.body);
    assert!(counted(&asked.worker, Event::ControlMisplaced) >= before + 3);
    // From the right host, but another port.
    let stranger = UdpSocket::bind((asked.address, 0)).unwrap();
    let datagram = Datagram {
        query: first.query,
        stamp: Stamp::NONE,
        body: yes,
    };
    stranger.send_to(&datagram.encode(None), from).unwrap();
    asked.worker.on_host(asked.host);
    assert!(asked.is_asking() && asked.worker.asks.contains_key(&asked.request));
}

#[test]
fn a_host_that_restamps_for_ever_is_not_followed() {
    let mut asked = Asked::new();
    let mut sent = 0;
    while sent < 20 {
        asked
            .answerer
            .set_read_timeout(Some(Duration::from_millis(100)))
            .unwrap();
        let mut buf = [0; DATAGRAM];
        let Ok((_, from)) = asked.answerer.recv_from(&mut buf) else {
            break;
        };
        let query = Datagram::decode(&buf, None).unwrap().query;
        sent += 1;
        asked.send(from, query, Body::Stamp);
        asked.worker.hosts_on_time(crate::sys::time::now_ns());
    }
    assert!((2..8).contains(&sent), "{sent}");
}

/// Returns whether the socket is on TCP, and the next question about it is put off for 20 to 30 s.
fn is_left_alone(socket: &Socket) -> bool {
    let pause = socket.promotion.attempts.pause();
    socket.promotion.stage() == Stage::Watching && (20_000_000_000..=30_000_000_000).contains(&pause)
}

#[test]
fn a_host_where_nobody_listens_is_asked_three_times() {
    let mut worker = worker();
    let (socket, _stream) = connected();
    let address = own_address();
    for round in 0..2 {
        let nonce = Nonce::random().unwrap();
        socket.control.lock().unwrap().handshake = Some(Handshake::connector(nonce));
        let before = counted(&worker, Event::ControlAsk);
        let (request, host) = ask(&mut worker, socket, nonce, address);
        if let Some(host) = host {
            assert_eq!(round, 0);
            assert!(counted(&worker, Event::ControlAsk) > before);
            let now = crate::sys::time::now_ns();
            for ms in [0, 400, 1100] {
                assert!(worker.asks.contains_key(&request), "{ms}");
                worker.hosts_on_time(now + ms * 1_000_000);
                // The refusal is there already: the loopback interface delivers at once.
                worker.on_host(host);
            }
        } else {
            assert_eq!(round, 1);
        }
        assert!(!worker.asks.contains_key(&request));
        assert!(is_left_alone(socket));
    }
    assert!(worker.hosts.next_timeout().is_none(), "nothing is left to do");
}

#[test]
fn a_silent_host_gets_one_question_at_a_time_and_is_then_left_alone() {
    let mut asked = Asked::new();
    let (other, _other_stream) = connected();
    let nonce = Nonce::random().unwrap();
    other.control.lock().unwrap().handshake = Some(Handshake::connector(nonce));
    let address = asked.address;
    let (request, _) = ask(&mut asked.worker, other, nonce, address);
    let (first, from) = asked.receive();
    // The question is repeated until its time has passed.
    let start = crate::sys::time::now_ns();
    for ms in (0..5900).step_by(50) {
        asked.worker.hosts_on_time(start + ms * 1_000_000);
    }
    asked.answerer.set_nonblocking(true).unwrap();
    let mut buf = [0; DATAGRAM];
    let mut again = 0;
    while asked.answerer.recv_from(&mut buf).is_ok() {
        again += 1;
        assert_eq!(Datagram::decode(&buf, None).unwrap().query, first.query);
    }
    assert_eq!(again, 4);
    asked.worker.expire_asks(start + 7_000_000_000);
    assert!(!asked.worker.asks.contains_key(&request));
    for socket in [asked.socket, other] {
        assert!(is_left_alone(socket));
    }
    let nonce = Nonce::random().unwrap();
    asked.socket.control.lock().unwrap().handshake = Some(Handshake::connector(nonce));
    let (socket, address) = (asked.socket, asked.address);
    let (_, host) = ask(&mut asked.worker, socket, nonce, address);
    assert!(host.is_none(), "it is not asked now");

    // The host was only slow. For its YES it keeps the connection in the attempt, so the YES still gets an answer.
    let yes = asked.yes();
    asked.answerer.set_nonblocking(false).unwrap();
    asked.send(from, first.query, yes);
    assert_eq!(asked.receive().0.body, cancel_of(yes));
}

#[test]
fn an_asker_that_has_begun_anew_is_told_that_the_first_attempt_is_not_over() {
    let (mut worker, asker) = answerer();
    let stamp = stamp(&mut worker, &asker);
    let (socket, stream, _server) = accepted();
    let first = question_about(stamp, &stream);
    send(&mut worker, &asker, &first);
    let yes = receive(&asker).body;
    send(&mut worker, &asker, &question_about(stamp, &stream));
    let later = Body::No {
        request: 7,
        reason: rdmasock_core::wire::Reason::Limit,
    };
    assert_eq!(receive(&asker).body, later);

    let cancel = Datagram {
        body: cancel_of(yes),
        ..first
    };
    send(&mut worker, &asker, &cancel);
    worker.settle(Ref::new(socket));
    send(&mut worker, &asker, &question_about(stamp, &stream));
    assert!(matches!(receive(&asker).body, Body::Yes { .. }));
}
