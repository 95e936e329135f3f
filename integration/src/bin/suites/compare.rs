//! Runs a part of a suite without the library and with it, and compares the cases. A case that differs is run again
//! several times on both, alone if possible. The repeats tell a case that is unsteady on kernel TCP too from a case
//! that the library changes. The order of parts is in `run`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};

use crate::case::{Cases, Outcome, Place, Selection, Suite, Way};
use crate::record::{Counts, Difference, Tally};
use crate::sandbox::Sandbox;

/// The most repeats of a case that differs, on kernel TCP and with the library. If the difference has come back,
/// `ENOUGH` repeats are enough.
const REPEATS: usize = 5;
const ENOUGH: usize = 2;
/// If more cases of a part differ than this, the whole part is run again.
const SINGLY: usize = 12;
/// The most times that a part goes on after a case that was stopped.
const RESUMES: usize = 6;

/// A part's outcomes by way.
type Outcomes = BTreeMap<Way, Cases>;

/// The results of a part on one way.
struct Whole {
    cases: Cases,
    /// Ends of connections that were promoted.
    promoted: usize,
    /// The output of the part.
    said: String,
}

/// Runs the parts of one suite.
pub struct Runner<'a> {
    pub suite: &'a dyn Suite,
    pub place: &'a Place,
    pub sandbox: &'a Sandbox,
    /// The folder for the output of parts that differ.
    pub said: &'a Path,
}

/// Returns the outcome of a case: `Unfinished` if the run has no result of it.
fn outcome(outcomes: &Outcomes, way: Way, name: &str) -> Outcome {
    outcomes
        .get(&way)
        .and_then(|cases| cases.get(name))
        .copied()
        .unwrap_or(Outcome::Unfinished)
}

