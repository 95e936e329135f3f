//! Tests of the log. The subscriber is installed for the test's thread only, since tests of other
//! modules run in the same process; `tests/log.rs` has a process of its own for [`init`].

use std::fs;

use super::*;

/// What is written to the log file while `emit` runs.
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
    let tail = " DEBUG rdmasock_shims::log::tests: promoted 1 fd=7 why=two lines\n";
    assert!(text.contains(&head) && text.ends_with(tail), "{text}");
}

#[test]
fn targets_have_their_own_levels() {
    let text = logged("error,link=info", || {
        tracing::info!(target: "rdmasock_core::link::credit", "one");
        tracing::warn!(target: "rdmasock_core::stream", "two");
        tracing::error!(target: "rdmasock_core::stream", "three");
    });
    let last: Vec<_> = text
        .lines()
        .filter_map(|line| line.rsplit(' ').next())
        .collect();
    assert_eq!(last, ["one", "three"]);
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
