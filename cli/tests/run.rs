//! `rdmasock run`: the environment of the program, and the messages of refusals. The preloaded library is a copy of
//! libm, which has no effect.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use assert_cmd::Command;

/// A library that can be preloaded without effect, at a path of its own.
struct Library {
    folder: tempfile::TempDir,
}

impl Library {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::copy(libm(), folder.path().join("librdmasock.so")).unwrap();
        Self { folder }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().canonicalize().unwrap().join("librdmasock.so")
    }
}

/// Returns the path of the math library of this process's glibc.
fn libm() -> PathBuf {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let libc = maps.lines().find_map(|line| {
        line.split_whitespace()
            .nth(5)
            .filter(|path| path.ends_with("/libc.so.6"))
    });
    Path::new(libc.unwrap()).with_file_name("libm.so.6")
}

fn rdmasock() -> Command {
    let mut command = Command::cargo_bin("rdmasock").unwrap();
    command.env_clear().env("PATH", "/usr/bin:/bin");
    command
}

fn stderr_of_failure(command: &mut Command, code: i32) -> String {
    let output = command.assert().failure().code(code).get_output().clone();
    assert!(output.stdout.is_empty());
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn the_registered_allocator_is_preloaded_where_it_was_asked_for() {
    let library = Library::new();
    let run = |words: &[&str]| {
        let mut command = rdmasock();
        command.env("RDMASOCK_LIBRARY", library.path()).arg("run").args(words);
        command
    };
    let asked = ["--alloc", "registered", "--", "env"];
    let said = stderr_of_failure(&mut run(&asked), 1);
    let tried = library.path().with_file_name("librdmasock_alloc.so");
    for part in [tried.to_str().unwrap(), "cargo build --release -p rdmasock-alloc"] {
        assert!(said.contains(part), "{said}");
    }
    fs::copy(libm(), &tried).unwrap();
    let preloads = |words: &[&str]| {
        let output = run(words).assert().success().get_output().clone();
        let text = String::from_utf8(output.stdout).unwrap();
        let line = text.lines().find(|line| line.starts_with("LD_PRELOAD=")).unwrap();
        line.replace("LD_PRELOAD=", "")
    };
    let alone = library.path().display().to_string();
    assert_eq!(preloads(&asked), format!("{alone}:{}", tried.display()));
    assert_eq!(preloads(&["--", "env"]), alone);
    assert_eq!(preloads(&["--alloc", "off", "--", "env"]), alone);
    let said = stderr_of_failure(&mut run(&["--alloc", "on", "--", "env"]), 2);
    assert!(
        said.contains("RDMASOCK_ALLOC=on: accepted is off or registered"),
        "{said}"
    );
}

#[test]
fn the_program_gets_the_variables_and_the_library() {
    let library = Library::new();
    let output = rdmasock()
        .env("LD_PRELOAD", "libm.so.6")
        .env("RDMASOCK_LIBRARY", library.path())
        .env("RDMASOCK_SPIN_US", "7")
        .env("RDMASOCK_RING_MIN", "8K")
        .args([
            "run",
            "--spin-us",
            "0",
            "--log",
            "debug",
            "--rules",
            "a b.toml",
            "--",
            "env",
        ])
        .assert()
        .success()
        .get_output()
        .clone();
    let text = String::from_utf8(output.stdout).unwrap();
    let preload = format!("LD_PRELOAD=libm.so.6:{}", library.path().display());
    for line in [
        &preload,
        "RDMASOCK_SPIN_US=0",
        "RDMASOCK_LOG=debug",
        "RDMASOCK_RULES=a b.toml",
        "RDMASOCK_RING_MIN=8K",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} in {text}");
    }
}

#[test]
fn arguments_and_exit_status_are_the_programs() {
    let library = Library::new();
    for dashes in [&["--"][..], &[]] {
        rdmasock()
            .args(["run", "--library"])
            .arg(library.path())
            .args(dashes)
            .args(["sh", "-c", "echo \"$0 $1\"; exit 7", "--log", "x"])
            .assert()
            .code(7)
            .stdout("--log x\n");
    }
}

