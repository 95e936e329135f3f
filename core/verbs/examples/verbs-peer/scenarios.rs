//! The scenarios for a single connection, for the client and the server.

use std::process::Command;
use std::time::{Duration, Instant};

use rdmasock_core::fabric::plugin::{Address, PRIVATE_BYTES, Request};
use rdmasock_core::fabric::remote::qp::Write;

use crate::beside;
use crate::link::{Api, Event, HIDDEN, LOG, Link, PATIENCE, address, count_fds, wait_readable};
use crate::memory::{Memory, pattern};

const MIB: usize = 1 << 20;

/// A scenario. Its number is the first byte of a connection's private data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Scenario {
    Messages = 1,
    Writes,
    Full,
    Arm,
    ClientLeaves,
    ServerLeaves,
    Killed,
    Refused,
    Sequence,
    Fork,
    AnyPort,
    Beside,
    End,
}

const ALL: [Scenario; 13] = [
    Scenario::Messages,
    Scenario::Writes,
    Scenario::Full,
    Scenario::Arm,
    Scenario::ClientLeaves,
    Scenario::ServerLeaves,
    Scenario::Killed,
    Scenario::Refused,
    Scenario::Sequence,
    Scenario::Fork,
    Scenario::AnyPort,
    Scenario::Beside,
    Scenario::End,
];

/// Returns private data of full length that begins with the scenario's number.
fn private(scenario: Scenario, seed: u32) -> [u8; PRIVATE_BYTES] {
    let mut bytes = [0; PRIVATE_BYTES];
    for (to, from) in bytes.iter_mut().zip(pattern(seed)) {
        *to = from;
    }
    bytes[0] = scenario as u8;
    bytes
}

fn check_private(bytes: &[u8; PRIVATE_BYTES], scenario: Scenario, seed: u32) {
    assert_eq!(*bytes, private(scenario, seed), "private data");
}

const ASKED: u32 = 77;
const ANSWERED: u32 = 78;

pub fn serve(api: &Api, local: &Address) {
    let (listener, port) = api.listen(local);
    assert_eq!(port, local.port);
    loop {
        let request = listener.next(Duration::from_secs(25));
        let scenario = ALL
            .into_iter()
            .find(|known| *known as u8 == request.private[0])
            .expect("a scenario");
        check_private(&request.private, scenario, ASKED);
        println!("server: {scenario:?}");
        if scenario == Scenario::Refused {
            // SAFETY: the request is valid, and is not used afterwards.
            unsafe { (api.table.reject)(request.conn) };
            continue;
        }
        let link = accept(api, &request, scenario, None);
        match scenario {
            Scenario::Messages => {
                receive_messages(&link);
                link.probe();
                assert_eq!(link.event(), Event::Probed);
                send_messages(&link);
                link.send(&link.message());
            }
            Scenario::Writes => receive_writes(&link),
            Scenario::Full => {
                let target = Memory::new(MIB);
                link.send_keys(&target, link.register(&target));
                link.send(&link.message());
            }
            Scenario::Arm => be_woken(&link),
            Scenario::ClientLeaves | Scenario::Killed => {
                assert_eq!(link.message(), b"ready");
                link.send(b"go");
                let started = Instant::now();
                let reason = link.end();
                println!("server: over with {reason} after {} ms", started.elapsed().as_millis());
                assert_eq!(link.send_parts(&[b"late"]), -libc::ENOTCONN);
                assert_eq!(link.state(), reason, "the reason stays");
                while let Ok(_events) = link.poll() {}
            }
            Scenario::ServerLeaves => {
                assert_eq!(link.message(), b"leave");
                link.disconnect();
            }
            Scenario::Sequence | Scenario::Fork | Scenario::End => link.send(&link.message()),
            Scenario::AnyPort => serve_any_port(api, &link, local),
            Scenario::Beside => {
                let next = || accept(api, &listener.next(PATIENCE), Scenario::Beside, Some(&link));
                beside::serve(&link, &next);
            }
            Scenario::Refused => unreachable!(),
        }
        if !matches!(
            scenario,
            Scenario::ClientLeaves | Scenario::Killed | Scenario::ServerLeaves
        ) {
            // This waits until the client ends the connection.
            link.end();
        }
        drop(link);
        if scenario == Scenario::End {
            let (low, high) = count_fds();
            println!("server: {low} fds below {HIDDEN}, {high} above");
            return;
        }
    }
}

