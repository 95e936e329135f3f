//! Checks whether LD_PRELOAD can work for a program. The code reads only the fields of the ELF file that the kernel and
//! the dynamic loader use for this. It is no general ELF reader.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// The obstacle of setuid and setgid programs, and of programs with file capabilities.
const PRIVILEGED: &str = "is setuid, setgid or has file capabilities, so the dynamic loader ignores LD_PRELOAD; \
    run it as the user that it changes to (root: with its capabilities), or a copy without these bits";
const STATIC: &str = "is statically linked, so LD_PRELOAD cannot work; use a dynamically linked build of it";
const OTHER_MACHINE: &str = "is built for another processor or word size than librdmasock.so; use a native build of it";

/// The names of the libraries that a program is linked with. `Err` is the obstacle: a text that says why a preloaded
/// library has no effect on the program, or keeps it from starting.
type Linked = std::result::Result<Vec<String>, String>;

/// Returns the names of the libraries that the program at `path` is linked with, or the obstacle. For a script, returns
/// the result for its interpreter. A file that is neither a script nor ELF gets an empty list: the kernel decides
/// whether it can be executed.
///
/// # Errors
/// The file cannot be read.
pub(crate) fn libraries(path: &Path) -> Result<Linked> {
    check(path, INTERPRETERS_MAX).with_context(|| format!("cannot read {}", path.display()))
}

/// A script's interpreter may be a script too. At most this many interpreters, one after the other, are examined. The
/// kernel follows the same number, then fails with ELOOP.
const INTERPRETERS_MAX: u32 = 5;

fn check(path: &Path, interpreters: u32) -> Result<Linked> {
    let mut file = match File::open(path) {
        Ok(file) => file,
        // A file may be executable but not readable. Then nothing is known about it.
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => return Ok(Ok(Vec::new())),
        Err(error) => return Err(error.into()),
    };
    if is_privileged(&file)? {
        return Ok(Err(PRIVILEGED.to_owned()));
    }
    let mut head = Vec::new();
    file.by_ref().take(256).read_to_end(&mut head)?;
    if let Some(interpreter) = shebang(&head) {
        return match interpreters.checked_sub(1) {
            Some(left) => check(&interpreter, left),
            None => Ok(Ok(Vec::new())),
        };
    }
    let Some(elf) = Elf::parse(&head) else {
        return Ok(Ok(Vec::new()));
    };
    let own = {
        let mut head = Vec::new();
        File::open("/proc/self/exe")?.take(64).read_to_end(&mut head)?;
        Elf::parse(&head)
    };
    if own.is_some_and(|own| (own.class, own.machine) != (elf.class, elf.machine)) {
        return Ok(Err(OTHER_MACHINE.to_owned()));
    }
    Ok(match elf.loader(&file)? {
        None => Err(STATIC.to_owned()),
        Some(loader) if loader.contains("musl") => Err(format!(
            "is linked with another C library than glibc (its loader is {loader}); use a build for glibc"
        )),
        Some(_) => Ok(elf.needed(&file)?),
    })
}

/// Returns the path of a script's interpreter; `None` if the file is no script.
fn shebang(head: &[u8]) -> Option<PathBuf> {
    let line = head.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
    let line = std::str::from_utf8(line).ok()?;
    line.split_whitespace().next().map(PathBuf::from)
}

/// Returns true if the kernel would set AT_SECURE when this user executes the file. Then the dynamic loader ignores
/// LD_PRELOAD.
fn is_privileged(file: &File) -> Result<bool> {
    const SETUID: u32 = 0o4000;
    const SETGID_EXECUTABLE: u32 = 0o2010;
    let meta = file.metadata()?;
    let uid = rustix::process::geteuid();
    let gid = rustix::process::getegid();
    let changes_uid = meta.mode() & SETUID != 0 && meta.uid() != uid.as_raw();
    let changes_gid = meta.mode() & SETGID_EXECUTABLE == SETGID_EXECUTABLE && meta.gid() != gid.as_raw();
    // Root has the capabilities already.
    let adds_capabilities =
        !uid.is_root() && rustix::fs::fgetxattr(file, "security.capability", &mut [0_u8; 64]).is_ok();
    Ok(changes_uid || changes_gid || adds_capabilities)
}

