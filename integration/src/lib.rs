//! Shared helpers of the programs that run unmodified software with and without the library:
//! the demonstration (`demo`), the benchmark (`bench`) and the test matrix (`tests/programs/main.rs`).
//! Nothing here is ever loaded into the programs under test.

pub mod filter;
pub mod lab;
pub mod loads;
pub mod picture;
pub mod ports;
pub mod proc;
pub mod rounds;
pub mod servers;
pub mod signals;
pub mod stat;
pub mod table;

/// Returns the exit status of `main`. An error goes to standard error in one line, without a backtrace.
pub fn exit(result: anyhow::Result<()>) -> std::process::ExitCode {
    match result {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            std::process::ExitCode::FAILURE
        }
    }
}

/// Returns the middle value of `samples`, or the mean of the two middle ones for an even count. Returns 0 if `samples`
/// is empty.
pub fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let mid = sorted.len() / 2;
    match (sorted.len() % 2, sorted.get(mid)) {
        (_, None) => 0.0,
        (1, Some(value)) => *value,
        (_, Some(upper)) => (sorted.get(mid.wrapping_sub(1)).unwrap_or(upper) + upper) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn median_is_the_middle() {
        assert_eq!(median(&[]), 0.0);
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
    }
}
