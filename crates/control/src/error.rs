use crate::failure::Failure;
use crate::limits::seconds;
use std::fmt::Write;
use std::time::Duration;

/// The result type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reason why a hub did not start, or a rank did not join.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The text is too short for a secret.
    #[error(
        "a secret of {bytes} bytes is too short, expected at least {least} bytes; `openssl rand -hex 32` makes one"
    )]
    ShortSecret {
        /// Length of the text, without surrounding white space.
        bytes: usize,
        /// The minimum length.
        least: usize,
    },
    /// The system returned no random bytes.
    #[error("the system gives no random bytes: {0}")]
    Random(getrandom::Error),
    /// A text of [`Join`](crate::Join) is too long for a handshake.
    #[error("the {what} has {bytes} bytes, expected at most {most}")]
    TooLong {
        /// Name of the text.
        what: &'static str,
        /// Length of the text in bytes.
        bytes: usize,
        /// The maximum length.
        most: usize,
    },
    /// The run has no ranks.
    #[error("a run of 0 ranks, expected at least 1")]
    NoRanks,
    /// A socket or a thread could not be created.
    #[error("{what}: {source}")]
    System {
        /// The operation that failed.
        what: &'static str,
        /// The error from the system.
        source: std::io::Error,
    },
    /// No hub of this run was found.
    #[error("{}", unmet(*waited, tries))]
    Unmet {
        /// Time waited; `None` if the only address gave a final answer.
        waited: Option<Duration>,
        /// The addresses, each with the result of its last try.
        tries: Vec<(String, Refusal)>,
    },
    /// The run failed before all ranks had joined, or this rank was refused.
    #[error(transparent)]
    Failed(#[from] Failure),
}

impl Error {
    /// Whether the user can correct the error.
    pub fn is_user_error(&self) -> bool {
        match self {
            Self::Random(_) | Self::System { .. } => false,
            Self::Failed(failure) => failure.is_user_error,
            _ => true,
        }
    }
}

/// The reason why the process at an address is not this rank's hub.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The connection failed, or was closed before a greeting.
    #[error("there is no answer: {0}")]
    NoAnswer(String),
    /// Another program listens at the address.
    #[error("another program answers, not a Nibble hub")]
    NoHub,
    /// The hub has another secret.
    #[error("the hub has another secret: give all ranks of a run the same one")]
    OtherSecret,
    /// The hub has another version of this protocol.
    #[error(
        "the hub speaks version {hub} of the protocol, this rank version {rank}: start all with the same program"
    )]
    OtherProtocol {
        /// The hub's protocol version.
        hub: u16,
        /// This rank's protocol version.
        rank: u16,
    },
}

impl Refusal {
    /// Whether a later try at the same address would have the same result.
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
    // Most of several ports are unused, so the addresses that answered come first.
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
