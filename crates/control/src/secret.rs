use crate::error::{Error, Result};
use hmac::{Hmac, Mac};
use sha2::Sha256;
use std::fmt;

/// The secret by which the processes of a run recognise each other. The secret is never sent, and `Debug` does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Vec<u8>);

/// Minimum length of a secret text, in bytes.
const LEAST: usize = 16;

/// Random bytes that are used once.
pub(crate) type Nonce = [u8; 32];
/// A proof of knowledge of the secret.
pub(crate) type Proof = [u8; 32];

/// The side that proves: a proof of one side is not valid for the other side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Client,
    Hub,
}

impl Secret {
    /// A new secret of 32 random bytes.
    ///
    /// # Errors
    /// Returns an error if the system provides no random bytes.
    pub fn random() -> Result<Self> {
        let text: String = nonce()?.iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Self(text.into_bytes()))
    }

    /// A secret from the text of a file or an environment variable; surrounding white space is ignored.
    ///
    /// # Errors
    /// Returns an error if the text has fewer than 16 bytes.
    pub fn from_text(text: &str) -> Result<Self> {
        let text = text.trim();
        match text.len() < LEAST {
            true => Err(Error::ShortSecret { bytes: text.len(), least: LEAST }),
            false => Ok(Self(text.as_bytes().to_vec())),
        }
    }

    /// Converts the secret to text that [`Secret::from_text`] reads back, for a child process's environment or a private file.
    pub fn to_text(&self) -> String {
        String::from_utf8_lossy(&self.0).into_owned()
    }

    /// A proof of knowledge of the secret, bound to this connection's nonces and to the message.
    pub(crate) fn prove(&self, side: Side, hub: &Nonce, client: &Nonce, said: &[u8]) -> Proof {
        self.mac(side, hub, client, said).finalize().into_bytes().into()
    }

    /// Whether a proof is valid. The comparison takes constant time.
    pub(crate) fn proves(&self, side: Side, hub: &Nonce, client: &Nonce, said: &[u8], proof: &Proof) -> bool {
        self.mac(side, hub, client, said).verify_slice(proof).is_ok()
    }

    fn mac(&self, side: Side, hub: &Nonce, client: &Nonce, said: &[u8]) -> Hmac<Sha256> {
        let label: &[u8; 16] = match side {
            Side::Client => b"nibble rank v1\0\0",
            Side::Hub => b"nibble hub v1\0\0\0",
        };
        // HMAC accepts keys of any length.
        let mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("a key of any length");
        mac.chain_update(label).chain_update(hub).chain_update(client).chain_update(said)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// 32 random bytes from the system.
pub(crate) fn nonce() -> Result<Nonce> {
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce).map_err(Error::Random)?;
    Ok(nonce)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_read_as_it_was_written_and_is_not_shown() {
        let secret = Secret::random().unwrap();
        assert_eq!(secret.to_text().len(), 64);
        assert_eq!(Secret::from_text(&format!(" {}\n", secret.to_text())).unwrap(), secret);
        assert_ne!(Secret::random().unwrap(), secret);
        assert_eq!(format!("{secret:?}"), "Secret(..)");
        let short = Secret::from_text(" 0123456789abcde \n").unwrap_err().to_string();
        assert!(
            short.starts_with("a secret of 15 bytes is too short, expected at least 16 bytes"),
            "{short}"
        );
        assert!(Secret::from_text("0123456789abcdef").is_ok());
    }

    #[test]
    fn a_proof_holds_for_one_side_one_connection_and_one_text() {
        let secret = Secret::random().unwrap();
        let proof = secret.prove(Side::Client, &[1; 32], &[2; 32], b"said");
        assert!(secret.proves(Side::Client, &[1; 32], &[2; 32], b"said", &proof));
        let other = Secret::random().unwrap();
        assert!(!other.proves(Side::Client, &[1; 32], &[2; 32], b"said", &proof));
        assert!(!secret.proves(Side::Hub, &[1; 32], &[2; 32], b"said", &proof));
        assert!(!secret.proves(Side::Client, &[3; 32], &[2; 32], b"said", &proof));
        assert!(!secret.proves(Side::Client, &[1; 32], &[3; 32], b"said", &proof));
        assert!(!secret.proves(Side::Client, &[1; 32], &[2; 32], b"says", &proof));
    }
}
