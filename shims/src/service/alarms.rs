//! Work that the thread does once, at a time that was set for it.

/// The time of one piece of work, monotonic ns; `None` while the alarm is off.
#[derive(Clone, Copy, Default)]
pub struct Alarm(Option<u64>);

impl Alarm {
    /// Sets the alarm to `at`, monotonic ns, in place of an earlier time.
    pub fn set(&mut self, at: u64) {
        self.0 = Some(at);
    }

    /// Sets the alarm to `at` if it is off; otherwise leaves it as it is.
    pub fn set_if_off(&mut self, at: impl FnOnce() -> u64) {
        self.0.get_or_insert_with(at);
    }

    /// Turns the alarm off.
    pub fn turn_off(&mut self) {
        self.0 = None;
    }

    /// Returns whether the alarm is due at `now`; if so, turns it off.
    pub fn rings(&mut self, now: u64) -> bool {
        self.0.take_if(|at| *at <= now).is_some()
    }

    /// Returns the alarm's time, monotonic ns; `None` if it is off.
    pub fn next(self) -> Option<u64> {
        self.0
    }
}

/// All alarms of the thread.
#[derive(Default)]
pub struct Alarms {
    /// Listens again on the names that were not polled for want of descriptors.
    pub listen: Alarm,
    /// Checks again whether dead links that no socket uses can be freed.
    pub free_links: Alarm,
    /// Sends the wake-ups that were delayed.
    pub wake: Alarm,
    /// Maintains the links to other hosts.
    pub maintain: Alarm,
    /// Checks whether links to other hosts still work.
    pub watch: Alarm,
    /// Tries again to receive or close descriptors in a thread apart.
    pub apart: Alarm,
}

impl Alarms {
    /// Returns the time of the first alarm, monotonic ns; `None` if all are off.
    pub fn next_timeout(&self) -> Option<u64> {
        let Self {
            listen,
            free_links,
            wake,
            maintain,
            watch,
            apart,
        } = self;
        let all = [listen, free_links, wake, maintain, watch, apart];
        all.into_iter().filter_map(|alarm| alarm.next()).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_alarm_rings_once() {
        let mut alarms = Alarms::default();
        assert_eq!(alarms.next_timeout(), None);
        alarms.wake.set(9);
        alarms.watch.set(7);
        alarms.watch.set_if_off(|| 5);
        assert_eq!(alarms.next_timeout(), Some(7));
        assert!(!alarms.watch.rings(6) && alarms.watch.rings(7) && !alarms.watch.rings(8));
        assert_eq!(alarms.next_timeout(), Some(9));
        alarms.wake.turn_off();
        assert!(!alarms.wake.rings(u64::MAX));
    }
}