impl Runner<'_> {
    /// Runs a part once on each way, and counts its cases.
    ///
    /// # Errors
    /// If the part cannot be started, or the run is interrupted.
    pub fn once(&self, part: &str) -> Result<Counts> {
        let began = Instant::now();
        let mut outcomes = Outcomes::new();
        let mut counts = Counts::default();
        let mut said = BTreeMap::new();
        for way in [Way::Kernel, Way::Default, Way::AtOnce] {
            let whole = self
                .part(part, way, Selection::All, true)
                .with_context(|| format!("{part} of {}", self.suite.name()))?;
            counts.promoted.insert(way, whole.promoted);
            outcomes.insert(way, whole.cases);
            said.insert(way, whole.said);
        }
        self.count(part, &outcomes, &mut counts);
        if !counts.differences.is_empty() {
            for (way, text) in said {
                self.keep_what_was_said(part, way, "", &text)?;
            }
        }
        let seconds = began.elapsed().as_secs();
        let suite = self.suite.name();
        println!(
            "    {suite} {part}: {} cases, {seconds} s",
            counts.cases + counts.skipped
        );
        Ok(counts)
    }

    /// Counts the cases, and notes the cases that differ.
    fn count(&self, part: &str, outcomes: &Outcomes, counts: &mut Counts) {
        let names: BTreeSet<&String> = outcomes.values().flat_map(Cases::keys).collect();
        let mut failing = Vec::new();
        for name in &names {
            let of = |way| outcome(outcomes, way, name);
            let skipped = [Way::Kernel, Way::Default, Way::AtOnce]
                .iter()
                .all(|way| of(*way) == Outcome::Skipped);
            counts.skipped += usize::from(skipped);
            counts.cases += usize::from(!skipped);
            if !matches!(of(Way::Kernel), Outcome::Passed | Outcome::Skipped) {
                failing.push(name.as_str());
            }
            for way in Way::LIBRARY {
                if of(way) != of(Way::Kernel) {
                    counts.differences.push(Difference {
                        case: (*name).clone(),
                        way,
                        kernel: Tally::from([(of(Way::Kernel), 1)]),
                        library: Tally::from([(of(way), 1)]),
                    });
                }
            }
        }
        counts.failing = failing.len();
        if !failing.is_empty() {
            println!("    {part}: fail on kernel TCP: {}", failing.join(", "));
        }
    }

    /// Runs a part and returns its cases. If the part was stopped at a case, or a case ended it, runs the cases that
    /// are left.
    fn part(&self, part: &str, way: Way, selection: Selection<'_>, counted: bool) -> Result<Whole> {
        let mut whole = Whole {
            cases: Cases::new(),
            promoted: 0,
            said: String::new(),
        };
        for _ in 0..=RESUMES {
            let seen: Vec<String> = whole.cases.keys().cloned().collect();
            let selected = match selection {
                Selection::All if !seen.is_empty() => Selection::Except(&seen),
                other => other,
            };
            let scratch = self.sandbox.scratch()?;
            let job = self.suite.job(self.place, part, selected, scratch.path())?;
            let ran = self.sandbox.run(&job, way, scratch.path(), counted)?;
            whole.promoted += ran.promoted;
            whole.said += &ran.output;
            let mut found = self.suite.cases(part, &ran, scratch.path());
            // A part without results of cases counts as one case: it is a program, or it does not begin.
            if whole.cases.is_empty() && found.is_empty() {
                found.insert(part.to_owned(), ran.end.outcome());
            }
            let broke_off = found.values().any(|outcome| *outcome == Outcome::Unfinished);
            let new = found.keys().any(|name| !whole.cases.contains_key(name));
            whole.cases.extend(found);
            if !broke_off || !new || !self.suite.selects() || !matches!(selection, Selection::All) {
                break;
            }
        }
        Ok(whole)
    }

    /// Runs the cases of a part that differ again, on kernel TCP and with the library.
    ///
    /// # Errors
    /// As [`Runner::once`].
    pub fn again(&self, part: &str, counts: &mut Counts) -> Result<()> {
        for way in Way::LIBRARY {
            let (mut differences, others): (Vec<_>, Vec<_>) = std::mem::take(&mut counts.differences)
                .into_iter()
                .partition(|difference| difference.way == way);
            counts.differences = others;
            self.again_in(part, way, &mut differences)?;
            counts.differences.extend(differences);
        }
        Ok(())
    }

    fn again_in(&self, part: &str, way: Way, differences: &mut Vec<Difference>) -> Result<()> {
        let singly = self.suite.selects() && differences.len() <= SINGLY;
        if singly {
            for difference in &mut *differences {
                let name = vec![difference.case.clone()];
                self.repeat(
                    part,
                    way,
                    Selection::Only(&name),
                    REPEATS,
                    std::slice::from_mut(difference),
                )?;
            }
        }
        // A case may differ only beside other cases. Run with them, it does not pass for unsteady.
        let mut rest: Vec<Difference> = Vec::new();
        differences.retain(|difference| {
            let steady = difference.is_steady();
            if !steady {
                rest.push(difference.clone());
            }
            steady
        });
        if rest.iter().any(Difference::is_foreign) {
            let times = if singly { 2 } else { REPEATS };
            self.repeat(part, way, Selection::All, times, &mut rest)?;
        }
        differences.extend(rest);
        Ok(())
    }

    fn repeat(
        &self,
        part: &str,
        way: Way,
        selection: Selection<'_>,
        times: usize,
        differences: &mut [Difference],
    ) -> Result<()> {
        for round in 0..times {
            if round >= ENOUGH && differences.iter().all(Difference::is_steady) {
                break;
            }
            for on in [Way::Kernel, way] {
                let whole = self.part(part, on, selection, false)?;
                let mut is_foreign = false;
                for difference in &mut *differences {
                    let outcome = whole.cases.get(&difference.case).copied();
                    let outcome = outcome.unwrap_or(Outcome::Unfinished);
                    let tally = match on {
                        Way::Kernel => &mut difference.kernel,
                        _ => &mut difference.library,
                    };
                    *tally.entry(outcome).or_insert(0) += 1;
                    is_foreign |= !difference.kernel.contains_key(&outcome);
                }
                if is_foreign {
                    self.keep_what_was_said(part, way, " again", &whole.said)?;
                }
            }
        }
        Ok(())
    }

    /// Writes the output of a part into the folder `said`, for the analysis of differences.
    fn keep_what_was_said(&self, part: &str, way: Way, when: &str, text: &str) -> Result<()> {
        let dir = self.said.join(self.suite.name());
        fs::create_dir_all(&dir)?;
        let name = format!("{}, {}{when}", part.replace('/', " "), way.title());
        Ok(fs::write(dir.join(name), text)?)
    }
}
