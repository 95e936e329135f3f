//! `bench threshold`: the cost of bytes on a link between hosts, by the size of a transfer and the way of the bytes.
//! The ways are copies through rings, writes by the device between the programs' memory, and reads by the reader's
//! device. The findings are the sizes where the first two ways cross, and whether the library's choice is as good as
//! the best way. The bench uses the local device, and `sweep` has the two ends.

use std::fmt::Write;

use anyhow::Result;
use clap::Args;

use crate::results::{Figure, Results, Series, Way, parse_size};
use crate::sweep::{Extent, Plan};
use crate::{page, sweep};

#[derive(Debug, Args)]
pub struct Options {
    #[command(flatten)]
    extent: Extent,
    /// Bytes of a transfer, with suffix K, M or G.
    #[arg(long, value_delimiter = ',', value_parser = parse_size,
        default_value = "8K,16K,32K,64K,128K,256K,512K,1M,4M,16M,64M")]
    sizes: Vec<u64>,
}

/// Measures the sizes, prints the tables and writes the samples.
///
/// # Errors
/// If something is not built, or measurements were refused or failed.
pub fn run(options: &Options) -> Result<()> {
    let plan = Plan {
        receivers: &[Series::Threshold],
        sizes: &options.sizes,
        ways: &Way::DEVICE,
    };
    let results = sweep::rounds(&options.extent, &plan)?;
    page::publish(&results, &[Series::Threshold], options.extent.repeats.json.as_deref())
}

/// The goals of the library's choice. Its throughput is at least `THROUGHPUT` times the best fixed way's. Its processor
/// time is at most `PROCESSOR` times the cheapest fixed way's.
const THROUGHPUT: f64 = 0.95;
const PROCESSOR: f64 = 1.05;

/// Returns in words where the first two ways cross, and how the choice compares with the best way.
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

/// Returns the size from which on the direct way is better at each size. Returns `None` if it is not better at the
/// largest.
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
        // A run may have some of the fixed ways only.
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
