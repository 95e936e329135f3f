//! POSIX socket semantics over the engine: what the hooks in `preload/` call.

pub mod calls;
pub mod config;
pub mod epoll;
pub mod errno;
pub mod fork;
pub mod iov;
pub mod library;
pub mod lifecycle;
pub mod link;
pub mod listener;
pub mod log;
pub mod pass;
pub mod poll;
pub mod promote;
pub mod reach;
pub mod ready;
pub mod real;
pub mod rules;
pub mod rx;
pub mod service;
pub mod socket;
pub mod table;
pub mod time;
pub mod tx;
pub mod wait;
