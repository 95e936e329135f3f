//! The results of a suite, as they are kept in a file. The results are kept by part. So a long suite can be combined
//! from several runs, if these had the same library and the same version of the suite. `compare` makes the results, and
//! `report` shows them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::case::{Outcome, Way};

/// The outcomes of a case over all of its runs, with the number of runs for each.
pub type Tally = BTreeMap<Outcome, usize>;

/// A case whose first run with the library had another outcome than on kernel TCP.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Difference {
    pub case: String,
    pub way: Way,
    pub kernel: Tally,
    pub library: Tally,
}

impl Difference {
    /// Returns whether the repeats show that the library causes the difference: outcomes came back that kernel TCP
    /// never had. A difference that came once and in no repeat is unsteady.
    pub fn is_steady(&self) -> bool {
        let foreign = |(outcome, times): (&Outcome, &usize)| {
            if self.kernel.contains_key(outcome) { 0 } else { *times }
        };
        self.library.iter().map(foreign).sum::<usize>() > 1
    }

    /// Returns whether the case was run again after the first run.
    fn is_repeated(&self) -> bool {
        self.kernel.values().sum::<usize>() > 1
    }

    /// Returns whether the library had an outcome that kernel TCP had in none of its runs.
    pub fn is_foreign(&self) -> bool {
        self.library.keys().any(|outcome| !self.kernel.contains_key(outcome))
    }
}

/// The results of the cases of a part or of a suite.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Cases that ran on at least one way.
    pub cases: usize,
    /// Cases that ran on no way, as the suite skipped them.
    pub skipped: usize,
    /// Cases that ran and did not pass in the first run on kernel TCP.
    pub failing: usize,
    /// Ends of connections that were promoted, by way.
    pub promoted: BTreeMap<Way, usize>,
    pub differences: Vec<Difference>,
}

impl Counts {
    /// Returns whether all differing cases were run again.
    pub fn is_complete(&self) -> bool {
        self.differences.iter().all(Difference::is_repeated)
    }

    /// Returns the counts with the part's name in front of each case, for use beside other parts.
    pub fn of_part(&self, part: &str) -> Self {
        let mut counts = self.clone();
        for difference in &mut counts.differences {
            if difference.case != part {
                difference.case = format!("{part}: {}", difference.case);
            }
        }
        counts
    }

    fn add(&mut self, other: &Self) {
        self.cases += other.cases;
        self.skipped += other.skipped;
        self.failing += other.failing;
        for (way, times) in &other.promoted {
            *self.promoted.entry(*way).or_insert(0) += times;
        }
        self.differences.extend(other.differences.iter().cloned());
    }
}

/// The results of a suite, or of the parts of it that were run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub suite: String,
    pub version: String,
    /// The library that the suite ran with.
    pub library: String,
    /// The number of parts that the suite has.
    pub all: usize,
    pub parts: BTreeMap<String, Counts>,
}

impl Record {
    /// Returns the counts of all parts, added up.
    pub fn total(&self) -> Counts {
        let mut total = Counts::default();
        self.parts.values().for_each(|part| total.add(part));
        total
    }

    /// Returns the record without parts whose differences were not run again, as these have no verdict yet.
    pub fn complete(&self) -> Self {
        let mut record = self.clone();
        record.parts.retain(|_, part| part.is_complete());
        record
    }

    /// Returns the parts that are kept of the same suite and library.
    pub fn earlier(&self, results: &Path) -> BTreeMap<String, Counts> {
        let key = |record: &Self| (record.version.clone(), record.library.clone());
        match Self::read(results, &self.suite) {
            Ok(Some(earlier)) if key(&earlier) == key(self) => earlier.parts,
            _ => BTreeMap::new(),
        }
    }

    /// Writes the record into the folder of results. Parts that are kept of the same suite and library are added.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn keep(&self, results: &Path) -> Result<()> {
        let mut all = self.clone();
        for (part, counts) in self.earlier(results) {
            all.parts.entry(part).or_insert(counts);
        }
        let file = file_of(results, &self.suite);
        fs::write(&file, serde_json::to_string_pretty(&all)? + "\n").with_context(|| file.display().to_string())
    }

    /// Reads the kept record of a suite. Returns `None` if there is no file.
    ///
    /// # Errors
    /// If the file exists and cannot be read, or has another form.
    pub fn read(results: &Path, suite: &str) -> Result<Option<Self>> {
        let file = file_of(results, suite);
        match fs::read_to_string(&file) {
            Ok(text) => serde_json::from_str(&text)
                .map(Some)
                .with_context(|| file.display().to_string()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| file.display().to_string()),
        }
    }
}

fn file_of(results: &Path, suite: &str) -> PathBuf {
    results.join(format!("{suite}.json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(library: &str, parts: &[(&str, usize)]) -> Record {
        let counts = |cases| Counts {
            cases,
            ..Counts::default()
        };
        Record {
            suite: "a".into(),
            version: "1".into(),
            library: library.into(),
            all: 2,
            parts: parts
                .iter()
                .map(|(name, cases)| ((*name).to_owned(), counts(*cases)))
                .collect(),
        }
    }

    #[test]
    fn parts_of_the_same_library_are_put_together_and_the_later_run_of_a_part_stands() {
        let dir = tempfile::tempdir().expect("a folder");
        record("x", &[("one", 1), ("two", 2)]).keep(dir.path()).expect("kept");
        record("x", &[("two", 3)]).keep(dir.path()).expect("kept");
        let kept = Record::read(dir.path(), "a").expect("read");
        assert_eq!(kept, Some(record("x", &[("one", 1), ("two", 3)])));
    }

    #[test]
    fn parts_of_another_library_are_not_taken() {
        let dir = tempfile::tempdir().expect("a folder");
        record("x", &[("one", 1)]).keep(dir.path()).expect("kept");
        record("y", &[("two", 3)]).keep(dir.path()).expect("kept");
        let kept = Record::read(dir.path(), "a").expect("read");
        assert_eq!(kept, Some(record("y", &[("two", 3)])));
    }

    #[test]
    fn a_part_whose_differences_were_not_run_again_is_not_complete() {
        let tally = |times| Tally::from([(Outcome::Passed, times)]);
        let mut part = Counts {
            differences: vec![Difference {
                case: "c".into(),
                way: Way::Default,
                kernel: tally(1),
                library: Tally::from([(Outcome::Failed, 1)]),
            }],
            ..Counts::default()
        };
        let mut record = record("x", &[("one", 1)]);
        record.parts.insert("two".into(), part.clone());
        assert_eq!(record.complete().parts.len(), 1);
        part.differences[0].kernel = tally(3);
        record.parts.insert("two".into(), part);
        assert_eq!(record.complete().parts.len(), 2);
    }

    #[test]
    fn an_outcome_that_comes_back_is_steady_and_one_that_kernel_tcp_has_too_is_none() {
        let difference = |kernel: &[(Outcome, usize)], library: &[(Outcome, usize)]| Difference {
            case: "c".into(),
            way: Way::Default,
            kernel: kernel.iter().copied().collect(),
            library: library.iter().copied().collect(),
        };
        use Outcome::{Failed, Passed};
        assert!(difference(&[(Passed, 3)], &[(Failed, 2), (Passed, 1)]).is_steady());
        let once = difference(&[(Passed, 8)], &[(Failed, 1), (Passed, 7)]);
        assert!(!once.is_steady() && once.is_foreign());
        let both = difference(&[(Passed, 2), (Failed, 1)], &[(Failed, 3)]);
        assert!(!both.is_steady() && !both.is_foreign());
    }
}
