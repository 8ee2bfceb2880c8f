//! Causal attention with grouped query heads and RoPE, with RMSNorm on each query and key head (Qwen3) or without (Llama).
//! t tokens, d model, h heads, g key/value heads, c head_dim, u value_dim: heads of values, mostly the same.

use super::{Heads, HeadsSaved, Input, Layer, Linear, LinearSaved, Norm, Rotation, wgrad_x};
use crate::cx::Cx;
use crate::ledger::{Ledger, Saved};
use crate::param::{Param, Wanted};
use crate::recompute::Scope;
use crate::spec::{GroupedQueryShape, GroupedQuerySpec, Part, Rope};
use nibble_core::formats::double;
use nibble_core::ops::{Add, Attention, AttentionBackward, AttentionDecode, AttentionOut, attention_scale};
use nibble_core::recipe::{Section, Site};
use nibble_core::{DType, Data, Error, Kernels, Operand, Result, Tensor};
use std::ops::Range;

/// Cosines and sines of position · θ^(−2i/head_dim), `[positions, head_dim]`, made on the host in F64 with the
/// same bits everywhere.
pub fn rope_table<B: Kernels>(b: &B, positions: usize, Rope { head_dim, theta }: Rope) -> Result<Tensor<B>> {
    let log_step = double::ln(theta) * -2.0 / head_dim as f64;
    let mut values = Vec::with_capacity(positions * head_dim);
    for position in 0..positions {
        let angles =
            (0..head_dim / 2).map(|i| double::sin_cos(position as f64 * double::exp(i as f64 * log_step)));
        let (sines, cosines): (Vec<f32>, Vec<f32>) =
            angles.map(|(sin, cos)| (sin as f32, cos as f32)).unzip();
        values.extend(cosines);
        values.extend(sines);
    }
    Tensor::from_f32(b, &values, positions, head_dim)
}

/// Attention in which several heads of queries share keys and values.
#[derive(Debug, Clone)]
pub struct GroupedQuery<B: Kernels> {
    /// Its name, `model.layers.3.self_attn`.
    pub name: String,
    /// Sizes.
    pub shape: GroupedQueryShape,
    /// `[h·c, d]`.
    pub q: Linear<B>,
    /// `[g·c, d]`.
    pub k: Linear<B>,
    /// `[g·u, d]`.
    pub v: Linear<B>,
    /// `[d, h·u]`.
    pub o: Linear<B>,
    /// Norm and rotation of the queries.
    pub q_heads: Heads<B>,
    /// Norm and rotation of the keys.
    pub k_heads: Heads<B>,
    /// `[seq_len, c]`, as [`rope_table`] makes it: a row for each position. Shared by all layers.
    pub rope: Tensor<B>,
    /// Keep normed and rotated queries and keys, instead of making them again in the backward pass. Those that are not normed are
    /// always kept.
    pub keep_heads: bool,
}

/// Keys and values of a sequence's tokens so far, in one layer.
#[derive(Debug)]
pub struct KvCache<B: Kernels> {
    /// Rotated, `[seq_len, g·c]`.
    k: Tensor<B>,
    /// `[seq_len, g·u]`.
    v: Tensor<B>,
    /// Rows that are filled.
    len: usize,
}

impl<B: Kernels> KvCache<B> {
    /// Another sequence begins.
    pub fn clear(&mut self) {
        self.len = 0;
    }
}

/// What queries, keys and values have of their input, one each; those whose recipes agree share it.
type PerProjection<B> = [Operand<B>; 3];

/// Queries, keys and values of some tokens, and what is kept of making them.
struct Projected<B: Kernels> {
    x: PerProjection<B>,
    /// Rotated.
    q: Tensor<B>,
    q_saved: HeadsSaved<B>,
    /// Rotated.
    k: Tensor<B>,
    k_saved: HeadsSaved<B>,
    v: Tensor<B>,
}

