//! JSON that says its own SHA-256, so that what something else has written there is not believed.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::files::sha256_hex;

#[derive(Serialize, Deserialize)]
struct Sealed<T> {
    holds: T,
    /// Of `holds` as it is written without white space.
    sha256: String,
}

/// The text of this.
///
/// # Errors
/// For what JSON has not.
pub(super) fn seal<T: Serialize>(holds: T) -> serde_json::Result<String> {
    let sha256 = sha256_hex(serde_json::to_string(&holds)?.as_bytes());
    serde_json::to_string_pretty(&Sealed { holds, sha256 })
}

/// What a text holds, if it is as it was written.
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
