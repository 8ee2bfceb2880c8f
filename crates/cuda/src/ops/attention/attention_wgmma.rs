//! Attention on the tensor cores (`csrc/kernels/attention/attention_wgmma.cuh`, `attention_wgmma_backward.cuh`): BF16, heads of 64 or 128.

use super::{QueryRows, Sizes};
use crate::jit::{KernelSpec, TemplateArg};
use crate::launch::Launch;
use crate::ops::Instance;
use crate::tensor_map::{Element, Swizzle, TensorMap, Tiles};
use crate::{Buffer, Cuda, Device};
use half::bf16;
use nibble_core::ops::{AttentionBackward, AttentionGrads};
use nibble_core::{Data, Result, Tensor};

/// Elements of the heads it takes.
pub const DIMS: [usize; 2] = [64, 128];
/// Queries or keys of a warpgroup.
const GROUP_ROWS: usize = 64;
/// Keys of a tile where queries stay.
const KEYS: usize = 128;
/// Rows of a box on its way out.
const ROWS_OUT: usize = 16;
/// Columns of a box.
const BOX_COLS: usize = 64;
/// Warpgroups that multiply in the backward pass.
const GRAD_GROUPS: usize = 2;
/// Stages of rings: of keys, and of queries.
const KEY_STAGES: usize = 2;
const QUERY_STAGES: usize = 3;
/// Barriers, and what it takes to start on a multiple of 1024.
const REST: usize = 128 + 1024;
/// What the L2 is asked to hold: keys and values of the heads at work, or queries and dout of the groups at work.
const KEYS_HELD: usize = 24 << 20;
const QUERIES_HELD: usize = 64 << 20;

/// What the kernels take.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Wgmma {
    sizes: Sizes,
    num_sms: usize,
}

impl Wgmma {
    /// Where the tensor cores take heads of these sizes, of tensors that lie so.
    pub fn choose(sizes: &Sizes, tensors: &[&Tensor<Cuda>], num_sms: u32) -> Option<Self> {
        let aligned =
            |x: &&Tensor<Cuda>| matches!(&x.data, Data::Bf16(x) if x.get().address().is_multiple_of(16));
        let takes = DIMS.contains(&sizes.head_dim()) && sizes.heads() > 0 && tensors.iter().all(aligned);
        takes.then_some(Self { sizes: *sizes, num_sms: num_sms as usize })
    }

    fn dim(&self) -> usize {
        self.sizes.head_dim()
    }

    /// Query heads whose keys and values the L2 holds, at least those of one group.
    fn heads_held(&self) -> i32 {
        let sizes = &self.sizes;
        let kv_heads = (KEYS_HELD / (sizes.seq_len() * 4 * self.dim())).max(1);
        (kv_heads * sizes.group()).min(sizes.heads() * sizes.sequences()) as i32
    }

    /// Groups whose queries and dout the L2 holds, at least a quarter of all: few of the last would keep few multiprocessors busy.
    fn groups_held(&self) -> i32 {
        let sizes = &self.sizes;
        let (all, group_bytes) =
            (sizes.kv_heads() * sizes.sequences(), sizes.seq_len() * 4 * self.dim() * sizes.group());
        (QUERIES_HELD / group_bytes).max(all.div_ceil(4)).min(all) as i32
    }

    /// One cta a multiprocessor, no more than there are tiles of `rows` queries.
    fn persistent(&self, rows: usize, threads: usize, shared_bytes: usize) -> Launch {
        let tiles = self.sizes.tiles(rows, self.sizes.heads());
        Launch { ctas: tiles.min(self.num_sms) as u32, threads: threads as u32, cluster: 1, shared_bytes }
    }

    /// out and lse.
    pub fn forward(
        &self,
        device: &Device,
        [q, k, v, out]: [&Tensor<Cuda>; 4],
        lse: &Buffer<f32>,
    ) -> Result<()> {
        let dim = self.dim();
        let groups = forward_groups(dim);
        let launch = self.persistent(groups * GROUP_ROWS, 128 * (groups + 1), forward_shared(dim));
        let (q, k) = (self.map(q, GROUP_ROWS)?, self.map(k, KEYS)?);
        let (v, out) = (self.map(v, KEYS)?, self.map(out, ROWS_OUT)?);
        let kernel = device.kernel(&forward_spec(dim))?;
        // SAFETY: the maps hold the copies to their tensors, which the caller checked to have the sizes, as lse has.
        unsafe { kernel.launch(launch, &[&q, &k, &v, &out, lse, &self.sizes, &self.heads_held()]) }
    }

