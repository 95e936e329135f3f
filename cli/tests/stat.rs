//! `rdmasock stat` on instances that the test makes with the library's own writer.

// The events of one `json!`.
#![recursion_limit = "256"]
#![allow(clippy::unwrap_used, clippy::panic)]

use assert_cmd::Command;
use rdmasock_core::os::privatefd::PrivateFd;
use rdmasock_core::stats::{Asleep, Call, Direction, Event, Path, Reason, StatsPage, StreamInfo, Why};
use serde_json::{Value, json};

fn rdmasock(arguments: &[&str]) -> Command {
    let mut command = Command::cargo_bin("rdmasock").unwrap();
    command.args(arguments);
    command
}

/// Makes this process an instance with a link, two open streams and a closed one.
fn instance() -> PrivateFd {
    let (page, fd) = StatsPage::create(std::process::id(), [0xab; 16], b"redis-server").unwrap();
    let link = page.open_link(0, Path::Shm, [1; 16], 77).unwrap();
    link.set_streams(1);
    page.count(Event::Ask);
    let open = |slot, fd, direction, peer: &str, why: Why| {
        let info = StreamInfo {
            fd,
            direction,
            local: Some("127.0.0.1:6379".parse().unwrap()),
            peer: Some(peer.parse().unwrap()),
            why,
        };
        page.open_stream(slot, &info).unwrap()
    };
    let promoted = open(0, 7, Direction::Accept, "127.0.0.1:4000", Reason::BelowThreshold.into());
    promoted.tx.add_tcp(10);
    promoted.set_tx_path(Path::Shm);
    promoted.set_rx_path(Path::Shm);
    promoted.set_link(Some(0));
    promoted.tx.add_link(2_000);
    promoted.rx.add_link(1_000);
    // The peer's process cannot be read, so the unread bytes are those that this thread saw.
    page.sleeper(600).unwrap().begin(&Asleep {
        thread: std::process::id(),
        call: Call::Send,
        stream: Some(0),
        since: 0,
        unread: 700,
    });
    let plain = open(1, 8, Direction::Connect, "[::1]:4001", Why::declined(Reason::Rule));
    plain.rx.add_tcp(5);
    let closed = open(2, 9, Direction::Accept, "127.0.0.1:4002", Reason::None.into());
    closed.tx.add_tcp(100);
    page.close_stream(2);
    fd.unwrap()
}

#[test]
fn json_is_as_documented() {
    let _fd = instance();
    let pid = std::process::id().to_string();
    let output = rdmasock(&["stat", "--json", "--pid", &pid]).output().unwrap();
    assert!(output.status.success());
    let mut seen: Value = serde_json::from_slice(&output.stdout).unwrap();
    for time in ["/instances/0/uptime_s", "/instances/0/streams/0/asleep/0/asleep_s"] {
        let time = seen.pointer_mut(time).unwrap().take();
        assert!(time.as_f64().is_some_and(|seconds| seconds >= 0.0), "{time}");
    }
    let expected = json!({"instances": [{
        "pid": std::process::id(),
        "uid": own_uid(),
        "program": "redis-server",
        "id": "ab".repeat(16),
        "uptime_s": null,
        "held": null,
        "totals": {
            "tx_tcp_bytes": 110, "tx_tcp_calls": 2, "tx_link_bytes": 2000, "tx_link_calls": 1,
            "rx_tcp_bytes": 5, "rx_tcp_calls": 1, "rx_link_bytes": 1000, "rx_link_calls": 1,
            "promoted": 1, "demoted": 0, "streams": 3,
        },
        "events": {
            "asks": 1, "yes": 0, "no": 0, "timeouts": 0, "violations": 0,
            "bulk_lost": 0, "direct_sent_bytes": 0, "direct_received_bytes": 0, "direct_unpinned": 0,
            "direct_registrations": 0,
            "rendezvous_sent_bytes": 0, "rendezvous_received_bytes": 0, "rendezvous_landed_bytes": 0,
            "alloc_hits": 0, "alloc_misses": 0, "alloc_kept_bytes": 0, "alloc_ended_bytes": 0,
            "control_asks": 0, "control_answers": 0, "control_relays": 0, "control_absent": 0,
            "control_stamps": 0, "control_unbound": 0, "control_refused_length": 0,
            "control_refused_version": 0, "control_refused_kind": 0, "control_refused_hmac": 0,
            "control_refused_misplaced": 0, "control_refused_replay": 0, "control_refused_rate": 0,
        },
        "links": [
            {"peer": "01".repeat(16), "peer_pid": 77, "fabric": "shm", "state": "up", "streams": 1, "why": null},
        ],
        "streams": [
            {
                "fd": 7, "local": "127.0.0.1:6379", "peer": "127.0.0.1:4000",
                "direction": "accept", "tx_path": "shm", "rx_path": "shm", "why_tcp": null,
                "tx_tcp_bytes": 10, "tx_tcp_calls": 1, "tx_link_bytes": 2000, "tx_link_calls": 1,
                "rx_tcp_bytes": 0, "rx_tcp_calls": 0, "rx_link_bytes": 1000, "rx_link_calls": 1,
                "unread_here": null, "unread_there": 700,
                "asleep": [
                    {"call": "send", "thread": std::process::id(), "threads": 1, "asleep_s": null},
                ],
            },
            {
                "fd": 8, "local": "127.0.0.1:6379", "peer": "[::1]:4001",
                "direction": "connect", "tx_path": "tcp", "rx_path": "tcp",
                "why_tcp": "declined by peer: rule",
                "tx_tcp_bytes": 0, "tx_tcp_calls": 0, "tx_link_bytes": 0, "tx_link_calls": 0,
                "rx_tcp_bytes": 5, "rx_tcp_calls": 1, "rx_link_bytes": 0, "rx_link_calls": 0,
                "unread_here": null, "unread_there": null, "asleep": [],
            },
        ],
    }], "off": []});
    assert_eq!(seen, expected, "{seen:#}");
}

