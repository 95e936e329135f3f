//! `scripts/suites`: test suites of other projects without and with the library, compared case by case. Fetched suites
//! are kept in target/suites and used again. Results are kept there too, and `--all` makes docs/compatibility.md of
//! them.

mod case;
mod compare;
mod families;
mod reasons;
mod record;
mod report;
mod run;
mod sandbox;
mod workshop;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Parser;

use crate::case::Suite;
use crate::reasons::Reasons;
use crate::record::Record;
use crate::run::Plan;
use crate::sandbox::Sandbox;

/// Runs test suites of other projects without and with the library.
#[derive(Debug, Parser)]
struct Options {
    /// Suites to run; with --part, one.
    names: Vec<String>,
    /// Every suite, and docs/compatibility.md.
    #[arg(long)]
    all: bool,
    /// Run the parts that are quick and steady, of the suites that have such parts.
    #[arg(long)]
    ci: bool,
    /// Run only parts whose names begin with PART; may be repeated.
    #[arg(long, value_name = "PART")]
    part: Vec<String>,
    /// Run only parts without a result of this library: continues an interrupted run.
    #[arg(long)]
    missing: bool,
    /// The number of parts that run at the same time.
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// Write docs/compatibility.md from the kept results, and run nothing.
    #[arg(long)]
    table: bool,
    /// Print the names of the suites.
    #[arg(long)]
    list: bool,
    /// Print the Debian packages that the suites need.
    #[arg(long)]
    packages: bool,
    /// The library to test.
    #[arg(long, value_name = "FILE", default_value = "target/release/librdmasock.so")]
    library: PathBuf,
    /// The library's name in the results; results of different libraries are not combined.
    #[arg(long, value_name = "NAME", default_value = "unknown")]
    library_name: String,
    /// The folder of suites and results.
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
        let all: std::collections::BTreeSet<_> = suites.iter().flat_map(|suite| suite.packages()).collect();
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

/// Returns the suites that the command line selects.
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
            // The suites keep the order of the names.
            suites.sort_by_key(|suite| options.names.iter().position(|name| name == suite.name()));
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
    let library = options.library.canonicalize().context("the library is not built")?;
    let sandbox = Sandbox::new(&library, dir.to_owned())?;
    let plan = Plan {
        suites,
        is_quick: options.ci,
        prefixes: &options.part,
        only_missing: options.missing,
        jobs: options.jobs,
        library: &options.library_name,
        results: results.to_owned(),
    };
    run::run(&plan, dir, &sandbox, reasons)
}

fn read_results(suites: &[Box<dyn Suite>], results: &Path) -> Result<Vec<Record>> {
    let kept = suites
        .iter()
        .filter_map(|suite| Record::read(results, suite.name()).transpose());
    kept.collect()
}
