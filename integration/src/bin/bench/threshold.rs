//! `bench threshold`: what a link between hosts takes for bytes that are copied into rings and out of them, for bytes
//! that the device moves between the programs' memory, and for those that the reader's device reads there, by the size
//! of a transfer, and where the first two cross; and whether what the library chooses is as good as the best of them.
//! Over the local device; the ends are `sweep`'s.

use std::fmt::Write;

use anyhow::Result;
use clap::Args;

use crate::page;
use crate::results::{Figure, Results, Series, Way, parse_size};
use crate::sweep::{self, Extent, Plan};

#[derive(Debug, Args)]
pub struct Options {
    #[command(flatten)]
    extent: Extent,
    /// Bytes of a transfer, with suffix K, M or G.
    #[arg(long, value_delimiter = ',', value_parser = parse_size,
        default_value = "8K,16K,32K,64K,128K,256K,512K,1M,4M,16M,64M")]
    sizes: Vec<u64>,
}

/// Measures, prints and writes.
///
/// # Errors
/// When something is not built, or measurements were refused or failed.
pub fn run(options: &Options) -> Result<()> {
    let plan = Plan {
        receivers: &[Series::Threshold],
        sizes: &options.sizes,
        ways: &Way::DEVICE,
    };
    let results = sweep::rounds(&options.extent, &plan)?;
    page::publish(&results, &[Series::Threshold], options.extent.repeats.json.as_deref())
}

/// What to ask of the choice: of the throughput of the best fixed way at least so much, and of the processor time of
/// the one that takes less at most so much.
const THROUGHPUT: f64 = 0.95;
const PROCESSOR: f64 = 1.05;

/// Where the first two ways cross, and how the choice compares with the best one, in words.
pub fn findings(results: &Results) -> String {
    let mut out = String::new();
    for (figure, words) in [
        (Figure::Throughput, "faster"),
        (Figure::Processor, "less processor time"),
    ] {
        let line = match crossing(results, figure) {
            Some(x) => format!("- Directly: {words} from {} on.", Series::Threshold.value(x)),
            None => format!("- Directly: {words} at no size from which on that holds."),
        };
        let _ = writeln!(out, "{line}");
        let worse = worse_than_best(results, figure);
        let line = match worse.is_empty() {
            true => "- Dynamic: as good as the best of the others at every size".to_owned(),
            false => format!(
                "- Dynamic: not as good as the best of the others at {}",
                worse.join(", ")
            ),
        };
        let _ = writeln!(out, "{line} ({}).", figure.title());
    }
    out
}

/// The size from which on the direct way is better at each.
fn crossing(results: &Results, figure: Figure) -> Option<u64> {
    let better = |x: &u64| {
        let times = results.times(Series::Threshold, *x, Way::DeviceDirect, figure, Way::Device);
        times.is_some_and(|times| times > 1.0)
    };
    let values = results.values(Series::Threshold);
    values.iter().rev().take_while(|x| better(x)).last().copied()
}

fn worse_than_best(results: &Results, figure: Figure) -> Vec<String> {
    let least = match figure {
        Figure::Throughput => THROUGHPUT,
        _ => 1.0 / PROCESSOR,
    };
    let of = |x: u64| {
        let times = |base| results.times(Series::Threshold, x, Way::DeviceDynamic, figure, base);
        // A run may be of some of them only.
        let fixed = [Way::Device, Way::DeviceDirect, Way::DeviceLent]
            .into_iter()
            .filter_map(times);
        let times = fixed.reduce(f64::min)?;
        (times < least).then(|| format!("{} ×{times:.2}", Series::Threshold.value(x)))
    };
    results.values(Series::Threshold).into_iter().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_crossing_is_where_the_direct_way_stays_better() {
        let mut results = Results::default();
        let sizes = [
            (8, 2.0, 1.0),
            (16, 2.0, 3.0),
            (32, 2.0, 1.5),
            (64, 2.0, 4.0),
            (128, 2.0, 5.0),
        ];
        for (x, eager, direct) in sizes {
            for (way, value) in [
                (Way::Device, eager),
                (Way::DeviceDirect, direct),
                (Way::DeviceDynamic, 2.0),
            ] {
                results.add(Series::Threshold, x, way, &[(Figure::Throughput, value)]);
            }
        }
        assert_eq!(crossing(&results, Figure::Throughput), Some(64));
        assert_eq!(crossing(&results, Figure::Processor), None);
        let findings = findings(&results);
        assert!(findings.contains("faster from 64 B on"), "{findings}");
        assert!(
            findings.contains("at 16 B ×0.67, 64 B ×0.50, 128 B ×0.40 (throughput"),
            "{findings}"
        );
    }
}
