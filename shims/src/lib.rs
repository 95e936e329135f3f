//! placeholder
pub mod config;
pub mod rules;
