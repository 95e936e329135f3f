//! The destination of the library's `tracing` events: one line for each, by one raw write.
//!
//! If the log is off (the default), nothing is installed. If it is on, an event is formatted in a buffer on the stack.
//! The line is written, past the hooks, to an fd with a high number. So logging neither recurses, nor locks, nor
//! allocates, and it works in fork children and in destructors of thread-local data. A line that cannot be written at
//! once (a full or broken pipe) is dropped: logging neither blocks the program nor raises SIGPIPE.
//!
//! The call sites decide what is logged. Messages about bad settings are in `config/mod.rs`.

use core::fmt;
use core::fmt::Write;
use core::sync::atomic::AtomicI32;
use core::sync::atomic::Ordering::Relaxed;
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use once_cell::race::OnceBox;
use rdmasock_core::os::privatefd::Transit;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

use crate::config::{Config, warn};

/// Longest line, bytes; the rest is cut off. It fits small signal stacks. It is below PIPE_BUF, so that lines of
/// several threads and processes do not mix.
const LINE_MAX: usize = 1024;
/// The log's fd has this number or a higher one, where the limit on fds allows.
const HIGH_FD: RawFd = 1000;

/// The destination of lines, for the life of the process.
static SINK: OnceBox<Sink> = OnceBox::new();

/// Starts logging as configured; does nothing if that is "off". Call once, early. A log file that cannot be opened
/// costs a line on stderr, and the log goes to stderr then.
pub fn init(config: &Config) {
    // A fork child has its parent's sink, because it may not be allowed to open the file.
    if config.log == LevelFilter::OFF || SINK.get().is_some() {
        return;
    }
    let Some(sink) = Sink::open(config.log_file.as_deref()) else {
        return;
    };
    if SINK.set(Box::new(sink)).is_ok() {
        let lines = Lines {
            level: config.log,
            sink: || SINK.get(),
        };
        // The call fails only if a subscriber exists already. That is then the one to use.
        let _ = tracing::subscriber::set_global_default(tracing_subscriber::registry().with(lines));
    }
}

/// Gives a fork child its own file, where the file's name contains the pid (`%p`). Before that, or where that fails,
/// the child's lines go to the parent's file. Call in the fork child.
pub fn after_fork_in_child() {
    if let Some(sink) = SINK.get() {
        sink.reopen();
    }
}

/// Returns the log's own fd, which the program must not see.
#[must_use]
pub fn fd() -> Option<RawFd> {
    SINK.get().map(|sink| sink.fd.load(Relaxed))
}

/// An open file, and how to open it again.
#[derive(Debug)]
struct Sink {
    /// Owned, and open until the process ends. Only [`Sink::reopen`] replaces the file.
    fd: AtomicI32,
    /// A regular file accepts every line; any other file is polled first.
    is_regular: bool,
    /// The path, if it has a `%p`.
    template: Option<PathBuf>,
}

impl Sink {
    /// Opens the file, or stderr if that fails; `None` if stderr is closed, too.
    fn open(path: Option<&Path>) -> Option<Self> {
        let file = path.and_then(|path| {
            open_file(path)
                .inspect_err(|errno| {
                    let errno = std::io::Error::from(*errno);
                    warn(&format!(
                        "RDMASOCK_LOG_FILE={path:?}: cannot append to it: {errno}; using stderr"
                    ));
                })
                .ok()
        });
        let template = path.filter(|path| file.is_some() && has_pid(path));
        let fd = match file {
            Some(file) => file,
            // SAFETY: fd 2 is only used for this duplication, which fails if it is not open.
            None => raised(unsafe { BorrowedFd::borrow_raw(2) }).ok()?,
        };
        Some(Self {
            is_regular: rustix::fs::fstat(&fd)
                .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile),
            template: template.map(Path::to_owned),
            fd: AtomicI32::new(fd.into_raw_fd()),
        })
    }

    fn reopen(&self) {
        let opened = self.template.as_deref().map(open_file);
        if let Some(Ok(new)) = opened {
            let old = self.fd.load(Relaxed);
            // dup3 keeps the fd, which other parts of the library may already hide.
            // SAFETY: this sink owns the fd, which is a valid target whether open or not.
            let mut owned =
                core::mem::ManuallyDrop::new(unsafe { <OwnedFd as rustix::fd::FromRawFd>::from_raw_fd(old) });
            let _ = rustix::io::dup3(&new, &mut owned, rustix::io::DupFlags::CLOEXEC);
        }
    }

    fn write(&self, line: &[u8]) {
        // SAFETY: the sink owns the fd and never closes it. If the program has closed it by a raw system call, the
        // write fails.
        let fd = unsafe { BorrowedFd::borrow_raw(self.fd.load(Relaxed)) };
        if self.is_regular || takes_a_line(fd) {
            let _ = rustix::io::write(fd, line);
        }
    }
}

