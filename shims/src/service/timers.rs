//! The thread's timers: one row for each concern, with its next deadline and the function that handles it.

use super::state::Worker;

/// A concern of the thread that has deadlines.
struct Timer {
    /// Returns the next deadline, monotonic ns; `None` if nothing is scheduled.
    next: fn(&Worker) -> Option<u64>,
    /// Does what is due. Called after every sleep, however long that was.
    run: fn(&mut Worker, now: u64),
}

/// A field of the worker, handled by its own `on_timeout` or by a function of the worker.
macro_rules! part {
    ($name:ident) => {
        part!($name, |worker, now| worker.$name.on_timeout(now))
    };
    ($name:ident, $run:expr) => {
        Timer {
            next: |worker| worker.$name.next_timeout(),
            run: $run,
        }
    };
}

/// In the order in which they are handled.
const TIMERS: &[Timer] = &[
    Timer {
        next: |worker| worker.asks.values().map(|asking| asking.deadline).min(),
        run: Worker::expire_asks,
    },
    Timer {
        next: |worker| worker.asked_until.front().map(|(until, _)| *until),
        run: Worker::expire_asked,
    },
    part!(links, |worker, now| {
        worker.expire_links(now);
        worker.expire_arriving(now);
    }),
    part!(guests, Worker::expire_guests),
    part!(alarms, Worker::on_alarms),
    part!(lingering),
    part!(handshakes),
    part!(rings),
    part!(standstill),
    part!(ends, |worker, now| {
        worker.ends.on_timeout(now);
        worker.leave_dying(now);
    }),
    part!(control, Worker::control_on_time),
    part!(hosts, Worker::hosts_on_time),
    part!(ending),
];

/// Returns the earliest deadline of all timers, monotonic ns; `None` if nothing is scheduled.
pub fn next(worker: &Worker) -> Option<u64> {
    TIMERS.iter().filter_map(|timer| (timer.next)(worker)).min()
}

/// Handles all timers that are due.
pub fn run(worker: &mut Worker, now: u64) {
    for timer in TIMERS {
        (timer.run)(worker, now);
    }
}