fn accept(api: &Api, request: &Request, scenario: Scenario, beside: Option<&Link>) -> Link {
    Link::accept(api, request, &private(scenario, ANSWERED), beside)
}

fn dial(api: &Api, local: &Address, remote: &Address, scenario: Scenario) -> Result<Link, i32> {
    dial_beside(api, local, remote, scenario, None)
}

fn dial_beside(
    api: &Api,
    local: &Address,
    remote: &Address,
    scenario: Scenario,
    beside: Option<&Link>,
) -> Result<Link, i32> {
    let link = api.connect(local, remote, &private(scenario, ASKED), PATIENCE, beside)?;
    check_private(&link.info.private, scenario, ANSWERED);
    Ok(link)
}

/// The part of the scenarios that the client runs.
#[derive(Clone, Copy, Debug)]
pub enum Part {
    /// The traffic of a connection.
    Traffic,
    /// The beginning and the end of connections.
    Ends,
    /// Connections beside a first connection.
    Beside,
}

pub fn run(api: &Api, local: &Address, server: &Address, part: Part) {
    let started = Instant::now();
    devices(api, local);
    let dial = |scenario| {
        println!("client: {scenario:?} after {} ms", started.elapsed().as_millis());
        dial(api, local, server, scenario)
    };
    match part {
        Part::Traffic => carry(&dial),
        Part::Ends => end(api, local, server, &dial),
        Part::Beside => {
            let link = dial(Scenario::Beside).expect("connect");
            let next = || dial_beside(api, local, server, Scenario::Beside, Some(&link)).expect("connect");
            beside::run(&link, &next);
        }
    }
    let link = dial(Scenario::End).expect("connect");
    link.send(b"end");
    assert_eq!(link.message(), b"end");
}

type Dial<'a> = dyn Fn(Scenario) -> Result<Link, i32> + 'a;

fn carry(dial: &Dial<'_>) {
    let link = dial(Scenario::Messages).expect("connect");
    println!(
        "client: {} buffers of {} bytes",
        link.info.limits.receive_buffers, link.info.limits.buffer_bytes
    );
    assert!(link.info.limits.buffer_bytes >= 4096 && link.info.limits.receive_buffers >= 8);
    send_messages(&link);
    receive_messages(&link);
    link.send(b"bye");
    // Messages that are still in flight at a disconnect may be lost.
    assert_eq!(link.message(), b"bye");
    drop(link);

    send_writes(&dial(Scenario::Writes).expect("connect"));
    fill_queue(&dial(Scenario::Full).expect("connect"));

    let link = dial(Scenario::Arm).expect("connect");
    assert_eq!(link.message(), b"asleep");
    std::thread::sleep(Duration::from_millis(300));
    link.send(b"wake");
    assert_eq!(link.message(), b"awake");
    drop(link);
}

fn end(api: &Api, local: &Address, server: &Address, dial: &Dial<'_>) {
    let link = dial(Scenario::ClientLeaves).expect("connect");
    link.send(b"ready");
    assert_eq!(link.message(), b"go");
    link.disconnect();
    assert!(link.state() < 0);
    assert_eq!(link.send_parts(&[b"late"]), -libc::ENOTCONN);
    drop(link);

    let link = dial(Scenario::ServerLeaves).expect("connect");
    link.send(b"leave");
    assert!(link.end() < 0);
    drop(link);

    process(api, "victim", local, server, Some(libc::SIGKILL));
    process(api, "poor", local, server, None);

    let code = dial(Scenario::Refused).err().expect("a refusal");
    assert_eq!(code, -libc::ECONNREFUSED);
    nobody_listens(api, local, server);
    sequence(api, local, server);
    fork(api, local, server);
    any_port(api, local, server);
}

