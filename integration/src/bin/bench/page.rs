//! Makes the page of benchmarks from the results of the parts of `bench`: tables, the losing cases by name, and the
//! words around them. [`publish`] prints the tables of one run, which are a part of the page. The pictures are in
//! `pictures`.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::results::{Figure, Results, Series, Way};
use crate::{pictures, threshold};

#[derive(Debug, Args)]
pub struct Options {
    /// Results that sweep and scale have written by --json.
    #[arg(long, value_name = "PATH", num_args = 1.., required = true)]
    from: Vec<PathBuf>,
    /// The folder of benchmarks.md and benchmarks/*.svg.
    #[arg(long, value_name = "FOLDER")]
    into: PathBuf,
}

/// A table, with the figures that each cell shows one after the other. The ratio in a cell compares the first figure.
struct View {
    title: &'static str,
    figures: &'static [Figure],
}

const SWEEP_THROUGHPUT: View = View {
    title: "Throughput, GB/s",
    figures: &[Figure::Throughput],
};

const SWEEP_PROCESSOR: View = View {
    title: "Processor seconds per GB: both sides / sender / receiver",
    figures: &[Figure::Processor, Figure::ProcessorSender, Figure::ProcessorReceiver],
};

const SWEEP: [View; 3] = [
    SWEEP_THROUGHPUT,
    SWEEP_PROCESSOR,
    View {
        title: "Round trip, µs: p50 / p99 / p99.9",
        figures: &[Figure::TripP50, Figure::TripP99, Figure::TripP999],
    },
];

const THRESHOLD: [View; 3] = [
    SWEEP_THROUGHPUT,
    SWEEP_PROCESSOR,
    View {
        title: "Bytes that went past the mirror or the ring, %",
        figures: &[Figure::Direct],
    },
];

const MESSAGES: View = View {
    title: "Messages a second",
    figures: &[Figure::Messages],
};
const MESSAGE_TIME: View = View {
    title: "Time of a message there and back, µs: p50 / p99",
    figures: &[Figure::MessageP50, Figure::MessageP99],
};
const BULK: [View; 3] = [MESSAGES, MESSAGE_TIME, SWEEP_THROUGHPUT];
const SLEEPS: [View; 3] = [
    View {
        title: "Sleeps of the server's threads a message, the library's own included",
        figures: &[Figure::Sleeps],
    },
    MESSAGES,
    MESSAGE_TIME,
];
const SCALE: [View; 5] = [
    MESSAGES,
    MESSAGE_TIME,
    View {
        title: "Processor µs a message: all processes / server",
        figures: &[Figure::MessageProcessor, Figure::MessageProcessorServer],
    },
    View {
        title: "Memory of the server, MiB: resident / of it shared",
        figures: &[Figure::Resident, Figure::Shared],
    },
    View {
        title: "Descriptors of the server",
        figures: &[Figure::Descriptors],
    },
];

const ENGINE: [View; 2] = [
    View {
        title: "Round trip, µs: p50 / p99 / p99.9",
        figures: &[Figure::TripP50, Figure::TripP99, Figure::TripP999],
    },
    View {
        title: "Messages a second, one way",
        figures: &[Figure::Messages],
    },
];
const QUEUE_PAIRS: [View; 4] = [
    SWEEP_THROUGHPUT,
    View {
        title: "Processor seconds per GB",
        figures: &[Figure::Processor],
    },
    View {
        title: "Resident memory of both ends, MiB",
        figures: &[Figure::Resident],
    },
    View {
        title: "Descriptors of both ends",
        figures: &[Figure::Descriptors],
    },
];

/// A ratio below this is a loss. A ratio between it and 1 is shown as 1.00.
const LOSS: f64 = 0.995;

/// Writes the page and its pictures.
///
/// # Errors
/// If reading or writing fails.
pub fn run(options: &Options) -> Result<()> {
    let parts = options.from.iter().map(|path| Results::read(path));
    let parts = parts.collect::<Result<Vec<_>>>()?;
    let dir = options.into.join("benchmarks");
    std::fs::create_dir_all(&dir).with_context(|| dir.display().to_string())?;
    for results in &parts {
        for picture in pictures::of(results) {
            picture.draw(results, &dir)?;
        }
    }
    let path = options.into.join("benchmarks.md");
    std::fs::write(&path, text(&parts)).with_context(|| path.display().to_string())
}