/// Copies rows to those from `at` on of a tensor of the same type and as many columns.
pub fn copy_rows<B: Kernels>(
    b: &B,
    from: &Tensor<B>,
    rows: Range<usize>,
    to: &mut Tensor<B>,
    at: usize,
) -> Result<()> {
    let cols = to.cols;
    if from.cols != cols {
        return Err(Error::shape("copy_rows", "columns", from.cols, cols));
    }
    let (range, at) = (rows.start * cols..rows.end * cols, at * cols);
    match (&from.data, &mut to.data) {
        (Data::F32(from), Data::F32(to)) => b.copy(from, range, to, at),
        (Data::Bf16(from), Data::Bf16(to)) => b.copy(from, range, to, at),
        _ => Err(Error::shape("copy_rows", "type", from.dtype(), to.dtype())),
    }
}

/// What attention keeps.
#[derive(Debug)]
pub struct GroupedQuerySaved<B: Kernels> {
    layer: String,
    /// The input of queries, keys and values: the same buffers for all three, unless their recipes differ.
    x: PerProjection<B>,
    q: HeadsSaved<B>,
    k: HeadsSaved<B>,
    v: Tensor<B>,
    out: Tensor<B>,
    lse: B::Buf<f32>,
    o: LinearSaved<B>,
}

impl<B: Kernels> Saved for GroupedQuerySaved<B> {
    fn ledger(&self, ledger: &mut Ledger) {
        self.x.iter().for_each(|x| ledger.operand(&self.layer, "x", x));
        self.q.list(ledger, &self.layer, "q");
        self.k.list(ledger, &self.layer, "k");
        ledger.tensor(&self.layer, "v", &self.v);
        ledger.tensor(&self.layer, "out", &self.out);
        ledger.words::<B, f32>(&self.layer, "lse", &self.lse);
        self.o.ledger(ledger);
    }
}

impl<B: Kernels> GroupedQuery<B> {
    /// Random weights, and positions for sequences as long as the table.
    pub fn new(cx: &Cx<'_, B>, spec: &GroupedQuerySpec, rope: Tensor<B>) -> Result<Self> {
        let linear = |part: &Part| Linear::new(cx, part, cx.activations());
        let [q_norm, k_norm] = match &spec.norms {
            Some(norms) => norms.each_ref().map(Some),
            None => [None; 2],
        };
        let heads = |norm: Option<&Part>| -> Result<Heads<B>> {
            Ok(Heads { norm: norm.map(|part| Norm::new(cx, part, spec.eps)).transpose()? })
        };
        Ok(Self {
            name: spec.id.clone(),
            q: linear(&spec.q)?,
            k: linear(&spec.k)?,
            v: linear(&spec.v)?,
            o: linear(&spec.o)?,
            q_heads: heads(q_norm)?,
            k_heads: heads(k_norm)?,
            shape: spec.shape,
            rope,
            keep_heads: false,
        })
    }

    /// Positions that it has.
    fn positions(&self) -> usize {
        self.rope.rows
    }

    /// Which of queries, keys and values take the same input, since their recipes agree at these sites: for each of them its
    /// section, an earlier one with the same, if there is one, and the name of what is made: that of the whole where all agree.
    fn sharing(&self, cx: &Cx<'_, B>, sites: &[Site], whole: &str) -> Vec<(String, Option<usize>, Section)> {
        let projections = [&self.q, &self.k, &self.v];
        let sections = projections.map(|projection| projection.section(cx));
        let agree = |i: usize, j: usize| sites.iter().all(|s| sections[i].at(*s) == sections[j].at(*s));
        let all = agree(0, 1) && agree(0, 2);
        let of = |i: usize| {
            let name = if all { whole } else { projections[i].site() };
            (name.to_owned(), (0..i).find(|j| agree(*j, i)), sections[i])
        };
        (0..3).map(of).collect()
    }

