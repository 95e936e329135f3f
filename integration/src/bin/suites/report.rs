//! docs/compatibility.md, made of what the comparisons found: a table of suites, the cases that differ with the reasons, and
//! those that are unsteady. Not a place for judgement: what is no reason in the file is shown without one.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::case::{Outcome, Way};
use crate::compare::{Comparison, Difference, Tally};
use crate::reasons::Reasons;

const HEAD: &str = "\
# Compatibility

Test suites of other projects, run on kernel TCP and with the library, in its default settings and with
`RDMASOCK_PROMOTE_AFTER=0` (*at once*). This page is written by `scripts/suites --all`.

A case is equal if its outcome is the same in all three runs, or if repeats show it to be as unsteady on kernel TCP. What
differs is run again alone, and with its fellows: it is *different* if the outcome that kernel TCP did not have comes
back, and *unsteady* if it does not. *Failing* are cases that kernel TCP does not pass either: for want of a network, say.
*Promoted* counts the ends of connections that were promoted.

";

/// The page.
pub fn page(comparisons: &[Comparison], reasons: &Reasons) -> String {
    let mut page = HEAD.to_owned();
    page += "| suite | version | cases | equal | unsteady | different | skipped | failing | promoted, default | at once |\n";
    page += "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|\n";
    for comparison in comparisons {
        let (different, unsteady) = names(comparison);
        let promoted = |way| comparison.promoted.get(&way).copied().unwrap_or(0);
        let _ = writeln!(
            page,
            "| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
            named(comparison),
            comparison.version,
            comparison.cases,
            comparison
                .cases
                .saturating_sub(different.len() + unsteady.len()),
            unsteady.len(),
            different.len(),
            comparison.skipped,
            comparison.failing,
            promoted(Way::Default),
            promoted(Way::AtOnce),
        );
    }
    section(&mut page, "Different", comparisons, |suite, difference| {
        difference.is_steady().then(|| {
            reasons
                .of(suite, difference)
                .unwrap_or("no reason is known")
                .to_owned()
        })
    });
    section(&mut page, "Unsteady", comparisons, |_, difference| {
        (!difference.is_steady() && is_foreign(difference)).then(String::new)
    });
    page
}

/// The suite, and how much of it was run where that is not all.
fn named(comparison: &Comparison) -> String {
    match comparison.parts {
        (run, all) if run < all => format!("{} ({run} of {all} parts)", comparison.suite),
        _ => comparison.suite.clone(),
    }
}

/// The names of a suite's cases that differ, and of those that are unsteady with the library alone.
fn names(comparison: &Comparison) -> (Vec<&str>, Vec<&str>) {
    let mut steady: BTreeMap<&str, bool> = BTreeMap::new();
    for difference in &comparison.differences {
        if is_foreign(difference) {
            *steady.entry(&difference.case).or_default() |= difference.is_steady();
        }
    }
    let of = |wanted| {
        steady
            .iter()
            .filter(move |(_, is)| **is == wanted)
            .map(|(name, _)| *name)
            .collect()
    };
    (of(true), of(false))
}

/// Whether the library had an outcome that kernel TCP had in none of its runs.
fn is_foreign(difference: &Difference) -> bool {
    difference
        .library
        .keys()
        .any(|outcome| !difference.kernel.contains_key(outcome))
}

fn section(
    page: &mut String,
    title: &str,
    comparisons: &[Comparison],
    note: impl Fn(&str, &Difference) -> Option<String>,
) {
    let rows: Vec<String> = comparisons
        .iter()
        .flat_map(|comparison| comparison.differences.iter().map(move |d| (comparison, d)))
        .filter_map(|(comparison, d)| {
            note(&comparison.suite, d).map(|note| {
                let (kernel, library) = (tally(&d.kernel), tally(&d.library));
                let way = if d.way == Way::AtOnce {
                    "at once"
                } else {
                    "default"
                };
                let case = d.case.replace('|', "\\|");
                format!(
                    "| {} | `{case}` | {way} | {kernel} | {library} | {note} |\n",
                    comparison.suite
                )
            })
        })
        .collect();
    if rows.is_empty() {
        return;
    }
    let reason = if title == "Different" { "reason" } else { "" };
    let _ = write!(
        page,
        "\n## {title}\n\n| suite | case | setting | kernel TCP | library | {reason} |\n|---|---|---|---|---|---|\n"
    );
    page.extend(rows);
}

/// A tally in words.
pub fn tally(tally: &Tally) -> String {
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
