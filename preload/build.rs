//! Links the library against the symbol versions of glibc 2.17, so that it can be loaded with that glibc and with all
//! later ones, also if this machine's glibc is newer. `alloc` uses the same build script, and the build script of
//! `core/verbs` includes it.
//!
//! A newer glibc has these old versions too, beside its own. The linker gives a reference to a function the version in
//! the first library on its command line that has the function. So `-lpthread` and `-ldl`, which precede `-lc`, have to
//! find libraries with the old versions. This script makes them: the *stand-ins*, libraries without code that have the
//! names and symbol versions of glibc 2.17's libpthread and libdl. `scripts/check-exports` reports references to later
//! versions.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// A symbol version, and the functions that have it. An empty version stands for references without a version: the weak
/// ones of Rust's standard library, which the loader looks up by name alone.
type Version = (&'static str, &'static str);

/// The stand-ins: the linker's name of a library, the name of its file in the old glibc, and its functions.
const STAND_INS: [(&str, &str, &[Version]); 2] = [
    (
        "libpthread",
        "libpthread.so.0",
        &[
            (
                "GLIBC_2.2.5",
                "pthread_attr_getguardsize pthread_attr_getstack pthread_attr_setguardsize pthread_attr_setstacksize \
                 pthread_create pthread_detach pthread_getattr_np pthread_getspecific pthread_join pthread_key_create \
                 pthread_key_delete pthread_kill pthread_setspecific pthread_sigmask \
                 pthread_testcancel",
            ),
            ("GLIBC_2.12", "pthread_setname_np"),
            ("", "__cxa_thread_atexit_impl copy_file_range getrandom gettid statx"),
        ],
    ),
    (
        "libdl",
        "libdl.so.2",
        &[("GLIBC_2.2.5", "dladdr dlclose dlerror dlopen dlsym")],
    ),
];

/// `stat64` and `fstat64` as system calls. glibc 2.17 has them only in its static library, so there is no old symbol
/// version to link against. The system calls suffice, because glibc's `struct stat` equals the kernel's.
const STAT: &str = "
    .macro stat name number
    .globl \\name
    .hidden \\name
    .type \\name, @function
\\name:
    movl $\\number, %eax
    syscall
    testl %eax, %eax
    js 1f
    ret
1:  negl %eax
    pushq %rax
    call __errno_location@PLT
    popq %rcx
    movl %ecx, (%rax)
    movl $-1, %eax
    ret
    .size \\name, . - \\name
    .endm
    stat stat64 4
    stat fstat64 5
    .section .note.GNU-stack, \"\", @progbits
";

fn main() {
    println!("cargo:rerun-if-changed=../preload/build.rs");
    link_against_old_glibc();
}

/// Makes the stand-ins, and tells the linker where to find them.
pub fn link_against_old_glibc() {
    if env::var("CARGO_CFG_TARGET_ARCH").as_deref() != Ok("x86_64") {
        return;
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default());
    for (library, soname, versions) in STAND_INS {
        let (mut code, mut script) = (String::new(), String::new());
        for (version, names) in versions {
            for name in names.split_whitespace() {
                code += &format!(".globl {name}\n.type {name}, @function\n{name}:\n");
            }
            if !version.is_empty() {
                script += &format!(
                    "{version} {{ {}; }};\n",
                    names.split_whitespace().collect::<Vec<_>>().join("; ")
                );
            }
        }
        let versions = out.join(library).with_extension("versions");
        write(&versions, &script);
        let script = format!("-Wl,--version-script={}", versions.display());
        let shared = ["-shared", "-nostdlib", &format!("-Wl,-soname,{soname}"), &script];
        assemble(&code, &out.join(library).with_extension("so"), &shared);
    }
    let stat = out.join("stat.o");
    assemble(STAT, &stat, &["-c"]);
    println!("cargo:rustc-link-search=native={}", out.display());
    println!("cargo:rustc-link-arg={}", stat.display());
}

/// Assembles `code` to the file `to`, with the compiler that rustc also links with.
fn assemble(code: &str, to: &Path, options: &[&str]) {
    let source = to.with_extension("s");
    write(&source, code);
    let status = Command::new("cc").args(options).arg("-o").arg(to).arg(&source).status();
    assert!(
        status.is_ok_and(|s| s.success()),
        "cc failed (Debian: apt install gcc libc6-dev)"
    );
}

fn write(path: &Path, text: &str) {
    assert!(fs::write(path, text).is_ok(), "cannot write {}", path.display());
}