    /// Queries, keys and values of tokens from this position on, and what is kept of making them.
    fn projected(&self, cx: &Cx<'_, B>, x_td: &Tensor<B>, first_position: usize) -> Result<Projected<B>> {
        let groups = cx.groups_of(x_td);
        let mut inputs: Vec<Input<B>> = Vec::with_capacity(3);
        for (layer, like, section) in self.sharing(cx, &[Site::FpropX, Site::SavedX], &self.name) {
            inputs.push(match like {
                Some(like) => inputs[like].clone(),
                None => Input::new(cx, (&layer, &self.name), &section, x_td, groups)?,
            });
        }
        let product = |projection: &Linear<B>, i: usize| projection.product(cx, &inputs[i].fprop);
        let [q, k, v] = [product(&self.q, 0)?, product(&self.k, 1)?, product(&self.v, 2)?];
        let x = [0, 1, 2].map(|i| inputs[i].saved.clone());
        drop(inputs);
        let rotation =
            Rotation { table: &self.rope, seq_len: self.positions().min(x_td.rows), first_position };
        let (q, q_saved) = self.q_heads.forward(cx, q, &rotation, self.keep_heads)?;
        let (k, k_saved) = self.k_heads.forward(cx, k, &rotation, self.keep_heads)?;
        Ok(Projected { x, q, q_saved, k, k_saved, v })
    }

    /// The forward pass up to its last product: what that multiplies, and what is kept.
    fn attended(&self, cx: &Cx<'_, B>, x_td: Tensor<B>) -> Result<(Operand<B>, GroupedQuerySaved<B>)> {
        let Projected { x, q, q_saved, k, k_saved, v } = self.projected(cx, &x_td, 0)?;
        let GroupedQueryShape { head_dim, value_dim, .. } = self.shape;
        let seq_len = self.positions().min(x_td.rows);
        let scale = attention_scale(head_dim);
        let op = Attention { q: &q, k: &k, v: &v, head_dim, value_dim, scale, seq_len, windows: None };
        let AttentionOut { out, lse } = op.run(cx.b)?;
        drop((q, k));
        let (o_input, o) = self.o.input(cx, &out)?;
        let layer = self.name.clone();
        Ok((o_input, GroupedQuerySaved { layer, x, q: q_saved, k: k_saved, v, out, lse, o }))
    }

    /// The forward pass of tokens that follow those in the cache, one sequence, or of its first ones. Puts their keys and values into
    /// the cache. Several tokens at once only where it is empty.
    pub fn cached(&self, cx: &Cx<'_, B>, x_td: &Tensor<B>, cache: &mut KvCache<B>) -> Result<Tensor<B>> {
        let Projected { q, k, v, .. } = self.projected(cx, x_td, cache.len)?;
        let GroupedQueryShape { head_dim, value_dim, .. } = self.shape;
        let (t, scale) = (x_td.rows, attention_scale(head_dim));
        for (from, to) in [(&k, &mut cache.k), (&v, &mut cache.v)] {
            copy_rows(cx.b, from, 0..t, to, cache.len)?;
        }
        let first = cache.len;
        cache.len += t;
        let out = if first == 0 {
            Attention { q: &q, k: &k, v: &v, head_dim, value_dim, scale, seq_len: t, windows: None }
                .run(cx.b)?
                .out
        } else {
            let (k, v) = (&cache.k, &cache.v);
            AttentionDecode { q: &q, k, v, head_dim, value_dim, scale, len: cache.len }.run(cx.b)?
        };
        self.o.product(cx, &self.o.input(cx, &out)?.0)
    }

    /// A cache for a sequence.
    pub fn cache(&self, b: &B, activations: DType) -> Result<KvCache<B>> {
        let GroupedQueryShape { kv_heads, head_dim, value_dim, .. } = self.shape;
        let zeros = |dim| Tensor::zeros(b, activations, self.positions(), kv_heads * dim);
        Ok(KvCache { k: zeros(head_dim)?, v: zeros(value_dim)?, len: 0 })
    }
}

