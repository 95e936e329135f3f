//! Links between hosts: each end keeps a local picture of the peer's arena, and an engine carries what
//! changes over a queue pair.

pub mod qp;
