//! JSON with its own SHA-256, which detects changes by other programs.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::files::sha256_hex;

#[derive(Serialize, Deserialize)]
struct Sealed<T> {
    holds: T,
    /// SHA-256 of `holds`, serialized without white space.
    sha256: String,
}

/// The JSON text of a value and its hash.
///
/// # Errors
/// An error for values that JSON cannot represent.
pub(super) fn seal<T: Serialize>(holds: T) -> serde_json::Result<String> {
    let sha256 = sha256_hex(serde_json::to_string(&holds)?.as_bytes());
    serde_json::to_string_pretty(&Sealed { holds, sha256 })
}

/// The value in a text from [`seal`]; `None` if the text has changed.
pub(super) fn open<T: Serialize + DeserializeOwned>(text: &str) -> Option<T> {
    let Sealed { holds, sha256 } = serde_json::from_str::<Sealed<T>>(text).ok()?;
    let written = serde_json::to_string(&holds).ok()?;
    (sha256_hex(written.as_bytes()) == sha256).then_some(holds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_with_another_byte_holds_nothing_else() {
        let holds = (7, "seven".to_owned(), vec![u128::MAX]);
        let text = seal(&holds).unwrap();
        assert_eq!(open(&text).as_ref(), Some(&holds));
        for (at, bit) in (0..text.len()).flat_map(|at| (0..7).map(move |bit| (at, bit))) {
            let mut bytes = text.clone().into_bytes();
            bytes[at] ^= 1 << bit;
            let found: Option<(i32, String, Vec<u128>)> = open(&String::from_utf8(bytes).unwrap());
            assert!(found.is_none_or(|found| found == holds), "bit {bit} of byte {at}");
        }
    }
}
