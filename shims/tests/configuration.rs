//! The table of environment variables in docs/configuration.md equals the library's, line by line.

#![allow(clippy::unwrap_used)]

use rdmasock_shims::config::VARIABLES;

#[test]
fn page_lists_all_variables() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/configuration.md");
    let page = std::fs::read_to_string(path).unwrap();
    let listed: Vec<&str> = page.lines().filter(|line| line.starts_with("| `RDMASOCK")).collect();
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
