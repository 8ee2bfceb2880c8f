//! A tokenizer whose tokens are bytes.

use serde_json::json;

use super::{NO_TOKEN, Tokenizer, without_merges};
use crate::error::Result;

/// Number of token ids of byte-level text.
pub const BYTE_VOCAB: usize = 256;

/// The tokenizer in which each byte is a token.
#[derive(Debug, Clone, Copy)]
pub struct Bytes;

impl Tokenizer for Bytes {
    fn vocab_size(&self) -> usize {
        BYTE_VOCAB
    }

    fn encode(&self, text: &str) -> Result<Vec<i32>> {
        Ok(text.bytes().map(i32::from).collect())
    }

    fn decode_bytes(&self, ids: &[i32]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(ids.len());
        for id in ids {
            match u8::try_from(*id) {
                Ok(byte) => bytes.push(byte),
                Err(_) => bytes.extend_from_slice(NO_TOKEN.as_bytes()),
            }
        }
        bytes
    }

    fn to_json(&self) -> String {
        let pre =
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
        let decoder =
            json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
        without_merges((0..BYTE_VOCAB).map(byte_alphabet), &pre, &decoder)
    }

    fn tokens(&self) -> String {
        "bytes".into()
    }

    fn token(&self, id: i32) -> Option<String> {
        u8::try_from(id).ok().map(|byte| byte_alphabet(byte.into()).to_string())
    }

    fn opening(&self) -> Result<Vec<i32>> {
        Ok(vec![i32::from(b'\n')])
    }

    fn unit(&self) -> &'static str {
        "byte"
    }
}

/// The printable character that represents a byte in byte-level BPE vocabularies (Radford et al., 2019). Printable Latin-1 bytes represent
/// themselves; the other bytes are represented by characters from U+0100 on.
fn byte_alphabet(byte: usize) -> char {
    let printable = |b: usize| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let code = if printable(byte) { byte } else { 0x100 + (0..byte).filter(|&b| !printable(b)).count() };
    // The code is at most U+0143, which is a valid character.
    char::from_u32(code as u32).unwrap_or('\u{fffd}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_round_trip() {
        let text = "First Citizen:\n«é» \u{1F600}";
        let ids = Bytes.encode(text).unwrap_or_default();
        assert_eq!(ids.len(), text.len());
        assert_eq!(Bytes.decode(&ids), text);
        assert_eq!(Bytes.decode_bytes(&[0, 255]), [0, 255]);
    }

    #[test]
    fn the_byte_alphabet_is_the_published_one() {
        let letters: std::collections::BTreeSet<char> = (0..256).map(byte_alphabet).collect();
        assert_eq!(letters.len(), 256);
        assert_eq!(byte_alphabet(b' '.into()), 'Ġ');
        assert_eq!(byte_alphabet(b'\n'.into()), 'Ċ');
        assert_eq!(byte_alphabet(b'A'.into()), 'A');
    }
}
