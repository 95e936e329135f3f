//! Programs as a distribution or a compiler makes them: stock Python, whose subprocess gets a connection as its
//! standard input and output, and a program that gcc has built with AddressSanitizer.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use rdmasock_tests::harness::{Paths, clean_environment};
use rdmasock_tests::observe::promotion_state;

/// The longest wait for a state that will come.
const LIMIT: Duration = Duration::from_secs(60);

fn paths() -> Paths {
    Paths::find(Path::new(env!("CARGO_BIN_EXE_scenario")))
}

/// A program in a process group of its own, which is killed when this is dropped.
struct Program {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = killpg(Pid::from_raw(self.child.id() as i32), Signal::SIGKILL);
        let _ = self.child.wait();
    }
}

impl Program {
    fn start(mut command: Command) -> Self {
        command
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|e| panic!("{command:?}: {e}"));
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines }
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        if line.is_empty() {
            self.succeed();
        }
        line.trim().to_owned()
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    /// Ends the program's standard input, and waits for the program, which must succeed without a word.
    fn succeed(&mut self) {
        drop(self.child.stdin.take());
        let mut status = None;
        wait_until("the program's end", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        let mut words = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut words).unwrap();
        assert!(
            status.unwrap().success() && words.is_empty(),
            "{}\n{words}",
            status.unwrap()
        );
    }
}

#[track_caller]
fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + LIMIT;
    while !is_so() {
        assert!(Instant::now() < end, "{what} does not come");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until a connection of each program is on a link.
fn wait_for_links(paths: &Paths, programs: [&Program; 2]) {
    wait_until("a link at both ends", || {
        programs.iter().all(|program| {
            let state = promotion_state(&paths.command, program.pid());
            state.ok().flatten().is_some_and(|state| state.on_link > 0)
        })
    });
}

/// `server HOW` sends back each message of a connection until one begins with E. Then `cat` does it in its place, as
/// `late`, or as `unread` when 5,000 bytes are unread. `client HOW PORT` sends the messages, E at the first line of its
/// input, and the 5,000 bytes at once or at the second line.
const PYTHON: &str = r"
import array, fcntl, select, socket, subprocess, sys, termios, time

SIZE, MORE = 300, bytes(range(250)) * 20

def exact(conn, size):
    got = b''
    while len(got) < size:
        part = conn.recv(size - len(got))
        assert part, len(got)
        got += part
    return got

def serve(how):
    with socket.create_server(('127.0.0.1', 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        conn = listener.accept()[0]
    while not (message := exact(conn, SIZE)).startswith(b'E'):
        conn.sendall(message)
    unread = array.array('i', [0])
    while how == 'unread' and unread[0] < len(MORE):
        time.sleep(0.001)
        fcntl.ioctl(conn, termios.FIONREAD, unread)
    done = subprocess.run(['cat'], stdin=conn, stdout=conn)
    conn.close()
    return done.returncode

def ask(how, port):
    conn = socket.create_connection(('127.0.0.1', port))
    def echoed(message):
        conn.sendall(message)
        assert exact(conn, len(message)) == message
    count = 0
    while count < 20 or not select.select([sys.stdin], [], [], 0.001)[0]:
        echoed(bytes([count % 64]) * SIZE)
        count += 1
    sys.stdin.readline()
    conn.sendall(b'E' * SIZE)
    if how == 'late':
        sys.stdin.readline()
    echoed(MORE)
    for count in range(10):
        echoed(bytes([count]) * SIZE)
    conn.shutdown(socket.SHUT_WR)
    assert conn.recv(1) == b''
    return 0

how = sys.argv[2]
sys.exit(serve(how) if sys.argv[1] == 'server' else ask(how, int(sys.argv[3])))
";

/// Has Python hand a connection to `cat`, on kernel TCP or from a link.
fn hand_to_cat(how: &str, library: Option<&Path>) {
    let paths = paths();
    let start = |words: &[&str]| {
        let mut command = Command::new("python3");
        clean_environment(&mut command);
        if let Some(library) = library {
            command
                .env("LD_PRELOAD", library)
                .env("RDMASOCK_PROMOTE_AFTER", "2r,16K");
        }
        command.args(["-IS", "-c", PYTHON]).args(words);
        Program::start(command)
    };
    let mut server = start(&["server", how]);
    let port = server.line();
    let mut client = start(&["client", how, &port]);
    if library.is_some() {
        wait_for_links(&paths, [&server, &client]);
    }
    client.tell("hand it over");
    if how == "late" {
        let mut maps = String::new();
        // The loader maps the library only after the child is called cat.
        wait_until("cat", || {
            let Some(cat) = child_of(server.pid(), "cat") else {
                return false;
            };
            maps = std::fs::read_to_string(format!("/proc/{cat}/maps")).unwrap_or_default();
            maps.contains("libc.so") && (library.is_none() || maps.contains("librdmasock.so"))
        });
        assert_eq!(maps.contains("librdmasock.so"), library.is_some(), "{maps}");
        client.tell("send more");
    }
    client.succeed();
    server.succeed();
}

/// Returns the child of a process that runs the program `name`.
fn child_of(parent: u32, name: &str) -> Option<u32> {
    let children = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).ok()?;
    let mut children = children.split_whitespace().filter_map(|pid| pid.parse().ok());
    children.find(|pid| std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim() == name))
}

#[test]
fn cat_gets_a_connection_of_python() {
    for how in ["late", "unread"] {
        hand_to_cat(how, None);
    }
}

#[test]
fn cat_gets_a_promoted_connection_of_python() {
    let library = paths().library.unwrap();
    hand_to_cat("late", Some(&library));
}

#[test]
fn cat_gets_unread_bytes_of_python() {
    let library = paths().library.unwrap();
    hand_to_cat("unread", Some(&library));
}

#[test]
fn sanitized_program_is_promoted() {
    let paths = paths();
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("sanitized");
    let cc = Command::new("gcc")
        .args(["-fsanitize=address", "-g", "-Wall", "-Werror", "-o"])
        .arg(&program)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("c/sanitized.c"))
        .status();
    assert!(
        cc.is_ok_and(|status| status.success()),
        "gcc (Debian: apt install gcc libc6-dev)"
    );
    let start = |port: Option<&str>| {
        let mut command = Command::new(&paths.command);
        clean_environment(&mut command);
        command
            .env("RDMASOCK_LIBRARY", paths.library.as_ref().unwrap())
            .args(["run", "--promote-after", "2r,16K", "--"])
            .arg(&program)
            .args(port);
        Program::start(command)
    };
    let mut server = start(None);
    let port = server.line();
    let mut client = start(Some(&port));
    wait_for_links(&paths, [&server, &client]);
    for end in [&server, &client] {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", end.pid())).unwrap();
        assert!(maps.contains("libasan.so") && maps.contains("librdmasock.so"), "{maps}");
    }
    client.succeed();
    server.succeed();
}
