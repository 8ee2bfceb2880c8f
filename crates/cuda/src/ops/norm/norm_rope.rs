//! Runs `norm_rope` and `norm_rope_backward` on a GPU (`csrc/kernels/norm/norm_rope.cuh`). Heads of 64, 128 and 256 are
//! processed in one pass; for other heads the two operations run in sequence.

use super::positions::{PositionsArg, angles};
use super::rms_norm::{
    Chunks, THREADS, TYPES, add_column_sums, check_size, int, plain_launch, write_dx, write_norm,
};
use super::rope::write_turned;
use crate::Cuda;
use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::{Divider, KernelArg, Launch};
use crate::ops::Instance;
use crate::ops::buffer_check::BufferCheck;
use crate::ops::planes::{plain_arg, type_name};
use nibble_choice::norm::{NormRopePath, TURNED_HEADS};
use nibble_core::ops::{NormRope, NormRopeBackward, RmsNorm, RmsNormBackward, RmsNormOut, Rope};
use nibble_core::{DType, Result, Tensor};

/// Columns per thread.
const THREAD_COLS: usize = 8;
/// Heads per thread; a thread has a part of each of these heads.
const ROWS: usize = 4;

/// The instance for heads with a given number of columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct NormRopeConfig {
    dtype: DType,
    /// Threads that share a head.
    threads: usize,
}

impl NormRopeConfig {
    fn choose(dtype: DType, head_dim: usize) -> Option<Self> {
        match NormRopePath::of(head_dim) {
            NormRopePath::OnePass => Some(Self { dtype, threads: head_dim / THREAD_COLS }),
            NormRopePath::Apart => None,
        }
    }

    fn spec(&self, name: &'static str) -> KernelSpec {
        KernelSpec {
            source: "kernels/norm/norm_rope.cuh",
            name,
            args: vec![("T", TemplateArg::Type(type_name(self.dtype))), ("kThreads", int(self.threads))],
        }
    }

    fn forward(&self) -> KernelSpec {
        self.spec("nib::norm_rope")
    }

    fn backward(&self) -> KernelSpec {
        self.spec("nib::norm_rope_backward")
    }

    fn forward_launch(&self, rows: usize) -> Launch {
        plain_launch(rows.div_ceil(ROWS * THREADS / self.threads), THREADS)
    }

    /// The threads of a head process one chunk of rows.
    fn backward_launch(&self, chunks: usize) -> Launch {
        plain_launch(chunks.div_ceil(THREADS / self.threads), THREADS)
    }
}

/// The matrix viewed with each head as a row.
fn head_rows(x: &Tensor<Cuda>, head_dim: usize) -> Result<Tensor<Cuda>> {
    x.reshape(x.rows * (x.cols / head_dim), head_dim)
}

/// Runs [`NormRope`] on the GPU.
pub(crate) fn norm_rope(cuda: &Cuda, op: NormRope<'_, Cuda>) -> Result<RmsNormOut<Cuda>> {
    const OP: &str = "norm_rope";
    op.check()?;
    let NormRope { x, weight, eps, table, positions } = op;
    let (dtype, head_dim) = (x.dtype(), table.cols);
    let buffers = BufferCheck::by(OP, cuda);
    buffers.tensor("x", x)?;
    buffers.tensor("weight", weight)?;
    buffers.tensor("table", table)?;
    let Some(config) = NormRopeConfig::choose(dtype, head_dim) else {
        check_size(OP, op.heads(), head_dim)?;
        let out = op.result(cuda)?;
        // The norm writes its own y; the operation's y is the result of the rotation.
        let heads = head_rows(x, head_dim)?;
        let normed = RmsNormOut { y: heads.unwritten_like(cuda)?, ..out.clone() };
        write_norm(cuda, &RmsNorm::new(&heads, weight, eps), &normed)?;
        let x = normed.y.reshape(x.rows, x.cols)?;
        write_turned(cuda, &Rope { x: &x, table, head_dim, positions, inverse: false }, &out.y)?;
        return Ok(out);
    };
    let heads = x.cols / head_dim;
    let rows = x.rows.saturating_mul(heads);
    check_size(OP, rows, head_dim)?;
    let out = op.result(cuda)?;
    if rows > 0 {
        let places = PositionsArg::new(&buffers, positions, x.rows)?;
        let angles = angles(OP, table, positions)?;
        let [x, to] = [x, &out.y].map(|x| plain_arg(x).0);
        let weight = weight.f32(OP, "weight")?.get();
        let args: [&dyn KernelArg; 10] = [
            x,
            weight,
            &angles,
            to,
            out.inv_rms.get(),
            &(rows as u32),
            &eps,
            &(heads as u32),
            &Divider::by(heads as u32),
            &places,
        ];
        let kernel = cuda.device().kernel(&config.forward())?;
        // SAFETY: `BufferCheck` checked that x has `rows` heads, the weight one head, and the starts one value per token; y is as large as
        // x, and inv_rms has one value per head. `check` ensured that the table has `seq_len` positions from the first one on.
        unsafe { kernel.launch(config.forward_launch(rows), &args) }?;
    }
    Ok(out)
}

