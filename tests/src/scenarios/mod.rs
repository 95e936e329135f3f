//! The scenarios, by theme, and the table of them. A scenario is one function that both sides
//! run. It uses libc calls only, and logs only results that must not depend on the path of the bytes.

mod calls;
mod capacity;
mod close;
mod connect;
mod direct;
mod direct_alloc;
mod direct_ends;
mod direct_memory;
mod direct_more;
mod direct_send;
mod echo;
mod ends;
pub mod epoll;
mod epoll_more;
mod fds;
mod files;
mod flags;
mod handed;
pub mod helper;
mod herd;
mod identity;
mod lent;
mod migrate;
mod numbers;
mod numbers_more;
mod options;
mod order;
mod peers;
mod peers_quiet;
mod poll;
mod process;
mod refused;
mod signals;
mod threads;
mod timing;
mod told;
mod told_options;
mod twins;
mod unseen;
mod urgent;
mod wakes;
mod zerocopy;
mod zerocopy_more;

use crate::ctx::{Ctx, Side};
use crate::harness::Mode;

/// An entry of the table.
#[derive(Clone)]
pub struct Scenario {
    /// The scenario's name; `base/n` where a family of scenarios differs by a number.
    pub name: String,
    /// The function that each side runs.
    pub run: fn(&Ctx),
    /// The number in the name, or 0.
    pub param: u32,
    /// Whether the scenario warms a connection up; then mode `both` demands that it is promoted.
    pub warms_up: bool,
    /// Variables for the sides that have the library.
    pub env: Vec<(&'static str, String)>,
    /// Further words for the local device, beside the mode's (`LOCALNIC`).
    pub device: &'static str,
    /// The side whose threads are held up, and the point where (see `tests/wakes.rs`).
    pub held: Option<(Side, String)>,
    /// The modes in which it runs.
    pub modes: &'static [Mode],
    /// Whether it makes network namespaces. Then it fails unless root plays it.
    pub for_root: bool,
}

impl Scenario {
    fn new(name: &str, run: fn(&Ctx), warms_up: bool) -> Self {
        Self {
            name: name.into(),
            run,
            param: 0,
            warms_up,
            env: Vec::new(),
            device: "",
            held: None,
            modes: &Mode::ALL,
            for_root: false,
        }
    }

    fn numbered(base: &str, param: u32, run: fn(&Ctx), warms_up: bool) -> Self {
        Self {
            param,
            modes: &[Mode::Kernel, Mode::Both],
            ..Self::new(&format!("{base}/{param:02}"), run, warms_up)
        }
    }

