//! `lab-barrier [--patient] NAME [VALUE]`: waits until the other node is at the barrier NAME, and prints its VALUE.
//!
//! For scripts that run on both nodes of the lab. Fails after `LAB_BARRIER_TIMEOUT` seconds (60). Fails also if the
//! other node is at a barrier of another name. With `--patient` the program then keeps waiting, since the other node
//! learns of the mismatch and fails.
//!
//! The nodes exchange one line each over TCP, which stays plain even if the library is preloaded. Node a listens, and
//! node b connects again and again until an exchange succeeds. The barrier is a compiled program because a run has many
//! barriers, and an emulated machine takes a second to start Python.

use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};
use std::{env, io, thread};

const PORT: u16 = 7077;
const RETRY: Duration = Duration::from_millis(20);
/// Limit of one attempt to connect, as its packet may have been lost.
const ATTEMPT: Duration = Duration::from_secs(2);

fn main() -> ExitCode {
    match run() {
        Ok(value) => {
            println!("{value}");
            ExitCode::SUCCESS
        }
        Err(text) => {
            eprintln!("lab-barrier {text}");
            ExitCode::FAILURE
        }
    }
}

/// Returns the value of the other node, or the text of the error.
fn run() -> Result<String, String> {
    let mut words: Vec<String> = env::args_os()
        .skip(1)
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    if env::var_os("LD_PRELOAD").is_some() {
        let failed = Command::new("/proc/self/exe")
            .args(&words)
            .env_remove("LD_PRELOAD")
            .exec();
        return Err(format!("cannot start itself without LD_PRELOAD: {failed}"));
    }
    let patient = words.first().is_some_and(|word| word == "--patient");
    words.drain(..usize::from(patient));
    let name = words.first().ok_or("[--patient] NAME [VALUE]")?.clone();
    let limit = seconds()?;
    let barrier = Barrier {
        line: words.join(" "),
        name: name.clone(),
        patient,
    };

    let node = variable("LAB_NODE")?;
    let (address, meet): (_, fn(&Barrier, Ipv4Addr, &Tell)) = if node == "a" {
        (address("LAB_ADDR")?, Barrier::listen)
    } else {
        (address("LAB_PEER")?, Barrier::call)
    };
    let (tell, told) = channel();
    thread::spawn(move || meet(&barrier, address, &tell));

    let deadline = Instant::now() + limit;
    let mut last = io::Error::new(io::ErrorKind::TimedOut, "timed out");
    let line = loop {
        match told.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(Ok(line)) => break line,
            Ok(Err(error)) => last = error,
            Err(_) => {
                return Err(format!(
                    "{name}: node {node} waited {} s in vain ({last})",
                    limit.as_secs_f64()
                ));
            }
        }
    };
    match line.split_once(' ').unwrap_or((&line, "")) {
        (other, value) if other == name => Ok(value.to_owned()),
        (other, _) => Err(format!("{name}: the other node is at {other}")),
    }
}

fn variable(name: &str) -> Result<String, String> {
    env::var(name).map_err(|error| format!("{name}: {error}"))
}

fn address(name: &str) -> Result<Ipv4Addr, String> {
    variable(name)?.parse().map_err(|error| format!("{name}: {error}"))
}

fn seconds() -> Result<Duration, String> {
    let text = env::var("LAB_BARRIER_TIMEOUT").unwrap_or_else(|_| "60".to_owned());
    let number = text
        .parse()
        .ok()
        .and_then(|number| Duration::try_from_secs_f64(number).ok());
    number.ok_or_else(|| format!("LAB_BARRIER_TIMEOUT: {text}: not a number of seconds"))
}

struct Barrier {
    name: String,
    /// Name and value, in the form that is sent.
    line: String,
    patient: bool,
}

/// Carries the line of the other node, or the error of an attempt.
type Tell = Sender<io::Result<String>>;

impl Barrier {
    fn listen(&self, address: Ipv4Addr, tell: &Tell) {
        let heard = TcpListener::bind((address, PORT)).and_then(|listener| {
            loop {
                if let Some(line) = self.exchange(&listener.accept()?.0) {
                    return Ok(line);
                }
            }
        });
        // If the receiver is gone, the process is about to end.
        let _ = tell.send(heard);
    }

    fn call(&self, address: Ipv4Addr, tell: &Tell) {
        loop {
            match TcpStream::connect_timeout(&(address, PORT).into(), ATTEMPT).map(|stream| self.exchange(&stream)) {
                Ok(Some(line)) => return drop(tell.send(Ok(line))),
                Ok(None) => {}
                Err(error) => drop(tell.send(Err(error))),
            }
            thread::sleep(RETRY);
        }
    }

    /// Sends this node's line and returns the line of the other node. Returns `None` if the other node closes before a
    /// whole line has arrived. With `patient`, returns `None` also if the other node is at a barrier of another name.
    fn exchange(&self, mut stream: &TcpStream) -> Option<String> {
        stream.write_all(format!("{}\n", self.line).as_bytes()).ok()?;
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).ok()?;
        let line = line.strip_suffix('\n')?;
        let name = line.split(' ').next();
        (!self.patient || name == Some(&self.name)).then(|| line.to_owned())
    }
}
