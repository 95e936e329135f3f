//! What the thread does once, at a time that somebody has set.

/// When something is due, if it is.
#[derive(Clone, Copy, Default)]
pub struct Alarm(Option<u64>);

impl Alarm {
    /// It rings then, monotonic ns, and not before.
    pub fn set(&mut self, at: u64) {
        self.0 = Some(at);
    }

    /// It rings then, or before if that was so.
    pub fn set_if_off(&mut self, at: impl FnOnce() -> u64) {
        self.0.get_or_insert_with(at);
    }

    /// It does not ring.
    pub fn turn_off(&mut self) {
        self.0 = None;
    }

    /// Whether it rings; it is off then.
    pub fn rings(&mut self, now: u64) -> bool {
        self.0.take_if(|at| *at <= now).is_some()
    }

    /// When it rings, monotonic ns.
    pub fn next(self) -> Option<u64> {
        self.0
    }
}

/// All of them.
#[derive(Default)]
pub struct Alarms {
    /// The names are listened on again, for which there were no descriptors.
    pub listen: Alarm,
    /// Dead links that no socket uses are looked at again.
    pub free_links: Alarm,
    /// Wake-ups that were delayed are sent.
    pub wake: Alarm,
    /// Links to other hosts are maintained.
    pub maintain: Alarm,
    /// It is seen whether links to other hosts still work.
    pub watch: Alarm,
    /// Descriptors that could not be received or closed apart are tried again.
    pub apart: Alarm,
}

impl Alarms {
    /// When the first rings.
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
