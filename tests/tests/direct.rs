//! Whether direct transfers are used where they should be: two programs that move many bytes over the local device,
//! and the counts of `rdmasock stat`. `scenarios/direct.rs` compares the bytes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};
use rdmasock_tests::harness::{Paths, clean_environment};
use rdmasock_tests::observe::count;
use rdmasock_tests::stall::PIECE;

/// How long it may take until most of a transfer is direct.
const LIMIT: Duration = Duration::from_secs(60);
/// Pieces of a transfer.
const MANY: usize = 200;

const DEVICES: [&str; 6] = [
    "roce",
    "iwarp",
    "roce,thread",
    "iwarp,thread",
    "roce,delay=20",
    "iwarp,delay=20",
];

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    // Two programs run that both work all the time.
    args.test_threads.get_or_insert(1);
    let paths = Arc::new(Paths::find(Path::new(env!("CARGO_BIN_EXE_scenario"))));
    let mut trials = Vec::new();
    for device in DEVICES {
        for sender in ["client", "server"] {
            let paths = Arc::clone(&paths);
            let name = format!("{sender}_sends/{}", device.replace([',', '='], "_"));
            trials.push(Trial::test(name, move || most_is_direct(&paths, device, sender)));
        }
    }
    for device in DEVICES {
        for sender in ["client", "server"] {
            let paths = Arc::clone(&paths);
            let name = format!("to_epoll_{sender}_sends/{}", device.replace([',', '='], "_"));
            trials.push(Trial::test(name, move || most_is_read(&paths, device, sender)));
        }
    }
    for device in DEVICES {
        for least in ["128K:get", "auto:get"] {
            let paths = Arc::clone(&paths);
            let name = format!("{least}_lands/{device}").replace([',', '=', ':'], "_");
            trials.push(Trial::test(name, move || most_lands(&paths, device, least)));
        }
    }
    for short in ["sender", "receiver"] {
        let paths = Arc::clone(&paths);
        let name = format!("{short}_may_not_lock_memory");
        trials.push(Trial::test(name, move || nothing_is_direct(&paths, short)));
    }
    for device in ["roce", "iwarp"] {
        let of_all = Arc::clone(&paths);
        let name = format!("goes_at_once/{device}");
        trials.push(Trial::test(name, move || a_piece_goes_at_once(&of_all, device)));
        let of_all = Arc::clone(&paths);
        let name = format!("registered_allocator/{device}");
        trials.push(Trial::test(name, move || pieces_are_registered_once(&of_all, device)));
        let of_all = Arc::clone(&paths);
        let name = format!("a_slow_end_is_waited_for/{device}");
        trials.push(Trial::test(name, move || pieces_are_read_late(&of_all, device)));
    }
    let of_all = Arc::clone(&paths);
    trials.push(Trial::test("auto_goes_directly", move || auto_goes_directly(&of_all)));
    trials.push(Trial::test("a_receiver_is_rarely_ready_in_vain", move || {
        few_are_posted_in_vain(&paths)
    }));
    libtest_mimic::run(&args, trials).exit_code()
}

/// An end of the connection, killed if it still runs when this is dropped.
struct End {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Drop for End {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl End {
    /// `least` is `RDMASOCK_ZCOPY_MIN`, perhaps with a colon and a fixed protocol behind it; `+alloc` selects the
    /// registered allocator.
    fn start(paths: &Paths, device: &str, least: &str, words: &[&str]) -> Result<Self, Failed> {
        let mut command = Command::new(&paths.scenario);
        clean_environment(&mut command);
        let (least, has_allocator) = match least.strip_suffix("+alloc") {
            Some(rest) => (rest, true),
            None => (least, false),
        };
        command.env("LD_PRELOAD", paths.library.as_ref()?);
        if has_allocator {
            let both = paths.with_allocator().map_err(|e| format!("{e:#}"))?;
            command.env("RDMASOCK_ALLOC", "registered").env("LD_PRELOAD", both);
        }
        let names = ["RDMASOCK_ZCOPY_MIN", "RDMASOCK_DEV_WAY"];
        let settings = names.into_iter().zip(least.split(':'));
        command.envs(settings.filter(|(_, word)| !word.is_empty()));
        let mut child = command
            .env("RDMASOCK_DEV_LOCAL_DEVICE", &paths.device)
            .env("LOCALNIC", device)
            // Peers ask by name, as within a host: a single control port would serve all tests that run at once.
            .env("RDMASOCK_CONTROL_PORT", "0")
            .env("RDMASOCK_PROMOTE_AFTER", "2r,16K")
            .args(["helper", "stall"])
            .args(words)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let lines = BufReader::new(child.stdout.take().unwrap());
        Ok(Self { child, lines })
    }

