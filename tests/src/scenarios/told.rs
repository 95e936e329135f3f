//! The state that a connection reports: TCP_INFO and the queues, before it is promoted, on the link, half closed,
//! after its peer's death, and back on TCP. Bytes are counted exactly, apart from the warm-up's, whose number differs.

use libc::{IPPROTO_TCP, SOL_SOCKET, c_int};

use super::process::{pass_fd, socketpair, take_fd};
use crate::ctx::Ctx;
use crate::sys::Ret;
use crate::{data, sys};

/// linux/sockios.h.
pub const SIOCOUTQNSD: libc::c_ulong = 0x894b;
/// asm-generic/socket.h.
const SO_MEMINFO: c_int = 55;

/// struct tcp_info, as far as a kernel of 2018 knows it.
struct Info([u8; 512]);

impl Info {
    fn of(fd: c_int) -> Self {
        let mut bytes = [0; 512];
        let (r, len) = get(fd, IPPROTO_TCP, libc::TCP_INFO, &mut bytes);
        r.ok();
        assert!(len >= 216, "TCP_INFO of {len} bytes");
        Self(bytes)
    }

    fn u32(&self, at: usize) -> u32 {
        u32::from_ne_bytes(self.0[at..at + 4].try_into().unwrap())
    }

    fn u64(&self, at: usize) -> u64 {
        u64::from_ne_bytes(self.0[at..at + 8].try_into().unwrap())
    }

    fn state(&self) -> u8 {
        self.0[0]
    }

    fn unacked(&self) -> u32 {
        self.u32(24)
    }

    fn last_data_sent(&self) -> u32 {
        self.u32(44)
    }

    fn last_data_received(&self) -> u32 {
        self.u32(52)
    }

    fn acked(&self) -> u64 {
        self.u64(120)
    }

    fn received(&self) -> u64 {
        self.u64(128)
    }

    fn not_sent(&self) -> u32 {
        self.u32(144)
    }

    /// Returns the bytes sent, without retransmissions.
    fn sent(&self) -> u64 {
        self.u64(200) - self.u64(208)
    }

    /// Returns segments: out, in, with data in, with data out, and delivered.
    fn segments(&self) -> [u32; 5] {
        [136, 140, 152, 156, 192].map(|at| self.u32(at))
    }
}

/// Calls getsockopt() into `bytes`. Returns the call's result and the length.
pub fn get(fd: c_int, level: c_int, name: c_int, bytes: &mut [u8]) -> (Ret, usize) {
    let mut len = bytes.len() as libc::socklen_t;
    let r = call!(libc::getsockopt(fd, level, name, bytes.as_mut_ptr().cast(), &mut len));
    (r, len as usize)
}

/// Returns the value of SIOCOUTQ or SIOCOUTQNSD.
pub fn queue(fd: c_int, request: libc::c_ulong) -> c_int {
    let mut n: c_int = -1;
    call!(libc::ioctl(fd, request, &mut n)).ok();
    n
}

/// Waits until the peer's host has all bytes that were sent; an acknowledgement may be delayed.
pub fn until_acknowledged(fd: c_int) {
    let mut left = 0;
    for _ in 0..5000 {
        left = queue(fd, libc::TIOCOUTQ);
        if left == 0 {
            return;
        }
        sys::pause_ms(1);
    }
    panic!("{left} bytes are not acknowledged");
}

/// Logs everything that can be compared, when nothing is on its way. Counts of bytes are logged less `before`.
fn tell(c: &Ctx, fd: c_int, when: &str, before: [u64; 3]) -> Info {
    let info = Info::of(fd);
    let [acked, received, sent] = before;
    c.log(format_args!(
        "{when}: state {} acked {} received {} sent {} unacked {} not sent {}",
        info.state(),
        info.acked() - acked,
        info.received() - received,
        info.sent() - sent,
        info.unacked(),
        info.not_sent(),
    ));
    c.log(format_args!(
        "SIOCOUTQ {} SIOCOUTQNSD {}",
        queue(fd, libc::TIOCOUTQ),
        queue(fd, SIOCOUTQNSD)
    ));
    c.fionread(fd);
    let mut memory = [0; 36];
    let (r, len) = get(fd, SOL_SOCKET, SO_MEMINFO, &mut memory);
    let unread = u32::from_ne_bytes(memory[..4].try_into().unwrap());
    let is_enough = unread >= sys::readable_bytes(fd) as u32;
    c.log(format_args!("SO_MEMINFO -> {r}, {len}, {is_enough}"));
    let (r, cpu) = sys::get_int(fd, SOL_SOCKET, libc::SO_INCOMING_CPU);
    c.log(format_args!("SO_INCOMING_CPU -> {r}, {}", cpu >= 0));
    info
}

fn counts(fd: c_int) -> [u64; 3] {
    let info = Info::of(fd);
    [info.acked(), info.received(), info.sent()]
}

