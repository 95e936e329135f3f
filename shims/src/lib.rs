//! POSIX socket semantics over the streams of `core`: the functions that the hooks in `preload/` call.
//!
//! The folders are the layers. A folder imports from the folders below it (`tests/tests/imports.rs` checks that):
//!
//! ```text
//! hooks   api      one function for each hooked call; one for each function of include/rdmasock.h
//! startup          makes the instance, says what a new descriptor becomes, keeps to a seccomp filter
//! service          the second thread: asks and answers for promotions, makes links, watches them
//! process          close, exit, exec, sigaction: what ends a connection or hands it over
//! polling          poll, select, epoll_wait: what is ready now
//! data             send and receive, and what a connection asks of its socket
//! notify           wake-ups, epoll sets, the table of descriptors, waits, fork
//! objects          the instance, its mailbox, links, listeners, sockets, holders
//! signals          signal handlers, cancellation, jumps, the end of the main thread
//! config           environment variables, rules, log, devices
//! sys              errno, libc's functions, time, socket options, test points
//! ```
//!
//! If a layer has to call code of a layer above, that layer gives it a function pointer, once. There are three such
//! functions: for the start of the service thread (`objects::mailbox`), the making of an instance in a fork child
//! (`objects::library`), and the end of a connection (`notify::call::Told`).

#![warn(missing_docs, unreachable_pub)]

pub mod api;
pub mod config;
mod data;
pub mod hooks;
mod notify;
mod objects;
mod polling;
pub mod process;
mod service;
pub mod signals;
mod startup;
pub mod sys;
