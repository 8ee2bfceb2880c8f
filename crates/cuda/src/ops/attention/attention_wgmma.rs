//! Attention on the tensor cores (`csrc/kernels/attention/attention_wgmma.cuh`, `attention_wgmma_backward.cuh`,
//! `attention_wgmma_backward_once.cuh`): BF16, heads of 64 or 128, or of 192 with values of 128.

use super::{Lists, QueryRows, Sizes};
use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::tensor_map::{Element, Swizzle, TensorMap, Tiles};
use crate::launch::{KernelArg, Launch, plain_args};
use crate::ops::Instance;
use crate::{Buffer, Cuda, Device};
use half::bf16;
use nibble_choice::attention::{AttentionPath, HEADS, StoredScoreGrads};
use nibble_core::ops::{AttentionBackward, AttentionGrads};
use nibble_core::{DType, Data, Result, Tensor};

/// Queries or keys per warpgroup.
const GROUP_ROWS: usize = 64;
/// Keys per tile of the forward pass.
const KEYS: usize = 128;
/// Rows per box of a store.
const ROWS_OUT: usize = 16;
/// Columns per box.
const BOX_COLS: usize = 64;
/// Math warpgroups in the backward pass; the next constant is the number of threads of its kernels.
const GRAD_GROUPS: usize = 2;
const GRAD_THREADS: u32 = 128 * (GRAD_GROUPS as u32 + 1);
/// Queries per block of dS.
const BLOCK_ROWS: usize = 256;
/// Number of stages in the key ring of the forward pass, and in the query ring of the backward
/// pass.
const KEY_STAGES: usize = 2;
const QUERY_STAGES: usize = 3;
/// Bytes for barriers and small fields, and for alignment to 1024 bytes.
const REST: usize = 224 + 1024;
/// Bytes of L2 for the keys and values of a section's heads; the next constant is for the queries and
/// dout of a section's groups.
const KEYS_HELD: usize = 24 << 20;
const QUERIES_HELD: usize = 64 << 20;

/// Parameters that the kernels share.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Wgmma {
    sizes: Sizes,
    num_sms: usize,
}

impl Wgmma {
    /// The parameters for heads of the given sizes, or `None` if the kernels do not support such heads. Tensors must be aligned
    /// to 16 bytes, as all backends allocate them, because a descriptor of another address is an error.
    pub fn choose(sizes: &Sizes, dtype: DType, num_sms: u32) -> Option<Self> {
        let takes = AttentionPath::of(dtype, sizes.dims()) == AttentionPath::TensorCores && sizes.heads() > 0;
        takes.then_some(Self { sizes: *sizes, num_sms: num_sms as usize })
    }

    fn dims(&self) -> Dims {
        let (head, value) = self.sizes.dims();
        Dims { head, value }
    }

    /// Query heads per section: as many heads as have their keys and values in the L2, but at least one
    /// group.
    fn heads_held(&self) -> i32 {
        let sizes = &self.sizes;
        let kv_heads = (KEYS_HELD / row_bytes(sizes.seq_len(), self.dims().both())).max(1);
        (kv_heads * sizes.group()).min(sizes.heads() * sizes.sequences()) as i32
    }

    /// Groups per section: as many groups as have their queries and dout in the L2, but at least a quarter of all
    /// groups, because a small last section would keep only few SMs busy.
    fn groups_held(&self) -> i32 {
        let sizes = &self.sizes;
        let (all, group_bytes) = (
            sizes.kv_heads() * sizes.sequences(),
            row_bytes(sizes.seq_len() * sizes.group(), self.dims().both()),
        );
        (QUERIES_HELD / group_bytes).max(all.div_ceil(4)).min(all) as i32
    }

    /// One persistent CTA per SM, but at most one per tile of `rows` queries.
    fn persistent(&self, rows: usize, threads: usize, shared_bytes: usize) -> Launch {
        let tiles = self.sizes.tiles(rows, self.sizes.heads());
        Launch { ctas: tiles.min(self.num_sms) as u32, threads: threads as u32, cluster: 1, shared_bytes }
    }