    fn with_env(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.env.push((name, value.into()));
        self
    }
}

/// `table![module: warm { a, b } cold { c }]`: scenarios named `module_a`, …; the `cold` ones
/// do not warm up a connection.
macro_rules! table {
    ($($module:ident: warm { $($warm:ident),* $(,)? } cold { $($cold:ident),* $(,)? })*) => {
        vec![$(
            $(Scenario::new(
                concat!(stringify!($module), "_", stringify!($warm)), $module::$warm, true),)*
            $(Scenario::new(
                concat!(stringify!($module), "_", stringify!($cold)), $module::$cold, false),)*
        )*]
    };
}

/// Every scenario.
pub fn all() -> Vec<Scenario> {
    let mut all = table![
        echo: warm { basic, sizes, one_byte_writes, large_to_server, large_to_client, large_both_ways, ipv6, mapped_server, mapped_client, stdio } cold { short, answers_without_waiting, large_answers, own_process, connected_to_itself, unix_untouched, udp_untouched, thousand_connections, many_short, reuseport }
        calls: warm { send_forms, recv_forms, recvmmsg, by_handle, by_another_libc, fortified, zero_length, bad_addresses, wild_lengths, vectors } cold { bad_fds, not_sockets }
        flags: warm { peek, peek_end, peek_large, waitall, waitall_cut, waitall_nonblocking, trunc, dontwait, more, held_back, oob, oobinline, oob_meanwhile, oob_meanwhile_vectors, oob_meanwhile_sendfile, fionread, siocoutq, rcvlowat, rcvlowat_after_end, peek_offset, odd } cold { waitall_pieces, rcvlowat_of_listener }
        close: warm { half_by_client, half_by_server, shutdown_read, shutdown_both, shutdown_in_parts, shutdown_again, unread_data, unread_data_so_error, reset_keeps_received, linger_zero, linger_wait, sigpipe, send_after_close, sigpipe_kills, sent_before_close, leave_by_return, leave_by_exit, leave_by_immediate_exit, leave_by_exec, killed_at_rest, killed_with_unread_data, killed_sending, killed_receiving, killed_while_peer_waits, close_order } cold { read_shut_early, shut_on_the_way }
        connect: warm { fast_open, fast_open_later, names, disconnect, listener_closed, accepted_late } cold { refused, refused_nonblocking, nonblocking, full_backlog, errors, accept_flags, reset_before_accept, closed_before_accept }
        options: warm { matrix, errors, null_value, identity, tcp_info, strings, fcntl, signal, unsent_low_water } cold { signal_before }
        timing: warm { rcvtimeo, sndtimeo, nonblock_shared, set_by_child, woken, full, full_epoll, blocked_send, blocked_send_reset, poll_timeout, early_and_late } cold {  }
        signals: warm { eintr, restart, partial, handler_writes, handler_storm, masks } cold {  }
        epoll: warm { level, edge, edge_mod, oneshot, exclusive, data_kept, control, closed_is_removed, dup_keeps_registration, fairness, hangups, edge_across_demotion } cold { blocking_reads, short_reads, counted_reads, oneshot_threads }
        epoll_more: warm { nested, mixed, in_turns, two_epolls, two_epolls_at_once, two_sleepers, registered_before, pwait2, added_while_waiting, shared_with_child, unwritable } cold { loop_level, loop_edge }
        order: warm { of_arrival, young_first, none_alone, listed_once, in_promotions } cold { end_first }
        direct: warm { sizes, vectors, whole, behind_heads, time_outs, late_time_outs } cold {  }
        direct_ends: warm { on_tcp, on_tcp_lent } cold {  }
        direct_send: warm { times_out, interrupted, to_a_stopped_reader, both_first } cold {  }
        direct_memory: warm { same_place, heap, same_place_lent, heap_lent } cold {  }
        direct_more: warm { interrupted, interrupted_often, cancel, two_readers, others_look, others_peek, unmapped, forks } cold {  }
        lent: warm { sizes, vectors, times_out, interrupted, to_a_stopped_reader, both_first, forks } cold {  }
        peers: warm {  } cold { in_one_set }
        peers_quiet: warm {  } cold { one_speaks, two_sets }
        poll: warm { odd_fds, masks, ppoll, select, select_errors, select_all, high_fd, two_connections, as_many_as_the_limit } cold { listener }
        fds: warm { dups, dup2_over, dup2_swap, numbering, limit, close_everything, close_range, close_range_under_use, reuse } cold { closed_at_the_limit }
        handed: warm {  } cold { forked, forked_by_the_client, forked_and_kept, passed }
        herd: warm {  } cold { receive, poll, epoll, under_handlers }
        identity: warm {  } cold { receivers, senders, waiters, files, sets, churn }
        files: warm { sendfile, sendfile_nonblocking, splice, splice_errors } cold {  }
        urgent: warm { behind_unread, twice } cold {  }
        capacity: warm { at_once, set_sizes, size_changes, both_ways, announced, left_behind, no_memory } cold {  }
        numbers: warm { bytes_out, bytes_in, waits, sets } cold {  }
        numbers_more: warm { sockets, descriptors, closed_number, in_handler, exec, exit } cold {  }
        refused: warm { fork_before, fork_on_a_link } cold {  }
        process: warm { cloned_accepts, fork_child_then_parent, fork_child_has_no_arena, fork_child_closes, fork_parent_closes, fork_client, fork_with_unread_data, child_of_a_stopped_parent, child_of_a_replaced_parent, fork_both_write, fork_exec, exec_itself, exec_fails, spawn, spawn_as_stdin, spawn_as_stdin_unread, vfork_as_stdin, vfork_as_stdin_unread, system, pass_to_child, pass_to_itself } cold { child_of_a_killed_parent, grandchild, prefork, fork_per_connection, fork_per_connection_crowd, fork_without_descriptors, cloned_changes_user, pass_fresh }
        threads: warm { send_and_receive, eight_senders, four_receivers, shutdown_wakes, shutdown_wakes_pollers, close_does_not_wake, cancel, cancel_early, cancel_sender_early, cancel_pollers } cold { eight_on_one_epoll, four_acceptors }
        told: warm { counts_across_a_promotion, unread_and_half_closed, time_of_the_last, counts_across_a_demotion, counts_in_a_child, peer_killed, lengths } cold {  }
        told_options: warm { kept, how_much_is_left, how_much_is_left_by_listener, timestamps, pacing, repair, zero_copy_receive, keepalive_of_a_frozen_peer, user_timeout } cold { keepalive_of_a_host_that_is_gone, nodelay_while_promoted, nodelay_at_a_promotion }
        twins: warm {  } cold { of_one_process_each, of_one_process_each_apart, of_two_clients, of_two_servers, on_interfaces, on_interfaces_of_two_servers }
        zerocopy: warm { completions, control, ipv6, mapped, recvmmsg, readiness, woken, forms, dup, threads, both_ways } cold {  }
        zerocopy_more: warm { accepted, reset, timestamps, forked } cold {  }
        wakes: warm { oneshot_over, data_taken, room_taken, set_changed } cold { poll, select, receive, epoll, edge, oneshot, added, two_sets, nested, polled_set, two_waiters, two_receivers, crowd, shared_set, forked, filled_at_once, replaced, successor }
    ];
    all.push(
        Scenario::new("process_fork_changes_user", process::fork_changes_user, false)
            .with_env("RDMASOCK_LOG", "info")
            .with_env("RDMASOCK_LOG_FILE", "{dir}/log"),
    );
    let past_the_rings = |scenario: Scenario| {
        scenario
            .with_env("RDMASOCK_ZCOPY_MIN", "4K")
            .with_env("RDMASOCK_DEV_WAY", "eager")
    };
    all.push(past_the_rings(Scenario::new(
        "herd_busy_sender",
        herd::busy_sender,
        true,
    )));
    let rests = Scenario::new("herd_busy_sender_rests", herd::busy_sender_rests, true);
    all.push(past_the_rings(rests));
    let slow = Scenario::new("lent_goes_back", lent::goes_back, true)
        .with_env("RDMASOCK_ZCOPY_MIN", "16K")
        .with_env("RDMASOCK_DEV_WAY", "get");
    all.push(Scenario {
        device: "delay=4000",
        ..slow
    });
    migrate::add_to(&mut all);
    urgent::add_to(&mut all);
    ends::add_to(&mut all);
    zerocopy_more::add_to(&mut all);
    direct_ends::add_to(&mut all);
    lent::add_to(&mut all);
    direct_alloc::add_to(&mut all);
    let is_past_the_rings = |s: &&mut Scenario| s.name.starts_with("direct_") || s.name.starts_with("lent_");
    for scenario in all.iter_mut().filter(is_past_the_rings) {
        scenario.modes = &[Mode::Kernel, Mode::Both];
        scenario.env.push(("RDMASOCK_ZCOPY_MIN", "4K".into()));
    }
    let changes_memory = |name: &str| name.starts_with("direct_memory_") || name == "direct_more_unmapped";
    for scenario in all.iter_mut().filter(|s| changes_memory(&s.name)) {
        scenario.device = "pins";
    }
    for scenario in all
        .iter_mut()
        .filter(|s| s.name == "connect_fast_open_later" || s.name == "order_in_promotions")
    {
        scenario.env.push(("RDMASOCK_PROMOTE_AFTER", "0".into()));
    }
    let makes_namespaces =
        |name: &str| name.starts_with("twins_") || name == "told_options_keepalive_of_a_host_that_is_gone";
    for scenario in all.iter_mut().filter(|s| makes_namespaces(&s.name)) {
        scenario.for_root = true;
    }
    let into: Vec<_> = all.iter().flat_map(lent_into).collect();
    all.extend(into);
    all.extend((0..unseen::WAYS).map(|n| Scenario::numbered("unseen_close", n, unseen::close, false)));
    all.extend((0..unseen::READINESS).map(|n| Scenario {
        modes: &[Mode::Kernel, Mode::Both, Mode::Client, Mode::Server, Mode::Roce],
        ..Scenario::numbered("unseen_readiness", n, unseen::readiness, false)
    }));
    all.extend((0..process::BARE).map(|n| {
        Scenario::numbered("process_bare_child", n, process::bare_child, true).with_env("RDMASOCK_EXEC", "leave")
    }));
    let few_addresses = |n| Scenario::numbered("capacity_few_addresses", n, capacity::few_addresses, n != 0);
    all.extend((0..capacity::FEW).map(few_addresses));
    for scenario in all.iter_mut().filter(|s| fits_a_storm(s)) {
        scenario.modes = if scenario.modes.len() == Mode::ALL.len() {
            &[Mode::Kernel, Mode::Both, Mode::Client, Mode::Server, Mode::Storm]
        } else {
            &[Mode::Kernel, Mode::Both, Mode::Storm]
        };
    }
    all
}

/// Returns a scenario of direct transfers as one with lent memory, whose reader's device reads it into the buffer
/// that the reader waits with. `None` if there is no such variant.
fn lent_into(scenario: &Scenario) -> Option<Scenario> {
    let rest = scenario.name.strip_prefix("direct_")?;
    // Some of these scenarios are about lent memory anyway, or about kept registrations, which memory for a peer does
    // not have.
    if rest.contains("lent") || rest.starts_with("alloc_") {
        return None;
    }
    Some(Scenario {
        name: format!("lent_into_{rest}"),
        // Within a host it would repeat the original scenario.
        modes: &Mode::DEVICES,
        env: vec![("RDMASOCK_ZCOPY_MIN", "4K".into()), ("RDMASOCK_DEV_WAY", "get".into())],
        ..scenario.clone()
    })
}

/// Families that are played over links between hosts with immediates and without (`roce`, `iwarp`). In other
/// families each scenario is played in one of the two ways, by its name.
pub const BETWEEN_HOSTS_BOTH_WAYS: [&str; 14] = [
    "calls_", "connect_", "direct_", "echo_", "files_", "flags_", "herd_", "lent_", "options_", "peers_", "poll_",
    "signals_", "timing_", "urgent_",
];

/// Scenarios that are known to differ there from kernel TCP, and why (docs/limits.md).
pub const DIFFERS_BETWEEN_HOSTS: [(&str, &str); 18] = [
    ("capacity_announced", CAPACITY),
    ("capacity_both_ways", CAPACITY),
    ("capacity_left_behind", CAPACITY),
    ("capacity_size_changes", CAPACITY),
    ("close_killed_", KILLED),
    ("close_sigpipe_kills", KILLED),
    ("ends_by_kill/", KILLED),
    ("process_child_of_a_killed_parent", KILLED),
    ("told_peer_killed", KILLED),
    ("handed_", HANDED),
    ("wakes_forked", HANDED),
    ("identity_receivers", "a receive whose number is gone fails with EBADF"),
    (
        "epoll_more_pwait2",
        "what is behind the events that are counted is written to",
    ),
    (
        "files_splice_errors",
        "a send that does not wait finds no room while the connection leaves the link",
    ),
    (
        "flags_peek_offset",
        "SO_PEEK_OFF is not followed on a link between hosts",
    ),
    ("order_end_first", "shutdown() returns before the end is on its way"),
    (
        "told_counts_in_a_child",
        "the child counts what its parent's library has said in TCP",
    ),
    (
        "unseen_close/",
        "of a close that no hook sees the peer may hear an end in place of a reset",
    ),
];
/// Returns why a scenario differs there; `None` if no difference is known.
pub fn differs_between_hosts(name: &str) -> Option<&'static str> {
    let mut differing = DIFFERS_BETWEEN_HOSTS.iter();
    differing
        .find(|(known, _)| name.starts_with(known))
        .map(|(_, why)| *why)
}