/// Runs [`NormRopeBackward`] on the GPU.
pub(crate) fn norm_rope_backward(cuda: &Cuda, op: NormRopeBackward<'_, Cuda>) -> Result<Tensor<Cuda>> {
    const OP: &str = "norm_rope_backward";
    op.check()?;
    let (rows, dx) = (op.heads(), op.result(cuda)?);
    let NormRopeBackward { x, weight, inv_rms, dy, table, positions, dweight } = op;
    let (dtype, head_dim) = (x.dtype(), table.cols);
    check_size(OP, rows, head_dim)?;
    let buffers = BufferCheck::by(OP, cuda);
    buffers.tensor("x", x)?;
    buffers.tensor("weight", weight)?;
    buffers.tensor("dy", dy)?;
    buffers.tensor("table", table)?;
    buffers.tensor("dweight", dweight)?;
    buffers.values("inv_rms", inv_rms, rows)?;
    let Some(config) = NormRopeConfig::choose(dtype, head_dim) else {
        let turned = dy.unwritten_like(cuda)?;
        write_turned(cuda, &Rope { x: dy, table, head_dim, positions, inverse: true }, &turned)?;
        let [x, dy, to] = [x, &turned, &dx].map(|x| head_rows(x, head_dim));
        let (x, dy) = (&x?, &dy?);
        write_dx(cuda, RmsNormBackward { x, weight, inv_rms, dy, plus: None, dweight }, &to?)?;
        return Ok(dx);
    };
    let heads = (x.cols / head_dim) as u32;
    let places = PositionsArg::new(&buffers, positions, x.rows)?;
    let angles = angles(OP, table, positions)?;
    let weight = weight.f32(OP, "weight")?.get();
    add_column_sums(cuda.device(), OP, (rows, head_dim), dweight, |chunks| {
        let Chunks { sums, all, rows_per_shard, per_shard } = chunks;
        let [x, dy, to] = [x, dy, &dx].map(|x| plain_arg(x).0);
        let args: [&dyn KernelArg; 13] = [
            x,
            weight,
            inv_rms.get(),
            dy,
            &angles,
            to,
            sums,
            rows_per_shard,
            per_shard,
            all,
            &heads,
            &Divider::by(heads),
            &places,
        ];
        let kernel = cuda.device().kernel(&config.backward())?;
        // SAFETY: `BufferCheck` and `check` checked that x and dy have `rows` heads, the weight one head, inv_rms one value per head, the
        // starts one value per token, and the table `seq_len` positions from the first one on; dx is as large as x, and `sums` has one row
        // per chunk.
        unsafe { kernel.launch(config.backward_launch(*all as usize), &args) }
    })?;
    Ok(dx)
}

/// Every kernel instance of this module.
pub(crate) fn instances() -> Vec<Instance> {
    let configs = TYPES
        .into_iter()
        .flat_map(|dtype| TURNED_HEADS.map(|dim| NormRopeConfig { dtype, threads: dim / THREAD_COLS }));
    let specs = configs.flat_map(|config| [config.forward(), config.backward()]);
    specs.map(|spec| Instance { spec, shared_bytes: 0 }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usual_heads_have_an_instance_and_ctas_cover_them() {
        for (head_dim, forward, backward) in [(64, 2, 1), (128, 3, 1), (256, 6, 2)] {
            let config = NormRopeConfig::choose(DType::Bf16, head_dim).unwrap();
            assert_eq!(config.forward_launch(96).ctas, forward, "{config:?}");
            assert_eq!(
                config.backward_launch(96_usize.div_ceil(RmsNormBackward::<Cuda>::CHUNK) + 3).ctas,
                backward
            );
            for spec in [config.forward(), config.backward()] {
                assert!(instances().iter().any(|instance| instance.spec == spec), "{spec}");
            }
        }
        assert_eq!(NormRopeConfig::choose(DType::F32, 96), None);
        assert_eq!(NormRopeConfig::choose(DType::F32, 32), None);
    }
}