fn own_uid() -> u32 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self").unwrap().uid()
}

#[test]
fn a_connection_is_one_line_with_its_path_what_is_unread_and_who_sleeps() {
    let _fd = instance();
    let output = rdmasock(&["stat"]).output().unwrap();
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    let line = |peer: &str| {
        let mut lines = text.lines().filter(|line| line.contains(peer));
        let line = lines.next().unwrap_or_default();
        assert!(lines.next().is_none(), "{text}");
        line
    };
    let thread = format!("thread {}", std::process::id());
    for (peer, parts) in [
        (
            "127.0.0.1:4000",
            &[
                "redis-server",
                "shm",
                "2.0 KiB",
                "1000 B",
                "700 B",
                "?",
                "send",
                &thread,
            ][..],
        ),
        ("[::1]:4001", &["tcp", "5 B", "declined by peer: rule"]),
    ] {
        for part in parts {
            assert!(line(peer).contains(part), "{part} in {text}");
        }
    }
    assert!(!text.contains("asks 1"), "{text}");
}

#[test]
fn a_process_without_the_library_is_told() {
    for (pid, part) in [("1", "process 1"), ("4194304", "cannot look at process 4194304")] {
        let output = rdmasock(&["stat", "--pid", pid]).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.contains(part), "{text}");
    }
}

/// A process that has loaded a library of this name, with a value of `RDMASOCK`. Dropping it kills the process.
struct Preloaded(std::process::Child, #[allow(dead_code)] tempfile::TempDir);

impl Preloaded {
    fn new(switch: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let library = folder.path().join("librdmasock.so");
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let libc = maps
            .lines()
            .find_map(|line| line.split_whitespace().nth(5).filter(|p| p.ends_with("/libc.so.6")));
        std::fs::copy(libc.unwrap().replace("libc.so.6", "libm.so.6"), &library).unwrap();
        // The output of `cat` shows that the library is mapped. `cat` then waits for more input.
        let mut child = std::process::Command::new("cat")
            .env("LD_PRELOAD", &library)
            .env("RDMASOCK", switch)
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        std::io::Write::write_all(child.stdin.as_mut().unwrap(), b"x").unwrap();
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut [0]).unwrap();
        Self(child, folder)
    }
}

impl Drop for Preloaded {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_process_that_is_switched_off_is_shown() {
    for (switch, is_off) in [
        ("0", true),
        ("No", true),
        ("off", true),
        ("?", true),
        ("", true),
        ("1", false),
    ] {
        let process = Preloaded::new(switch);
        let pid = process.0.id();
        let line = format!("cat (pid {pid}): switched off by RDMASOCK={switch}\n");
        let of_pid = rdmasock(&["stat", "--pid", &pid.to_string()]).output().unwrap();
        let of_all = rdmasock(&["stat"]).output().unwrap();
        assert_eq!(String::from_utf8(of_pid.stdout).unwrap() == line, is_off, "{switch}");
        assert_eq!(of_pid.status.success(), is_off, "{switch}");
        assert_eq!(
            String::from_utf8(of_all.stdout).unwrap().contains(&line),
            is_off,
            "{switch}"
        );
        let json = rdmasock(&["stat", "--json"]).output().unwrap();
        let json: Value = serde_json::from_slice(&json.stdout).unwrap();
        let listed = json!({"pid": pid, "program": "cat", "value": switch});
        assert_eq!(json["off"].as_array().unwrap().contains(&listed), is_off, "{json}");
    }
}
