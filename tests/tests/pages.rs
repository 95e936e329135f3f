//! Checks the pages of the repository, and the comments: links of pages lead somewhere, and the files and names that
//! pages mention exist; no comment is wider than code may be. Whether a page is true is not checked.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

/// The top of the repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// Returns every file of the repository, as a path from its top. Built, fetched and hidden files are left out, except
/// those that CI reads.
fn files() -> BTreeSet<String> {
    let root = root();
    let mut found = BTreeSet::new();
    let mut dirs = vec![root.clone()];
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(&dir).unwrap() {
            let entry = entry.unwrap();
            let name = entry.file_name().to_string_lossy().into_owned();
            let is_hidden = name.starts_with('.') && name != ".github" && name != ".cargo";
            if is_hidden || name == "target" || name == "corpus" || name == "artifacts" {
                continue;
            }
            if entry.file_type().unwrap().is_dir() {
                dirs.push(entry.path());
            } else {
                let path = entry.path();
                let path = path.strip_prefix(&root).unwrap();
                found.insert(path.to_string_lossy().into_owned());
            }
        }
    }
    found
}

fn pages() -> Vec<(String, String)> {
    let is_page = |path: &String| path.ends_with(".md");
    let read = |path: String| {
        let text = std::fs::read_to_string(root().join(&path)).unwrap();
        (path, text)
    };
    files().into_iter().filter(is_page).map(read).collect()
}

/// Returns the text between each `open` and the next `close`, outside blocks of code, with its line number.
fn between<'a>(text: &'a str, open: &str, close: char) -> Vec<(usize, &'a str)> {
    let mut found = Vec::new();
    let mut is_code = false;
    for (at, line) in text.lines().enumerate() {
        is_code ^= line.trim_start().starts_with("```");
        if is_code || line.starts_with("    ") && !line.trim_start().starts_with(['-', '|']) {
            continue;
        }
        let mut rest = line;
        while let Some((_, after)) = rest.split_once(open) {
            let Some((inside, behind)) = after.split_once(close) else {
                break;
            };
            found.push((at + 1, inside));
            rest = behind;
        }
    }
    found
}

/// The anchors of a page's headings, as the usual hosts make them.
fn anchors(text: &str) -> BTreeSet<String> {
    let heading = |line: &str| {
        let title = line.strip_prefix('#')?.trim_start_matches('#').strip_prefix(' ')?;
        let kept = title
            .to_lowercase()
            .replace(' ', "-")
            .chars()
            .filter(|c| c.is_alphanumeric() || matches!(c, '-' | '_'))
            .collect();
        Some(kept)
    };
    text.lines().filter_map(heading).collect()
}

/// `path` from the folder of `page`, without `..`.
fn resolve(page: &str, path: &str) -> String {
    let mut at = PathBuf::new();
    for part in Path::new(page).parent().unwrap().join(path).components() {
        match part {
            Component::ParentDir => {
                at.pop();
            }
            part => at.push(part),
        }
    }
    at.to_string_lossy().into_owned()
}

/// `a/{b,c}.rs` as `a/b.rs` and `a/c.rs`.
fn expand(text: &str) -> Vec<String> {
    let Some((before, after)) = text.split_once('{') else {
        return vec![text.to_owned()];
    };
    let Some((inside, behind)) = after.split_once('}') else {
        return vec![text.to_owned()];
    };
    inside
        .split(',')
        .flat_map(|part| expand(&format!("{before}{part}{behind}")))
        .collect()
}

#[test]
fn every_link_between_pages_leads_somewhere() {
    let files = files();
    let mut seen = 0;
    let mut broken = Vec::new();
    for (page, text) in pages() {
        for (line, target) in between(&text, "](", ')') {
            if target.contains("://") {
                continue;
            }
            seen += 1;
            let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
            let path = if path.is_empty() {
                page.clone()
            } else {
                resolve(&page, path)
            };
            let is_dir = || root().join(&path).is_dir();
            let has_anchor = || {
                let text = std::fs::read_to_string(root().join(&path)).unwrap();
                anchor.is_empty() || anchors(&text).contains(anchor)
            };
            if !(is_dir() || files.contains(&path) && has_anchor()) {
                broken.push(format!("{page}:{line}: {target}"));
            }
        }
    }
    assert!(seen > 50, "only {seen} links were found");
    assert!(broken.is_empty(), "{broken:#?}");
}

