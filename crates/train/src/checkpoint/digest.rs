//! SHA-256, as text.

use sha2::{Digest, Sha256};

/// SHA-256, hexadecimal.
pub(crate) fn sha256_hex(content: &[u8]) -> String {
    hexadecimal(&Sha256::digest(content))
}

/// Two digits a byte.
pub(crate) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
