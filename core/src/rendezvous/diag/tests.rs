//! Tests of the search for a socket's owner: with real sockets, by sock_diag and by /proc, and with a user that binds
//! the service name of another user's port.

use std::net::{TcpListener, TcpStream};

use proptest::prelude::*;

use crate::os::forked::{free_port, in_child};
use crate::rendezvous::diag::*;
use crate::rendezvous::names::{Listener, connect_to_services};

fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn at(ip: &str, port: u16) -> SocketAddr {
    SocketAddr::new(ip.parse().unwrap(), port)
}

/// Returns the owner by /proc, after a check that sock_diag gives the same. The check is left out where a sandbox has
/// no sock_diag.
fn owner_of(server: SocketAddr) -> Owner {
    let by_proc = read_listener(server);
    match ask_kernel(IPPROTO_TCP, server, None, 0) {
        Ok(socket) if socket.state == TCP_LISTEN => assert_eq!(Owner::Uid(socket.uid), by_proc, "{server}"),
        Ok(_) | Err(Errno::NOENT) => assert_eq!(by_proc, Owner::None, "{server}"),
        Err(errno) => eprintln!("no sock_diag here: {errno}"),
    }
    let answer = listener_owner(&Tuple::new(at("127.0.0.1", 1), server));
    assert_eq!(answer, by_proc);
    answer
}

/// After the listener is closed, both ends of its connection are still found. So `listener_owner` returns `None`, not
/// `Unknown`.
#[test]
fn a_connection_is_known() {
    for bound in ["127.0.0.1", "::1"] {
        let Ok(listener) = TcpListener::bind((bound, 0)) else {
            continue;
        };
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (near, far) = (stream.local_addr().unwrap(), stream.peer_addr().unwrap());
        let _server = listener.accept().unwrap();
        drop(listener);
        let ends = (near, far);
        let inode = rustix::fs::fstat(&stream).unwrap().st_ino;
        let by_proc = read_proc(near, |table, is_whole| find_connection(table, is_whole, ends));
        // `read_proc` may not reach the connection in /proc if many ended connections precede it.
        let by_proc = by_proc.ok().flatten().and_then(Result::ok);
        let by_diag = ask_kernel(IPPROTO_TCP, near, Some(far), 0).ok();
        assert!(by_proc.is_some() || by_diag.is_some(), "{bound}");
        for socket in by_proc.into_iter().chain(by_diag) {
            let is = (socket.uid, u64::from(socket.inode));
            assert_eq!(is, (own_uid(), inode), "{bound}");
            assert_ne!(socket.state, TCP_LISTEN, "{bound}");
        }
        assert!(is_here(near, far, 0), "{bound}");
        let connection = Tuple::new(near, far);
        assert_eq!(connector_owner(&connection), Owner::Uid(own_uid()), "{bound}");
        assert!(
            is_socket(near, far, 0, inode) && !is_socket(far, near, 0, inode),
            "{bound}"
        );
        assert_eq!(listener_owner(&connection), Owner::None, "{bound}");
    }
}

#[test]
fn the_owner_of_a_udp_port_is_found() {
    for bound in ["0.0.0.0", "::"] {
        let Ok(socket) = std::net::UdpSocket::bind((bound, 0)) else {
            continue;
        };
        let port = socket.local_addr().unwrap().port();
        // A kernel may have sock_diag for TCP but not for UDP.
        let owner = udp_owner(port);
        assert!([Owner::Uid(own_uid()), Owner::Unknown].contains(&owner), "{owner:?}");
        println!("{owner:?}");
    }
}