/// Prints the tables of a run and its losing cases, and writes its samples.
///
/// # Errors
/// If writing fails, or measurements were refused or failed.
pub fn publish(results: &Results, series: &[Series], json: Option<&Path>) -> Result<()> {
    let mut out = String::new();
    for series in series {
        tables(&mut out, results, *series);
    }
    if series == [Series::Threshold] {
        let _ = write!(out, "\n{}", threshold::findings(results));
    } else if series != Series::MODELS {
        out += "\nWorse than kernel TCP:\n\n";
        losses(&mut out, &[results], Way::Tcp);
    }
    println!("{out}");
    if let Some(path) = json {
        results.write(path)?;
    }
    if !results.refused.is_empty() {
        bail!(
            "{} measurements do not count:\n  {}",
            results.refused.len(),
            results.refused.join("\n  ")
        );
    }
    Ok(())
}

/// Returns the text of the whole page.
fn text(parts: &[Results]) -> String {
    let mut out = String::from(HEAD);
    for results in parts {
        let _ = writeln!(out, "- {}", run_in_words(results));
    }
    let refs: Vec<&Results> = parts.iter().collect();
    out += "\n## Where the library loses\n\nRatios below 1 to kernel TCP of the same run, all of them:\n\n";
    losses(&mut out, &refs, Way::Tcp);
    out += "\nAnd to the Unix socket, which programs have to be written for:\n\n";
    losses(&mut out, &refs, Way::Unix);
    for group in [&TRANSFERS, &CONNECTIONS, &CLIENTS, &AMONG, &BESIDE, &SLEEPERS] {
        let has = |results: &&Results| group.series.iter().any(|series| !results.values(*series).is_empty());
        let Some(results) = parts.iter().find(has) else {
            continue;
        };
        let _ = write!(out, "\n## {}\n\n{}\n", group.title, group.about);
        for series in group.series {
            if group.series.len() > 1 {
                let _ = write!(out, "\n### {}\n", series.title());
            }
            let of_series = pictures::of(results)
                .into_iter()
                .filter(|picture| picture.series == *series);
            for picture in of_series {
                let _ = write!(out, "\n![{}](benchmarks/{})\n", picture.title(), picture.file());
            }
            tables(&mut out, results, *series);
        }
    }
    let refused: Vec<&String> = parts.iter().flat_map(|results| &results.refused).collect();
    if !refused.is_empty() {
        out += "\n## What does not count\n\nMeasurements that failed, or whose connections were not where they should be:\n\n";
        for line in refused {
            let _ = writeln!(out, "- {}", line.lines().next().unwrap_or_default());
        }
    }
    out
}

const HEAD: &str = "\
# Benchmarks

Made by `scripts/bench`, which measures and writes this page and its pictures anew. [performance.md](performance.md) has
the figures on which the design rests, and the other benchmarks.

How to read it:

- **Ratios count, absolute numbers do not.** `×2.0` is twice as good as kernel TCP in the same run, whichever direction is
  better, and `×0.5` half as good. The ways take turns within each round, so that what else the machine does meets all of them.
- Figures are medians of the rounds; a ratio is that of the medians.
- All programs run on one host. `scripts/bench-lab` measures between two. `bench threshold` and `bench device` print figures
  of links between hosts on a model of a device (`core/localnic`), which say nothing about a wire.
- A measurement counts if its connections were on the path that they are listed under, from its beginning to its end, by
  what `rdmasock stat` says; others are refused.

The runs:

";

