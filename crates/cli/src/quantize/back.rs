//! Dequantizes code and scale buffers.

use super::about::{About, PREFIX, described, matrices, planes};
use super::converted::Converted;
use half::{bf16, f16};
use nibble_command::error::{Error, Result};
use nibble_core::allocation::phase;
use nibble_core::ops::{Dequantize, Taken};
use nibble_core::{BlockScaled, DType, Kernels};
use nibble_formats::{BlockAxis, ScaleLayout};
use safetensors::{Dtype, SafeTensors};
use std::collections::BTreeSet;

/// Dequantizes the tensors that the metadata describe, and copies all other tensors.
pub fn restore<'d, B: Kernels>(b: &B, file: &SafeTensors<'d>, out: &mut Converted<'d>) -> Result<usize> {
    let described: Vec<(String, String)> =
        described(&out.metadata).map(|(name, text)| (name.to_owned(), text.to_owned())).collect();
    if described.is_empty() {
        return Err(Error::usage("the input holds nothing that nibble quantized: no `nibble.` metadata"));
    }
    let mut used = BTreeSet::new();
    for (name, text) in &described {
        phase(format_args!("restoring `{name}`"));
        let about = About::parse(name, text)?;
        let [codes, scales, tensor_scale] = planes(name);
        let kind = about.format.scale_kind(about.rule);
        let all_codes = plane(file, &codes)?;
        let all_scales = if kind.bytes() > 0 { plane(file, &scales)? } else { &[] };
        let of_tensors =
            if kind.has_tensor_scale() { words(plane(file, &tensor_scale)?) } else { Vec::new() };
        let stack = if about.shape.len() == 3 { about.shape[0] } else { 1 };
        if [all_codes, all_scales].iter().any(|plane| !plane.len().is_multiple_of(stack))
            || all_codes.len() < stack
            || (kind.has_tensor_scale() && of_tensors.len() != stack)
        {
            return Err(Error::usage(format!(
                "tensor `{name}`: its code and scale buffers do not hold {stack} matrices"
            )));
        }
        let mut data = Vec::new();
        let one = |plane: &[u8]| plane.len() / stack;
        for (i, codes) in all_codes.chunks_exact(one(all_codes)).enumerate() {
            let scales = &all_scales[i * one(all_scales)..][..one(all_scales)];
            let plain = plain(b, &about, codes, scales, of_tensors.get(i).copied());
            data.extend(plain.map_err(|e| Error::usage(format!("tensor `{name}`: {e}")))?);
        }
        out.put(name.clone(), about.dtype, about.shape, data)?;
        out.metadata.remove(&format!("{PREFIX}{name}"));
        // If a format has no such buffer, another tensor may have the buffer's name.
        used.insert(codes);
        used.extend((kind.bytes() > 0).then_some(scales));
        used.extend(kind.has_tensor_scale().then_some(tensor_scale));
    }
    for (name, view) in file.iter().filter(|(name, _)| !used.contains(*name)) {
        out.copy(name, &view, "not quantized")?;
    }
    Ok(described.len())
}

fn plane<'d>(file: &SafeTensors<'d>, name: &str) -> Result<&'d [u8]> {
    let view = file.tensor(name).map_err(|_| Error::usage(format!("tensor `{name}` is missing")))?;
    Ok(view.data())
}

/// The F32 values that are stored in a buffer of bytes. The values are copied, because the file's bytes may be unaligned in memory.
pub fn words(data: &[u8]) -> Vec<f32> {
    data.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// Decodes the code and scale buffers of a matrix to bytes of the tensor's original type.
fn plain<B: Kernels>(
    b: &B,
    about: &About,
    codes: &[u8],
    scales: &[u8],
    tensor_scale: Option<f32>,
) -> nibble_core::Result<Vec<u8>> {
    // The shape has two or three dimensions, so `matrices` returns sizes.
    let [_, matrix_rows, cols] = matrices(&about.shape).unwrap_or_default();
    // Buffers of column blocks are padded to whole blocks; rows after the end of the matrix are zeros.
    let rows = match about.axis {
        BlockAxis::Col => matrix_rows.next_multiple_of(about.format.column_step()),
        BlockAxis::Row | BlockAxis::Tile => matrix_rows,
    };
    let q = BlockScaled {
        format: about.format,
        axis: about.axis,
        rule: about.rule,
        rows,
        cols,
        stack: 1,
        codes: b.upload(codes)?,
        scales: b.upload(scales)?,
        tensor_scale: tensor_scale.map(|scale| b.upload(&vec![scale; rows])).transpose()?,
        scale_layout: ScaleLayout::RowMajor,
        shared_cols: 1,
        taken: Taken::AsIs,
    };
    let values = decode(b, &q, about.dtype, matrix_rows)?;
    Ok(match about.dtype {
        Dtype::BF16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        Dtype::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
    })
}

/// Decodes a quantized matrix of `rows` rows to values of the tensor's original type.
pub fn decode<B: Kernels>(
    b: &B,
    q: &BlockScaled<B>,
    dtype: Dtype,
    rows: usize,
) -> nibble_core::Result<Vec<f32>> {
    let plain = if dtype == Dtype::BF16 { DType::Bf16 } else { DType::F32 };
    let x = Dequantize { x: q, dtype: plain }.run(b)?;
    let mut values = x.to_f32_vec(b)?;
    values.truncate(rows * q.cols);
    if dtype == Dtype::F16 {
        values.iter_mut().for_each(|v| *v = f16::from_f32(*v).to_f32());
    }
    Ok(values)
}
