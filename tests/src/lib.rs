//! Differential POSIX tests: scenarios that two processes play over TCP, and the harness that
//! plays them on kernel TCP and with the library preloaded, and compares the transcripts.
//!
//! Not here: tests of one crate's parts (they live beside their crate) and of real programs
//! (package `rdmasock-integration`).
// This package only runs as a test; a failed expectation should end the process loudly.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
// `call!` exists to make one libc call with the arguments as written.
#![allow(clippy::macro_metavars_in_unsafe)]

#[macro_use]
pub mod sys;
pub mod addr;
pub mod conformance;
pub mod ctx;
pub mod cuts;
pub mod data;
pub mod dialogue;
pub mod environment;
pub mod filters;
pub mod guest;
pub mod harness;
pub mod hostile;
pub mod observe;
pub mod pair;
pub mod remote;
pub mod scenarios;
pub mod stall;
pub mod standin;
pub mod storm;
