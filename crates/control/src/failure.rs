use serde::{Deserialize, Serialize};
use std::fmt;

/// Status of a rank.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The current step, if one has started.
    pub step: Option<u64>,
    /// The current phase of the step, such as `forward exchange`; empty if unknown.
    pub phase: String,
}

/// The reason why a run has failed. `Display` formats the failure as the message with which every rank ends.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The rank that failed, if a rank caused the failure.
    pub rank: Option<usize>,
    /// The host of that rank; empty if unknown.
    pub host: String,
    /// The last known status of the rank that failed.
    pub status: Status,
    /// What happened, for example `its connection was lost`.
    pub cause: String,
    /// Whether the user must correct the failure, so that a restart would not help.
    pub is_user_error: bool,
}

/// Maximum length of a cause in a message, in bytes.
pub(crate) const CAUSE: usize = 16 << 10;
/// Maximum length of the name of a host, a phase or a call in a message, in bytes.
pub(crate) const NAME: usize = 1 << 10;

impl Status {
    /// Cuts the phase to fit into a message.
    pub(crate) fn cut(mut self) -> Self {
        cut(&mut self.phase, NAME);
        self
    }
}

impl Failure {
    /// Cuts the texts to fit into a message.
    pub(crate) fn cut(mut self) -> Self {
        cut(&mut self.host, NAME);
        cut(&mut self.cause, CAUSE);
        Self { status: self.status.cut(), ..self }
    }
}

/// Cuts a text to `bytes` bytes, and appends a mark to show that it was longer.
pub(crate) fn cut(text: &mut String, bytes: usize) {
    if text.len() > bytes {
        // Index 0 is always a character boundary.
        text.truncate((0..=bytes).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0));
        text.push('…');
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let host = Some(format!("host {}", self.host)).filter(|_| !self.host.is_empty());
        let who = match (self.rank, host) {
            (Some(rank), Some(host)) => Some(format!("rank {rank} on {host}")),
            (Some(rank), None) => Some(format!("rank {rank}")),
            (None, host) => host,
        };
        let step = self.status.step.map(|step| format!("step {step}"));
        let phase = Some(self.status.phase.clone()).filter(|phase| !phase.is_empty());
        let known: Vec<String> = [who, step, phase].into_iter().flatten().collect();
        match known.is_empty() {
            true => f.write_str(&self.cause),
            false => write!(f, "{}: {}", known.join(", "), self.cause),
        }
    }
}

impl std::error::Error for Failure {}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure() -> Failure {
        Failure {
            rank: Some(2),
            host: "a".into(),
            status: Status { step: Some(12), phase: "forward exchange".into() },
            cause: "its connection was lost".into(),
            is_user_error: false,
        }
    }

    #[test]
    fn the_message_names_what_is_known() {
        assert_eq!(
            failure().to_string(),
            "rank 2 on host a, step 12, forward exchange: its connection was lost"
        );
        let status = Status { step: None, phase: "start".into() };
        assert_eq!(
            Failure { host: String::new(), status, ..failure() }.to_string(),
            "rank 2, start: its connection was lost"
        );
        let status = Status { step: Some(0), phase: String::new() };
        assert_eq!(
            Failure { rank: None, status, ..failure() }.to_string(),
            "host a, step 0: its connection was lost"
        );
        let cause = "rank 3 of 4 has not joined".to_owned();
        assert_eq!(Failure { cause, ..Failure::default() }.to_string(), "rank 3 of 4 has not joined");
    }

    #[test]
    fn texts_are_cut_between_characters() {
        let long = Failure { cause: "é".repeat(CAUSE), host: "x".repeat(NAME), ..failure() }.cut();
        assert_eq!(long.cause, "é".repeat(CAUSE / 2) + "…");
        assert_eq!(long.host.len(), NAME);
        let mut odd = "xé".to_owned();
        cut(&mut odd, 2);
        assert_eq!(odd, "x…");
    }
}