/// Sends a request and receives its answer.
pub fn exchange(c: &Ctx, fd: c_int, round: u64) {
    let (request, answer) = (data::pattern(1, round, 100), data::pattern(2, round, 300));
    if c.is_server() {
        assert!(sys::recv_exact(fd, 100) == request, "request {round}");
        sys::send_all(fd, &answer).ok();
    } else {
        sys::send_all(fd, &request).ok();
        assert!(sys::recv_exact(fd, 300) == answer, "answer {round}");
    }
}

/// Every byte that was sent, and no other, is counted from the first on, while the connection is promoted. No
/// count ever falls.
pub fn counts_across_a_promotion(c: &Ctx) {
    let fd = c.cold_pair();
    for round in 0..3 {
        exchange(c, fd, round);
        until_acknowledged(fd);
        c.sync("round");
        tell(c, fd, "before", [0; 3]);
        c.sync("told");
    }
    let mut last = Info::of(fd);
    let warming = c.warm_up_told(fd, || last = not_less(fd, &last));
    for round in 3..6 {
        exchange(c, fd, round);
        until_acknowledged(fd);
        c.sync("round");
        not_less(fd, &last);
        last = tell(c, fd, "after", [warming; 3]);
        c.sync("told");
    }
    c.close(fd);
}

/// Reads counts, and checks that none is less than before, and that they are consistent.
fn not_less(fd: c_int, before: &Info) -> Info {
    let now = Info::of(fd);
    for (what, then, is) in [
        ("acked", before.acked(), now.acked()),
        ("received", before.received(), now.received()),
        ("sent", before.sent(), now.sent()),
    ] {
        assert!(is >= then, "{what}: {is} after {then}");
    }
    for (then, is) in before.segments().into_iter().zip(now.segments()) {
        assert!(is >= then, "segments: {is} after {then}");
    }
    assert!(now.acked() <= now.sent() + 2, "more has arrived than was sent");
    let [out, into, data_in, data_out, _] = now.segments();
    assert!(out >= data_out && into >= data_in, "{:?}", now.segments());
    now
}

/// Bytes that have arrived and are not read; the end of one direction, then of the other.
pub fn unread_and_half_closed(c: &Ctx) {
    let fd = c.pair();
    until_acknowledged(fd);
    c.sync("quiet");
    let before = counts(fd);
    let segments = Info::of(fd).segments();
    c.sync("counted");
    if !c.is_server() {
        c.send(fd, &data::pattern(1, 0, 5000), 0);
        until_acknowledged(fd);
    }
    c.sync("sent");
    if c.is_server() {
        sys::wait_readable_bytes(fd, 5000);
    }
    let info = tell(c, fd, "unread", before);
    c.log(format_args!(
        "segments: {:?}",
        info.segments()
            .iter()
            .zip(segments)
            .map(|(n, before)| *n > before)
            .collect::<Vec<_>>()
    ));
    c.sync("told");
    if c.is_server() {
        c.recv(fd, 2000, 0);
    }
    c.sync("read");
    tell(c, fd, "partly read", before);
    c.sync("told");
    if !c.is_server() {
        c.shutdown(fd, libc::SHUT_WR);
        sys::wait_tcp_state(fd, sys::FIN_WAIT2);
    } else {
        sys::wait_tcp_state(fd, sys::CLOSE_WAIT);
    }
    c.sync("half closed");
    tell(c, fd, "half closed", before);
    c.sync("told");
    if c.is_server() {
        c.recv_to_end(fd);
        c.send(fd, &data::pattern(2, 0, 700), 0);
        until_acknowledged(fd);
    } else {
        sys::wait_readable_bytes(fd, 700);
    }
    c.sync("answered");
    tell(c, fd, "answered", before);
    c.sync("told");
    if c.is_server() {
        c.close(fd);
    } else {
        c.recv_to_end(fd);
        sys::wait_tcp_state(fd, sys::CLOSED);
        tell(c, fd, "closed", before);
        c.so_error(fd);
        c.close(fd);
    }
}

/// The times of the last send and receive stay current after the connection has left TCP.
pub fn time_of_the_last(c: &Ctx) {
    let fd = c.pair();
    sys::pause_ms(600);
    exchange(c, fd, 0);
    c.sync("exchanged");
    // The machine may stand still for a moment between the exchange and the query: one recent value is enough.
    let mut is_recent = [false; 2];
    for round in 1..20 {
        exchange(c, fd, round);
        let info = Info::of(fd);
        is_recent[0] |= info.last_data_sent() < 400;
        is_recent[1] |= info.last_data_received() < 400;
    }
    c.log(format_args!("recent: {is_recent:?}"));
    sys::pause_ms(300);
    let info = Info::of(fd);
    c.log(format_args!(
        "a while ago: {} {}",
        info.last_data_sent() >= 200,
        info.last_data_received() >= 200
    ));
    c.sync("done");
    c.close(fd);
}

