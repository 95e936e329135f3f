//! Two live connections with equal addresses and ports at both ends: in two network namespaces, or on two interfaces
//! of one namespace. Each byte names the connection that it belongs to.

use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use libc::c_int;

use crate::ctx::Ctx;
use crate::scenarios::helper;
use crate::sys;
use crate::sys::Addr;

/// Bytes of a message.
const MESSAGE: usize = 300;
/// Pairs of connections, one after the other.
const PAIRS: u16 = 6;
/// Messages on each connection: enough for a promotion to begin and end.
const ROUNDS: u8 = 80;
/// Rounds with a pause, in which a promotion may go on.
const SLOW: std::ops::Range<u8> = 20..40;
const PORT: u16 = 7777;
const FIRST_CLIENT_PORT: u16 = 20_000;
/// The file by which a client tells the others that it has a link.
const LINKED: &str = "linked";
/// The address that both interfaces have.
const LINK_LOCAL: std::net::Ipv6Addr = std::net::Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0x77);

/// The place of a connection: this network namespace, and the address.
#[derive(Clone, Copy)]
struct Place {
    namespace: c_int,
    scope: u32,
}

impl Place {
    fn enter(self) {
        call!(libc::setns(self.namespace, libc::CLONE_NEWNET)).ok();
    }

    fn address(self, port: u16) -> Addr {
        match self.scope {
            0 => Addr::v4(port),
            scope => Addr::scoped(LINK_LOCAL, port, scope),
        }
    }

    fn socket(self, port: u16) -> c_int {
        let address = self.address(port);
        let fd = sys::tcp(address.family());
        sys::set_int(fd, libc::SOL_SOCKET, libc::SO_REUSEADDR, 1).ok();
        sys::bind(fd, &address).ok();
        fd
    }

    fn listener(self) -> c_int {
        self.enter();
        let fd = self.socket(PORT);
        call!(libc::listen(fd, 64)).ok();
        fd
    }

    fn connected(self, from: u16) -> c_int {
        self.enter();
        let mut fd = self.socket(from);
        // The server's process may not listen yet.
        while sys::connect(fd, &self.address(PORT)).is(libc::ECONNREFUSED) {
            sys::close(fd).ok();
            sys::pause_ms(1);
            fd = self.socket(from);
        }
        sys::set_int(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, 1).ok();
        fd
    }
}

/// Answers each message on each connection with its own number in the second byte.
fn serve(listener: c_int, tag: u8) {
    while let Ok(fd) = u32::try_from(sys::accept4(listener, 0).value) {
        let fd = fd as c_int;
        sys::set_int(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, 1).ok();
        std::thread::spawn(move || {
            loop {
                let (_, mut message) = sys::recv_up_to(fd, MESSAGE);
                if message.len() < MESSAGE {
                    return sys::close(fd);
                }
                message[1] = tag;
                sys::send_all(fd, &message);
            }
        });
    }
}

/// Sends one message and checks its answer.
fn exchange(fd: c_int, tag: u8, round: u8) {
    let mut message = [round; MESSAGE];
    message[0] = tag;
    sys::send_all(fd, &message).ok();
    message[1] = tag;
    assert!(
        sys::recv_exact(fd, MESSAGE) == message,
        "what is another's, or nobody's, in round {round}"
    );
}

/// The conditions of the conversations.
#[derive(Clone, Copy)]
struct Talk {
    /// Whether both sides have the library, and links are within the host.
    at_both_ends: bool,
    /// The place in which the client's service thread starts. The server's starts in the first one.
    starts_in: usize,
}

/// Holds conversations on connections from all of these places at the same time, with equal ports. With the library at
/// both ends it goes on until one client has a link; no client gets one if the service threads start in different
/// places.
fn talk(c: &Ctx, places: &[(Place, u8)], how: Talk) {
    let linked = c.dir.join(LINKED);
    let expects_link = how.at_both_ends && how.starts_in == 0;
    let mut end = None;
    for pair in 0.. {
        if pair >= PAIRS {
            if !expects_link || linked.exists() {
                break;
            }
            let end = end.get_or_insert_with(|| Instant::now() + Duration::from_millis(sys::SOON as u64));
            assert!(Instant::now() < *end, "no client has a link");
        }
        let connected = |(place, tag): &(Place, u8)| {
            let fd = place.connected(FIRST_CLIENT_PORT + pair);
            // The server accepts in the order of the places.
            exchange(fd, *tag, 0);
            (fd, *tag)
        };
        let fds: Vec<_> = places.iter().map(connected).collect();
        places[how.starts_in].0.enter();
        for round in 0..ROUNDS {
            for (fd, tag) in &fds {
                exchange(*fd, *tag, round);
            }
            if SLOW.contains(&round) {
                sys::pause_ms(2);
            }
        }
        if has_link() {
            std::fs::write(&linked, b"").unwrap();
        }
        for (fd, _) in fds {
            sys::close(fd).ok();
        }
    }
    assert!(
        expects_link || !how.at_both_ends || !has_link(),
        "a link to another place"
    );
}

fn has_link() -> bool {
    std::fs::read_to_string("/proc/self/maps").is_ok_and(|maps| maps.contains("rdmasock-arena"))
}

