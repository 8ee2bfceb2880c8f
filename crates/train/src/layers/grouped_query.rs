//! Attention, causal or over the whole sequence, with grouped query heads and RoPE, RMSNorm on each query and key head (Qwen3) or none (Llama), sinks (GPT-OSS) and
//! sliding windows (Mistral).
//! t tokens, d model, h heads, g key/value heads, c head_dim, u value_dim: heads of values, mostly the same.

use super::kv_cache::CachedHeads;
use super::shared::SharedProjections;
use super::{Heads, HeadsSaved, KvCache, Layer, Linear, LinearSaved, Norm, Rotation};
use crate::cx::Cx;
use crate::ledger::{Ledger, Saved};
use crate::param::{Param, Wanted, Writes};
use crate::recompute::Scope;
use crate::spec::{GroupedQueryShape, GroupedQuerySpec, Part};
use nibble_core::ops::{Add, AddBiasBackward, Attention, AttentionBackward, AttentionOut, attention_scale};
use nibble_core::{DType, Error, Kernels, Operand, Result, Tensor};

/// Grouped-query attention, where several query heads share one head of keys and values.
#[derive(Debug, Clone)]
pub struct GroupedQuery<B: Kernels> {
    /// The layer's name, for example `model.layers.3.self_attn`.
    pub name: String,
    /// The layer's sizes.
    pub shape: GroupedQueryShape,
    /// The projection to queries, `[h·c, d]`.
    pub q: Linear<B>,
    /// The projection to keys, `[g·c, d]`.
    pub k: Linear<B>,
    /// The projection to values, `[g·u, d]`.
    pub v: Linear<B>,
    /// The output projection, `[d, h·u]`.
    pub o: Linear<B>,
    /// The norm and the RoPE rotation of the queries.
    pub q_heads: Heads<B>,
    /// The norm and the RoPE rotation of the keys.
    pub k_heads: Heads<B>,
    /// The attention sinks `[1, h]`. A sink is an additional score of one query head that belongs to no key. `None` means no sinks.
    pub sinks: Option<Param<B>>,
    /// The table `[seq_len, c]` of cosines and sines from [`rope_table`](super::rope_table), with one row per position. All layers of the
    /// model share one table of cosines and sines.
    pub rope: Tensor<B>,
    /// Whether the forward pass saves normalized and rotated queries and keys. If `keep_heads` is false, the backward pass recomputes
    /// queries and keys. If queries and keys have no norm, they are always saved.
    pub keep_heads: bool,
}

/// The input of the query, key and value projections, one operand per projection. Projections whose recipes agree share a buffer.
type PerProjection<B> = [Operand<B>; 3];

/// Queries, keys and values of some tokens, and the activations that their computation saves.
struct Projected<B: Kernels> {
    x: PerProjection<B>,
    /// The rotated queries.
    q: Tensor<B>,
    q_saved: HeadsSaved<B>,
    /// The rotated keys.
    k: Tensor<B>,
    k_saved: HeadsSaved<B>,
    v: Tensor<B>,
}

