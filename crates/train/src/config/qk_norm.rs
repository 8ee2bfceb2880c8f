//! The RMSNorm of queries and keys, as written in a configuration.

use serde::de::{Error, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;

/// The elements over which the RMSNorm of queries and keys is computed: each head, or all heads together. This norm precedes RoPE.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNorm {
    /// No norm, as in Llama. A configuration says `false`.
    None,
    /// Each head is normalized separately, with one weight for all heads, as in Qwen3. A configuration says `true`.
    Heads,
    /// All heads of a token are normalized together, as in OLMoE. A configuration says `"width"`.
    Width,
}

/// The value of [`QkNorm::Width`] in a configuration.
const WIDTH: &str = "width";

impl Serialize for QkNorm {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::None => to.serialize_bool(false),
            Self::Heads => to.serialize_bool(true),
            Self::Width => to.serialize_str(WIDTH),
        }
    }
}

impl<'de> Deserialize<'de> for QkNorm {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(Written)
    }
}

struct Written;

impl Visitor<'_> for Written {
    type Value = QkNorm;

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "true (each head by itself), \"{WIDTH}\" (all heads together) or false")
    }

    fn visit_bool<E: Error>(self, normed: bool) -> Result<QkNorm, E> {
        Ok(if normed { QkNorm::Heads } else { QkNorm::None })
    }

    fn visit_str<E: Error>(self, word: &str) -> Result<QkNorm, E> {
        match word {
            WIDTH => Ok(QkNorm::Width),
            // An override passes any bare word as a string.
            other => Err(E::invalid_value(Unexpected::Str(other), &self)),
        }
    }
}
