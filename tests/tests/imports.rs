//! Checks that imports go in one direction, between crates and between the top-level folders of a crate. Files within a
//! folder are free. It reads the text of the sources: paths that begin with `crate` or `super`. Code that only tests
//! compile may import everything.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The crates of the product, each with the crates of this repository that it may depend on.
const CRATES: &[(&str, &str)] = &[
    ("core", ""),
    ("core/verbs", "core"),
    ("core/localnic", "core"),
    ("alloc", "core"),
    ("shims", "core"),
    ("preload", "core shims"),
    ("cli", "core shims"),
];

/// Layers, lowest first. Each is a list of folders, or of files at the top of `src`. A folder imports its own layer and
/// those below it.
const CORE: &[&str] = &[
    "allocator codes cycles ids region scratch sparse sync",
    "lock os wire",
    "rendezvous",
    "fabric",
    "stats",
    "stream",
    "fuzzing",
];

/// As `CORE`; `shims/src/lib.rs` says what each folder has.
const SHIMS: &[&str] = &[
    "sys",
    "config",
    "signals",
    "objects",
    "notify",
    "data",
    "polling",
    "process",
    "service",
    "startup",
    "api hooks",
];

/// How the names of modules that only tests compile end.
const NOT_OF_THE_PRODUCT: &[&str] = &["tests", "loom_models", "explore", "forked"];

#[test]
fn crates_depend_downwards() {
    for (name, allowed) in CRATES {
        let text = std::fs::read_to_string(root().join(name).join("Cargo.toml")).unwrap();
        let own = text.split("\n[dependencies]").nth(1).unwrap_or_default();
        let own = own.split("\n[").next().unwrap_or_default();
        let names = own.lines().filter_map(|line| line.strip_prefix("rdmasock-"));
        for to in names.filter_map(|rest| rest.split(['.', ' ']).next()) {
            assert!(allowed.split(' ').any(|a| a == to), "{name} may not depend on {to}");
        }
    }
}

#[test]
fn core_folders_import_downwards() {
    check("core/src", CORE);
}

#[test]
fn shims_folders_import_downwards() {
    check("shims/src", SHIMS);
}

#[test]
fn each_import_is_seen() {
    let text = "use crate::{a::{x, y}, b::B};
use super::c;
#[cfg(test)]
use crate::d;
fn f() { crate::e::g() } // crate::h
";
    assert_eq!(imports(text, 1).join(" "), "a b e c");
    assert_eq!(imports("use super::super::c;", 2), ["c"]);
    assert!(imports("use super::c;", 2).is_empty());
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Panics with the imports that go upwards, the folders that are in no layer, and layer names without a folder.
fn check(src: &str, layers: &[&str]) {
    let layer = |name: &str| layers.iter().position(|l| l.split_whitespace().any(|n| n == name));
    let mut wrong = Vec::new();
    let mut seen = BTreeSet::from(["lib".to_owned()]);
    for path in sources(&root().join(src), Path::new("")) {
        let module = path.with_extension("");
        let names: Vec<_> = module
            .iter()
            .filter_map(|n| n.to_str())
            .filter(|n| *n != "mod")
            .collect();
        let is_left_out = |n: &&str| *n == "lib" || NOT_OF_THE_PRODUCT.iter().any(|end| n.ends_with(end));
        let from = names[0];
        if seen.insert(from.to_owned()) && layer(from).is_none() {
            wrong.push(format!("{from} is in no layer"));
        }
        if names.iter().any(is_left_out) {
            continue;
        }
        let text = std::fs::read_to_string(root().join(src).join(&path)).unwrap();
        for to in imports(&text, names.len()).iter().filter(|to| layer(to) > layer(from)) {
            wrong.push(format!("{} imports {to}, which lies above", path.display()));
        }
    }
    let known = layers.iter().flat_map(|l| l.split_whitespace());
    wrong.extend(
        known
            .filter(|n| !seen.contains(*n))
            .map(|n| format!("{n} is not there")),
    );
    assert!(wrong.is_empty(), "{src}: {wrong:#?}");
}

/// The Rust files below a folder, as paths from it.
fn sources(folder: &Path, at: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder.join(at)).unwrap().map(Result::unwrap);
    let below = |entry: std::fs::DirEntry| match at.join(entry.file_name()) {
        path if entry.path().is_dir() => sources(folder, &path),
        path if path.extension().is_some_and(|e| e == "rs") => vec![path],
        _ => Vec::new(),
    };
    entries.flat_map(below).collect()
}

/// Names at the top of the crate that a module imports. The module is `depth` modules below the crate's root.
fn imports(text: &str, depth: usize) -> Vec<String> {
    let code = without_tests(text);
    let mut found = Vec::new();
    for prefix in ["crate::".to_owned(), "super::".repeat(depth)] {
        for (at, _) in code.match_indices(&prefix) {
            if !code[..at].ends_with(|c: char| is_of_a_name(c) || c == ':') {
                found.extend(first_names(&code[at + prefix.len()..]));
            }
        }
    }
    found
}

/// The first name of a path, or of each path in a `use` group.
fn first_names(rest: &str) -> Vec<String> {
    let mut open = 0;
    let mut paths = String::new();
    for c in rest.chars() {
        match c {
            '{' => open += 1,
            '}' => open -= 1,
            c if open <= 1 => paths.push(c),
            _ => {}
        }
        if open <= 0 && !is_of_a_name(c) {
            break;
        }
    }
    let first = |path: &str| path.trim().chars().take_while(|c| is_of_a_name(*c)).collect();
    paths.split(',').map(first).collect()
}

fn is_of_a_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Removes comments and each item behind `#[cfg(test)]`. rustfmt ends such an item at a line of its own indent.
fn without_tests(text: &str) -> String {
    let mut kept = String::new();
    let mut test_indent = None;
    for line in text.lines() {
        let line = line.split("//").next().unwrap_or_default().trim_end();
        let indent = line.len() - line.trim_start().len();
        if test_indent == Some(indent) && line.ends_with([';', '}', ',']) {
            test_indent = None;
        } else if ["#[cfg(test", "#[cfg(all(test"]
            .iter()
            .any(|a| line.trim_start().starts_with(a))
        {
            test_indent = test_indent.or(Some(indent));
        } else if test_indent.is_none() {
            kept += line;
            kept.push('\n');
        }
    }
    kept
}
