//! Checks that programs have the same output and exit status with the built library as without it. Most calls of these
//! programs go through a hook to libc's function. `tests/` and `integration/` test TCP streams.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test")]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::LazyLock;

/// The path of the library. This test builds it, because `cargo test` does not build a cdylib. The command is built in
/// the same call, as in all other places: cargo chooses the features of dependencies by the set of packages in a build,
/// and other features would mean another build.
static LIBRARY: LazyLock<PathBuf> = LazyLock::new(|| {
    // This test's own path is TARGET/PROFILE/deps/smoke-HASH.
    let test = std::env::current_exe().unwrap();
    let profile = test.ancestors().nth(2).unwrap();
    let name = match profile.file_name().unwrap().to_str().unwrap() {
        "debug" => "dev",
        name => name,
    };
    let status = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "-p", "rdmasock", "-p", "rdmasock-cli"])
        .args(["--profile", name])
        .arg("--target-dir")
        .arg(profile.parent().unwrap())
        .status()
        .unwrap();
    assert!(status.success());
    profile.join("librdmasock.so")
});

/// Compiles `tests/c/NAME.c` with _FORTIFY_SOURCE, so that it calls the `__*_chk` forms of functions.
fn compile(name: &str) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/c/{name}.c"));
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let status = Command::new("cc")
        .args(["-O2", "-D_FORTIFY_SOURCE=2", "-Wall", "-pthread", "-o"])
        .args([&program, &source])
        .status()
        .expect("cc (Debian: apt install gcc libc6-dev)");
    assert!(status.success());
    program
}

