//! Runs `quantize_pack` on a GPU (`csrc/kernels/convert/quantize_pack.cuh`).

use super::args::MatrixArgs;
use super::config::{self, QuantizeConfig, QuantizeDesc, QuantizeKernel, QuantizePath};
use super::{PowerRule, check_buffers, quantize};
use crate::Cuda;
use crate::launch::{Divider, RoundingArg, plain_args};
use crate::ops::buffer_check::BufferCheck;
use crate::ops::routing::pack_rows;
use nibble_core::ops::{Counts, PackRows, PackedRows, QuantizePack};
use nibble_core::{Error, Result};

const OP: &str = "quantize_pack";

/// Mirrors the device struct `MessagesArg`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct MessagesArg {
    bytes: u64,
    place: u64,
    top_k: u32,
    messages: u32,
    row_bytes: u32,
    unused: u32,
}
plain_args!(MessagesArg);

/// Runs [`QuantizePack`] on the GPU.
pub(crate) fn quantize_pack(cuda: &Cuda, op: QuantizePack<'_, Cuda>) -> Result<PackedRows<Cuda>> {
    op.check()?;
    let path = QuantizePath::of_op(&op.quantize);
    match config::pack_config(&path) {
        Some(config) => in_one_pass(cuda, &op, &path.asked, &config),
        None => {
            let made = quantize(cuda, op.quantize)?;
            let bytes = pack_rows(cuda, PackRows { rows: &made.take_rows(OP)?, index: op.index })?;
            let counts = made.counts.map_or_else(|| Counts::zeros(cuda), Ok)?;
            Ok(PackedRows { bytes, counts, found: made.found })
        }
    }
}

fn in_one_pass(
    cuda: &Cuda,
    op: &QuantizePack<'_, Cuda>,
    desc: &QuantizeDesc,
    launched: &QuantizeConfig,
) -> Result<PackedRows<Cuda>> {
    let (device, buffers) = (cuda.device(), BufferCheck::by(OP, cuda));
    check_buffers(cuda, &op.quantize)?;
    config::check(desc)?;
    buffers.buffer("index", op.index)?;
    let place = buffers.buffer("place", op.place)?;
    let small = |argument, value: usize| {
        let value = u32::try_from(value).ok().filter(|value| *value < 1 << 31);
        value.ok_or_else(|| Error::shape(OP, argument, "2^31 or more", "below 2^31"))
    };
    let made = op.result(cuda)?;
    let to = MessagesArg {
        bytes: made.bytes.get().address(),
        place: place.address(),
        top_k: small("top_k", op.top_k)?,
        messages: small("index.len()", op.index.get().len())?,
        row_bytes: small("bytes of a row", op.kind().row_bytes())?,
        unused: 0,
    };
    let QuantizeKernel::Rows { segments, rounds } = launched.kernel else {
        return Err(Error::Defect { place: OP, what: "a kernel of its own goes along the rows" });
    };
    if desc.rows == 0 || desc.cols == 0 {
        return Ok(made);
    }
    let (segments, rounds) = (segments as u32, rounds as u32);
    let (rows, cols, by_segments) = (desc.rows as i32, desc.cols as i32, Divider::by(segments));
    let codec = op.quantize.codec;
    let rule = PowerRule::of(codec.rule(), codec.element());
    let rounding = RoundingArg::new(codec, op.quantize.random);
    let MatrixArgs { x, row_id, .. } = MatrixArgs::of(&op.quantize);
    let kernel = device.kernel(&launched.spec)?;
    // SAFETY: `check` checked `place` against its slots, and `check_buffers` checked x and the groups against the sizes passed. The kernel
    // writes only messages below `messages`, whatever `place` contains. `made` is new and has capacity for these messages, and nothing else
    // accesses it.
    unsafe {
        kernel.launch(
            launched.launch,
            &[
                x,
                &to,
                made.counts.0.get(),
                &row_id,
                &rows,
                &cols,
                &by_segments,
                &segments,
                &rounds,
                &rule,
                &rounding,
            ],
        )
    }?;
    Ok(made)
}
