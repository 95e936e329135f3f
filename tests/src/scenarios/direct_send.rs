//! Senders of direct transfers (see `direct`) that time out, are interrupted, or whose reader is not at work. The bytes
//! that a call has accepted belong to the program again when the call returns. Readers that wait with buffers are here.
//! In `lent` readers wait in epoll_wait, and their device reads lent memory, in the same scenarios.

use std::thread;
use std::time::{Duration, Instant};

use libc::c_int;

use super::direct::{Flow, LARGE, under_signals};
use crate::ctx::Ctx;
use crate::data::Rng;
use crate::sys;

/// SO_SNDTIMEO of a sender whose reader pauses.
pub fn times_out(c: &Ctx) {
    time_outs(Flow::begin(c));
}

/// As [`times_out`], with this flow.
pub fn time_outs(mut flow: Flow<'_>) {
    if !flow.reads {
        sys::set_timeout(flow.fd, libc::SO_SNDTIMEO, Duration::from_millis(5)).ok();
    }
    for _ in 0..3 {
        flow.play(send_to_a_reader_that_pauses);
        flow.run_up();
    }
    flow.end();
}

/// A signal at any moment of a send, whose handler ends the send, or lets it go on.
pub fn interrupted(c: &Ctx) {
    interruptions(Flow::begin(c));
}

/// As [`interrupted`], with this flow.
pub fn interruptions(mut flow: Flow<'_>) {
    for restart in [false, true] {
        sys::on_signal(libc::SIGUSR1, nothing, restart);
        flow.play(|flow| {
            if flow.reads {
                send_to_a_reader_that_pauses(flow);
            } else {
                under_signals(|| send_to_a_reader_that_pauses(flow));
            }
        });
        flow.run_up();
    }
    flow.end();
}

extern "C" fn nothing(_: c_int) {}

fn send_to_a_reader_that_pauses(flow: &mut Flow<'_>) {
    let mut rng = Rng::new(if flow.is_lent { 19 } else { 9 });
    for n in 0..100 {
        let len = 4096 + rng.below(600_000) as usize;
        if flow.reads && n % 16 == 15 {
            sys::pause_ms(40);
        }
        flow.pass(len, Duration::from_micros(200));
    }
}

/// The reader is stopped for a second in the middle.
pub fn to_a_stopped_reader(c: &Ctx) {
    stops(c, Flow::begin(c));
}

/// As [`to_a_stopped_reader`], with this flow.
pub fn stops(c: &Ctx, mut flow: Flow<'_>) {
    let reader = c.exchange("process", u64::from(std::process::id())) as libc::pid_t;
    let mut rng = Rng::new(if flow.is_lent { 23 } else { 13 });
    flow.play(|flow| {
        thread::scope(|s| {
            if !flow.reads {
                s.spawn(move || {
                    for ms in [2, 7] {
                        sys::pause_ms(ms);
                        call!(libc::kill(reader, libc::SIGSTOP)).ok();
                        sys::pause_ms(1000);
                        call!(libc::kill(reader, libc::SIGCONT)).ok();
                    }
                });
            }
            for _ in 0..200 {
                let len = 4096 + rng.below(600_000) as usize;
                flow.pass(len, Duration::from_micros(60));
            }
        })
    });
    flow.end();
}

/// Both ends send much first, and receive then.
pub fn both_first(c: &Ctx) {
    let back = Flow::begin(c);
    let flow = Flow::of(c, back.fd, !back.reads);
    both_send(c, flow, back);
}

/// As [`both_first`], with these two directions of a connection, after the second one's run-up.
pub fn both_send<'a>(c: &Ctx, mut flow: Flow<'a>, mut back: Flow<'a>) {
    flow.run_up();
    back.run_up();
    let (to, from) = if flow.reads {
        (&mut back, &mut flow)
    } else {
        (&mut flow, &mut back)
    };
    let begun = Instant::now();
    for _ in 0..20 {
        c.sync("round");
        to.send(LARGE);
        from.receive_all(LARGE);
    }
    let is_quick = begun.elapsed() < Duration::from_secs(20);
    c.log(format_args!("quick: {is_quick}"));
    c.close(flow.fd);
}