fn run(command: &mut Command, input: &str) -> Output {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

/// Runs a program without and with the library, and checks that outputs and statuses are equal. Returns the output.
fn same_with_library(program: impl AsRef<Path>, args: &[&str], input: &str) -> String {
    let program = program.as_ref();
    let bare = run(Command::new(program).args(args), input);
    // The threshold is low, so that the program's connections move to a link.
    let hooked = run(
        Command::new(program)
            .args(args)
            .env("LD_PRELOAD", &*LIBRARY)
            .env("RDMASOCK_PROMOTE_AFTER", "2r"),
        input,
    );
    assert_eq!(
        String::from_utf8_lossy(&bare.stdout),
        String::from_utf8_lossy(&hooked.stdout)
    );
    assert_eq!(
        String::from_utf8_lossy(&bare.stderr),
        String::from_utf8_lossy(&hooked.stderr)
    );
    assert_eq!(bare.status, hooked.status);
    assert!(bare.status.success(), "{bare:?}");
    String::from_utf8(bare.stdout).unwrap()
}

#[test]
fn exported_symbols_are_those_of_the_list() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/check-exports");
    let output = run(Command::new(script).arg(&*LIBRARY), "");
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn hard_calls_do_what_they_do_without_the_library() {
    let printed = same_with_library(compile("calls"), &[], "");
    assert!(printed.ends_with("daemon\n"), "{printed}");
    assert!(printed.contains("execle 12: 0 0, failing -1"), "{printed}");
}

#[test]
fn cancelled_threads_end_and_run_their_handlers() {
    let printed = same_with_library(compile("cancel"), &[], "");
    assert_eq!(printed.matches(" cancelled\n").count(), printed.lines().count());
}

#[test]
fn a_program_whose_servers_lack_the_library_has_no_second_thread() {
    let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = server.local_addr().unwrap().port().to_string();
    std::thread::spawn(move || {
        for stream in server.incoming().flatten() {
            std::thread::spawn(move || std::io::copy(&mut &stream, &mut &stream));
        }
    });
    assert_eq!(same_with_library(compile("one_thread"), &[&port], ""), "1\n");
}

#[test]
fn a_library_is_found_where_the_runpath_of_its_opener_says() {
    let tmp = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let beside = tmp.join("runpath_libraries");
    std::fs::create_dir_all(&beside).unwrap();
    for name in ["found", "deep"] {
        let library = beside.join(format!("librunpath_{name}.so"));
        let status = Command::new("cc")
            .args(["-shared", "-x", "c", "/dev/null", "-o"])
            .arg(&library)
            .status()
            .unwrap();
        assert!(status.success());
    }
    let program = tmp.join("runpath");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c/runpath.c");
    let status = Command::new("cc")
        .args(["-Wl,--enable-new-dtags,-rpath,$ORIGIN/runpath_libraries"])
        .arg("-o")
        .args([&program, &source])
        .status()
        .unwrap();
    assert!(status.success());
    assert_eq!(same_with_library(&program, &[], ""), "1 1 0 1\n");
    std::fs::remove_dir_all(&beside).unwrap();
}

#[test]
fn lookups_find_hooks_where_they_found_libc() {
    let tmp = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c/lookups.c");
    let (library, program) = (tmp.join("liblookups.so"), tmp.join("lookups"));
    let cc = |arguments: &[&std::ffi::OsStr]| {
        let status = Command::new("cc").arg(&source).args(arguments).status();
        assert!(status.unwrap().success());
    };
    cc(&[
        "-shared".as_ref(),
        "-fPIC".as_ref(),
        "-DLIBRARY".as_ref(),
        "-o".as_ref(),
        library.as_ref(),
    ]);
    let beside = format!("-DBESIDE=\"{}\"", library.display());
    let rpath = format!("-Wl,-rpath,{}", tmp.display());
    cc(&[
        "-o".as_ref(),
        program.as_ref(),
        library.as_ref(),
        beside.as_ref(),
        rpath.as_ref(),
    ]);
    let printed = same_with_library(&program, &[], "");
    assert!(
        printed.ends_with("another's 42\nsend 3, recv 3 one, seen on the way 1\n"),
        "{printed}"
    );
}

#[test]
fn calls_by_number_do_what_they_do_without_the_library() {
    let printed = same_with_library(compile("numbers"), &[], "");
    assert!(printed.ends_with("the end: 0\n"), "{printed}");
}

#[test]
fn the_library_survives_an_exec_without_it() {
    let program = compile("environment");
    let copy = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join("lost")
        .join("librdmasock.so");
    std::fs::create_dir_all(copy.parent().unwrap()).unwrap();
    let log = copy.with_file_name("log");
    // `is_logged`: the program logs, and makes a socket, because the log begins with the first socket.
    for (name, value, is_kept, is_logged) in [
        ("RDMASOCK_EXEC", "keep", true, false),
        ("RDMASOCK_EXEC", "keep", true, true),
        ("RDMASOCK_EXEC", "leave", false, true),
        ("RDMASOCK", "off", false, false),
    ] {
        std::fs::copy(&*LIBRARY, &copy).unwrap();
        let _ = std::fs::remove_file(&log);
        let mut command = Command::new(&program);
        command
            .env("LD_PRELOAD", &copy)
            .env("LIBRARY", &copy)
            .env("RDMASOCK_SPIN_US", "7")
            .env(name, value);
        if is_logged {
            command
                .env("SOCKET", "1")
                .env("RDMASOCK_LOG", "info")
                .env("RDMASOCK_LOG_FILE", &log);
        }
        let output = run(&mut command, "");
        let (kept, variable) = if is_kept { ("kept", "7") } else { ("none", "-") };
        let mut expected: Vec<String> = (0..10)
            .map(|way| {
                let has_cleared_its_own = way == 5 || way == 6;
                format!(
                    "{way}: {kept} {variable}{}",
                    if has_cleared_its_own { "" } else { " ALONE=1" }
                )
            })
            .collect();
        // Each way is a case of `way` in `tests/c/environment.c`. Way 10 sets an LD_PRELOAD of its own. Way 11 deletes
        // the library's file before the exec.
        expected.extend(["10: none - LD_PRELOAD=", "11: none - ALONE=1"].map(String::from));
        let printed = String::from_utf8_lossy(&output.stdout);
        assert_eq!(printed.lines().collect::<Vec<_>>(), expected, "{name}={value}");
        assert!(
            output.stderr.is_empty() && output.status.success(),
            "{name}={value}: {output:?}"
        );
        if is_logged {
            let logged = std::fs::read_to_string(&log).unwrap();
            assert!(logged.contains("instance made"), "{logged}");
            // Of the ways 0 to 9, only way 9 logs nothing: it execs in a vfork child, which uses its parent's memory.
            let expected = if is_kept { 9 } else { 0 };
            let lines = logged.matches("LD_PRELOAD is kept over an exec").count();
            assert_eq!(lines, expected, "{name}={value}:\n{logged}");
        }
    }
}

#[test]
fn a_shell_pipeline_runs() {
    let script = "/bin/true; seq 1000 | tee /dev/null | wc -l; (exit 3) || echo $?; echo $(echo sub)";
    let printed = same_with_library("/bin/bash", &["-c", script], "");
    assert_eq!(printed, "1000\n3\nsub\n");
}

#[test]
fn python_sockets_and_subprocesses_run() {
    let script = "
import socket, subprocess, threading
server = socket.create_server(('127.0.0.1', 0))
def serve():
    peer, _ = server.accept()
    with peer:
        while data := peer.recv(65536):
            peer.sendall(data.upper())
thread = threading.Thread(target=serve)
thread.start()
client = socket.create_connection(server.getsockname())
client.sendall(b'abc' * 100000)
client.shutdown(socket.SHUT_WR)
got = b''
while data := client.recv(65536):
    got += data
thread.join()
print(len(got), got[:3])
print(subprocess.run(['cat'], input=b'through cat', capture_output=True).stdout)
print(subprocess.run('exit 4', shell=True, close_fds=False).returncode)
";
    let printed = same_with_library("/usr/bin/env", &["python3", "-"], script);
    assert!(printed.contains("300000 b'ABC'"), "{printed}");
}

#[test]
fn curl_fetches_from_a_python_server() {
    let script = "
import http.server, subprocess, threading
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    def do_GET(self):
        body = self.path.encode() * 10000
        self.send_response(200)
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args):
        pass
server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
threading.Thread(target=server.serve_forever).start()
url = 'http://127.0.0.1:%d/' % server.server_port
try:
    fetched = subprocess.run(['curl', '-sS', url + 'one', url + 'two'], capture_output=True)
    print(fetched.returncode, len(fetched.stdout), fetched.stderr)
finally:
    server.shutdown()
";
    let printed = same_with_library("/usr/bin/env", &["python3", "-"], script);
    assert_eq!(printed, "0 80000 b''\n");
}
