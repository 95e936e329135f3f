//! `scripts/suites`: other people's test suites without and with the library, compared case by case. What is fetched lies in
//! target/suites and is used again; results are kept there, and `--all` makes docs/compatibility.md of them.

mod case;
mod compare;
mod families;
mod reasons;
mod record;
mod report;
mod sandbox;
mod workshop;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::Parser;

use crate::case::Suite;
use crate::reasons::Reasons;
use crate::record::{Counts, Record};
use crate::sandbox::Sandbox;
use crate::workshop::Workshop;

/// Runs test suites of other projects without and with the library.
#[derive(Debug, Parser)]
struct Options {
    /// Suites to run; with --part, one.
    names: Vec<String>,
    /// Every suite, and docs/compatibility.md.
    #[arg(long)]
    all: bool,
    /// The parts that are quick and steady, of the suites that have such.
    #[arg(long)]
    ci: bool,
    /// Only parts whose names begin so; more than once for several.
    #[arg(long, value_name = "PART")]
    part: Vec<String>,
    /// Only parts of which no result of this library is there: goes on with a run that was interrupted.
    #[arg(long)]
    missing: bool,
    /// Parts that run at the same time.
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// Write docs/compatibility.md of the results that are there, and run nothing.
    #[arg(long)]
    table: bool,
    /// Print the names of the suites.
    #[arg(long)]
    list: bool,
    /// Print the Debian packages that the suites need.
    #[arg(long)]
    packages: bool,
    /// The library.
    #[arg(
        long,
        value_name = "FILE",
        default_value = "target/release/librdmasock.so"
    )]
    library: PathBuf,
    /// What the library is called in the results; those of another one are not put together with these.
    #[arg(long, value_name = "NAME", default_value = "unknown")]
    library_name: String,
    /// Where suites lie, and results.
    #[arg(long, value_name = "DIR", default_value = "target/suites")]
    dir: PathBuf,
}

fn main() -> std::process::ExitCode {
    rdmasock_integration::exit(run(&Options::parse()))
}

fn run(options: &Options) -> Result<()> {
    let suites = chosen(options)?;
    if options.list {
        suites.iter().for_each(|suite| println!("{}", suite.name()));
        return Ok(());
    }
    if options.packages {
        let all: std::collections::BTreeSet<_> =
            suites.iter().flat_map(|suite| suite.packages()).collect();
        all.iter().for_each(|package| println!("{package}"));
        return Ok(());
    }
    std::fs::create_dir_all(&options.dir)?;
    let dir = options.dir.canonicalize()?;
    let results = dir.join(if options.ci { "results-ci" } else { "results" });
    let reasons = Reasons::read(Path::new("integration/suites/reasons.toml"))?;
    if !options.table {
        run_suites(options, &suites, &dir, &results, &reasons)?;
    }
    if options.table || options.all {
        let records = read_results(&suites, &results)?;
        let programs = std::fs::read_to_string("integration/suites/programs.md")?;
        let all = families::all();
        let names: Vec<&str> = all.iter().map(|suite| suite.name()).collect();
        let page = report::page(&names, &records, &reasons, &programs)?;
        std::fs::write("docs/compatibility.md", page)?;
        println!("docs/compatibility.md is written");
    }
    Ok(())
}

/// The suites that the command line means.
fn chosen(options: &Options) -> Result<Vec<Box<dyn Suite>>> {
    let mut suites = families::all();
    let everything = options.all || options.ci || options.list || options.table;
    suites.retain(|suite| !options.ci || suite.is_quick());
    match (options.names.is_empty(), everything) {
        (true, true) => Ok(suites),
        (true, false) => bail!("which suites? --all, --ci, or names; --list has them"),
        (false, _) => {
            for name in &options.names {
                if !suites.iter().any(|suite| suite.name() == name) {
                    bail!("there is no suite {name}; --list has them");
                }
            }
            suites.retain(|suite| options.names.iter().any(|name| name == suite.name()));
            Ok(suites)
        }
    }
}

