use crate::failure::Failure;
use crate::limits::seconds;
use std::fmt::Write;
use std::time::Duration;

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a hub did not start, or a rank did not join.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A text that is no secret.
    #[error(
        "a secret of {bytes} bytes is too short: at least {least} bytes are expected; `openssl rand -hex 32` makes one"
    )]
    ShortSecret {
        /// Its length, without the white space around it.
        bytes: usize,
        /// The shortest length.
        least: usize,
    },
    /// The system gave no random bytes.
    #[error("the system gives no random bytes: {0}")]
    Random(getrandom::Error),
    /// A text of [`Join`](crate::Join) is longer than a handshake takes.
    #[error("the {what} has {bytes} bytes; at most {most} are expected")]
    TooLong {
        /// Which text.
        what: &'static str,
        /// Its length.
        bytes: usize,
        /// The largest length.
        most: usize,
    },
    /// A run without ranks.
    #[error("a run of 0 ranks: at least 1 is expected")]
    NoRanks,
    /// A socket or a thread could not be made.
    #[error("{what}: {source}")]
    System {
        /// What was being done.
        what: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// No hub of this run was found.
    #[error("{}", unmet(*waited, tries))]
    Unmet {
        /// How long was waited; `None` where the only address gave an answer that waiting does not change.
        waited: Option<Duration>,
        /// The addresses, and what the last try of each met.
        tries: Vec<(String, Refusal)>,
    },
    /// The run failed before all ranks had come, or this rank was refused.
    #[error(transparent)]
    Failed(#[from] Failure),
}

impl Error {
    /// Whether the request cannot be followed as it stands.
    pub fn is_user_error(&self) -> bool {
        match self {
            Self::Random(_) | Self::System { .. } => false,
            Self::Failed(failure) => failure.is_user_error,
            _ => true,
        }
    }
}

/// What a rank met at an address in place of its hub.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No connection, or one that was closed before the hub had said what it is.
    #[error("there is no answer: {0}")]
    NoAnswer(String),
    /// Something listens that is no hub.
    #[error("what answers is no hub of a Nibble run")]
    NoHub,
    /// A hub with another secret.
    #[error("the secret is another: each rank of a run is given the one that its hub has")]
    OtherSecret,
    /// A hub of another version of this protocol.
    #[error(
        "the hub speaks version {hub} of the protocol, this rank version {rank}: start all with the same program"
    )]
    OtherProtocol {
        /// The hub's.
        hub: u16,
        /// This rank's.
        rank: u16,
    },
}

impl Refusal {
    /// Whether a later try at the same address would meet the same.
    pub(crate) fn is_final(&self) -> bool {
        matches!(self, Self::OtherSecret | Self::OtherProtocol { .. })
    }
}

fn unmet(waited: Option<Duration>, tries: &[(String, Refusal)]) -> String {
    let mut text = "no hub of this run was found".to_owned();
    if let Some(waited) = waited {
        // Writing to a string does not fail.
        let _ = write!(text, " within {}", seconds(waited));
    }
    if tries.is_empty() {
        text += ": no address was given";
    }
    // Of several ports most are nobody's. Who answers is told first.
    let (silent, answers): (Vec<_>, Vec<_>) =
        tries.iter().partition(|(_, refusal)| matches!(refusal, Refusal::NoAnswer(_)));
    for (i, (address, refusal)) in answers.iter().chain(silent.first()).enumerate() {
        let _ = write!(text, "{} at {address} {refusal}", if i == 0 { ":" } else { ";" });
    }
    match silent.len().saturating_sub(1) {
        0 => {}
        1 => text += "; nor is there at one other",
        others => {
            let _ = write!(text, "; nor is there at {others} others");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_answers_is_told_and_who_does_not_is_counted() {
        let silent = || Refusal::NoAnswer("refused".into());
        let unmet = |refusals: Vec<Refusal>| {
            let tries = refusals.into_iter().zip('a'..).map(|(refusal, at)| (at.to_string(), refusal));
            let tries = tries.collect();
            Error::Unmet { waited: Some(Duration::from_secs(3)), tries }.to_string()
        };
        let begin = "no hub of this run was found within 3 s: at";
        assert_eq!(unmet(vec![silent()]), format!("{begin} a there is no answer: refused"));
        assert_eq!(
            unmet(vec![silent(), Refusal::NoHub, silent(), silent()]),
            format!(
                "{begin} b what answers is no hub of a Nibble run; at a there is no answer: refused; nor is there at 2 others"
            )
        );
        assert!(
            unmet(vec![silent(), silent()])
                .ends_with("a there is no answer: refused; nor is there at one other")
        );
    }
}
