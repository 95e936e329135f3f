//! Converts values of the counter pages to text, for the tables and the JSON of `rdmasock stat`.

use rdmasock_core::stats::{Call, Reason, SleeperSnapshot, StreamSnapshot};

/// Returns an instance id in hexadecimal digits.
pub(super) fn hex(id: [u8; 16]) -> String {
    format!("{:032x}", u128::from_be_bytes(id))
}

/// Returns the text of a code; "unknown" for `None`, a code that this version does not know.
pub(super) fn word(text: Option<&'static str>) -> &'static str {
    text.unwrap_or("unknown")
}

/// Returns the text of the reason why all connections of an instance are kept on TCP.
pub(super) fn kept_on_tcp(reason: Result<Reason, u16>) -> String {
    reason.map_or_else(|code| format!("unknown reason {code}"), |reason| reason.to_string())
}

/// Returns the text of the reason why a stream is on TCP. `None` if both directions are on a link, or if there is no
/// reason.
pub(super) fn why_tcp(stream: &StreamSnapshot) -> Option<String> {
    match stream.why {
        _ if !stream.is_on_tcp() => None,
        Ok(why) => (why.reason != Reason::None).then(|| why.to_string()),
        Err(code) => Some(format!("unknown reason {code}")),
    }
}

/// Returns a text with the call that a sleeper is in, how long it has slept, and its thread.
pub(super) fn sleep(sleeper: &SleeperSnapshot) -> String {
    let call = word(sleeper.call.map(Call::text));
    let seconds = sleeper.asleep.as_secs_f64();
    let time = if seconds < 10.0 {
        format!("{seconds:.1} s")
    } else {
        duration(sleeper.asleep.as_secs())
    };
    let who = match (sleeper.thread, sleeper.count) {
        (Some(thread), 1) => format!("thread {thread}"),
        (Some(thread), n) => format!("thread {thread} and {} more", n - 1),
        (None, 1) => "a thread".to_owned(),
        (None, n) => format!("{n} threads"),
    };
    format!("{call} {time}, {who}")
}

/// Returns a time as text, in its two largest units.
pub(super) fn duration(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, _) => format!("{minutes} min {} s", seconds % 60),
        (0, _, _) => format!("{hours} h {} min", minutes % 60),
        _ => format!("{days} d {} h", hours % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        for (seconds, text) in [
            (59, "59 s"),
            (61, "1 min 1 s"),
            (3660, "1 h 1 min"),
            (90_000, "1 d 1 h"),
        ] {
            assert_eq!(duration(seconds), text);
        }
    }
}