fn run_suites(
    options: &Options,
    suites: &[Box<dyn Suite>],
    dir: &Path,
    results: &Path,
    reasons: &Reasons,
) -> Result<()> {
    rdmasock_integration::signals::catch()?;
    let library = options
        .library
        .canonicalize()
        .context("the library is not built")?;
    let shop = Workshop::new(dir.join("fetched"));
    std::fs::create_dir_all(dir.join("fetched"))?;
    std::fs::create_dir_all(results)?;
    let sandbox = Sandbox::new(&library, dir.to_owned())?;
    let began = Instant::now();
    let (mut passed, mut failed, mut ignored) = (0, 0, 0);
    for suite in suites {
        println!("[{:4} s] {}", began.elapsed().as_secs(), suite.name());
        match run_suite(options, suite.as_ref(), &shop, &sandbox, results) {
            Ok(None) => {}
            Ok(Some(record)) => {
                let counts = record.total();
                let missing = reasons.missing(suite.name(), &counts);
                failed += missing;
                passed += counts.cases.saturating_sub(counts.failing + missing);
                ignored += counts.failing + counts.skipped;
                tell(&record, &counts, reasons);
            }
            Err(error) if rdmasock_integration::signals::is_interrupted() => return Err(error),
            // The others can be run all the same.
            Err(error) => {
                failed += 1;
                println!("  FAILED: {error:#}");
            }
        }
    }
    println!(
        "test result: {passed} passed; {failed} failed; {ignored} ignored, {} s",
        began.elapsed().as_secs()
    );
    if failed > 0 {
        bail!("{failed} without a written reason");
    }
    Ok(())
}

/// Runs a suite's chosen parts, and keeps what comes of each. None if there is none to run.
fn run_suite(
    options: &Options,
    suite: &dyn Suite,
    shop: &Workshop,
    sandbox: &Sandbox,
    results: &Path,
) -> Result<Option<Record>> {
    let place = shop.place(suite)?;
    let record = Record {
        suite: suite.name().to_owned(),
        version: place.version.clone(),
        library: options.library_name.clone(),
        all: suite.parts(&place, false)?.len(),
        parts: BTreeMap::new(),
    };
    let mut parts = suite.parts(&place, options.ci)?;
    if !options.part.is_empty() {
        parts.retain(|part| options.part.iter().any(|prefix| part.starts_with(prefix)));
    }
    if options.missing {
        let earlier = record.earlier(results);
        parts.retain(|part| !earlier.contains_key(part));
    }
    if parts.is_empty() {
        return Ok(None);
    }
    let record = Mutex::new(record);
    let keep = |part: &str, counts| {
        let mut record = record.lock().ok().context("a worker panicked")?;
        record.parts.insert(part.to_owned(), counts);
        record.keep(results)
    };
    compare::compare(suite, &place, &parts, sandbox, options.jobs, &keep)?;
    let record = record.into_inner().ok().context("a worker panicked")?;
    let counts = record.total();
    if counts.cases > 0 && counts.cases == counts.failing {
        bail!("no case passes on kernel TCP: the suite does not run here");
    }
    Ok(Some(record))
}

fn tell(record: &Record, counts: &Counts, reasons: &Reasons) {
    let Counts {
        cases,
        skipped,
        failing,
        promoted,
        differences,
    } = counts;
    let suite = &record.suite;
    println!("  {}: {cases} cases, promoted {promoted:?}", record.version);
    if skipped + failing > 0 {
        println!(
            "skipped: {suite}: {skipped} cases by itself, {failing} that fail on kernel TCP too"
        );
    }
    for difference in differences {
        let kind = match (difference.is_steady(), reasons.of(suite, difference)) {
            (false, _) => "unsteady".to_owned(),
            (true, Some(reason)) => format!("different ({reason})"),
            (true, None) => "DIFFERENT".to_owned(),
        };
        println!(
            "  {kind}: {} | kernel TCP {} | {} {}",
            difference.case,
            report::tally(&difference.kernel),
            difference.way.title(),
            report::tally(&difference.library)
        );
    }
}

fn read_results(suites: &[Box<dyn Suite>], results: &Path) -> Result<Vec<Record>> {
    let kept = suites
        .iter()
        .filter_map(|suite| Record::read(results, suite.name()).transpose());
    kept.collect()
}
