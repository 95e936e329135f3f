//! Mount namespaces of a process of its own, which end with the process and leave nothing behind. For root only.

use std::ffi::CString;
use std::fs;
use std::path::Path;

use crate::sys;
use crate::sys::Ret;

/// Enters a root that holds only the files that a program loads, `/dev/null`, and the `files`. A colon separates the
/// `files`; the first is an empty directory, where the root is made.
pub fn own(files: &str) -> Ret {
    private();
    let mut files = files.split(':');
    let root = Path::new(files.next().unwrap());
    fs::create_dir_all(root).unwrap();
    mount("tmpfs", root, Some("tmpfs"), 0, "mode=755");
    let programs = ["/usr", "/lib", "/lib64", "/dev/null"];
    for path in programs.into_iter().chain(files) {
        let path = Path::new(path);
        if !path.exists() {
            continue;
        }
        let inside = root.join(path.strip_prefix("/").unwrap());
        if path.is_dir() {
            fs::create_dir_all(&inside).unwrap();
        } else {
            fs::create_dir_all(inside.parent().unwrap()).unwrap();
            fs::write(&inside, "").unwrap();
        }
        mount(path.to_str().unwrap(), &inside, None, libc::MS_BIND, "");
    }
    let root = c_path(root);
    call!(libc::chroot(root.as_ptr())).ok();
    call!(libc::chdir(c"/".as_ptr()))
}

/// Makes all directories read-only except `directory`.
pub fn read_only(directory: &str) -> Ret {
    private();
    let path = Path::new(directory);
    mount(directory, path, None, libc::MS_BIND, "");
    set(Path::new("/"), libc::AT_RECURSIVE, libc::MOUNT_ATTR_RDONLY, 0).ok();
    set(path, 0, 0, libc::MOUNT_ATTR_RDONLY)
}

/// Leaves no byte free in `/dev/shm`.
pub fn full_shared_memory() -> Ret {
    let shm = Path::new("/dev/shm");
    private();
    mount("tmpfs", shm, Some("tmpfs"), 0, "size=64k");
    let full = fs::write(shm.join("full"), vec![1; 1 << 20]);
    assert!(full.is_err(), "64 KiB have room for a megabyte");
    Ret::of(0)
}

/// Hides later mounts from all other processes.
fn private() {
    call!(libc::unshare(libc::CLONE_NEWNS)).ok();
    let flags = libc::MS_REC | libc::MS_PRIVATE;
    mount("none", Path::new("/"), None, flags, "");
}

#[track_caller]
fn mount(what: &str, at: &Path, kind: Option<&str>, flags: libc::c_ulong, options: &str) {
    let kind = kind.map(|kind| CString::new(kind).unwrap());
    let (what, at, options) = (CString::new(what).unwrap(), c_path(at), CString::new(options).unwrap());
    let kind = kind.as_ref().map_or(std::ptr::null(), |kind| kind.as_ptr());
    call!(libc::mount(
        what.as_ptr(),
        at.as_ptr(),
        kind,
        flags,
        options.as_ptr().cast()
    ))
    .ok();
}

fn set(at: &Path, flags: libc::c_int, on: u64, off: u64) -> Ret {
    let mut attributes: libc::mount_attr = sys::zeroed();
    attributes.attr_set = on;
    attributes.attr_clr = off;
    let at = c_path(at);
    call!(libc::syscall(
        libc::SYS_mount_setattr,
        libc::AT_FDCWD,
        at.as_ptr(),
        flags,
        &raw const attributes,
        size_of::<libc::mount_attr>()
    ))
}

fn c_path(path: &Path) -> CString {
    CString::new(path.as_os_str().as_encoded_bytes()).unwrap()
}