    fn line(&mut self) -> Result<String, Failed> {
        let mut line = String::new();
        self.lines.read_line(&mut line)?;
        Ok(line.trim().to_owned())
    }

    /// Tells the end to do `what` with `n` pieces or messages.
    fn begin(&mut self, what: &str, n: usize) -> Result<(), Failed> {
        // The line is written in one piece: the program reads a line at a time.
        let line = format!("{what} {n}\n");
        Ok(self.child.stdin.as_mut().unwrap().write_all(line.as_bytes())?)
    }

    /// Waits until the end has finished.
    fn finish(&mut self) -> Result<(), Failed> {
        match self.line()?.as_str() {
            "done" => Ok(()),
            other => Err(format!("it said {other:?}").into()),
        }
    }

    fn count(&self, paths: &Paths, event: &str) -> Result<u64, Failed> {
        let count = count(&paths.command, self.child.id(), event).map_err(|e| format!("{e:#}"))?;
        Ok(count.unwrap_or(0))
    }
}

/// Returns the sender and the receiver. `sender` says whether the client or the server sends.
fn pair(paths: &Paths, device: &str, sender: &str) -> Result<(End, End), Failed> {
    pair_with(paths, device, sender, ["128K"; 2])
}

/// Returns a pair, with `RDMASOCK_ZCOPY_MIN` of the client and of the server.
fn pair_with(paths: &Paths, device: &str, sender: &str, least: [&str; 2]) -> Result<(End, End), Failed> {
    let mut server = End::start(paths, device, least[1], &["server"])?;
    let port = server.line()?;
    let mut client = End::start(paths, device, least[0], &["client", &port])?;
    server.line()?;
    client.line()?;
    server.begin("answer", 20)?;
    client.begin("ask", 20)?;
    server.finish()?;
    client.finish()?;
    Ok(match sender {
        "client" => (client, server),
        _ => (server, client),
    })
}

/// Moves `pieces` pieces. Returns how many bytes were sent and received directly.
fn transfer(paths: &Paths, from: &mut End, to: &mut End, pieces: usize) -> Result<(u64, u64), Failed> {
    let before = (
        from.count(paths, "direct_sent_bytes")?,
        to.count(paths, "direct_received_bytes")?,
    );
    to.begin("receive-pieces", pieces)?;
    from.begin("send-pieces", pieces)?;
    from.finish()?;
    to.finish()?;
    let sent = from.count(paths, "direct_sent_bytes")? - before.0;
    let received = to.count(paths, "direct_received_bytes")? - before.1;
    for end in [from, to] {
        assert_eq!(end.count(paths, "bulk_lost")?, 0, "a bulk queue pair was lost");
    }
    Ok((sent, received))
}

fn limit_locked_memory(pid: u32, bytes: u32) -> Result<(), Failed> {
    // Only the soft limit is set.
    let words = [format!("--pid={pid}"), format!("--memlock={bytes}:")];
    let status = Command::new("prlimit").args(words).status()?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("prlimit: {status}").into())
    }
}

/// If half of the limit on locked memory is less than the least direct transfer, there is none. Bytes that the
/// sender has in a ring when the receiver waits may still go into the receiver's buffer.
fn nothing_is_direct(paths: &Paths, short: &str) -> Result<(), Failed> {
    let (mut from, mut to) = pair(paths, "roce", "client")?;
    let limited = if short == "sender" { &from } else { &to };
    let pid = limited.child.id();
    limit_locked_memory(pid, 200_000)?;
    let end = Instant::now() + LIMIT;
    loop {
        let (sent, received) = transfer(paths, &mut from, &mut to, MANY)?;
        let by_limited = if short == "sender" { sent } else { received };
        assert_eq!(by_limited, 0, "sent {sent}, received {received}");
        let unpinned = |end: &End| end.count(paths, "direct_unpinned");
        let (by_sender, by_receiver) = (unpinned(&from)?, unpinned(&to)?);
        let (by_limited, by_other) = match short {
            "sender" => (by_sender, by_receiver),
            _ => (by_receiver, by_sender),
        };
        assert_eq!(by_other, 0);
        if by_limited > 0 {
            break;
        }
        // On a machine that has much else to do, neither end may have come to wait.
        assert!(Instant::now() < end, "it was never tried");
    }
    limit_locked_memory(pid, 1_000_000)?;
    let end = Instant::now() + LIMIT;
    while transfer(paths, &mut from, &mut to, MANY)?.1 == 0 {
        if Instant::now() > end {
            return Err("nothing goes directly with a higher limit either".into());
        }
    }
    Ok(())
}