/// Checks that the plugin finds a device for the local address, and none for other addresses.
fn devices(api: &Api, local: &Address) {
    // SAFETY: a valid pointer.
    let find = |address: &Address| unsafe { (api.table.device)(address) };
    assert_eq!(find(&address("192.0.2.1", 0)), -libc::ENODEV);
    assert_eq!(find(&address("127.0.0.1", 0)), -libc::ENODEV);
    assert_eq!(find(local), 0, "no device");
}

fn lengths(link: &Link) -> impl Iterator<Item = usize> + use<> {
    // A byte of the buffer is for the kind of the message (`DATA`).
    let longest = link.info.limits.buffer_bytes as usize - 1;
    (0..longest)
        .step_by(41)
        .chain([78, 79, 80, 254, 255, 256, 4094, 4095, 4096, longest - 1, longest])
}

fn send_messages(link: &Link) {
    for (number, len) in lengths(link).enumerate() {
        let bytes: Vec<u8> = pattern(number as u32).take(len).collect();
        link.send(&bytes);
    }
    let long = vec![0; link.info.limits.buffer_bytes as usize];
    assert_eq!(link.send_parts(&[&long, &[1]]), -libc::EMSGSIZE);
}

fn receive_messages(link: &Link) {
    for (number, len) in lengths(link).enumerate() {
        let bytes = link.message();
        assert_eq!(bytes.len(), len, "message {number}");
        assert!(
            bytes.into_iter().eq(pattern(number as u32).take(len)),
            "message {number}"
        );
    }
}

/// Divides a region of `len` bytes into pieces for WRITEs. Returns the offset, the length and the immediate of each.
fn pieces(len: usize, immediates: bool) -> Vec<(usize, u32, Option<u32>)> {
    let mut sizes = [1, 79, 80, 81, 256, 257, 4095, 65_536, 3, 20_000].into_iter().cycle();
    let (mut at, mut list) = (0, Vec::new());
    while at < len {
        let bytes = sizes.next().unwrap().min(len - at);
        let number = list.len() as u32;
        let immediate = (immediates && number.is_multiple_of(3)).then_some(0xa000_0001 + number);
        list.push((at, bytes as u32, immediate));
        at += bytes;
    }
    list
}

fn send_writes(link: &Link) {
    let source = Memory::new(4 * MIB);
    source.fill(5);
    let local = link.register(&source).key.local;
    let (base, remote) = link.receive_keys();
    let immediates = link.info.limits.immediate;
    for (at, len, immediate) in pieces(source.len, immediates) {
        // SAFETY: within the mapping.
        let from = unsafe { source.at.add(at) };
        let to = base + at as u64;
        let write = Write {
            from,
            local,
            len,
            to,
            remote,
        };
        link.write_all(&write, immediate);
        if at == 0 {
            assert_eq!(link.write(&Write { len: 0, ..write }, None), -libc::EINVAL);
            if !immediates {
                assert_eq!(link.write(&write, Some(0)), -libc::EOPNOTSUPP);
            }
        }
    }
    link.send(b"written");
    assert_eq!(link.message(), b"right");
}

fn receive_writes(link: &Link) {
    let target = Memory::new(4 * MIB);
    link.send_keys(&target, link.register(&target));
    let with_immediate = pieces(target.len, link.info.limits.immediate);
    for (_, len, immediate) in with_immediate.iter().filter(|piece| piece.2.is_some()) {
        assert_eq!(link.event(), Event::Written(immediate.unwrap(), *len));
    }
    assert_eq!(link.message(), b"written");
    target.check(5);
    link.send(b"right");
}

