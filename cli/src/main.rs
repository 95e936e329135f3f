//! The `rdmasock` command.
fn main() {}