#[test]
fn the_name_of_the_program_is_kept() {
    let library = Library::new();
    let output = rdmasock()
        .args(["run", "--library"])
        .arg(library.path())
        .args(["--", "cat", "/proc/self/cmdline"])
        .output()
        .unwrap();
    assert_eq!(output.stdout, b"cat\0/proc/self/cmdline\0");
}

#[test]
fn bad_options_are_refused_with_what_is_accepted() {
    for (arguments, part) in [
        (
            &["run", "--spin-us", "10001", "--", "true"][..],
            "a number from 0 to 10000",
        ),
        (
            &["run", "--ring-min", "2K", "--", "true"],
            "a power of two from 4K to 64M",
        ),
        (
            &["run", "--accelerate", "maybe", "--", "true"],
            "or off, 0, no or false",
        ),
        (&["run", "--spin", "1", "--", "true"], "--spin-us"),
        (&["run"], "PROGRAM"),
        (&["stat", "--watch", "0"], "from 0.1 to 86400"),
        (&["start"], "stat"),
    ] {
        let text = stderr_of_failure(rdmasock().args(arguments), 2);
        assert!(text.contains(part), "{arguments:?}: {text}");
    }
}

#[test]
fn every_variable_is_in_the_help() {
    let output = rdmasock().args(["run", "--help"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    for variable in rdmasock_shims::config::VARIABLES {
        assert!(text.contains(variable.name), "{} in {text}", variable.name);
        assert!(text.contains(&format!("--{} <VALUE>", variable.option())), "{text}");
    }
}

#[test]
fn a_missing_library_or_program_is_named() {
    let text = stderr_of_failure(
        rdmasock().args(["run", "--library", "/nonexistent.so", "--", "true"]),
        1,
    );
    assert!(text.contains("/nonexistent.so") && text.contains("--library"), "{text}");

    let library = Library::new();
    let mut command = rdmasock();
    command
        .args(["run", "--library"])
        .arg(library.path())
        .args(["--", "no-such-program"]);
    let text = stderr_of_failure(&mut command, 1);
    assert!(text.contains("no-such-program") && text.contains("PATH"), "{text}");
}

/// Returns the message for a program with these bytes and this mode.
fn refusal(bytes: &[u8], mode: u32) -> String {
    let library = Library::new();
    let program = library.folder.path().join("program");
    fs::write(&program, bytes).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(mode)).unwrap();
    let mut command = rdmasock();
    command
        .args(["run", "--library"])
        .arg(library.path())
        .arg("--")
        .arg(&program);
    stderr_of_failure(&mut command, 1)
}

/// Returns an ELF header of this test's class and machine, without program headers.
fn elf_header() -> Vec<u8> {
    let mut header = fs::read("/proc/self/exe").unwrap();
    header.truncate(64);
    header[56] = 0;
    header[57] = 0;
    header
}

#[test]
fn programs_that_cannot_be_preloaded_are_told_apart() {
    let text = refusal(&elf_header(), 0o755);
    assert!(text.contains("statically linked"), "{text}");

    let mut foreign = elf_header();
    foreign[18] ^= 0xff;
    let text = refusal(&foreign, 0o755);
    assert!(text.contains("another processor"), "{text}");

    let text = refusal(&linked_for_musl(), 0o755);
    for part in ["another C library than glibc", MUSL] {
        assert!(text.contains(part), "{text}");
    }
}

/// The loader of programs that are linked with musl.
const MUSL: &str = "/lib/ld-musl-x86_64.so.1";

/// Returns the bytes of a program whose loader is musl's.
fn linked_for_musl() -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let (source, program) = (folder.path().join("program.c"), folder.path().join("program"));
    fs::write(&source, "int main(void) { return 0; }\n").unwrap();
    let mut cc = std::process::Command::new("cc");
    cc.arg(format!("-Wl,--dynamic-linker={MUSL}")).arg("-o");
    assert!(cc.args([&program, &source]).status().unwrap().success());
    fs::read(&program).unwrap()
}