const CAPACITY: &str = "a sender that is not read gets rid of less, or of more";
const HANDED: &str = "a connection that is handed over in the middle of its promotion is reset";
const KILLED: &str = "who is killed resets its connections, for nobody knows whether all has arrived that it had sent";

/// Families whose outcome depends on signals, on times, or on forbidden calls.
const WITHOUT_STORM: [&str; 12] = [
    "direct_",
    "ends_",
    "herd_",
    "identity_",
    "lent_",
    "refused_",
    "signals_",
    "timing_",
    "told_",
    "twins_",
    "unseen_",
    "wakes_",
];
/// Scenarios whose outcome depends on signals on kernel TCP too, mostly by EINTR of poll, select and epoll_wait,
/// which is never restarted. Others end before the first signal comes, or close the storm's own descriptors.
const NOT_IN_A_STORM: &[&str] = &[
    "calls_bad_fds",
    "calls_not_sockets",
    "capacity_announced",
    "close_shutdown_in_parts",
    "connect_accept_flags",
    "options_unsent_low_water",
    "connect_closed_before_accept",
    "connect_errors",
    "connect_full_backlog",
    "connect_nonblocking",
    "connect_refused",
    "connect_refused_nonblocking",
    "connect_reset_before_accept",
    "echo_reuseport",
    "echo_short",
    "echo_udp_untouched",
    "echo_unix_untouched",
    "epoll_blocking_reads",
    "epoll_counted_reads",
    "epoll_edge",
    "epoll_hangups",
    "epoll_level",
    "epoll_more_added_while_waiting",
    "epoll_more_loop_edge",
    "epoll_more_loop_level",
    "epoll_more_mixed",
    "epoll_more_nested",
    "epoll_more_pwait2",
    "epoll_more_registered_before",
    "epoll_more_shared_with_child",
    "epoll_more_two_sleepers",
    "epoll_oneshot",
    "epoll_short_reads",
    "fds_close_everything",
    "fds_close_range",
    "fds_close_range_under_use",
    "fds_closed_at_the_limit",
    "fds_limit",
    "flags_held_back",
    "flags_oob_meanwhile",
    "flags_oob_meanwhile_sendfile",
    "flags_oob_meanwhile_vectors",
    "flags_rcvlowat",
    "flags_rcvlowat_of_listener",
    "flags_waitall",
    "flags_waitall_cut",
    "numbers_more_sockets",
    "numbers_sets",
    "numbers_waits",
    "peers_in_one_set",
    "peers_quiet_one_speaks",
    "peers_quiet_two_sets",
    "poll_as_many_as_the_limit",
    "poll_high_fd",
    "poll_listener",
    "poll_odd_fds",
    "poll_ppoll",
    "poll_select",
    "poll_select_all",
    "poll_select_errors",
    "poll_two_connections",
    "threads_cancel",
    "threads_cancel_pollers",
    "threads_cancel_sender_early",
    "threads_close_does_not_wake",
    "threads_shutdown_wakes_pollers",
    "zerocopy_readiness",
    "zerocopy_woken",
];

/// Returns whether a scenario's transcript is the same in a storm of signals (`storm`).
fn fits_a_storm(scenario: &Scenario) -> bool {
    // A few of a family that differs by a number are enough.
    scenario.param.is_multiple_of(8)
        && !NOT_IN_A_STORM.contains(&scenario.name.as_str())
        && !WITHOUT_STORM.iter().any(|f| scenario.name.starts_with(f))
}

/// Undoes what Rust's start-up changes: SIGPIPE is at its default again. Raises the soft limit
/// of open files as far as the scenarios need it.
pub fn behave_like_a_c_program() {
    call!(libc::signal(libc::SIGPIPE, libc::SIG_DFL));
    let mut limit: libc::rlimit = crate::sys::zeroed();
    call!(libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit)).ok();
    limit.rlim_cur = limit.rlim_max.min(4096);
    call!(libc::setrlimit(libc::RLIMIT_NOFILE, &limit)).ok();
}
