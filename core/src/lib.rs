//! placeholder
pub mod stats;
