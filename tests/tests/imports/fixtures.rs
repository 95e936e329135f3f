//! Small crates, each with an import that a reader of source text may miss, or may take for one.

use std::path::Path;

use super::graph::{self, circles};
use super::source::Source;

/// The circles of files in a crate of these files.
fn found(files: &[(&str, &str)]) -> Vec<Vec<String>> {
    let read = |path: &Path| {
        let text = files.iter().find(|(name, _)| path == Path::new(name));
        text.map(|(_, text)| (*text).to_owned())
    };
    circles(&graph::files(&Source::read(Path::new("lib.rs"), &read)))
}

/// `a` takes something from `b` by `text`, and `b` from `a`.
fn a_by(text: &str) -> Vec<Vec<String>> {
    found(&[
        ("lib.rs", "mod a; pub mod b; pub use b::inner;"),
        ("a.rs", &format!("pub struct A; {text}")),
        (
            "b.rs",
            "use crate::a::A; pub mod inner; pub struct B; pub fn f(_: A) {}",
        ),
        ("b/inner.rs", "use super::B; pub struct C; pub fn g(_: B) {}"),
    ])
}

#[test]
fn each_way_to_import_is_seen() {
    for text in [
        "use crate::b::B;",
        "use super::b::{self, B as Other};",
        "use {crate::{b::{B, f}}};",
        "pub use super::b::*;",
        "fn h() { crate::b::f(A) }",
        "fn h() { use crate::b; b::f(A) }",
        "fn h() { println!(\"{:?}\", super::b::f(A)) }",
        "macro_rules! m { () => { $crate::b::f(A) } }",
        "struct D { field: Vec<crate::b::B> }",
        "impl From<crate::b::B> for A { fn from(_: crate::b::B) -> A { A } }",
        "mod nested { fn h() { super::super::b::f(super::A) } }",
        "#[cfg(not(test))] fn h() { crate::b::f(A) }",
        "#[cfg(any(test, feature = \"x\"))] use crate::b::B;",
        "#[cfg(test)] fn t<X, Y>() {} fn h() { crate::b::f(A) }",
        "struct D { #[cfg(test)] t: u8, b: crate::b::B }",
    ] {
        assert_eq!(a_by(text), [["a.rs", "b.rs"]], "{text}");
    }
}

#[test]
fn what_is_passed_on_is_followed() {
    // By the root, which has it from `b`, which has taken from `a`.
    let all = [["a.rs", "b.rs", "b/inner.rs", "lib.rs"]];
    for text in ["use crate::inner::C;", "fn h() { crate::inner::g() }"] {
        assert_eq!(a_by(text), all, "{text}");
    }
    let by_a_glob = found(&[
        ("lib.rs", "mod a; mod b; mod c;"),
        ("a.rs", "use super::c::*; fn h() { names::f() }"),
        ("b.rs", "pub mod names;"),
        ("b/names.rs", "use crate::a;"),
        ("c.rs", "pub use super::b::names;"),
    ]);
    assert_eq!(by_a_glob, [["a.rs", "b/names.rs", "c.rs"]]);
}

#[test]
fn what_imports_nothing_is_not_taken_for_it() {
    for text in [
        "// use crate::b::B;",
        "/// See [`B`](crate::b::B).\nfn h() {}",
        "pub(in crate::b) fn h() {}",
        "fn h() -> &'static str { \"crate::b::f\" }",
        "#[cfg(test)] mod tests { use crate::b::B; }",
        "#[cfg(all(test, not(loom)))] mod tests { use crate::b::B; }",
        "#[cfg(test)] use crate::b::{B, f};",
        "#[cfg(test)] pub(super) fn h<X, Y>() { crate::b::f(A) }",
        "impl A { #[cfg(test)] fn h() { crate::b::f(A) } }",
        "struct D { #[cfg(test)] field: crate::b::B, other: u8 }",
        "#[cfg(test)] mod missing;",
        "use ::b::B;",
        "use b::b;",
        "fn h() { ::b::f() }",
        "fn h(b: A) { b.b() }",
    ] {
        assert!(a_by(text).is_empty(), "{text}");
    }
}

#[test]
fn a_parent_and_its_child_are_two_files() {
    let both = found(&[
        ("lib.rs", "mod a;"),
        ("a/mod.rs", "mod child; pub struct A; fn h() { child::f(A) }"),
        ("a/child.rs", "use super::A; pub fn f(_: A) {}"),
    ]);
    assert_eq!(both, [["a/child.rs", "a/mod.rs"]]);
    let by_a_macro = found(&[
        ("lib.rs", "mod a;"),
        ("a.rs", "macro_rules! m { () => {} } mod child; fn h() { child::f() }"),
        ("a/child.rs", "pub fn f() { m!() }"),
    ]);
    assert_eq!(by_a_macro, [["a.rs", "a/child.rs"]]);
    let one_way = found(&[
        ("lib.rs", "mod a;"),
        ("a.rs", "mod child; pub use child::f;"),
        ("a/child.rs", "macro_rules! m { () => {} } pub fn f() { m!() }"),
    ]);
    assert!(one_way.is_empty());
    let elsewhere = found(&[
        ("lib.rs", "#[path = \"other.rs\"] mod a; pub struct R;"),
        ("other.rs", "use super::R; pub mod child;"),
        ("child.rs", "use super::super::R;"),
    ]);
    assert!(elsewhere.is_empty());
}

#[test]
fn rooms_are_what_is_below_a_module_of_the_root() {
    let files = [
        ("lib.rs", "mod a; mod b;"),
        ("a.rs", "pub mod upper; pub mod lower;"),
        ("a/upper.rs", "use crate::b::B;"),
        ("a/lower.rs", "pub struct L;"),
        ("b.rs", "use crate::a::lower::L; pub struct B(L);"),
    ];
    assert!(found(&files).is_empty());
    let read = |path: &Path| {
        let text = files.iter().find(|(name, _)| path == Path::new(name));
        text.map(|(_, text)| (*text).to_owned())
    };
    let rooms = graph::rooms(&Source::read(Path::new("lib.rs"), &read));
    assert_eq!(circles(&rooms), [["a", "b"]]);
}
