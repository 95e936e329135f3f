//! Files import each other in one direction only: what each crate's sources import, by the text, has no circle, neither
//! of files nor of rooms (a module of the root with all below it). Tests are left out: they may look at everything.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod fixtures;
mod graph;
mod source;

use std::path::Path;

use graph::{Graph, circles, way_around};
use source::Source;

#[test]
fn core() {
    check("core", "src/lib.rs");
}

#[test]
fn the_verbs_plugin() {
    check("core/verbs", "src/lib.rs");
}

#[test]
fn the_local_device() {
    check("core/localnic", "src/lib.rs");
}

#[test]
fn the_registered_allocator() {
    check("alloc", "src/lib.rs");
}

#[test]
fn the_command() {
    check("cli", "src/main.rs");
}

#[test]
fn the_exported_symbols() {
    check("preload", "src/lib.rs");
}

#[test]
fn shims() {
    check("shims", "src/lib.rs");
}

fn check(name: &str, root: &str) {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let read = |path: &Path| std::fs::read_to_string(repository.join(path)).ok();
    let source = Source::read(&Path::new(name).join(root), &read);
    let found = [
        all_of("files", &graph::files(&source)),
        all_of("rooms", &graph::rooms(&source)),
    ]
    .concat();
    assert!(found.is_empty(), "{name}: {found}");
}

/// What is to be said of the circles.
fn all_of(what: &str, graph: &Graph) -> String {
    let say = |circle: &Vec<String>| {
        let way = way_around(graph, circle);
        let mut text = format!(
            "{} {what} import each other. A shortest way around:\n{way}",
            circle.len()
        );
        if circle.len() > way.lines().count() {
            text += &format!("All of them: {}\n", circle.join(" "));
        }
        text
    };
    circles(graph).iter().map(say).collect()
}