/// A name may leave out the crate's part of a path, as the pages of a crate do.
#[test]
fn every_file_that_a_page_names_is_there() {
    const ENDINGS: [&str; 9] = [".rs", ".md", ".toml", ".c", ".py", ".sh", ".txt", ".yml", ".mjs"];
    let files = files();
    let is_there = |name: &str| {
        files
            .iter()
            .any(|file| file == name || file.ends_with(&format!("/{name}")))
    };
    let mut seen = 0;
    let mut missing = Vec::new();
    for (page, text) in pages() {
        // These pages name files of foreign suites and of rdma-core.
        if page == "docs/compatibility.md" || page == "integration/suites/programs.md" {
            continue;
        }
        for (line, quoted) in between(&text, "`", '`') {
            let is_name = |c: char| c.is_ascii_alphanumeric() || "_-./{},".contains(c);
            if !quoted.chars().all(is_name) || !ENDINGS.iter().any(|e| quoted.ends_with(e)) {
                continue;
            }
            for name in expand(quoted) {
                seen += 1;
                if !is_there(&name) {
                    missing.push(format!("{page}:{line}: {name}"));
                }
            }
        }
    }
    assert!(seen > 300, "only {seen} names were found");
    assert!(missing.is_empty(), "{missing:#?}");
}

/// rustfmt leaves comments as they are, and code that it cannot break.
#[test]
fn no_comment_is_wider_than_code_may_be() {
    let format = std::fs::read_to_string(root().join("rustfmt.toml")).unwrap();
    let width = format.lines().find_map(|line| line.strip_prefix("max_width = "));
    let width: usize = width.unwrap().parse().unwrap();
    let mut seen = 0;
    let mut wide = Vec::new();
    for path in files().into_iter().filter(|path| path.ends_with(".rs")) {
        let text = std::fs::read_to_string(root().join(&path)).unwrap();
        for (at, line) in text.lines().enumerate() {
            let Some(comment) = comment(line) else { continue };
            seen += 1;
            let long = line.chars().count();
            if long > width && !may_be_wide(comment) {
                wide.push(format!("{path}:{}: {long} columns", at + 1));
            }
        }
    }
    assert!(seen > 5000, "only {seen} lines were found");
    assert!(wide.is_empty(), "{wide:#?}");
}

#[test]
fn what_may_be_wide_is_known() {
    let wide = [
        "/// | a | table |",
        "//! ┌──── a picture",
        "// https://a.link",
        "/// [name]: other.rs",
        "/// a [`Link`](other.rs)",
    ];
    for line in wide {
        assert!(may_be_wide(comment(line).unwrap()), "{line}");
    }
    for line in ["    /// This or that: `a | b`.", "let a = 1; // (This) [and] that."] {
        assert!(!may_be_wide(comment(line).unwrap()), "{line}");
    }
    for line in ["let a = 1;", r#"let a = "https://no.comment";"#] {
        assert_eq!(comment(line), None);
    }
}

/// Returns the words of a comment, if there is one on this line of a source file.
fn comment(line: &str) -> Option<&str> {
    let (code, comment) = line.split_once("//")?;
    // A comment behind code has a space in front; other uses of these signs are strings.
    let is_one = code.trim().is_empty() || code.ends_with(' ') && code.matches('"').count() % 2 == 0;
    is_one.then(|| comment.trim_start_matches(['/', '!']).trim())
}

/// Tables, pictures and links cannot be broken.
fn may_be_wide(comment: &str) -> bool {
    let is_of_a_picture = |c: char| ('\u{2500}'..='\u{25ff}').contains(&c);
    comment.starts_with('|')
        || comment.contains(is_of_a_picture)
        || ["://", "](", "]: "].iter().any(|link| comment.contains(link))
}
