//! Makes docs/compatibility.md from the results of comparisons. It has a table of suites, the differing cases with
//! their reasons, the unsteady cases, and the page on programs that is written by hand. The report does not judge: a
//! case without a reason in the file is shown without one.

use std::collections::BTreeMap;
use std::fmt::Write;

use anyhow::{Result, bail};

use crate::case::{Outcome, Way};
use crate::reasons::Reasons;
use crate::record::{Counts, Difference, Record, Tally};

const HEAD: &str = "\
# Compatibility

Test suites of other projects, run on kernel TCP and with the library, in its default settings and with
`RDMASOCK_PROMOTE_AFTER=0` (*at once*). This page is written by `scripts/suites --all`; [programs](#programs) are in it too.
";

const LEGEND: &str = "
A case is equal if its outcome is the same in all three runs, or if repeats show it to be as unsteady on kernel TCP. What
differs is run again alone, and with its fellows: it is *different* if the outcome that kernel TCP did not have comes
back, and *unsteady* if it does not. *Failing* are cases that kernel TCP does not pass either: for want of a network, say.
*Promoted* counts the ends of connections that were promoted, without those of servers that a suite kills.

| suite | version | cases | equal | unsteady | different | skipped | failing | promoted, default | at once |
|---|---|--:|--:|--:|--:|--:|--:|--:|--:|
";

/// Returns the page, with `programs` at its end. `suites` are the names of all suites.
///
/// # Errors
/// If there are no records, or records of several libraries.
pub fn page(suites: &[&str], records: &[Record], reasons: &Reasons, programs: &str) -> Result<String> {
    let Some(first) = records.first() else {
        bail!("there are no results to make a table of");
    };
    if let Some(other) = records.iter().find(|r| r.library != first.library) {
        bail!(
            "{} was run with the library {}, and {} with {}: run one of them again",
            first.suite,
            first.library,
            other.suite,
            other.library
        );
    }
    let records: Vec<Record> = records.iter().map(Record::complete).collect();
    let mut page = format!("{HEAD}The library was {}.\n{LEGEND}", first.library);
    let totals: Vec<(&Record, Counts)> = records.iter().map(|r| (r, r.total())).collect();
    for (record, counts) in &totals {
        let (different, unsteady) = differing(counts);
        let promoted = |way| counts.promoted.get(&way).copied().unwrap_or(0);
        let _ = writeln!(
            page,
            "| {} | {} | {} | {} | {unsteady} | {different} | {} | {} | {} | {} |",
            named(record),
            record.version,
            counts.cases,
            counts.cases.saturating_sub(different + unsteady),
            counts.skipped,
            counts.failing,
            promoted(Way::Default),
            promoted(Way::AtOnce),
        );
    }
    let is_missing = |suite: &&str| records.iter().all(|record| record.suite != *suite);
    let missing: Vec<&str> = suites.iter().copied().filter(is_missing).collect();
    if !missing.is_empty() {
        let _ = writeln!(page, "\nNot run with this library: {}.", missing.join(", "));
    }
    section(&mut page, "Different", "reason", &totals, |record, d| {
        let reason = || reasons.of(record, d).unwrap_or("no reason is known");
        d.is_steady().then(reason)
    });
    section(&mut page, "Unsteady", "", &totals, |_, d| {
        (!d.is_steady() && d.is_foreign()).then_some("")
    });
    Ok(page + "\n" + programs)
}

/// Returns the name of the suite, with the number of parts that were run if that is not all.
fn named(record: &Record) -> String {
    match (record.parts.len(), record.all) {
        (run, all) if run < all => format!("{} ({run} of {all} parts)", record.suite),
        _ => record.suite.clone(),
    }
}

/// Returns how many cases differ steadily, and how many are unsteady with the library alone.
fn differing(counts: &Counts) -> (usize, usize) {
    let mut steady: BTreeMap<&str, bool> = BTreeMap::new();
    for difference in counts.differences.iter().filter(|d| d.is_foreign()) {
        *steady.entry(&difference.case).or_default() |= difference.is_steady();
    }
    let different = steady.values().filter(|is| **is).count();
    (different, steady.len() - different)
}

/// Adds a table of the differences for which `note` returns a note.
fn section<'a>(
    page: &mut String,
    title: &str,
    last: &str,
    totals: &'a [(&Record, Counts)],
    note: impl Fn(&Record, &'a Difference) -> Option<&'a str>,
) {
    let mut rows = String::new();
    for (record, counts) in totals {
        for difference in &counts.differences {
            let Some(note) = note(record, difference) else {
                continue;
            };
            let _ = writeln!(
                rows,
                "| {} | `{}` | {} | {} | {} | {note} |",
                record.suite,
                difference.case.replace('|', "\\|"),
                match difference.way {
                    Way::AtOnce => "at once",
                    _ => "default",
                },
                tally(&difference.kernel),
                tally(&difference.library),
            );
        }
    }
    if !rows.is_empty() {
        let _ = write!(
            page,
            "\n## {title}\n\n| suite | case | setting | kernel TCP | library | {last} |\n|---|---|---|---|---|---|\n{rows}"
        );
    }
}

/// Returns a difference as one line.
pub fn line(difference: &Difference) -> String {
    let Difference {
        case,
        way,
        kernel,
        library,
    } = difference;
    let (kernel, library) = (tally(kernel), tally(library));
    format!("{case} | kernel TCP {kernel} | {} {library}", way.title())
}

/// Returns a tally in words.
fn tally(tally: &Tally) -> String {
    let word = |outcome: &Outcome| match outcome {
        Outcome::Passed => "passed",
        Outcome::Failed => "failed",
        Outcome::Skipped => "skipped",
        Outcome::Unfinished => "unfinished",
    };
    let all: usize = tally.values().sum();
    let part = |(outcome, times): (&Outcome, &usize)| format!("{} {times} of {all}", word(outcome));
    tally.iter().map(part).collect::<Vec<_>>().join(", ")
}