/// Returns whether a write of less than PIPE_BUF bytes would now neither block nor raise SIGPIPE.
fn takes_a_line(fd: BorrowedFd<'_>) -> bool {
    let mut wanted = [PollFd::new(&fd, PollFlags::OUT)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut wanted, Some(&now)).is_ok_and(|ready| ready == 1)
        && wanted.iter().all(|fd| fd.revents() == PollFlags::OUT)
}

fn has_pid(path: &Path) -> bool {
    path.as_os_str().as_bytes().windows(2).any(|pair| pair == b"%p")
}

/// Returns the path with the pid in place of each `%p`.
fn with_pid(path: &Path) -> PathBuf {
    let pid = rustix::process::getpid().as_raw_nonzero().to_string();
    let mut name = Vec::new();
    let mut rest = path.as_os_str().as_bytes();
    while let Some((first, after)) = rest.split_first() {
        match rest.strip_prefix(b"%p") {
            Some(after) => {
                name.extend_from_slice(pid.as_bytes());
                rest = after;
            }
            None => {
                name.push(*first);
                rest = after;
            }
        }
    }
    OsString::from_vec(name).into()
}

fn open_file(path: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    let _transit = Transit::begin();
    let file = rustix::fs::open(with_pid(path), flags, Mode::from_raw_mode(0o644))?;
    raised(file.as_fd())
}

/// Returns a duplicate with a high number, or with the highest that a low limit allows.
fn raised(fd: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let mut least = HIGH_FD;
    loop {
        match rustix::io::fcntl_dupfd_cloexec(fd, least) {
            Err(Errno::INVAL | Errno::MFILE) if least > 3 => least /= 2,
            other => return other,
        }
    }
}

/// The layer: filters events and writes them to the sink.
struct Lines {
    level: LevelFilter,
    sink: fn() -> Option<&'static Sink>,
}

impl<S: Subscriber> Layer<S> for Lines {
    // The level never changes, so a call site is asked only once (the default of `register_callsite`).
    fn enabled(&self, metadata: &Metadata<'_>, _: Context<'_, S>) -> bool {
        metadata.is_event() && *metadata.level() <= self.level
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.level)
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let Some(sink) = (self.sink)() else {
            return;
        };
        let mut line = Line::new();
        let metadata = event.metadata();
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
        // Writing to a `Line` never fails.
        let _ = write!(
            line,
            "{}.{:06} {}/{} {:5} {}:",
            now.tv_sec,
            now.tv_nsec / 1000,
            rustix::process::getpid().as_raw_nonzero(),
            rustix::thread::gettid().as_raw_nonzero(),
            metadata.level(),
            metadata.target(),
        );
        event.record(&mut line);
        sink.write(line.finish());
    }
}

/// A line that is being put together. Text beyond the room is cut off, and control characters become spaces.
struct Line {
    bytes: [u8; LINE_MAX],
    length: usize,
}

impl Line {
    fn new() -> Self {
        Self {
            bytes: [0; LINE_MAX],
            length: 0,
        }
    }