#[test]
fn a_setgid_program_is_refused() {
    let library = Library::new();
    let program = library.folder.path().join("program");
    fs::copy("/bin/true", &program).unwrap();
    // Only root can give a file to a group that it is not in.
    if fs::metadata(&program).unwrap().uid() != 0 || std::os::unix::fs::chown(&program, None, Some(12_345)).is_err() {
        return;
    }
    fs::set_permissions(&program, fs::Permissions::from_mode(0o2755)).unwrap();
    let mut command = rdmasock();
    command
        .args(["run", "--library"])
        .arg(library.path())
        .arg("--")
        .arg(&program);
    let text = stderr_of_failure(&mut command, 1);
    assert!(text.contains("setgid") && text.contains("LD_PRELOAD"), "{text}");
}

#[test]
fn a_script_is_as_good_as_its_interpreter() {
    let library = Library::new();
    let folder = library.folder.path();
    let inner = folder.join("static");
    fs::write(&inner, elf_header()).unwrap();
    let script = format!("#!{} -x\n", inner.display());
    let text = refusal(script.as_bytes(), 0o755);
    assert!(text.contains("statically linked"), "{text}");

    // The kernel executes a chain of five scripts.
    let mut interpreter = inner;
    for name in ["fourth", "third", "second", "first"] {
        let next = folder.join(name);
        fs::write(&next, format!("#!{}\n", interpreter.display())).unwrap();
        interpreter = next;
    }
    let text = refusal(format!("#!{}\n", interpreter.display()).as_bytes(), 0o755);
    assert!(text.contains("statically linked"), "{text}");

    let looping = folder.join("loop");
    fs::write(&looping, format!("#!{}\n", looping.display())).unwrap();
    fs::set_permissions(&looping, fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = rdmasock();
    command
        .args(["run", "--library"])
        .arg(library.path())
        .arg("--")
        .arg(&looping);
    let text = stderr_of_failure(&mut command, 1);
    assert!(text.contains("cannot run"), "{text}");
}

/// Builds a program of C with a sanitizer. The program prints its options.
fn sanitized(folder: &Path, sanitizer: &str) -> PathBuf {
    let (source, program) = (folder.join("program.c"), folder.join(sanitizer));
    fs::write(
        &source,
        "#include <stdio.h>\n#include <stdlib.h>\nint main(void) { puts(getenv(\"ASAN_OPTIONS\") ? getenv(\"ASAN_OPTIONS\") : \"-\");\n\
         puts(getenv(\"TSAN_OPTIONS\") ? getenv(\"TSAN_OPTIONS\") : \"-\"); return 0; }\n",
    )
    .unwrap();
    let mut cc = std::process::Command::new("cc");
    let built = cc
        .arg(format!("-fsanitize={sanitizer}"))
        .arg("-o")
        .args([&program, &source])
        .status();
    assert!(built.unwrap().success());
    program
}

#[test]
fn sanitized_programs_start() {
    let library = Library::new();
    for (sanitizer, said) in [
        ("address", "detect_leaks=0:verify_asan_link_order=0\n-\n"),
        ("thread", "detect_leaks=0\n:ignore_noninstrumented_modules=1\n"),
        ("undefined", "detect_leaks=0\n-\n"),
    ] {
        let program = sanitized(library.folder.path(), sanitizer);
        let run = |words: &[&str]| {
            let mut command = rdmasock();
            command.env("ASAN_OPTIONS", "detect_leaks=0").arg("run").args(words);
            command.arg("--library").arg(library.path()).arg("--").arg(&program);
            command
        };
        run(&[]).assert().success().stdout(said);
        fs::copy(libm(), library.path().with_file_name("librdmasock_alloc.so")).unwrap();
        let mut registered = run(&["--alloc", "registered"]);
        if sanitizer != "undefined" {
            let text = stderr_of_failure(&mut registered, 1);
            assert!(text.contains("malloc of its own"), "{text}");
        }
    }
}