    /// dq, dk and dv; `rows` with lse times log2(e).
    pub fn backward(
        &self,
        device: &Device,
        op: &AttentionBackward<'_, Cuda>,
        rows: &QueryRows,
        grads: &AttentionGrads<Cuda>,
    ) -> Result<()> {
        let (dim, grad_rows) = (self.dim(), GRAD_GROUPS * GROUP_ROWS);
        let threads = 128 * (GRAD_GROUPS + 1);
        let (q, dout) = (self.map(op.q, query_rows(dim))?, self.map(op.dout, query_rows(dim))?);
        let (k, v) = (self.map(op.k, GROUP_ROWS)?, self.map(op.v, GROUP_ROWS)?);
        let (dk, dv) = (self.map(&grads.dk, ROWS_OUT)?, self.map(&grads.dv, ROWS_OUT)?);
        let launch = Launch {
            ctas: self.sizes.tiles(grad_rows, self.sizes.kv_heads()) as u32,
            threads: threads as u32,
            cluster: 1,
            shared_bytes: backward_kv_shared(dim),
        };
        let (lse, delta) = (&rows.lse, &rows.delta);
        let kernel = device.kernel(&backward_spec(Part::Kv, dim))?;
        // SAFETY: the maps hold the copies to their tensors, which the caller checked to have the sizes; rows are as long as the padded
        // sequences of all heads.
        unsafe {
            kernel
                .launch(launch, &[&q, &k, &v, &dout, &dk, &dv, lse, delta, &self.sizes, &self.groups_held()])
        }?;
        let (q, dout) = (self.map(op.q, GROUP_ROWS)?, self.map(op.dout, GROUP_ROWS)?);
        let (k, v, dq) = (self.map(op.k, KEYS)?, self.map(op.v, KEYS)?, self.map(&grads.dq, ROWS_OUT)?);
        let launch = self.persistent(grad_rows, threads, backward_q_shared(dim));
        let kernel = device.kernel(&backward_spec(Part::Q, dim))?;
        // SAFETY: likewise.
        unsafe {
            kernel.launch(launch, &[&q, &k, &v, &dout, &dq, lse, delta, &self.sizes, &self.heads_held()])
        }
    }

    /// Boxes of so many rows of a tensor, which end where their sequence does.
    fn map(&self, x: &Tensor<Cuda>, tile_rows: usize) -> Result<TensorMap> {
        let address = match &x.data {
            Data::Bf16(x) => x.get().address(),
            Data::F32(x) => x.get().address(),
        };
        Tiles {
            element: Element::Bf16,
            address,
            rows: self.sizes.seq_len(),
            cols: x.cols,
            row_stride_bytes: x.cols * size_of::<bf16>(),
            tile_rows,
            tile_cols: BOX_COLS,
            swizzle: Swizzle::Bytes128,
        }
        .encode_stack(self.sizes.sequences())
    }
}

/// Warpgroups that multiply in the forward pass: short heads leave registers for three.
const fn forward_groups(dim: usize) -> usize {
    if dim > 64 { 2 } else { 3 }
}

fn forward_spec(dim: usize) -> KernelSpec {
    KernelSpec {
        source: "kernels/attention/attention_wgmma.cuh",
        name: "nib::attention_wgmma",
        args: vec![
            ("kDim", TemplateArg::Int(dim as i64)),
            ("kGroups", TemplateArg::Int(forward_groups(dim) as i64)),
        ],
    }
}

/// Rows of BF16.
const fn row_bytes(rows: usize, dim: usize) -> usize {
    rows * dim * size_of::<bf16>()
}

/// q, k and v in their stages, and out.
const fn forward_shared(dim: usize) -> usize {
    row_bytes(2 * forward_groups(dim) * GROUP_ROWS + 2 * KEY_STAGES * KEYS, dim) + REST
}

/// A kernel of the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Q,
    Kv,
}

fn backward_spec(part: Part, dim: usize) -> KernelSpec {
    KernelSpec {
        source: "kernels/attention/attention_wgmma_backward.cuh",
        name: match part {
            Part::Q => "nib::attention_wgmma_backward_q",
            Part::Kv => "nib::attention_wgmma_backward_kv",
        },
        args: vec![("kDim", TemplateArg::Int(dim as i64))],
    }
}

/// Queries of a tile where keys stay: short heads leave registers for more.
const fn query_rows(dim: usize) -> usize {
    if dim > 64 { 64 } else { 128 }
}

/// k and v, q and dout with their rows' numbers in their stages, and what goes out.
const fn backward_kv_shared(dim: usize) -> usize {
    let queries = 2 * QUERY_STAGES * query_rows(dim);
    row_bytes(3 * GRAD_GROUPS * GROUP_ROWS + queries, dim) + queries * size_of::<f32>() + REST
}

/// q and dout, k and v in their stages, and dq.
const fn backward_q_shared(dim: usize) -> usize {
    row_bytes(3 * GRAD_GROUPS * GROUP_ROWS + 2 * KEY_STAGES * KEYS, dim) + REST
}

/// The instances.
pub(super) fn instances() -> Vec<Instance> {
    let of_dim = |dim| {
        [
            (forward_spec(dim), forward_shared(dim)),
            (backward_spec(Part::Kv, dim), backward_kv_shared(dim)),
            (backward_spec(Part::Q, dim), backward_q_shared(dim)),
        ]
    };
    DIMS.into_iter().flat_map(of_dim).map(|(spec, shared_bytes)| Instance { spec, shared_bytes }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_are_whole_groups_that_the_l2_holds() {
        let of = |sizes| Wgmma { sizes, num_sms: 132 };
        let long = of(Sizes::of(8, 4096, [16, 4], 128));
        // 2 MiB of keys and values a head, 8 MiB of queries and dout a group.
        assert_eq!((long.heads_held(), long.groups_held()), (12 * 4, 8));
        let short = of(Sizes::of(1, 200, [8, 1], 64));
        assert_eq!((short.heads_held(), short.groups_held()), (8, 1));
        let longest = of(Sizes::of(1, 1 << 20, [8, 2], 128));
        assert_eq!((longest.heads_held(), longest.groups_held()), (4, 1));
        let many = of(Sizes::of(32, 4096, [16, 4], 128));
        assert_eq!((many.heads_held(), many.groups_held()), (48, 32));
        assert_eq!(long.persistent(128, 384, 0).ctas, 132);
        assert_eq!(short.persistent(192, 512, 0).ctas, 16);
    }

    #[test]
    fn shared_memory_fits_a_multiprocessor() {
        for instance in instances() {
            assert!(instance.shared_bytes <= 232_448, "{instance:?}");
        }
    }
}