impl<B: Kernels> Layer<B> for GroupedQuery<B> {
    type In = Tensor<B>;
    type Out = Tensor<B>;
    type Saved = GroupedQuerySaved<B>;

    fn wanted(&self, cx: &Cx<'_, B>) -> Vec<Wanted<'_, B>> {
        let norms = [&self.q_heads, &self.k_heads].into_iter().filter_map(|heads| heads.norm.as_ref());
        let linears = [&self.q, &self.k, &self.v, &self.o];
        norms.flat_map(|norm| norm.wanted(cx)).chain(linears.into_iter().flat_map(|l| l.wanted(cx))).collect()
    }

    fn params(&mut self) -> Vec<&mut Param<B>> {
        let linears = [&mut self.q, &mut self.k, &mut self.v, &mut self.o].map(|l| &mut l.weight);
        let norms =
            [&mut self.q_heads, &mut self.k_heads].into_iter().filter_map(|heads| heads.norm.as_mut());
        linears.into_iter().chain(norms.map(|norm| &mut norm.weight)).collect()
    }

    fn recompute(&mut self, scopes: &[Scope]) {
        self.keep_heads = !scopes.contains(&Scope::Norms);
    }

    fn forward(&self, cx: &Cx<'_, B>, x_td: Tensor<B>) -> Result<(Tensor<B>, GroupedQuerySaved<B>)> {
        let (out, saved) = self.attended(cx, x_td)?;
        Ok((self.o.product(cx, &out)?, saved))
    }

    fn again(&self, cx: &Cx<'_, B>, x_td: Tensor<B>) -> Result<GroupedQuerySaved<B>> {
        Ok(self.attended(cx, x_td)?.1)
    }

    fn backward(
        &mut self,
        cx: &Cx<'_, B>,
        mut saved: GroupedQuerySaved<B>,
        dy_td: Tensor<B>,
    ) -> Result<Tensor<B>> {
        let GroupedQueryShape { head_dim, value_dim, .. } = self.shape;
        let seq_len = self.positions();
        let rotation = Rotation { table: &self.rope, seq_len, first_position: 0 };
        let dout = self.o.backward(cx, saved.o, dy_td)?;
        let q = self.q_heads.turned(cx, &mut saved.q, &rotation)?;
        let k = self.k_heads.turned(cx, &mut saved.k, &rotation)?;
        let op = AttentionBackward {
            q: &q,
            k: &k,
            v: &saved.v,
            out: &saved.out,
            lse: &saved.lse,
            dout: &dout,
            head_dim,
            value_dim,
            scale: attention_scale(head_dim),
            seq_len,
            windows: None,
        };
        let grads = op.run(cx.b)?;
        let dq = self.q_heads.backward(cx, saved.q, grads.dq, &rotation)?;
        let dk = self.k_heads.backward(cx, saved.k, grads.dk, &rotation)?;
        // One lift for all whose recipes agree. It has a name of its own, and so random bits, should it draw any.
        let whole = format!("{}.qkv", self.name);
        let mut inputs: Vec<Operand<B>> = Vec::with_capacity(3);
        let sites = [Site::FpropX, Site::SavedX, Site::WgradX];
        for (i, (layer, like, section)) in self.sharing(cx, &sites, &whole).into_iter().enumerate() {
            inputs.push(match like {
                Some(like) => inputs[like].clone(),
                None => wgrad_x(cx, (&layer, &self.name), &section, &saved.x[i], &cx.shards.groups)?,
            });
        }
        drop(saved.x);
        let of_q = self.q.gradients(cx, &self.name, &inputs[0], &dq)?;
        let of_k = self.k.gradients(cx, &self.name, &inputs[1], &dk)?;
        let of_v = self.v.gradients(cx, &self.name, &inputs[2], &grads.dv)?;
        Add { a: &of_q, b: &of_k, plus: Some(&of_v) }.run(cx.b)
    }
}