/// The fields of an ELF header (System V ABI, "ELF Header") that this code reads. It reads the header as a 64-bit
/// little-endian one; only class and machine are at the same place in every ELF file.
#[derive(Debug)]
struct Elf {
    class: u8,
    machine: u16,
    /// Offset of the program headers in the file.
    table: u64,
    /// Number of program headers.
    count: u16,
}

/// A program header: its type, its offset in the file, its address in memory, and its size in the file.
#[derive(Debug, Clone, Copy)]
struct Segment {
    kind: u32,
    offset: u64,
    address: u64,
    size: u64,
}

impl Elf {
    const ENTRY: usize = 56;
    const PT_LOAD: u32 = 1;
    const PT_DYNAMIC: u32 = 2;
    const PT_INTERP: u32 = 3;

    fn parse(head: &[u8]) -> Option<Self> {
        head.starts_with(b"\x7fELF").then_some(())?;
        Some(Self {
            class: *head.get(4)?,
            machine: u16::from_le_bytes(field(head, 18)?),
            table: u64::from_le_bytes(field(head, 32)?),
            count: u16::from_le_bytes(field(head, 56)?),
        })
    }

    fn segments(&self, file: &File) -> Result<Vec<Segment>> {
        let mut table = vec![0; usize::from(self.count) * Self::ENTRY];
        file.read_exact_at(&mut table, self.table)
            .context("its program headers")?;
        let entry = |entry| {
            let word = |at| field(entry, at).map(u64::from_le_bytes);
            Some(Segment {
                kind: field(entry, 0).map(u32::from_le_bytes)?,
                offset: word(8)?,
                address: word(16)?,
                size: word(32)?,
            })
        };
        Ok(table.chunks_exact(Self::ENTRY).filter_map(entry).collect())
    }

    /// Returns the path of the program's dynamic loader; `None` for a static program.
    fn loader(&self, file: &File) -> Result<Option<String>> {
        let segments = self.segments(file)?;
        let Some(interp) = segments.iter().find(|s| s.kind == Self::PT_INTERP) else {
            return Ok(None);
        };
        Ok(text(&read(file, interp.offset, 256)?))
    }

    /// Returns the names of the libraries that the program is linked with (System V ABI, "Dynamic Section").
    fn needed(&self, file: &File) -> Result<Vec<String>> {
        const DT_NEEDED: u64 = 1;
        const DT_STRTAB: u64 = 5;
        let segments = self.segments(file)?;
        let Some(dynamic) = segments.iter().find(|s| s.kind == Self::PT_DYNAMIC) else {
            return Ok(Vec::new());
        };
        let table = read(file, dynamic.offset, dynamic.size)?;
        let word = |entry, at| field(entry, at).map_or(0, u64::from_le_bytes);
        let entries: Vec<_> = table.chunks_exact(16).map(|e| (word(e, 0), word(e, 8))).collect();
        let of = |tag| entries.iter().filter(move |e| e.0 == tag).map(|e| e.1);
        let strings = of(DT_STRTAB).next().unwrap_or_default();
        let is_around =
            |s: &&Segment| s.kind == Self::PT_LOAD && (s.address..s.address.saturating_add(s.size)).contains(&strings);
        let Some(around) = segments.iter().find(is_around) else {
            return Ok(Vec::new());
        };
        let names = of(DT_NEEDED).map(|at| {
            read(
                file,
                (strings - around.address)
                    .saturating_add(around.offset)
                    .saturating_add(at),
                256,
            )
        });
        names
            .filter_map(|name| name.map(|name| text(&name)).transpose())
            .collect()
    }
}

/// Reads up to `most` bytes, but at most 1 MiB, from the offset `at` of the file. Returns fewer at the end of the file.
fn read(file: &File, at: u64, most: u64) -> Result<Vec<u8>> {
    let mut bytes = vec![0; most.min(1 << 20) as usize];
    let length = file.read_at(&mut bytes, at)?;
    bytes.truncate(length);
    Ok(bytes)
}

/// Returns the text before the first zero byte.
fn text(bytes: &[u8]) -> Option<String> {
    let text = bytes.split(|byte| *byte == 0).next()?;
    Some(String::from_utf8_lossy(text).into_owned())
}

/// Returns the `N` bytes of `bytes` from `at` on; `None` if there are fewer.
fn field<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}