#[test]
fn the_owner_of_a_listener_is_found_however_it_is_bound() {
    let mine = Owner::Uid(own_uid());
    for bound in ["127.0.0.1", "0.0.0.0"] {
        let listener = TcpListener::bind((bound, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        assert_eq!(owner_of(at("127.0.0.1", port)), mine, "{bound}");
        assert_eq!(owner_of(at("::ffff:127.0.0.1", port)), mine, "{bound}");
    }
    for bound in ["::1", "::"] {
        let Ok(listener) = TcpListener::bind((bound, 0)) else {
            continue;
        };
        let port = listener.local_addr().unwrap().port();
        assert_eq!(owner_of(at("::1", port)), mine, "{bound}");
        // A dual-stack listener accepts IPv4 too (std leaves IPV6_V6ONLY off).
        let expected = if bound == "::" { mine } else { Owner::None };
        assert_eq!(owner_of(at("127.0.0.1", port)), expected, "{bound}");
    }
}

#[test]
fn no_listener_has_no_owner() {
    assert_eq!(owner_of(at("127.0.0.1", free_port())), Owner::None);
    let listener = TcpListener::bind("127.0.0.2:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    assert_eq!(owner_of(at("127.0.0.1", port)), Owner::None);
}

#[test]
fn a_connection_is_no_listener() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    assert_eq!(owner_of(stream.local_addr().unwrap()), Owner::None);
    assert_eq!(owner_of(stream.peer_addr().unwrap()), Owner::Uid(own_uid()));
}

#[test]
fn only_the_owner_of_the_port_and_root_are_trusted() {
    use Owner::{None, Uid, Unknown};
    let table = [
        (1000, Uid(1000), 1, true),
        (1000, Uid(1001), 1000, false),
        (0, Uid(1000), 1, true),
        (1000, Uid(0), 1000, false),
        (1000, None, 1000, false),
        (0, None, 1000, true),
        (1000, Unknown, 1000, true),
        (1001, Unknown, 1000, false),
        (0, Unknown, 1000, false),
        (0, Unknown, 0, true),
        (UNMAPPED, Unknown, UNMAPPED, false),
    ];
    for (name, port, own, expected) in table {
        assert_eq!(trusted(name, port, own), expected, "{name} {port:?} {own}");
    }
}

#[test]
fn a_squatter_of_another_uid_is_not_trusted() {
    if own_uid() != 0 {
        eprintln!("not root: skipped");
        return;
    }
    const NOBODY: u32 = 65_534;
    const OTHER: u32 = 65_533;
    // In a child process, because the test changes its uid.
    in_child(|| {
        set_uid(OTHER);
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = server.local_addr().unwrap();
        assert_eq!(owner_of(address), Owner::Uid(OTHER));
        // The process can still change its uid, because its saved uid is 0.
        set_uid(NOBODY);
        let squatter = Listener::service(address.port()).unwrap();
        set_uid(0);
        let name_uid = |port| connect_to_services(port).last().unwrap().unwrap().peer().unwrap().uid;
        assert_eq!(name_uid(address.port()), NOBODY);
        assert!(!trusted(
            NOBODY,
            listener_owner(&Tuple::new(at("127.0.0.1", 1), address)),
            0
        ));

        set_uid(OTHER);
        let _honest = Listener::service(address.port()).unwrap();
        set_uid(0);
        assert_eq!(name_uid(address.port()), OTHER);
        assert!(trusted(
            OTHER,
            listener_owner(&Tuple::new(at("127.0.0.1", 1), address)),
            0
        ));
        drop(squatter);
    });
}

/// Sets the effective uid, keeping the real and the saved one.
fn set_uid(uid: u32) {
    // SAFETY: a system call on plain numbers, in a single-threaded child. The first call sets the effective uid to 0,
    // which the second call needs.
    let results = unsafe { [0, uid].map(|uid| libc::syscall(libc::SYS_setresuid, u32::MAX, uid, u32::MAX)) };
    assert_eq!(results, [0, 0]);
}

/// `is_here` returns true if both ends have the same IP address, or if the remote one is a loopback address. It returns
/// false for an address of another host, also if a listener on 0.0.0.0 here has the same port.
#[test]
fn an_end_is_here_if_this_host_has_its_socket() {
    let elsewhere = [at("192.0.2.1", 80), at("2001:db8::1", 80)];
    let port = free_port();
    let _listener = TcpListener::bind(("0.0.0.0", port)).unwrap();
    for end in elsewhere.into_iter().chain([at("192.0.2.1", port)]) {
        assert!(!is_here(at("127.0.0.1", 9), end, 0), "{end}");
    }
    assert!(is_here(at("10.9.8.7", 1), at("10.9.8.7", 2), 0));
    assert!(is_here(at("::1", 1), at("::ffff:127.0.0.1", 2), 0));
}

#[test]
fn bad_answers_are_refused() {
    assert_eq!(parse(&[]), Err(Errno::BADMSG));
    assert_eq!(parse(&[0; 200]), Err(Errno::BADMSG));
    let header = |kind| NetlinkHeader {
        len: 20,
        kind,
        flags: 0,
        sequence: 1,
        port: 0,
    };
    let error = |code: i32| [header(NLMSG_ERROR).as_bytes(), code.as_bytes()].concat();
    assert_eq!(parse(&error(-2)), Err(Errno::NOENT));
    for code in [0, 1, i32::MIN, i32::MAX, -4096] {
        assert_eq!(parse(&error(code)), Err(Errno::BADMSG), "{code}");
    }
}

const TABLE: &str = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:18EB 00000000:0000 0A 00000000:00000000 00:00000000 00000000   114        0 1 1 0 100 0 0 10 0
   1: 00000000:18EB 00000000:0000 0A 00000000:00000000 00:00000000 00000000     7        0 2 1 0 100 0 0 10 0
   2: 00000000:0050 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 3 1 0 100 0 0 10 0
   3: 00000000:0050 00000000:0000 0A 00000000:00000000 00:00000000 00000000    33        0 4 1 0 100 0 0 10 0
   4: 0100007F:0051 0100007F:9999 01 00000000:00000000 00:00000000 00000000    33        0 5 1 0 100 0 0 10 0
";

#[cfg(target_endian = "little")]
#[test]
fn the_table_is_read_with_the_kernels_precedence() {
    assert_eq!(find_listener(TABLE, at("127.0.0.1", 6379)), Owner::Uid(114));
    assert_eq!(find_listener(TABLE, at("10.1.1.1", 6379)), Owner::Uid(7));
    assert_eq!(find_listener(TABLE, at("127.0.0.1", 80)), Owner::Unknown);
    assert_eq!(find_listener(TABLE, at("127.0.0.1", 81)), Owner::None);
    let connection = (at("127.0.0.1", 81), at("127.0.0.1", 0x9999));
    let find = |is_whole, ends| find_connection(TABLE, is_whole, ends).map(|found| found.ok().map(|s| s.inode));
    assert_eq!(find(false, connection), Some(Some(5)));
    assert_eq!(find(true, (connection.1, connection.0)), None);
    assert_eq!(find(false, (connection.1, connection.0)), Some(None));
    let twice = find_connection(&TABLE.repeat(2), true, connection);
    assert!(twice.is_some_and(|found| found.is_err()));
}

#[test]
fn users_that_are_not_mapped_are_not_told_apart() {
    if own_uid() != 0 {
        return;
    }
    assert_eq!(owner(UNMAPPED), Owner::Uid(UNMAPPED));
    in_child(|| {
        // SAFETY: system calls on plain numbers, in a single-threaded child.
        assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWUSER) }, 0);
        assert_eq!(owner(UNMAPPED), Owner::Unknown);
        assert!(!trusted(UNMAPPED, owner(UNMAPPED), own_uid()));
        std::fs::write("/proc/self/uid_map", "0 0 1").unwrap();
        assert_eq!((owner(0), owner(UNMAPPED)), (Owner::Uid(0), Owner::Unknown));
    });
}

proptest! {
    #[test]
    fn any_answer_and_any_table_are_read_without_panic(
        bytes in proptest::collection::vec(any::<u8>(), 0..200),
        line in "[ -~]{0,120}",
        unicode in ".{0,60}",
        ip in "[0-9A-Fé]{0,33}",
    ) {
        let _ = parse(&bytes);
        let _ = parse_line(&line);
        let _ = parse_line(&unicode);
        let _ = parse_line(&format!("0: {ip}:0050 0:0 0A 0:0 0:0 0 0"));
    }
}