/// Posts WRITEs without polling until the queue is full. Checks that a full queue has room for a probe, and that `Room`
/// is reported afterwards.
fn fill_queue(link: &Link) {
    let source = Memory::new(MIB);
    let local = link.register(&source).key.local;
    let (to, remote) = link.receive_keys();
    let write = Write {
        from: source.at,
        local,
        len: 4096,
        to,
        remote,
    };
    for round in 0..3 {
        let mut posted = 0;
        let code = loop {
            match link.write(&write, None) {
                0 => posted += 1,
                code => break code,
            }
            assert!(posted < 10_000, "the queue has no end");
        };
        assert_eq!(code, -libc::EAGAIN);
        link.probe();
        let (mut rooms, mut probed) = (0, false);
        while !probed {
            match link.event() {
                Event::Room => rooms += 1,
                Event::Probed => probed = true,
                other => panic!("{other:?}"),
            }
        }
        // `Room` is reported once for a time in which the queue was full, when a WRITE has completed. All WRITEs
        // complete before the probe, so `Room` has come before `Probed`.
        assert_eq!(rooms, 1, "round {round} after {posted}");
        assert!(posted > 16, "only {posted} posted");
    }
    while link.event_now().is_some() {}
    link.send(b"bye");
    // Messages that are still in flight at a disconnect may be lost.
    assert_eq!(link.message(), b"bye");
}

/// Checks that the completion fd alone wakes a thread that waits for a message.
fn be_woken(link: &Link) {
    link.send(b"asleep");
    let started = Instant::now();
    loop {
        link.arm();
        link.poll().expect("poll");
        // On iWARP this end may not send before the client's first message, so `Room` may be reported first. It is
        // skipped.
        let event = std::iter::from_fn(|| link.event_now()).find(|event| *event != Event::Room);
        if let Some(event) = event {
            assert_eq!(event, Event::Message(b"wake".to_vec()));
            break;
        }
        assert!(wait_readable(&[link.info.completion_fd], PATIENCE), "not woken");
    }
    println!("server: woken after {} ms", started.elapsed().as_millis());
    // Without a new completion the fd of an armed queue does not become readable.
    link.arm();
    link.poll().expect("poll");
    link.arm();
    assert!(
        !wait_readable(&[link.info.completion_fd], Duration::from_millis(100)),
        "woken by nothing"
    );
    link.send(b"awake");
}

/// Runs this program in another role, and checks the signal by which it ends.
fn process(api: &Api, role: &str, local: &Address, server: &Address, signal: Option<i32>) {
    use std::os::unix::process::ExitStatusExt;
    let text = |address: &Address| address.socket().ip().to_string();
    let status = Command::new(std::env::current_exe().unwrap())
        .args([role, &api.path, &text(local), &server.port.to_string(), &text(server)])
        .status()
        .unwrap();
    assert_eq!(status.signal(), signal, "{role}: {status}");
    assert!(signal.is_some() || status.success(), "{role}: {status}");
}

pub fn be_killed(api: &Api, local: &Address, server: &Address) {
    let link = dial(api, local, server, Scenario::Killed).expect("connect");
    link.send(b"ready");
    assert_eq!(link.message(), b"go");
    // SAFETY: the call ends this process, as intended.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
}

/// Checks that the plugin logs the remedy if the limit on locked memory is low and the process may not exceed it.
pub fn have_little_memory(api: &Api, local: &Address, server: &Address) {
    #[repr(C)]
    struct Header(u32, i32);
    // `Header` has _LINUX_CAPABILITY_VERSION_3 and the pid 0, which is this process. `none` has no capabilities.
    let (header, none) = (Header(0x2008_0522, 0), [0_u32; 6]);
    let limit = libc::rlimit {
        rlim_cur: 65_536,
        rlim_max: 65_536,
    };
    // SAFETY: the pointers are valid for the structures that the calls read.
    unsafe {
        assert_eq!(libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit), 0);
        assert_eq!(libc::syscall(libc::SYS_capset, &header, none.as_ptr()), 0);
    }
    let code = dial(api, local, server, Scenario::Sequence)
        .err()
        .expect("not enough memory");
    assert_eq!(code, -libc::ENOMEM);
    let log = LOG.lock().unwrap();
    let told = |line: &&String| line.contains("memlock limit is 64 KiB") && line.contains("ulimit -l");
    assert_eq!(log.iter().filter(told).count(), 1, "{log:?}");
}