/// Back on TCP, with bytes that were not read on the link: each byte is counted once.
pub fn counts_across_a_demotion(c: &Ctx) {
    let mut fd = c.pair();
    until_acknowledged(fd);
    c.sync("quiet");
    let before = counts(fd);
    c.sync("counted");
    exchange(c, fd, 0);
    if !c.is_server() {
        c.send(fd, &data::pattern(3, 0, 3000), 0);
        until_acknowledged(fd);
    }
    c.sync("sent");
    if c.is_server() {
        sys::wait_readable_bytes(fd, 3000);
        c.recv(fd, 1000, 0);
        let last = Info::of(fd);
        let [a, b] = socketpair();
        c.ret("pass", pass_fd(a, fd));
        let other = take_fd(b);
        // Bytes that the kernel does not have yet come as the others are read.
        c.recv(fd, 1000, libc::MSG_WAITALL);
        c.recv(other, 500, libc::MSG_WAITALL);
        not_less(fd, &last);
        c.close(other);
        fd = c.ret("dup", call!(libc::dup(fd))).ok();
        c.sync("passed");
        sys::wait_readable_bytes(fd, 500);
    } else {
        let last = Info::of(fd);
        c.sync("passed");
        not_less(fd, &last);
        until_acknowledged(fd);
    }
    c.sync("quiet again");
    tell(c, fd, "demoted", before);
    c.sync("told");
    if c.is_server() {
        c.recv(fd, 500, libc::MSG_WAITALL);
    }
    for round in 1..4 {
        exchange(c, fd, round);
    }
    until_acknowledged(fd);
    c.sync("exchanged");
    tell(c, fd, "on TCP", before);
    c.sync("done");
    c.close(fd);
}

/// A child of fork gets the counts that the parent would, before it uses the connection and after.
pub fn counts_in_a_child(c: &Ctx) {
    let fd = c.pair();
    until_acknowledged(fd);
    c.sync("quiet");
    let before = counts(fd);
    c.sync("counted");
    let talk = |rounds: std::ops::Range<u64>, what: &str| {
        for round in rounds {
            exchange(c, fd, round);
        }
        until_acknowledged(fd);
        c.sync("exchanged");
        let info = tell(c, fd, what, before);
        c.sync("told");
        info
    };
    let parents = talk(0..5, "parent");
    if c.is_server() {
        let child = sys::fork_child(|| {
            // On a link the parent's message about the fork is still on its way.
            until_acknowledged(fd);
            let first = tell(c, fd, "child", before);
            assert!(first.sent() == parents.sent() && first.received() == parents.received());
            not_less(fd, &parents);
            c.sync("forked");
            let used = talk(5..8, "child");
            not_less(fd, &first);
            talk(8..20, "child");
            not_less(fd, &used);
            0
        });
        c.log(format_args!("child {}", sys::wait_child(child)));
        c.log(format_args!("parent {:?}", not_less(fd, &parents).state()));
    } else {
        c.sync("forked");
        talk(5..8, "the child's peer");
        talk(8..20, "the child's peer");
    }
    c.sync("done");
    c.close(fd);
}

/// The peer's process is killed with everything read.
pub fn peer_killed(c: &Ctx) {
    let fd = c.pair();
    until_acknowledged(fd);
    c.sync("quiet");
    let before = counts(fd);
    c.sync("counted");
    exchange(c, fd, 0);
    until_acknowledged(fd);
    c.sync("at rest");
    if c.is_server() {
        call!(libc::raise(libc::SIGKILL));
    }
    sys::wait_tcp_state(fd, sys::CLOSE_WAIT);
    tell(c, fd, "killed", before);
    c.so_error(fd);
    c.recv(fd, 10, 0);
    tell(c, fd, "end read", before);
    c.close(fd);
}

/// TCP_INFO of any length: returns as much as there is, or is asked for, and leaves the rest of the buffer alone.
pub fn lengths(c: &Ctx) {
    let fd = c.pair();
    exchange(c, fd, 0);
    until_acknowledged(fd);
    c.sync("quiet");
    let whole = Info::of(fd);
    for len in [0, 1, 3, 104, 121, 124, 128, 137, 200, 205, 208] {
        let mut bytes = [0xee; 512];
        let (r, got) = get(fd, IPPROTO_TCP, libc::TCP_INFO, &mut bytes[..len]);
        // The counts of bytes are compared as far as the length reaches.
        let same = (120..136.min(len)).all(|at| bytes[at] == whole.0[at]);
        let left_alone = bytes[len..].iter().all(|b| *b == 0xee);
        c.log(format_args!("{len}: {r} {got} {same} {left_alone}"));
    }
    let mut bytes = [0; 512];
    let (_, all) = get(fd, IPPROTO_TCP, libc::TCP_INFO, &mut bytes);
    c.log(format_args!("all of it: {all}"));
    for len in [0, 3, 4, 36, 100] {
        let mut bytes = [0xee; 100];
        let (r, got) = get(fd, SOL_SOCKET, SO_MEMINFO, &mut bytes[..len]);
        let left_alone = bytes[got.min(len)..].iter().all(|b| *b == 0xee);
        c.log(format_args!("SO_MEMINFO {len}: {r} {got} {left_alone}"));
    }
    c.sync("done");
    c.close(fd);
}