/// Attention's saved activations.
#[derive(Debug)]
pub struct GroupedQuerySaved<B: Kernels> {
    layer: String,
    /// The saved input of the query, key and value projections. All three share the same buffers unless their recipes differ.
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
    /// Creates the layer with random weights. The table `rope` has one row per position of a sequence.
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
            q: linear(&spec.q)?.with_input_of(&spec.id),
            k: linear(&spec.k)?.with_input_of(&spec.id),
            v: linear(&spec.v)?.with_input_of(&spec.id),
            o: linear(&spec.o)?,
            q_heads: heads(q_norm)?,
            k_heads: heads(k_norm)?,
            sinks: spec.sinks.as_ref().map(|part| Param::only(cx, part)).transpose()?,
            shape: spec.shape,
            rope,
            keep_heads: false,
        })
    }

    /// Number of positions.
    fn positions(&self) -> usize {
        self.rope.rows
    }

    /// The three projections of the layer's input.
    fn shared(&self) -> SharedProjections<'_, B, 3> {
        SharedProjections { name: &self.name, projections: [&self.q, &self.k, &self.v] }
    }

    fn plain_sinks(&self) -> Result<Option<&Tensor<B>>> {
        self.sinks.as_ref().map(Param::plain).transpose()
    }

    /// The number and sizes of the heads in a cache.
    fn cached_heads(&self) -> CachedHeads {
        let GroupedQueryShape { kv_heads, head_dim, value_dim, window, .. } = self.shape;
        CachedHeads { kv_heads, head_dim, value_dim, scale: attention_scale(head_dim), window }
    }

    /// Queries, keys and values of tokens from this position on, and the activations that their computation saves.
    fn projected(&self, cx: &Cx<'_, B>, x_td: &Tensor<B>, first_position: usize) -> Result<Projected<B>> {
        let inputs = self.shared().inputs(cx, x_td)?;
        let product = |projection: &Linear<B>, i: usize| projection.product(cx, &inputs[i].0);
        let [q, k, v] = [product(&self.q, 0)?, product(&self.k, 1)?, product(&self.v, 2)?];
        let x = [0, 1, 2].map(|i| inputs[i].1.clone());
        drop(inputs);
        let positions = cx.positions(self.positions().min(x_td.rows), first_position);
        let rotation = Rotation { table: &self.rope, positions };
        let (q, q_saved) = self.q_heads.forward(cx, q, &rotation, self.keep_heads)?;
        let (k, k_saved) = self.k_heads.forward(cx, k, &rotation, self.keep_heads)?;
        Ok(Projected { x, q, q_saved, k, k_saved, v })
    }

    /// The forward pass up to its last product. Returns the input of that product, and the saved activations.
    fn attended(&self, cx: &Cx<'_, B>, x_td: Tensor<B>) -> Result<(Operand<B>, GroupedQuerySaved<B>)> {
        let Projected { x, q, q_saved, k, k_saved, v } = self.projected(cx, &x_td, 0)?;
        let GroupedQueryShape { head_dim, value_dim, window, .. } = self.shape;
        let seq_len = self.positions().min(x_td.rows);
        let op = Attention::new([&q, &k, &v], (head_dim, value_dim), seq_len);
        let (causal, windows) = (self.shape.causal, cx.windows(window, seq_len)?);
        let op = Attention { causal, windows, sinks: self.plain_sinks()?, ..op };
        let AttentionOut { out, lse } = op.run(cx.b)?;
        drop((q, k));
        let (o_input, o) = self.o.input(cx, &out)?;
        let layer = self.name.clone();
        Ok((o_input, GroupedQuerySaved { layer, x, q: q_saved, k: k_saved, v, out, lse, o }))
    }

    /// Runs the forward pass of a sequence's next tokens. The tokens also attend to the keys and values in the cache. The call adds the
    /// keys and values of the new tokens to the cache. The call may process several tokens at once only if the cache is empty.
    pub fn cached(&self, cx: &Cx<'_, B>, x_td: &Tensor<B>, cache: &mut KvCache<B>) -> Result<Tensor<B>> {
        let Projected { q, k, v, .. } = self.projected(cx, x_td, cache.len())?;
        let out = cache.attended(cx, [&q, &k, &v], self.plain_sinks()?)?;
        self.o.product(cx, &self.o.input(cx, &out)?.0)
    }

    /// An empty cache for the keys and values of one sequence.
    ///
    /// # Errors
    /// Returns [`Error::Shape`] if attention is not causal, because each new token would then change the outputs of earlier tokens.
    pub fn cache(&self, b: &B, activations: DType) -> Result<KvCache<B>> {
        if !self.shape.causal {
            return Err(Error::shape(
                "generation",
                "model.causal",
                "false",
                "true: text is generated left to right",
            ));
        }
        KvCache::new(b, activations, self.positions(), self.cached_heads())
    }
}

impl<B: Kernels> Layer<B> for GroupedQuery<B> {
    type In = Tensor<B>;
    type Out = Tensor<B>;
    type Saved = GroupedQuerySaved<B>;

    fn wanted(&self, cx: &Cx<'_, B>) -> Vec<Wanted<'_, B>> {
        let norms = [&self.q_heads, &self.k_heads].into_iter().filter_map(|heads| heads.norm.as_ref());
        let linears = [&self.q, &self.k, &self.v, &self.o];
        let plain = norms.flat_map(|norm| norm.wanted(cx)).chain(self.sinks.iter().map(Param::as_it_is));
        plain.chain(linears.into_iter().flat_map(|l| l.wanted(cx))).collect()
    }

    fn params(&mut self) -> Vec<&mut Param<B>> {
        let linears = [&mut self.q, &mut self.k, &mut self.v, &mut self.o];
        let norms =
            [&mut self.q_heads, &mut self.k_heads].into_iter().filter_map(|heads| heads.norm.as_mut());
        let vectors = norms.map(|norm| &mut norm.weight).chain(&mut self.sinks);
        linears.into_iter().flat_map(Linear::params).chain(vectors).collect()
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
        let GroupedQueryShape { head_dim, value_dim, window, .. } = self.shape;
        let seq_len = self.positions();
        let rotation = Rotation { table: &self.rope, positions: cx.positions(seq_len, 0) };
        let dout = self.o.backward(cx, saved.o, dy_td)?;
        let q = self.q_heads.turned(cx, &mut saved.q, &rotation)?;
        let k = self.k_heads.turned(cx, &mut saved.k, &rotation)?;
        let made = (&saved.out, &saved.lse);
        let op = AttentionBackward::new([&q, &k, &saved.v], made, &dout, (head_dim, value_dim), seq_len);
        let (causal, windows) = (self.shape.causal, cx.windows(window, seq_len)?);
        let op = AttentionBackward { causal, windows, sinks: self.plain_sinks()?, ..op };
        let grads = op.run(cx.b)?;
        if let (Some(sinks), Some(dy)) = (&mut self.sinks, &grads.dsinks) {
            sinks.add_gradient(cx, Writes::Adds, |dbias, _| AddBiasBackward { dy, dbias }.run(cx.b))?;
        }
        let dq = self.q_heads.backward(cx, saved.q, grads.dq, &rotation)?;
        let dk = self.k_heads.backward(cx, saved.k, grads.dk, &rotation)?;
        let inputs = self.shared().wgrad_inputs(cx, saved.x)?;
        let of_q = self.q.gradients(cx, &inputs[0].0, &dq)?;
        let of_k = self.k.gradients(cx, &inputs[1].0, &dk)?;
        let of_v = self.v.gradients(cx, &inputs[2].0, &grads.dv)?;
        Add { a: &of_q, b: &of_k, plus: Some(&of_v) }.run(cx.b)
    }
}
