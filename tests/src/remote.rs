//! The programs of the control port's tests, and the pair of network namespaces that they run in.
//!
//! `scenario helper remote listen|talk|squat|flood …`; the function of each program documents it.

use std::io;
use std::io::{BufRead, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::data;

/// The default of `RDMASOCK_CONTROL_PORT`.
pub const CONTROL_PORT: u16 = 4797;

/// Bytes of a request, and of its response.
const REQUEST: usize = 64;

/// Runs one of the programs. Returns whether all went as it should.
pub fn main(words: &[String]) -> bool {
    let number = |i: usize| words.get(i).and_then(|w| w.parse().ok()).unwrap_or(0);
    let address = || words[1].parse::<SocketAddr>().unwrap();
    match words.first().map(String::as_str) {
        Some("listen") => listen(address(), number(2)),
        Some("talk") => talk(address(), number(2), number(3)),
        Some("squat") => squat(words.get(1).map_or("", String::as_str)),
        Some("flood") => flood(address(), number(2)),
        _ => false,
    }
}

/// Waits until stdin ends.
fn until_told() {
    let _ = io::stdin().lock().read_to_end(&mut Vec::new());
}

/// `listen ADDRESS WORKERS`: sends all received bytes back, in WORKERS processes, or in this one if WORKERS is 0.
/// Prints their pids, and ends them when stdin ends.
fn listen(address: SocketAddr, workers: usize) -> bool {
    let listener = TcpListener::bind(address).unwrap();
    let serve = move || -> ! {
        loop {
            let (tcp, _) = listener.accept().unwrap();
            std::thread::spawn(move || {
                let mut tcp = tcp;
                let mut request = [0; REQUEST];
                while tcp.read_exact(&mut request).is_ok() {
                    if tcp.write_all(&request).is_err() {
                        break;
                    }
                }
            });
        }
    };
    if workers == 0 {
        std::thread::spawn(serve);
        println!("{}", std::process::id());
        until_told();
        return true;
    }
    let mut pids = Vec::new();
    for _ in 0..workers {
        let pid = call!(libc::fork()).value as i32;
        if pid == 0 {
            serve();
        }
        pids.push(pid);
    }
    let text: Vec<String> = pids.iter().map(ToString::to_string).collect();
    println!("{}", text.join(" "));
    until_told();
    for pid in pids {
        call!(libc::kill(pid, libc::SIGKILL)).ok();
        call!(libc::waitpid(pid, std::ptr::null_mut(), 0)).ok();
    }
    true
}

/// `talk ADDRESS CONNECTIONS ROUNDS`: holds CONNECTIONS conversations, one after the other, and checks each byte;
/// prints its pid, and stays until stdin ends.
fn talk(address: SocketAddr, connections: usize, rounds: usize) -> bool {
    for connection in 0..connections {
        let mut tcp = TcpStream::connect(address).unwrap();
        tcp.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        for round in 0..rounds {
            let request = data::pattern((connection * rounds + round) as u64, 0, REQUEST);
            tcp.write_all(&request).unwrap();
            let mut response = vec![0; REQUEST];
            tcp.read_exact(&mut response).unwrap();
            assert!(response == request, "connection {connection}, round {round}");
            // The pause gives time for a false answer, so that the library acts on it in mid-connection.
            std::thread::sleep(Duration::from_millis(5));
        }
        tcp.shutdown(std::net::Shutdown::Write).unwrap();
        let mut rest = Vec::new();
        tcp.read_to_end(&mut rest).unwrap();
        assert!(rest.is_empty(), "{} bytes that nobody sent", rest.len());
    }
    println!("{}", std::process::id());
    until_told();
    true
}

/// `squat HOW`: binds the control port of this host, and answers each question. The answer is `garbage`, the question's
/// own bytes (`echo`), or a YES that repeats another number (`nonce`). It can also be a right YES without an HMAC
/// (`yes`), or an everlasting "ask again" (`stamp`). Prints "squatting", then, when stdin ends, how many datagrams
/// came.
fn squat(how: &str) -> bool {
    let socket = UdpSocket::bind((IpAddr::from([0, 0, 0, 0]), CONTROL_PORT)).unwrap();
    let port = socket.try_clone().unwrap();
    let how = how.to_owned();
    let count = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counter = std::sync::Arc::clone(&count);
    println!("squatting");
    std::thread::spawn(move || {
        let mut buf = [0; 2048];
        loop {
            let Ok((n, from)) = port.recv_from(&mut buf) else {
                return;
            };
            counter.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            for answer in answers(&how, &buf[..n]) {
                let _ = port.send_to(&answer, from);
            }
        }
    });
    until_told();
    println!("{}", count.load(std::sync::atomic::Ordering::Relaxed));
    true
}

fn answers(how: &str, question: &[u8]) -> Vec<Vec<u8>> {
    let mut answer = question.to_vec();
    // The bytes follow the layout in docs/protocol.md, P61 and P10.
    let yes = |answer: &mut Vec<u8>| {
        answer[5] = 17;
        answer[56..58].copy_from_slice(&48_u16.to_le_bytes());
        let request = question[66..74].to_vec();
        answer[58..66].copy_from_slice(b"rsok\x02\x02\x28\x00");
        answer[66..74].copy_from_slice(&request);
        answer[74..160].fill(0x5a);
    };
    match how {
        "garbage" => return vec![vec![0xff; 192], b"YES".to_vec(), vec![0; 1000], Vec::new()],
        "nonce" if question.len() == 192 => {
            yes(&mut answer);
            answer[8..24].fill(0xa5);
        }
        "yes" if question.len() == 192 => {
            yes(&mut answer);
            answer[6] = 0;
            answer[160..].fill(0);
        }
        "stamp" if question.len() == 192 => {
            answer[5] = 16;
            answer[56..58].fill(0);
            answer[24..40].fill(0x77);
        }
        _ => {}
    }
    // The answer is sent twice: the second is a replay of the first.
    vec![answer.clone(), answer]
}

/// `flood ADDRESS COUNT`: sends COUNT datagrams of random bytes, some of which begin as the library's do.
fn flood(address: SocketAddr, count: usize) -> bool {
    let socket = UdpSocket::bind((IpAddr::from([0, 0, 0, 0]), 0)).unwrap();
    for i in 0..count {
        let mut bytes = data::pattern(i as u64, 0, if i % 3 == 0 { i % 600 } else { 192 });
        if i % 2 == 0 && bytes.len() > 8 {
            bytes[..8].copy_from_slice(&[b'r', b's', b'k', b'u', 1, (i % 5) as u8, 0, 0]);
        }
        let _ = socket.send_to(&bytes, address);
    }
    true
}

/// A network namespace without a name. It ends when no process runs in it and this value is dropped.
pub struct Namespace(OwnedFd);

impl Namespace {
    /// Makes a namespace. Fails with EPERM without root.
    fn new() -> Result<Self> {
        // The namespace belongs to the thread, which ends; the fd keeps it.
        let made = std::thread::spawn(|| {
            let result = call!(libc::unshare(libc::CLONE_NEWNET));
            if result.value < 0 {
                bail!("unshare: {result}");
            }
            Ok(Self(std::fs::File::open("/proc/thread-self/ns/net")?.into()))
        });
        made.join().unwrap_or_else(|_| bail!("unshare failed"))
    }

    /// Has `command` run in the namespace.
    pub fn enter(&self, command: &mut Command) {
        let fd = self.0.as_raw_fd();
        // SAFETY: one system call, on a fd that is open as long as `self`, which outlives the start of the
        // command by the callers below.
        unsafe {
            command.pre_exec(move || match libc::setns(fd, libc::CLONE_NEWNET) {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            });
        }
    }

    /// Runs `ip` with these words in the namespace.
    fn ip(&self, words: &str) -> Result<()> {
        let mut command = Command::new("ip");
        command.args(words.split(' '));
        self.enter(&mut command);
        let out = command.output().context("ip (package iproute2)")?;
        if !out.status.success() {
            bail!("ip {words}: {}", String::from_utf8_lossy(&out.stderr));
        }
        Ok(())
    }

    /// Returns a counter of the kernel's UDP in the namespace, such as `NoPorts`.
    pub fn udp_counter(&self, name: &str) -> Result<u64> {
        let mut command = Command::new("cat");
        command.arg("/proc/self/net/snmp");
        self.enter(&mut command);
        let out = command.output()?;
        let mut lines = out
            .stdout
            .lines()
            .map_while(Result::ok)
            .filter(|l| l.starts_with("Udp:"));
        let (names, values) = (lines.next().unwrap_or_default(), lines.next().unwrap_or_default());
        let at = names.split(' ').position(|n| n == name).context("no such counter")?;
        Ok(values.split(' ').nth(at).context("no value")?.parse()?)
    }
}

/// Two hosts, as far as the network is concerned: `a` has 10.77.0.1 and fd77::1, `b` .2 and ::2.
pub struct Hosts {
    /// The client's host.
    pub a: Namespace,
    /// The server's host.
    pub b: Namespace,
}

impl Hosts {
    /// Makes the two hosts. The error is why that cannot be done here.
    pub fn new() -> Result<Self> {
        let (a, b) = (Namespace::new()?, Namespace::new()?);
        let path = format!("/proc/{}/fd/{}", std::process::id(), b.0.as_raw_fd());
        a.ip("link add left type veth peer name right")?;
        a.ip(&format!("link set right netns {path}"))?;
        for (host, link, n) in [(&a, "left", 1), (&b, "right", 2)] {
            host.ip("link set lo up")?;
            host.ip(&format!("addr add 10.77.0.{n}/24 dev {link}"))?;
            host.ip(&format!("link set {link} up"))?;
            // Without IPv6 its tests are left out.
            let _ = host.ip(&format!("addr add fd77::{n}/64 dev {link} nodad"));
        }
        Ok(Self { a, b })
    }
}