fn nobody_listens(api: &Api, local: &Address, server: &Address) {
    let nobody = Address { port: 7499, ..*server };
    let started = Instant::now();
    let timeout = Duration::from_millis(1500);
    let code = api
        .connect(local, &nobody, b"", timeout, None)
        .err()
        .expect("nobody listens");
    println!(
        "client: nobody listens: {code} after {} ms",
        started.elapsed().as_millis()
    );
    assert!(
        [-libc::ECONNREFUSED, -libc::EHOSTUNREACH, -libc::ETIMEDOUT].contains(&code),
        "{code}"
    );
    assert!(started.elapsed() < 2 * timeout);
    let absent = Address {
        ip: {
            let mut ip = server.ip;
            ip[15] = 250;
            ip
        },
        ..*server
    };
    let started = Instant::now();
    let code = api
        .connect(local, &absent, b"", timeout, None)
        .err()
        .expect("nobody is there");
    println!(
        "client: nobody there: {code} after {} ms",
        started.elapsed().as_millis()
    );
    assert!(started.elapsed() < 2 * timeout);
}

/// Makes fifty connections, one after the other. Checks that no fd stays open.
fn sequence(api: &Api, local: &Address, server: &Address) {
    let started = Instant::now();
    let before = count_fds();
    for number in 0..50_u8 {
        let link = dial(api, local, server, Scenario::Sequence).expect("connect");
        link.send(&[number]);
        assert_eq!(link.message(), [number]);
        let (low, high) = count_fds();
        assert_eq!(low, before.0, "an fd that is not hidden");
        assert!(high > before.1);
    }
    println!("client: 50 connections in {} ms", started.elapsed().as_millis());
    assert_eq!(count_fds(), before, "fds were left");
}

/// Checks that a fork child cannot use the plugin, and that the parent's connection goes on.
fn fork(api: &Api, local: &Address, server: &Address) {
    let link = dial(api, local, server, Scenario::Fork).expect("connect");
    // SAFETY: this process has one thread.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: this is the child's first call of the plugin.
        unsafe { (api.table.after_fork)() };
        let code = api
            .connect(local, server, b"", PATIENCE, None)
            .err()
            .expect("no second life");
        assert_eq!(code, -libc::EOPNOTSUPP);
        // SAFETY: ends the child without dropping objects of the parent.
        unsafe { libc::_exit(7) };
    }
    let mut status = 0;
    // SAFETY: `status` is valid for a write during the call.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert!(
        libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 7,
        "the child: {status:#x}"
    );
    link.send(b"still here");
    assert_eq!(link.message(), b"still here");
}

fn any_port(api: &Api, local: &Address, server: &Address) {
    let link = dial(api, local, server, Scenario::AnyPort).expect("connect");
    let port = u16::from_le_bytes(link.message().try_into().unwrap());
    let second = dial(api, local, &Address { port, ..*server }, Scenario::AnyPort).expect("connect");
    second.send(b"over there");
    assert_eq!(second.message(), b"over there");
}

fn serve_any_port(api: &Api, link: &Link, local: &Address) {
    let (listener, port) = api.listen(&Address { port: 0, ..*local });
    assert_ne!(port, 0);
    link.send(&port.to_le_bytes());
    let second = accept(api, &listener.next(PATIENCE), Scenario::AnyPort, None);
    // Closing a listener does not affect its connections.
    drop(listener);
    second.send(&second.message());
    second.end();
}