    /// Computes out and lse.
    pub fn forward(
        &self,
        device: &Device,
        [q, k, v, out]: [&Tensor<Cuda>; 4],
        lse: &Buffer<f32>,
        (windows, sinks): (Option<Lists<'_>>, Option<&Buffer<f32>>),
    ) -> Result<()> {
        let dims = self.dims();
        let groups = dims.forward_groups();
        let launch = self.persistent(groups * GROUP_ROWS, 128 * (groups + 1), dims.forward_shared());
        let (q, k) = (self.map(q, GROUP_ROWS)?, self.map(k, KEYS)?);
        let (v, out) = (self.map(v, KEYS)?, self.map(out, ROWS_OUT)?);
        let (section, first_key) = (self.heads_held(), windows.map(|lists| lists.first_key));
        let ticket = device.counters(1)?;
        let kernel = device.kernel(&dims.forward_spec(windows.is_some(), sinks.is_some()))?;
        let args: [&dyn KernelArg; 10] =
            [&q, &k, &v, &out, lse, &self.sizes, &section, &first_key, &ticket, &sinks];
        // SAFETY: the tensor maps limit copies to their tensors; the caller checked that the tensors, lse, windows and sinks have these
        // sizes.
        unsafe { kernel.launch(launch, &args) }
    }

    /// Computes dq, dk and dv; `rows` holds lse times log2(e).
    pub fn backward(
        &self,
        device: &Device,
        op: &AttentionBackward<'_, Cuda>,
        rows: &QueryRows,
        windows: Option<Lists<'_>>,
        grads: &AttentionGrads<Cuda>,
    ) -> Result<()> {
        let sizes = &self.sizes;
        let heads = [sizes.heads(), sizes.kv_heads()];
        if let Some(stored) = StoredScoreGrads::of(sizes.dims(), sizes.sequences(), heads, sizes.seq_len()) {
            return self.backward_once(device, op, (rows, windows), grads, &stored);
        }
        self.backward_kv(device, op, (rows, windows), grads)?;
        self.backward_q(device, op, (rows, windows), grads)
    }

    /// Computes dq, dk and dv in one kernel, with dS in memory in the layout of `stored`.
    fn backward_once(
        &self,
        device: &Device,
        op: &AttentionBackward<'_, Cuda>,
        (rows, windows): (&QueryRows, Option<Lists<'_>>),
        grads: &AttentionGrads<Cuda>,
        stored: &StoredScoreGrads,
    ) -> Result<()> {
        let dims = self.dims();
        let [q, k, v, dout] = [op.q, op.k, op.v, op.dout].map(|x| self.map(x, GROUP_ROWS));
        let [dq, dk, dv] = [&grads.dq, &grads.dk, &grads.dv].map(|x| self.map(x, ROWS_OUT));
        let (q, k, v, dout, dq, dk, dv) = (q?, k?, v?, dout?, dq?, dk?, dv?);
        let heads = self.sizes.heads();
        let launch = Launch {
            ctas: (self.sizes.tiles(GRAD_GROUPS * GROUP_ROWS, heads)
                + self.sizes.tiles(2 * BLOCK_ROWS, heads)) as u32,
            threads: GRAD_THREADS,
            cluster: 1,
            shared_bytes: dims.backward_once_shared(),
        };
        let (lse, delta) = (&rows.lse, &rows.delta);
        let [first_key, end_query] =
            [windows.map(|lists| lists.first_key), windows.map(|lists| lists.end_query)];
        let score_grads: Buffer<u8> = device.alloc(stored.bytes())?;
        // One word for tickets, and one word per slot.
        let counters = device.counters(1 + stored.slots)?;
        let plan = OncePlan { ahead: stored.ahead as i32, slots: stored.slots as i32 };
        let kernel = device.kernel(&dims.backward_spec(Part::Once, windows.is_some()))?;
        let args: [&dyn KernelArg; 15] = [
            &q,
            &k,
            &v,
            &dout,
            &dq,
            &dk,
            &dv,
            lse,
            delta,
            &self.sizes,
            &first_key,
            &end_query,
            &score_grads,
            &counters,
            &plan,
        ];
        // SAFETY: the tensor maps limit copies to their tensors, whose sizes the caller checked; rows are as long as the padded sequences
        // of all heads; `stored`, the slots and their counters have these sizes. A dropped buffer is freed only after the stream has passed
        // the kernel.
        unsafe { kernel.launch(launch, &args) }
    }

    /// Computes dk and dv.
    fn backward_kv(
        &self,
        device: &Device,
        op: &AttentionBackward<'_, Cuda>,
        (rows, windows): (&QueryRows, Option<Lists<'_>>),
        grads: &AttentionGrads<Cuda>,
    ) -> Result<()> {
        let dims = self.dims();
        let (q, dout) = (self.map(op.q, dims.query_rows())?, self.map(op.dout, dims.query_rows())?);
        let (k, v) = (self.map(op.k, GROUP_ROWS)?, self.map(op.v, GROUP_ROWS)?);
        let (dk, dv) = (self.map(&grads.dk, ROWS_OUT)?, self.map(&grads.dv, ROWS_OUT)?);
        let launch = Launch {
            ctas: self.sizes.tiles(GRAD_GROUPS * GROUP_ROWS, self.sizes.kv_heads()) as u32,
            threads: GRAD_THREADS,
            cluster: 1,
            shared_bytes: dims.backward_kv_shared(),
        };
        let (section, end_query) = (self.groups_held(), windows.map(|lists| lists.end_query));
        let kernel = device.kernel(&dims.backward_spec(Part::Kv, windows.is_some()))?;
        let args: [&dyn KernelArg; 11] =
            [&q, &k, &v, &dout, &dk, &dv, &rows.lse, &rows.delta, &self.sizes, &section, &end_query];
        // SAFETY: the tensor maps limit copies to their tensors, whose sizes the caller checked; rows are as long as the padded
        // sequences of all heads.
        unsafe { kernel.launch(launch, &args) }
    }

    /// Computes dq.
    fn backward_q(
        &self,
        device: &Device,
        op: &AttentionBackward<'_, Cuda>,
        (rows, windows): (&QueryRows, Option<Lists<'_>>),
        grads: &AttentionGrads<Cuda>,
    ) -> Result<()> {
        let dims = self.dims();
        let (q, dout) = (self.map(op.q, GROUP_ROWS)?, self.map(op.dout, GROUP_ROWS)?);
        let (k, v) = (self.map(op.k, dims.grad_keys())?, self.map(op.v, dims.grad_keys())?);
        let dq = self.map(&grads.dq, ROWS_OUT)?;
        let launch =
            self.persistent(GRAD_GROUPS * GROUP_ROWS, GRAD_THREADS as usize, dims.backward_q_shared());
        let (section, first_key) = (self.heads_held(), windows.map(|lists| lists.first_key));
        let kernel = device.kernel(&dims.backward_spec(Part::Q, windows.is_some()))?;
        let args: [&dyn KernelArg; 10] =
            [&q, &k, &v, &dout, &dq, &rows.lse, &rows.delta, &self.sizes, &section, &first_key];
        // SAFETY: the tensor maps limit copies to their tensors, whose sizes the caller checked;
        // rows are as long as the padded sequences of all heads.
        unsafe { kernel.launch(launch, &args) }
    }

    /// A tensor map with boxes of `tile_rows` rows; a box is clipped at the end of its sequence.
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

/// Mirrors the device struct `OncePlan`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
struct OncePlan {
    ahead: i32,
    slots: i32,
}

plain_args!(OncePlan);

/// The number of bytes in `rows` rows of BF16.
const fn row_bytes(rows: usize, dim: usize) -> usize {
    rows * dim * size_of::<bf16>()
}

/// Which kernel of the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Q,
    Kv,
    /// The kernel that computes dq, dk and dv.
    Once,
}

/// Head sizes, one of [`HEADS`], and the tile sizes that follow from them, as in the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Dims {
    /// Number of elements of a query or key head.
    head: usize,
    /// Number of elements of a value head.
    value: usize,
}

impl Dims {
    /// Number of elements of a key and its value together, or of a query and its dout.
    const fn both(self) -> usize {
        self.head + self.value
    }

    /// Whether heads are so long that their accumulators leave less space for the other values.
    const fn long(self) -> bool {
        self.head > 128
    }

    /// Math warpgroups in the forward pass: short heads leave registers for three warpgroups.
    const fn forward_groups(self) -> usize {
        if self.head > 64 { 2 } else { 3 }
    }

    /// Queries per tile in the kernel of dk and dv, where keys are stationary: short heads leave registers for more
    /// queries.
    const fn query_rows(self) -> usize {
        if self.head > 64 { 64 } else { 128 }
    }

    /// Keys per tile in the kernel of dq, where queries are stationary.
    const fn grad_keys(self) -> usize {
        if self.long() { 64 } else { 128 }
    }

    /// Columns of a row of `dim` elements that are staged at a time for a store.
    const fn cols_out(self, dim: usize) -> usize {
        if self.long() { BOX_COLS } else { dim }
    }

    /// Shared memory of the forward pass: stages of q, k and v, and out.
    const fn forward_shared(self) -> usize {
        let (queries, stages) = (self.forward_groups() * GROUP_ROWS, if self.long() { 1 } else { 2 });
        row_bytes(queries, stages * self.head + self.cols_out(self.value))
            + row_bytes(KEY_STAGES * KEYS, self.both())
            + REST
    }

    /// Shared memory of the kernel for dk and dv: k and v; stages of q and dout, with lse and delta of their rows; and 16 bytes
    /// instead of dS.
    const fn backward_kv_shared(self) -> usize {
        self.key_grads_shared() + 16
    }

    const fn key_grads_shared(self) -> usize {
        let (keys, queries) = (GRAD_GROUPS * GROUP_ROWS, QUERY_STAGES * self.query_rows());
        row_bytes(keys + queries, self.both()) + 2 * queries * size_of::<f32>() + REST
    }

    /// Shared memory of the one-kernel backward pass, which is the larger of two layouts: dk and dv with dS staged for its store; dq with
    /// stages of keys and dS.
    const fn backward_once_shared(self) -> usize {
        let (rows, stages) = (GRAD_GROUPS * GROUP_ROWS, if self.long() { 3 } else { 4 });
        let keys = self.key_grads_shared() + row_bytes(rows, GROUP_ROWS);
        let queries =
            row_bytes(stages * GROUP_ROWS, self.head + BLOCK_ROWS) + row_bytes(rows, self.head) + REST;
        if keys > queries { keys } else { queries }
    }

    /// Shared memory of the kernel for dq: q and dout, stages of k and v, and dq.
    const fn backward_q_shared(self) -> usize {
        let (queries, stages) = (GRAD_GROUPS * GROUP_ROWS, if self.long() { 3 } else { 2 });
        row_bytes(queries + stages * self.grad_keys(), self.both())
            + row_bytes(queries, self.cols_out(self.head))
            + REST
    }

    /// The template arguments that all of these kernels have.
    fn args(self) -> Vec<(&'static str, TemplateArg)> {
        let of = |dim: usize| TemplateArg::Int(dim as i64);
        vec![("kDim", of(self.head)), ("kValueDim", of(self.value))]
    }

    fn forward_spec(self, windowed: bool, sinks: bool) -> KernelSpec {
        let groups = ("kGroups", TemplateArg::Int(self.forward_groups() as i64));
        let choices = [("kWindowed", TemplateArg::Bool(windowed)), ("kSinks", TemplateArg::Bool(sinks))];
        KernelSpec {
            source: "kernels/attention/attention_wgmma.cuh",
            name: "nib::attention_wgmma",
            args: self.args().into_iter().chain([groups]).chain(choices).collect(),
        }
    }

    fn backward_spec(self, part: Part, windowed: bool) -> KernelSpec {
        let windowed = ("kWindowed", TemplateArg::Bool(windowed));
        let pair = "kernels/attention/attention_wgmma_backward.cuh";
        let (source, name) = match part {
            Part::Q => (pair, "nib::attention_wgmma_backward_q"),
            Part::Kv => (pair, "nib::attention_wgmma_backward_kv"),
            Part::Once => {
                ("kernels/attention/attention_wgmma_backward_once.cuh", "nib::attention_wgmma_backward_once")
            }
        };
        KernelSpec { source, name, args: self.args().into_iter().chain([windowed]).collect() }
    }
}

/// Every kernel instance of this module.
pub(super) fn instances() -> Vec<Instance> {
    let of_dims = |(head, value), windowed| {
        let dims = Dims { head, value };
        let once = (dims.backward_spec(Part::Once, windowed), dims.backward_once_shared());
        let forward = [false, true].map(|sinks| (dims.forward_spec(windowed, sinks), dims.forward_shared()));
        let backward = [
            (dims.backward_spec(Part::Kv, windowed), dims.backward_kv_shared()),
            (dims.backward_spec(Part::Q, windowed), dims.backward_q_shared()),
        ];
        forward.into_iter().chain(backward).chain((head > 64).then_some(once))
    };
    let all = HEADS.into_iter().flat_map(|heads| [false, true].map(|windowed| of_dims(heads, windowed)));
    all.flatten().map(|(spec, shared_bytes)| Instance { spec, shared_bytes }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_are_whole_groups_that_the_l2_holds() {
        let of = |sizes| Wgmma { sizes, num_sms: 132 };
        let long = of(Sizes::of(8, 4096, [16, 4], (128, 128), 0.1));
        // A head has 2 MiB of keys and values, and a group has 8 MiB of queries and dout.
        assert_eq!((long.heads_held(), long.groups_held()), (12 * 4, 8));
        let short = of(Sizes::of(1, 200, [8, 1], (64, 64), 0.1));
        assert_eq!((short.heads_held(), short.groups_held()), (8, 1));
        let longest = of(Sizes::of(1, 1 << 20, [8, 2], (128, 128), 0.1));
        assert_eq!((longest.heads_held(), longest.groups_held()), (4, 1));
        let many = of(Sizes::of(32, 4096, [16, 4], (128, 128), 0.1));
        assert_eq!((many.heads_held(), many.groups_held()), (48, 32));
        // A head has 2.5 MiB of keys and values, and a group has 10 MiB of queries and dout.
        let unequal = of(Sizes::of(8, 4096, [16, 4], (192, 128), 0.1));
        assert_eq!((unequal.heads_held(), unequal.groups_held()), (9 * 4, 8));
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
