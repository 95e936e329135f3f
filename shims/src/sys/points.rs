//! Points in the wake-up code at which a test can delay threads (`tests/tests/wakes.rs`). A point compiles to nothing
//! without the feature `points`, which no installed library has.

/// Names a place between two steps: `point!("poll: asleep soon")`.
macro_rules! point {
    ($name:literal) => {
        #[cfg(feature = "points")]
        {
            static TIMES: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
            $crate::sys::points::reach($name, &TIMES);
        }
    };
}
#[cfg(feature = "points")]
pub(crate) use held::reach;
pub(crate) use point;

#[cfg(feature = "points")]
mod held {
    use std::ffi::CStr;
    use std::sync::atomic::AtomicU32;
    use std::sync::atomic::Ordering::Relaxed;

    use rdmasock_core::os::privatefd::PrivateFd;
    use rustix::fs::{Mode, OFlags};

    /// The environment variable with the name of the point at which threads are delayed.
    const HOLD: &CStr = c"POINT_TO_HOLD";
    /// The environment variable with the path of a file. The name of each point that a thread reaches is appended to
    /// it, once.
    const REACHED: &CStr = c"POINTS_REACHED";

    /// The delay of a thread, ns: longer than a promotion takes.
    const HOW_LONG: i64 = 10_000_000;
    /// The first `AT_FIRST` arrivals at a point are delayed, and later each `NOW_AND_THEN`th. From the `AT_MOST`th on,
    /// no arrival is delayed.
    const AT_FIRST: u32 = 8;
    const NOW_AND_THEN: u32 = 5;
    const AT_MOST: u32 = 160;

    /// Delays the calling thread if `name` is the point in `HOLD`. `times` counts how often threads of this process
    /// have reached the point. Preserves errno.
    pub(crate) fn reach(name: &str, times: &AtomicU32) {
        let errno = crate::sys::errno::get();
        let time = times.fetch_add(1, Relaxed);
        if time == 0
            && let Some(path) = variable(REACHED)
        {
            let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | OFlags::CLOEXEC;
            if let Ok(file) = PrivateFd::open(|| rustix::fs::open(path, flags, Mode::RUSR)) {
                let _ = rustix::io::write(&file, format!("{name}\n").as_bytes());
            }
        }
        let is_its_time = time < AT_FIRST || time.is_multiple_of(NOW_AND_THEN) && time < AT_MOST;
        if is_its_time && variable(HOLD).is_some_and(|held| held.to_bytes() == name.as_bytes()) {
            crate::sys::time::sleep(HOW_LONG);
        }
        crate::sys::errno::set(errno);
    }

    fn variable(name: &CStr) -> Option<&'static CStr> {
        // SAFETY: the name ends in a NUL, and the programs under test do not change their environment.
        let value = unsafe { libc::getenv(name.as_ptr()) };
        // SAFETY: `value` is not null, so it is a string. It stays as it is, because the programs under test do not
        // change their environment.
        (!value.is_null()).then(|| unsafe { CStr::from_ptr(value) })
    }
}
