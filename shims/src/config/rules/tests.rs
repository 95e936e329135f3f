//! Tests of the rules file.

use std::io::Write;

use proptest::prelude::*;

use crate::config::rules::*;

fn decide(rules: &str, program: &str, local: &str, peer: &str, direction: Direction) -> Decision {
    let rules = Rules::parse(rules).unwrap();
    rules.decide(program, local.parse().unwrap(), peer.parse().unwrap(), direction)
}

fn accepted(rules: &str, local: &str, peer: &str) -> Decision {
    decide(rules, "redis-server", local, peer, Direction::Accept)
}

#[test]
fn without_a_matching_rule_everything_is_accelerated() {
    let rules = "[[rule]]\nprogram = \"nginx\"\naction = \"leave\"";
    for text in ["", rules] {
        assert_eq!(accepted(text, "127.0.0.1:1", "127.0.0.1:2"), Decision::Accelerate);
    }
}

#[test]
fn the_first_match_wins() {
    let rules = r#"
        [[rule]]
        port = 6379
        action = "accelerate"
        [[rule]]
        port = "6000-6999"
        action = "leave"
    "#;
    assert_eq!(accepted(rules, "127.0.0.1:6379", "127.0.0.1:2"), Decision::Accelerate);
    assert_eq!(accepted(rules, "127.0.0.1:6380", "127.0.0.1:2"), Decision::Leave);
    assert_eq!(
        accepted(rules, "127.0.0.1:7000", "127.0.0.1:6380"),
        Decision::Accelerate
    );
}

#[test]
fn every_key_narrows_a_rule() {
    let rules = r#"
        [[rule]]
        program = "redis-*"
        port = [1, "80-90"]
        peer_port = [4000]
        local = ["127.0.0.1", "::1"]
        peer = "10.0.0.0/8"
        direction = "accept"
        action = "leave"
    "#;
    let leaves = |program, local, peer, direction| decide(rules, program, local, peer, direction) == Decision::Leave;
    use Direction::{Accept, Connect};
    assert!(leaves("redis-server", "127.0.0.1:80", "10.1.2.3:4000", Accept));
    assert!(leaves("redis-", "[::1]:1", "[::ffff:10.0.0.1]:4000", Accept));
    assert!(!leaves("redis", "127.0.0.1:80", "10.1.2.3:4000", Accept));
    assert!(!leaves("redis-server", "127.0.0.2:80", "10.1.2.3:4000", Accept));
    assert!(!leaves("redis-server", "127.0.0.1:2", "10.1.2.3:4000", Accept));
    assert!(!leaves("redis-server", "127.0.0.1:80", "11.1.2.3:4000", Accept));
    assert!(!leaves("redis-server", "127.0.0.1:80", "10.1.2.3:4001", Accept));
    assert!(!leaves("redis-server", "127.0.0.1:80", "10.1.2.3:4000", Connect));
}

#[test]
fn mistakes_are_told_with_their_line() {
    for (line, text, part) in [
        (3, "\n[[rule]]\nport = \"90-80\"\naction = \"leave\"", "a range such as"),
        (3, "\n[[rule]]\nport = 65536\naction = \"leave\"", "a port such as"),
        (2, "[[rule]]\npeer = \"10.0.0.0/33\"\naction = \"leave\"", "CIDR"),
        (2, "[[rule]]\nprogramm = \"x\"\naction = \"leave\"", "programm"),
        (2, "[[rule]]\naction = \"drop\"", "drop"),
        (2, "[[rule]]\ndirection = \"in\"\naction = \"leave\"", "accept"),
        (1, "[[rule]]\nport = 80", "action"),
        (1, "rules = 1", "rules"),
        (2, "[[rule]]\nport 80", "="),
    ] {
        let problem = Rules::parse(text).unwrap_err();
        assert!(problem.starts_with(&format!("line {line}: ")), "{text:?}: {problem}");
        assert!(problem.contains(part) && !problem.contains('\n'), "{text:?}: {problem}");
    }
}

#[test]
fn a_file_is_loaded_or_its_fault_reported() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(b"[[rule]]\naction = \"leave\"\n").unwrap();
    let rules = Rules::load(file.path()).unwrap();
    assert_eq!(rules.rules.len(), 1);

    file.write_all(b"[[rule]]\nport = \"x\"\n").unwrap();
    let problem = Rules::load(file.path()).unwrap_err();
    assert!(
        problem.contains("line 4") && problem.contains("every connection stays on TCP"),
        "{problem}"
    );

    for path in ["/nonexistent/rules.toml", "/"] {
        let problem = Rules::load(Path::new(path)).unwrap_err();
        assert!(problem.contains("cannot read it"), "{problem}");
    }
}

#[test]
fn globs() {
    for (glob, text, expected) in [
        ("", "", true),
        ("", "a", false),
        ("*", "", true),
        ("*", "abc", true),
        ("a*c", "abbc", true),
        ("a*c", "abcd", false),
        ("*ab*ab", "abxabab", true),
        ("?", "", false),
        ("a?c", "abc", true),
        ("**?", "x", true),
    ] {
        assert_eq!(
            is_glob_match(glob.as_bytes(), text.as_bytes()),
            expected,
            "{glob} {text}"
        );
    }
}

proptest! {
    #[test]
    fn a_glob_made_from_a_text_matches_it(text in "[ab]{0,8}", cuts in prop::collection::vec((0_usize..8, 0_usize..4), 0..3)) {
        let mut glob = text.clone().into_bytes();
        for (at, len) in cuts {
            let at = at.min(glob.len());
            let end = (at + len).min(glob.len());
            glob.splice(at..end, [b'*']);
        }
        prop_assert!(is_glob_match(&glob, text.as_bytes()));
    }

    #[test]
    fn no_text_breaks_the_parser(text in "\\PC{0,40}") {
        let _ = Rules::parse(&text);
    }
}
