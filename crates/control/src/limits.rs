use std::time::Duration;

/// The timeouts of a run. Each timeout is clamped to at least 10 ms and at most a year.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Time within which every rank ends after a failure. A rank or hub counts as failed after half of this time without a message; the
    /// processes need the other half to end.
    pub deadline: Duration,
    /// Time within which all ranks must join, measured from the start of the hub. A rank must also find the hub within this time, measured
    /// from the start of the rank.
    pub join: Duration,
}

impl Default for Limits {
    /// The defaults: a deadline of 30 s, and 300 s for joining.
    fn default() -> Self {
        Self { deadline: Duration::from_secs(30), join: Duration::from_secs(300) }
    }
}

impl Limits {
    /// Clamps the times, so that sums do not overflow and waits are not too short.
    pub(crate) fn within_bounds(self) -> Self {
        let bounded =
            |time: Duration| time.clamp(Duration::from_millis(10), Duration::from_secs(365 * 24 * 3600));
        Self { deadline: bounded(self.deadline), join: bounded(self.join) }
    }

    /// Time of silence after which the other side counts as failed.
    pub(crate) fn silence(&self) -> Duration {
        self.deadline / 2
    }

    /// Time from when a launcher learns of a failure until the launcher kills the remaining ranks. This time is the deadline minus three
    /// durations: the silence after which a rank counts as failed, one heartbeat interval, within which the launcher learns of the failure,
    /// and a margin in which the processes end.
    pub fn ending(&self) -> Duration {
        self.deadline * 5 / 16
    }

    /// Maximum interval between heartbeats.
    pub(crate) fn beat(&self) -> Duration {
        self.deadline / 8
    }

    /// Time after a lost connection in which a more precise reason may arrive, before the lost connection becomes the cause.
    pub(crate) fn grace(&self) -> Duration {
        self.deadline / 16
    }

    /// Time within which a new connection must authenticate.
    pub(crate) fn handshake(&self) -> Duration {
        self.silence().min(Duration::from_secs(10))
    }
}

/// Formats a time for messages: `300 s`, `0.5 s`.
pub(crate) fn seconds(time: Duration) -> String {
    format!("{} s", time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rank that stops responding is ended by force within the deadline, however late the launcher hears of the failure.
    #[test]
    fn silence_the_beat_and_the_ending_are_within_the_deadline() {
        for seconds in [2, 30, 86400] {
            let limits = Limits { deadline: Duration::from_secs(seconds), ..Limits::default() };
            assert!(limits.silence() + limits.beat() + limits.ending() < limits.deadline);
        }
    }
}