/// A chunk of the registered allocator's memory is registered once for a link, whatever happens to the blocks in it,
/// until the link ends.
fn pieces_are_registered_once(paths: &Paths, device: &str) -> Result<(), Failed> {
    let (mut from, mut to) = pair_with(paths, device, "client", ["128K:put+alloc", "128K:put"])?;
    let end = Instant::now() + LIMIT;
    while from.count(paths, "alloc_hits")? < 100 {
        transfer(paths, &mut from, &mut to, MANY)?;
        assert!(Instant::now() < end, "too little goes directly");
    }
    let of = |event| from.count(paths, event);
    assert_eq!((of("alloc_misses")?, of("direct_registrations")?), (1, 1));
    assert_eq!((of("alloc_kept_bytes")?, of("alloc_ended_bytes")?), (2 << 20, 0));
    assert_eq!(of("direct_unpinned")? + to.count(paths, "alloc_misses")?, 0);
    drop(to);
    while from.count(paths, "alloc_ended_bytes")? == 0 {
        assert!(Instant::now() < end, "the link is over, and its registration is not");
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// The ring bounds the bytes of a direct transfer, and grows for it too, though direct bytes never fill the ring.
/// The sender registers a piece that is longer than a first ring once, not a ring's length at a time.
fn a_piece_goes_at_once(paths: &Paths, device: &str) -> Result<(), Failed> {
    // Less than the first ring, so that the ring need not grow.
    const LITTLE: usize = 60_000;
    let (mut from, mut to) = pair_with(paths, device, "client", ["32K:put"; 2])?;
    let end = Instant::now() + LIMIT;
    while from.count(paths, "direct_sent_bytes")? == 0 {
        to.begin("receive", LITTLE)?;
        std::thread::sleep(Duration::from_millis(20));
        from.begin("send", LITTLE)?;
        from.finish()?;
        to.finish()?;
        assert!(Instant::now() < end, "nothing goes directly");
    }
    loop {
        let before = from.count(paths, "direct_registrations")?;
        let (sent, _) = transfer(paths, &mut from, &mut to, MANY)?;
        let registrations = from.count(paths, "direct_registrations")? - before;
        let pieces = sent / PIECE as u64;
        if pieces >= MANY as u64 / 2 && registrations < MANY as u64 * 3 / 2 {
            return Ok(());
        }
        assert!(
            Instant::now() < end,
            "{registrations} registrations for {pieces} pieces"
        );
    }
}

/// An end takes longer for a loan than an uninformed sender waits: 10 ms for each work request, and a loan has three.
fn pieces_are_read_late(paths: &Paths, device: &str) -> Result<(), Failed> {
    const FEW: usize = 10;
    let device = format!("{device},delay=10000");
    let (mut from, mut to) = pair_with(paths, &device, "client", ["128K:get"; 2])?;
    let end = Instant::now() + LIMIT;
    loop {
        let before = from.count(paths, "rendezvous_sent_bytes")?;
        for _ in 0..FEW {
            to.begin("receive-by-epoll", 1)?;
            from.begin("send-pieces", 1)?;
            from.finish()?;
            to.finish()?;
        }
        let sent = from.count(paths, "rendezvous_sent_bytes")? - before;
        let all = (FEW * PIECE) as u64;
        if sent >= all / 4 {
            return Ok(());
        }
        assert!(Instant::now() < end, "of {all} bytes {sent} were lent");
    }
}

fn most_is_direct(paths: &Paths, device: &str, sender: &str) -> Result<(), Failed> {
    let (mut from, mut to) = pair(paths, device, sender)?;
    // On a machine that has much else to do a reader may be late for a while, and then fewer transfers are tried.
    let end = Instant::now() + LIMIT;
    loop {
        let (sent, received) = transfer(paths, &mut from, &mut to, MANY)?;
        let all = (MANY * PIECE) as u64;
        if sent >= all / 2 && received >= all / 2 {
            return Ok(());
        }
        if Instant::now() > end {
            return Err(format!("of {all} bytes {sent} were sent directly, and {received} received").into());
        }
    }
}

/// A sender whose reader does not wait in a receive lends its memory to the reader's device.
fn most_is_read(paths: &Paths, device: &str, sender: &str) -> Result<(), Failed> {
    let (mut from, mut to) = pair(paths, device, sender)?;
    let end = Instant::now() + LIMIT;
    loop {
        let counts = |from: &End, to: &End| -> Result<_, Failed> {
            let sent = from.count(paths, "rendezvous_sent_bytes")?;
            Ok((sent, to.count(paths, "rendezvous_received_bytes")?))
        };
        let before = counts(&from, &to)?;
        to.begin("receive-by-epoll", MANY)?;
        from.begin("send-pieces", MANY)?;
        from.finish()?;
        to.finish()?;
        let after = counts(&from, &to)?;
        for end in [&from, &to] {
            assert_eq!(end.count(paths, "bulk_lost")?, 0, "a bulk queue pair was lost");
            assert_eq!(
                end.count(paths, "direct_received_bytes")?,
                0,
                "nobody waits with a buffer"
            );
        }
        let (sent, received) = (after.0 - before.0, after.1 - before.1);
        let all = (MANY * PIECE) as u64;
        if sent >= all / 2 && received >= all / 2 {
            assert_eq!(after.0, after.1);
            return Ok(());
        }
        if Instant::now() > end {
            return Err(format!("of {all} bytes {sent} were lent, and {received} read").into());
        }
    }
}

/// Bytes that a sender lends to a reader that waits in a receive land in the reader's buffer. The library keeps no
/// copy of them, whether or not the sender's end learns of the buffer.
fn most_lands(paths: &Paths, device: &str, least: &str) -> Result<(), Failed> {
    let (mut from, mut to) = pair_with(paths, device, "client", [least; 2])?;
    let end = Instant::now() + LIMIT;
    loop {
        let counts = |to: &End| -> Result<_, Failed> {
            let read = to.count(paths, "rendezvous_received_bytes")?;
            Ok((read, to.count(paths, "rendezvous_landed_bytes")?))
        };
        let before = counts(&to)?;
        transfer(paths, &mut from, &mut to, MANY)?;
        let after = counts(&to)?;
        let (read, landed) = (after.0 - before.0, after.1 - before.1);
        assert!(landed <= read, "{landed} of {read}");
        let all = (MANY * PIECE) as u64;
        if landed >= all / 2 {
            return Ok(());
        }
        if Instant::now() > end {
            return Err(format!("of {all} bytes {read} were read, and {landed} into the reader's buffer").into());
        }
    }
}

/// With `auto` pieces of a MiB bypass the rings, and small ones do not.
fn auto_goes_directly(paths: &Paths) -> Result<(), Failed> {
    let (mut from, mut to) = pair_with(paths, "roce", "client", ["auto"; 2])?;
    let end = Instant::now() + LIMIT;
    loop {
        let all = (MANY * PIECE) as u64;
        let (sent, _) = transfer(paths, &mut from, &mut to, MANY)?;
        if sent >= all / 2 {
            return Ok(());
        }
        assert!(Instant::now() < end, "of {all} bytes {sent} went directly");
    }
}

/// A receiver posts its buffers again and again only if its sender uses them.
fn few_are_posted_in_vain(paths: &Paths) -> Result<(), Failed> {
    let (mut from, mut to) = pair_with(paths, "roce", "client", ["1G", "auto"])?;
    for _ in 0..10 {
        transfer(paths, &mut from, &mut to, MANY)?;
    }
    let posted = to.count(paths, "direct_registrations")?;
    assert!(posted < MANY as u64, "{posted} buffers for {} pieces", 10 * MANY);
    let (mut from, mut to) = pair_with(paths, "roce", "client", ["128K", "auto"])?;
    let end = Instant::now() + LIMIT;
    while transfer(paths, &mut from, &mut to, MANY)?.1 == 0 {
        assert!(Instant::now() < end, "nothing goes directly");
    }
    Ok(())
}
