//! The metadata of quantized tensors in a file, and the names of their code and scale buffers.

use nibble_command::error::{Error, Result};
use nibble_formats::{BlockAxis, Codec, Format, Rounding, ScaleRule};
use safetensors::Dtype;
use std::collections::BTreeMap;

/// Prefix of the metadata keys that describe quantized tensors.
pub const PREFIX: &str = "nibble.";

/// The names of the tensors in which a quantized tensor is stored: codes, block scales, and one scale per matrix.
pub fn planes(name: &str) -> [String; 3] {
    ["codes", "scales", "tensor_scale"].map(|plane| format!("{name}.{plane}"))
}

/// Finds the quantized tensors of a file: their names and their descriptions in the metadata.
pub fn described(metadata: &BTreeMap<String, String>) -> impl Iterator<Item = (&str, &str)> {
    metadata.iter().filter_map(|(key, text)| Some((key.strip_prefix(PREFIX)?, text.as_str())))
}

/// The number of matrices in a tensor of this shape, and the rows and columns of each; `None` for shapes that are not matrices or stacks of
/// matrices.
pub fn matrices(shape: &[usize]) -> Option<[usize; 3]> {
    match *shape {
        [rows, cols] => Some([1, rows, cols]),
        [stack, rows, cols] => Some([stack, rows, cols]),
        _ => None,
    }
}

/// The description of one quantized tensor in the metadata.
pub struct About {
    pub format: Format,
    pub axis: BlockAxis,
    pub rule: ScaleRule,
    /// The shape: two dimensions, or three for a stack of matrices.
    pub shape: Vec<usize>,
    pub dtype: Dtype,
}

impl About {
    pub fn parse(name: &str, text: &str) -> Result<Self> {
        let wrong = |what: &str| Error::usage(format!("metadata `{PREFIX}{name}`: {what}"));
        let value: serde_json::Value = serde_json::from_str(text).map_err(|e| wrong(&e.to_string()))?;
        let text = |key: &str| value[key].as_str().ok_or_else(|| wrong(&format!("has no `{key}`")));
        let size = |value: &serde_json::Value| value.as_u64().and_then(|n| usize::try_from(n).ok());
        let sizes = || value["shape"].as_array()?.iter().map(size).collect::<Option<Vec<_>>>();
        let has_no_shape = || wrong("has no `shape` of two sizes, or of three for a stack of matrices");
        let dtype = match text("dtype")? {
            "F32" => Dtype::F32,
            "BF16" => Dtype::BF16,
            "F16" => Dtype::F16,
            other => return Err(wrong(&format!("has dtype `{other}`, expected F32, BF16 or F16"))),
        };
        let unknown = |e: nibble_formats::Error| wrong(&e.to_string());
        let format: Format = text("format")?.parse().map_err(unknown)?;
        let axis: BlockAxis = text("axis")?.parse().map_err(unknown)?;
        let rule: ScaleRule = text("scale")?.parse().map_err(unknown)?;
        let shape = sizes().ok_or_else(has_no_shape)?;
        let [stack, rows, cols] = matrices(&shape).ok_or_else(has_no_shape)?;
        Codec::new(format, rule, Rounding::NearestEven).map_err(unknown)?;
        // The size is limited far below overflow, even in bytes, because the file may be damaged.
        let values = rows.checked_mul(cols).and_then(|n| n.checked_mul(stack));
        if values.is_none_or(|n| n == 0 || n > isize::MAX as usize / 16) {
            return Err(wrong("has a `shape` without values, or beyond any memory"));
        }
        Ok(Self { format, axis, rule, shape, dtype })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_that_makes_no_sense_is_named() {
        let of = |text| About::parse("w", text).map(drop).unwrap_err().to_string();
        assert!(of("{}").contains("`nibble.w`: has no `dtype`"));
        let text = r#"{"dtype":"F32","format":"mxfp5","axis":"row","scale":"rceil","shape":[1,32]}"#;
        assert!(of(text).contains("mxfp5") && of(text).contains("mxfp4"));
        let text = r#"{"dtype":"F32","format":"mxfp4","axis":"row","scale":"rceil","shape":[1]}"#;
        assert!(of(text).contains("two sizes"));
    }
}
