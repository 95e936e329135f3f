//! Runs the parts of a suite without the library and with it, and compares case by case. What differs is run again, alone,
//! several times on both, which tells a case that is unsteady on kernel TCP too from one that the library changes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::{Context, Result};

use crate::case::{Cases, Outcome, Place, Selection, Suite, Way};
use crate::record::{Counts, Difference, Tally};
use crate::sandbox::Sandbox;

/// How often a case that differs is run again on each, at most and, if the difference has come back by then, at least.
const REPEATS: usize = 5;
const ENOUGH: usize = 2;
/// Where more cases of a part differ than this, the part is what is run again.
const SINGLY: usize = 12;
/// How often a part goes on behind a case that was stopped.
const RESUMES: usize = 6;

/// A part's outcomes by way.
type Outcomes = BTreeMap<Way, Cases>;
/// How many ends were promoted, by way.
type Promoted = BTreeMap<Way, usize>;

/// Takes what came of a part as soon as it is known.
pub type Keep<'a> = &'a (dyn Fn(&str, Counts) -> Result<()> + Sync);

/// Runs a suite's parts, `jobs` at a time, and then what differs again, when nothing else runs.
///
/// # Errors
/// When a part cannot be started, the suite does not run here, or the run is interrupted.
pub fn compare(
    suite: &dyn Suite,
    place: &Place,
    parts: &[String],
    sandbox: &Sandbox,
    jobs: usize,
    keep: Keep<'_>,
) -> Result<()> {
    let runner = Runner {
        suite,
        place,
        sandbox,
    };
    for (part, (outcomes, promoted)) in runner.all(parts, jobs, keep)? {
        keep(&part, runner.count(&part, &outcomes, promoted)?)?;
    }
    Ok(())
}

/// What became of a case. One that a run has no word of did not come to its end there.
fn outcome(outcomes: &Outcomes, way: Way, name: &str) -> Outcome {
    outcomes
        .get(&way)
        .and_then(|cases| cases.get(name))
        .copied()
        .unwrap_or(Outcome::Unfinished)
}

struct Runner<'a> {
    suite: &'a dyn Suite,
    place: &'a Place,
    sandbox: &'a Sandbox,
}

impl Runner<'_> {
    /// Each part in each way once. Keeps those that are equal, and returns the others.
    fn all(
        &self,
        parts: &[String],
        jobs: usize,
        keep: Keep<'_>,
    ) -> Result<BTreeMap<String, (Outcomes, Promoted)>> {
        let next = AtomicUsize::new(0);
        let differing = Mutex::new(BTreeMap::new());
        let work = || -> Result<()> {
            while let Some(part) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
                let began = Instant::now();
                let mut outcomes = Outcomes::new();
                let mut promoted = Promoted::new();
                for way in [Way::Kernel, Way::Default, Way::AtOnce] {
                    let (cases, times) = self
                        .part(part, way, Selection::All, true)
                        .with_context(|| format!("{part} of {}", self.suite.name()))?;
                    outcomes.insert(way, cases);
                    promoted.insert(way, times);
                }
                let seconds = began.elapsed().as_secs();
                println!(
                    "    {part}: {} cases, {seconds} s",
                    outcomes.values().map(Cases::len).max().unwrap_or(0)
                );
                if outcomes
                    .values()
                    .all(|cases| *cases == outcomes[&Way::Kernel])
                {
                    keep(part, self.count(part, &outcomes, promoted)?)?;
                } else if let Ok(mut differing) = differing.lock() {
                    differing.insert(part.clone(), (outcomes, promoted));
                }
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..jobs).map(|_| scope.spawn(work)).collect();
            workers.into_iter().try_for_each(|worker| {
                worker
                    .join()
                    .unwrap_or_else(|_| anyhow::bail!("a worker panicked"))
            })
        })?;
        differing.into_inner().ok().context("a worker panicked")
    }

    /// What came of a part, after what differs was run again.
    fn count(&self, part: &str, outcomes: &Outcomes, promoted: Promoted) -> Result<Counts> {
        let names: BTreeSet<&String> = outcomes.values().flat_map(Cases::keys).collect();
        let mut counts = Counts {
            promoted,
            ..Counts::default()
        };
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
        }
        counts.failing = failing.len();
        if !failing.is_empty() {
            println!("    {part}: fail on kernel TCP: {}", failing.join(", "));
        }
        for way in Way::LIBRARY {
            let differing: Vec<&String> = names
                .iter()
                .copied()
                .filter(|name| outcome(outcomes, way, name) != outcome(outcomes, Way::Kernel, name))
                .collect();
            counts
                .differences
                .extend(self.again(part, way, outcomes, &differing)?);
        }
        Ok(counts)
    }

    /// A part's cases, and how many ends were promoted. Goes on behind a case at which the part was stopped, or that ended it.
    fn part(
        &self,
        part: &str,
        way: Way,
        selection: Selection<'_>,
        counted: bool,
    ) -> Result<(Cases, usize)> {
        let mut cases = Cases::new();
        let mut promoted = 0;
        for _ in 0..=RESUMES {
            let seen: Vec<String> = cases.keys().cloned().collect();
            let selected = match selection {
                Selection::All if !seen.is_empty() => Selection::Except(&seen),
                other => other,
            };
            let scratch = self.sandbox.scratch()?;
            let job = self.suite.job(self.place, part, selected, scratch.path())?;
            let ran = self.sandbox.run(&job, way, scratch.path(), counted)?;
            promoted += ran.promoted;
            let mut found = self.suite.cases(part, &ran, scratch.path());
            // What tells of no case is one itself: a program, or a part that does not begin.
            if cases.is_empty() && found.is_empty() {
                found.insert(part.to_owned(), ran.end.outcome());
            }
            let broke_off = found
                .values()
                .any(|outcome| *outcome == Outcome::Unfinished);
            let new = found.keys().any(|name| !cases.contains_key(name));
            cases.extend(found);
            if !broke_off || !new || !self.suite.selects() || !matches!(selection, Selection::All) {
                break;
            }
        }
        Ok((cases, promoted))
    }

    /// Runs the cases that differ again.
    fn again(
        &self,
        part: &str,
        way: Way,
        outcomes: &Outcomes,
        differing: &[&String],
    ) -> Result<Vec<Difference>> {
        let mut differences: Vec<Difference> = differing
            .iter()
            .map(|name| Difference {
                case: (*name).clone(),
                way,
                kernel: Tally::from([(outcome(outcomes, Way::Kernel, name), 1)]),
                library: Tally::from([(outcome(outcomes, way, name), 1)]),
            })
            .collect();
        if differences.is_empty() {
            return Ok(differences);
        }
        println!(
            "    {part}: {} differ ({}), again",
            differences.len(),
            way.title()
        );
        let singly = self.suite.selects() && differences.len() <= SINGLY;
        if singly {
            for difference in &mut differences {
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
        // What differs only among its fellows must not pass for unsteady.
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
        for difference in &mut differences {
            if difference.case != part {
                difference.case = format!("{part}: {}", difference.case);
            }
        }
        Ok(differences)
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
                let (cases, _) = self.part(part, on, selection, false)?;
                for difference in &mut *differences {
                    let outcome = cases.get(&difference.case).copied();
                    let tally = match on {
                        Way::Kernel => &mut difference.kernel,
                        _ => &mut difference.library,
                    };
                    *tally
                        .entry(outcome.unwrap_or(Outcome::Unfinished))
                        .or_insert(0) += 1;
                }
            }
        }
        Ok(())
    }
}
