//! placeholder
pub mod config;
pub mod log;
pub mod rules;
