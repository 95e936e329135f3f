//! The README's table of environment variables is that of the library, line by line.

#![allow(clippy::unwrap_used)]

use rdmasock_shims::config::VARIABLES;

#[test]
fn the_readme_lists_the_variables() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md");
    let readme = std::fs::read_to_string(path).unwrap();
    let listed: Vec<&str> = readme.lines().filter(|line| line.starts_with("| `RDMASOCK")).collect();
    let expected: Vec<String> = VARIABLES
        .iter()
        .map(|variable| {
            let row = [variable.default, variable.accepts, variable.meaning].join(" | ");
            // Markdown takes a bare < for the beginning of a tag.
            format!("| `{}` | {} |", variable.name, row.replace('<', "\\<"))
        })
        .collect();
    assert_eq!(listed, expected);
}