/// Returns a line on the machine and the extent of a run.
fn run_in_words(results: &Results) -> String {
    let machine = &results.machine;
    let what = match results.points.first().map(|point| point.series) {
        Some(series) if Series::CROWDS.contains(&series) => "`bench scale`",
        _ => "`bench sweep`",
    };
    let rounds = match results.rounds {
        1 => "one round".to_owned(),
        number => format!("{number} rounds"),
    };
    let quick = match results.is_quick {
        true => ", a short run (`--quick`), so its noise is large",
        false => "",
    };
    format!(
        "{what}: {rounds}{quick}. A {} with {} cores, x86-64, Linux {};\n  before it began {:.1} threads of other programs \
         wanted to run, on average of a minute.",
        if machine.is_virtual {
            "virtual machine"
        } else {
            "machine"
        },
        machine.cores,
        machine.kernel,
        machine.load
    )
}

/// A part of the page.
struct Group {
    title: &'static str,
    about: &'static str,
    series: &'static [Series],
}

const TRANSFERS: Group = Group {
    title: "Transfers of growing size",
    about: "\
One connection, one direction. The sender blocks in send with a whole transfer, the receiver has a buffer of that size. The
clock stops when the sender has heard that all has arrived. Processor time is that of both processes, what the kernel does
for them and the library's second thread included. In a round trip one transfer goes there and comes back.",
    series: &Series::RECEIVERS,
};

const CONNECTIONS: Group = Group {
    title: "Connections between two processes",
    about: "\
A server echoes 64 B in one thread with epoll, and one client process keeps 32 messages in flight: it sends the next on the
next connection in turn. Memory is the process's own: what the kernel keeps for sockets is not in it.",
    series: &[Series::Connections],
};

const CLIENTS: Group = Group {
    title: "Client processes of one server",
    about: "\
The same server with a connection from each client process. Up to 32 processes have 32 messages in flight together, as far
as that can be divided; more have one each. Each client has a link of its own to the server. With many more processes than
cores it is mostly the scheduler that is measured.",
    series: &[Series::Clients],
};

const AMONG: Group = Group {
    title: "One client process of many that sends",
    about: "\
The same server and clients, of which one sends a message at a time, and the others nothing: what it costs to wait for many.",
    series: &[Series::Among],
};

const BESIDE: Group = Group {
    title: "Small messages beside bulk",
    about: "\
The same two processes with one connection of one 64 B message at a time, and beside it more and more that send pieces of 64
KiB to the server without a pause, each by a thread at either end. With more threads than cores it is partly the scheduler
that is measured, on kernel TCP as well. Throughput is that of all bulk streams together.",
    series: &[Series::Beside],
};

const SLEEPERS: Group = Group {
    title: "Threads of a server that sleep in recv",
    about: "\
A server with a thread for each connection, which blocks in recv, and a client process that sends 64 B at a time, on the next
connection in turn: who is woken by a message that is for one of many. One sleep a message is the least where each is for
another thread.",
    series: &[Series::Sleepers],
};

/// Adds the tables of a series to `out`.
fn tables(out: &mut String, results: &Results, series: Series) {
    let (values, ways) = (results.values(series), results.ways(series));
    let views: &[View] = match series {
        Series::Recv | Series::Waitall | Series::Epoll => &SWEEP,
        Series::Threshold => &THRESHOLD,
        Series::Connections | Series::Clients | Series::Among => &SCALE,
        Series::Beside => &BULK,
        Series::Sleepers => &SLEEPS,
        Series::Engine => &ENGINE,
        Series::QueuePairs => &QUEUE_PAIRS,
        Series::Threads => &[MESSAGES],
    };
    for view in views {
        let Some(first) = view.figures.first() else { continue };
        let has = |x: &u64| {
            ways.iter()
                .any(|way| results.median(series, *x, *way, *first).is_some())
        };
        let rows: Vec<u64> = values.iter().copied().filter(has).collect();
        if rows.is_empty() {
            continue;
        }
        let _ = write!(out, "\n{} ({}):\n\n| {} |", view.title, series.word(), series.varied());
        for way in &ways {
            let _ = write!(out, " {} |", way.title());
        }
        let _ = write!(out, "\n|--:|{}\n", "--:|".repeat(ways.len()));
        for x in rows {
            let _ = write!(out, "| {} |", series.value(x));
            for way in &ways {
                let _ = write!(out, " {} |", cell(results, series, x, *way, view));
            }
            out.push('\n');
        }
    }
}