    /// Returns the line with its line feed, for which room was kept.
    fn finish(&mut self) -> &[u8] {
        if let Some(end) = self.bytes.get_mut(self.length) {
            *end = b'\n';
        }
        self.bytes.get(..=self.length).unwrap_or_default()
    }
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for letter in text.chars() {
            let letter = if letter.is_control() { ' ' } else { letter };
            let end = self.length + letter.len_utf8();
            // The last byte is kept for the line feed.
            match self.bytes.get_mut(self.length..end) {
                Some(room) if end < LINE_MAX => letter.encode_utf8(room),
                _ => break,
            };
            self.length = end;
        }
        Ok(())
    }
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let _ = match field.name() {
            "message" => write!(self, " {value:?}"),
            name => write!(self, " {name}={value:?}"),
        };
    }
}

/// Tests of the log. The subscriber is installed for the test's thread only, because tests of other modules run in the
/// same process. `tests/log.rs` has a process of its own for [`init`].
#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Runs `emit` and returns the text that the log file then has.
    fn logged(filter: &str, emit: impl FnOnce()) -> String {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log.%p");
        let vars = [("RDMASOCK_LOG".into(), filter.into())];
        let (config, warnings) = Config::from_vars(vars);
        assert!(warnings.is_empty(), "{warnings:?}");
        let sink: &'static Sink = Box::leak(Box::new(Sink::open(Some(&path)).unwrap()));
        thread_local!(static CURRENT: core::cell::Cell<Option<&'static Sink>> = const { core::cell::Cell::new(None) });
        CURRENT.set(Some(sink));
        let lines = Lines {
            level: config.log,
            sink: || CURRENT.get(),
        };
        tracing::subscriber::with_default(tracing_subscriber::registry().with(lines), emit);
        assert!(sink.is_regular && sink.fd.load(Relaxed) >= 500);
        let path = folder.path().join(format!("log.{}", std::process::id()));
        fs::read_to_string(path).unwrap()
    }

    #[test]
    fn an_event_is_one_line_with_its_fields() {
        let text = logged("debug", || {
            tracing::debug!(fd = 7, why = %"two\nlines", "promoted {}", 1);
            tracing::trace!("not wanted");
            tracing::debug_span!("a span is not a line").in_scope(|| ());
        });
        assert_eq!(text.lines().count(), 1, "{text}");
        let head = format!(" {}/", std::process::id());
        let tail = " DEBUG rdmasock_shims::config::log::tests: promoted 1 fd=7 why=two lines\n";
        assert!(text.contains(&head) && text.ends_with(tail), "{text}");
    }

    #[test]
    fn a_long_line_is_cut_between_letters() {
        for letter in ["e", "é", "€"] {
            let text = logged("trace", || tracing::error!("{}", letter.repeat(LINE_MAX)));
            assert!((LINE_MAX - 2..=LINE_MAX).contains(&text.len()));
            assert!(text.ends_with(&format!("{letter}\n")));
        }
    }

    #[test]
    fn a_broken_or_full_pipe_takes_no_line() {
        let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK).unwrap();
        assert!(takes_a_line(writer.as_fd()));
        while rustix::io::write(&writer, &[0; 4096]).is_ok() {}
        assert!(!takes_a_line(writer.as_fd()));
        let mut piece = [0; 8192];
        rustix::io::read(&reader, &mut piece).unwrap();
        assert!(takes_a_line(writer.as_fd()));
        drop(reader);
        assert!(!takes_a_line(writer.as_fd()));
    }

    #[test]
    fn a_reopened_log_keeps_its_number() {
        let folder = tempfile::tempdir().unwrap();
        let sink = Sink::open(Some(&folder.path().join("%p"))).unwrap();
        let before = sink.fd.load(Relaxed);
        let file = folder.path().join(std::process::id().to_string());
        fs::rename(&file, folder.path().join("old")).unwrap();
        sink.reopen();
        sink.write(b"new");
        assert_eq!(
            (sink.fd.load(Relaxed), fs::read(&file).unwrap()),
            (before, b"new".to_vec())
        );
    }
}
