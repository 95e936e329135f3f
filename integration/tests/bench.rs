//! Checks that `bench sweep` and `bench device` run, and that the connections of `bench sweep` are on the path that it
//! says. Their figures are not checked.
#![allow(clippy::unwrap_used)]

use std::process::Command;

use serde_json::Value;

/// Runs a part of bench with the arguments in `words`, and returns its points.
fn measured(words: &str) -> Vec<Value> {
    let dir = tempfile::tempdir().unwrap();
    let json = dir.path().join("results.json");
    let output = Command::new(env!("CARGO_BIN_EXE_bench"))
        .args(words.split(' '))
        .arg("--json")
        .arg(&json)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let results: Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
    results["points"].as_array().unwrap().clone()
}

#[test]
fn a_short_sweep_has_all_that_was_asked_for() {
    // The local device is left out, as it is not beside the released library.
    let points = measured("sweep --rounds 1 --sizes 64,65536 --bytes 1M --ways tcp,unix,shm --receivers recv");
    assert_eq!(points.len(), 6);
    for point in points {
        for figure in ["throughput", "processor", "trip_p50", "trip_p99", "trip_p999"] {
            assert_eq!(point["samples"][figure].as_array().unwrap().len(), 1, "{point}");
        }
    }
}

#[test]
fn a_short_run_on_bare_queue_pairs_and_links_has_all_that_was_asked_for() {
    let points = measured("device --quick --messages 8 --connections 1,30 --threads 2");
    // Two ways have one size and one number of threads; three ways have two numbers of connections.
    assert_eq!(points.len(), 2 + 2 + 6);
    for point in points {
        for (figure, values) in point["samples"].as_object().unwrap() {
            assert!(values[0].as_f64().unwrap() > 0.0, "{figure}: {point}");
        }
    }
}
