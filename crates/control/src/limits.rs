use std::time::Duration;

/// How long is waited for what. Each is at least 10 ms and at most a year: what is less or more is taken for that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// How long after a failure every rank has ended. A rank or a hub that is silent for half of it has failed; the other half is for ending.
    pub deadline: Duration,
    /// Until all ranks have come, from the hub's start; and until a rank has found the hub, from its own.
    pub join: Duration,
}

impl Default for Limits {
    /// 30 s and 300 s.
    fn default() -> Self {
        Self { deadline: Duration::from_secs(30), join: Duration::from_secs(300) }
    }
}

impl Limits {
    /// Times that can be added to any other, and be waited for without haste.
    pub(crate) fn within_bounds(self) -> Self {
        let bounded =
            |time: Duration| time.clamp(Duration::from_millis(10), Duration::from_secs(365 * 24 * 3600));
        Self { deadline: bounded(self.deadline), join: bounded(self.join) }
    }

    /// After so long without a word the other side is taken for dead.
    pub(crate) fn silence(&self) -> Duration {
        self.deadline / 2
    }

    /// After so long a launcher that has heard of a failure ends by force who is left: what remains of the deadline behind the silence that is a failure,
    /// the beat until it hears of it, and a little for the processes to go.
    pub fn ending(&self) -> Duration {
        self.deadline * 5 / 16
    }

    /// A word at least so often.
    pub(crate) fn beat(&self) -> Duration {
        self.deadline / 8
    }

    /// After a connection was lost, until the cause is named: for who knows better.
    pub(crate) fn grace(&self) -> Duration {
        self.deadline / 16
    }

    /// For a stranger to prove that it belongs to the run.
    pub(crate) fn handshake(&self) -> Duration {
        self.silence().min(Duration::from_secs(10))
    }
}

/// As messages have it: `300 s`, `0.5 s`.
pub(crate) fn seconds(time: Duration) -> String {
    format!("{} s", time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rank that stops has been ended by force within the deadline, however late the launcher hears of it.
    #[test]
    fn silence_the_beat_and_the_ending_are_within_the_deadline() {
        for seconds in [2, 30, 86400] {
            let limits = Limits { deadline: Duration::from_secs(seconds), ..Limits::default() };
            assert!(limits.silence() + limits.beat() + limits.ending() < limits.deadline);
        }
    }
}
