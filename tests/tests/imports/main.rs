//! Files import each other in one direction only: what each crate's sources import, by the text, has no circle, neither of files nor of
//! rooms (a module of the root with all below it). Tests are left out: they may look at everything.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod fixtures;
mod graph;
mod source;

use std::path::Path;

use graph::{Graph, circles, way_around};
use source::Source;

/// The circles that are still there: crate, how many files each has, and how many rooms, the largest first. A number here only ever gets
/// smaller, and at last there is none.
const STILL: &[(&str, &[usize], &[usize])] = &[("shims", &[53, 6, 3, 2], &[21])];

#[test]
fn core() {
    check("core", "src/lib.rs");
}

#[test]
fn the_verbs_plugin() {
    check("core/verbs", "src/lib.rs");
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
    let still = STILL.iter().find(|(of, ..)| *of == name);
    let (files, rooms) = still.map_or((&[][..], &[][..]), |(_, f, r)| (*f, *r));
    let more = [
        more_than(files, "files", &graph::files(&source)),
        more_than(rooms, "rooms", &graph::rooms(&source)),
    ]
    .concat();
    assert!(more.is_empty(), "{name}: {more}");
}

/// What is to be said of circles that are larger than those of these sizes, or more.
fn more_than(sizes: &[usize], what: &str, graph: &Graph) -> String {
    let found = circles(graph);
    let counts: Vec<usize> = found.iter().map(Vec::len).collect();
    let allowed = sizes.iter().copied().chain(std::iter::repeat(0));
    let too_large = found.iter().zip(allowed).filter(|(c, n)| c.len() > *n);
    too_large
        .map(|(circle, n)| {
            let way = way_around(graph, circle);
            let mut text = format!(
                "{} {what} import each other, where {n} may (all: {counts:?}). A shortest way around:\n{way}",
                circle.len()
            );
            if circle.len() > way.lines().count() {
                text += &format!("All of them: {}\n", circle.join(" "));
            }
            text
        })
        .collect()
}
