//! The programs of `tests/cuts.rs`, which preloads the library: a server and a client that has several connections
//! with it at a time. They know nothing of the library, and live until their stdin ends, so that no end of a process
//! can be taken for a loss.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::io::{BufRead, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rdmasock_tests::cuts::{CLIENT, Progress, SERVER, play};

/// A connection on which no byte has moved for this time hangs. A silent link needs far less to fail.
const LIMIT: Duration = Duration::from_secs(45);
/// Threads of the client, each with one connection at a time.
const AT_ONCE: u64 = 12;
/// Bytes that the client sends first: the connection's seed, and how long the connection is to last.
const GREETING: usize = 9;

fn main() {
    let args: Vec<String> = std::env::args().collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[1..] {
        ["serve", connections] => serve(connections.parse().unwrap()),
        ["dial", port, seed, connections, long, times] => dial(
            port.parse().unwrap(),
            seed.parse().unwrap(),
            connections.parse().unwrap(),
            long.parse().unwrap(),
            times.parse().unwrap(),
        ),
        _ => {
            eprintln!("cuts-peer serve CONNECTIONS | dial PORT SEED CONNECTIONS LONG-ONES HOW-LONG");
            std::process::exit(2);
        }
    }
}

/// The connections of this process, and how each ended.
#[derive(Default)]
struct Book {
    open: Mutex<Vec<Arc<Progress>>>,
    bytes: AtomicU64,
}

impl Book {
    /// Returns a book with a thread that reports connections that hang.
    fn watched() -> Arc<Self> {
        let book = Arc::new(Self::default());
        let watched = Arc::clone(&book);
        thread::spawn(move || watched.watch());
        book
    }

    fn watch(&self) {
        let mut seen: Vec<(Arc<Progress>, u64, Instant)> = Vec::new();
        loop {
            thread::sleep(Duration::from_millis(500));
            let open = self.open.lock().unwrap().clone();
            seen.retain(|(progress, ..)| !progress.is_over());
            for progress in open {
                let moved = progress.moved();
                match seen.iter_mut().find(|(known, ..)| Arc::ptr_eq(known, &progress)) {
                    Some((_, before, _)) if *before == moved => {}
                    Some((_, before, since)) => (*before, *since) = (moved, Instant::now()),
                    None => seen.push((progress, moved, Instant::now())),
                }
            }
            let mut hang = seen.iter().filter(|(.., since)| since.elapsed() > LIMIT).peekable();
            if hang.peek().is_some() {
                hang.for_each(|(progress, ..)| say(&format!("failed: it hangs; {progress}")));
                std::process::exit(1);
            }
        }
    }

    fn play(&self, stream: TcpStream, progress: Progress) {
        let progress = Arc::new(progress);
        self.open.lock().unwrap().push(Arc::clone(&progress));
        if let Err(why) = play(stream, &progress) {
            say(&format!("failed: {why}"));
        }
        self.bytes.fetch_add(progress.received(), Relaxed);
        self.open.lock().unwrap().retain(|other| !Arc::ptr_eq(other, &progress));
    }

    /// Prints the sum of compared bytes when all connections have ended, then waits until stdin ends.
    fn finish(&self) {
        say(&format!("done {}", self.bytes.load(Relaxed)));
        std::io::stdin().lock().lines().for_each(drop);
    }
}

/// Prints a line, in one piece.
fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").unwrap();
    out.flush().unwrap();
}

fn serve(connections: u64) {
    let book = Book::watched();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    say(&listener.local_addr().unwrap().port().to_string());
    thread::scope(|scope| {
        for _ in 0..connections {
            let (mut stream, _) = listener.accept().unwrap();
            let book = &book;
            scope.spawn(move || {
                let mut greeting = [0; GREETING];
                if let Err(error) = stream.read_exact(&mut greeting) {
                    return say(&format!("failed: no greeting: {error}"));
                }
                let seed = u64::from_le_bytes(greeting[..8].try_into().unwrap());
                book.play(stream, Progress::new(seed, greeting[8], SERVER));
            });
        }
    });
    book.finish();
}

/// Opens `connections` connections, one after the other in each of [`AT_ONCE`] threads. The first `long` of them last
/// `times` as long as a return to a link takes.
fn dial(port: u16, first_seed: u64, connections: u64, long: u64, times: u8) {
    let book = Book::watched();
    let next = AtomicU64::new(0);
    thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Relaxed);
                    if number >= connections {
                        return;
                    }
                    let (seed, times) = (first_seed + number, if number < long { times } else { 0 });
                    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
                    let mut greeting = [0; GREETING];
                    greeting[..8].copy_from_slice(&seed.to_le_bytes());
                    greeting[8] = times;
                    stream.write_all(&greeting).unwrap();
                    book.play(stream, Progress::new(seed, times, CLIENT));
                }
            });
        }
    });
    book.finish();
}