fn cell(results: &Results, series: Series, x: u64, way: Way, view: &View) -> String {
    let figures = view.figures.iter();
    let medians: Option<Vec<String>> = figures
        .map(|figure| results.median(series, x, way, *figure).map(number))
        .collect();
    let Some(medians) = medians else {
        return "–".to_owned();
    };
    let mut cell = medians.join(" / ");
    let times = view
        .figures
        .first()
        .filter(|figure| **figure != Figure::Direct)
        .and_then(|figure| results.times(series, x, way, *figure, series.compared_with()));
    if let (Some(times), false) = (times, way == series.compared_with()) {
        let _ = write!(cell, " ×{}", ratio(times));
    }
    cell
}

/// Returns a number with three digits, which are more than is repeatable.
fn number(value: f64) -> String {
    match value {
        0.0 => "0".to_owned(),
        100.0.. => format!("{value:.0}"),
        10.0.. => format!("{value:.1}"),
        1.0.. => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

fn ratio(times: f64) -> String {
    match times {
        10.0.. => format!("{times:.0}"),
        1.0.. => format!("{times:.1}"),
        _ => format!("{times:.2}"),
    }
}

/// Adds each figure in which the library is worse than `base`, with the cases.
fn losses(out: &mut String, parts: &[&Results], base: Way) {
    let figures: Vec<Figure> = SWEEP
        .iter()
        .chain(&SCALE)
        .flat_map(|view| view.figures)
        .copied()
        .chain([Figure::Sleeps])
        .collect();
    let mut is_any = false;
    for results in parts {
        for way in Way::ALL.into_iter().filter(|way| way.has_library()) {
            for series in Series::RECEIVERS.into_iter().chain(Series::CROWDS) {
                for &figure in &figures {
                    let lost = |x: u64| {
                        let times = results.times(series, x, way, figure, base)?;
                        (times < LOSS).then(|| format!("{} ×{}", series.value(x), ratio(times)))
                    };
                    let cases: Vec<String> = results.values(series).into_iter().filter_map(lost).collect();
                    if cases.is_empty() {
                        continue;
                    }
                    if !is_any {
                        *out += "| way | | figure | cases |\n|---|---|---|---|\n";
                        is_any = true;
                    }
                    let (way, word, title) = (way.title(), series.word(), figure.title());
                    let _ = writeln!(out, "| {way} | {word} | {title} | {} |", cases.join(", "));
                }
            }
        }
    }
    if !is_any {
        let _ = writeln!(out, "None than {}.", base.title());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::Machine;

    fn results() -> Results {
        let mut results = Results {
            machine: Machine {
                cores: 2,
                kernel: "6.1.0".to_owned(),
                is_virtual: false,
                load: 0.5,
            },
            rounds: 3,
            is_quick: true,
            refused: vec!["kernel TCP, recv, 64 B: it ended".to_owned()],
            ..Results::default()
        };
        let ways = [(Way::Tcp, 2.0), (Way::Unix, 1.0), (Way::Shm, 4.0), (Way::Device, 1.5)];
        for (way, value) in ways {
            results.add(Series::Recv, 1024, way, &[(Figure::Throughput, value)]);
        }
        results
    }

    #[test]
    fn the_page_names_losing_cases_and_what_was_refused() {
        let page = text(&[results()]);
        for line in [
            "| 1 KiB | 2.00 | 1.00 ×0.50 | 4.00 ×2.0 | 1.50 ×0.75 |",
            "| library, local device (a model) | recv | throughput, GB/s | 1 KiB ×0.75 |",
            "None than Unix socket.",
            "- kernel TCP, recv, 64 B: it ended",
            "- `bench sweep`: 3 rounds, a short run (`--quick`), so its noise is large. A machine with 2 cores",
            "(benchmarks/throughput-recv.svg)",
        ] {
            assert!(page.contains(line), "{line} is not in\n{page}");
        }
    }

    #[test]
    fn what_was_not_measured_has_no_table() {
        let page = text(&[results()]);
        for words in ["p99.9 (recv)", "(epoll)", "Messages a second", "processor-recv.svg"] {
            assert!(!page.contains(words), "{words}");
        }
    }
}
