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
    /// A text too short for a secret.
    #[error(
        "a secret of {bytes} bytes is too short, expected at least {least} bytes; `openssl rand -hex 32` makes one"
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
    /// A text of [`Join`](crate::Join) is too long for a handshake.
    #[error("the {what} has {bytes} bytes, expected at most {most}")]
    TooLong {
        /// Which text.
        what: &'static str,
        /// Its length.
        bytes: usize,
        /// The largest length.
        most: usize,
    },
    /// A run without ranks.
    #[error("a run of 0 ranks, expected at least 1")]
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
        /// Time waited; `None` if the only address gave a final answer.
        waited: Option<Duration>,
        /// The addresses, and the result of the last try of each.
        tries: Vec<(String, Refusal)>,
    },
    /// The run failed before all ranks had joined, or this rank was refused.
    #[error(transparent)]
    Failed(#[from] Failure),
}

impl Error {
    /// Whether it is a usage error.
    pub fn is_user_error(&self) -> bool {
        match self {
            Self::Random(_) | Self::System { .. } => false,
            Self::Failed(failure) => failure.is_user_error,
            _ => true,
        }
    }
}

/// Why an address is not the rank's hub.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// No connection, or one that was closed before a greeting.
    #[error("there is no answer: {0}")]
    NoAnswer(String),
    /// Another program listens.
    #[error("another program answers, not a Nibble hub")]
    NoHub,
    /// A hub with another secret.
    #[error("the hub has another secret: give all ranks of a run the same one")]
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
    // Most of several ports are unused, so those that answered come first.
    let (silent, answers): (Vec<_>, Vec<_>) =
        tries.iter().partition(|(_, refusal)| matches!(refusal, Refusal::NoAnswer(_)));
    for (i, (address, refusal)) in answers.iter().chain(silent.first()).enumerate() {
        let _ = write!(text, "{} at {address} {refusal}", if i == 0 { ":" } else { ";" });
    }
    match silent.len().saturating_sub(1) {
        0 => {}
        1 => text += "; nor at one other address",
        others => {
            let _ = write!(text, "; nor at {others} other addresses");
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
                "{begin} b another program answers, not a Nibble hub; at a there is no answer: refused; nor at 2 other addresses"
            )
        );
        assert!(
            unmet(vec![silent(), silent()])
                .ends_with("a there is no answer: refused; nor at one other address")
        );
    }
}
