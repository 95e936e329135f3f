//! What the thread does as time goes by: one row for each concern, which says when it is due next, and sees to what is.

use super::state::Worker;

/// One concern.
struct Timer {
    /// When there is something to do next, monotonic ns.
    next: fn(&Worker) -> Option<u64>,
    /// Does what is due. Called after every sleep, however long that was.
    run: fn(&mut Worker, now: u64),
}

/// A part of the worker that sees to it by itself.
macro_rules! part {
    ($name:ident) => {
        Timer {
            next: |worker| worker.$name.next_timeout(),
            run: |worker, now| worker.$name.on_timeout(now),
        }
    };
}

/// In the order in which they are seen to.
const TIMERS: &[Timer] = &[
    Timer {
        next: |worker| worker.asks.values().map(|asking| asking.deadline).min(),
        run: Worker::expire_asks,
    },
    Timer {
        next: |worker| worker.asked_until.front().map(|(until, _)| *until),
        run: Worker::expire_asked,
    },
    Timer {
        next: |worker| worker.links.next_timeout(),
        run: |worker, now| {
            worker.expire_links(now);
            worker.expire_arriving(now);
        },
    },
    Timer {
        next: |worker| worker.guests.next_timeout(),
        run: Worker::expire_guests,
    },
    Timer {
        next: |worker| worker.alarms.next(),
        run: Worker::on_alarms,
    },
    part!(lingering),
    part!(handshakes),
    part!(rings),
    part!(standstill),
    Timer {
        next: |worker| worker.ends.next_timeout(),
        run: |worker, now| {
            worker.ends.on_timeout(now);
            worker.leave_dying(now);
        },
    },
    Timer {
        next: |worker| worker.control.next_timeout(),
        run: Worker::control_on_time,
    },
    Timer {
        next: |worker| worker.hosts.next_timeout(),
        run: Worker::hosts_on_time,
    },
    part!(ending),
];

/// When there is something to do next, monotonic ns.
pub fn next(worker: &Worker) -> Option<u64> {
    TIMERS.iter().filter_map(|timer| (timer.next)(worker)).min()
}

/// Sees to all that is due.
pub fn run(worker: &mut Worker, now: u64) {
    for timer in TIMERS {
        (timer.run)(worker, now);
    }
}
