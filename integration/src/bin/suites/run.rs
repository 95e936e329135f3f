//! A run of several suites. The suites are fetched one after the other, while parts of suites that are ready run,
//! several at a time. At the end the parts that differ run again, with fewer of them at a time. The results of each
//! part are kept as soon as they are known. `case` defines a part, and `compare` compares its cases.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, mpsc};
use std::time::Instant;

use anyhow::{Context, Error, Result, bail};
use rdmasock_integration::signals;

use crate::case::{Place, Suite};
use crate::compare::Runner;
use crate::reasons::Reasons;
use crate::record::{Counts, Record};
use crate::report;
use crate::sandbox::Sandbox;
use crate::workshop::Workshop;

/// The suites and parts to run, and the folder for their results.
pub struct Plan<'a> {
    pub suites: &'a [Box<dyn Suite>],
    /// True if only parts for CI run.
    pub is_quick: bool,
    /// Beginnings of the names of parts to run; if empty, all parts run.
    pub prefixes: &'a [String],
    /// True if only parts without a complete result of this library run.
    pub only_missing: bool,
    /// The number of parts that run at the same time.
    pub jobs: usize,
    /// The library's name in the results.
    pub library: &'a str,
    /// The folder of results.
    pub results: PathBuf,
}

/// A suite that is fetched and built.
struct Ready<'a> {
    suite: &'a dyn Suite,
    place: Place,
    /// The parts to run.
    parts: Vec<String>,
    /// The results so far.
    record: Mutex<Record>,
    /// The error that kept the suite from running.
    failure: Mutex<Option<Error>>,
}

/// A part of a suite whose first runs differ, with the counts of these runs.
struct Differing<'a> {
    ready: Arc<Ready<'a>>,
    part: String,
    counts: Counts,
}

fn lock<T>(mutex: &Mutex<T>) -> Result<MutexGuard<'_, T>> {
    mutex.lock().ok().context("a worker panicked")
}

/// Runs the plan, and prints the results.
///
/// # Errors
/// If a suite cannot be run, a case differs without a written reason, or the run is interrupted.
pub fn run(plan: &Plan<'_>, dir: &Path, sandbox: &Sandbox, reasons: &Reasons) -> Result<()> {
    let shop = Workshop::new(dir.join("fetched"));
    std::fs::create_dir_all(dir.join("fetched"))?;
    std::fs::create_dir_all(&plan.results)?;
    let run = Run {
        plan,
        sandbox,
        said: dir.join("said"),
        began: Instant::now(),
        known: AtomicUsize::new(0),
        done: AtomicUsize::new(0),
    };
    let (mut suites, mut failed) = (Vec::new(), 0);
    let mut differing = run.first(&mut suites, &shop, &mut failed)?;
    run.again(&mut differing)?;
    let (mut passed, mut ignored) = (0, 0);
    for ready in suites {
        match ready.outcome() {
            Ok(record) => {
                let counts = record.total();
                let missing = reasons.missing(&record, &counts);
                failed += missing;
                passed += counts.cases.saturating_sub(counts.failing + missing);
                ignored += counts.failing + counts.skipped;
                tell(&record, &counts, reasons);
            }
            Err(error) => {
                failed += 1;
                println!("  {} FAILED: {error:#}", ready.suite.name());
            }
        }
    }
    println!(
        "test result: {passed} passed; {failed} failed; {ignored} ignored, {} s",
        run.began.elapsed().as_secs()
    );
    if failed > 0 {
        bail!("{failed} without a written reason");
    }
    Ok(())
}

struct Run<'a> {
    plan: &'a Plan<'a>,
    sandbox: &'a Sandbox,
    said: PathBuf,
    began: Instant,
    /// The number of parts to run or to run again, as far as it is known, and the number of finished ones.
    known: AtomicUsize,
    done: AtomicUsize,
}

