//! Writes the library's `tracing` events to a file or stderr: one line for each event, by one raw write.
//!
//! If the log is off (the default), no subscriber is installed. If it is on, an event is formatted in a buffer on the
//! stack. The line is written past the hooks, to an fd that the program does not see. So logging does not recurse, lock
//! or allocate. It works in fork children and in destructors of thread-local data. A line that cannot be written at
//! once (a full or broken pipe) is dropped: logging neither blocks the program nor raises SIGPIPE.
//!
//! The call sites decide what is logged. Messages about bad settings are in `config/mod.rs`.

use core::fmt;
use core::fmt::Write;
use std::path::Path;

use once_cell::race::OnceBox;
use rdmasock_core::os::privatefd::PrivateFd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Metadata, Subscriber};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

use crate::config::{Config, warn};

/// Longest line, bytes; the rest is cut off. It fits small signal stacks. It is below PIPE_BUF, so that lines of
/// several threads and processes do not mix.
const LINE_MAX: usize = 1024;

/// The destination of lines, for the life of the process.
static SINK: OnceBox<Sink> = OnceBox::new();

/// Starts the log as configured; does nothing if the log is off. Is called once, early. If the log file cannot be
/// opened, one line on stderr says so, and the log goes to stderr.
pub fn init(config: &Config) {
    // A fork child keeps its parent's sink, because the child may not be allowed to open the file.
    if is_off(&config.log) || SINK.get().is_some() {
        return;
    }
    let Some(sink) = Sink::open(config.log_file.as_deref()) else {
        return;
    };
    if SINK.set(Box::new(sink)).is_ok() {
        let lines = Lines {
            filter: config.log.clone(),
            sink: || SINK.get(),
        };
        // The call fails only if a subscriber is installed already, which then stays.
        let _ = tracing::subscriber::set_global_default(tracing_subscriber::registry().with(lines));
    }
}

/// Returns the log's fd, which fork children keep; `None` if there is no log.
#[must_use]
pub fn fd() -> Option<RawFd> {
    SINK.get().map(|sink| sink.fd.as_raw_fd())
}

/// The open log file, or a duplicate of stderr.
#[derive(Debug)]
struct Sink {
    fd: PrivateFd,
    /// A regular file accepts every line; any other file is polled first.
    is_regular: bool,
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
        let fd = match file {
            Some(file) => file,
            // SAFETY: fd 2 is only used for this duplication, which fails if it is not open.
            None => PrivateFd::duplicate(unsafe { BorrowedFd::borrow_raw(2) }).ok()?,
        };
        Some(Self {
            is_regular: rustix::fs::fstat(&fd)
                .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile),
            fd,
        })
    }

    fn write(&self, line: &[u8]) {
        if self.is_regular || takes_a_line(self.fd.as_fd()) {
            let _ = rustix::io::write(&self.fd, line);
        }
    }
}

/// Returns whether a write of less than PIPE_BUF bytes would neither block nor raise SIGPIPE at this moment.
fn takes_a_line(fd: BorrowedFd<'_>) -> bool {
    let mut wanted = [PollFd::new(&fd, PollFlags::OUT)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut wanted, Some(&now)).is_ok_and(|ready| ready == 1)
        && wanted.iter().all(|fd| fd.revents() == PollFlags::OUT)
}

/// Opens the file at `path`, with the pid in place of each `%p`.
fn open_file(path: &Path) -> Result<PrivateFd, Errno> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    let mode = Mode::from_raw_mode(0o644);
    let pid = rustix::process::getpid().as_raw_nonzero().to_string();
    PrivateFd::open(|| match path.to_str() {
        Some(text) => rustix::fs::open(text.replace("%p", &pid), flags, mode),
        None => rustix::fs::open(path, flags, mode),
    })
}

/// Returns whether no event passes the filter.
fn is_off(filter: &Targets) -> bool {
    let mut levels = filter.iter().map(|(_, level)| level).chain(filter.default_level());
    levels.all(|level| level == LevelFilter::OFF)
}

/// The layer of the subscriber that filters events and writes them to the sink.
struct Lines {
    filter: Targets,
    sink: fn() -> Option<&'static Sink>,
}

impl<S: Subscriber> Layer<S> for Lines {
    // The filter never changes, so `tracing` calls this only once for each call site (the default of
    // `register_callsite`).
    fn enabled(&self, metadata: &Metadata<'_>, _: Context<'_, S>) -> bool {
        metadata.is_event() && self.filter.would_enable(metadata.target(), metadata.level())
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Layer::<S>::max_level_hint(&self.filter)
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

/// A line that is being put together. Text beyond `LINE_MAX` is cut off, and control characters become spaces.
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

    /// Returns the line with its line feed, for which `write_str` has kept a byte.
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

    use rdmasock_core::os::privatefd::is_private;

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
            filter: config.log,
            sink: || CURRENT.get(),
        };
        tracing::subscriber::with_default(tracing_subscriber::registry().with(lines), emit);
        assert!(sink.is_regular && is_private(sink.fd.as_raw_fd()));
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
}
