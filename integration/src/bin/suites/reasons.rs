//! The written reasons for known differences, from integration/suites/reasons.toml. An entry is for a suite and a case;
//! `*` in a case stands for any text.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::record::{Counts, Difference, Record};

/// All entries of the file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reasons {
    #[serde(default)]
    difference: Vec<Entry>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    suite: String,
    case: String,
    reason: String,
    /// The library that had the difference, if the cause was mended since. A relapse with another library has no
    /// reason.
    library: Option<String>,
}

impl Reasons {
    /// Reads the file of reasons.
    ///
    /// # Errors
    /// If the file cannot be read, or has another form.
    pub fn read(file: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(file).with_context(|| file.display().to_string())?;
        toml::from_str(&text).with_context(|| file.display().to_string())
    }

    /// Returns the reason why this case of a suite differs with the record's library, or `None` if the file has none.
    pub fn of(&self, record: &Record, difference: &Difference) -> Option<&str> {
        let is_it = |entry: &&Entry| {
            let library = entry.library.as_ref();
            entry.suite == record.suite
                && is_like(&difference.case, &entry.case)
                && library.is_none_or(|library| *library == record.library)
        };
        let entry = self.difference.iter().find(is_it);
        entry.map(|entry| entry.reason.as_str())
    }

    /// Returns how many cases of a suite differ, steadily and without a reason.
    pub fn missing(&self, record: &Record, counts: &Counts) -> usize {
        let cases: BTreeSet<&str> = counts
            .differences
            .iter()
            .filter(|difference| difference.is_steady() && self.of(record, difference).is_none())
            .map(|difference| difference.case.as_str())
            .collect();
        cases.len()
    }
}

/// Returns whether `text` matches `pattern`, in which `*` is any text.
fn is_like(text: &str, pattern: &str) -> bool {
    let Some((head, tail)) = pattern.split_once('*') else {
        return text == pattern;
    };
    let Some(rest) = text.strip_prefix(head) else {
        return false;
    };
    rest.char_indices()
        .map(|(at, _)| at)
        .chain([rest.len()])
        .any(|at| rest.get(at..).is_some_and(|rest| is_like(rest, tail)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::{Outcome, Way};
    use crate::record::Tally;

    #[test]
    fn what_was_mended_has_no_reason_with_another_library() {
        let text = "[[difference]]\nsuite = \"a\"\ncase = \"c*\"\nlibrary = \"old\"\nreason = \"was so\"\n";
        let reasons: Reasons = toml::from_str(text).expect("of that form");
        let difference = Difference {
            case: "case".into(),
            way: Way::AtOnce,
            kernel: Tally::from([(Outcome::Passed, 3)]),
            library: Tally::from([(Outcome::Failed, 3)]),
        };
        let mut record = Record {
            suite: "a".into(),
            version: "1".into(),
            library: "old".into(),
            all: 1,
            parts: std::collections::BTreeMap::new(),
        };
        assert_eq!(reasons.of(&record, &difference), Some("was so"));
        record.library = "new".into();
        assert_eq!(reasons.of(&record, &difference), None);
    }

    #[test]
    fn a_star_is_any_text() {
        assert!(is_like("a: b", "a: b"));
        assert!(!is_like("a: b", "a"));
        assert!(is_like("test_x.A.test_b", "test_x.*.test_b"));
        assert!(is_like("abcabc", "a*c"));
        assert!(!is_like("abcabd", "a*c"));
        assert!(is_like("a", "a*"));
    }
}