/// Returns whether both sides have the library, and links are within the host.
fn is_at_both_ends(c: &Ctx) -> bool {
    let is_here = helper::has_library() && std::env::var_os("RDMASOCK_DEV_LOCAL_DEVICE").is_none();
    let is_there = c.exchange("library", u64::from(is_here)) != 0;
    is_here && is_there
}

/// Runs each part in a process of its own, or all in this one.
fn run<T: Copy>(parts: &[T], is_divided: bool, part: impl Fn(&[T])) {
    if !is_divided {
        return part(parts);
    }
    let run = |one: &T| {
        part(&[*one]);
        0
    };
    let children: Vec<_> = parts.iter().map(|one| sys::fork_child(|| run(one))).collect();
    for child in children {
        assert_eq!(sys::wait_child(child), 0);
    }
}

fn play(c: &Ctx, places: &[(Place, u8)], are_servers_two: bool, are_clients_two: bool, starts_in: usize) {
    let at_both_ends = is_at_both_ends(c);
    let how = Talk {
        at_both_ends,
        starts_in,
    };
    if !c.is_server() {
        c.sync("listening");
        run(places, are_clients_two, |places| talk(c, places, how));
        return c.sync("done");
    }
    let serve_all = |places: &[(Place, u8)]| {
        for (place, tag) in places.iter().copied() {
            let listener = place.listener();
            std::thread::spawn(move || serve(listener, tag));
        }
    };
    let children: Vec<_> = places
        .iter()
        .filter(|_| are_servers_two)
        .map(|place| {
            sys::fork_child(|| {
                serve_all(&[*place]);
                loop {
                    sys::pause_ms(1000);
                }
            })
        })
        .collect();
    if !are_servers_two {
        serve_all(places);
    }
    c.sync("listening");
    c.sync("done");
    for child in children {
        call!(libc::kill(child, libc::SIGKILL)).ok();
        sys::wait_child(child);
    }
}

/// Makes a network namespace for this thread, which stays in it.
fn namespace() -> std::fs::File {
    call!(libc::unshare(libc::CLONE_NEWNET)).ok();
    ip("link set lo up");
    std::fs::File::open("/proc/thread-self/ns/net").unwrap()
}

fn ip(words: &str) {
    let mut command = std::process::Command::new("ip");
    command.args(words.split(' ')).env_remove("LD_PRELOAD");
    let status = command.status().expect("ip (package iproute2)");
    assert!(status.success(), "ip {words}: {status}");
}

/// Opens the client's namespace in the server too.
fn share(c: &Ctx, file: Option<std::fs::File>) -> std::fs::File {
    let pid = c.exchange("pid", std::process::id().into());
    let fd = c.exchange("fd", file.as_ref().map_or(0, |f| f.as_raw_fd() as u64));
    let file = file.unwrap_or_else(|| std::fs::File::open(format!("/proc/{pid}/fd/{fd}")).unwrap());
    c.sync("shared");
    file
}

fn in_two_namespaces(c: &Ctx, are_servers_two: bool, are_clients_two: bool, starts_in: usize) {
    let namespaces = [1u8, 2].map(|tag| (share(c, (!c.is_server()).then(namespace)), tag));
    let places = namespaces.each_ref().map(|(file, tag)| {
        let namespace = file.as_raw_fd();
        (Place { namespace, scope: 0 }, *tag)
    });
    play(c, &places, are_servers_two, are_clients_two, starts_in);
}

/// A server and a client, each with sockets in both namespaces. Their service threads are in one namespace.
pub fn of_one_process_each(c: &Ctx) {
    in_two_namespaces(c, false, false, 0);
}

/// As [`of_one_process_each`], with the service threads in different namespaces.
pub fn of_one_process_each_apart(c: &Ctx) {
    in_two_namespaces(c, false, false, 1);
}

/// A server with sockets in both namespaces, and a client in each.
pub fn of_two_clients(c: &Ctx) {
    in_two_namespaces(c, false, true, 0);
}

/// A client with sockets in both namespaces, and a server in each.
pub fn of_two_servers(c: &Ctx) {
    in_two_namespaces(c, true, false, 0);
}

fn on_two_interfaces(c: &Ctx, are_servers_two: bool) {
    let made = (!c.is_server()).then(|| {
        let made = namespace();
        ip("link add twin0 type veth peer name other0");
        ip("link add twin1 type veth peer name other1");
        for link in ["twin0", "other0", "twin1", "other1"] {
            ip(&format!("link set {link} up"));
        }
        for link in ["twin0", "twin1"] {
            ip(&format!("addr add {LINK_LOCAL}/64 dev {link} nodad"));
        }
        made
    });
    let file = share(c, made);
    let namespace = file.as_raw_fd();
    Place { namespace, scope: 0 }.enter();
    let places = [(c"twin0", 1), (c"twin1", 2)].map(|(name, tag)| {
        // SAFETY: a string that ends in NUL.
        let scope = unsafe { libc::if_nametoindex(name.as_ptr()) };
        (Place { namespace, scope }, tag)
    });
    play(c, &places, are_servers_two, false, 0);
}

/// A namespace with two interfaces that have one link-local address.
pub fn on_interfaces(c: &Ctx) {
    on_two_interfaces(c, false);
}

/// As [`on_interfaces`], with a server for each interface.
pub fn on_interfaces_of_two_servers(c: &Ctx) {
    on_two_interfaces(c, true);
}
