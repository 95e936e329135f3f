//! Checks the version of libclang, with which rdma-sys generates its bindings, and prints a remedy if it does not fit.
//! Without this check, a libclang from 16 on makes rdma-sys fail with "not a valid Ident". Also links against the
//! symbol versions of an old glibc, as the preloaded library does.

use std::path::Path;

#[allow(dead_code)] // its own main()
#[path = "../../preload/build.rs"]
mod old_glibc;

fn main() {
    println!("cargo::rerun-if-changed=../../preload/build.rs");
    old_glibc::link_against_old_glibc();
    println!("cargo::rerun-if-env-changed=LIBCLANG_PATH");
    println!("cargo::rerun-if-changed=build.rs");
    let remedy = "rdma-sys needs libclang 14 or 15: apt-get install libclang-14-dev (Debian 12), \
                  or set LIBCLANG_PATH to the directory of its libclang.so";
    let path = std::env::var("LIBCLANG_PATH").unwrap_or_default();
    match version(Path::new(&path)) {
        Some(16..) => println!("cargo::error=the libclang in {path} is too new; {remedy}"),
        Some(_) => {}
        None => println!("cargo::warning=no libclang in LIBCLANG_PATH ({path}); {remedy}"),
    }
}

/// Returns the version of libclang.so, which `path` names or which lies in the folder `path`. Reads the number from the
/// file's real name, for example libclang-14.so.14.0.6. `None` if there is no such file or number.
fn version(path: &Path) -> Option<u32> {
    let library = if path.is_dir() {
        path.join("libclang.so")
    } else {
        path.to_owned()
    };
    let file = library.canonicalize().ok()?;
    let name = file.file_name()?.to_str()?;
    let number = name.strip_prefix("libclang")?;
    let digits = number.trim_start_matches(|c: char| !c.is_ascii_digit());
    digits.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}
