//! The header of a safetensors file. Equal tensors and equal metadata give equal bytes.

use safetensors::tensor::{Dtype, TensorInfo};
use std::borrow::Cow;
use std::collections::BTreeMap;

/// The metadata that Hugging Face tools require in the header of a safetensors file.
#[must_use]
pub fn metadata() -> BTreeMap<String, String> {
    BTreeMap::from([("format".to_owned(), "pt".to_owned())])
}

/// The header of a safetensors file with these tensors, whose values follow one another without gaps. Readers require that each tensor is
/// aligned to the size of its type, so the caller must put tensors of larger types first.
///
/// # Errors
/// Returns [`serde_json::Error`] if the header cannot be written as JSON, which no tensor name or metadata can cause.
pub fn header<'a>(
    metadata: &BTreeMap<String, String>,
    tensors: impl IntoIterator<Item = (&'a str, Dtype, &'a [usize])>,
) -> Result<Vec<u8>, serde_json::Error> {
    let mut entries = Vec::new();
    if !metadata.is_empty() {
        entries.push(format!("\"__metadata__\":{}", serde_json::to_string(metadata)?));
    }
    let mut end = 0;
    for (name, dtype, shape) in tensors {
        let start = end;
        // If one dimension is 0, the product of the other dimensions may overflow.
        end += shape.iter().fold(1, |n: usize, size| n.saturating_mul(*size)) * dtype.bitsize() / 8;
        let info = TensorInfo { dtype, shape: shape.to_vec(), data_offsets: (start, end) };
        entries.push(format!("{}:{}", serde_json::to_string(name)?, serde_json::to_string(&info)?));
    }
    let text = format!("{{{}}}", entries.join(","));
    // Trailing spaces in the header align the values.
    let len = text.len().next_multiple_of(size_of::<u64>());
    let mut bytes = (len as u64).to_le_bytes().to_vec();
    bytes.extend(text.as_bytes());
    bytes.resize(size_of::<u64>() + len, b' ');
    Ok(bytes)
}

/// The values as little-endian bytes, the byte order of a safetensors file.
#[must_use]
pub fn little_endian(values: &[f32]) -> Cow<'_, [u8]> {
    match cfg!(target_endian = "big") {
        true => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        false => bytemuck::cast_slice(values).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::tensor::TensorView;

    #[test]
    fn a_header_is_the_one_that_the_library_writes() {
        let (shapes, data) = ([vec![2, 3], vec![0], vec![]], [0; 24]);
        let types = [Dtype::F32, Dtype::BF16, Dtype::U8];
        let tensors: Vec<_> = ["\"a\"", "ä", "b"].into_iter().zip(types).zip(&shapes).collect();
        let view = |dtype: Dtype, shape: &Vec<usize>| {
            let len = shape.iter().product::<usize>() * dtype.bitsize() / 8;
            TensorView::new(dtype, shape.clone(), &data[..len]).unwrap()
        };
        let views = tensors.iter().map(|((name, dtype), shape)| (*name, view(*dtype, shape)));
        for metadata in [BTreeMap::new(), metadata()] {
            let own = tensors.iter().map(|((name, dtype), shape)| (*name, *dtype, shape.as_slice()));
            let own = header(&metadata, own).unwrap();
            let known = (!metadata.is_empty()).then(|| metadata.into_iter().collect());
            let whole = safetensors::serialize(views.clone(), known).unwrap();
            assert_eq!(own, whole[..own.len()]);
        }
    }
}