impl<'a> Run<'a> {
    /// Runs each part once, and returns the parts that differ. A suite that cannot be fetched adds 1 to `failed`.
    fn first(
        &self,
        suites: &mut Vec<Arc<Ready<'a>>>,
        shop: &Workshop,
        failed: &mut usize,
    ) -> Result<Vec<Differing<'a>>> {
        let (sender, receiver) = mpsc::channel::<(Arc<Ready<'a>>, String)>();
        let receiver = Mutex::new(receiver);
        let differing = Mutex::new(Vec::new());
        let work = || -> Result<()> {
            loop {
                let next = lock(&receiver)?.recv();
                let Ok((ready, part)) = next else {
                    return Ok(());
                };
                if let Some(counts) = self.part(&ready, &part, |runner| runner.once(&part))?
                    && !counts.differences.is_empty()
                {
                    let of_part = Differing { ready, part, counts };
                    lock(&differing)?.push(of_part);
                }
            }
        };
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..self.plan.jobs).map(|_| scope.spawn(work)).collect();
            for suite in self.plan.suites {
                if signals::is_interrupted() {
                    break;
                }
                match self.ready(suite.as_ref(), shop) {
                    Ok(ready) if ready.parts.is_empty() => {}
                    Ok(ready) => {
                        let ready = Arc::new(ready);
                        println!("{} {}", self.time(), suite.name());
                        self.known.fetch_add(ready.parts.len(), Ordering::Relaxed);
                        for part in &ready.parts {
                            // If all workers have ended, joining them returns the error.
                            let _ = sender.send((ready.clone(), part.clone()));
                        }
                        suites.push(ready);
                    }
                    // The other suites can still be run.
                    Err(error) => {
                        *failed += 1;
                        println!("  {} FAILED: {error:#}", suite.name());
                    }
                }
            }
            drop(sender);
            join(workers)
        })?;
        differing.into_inner().ok().context("a worker panicked")
    }

    /// Runs the parts that differ again. Half as many run at a time, so that each has a core for itself.
    fn again(&self, differing: &mut [Differing<'a>]) -> Result<()> {
        let jobs = (self.plan.jobs / 2).max(1);
        println!("{} {} parts again", self.time(), differing.len());
        self.known.fetch_add(differing.len(), Ordering::Relaxed);
        let rest = Mutex::new(differing.iter_mut());
        let work = || -> Result<()> {
            loop {
                let next = lock(&rest)?.next();
                let Some(Differing { ready, part, counts }) = next else {
                    return Ok(());
                };
                let part = part.as_str();
                self.part(ready, part, |runner| {
                    let mut counts = std::mem::take(counts);
                    runner.again(part, &mut counts)?;
                    Ok(counts)
                })?;
            }
        };
        std::thread::scope(|scope| join((0..jobs).map(|_| scope.spawn(work)).collect()))
    }

    /// Fetches a suite unless it is kept, and selects its parts.
    fn ready(&self, suite: &'a dyn Suite, shop: &Workshop) -> Result<Ready<'a>> {
        let plan = self.plan;
        let place = shop.place(suite)?;
        let record = Record {
            suite: suite.name().to_owned(),
            version: place.version.clone(),
            library: plan.library.to_owned(),
            all: suite.parts(&place, false)?.len(),
            parts: BTreeMap::new(),
        };
        let mut parts = suite.parts(&place, plan.is_quick)?;
        if !plan.prefixes.is_empty() {
            parts.retain(|part| plan.prefixes.iter().any(|prefix| part.starts_with(prefix)));
        }
        if plan.only_missing {
            let earlier = record.earlier(&plan.results);
            parts.retain(|part| !earlier.get(part).is_some_and(Counts::is_complete));
        }
        Ok(Ready {
            suite,
            place,
            parts,
            record: Mutex::new(record),
            failure: Mutex::new(None),
        })
    }

    /// Calls `f` for a part, and keeps the counts that it returns. Returns `None` if the suite cannot be run.
    fn part(
        &self,
        ready: &Ready<'a>,
        part: &str,
        f: impl FnOnce(&Runner<'_>) -> Result<Counts>,
    ) -> Result<Option<Counts>> {
        if lock(&ready.failure)?.is_some() {
            return Ok(None);
        }
        let runner = Runner {
            suite: ready.suite,
            place: &ready.place,
            sandbox: self.sandbox,
            said: &self.said,
        };
        let counts = match f(&runner) {
            Ok(counts) => counts,
            Err(error) if signals::is_interrupted() => return Err(error),
            Err(error) => {
                *lock(&ready.failure)? = Some(error);
                return Ok(None);
            }
        };
        for difference in &counts.differences {
            println!("    {part}: {}", report::line(difference));
        }
        let mut record = lock(&ready.record)?;
        record.parts.insert(part.to_owned(), counts.of_part(part));
        record.keep(&self.plan.results)?;
        let done = self.done.fetch_add(1, Ordering::Relaxed) + 1;
        let known = self.known.load(Ordering::Relaxed);
        println!("{} {done} of {known} parts", self.time());
        Ok(Some(counts))
    }

    fn time(&self) -> String {
        format!("[{:4} s]", self.began.elapsed().as_secs())
    }
}

fn join(workers: Vec<std::thread::ScopedJoinHandle<'_, Result<()>>>) -> Result<()> {
    workers
        .into_iter()
        .try_for_each(|worker| worker.join().unwrap_or_else(|_| bail!("a worker panicked")))
}

impl Ready<'_> {
    /// Returns the results of the suite.
    fn outcome(&self) -> Result<Record> {
        if let Some(error) = lock(&self.failure)?.take() {
            return Err(error);
        }
        let record = lock(&self.record)?.clone();
        let counts = record.total();
        if counts.cases > 0 && counts.cases == counts.failing {
            bail!("no case passes on kernel TCP: the suite does not run here");
        }
        Ok(record)
    }
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
    println!("  {suite} {}: {cases} cases, promoted {promoted:?}", record.version);
    if skipped + failing > 0 {
        println!("skipped: {suite}: {skipped} cases by itself, {failing} that fail on kernel TCP too");
    }
    for difference in differences {
        let kind = match (difference.is_steady(), reasons.of(record, difference)) {
            (false, _) => "unsteady".to_owned(),
            (true, Some(reason)) => format!("different ({reason})"),
            (true, None) => "DIFFERENT".to_owned(),
        };
        println!("  {kind}: {}", report::line(difference));
    }
}
