//! Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1). Keys and values come from a narrow latent of the token,
//! which is normalized and projected up for every head. Queries come from another latent, or directly from the input. RoPE rotates the last
//! elements of each query head, and a key that all heads share. Legend: t tokens, d model, h heads, n own elements of a head of queries and
//! keys, r rotated elements, u value_dim, p q_rank, c kv_rank.

use super::kv_cache::CachedHeads;
use super::shared::SharedProjections;
use super::{KvCache, Layer, Linear, LinearSaved, Norm, NormSaved, Rotation};
use crate::cx::Cx;
use crate::ledger::{Ledger, Saved};
use crate::param::{Param, Wanted};
use crate::recompute::Scope;
use crate::spec::{LatentShape, LatentSpec, Part, QueriesSpec, UpSpec};
use nibble_core::ops::{
    Add, AssembleKv, AssembleKvBackward, AssembledKv, Attention, AttentionBackward, AttentionOut, Rope,
};
use nibble_core::{DType, Error, Kernels, Operand, Result, Tensor};

/// The norm of a latent, and the projection from the latent up to all heads.
#[derive(Debug, Clone)]
pub struct LatentUp<B: Kernels> {
    /// The norm of the latent.
    pub norm: Norm<B>,
    /// The projection from the latent to all heads.
    pub up: Linear<B>,
}

/// The saved activations of a latent.
#[derive(Debug)]
pub struct LatentUpSaved<B: Kernels> {
    norm: NormSaved<B>,
    /// The normalized latent in the form that the projection saves, unless the latent is recomputed.
    x: Option<LinearSaved<B>>,
}

impl<B: Kernels> Saved for LatentUpSaved<B> {
    fn ledger(&self, ledger: &mut Ledger) {
        self.norm.ledger(ledger);
        if let Some(x) = &self.x {
            x.ledger(ledger);
        }
    }
}

impl<B: Kernels> LatentUp<B> {
    fn new(cx: &Cx<'_, B>, spec: &UpSpec, eps: f32) -> Result<Self> {
        let up = Linear::new(cx, &spec.up, cx.activations())?;
        Ok(Self { norm: Norm::new(cx, &spec.norm, eps)?, up })
    }

    fn wanted(&self, cx: &Cx<'_, B>) -> Vec<Wanted<'_, B>> {
        self.norm.wanted(cx).into_iter().chain(self.up.wanted(cx)).collect()
    }

    fn params(&mut self) -> Vec<&mut Param<B>> {
        vec![&mut self.norm.weight, &mut self.up.weight]
    }

    /// Projects the latent `[t, rank]` up to all heads. With `keep`, the projection's input is saved.
    fn forward(
        &self,
        cx: &Cx<'_, B>,
        latent: Tensor<B>,
        keep: bool,
    ) -> Result<(Tensor<B>, LatentUpSaved<B>)> {
        let (normed, norm) = self.norm.forward(cx, latent)?;
        let (fprop, x) = self.up.input(cx, &normed)?;
        Ok((self.up.product(cx, &fprop)?, LatentUpSaved { norm, x: keep.then_some(x) }))
    }

    /// Recomputes the projection from the norm's saved input, and saves the projection's input.
    fn again(&self, cx: &Cx<'_, B>, saved: &mut LatentUpSaved<B>) -> Result<Tensor<B>> {
        let (fprop, x) = self.up.input(cx, &self.norm.output(cx, &saved.norm)?)?;
        saved.x = Some(x);
        self.up.product(cx, &fprop)
    }

    /// Returns the gradient of the latent.
    fn backward(
        &mut self,
        cx: &Cx<'_, B>,
        LatentUpSaved { norm, x }: LatentUpSaved<B>,
        dy: Tensor<B>,
    ) -> Result<Tensor<B>> {
        let x = match x {
            Some(x) => x,
            None => cx.again(|| self.up.again(cx, self.norm.output(cx, &norm)?))?,
        };
        let dnormed = self.up.backward(cx, x, dy)?;
        self.norm.gradient(cx, norm, &dnormed, None)
    }
}

/// Multi-head latent attention.
#[derive(Debug, Clone)]
pub struct Latent<B: Kernels> {
    /// The layer's name, for example `model.layers.3.self_attn`.
    pub name: String,
    /// The layer's sizes.
    pub shape: LatentShape,
    /// The factor by which attention scores are multiplied.
    pub scale: f32,
    /// The projection `[p, d]` to the latent of queries, or `[h·(n + r), d]` directly to the queries.
    pub q: Linear<B>,
    /// The projection `[h·(n + r), p]` from the latent of queries, if there is such a latent.
    pub q_up: Option<LatentUp<B>>,
    /// The projection `[c, d]` to the latent of keys and values.
    pub kv: Linear<B>,
    /// The projection `[r, d]` to the key that all heads share.
    pub k_rope: Linear<B>,
    /// The projection `[h·(n + u), c]` from the latent of keys and values. For each head, the weight has n rows for the key, followed by u
    /// rows for the value.
    pub kv_up: LatentUp<B>,
    /// The output projection, `[d, h·u]`.
    pub o: Linear<B>,
    /// The RoPE table `[positions, r]`, computed by [`rope_table`](super::rope_table). All layers share this table.
    pub rope: Tensor<B>,
    /// Whether to save normalized latents (in the form that their projections read), instead of recomputing these latents in the backward
    /// pass.
    pub keep_normed: bool,
    /// Whether to save queries, keys and values, instead of recomputing these from the latents.
    pub keep_heads: bool,
}

/// Queries, keys and values of all heads, in the form that attention reads.
#[derive(Debug)]
struct QueriesKeysValues<B: Kernels> {
    /// The queries `[t, h·(n + r)]`, rotated.
    q: Tensor<B>,
    /// The keys `[t, h·(n + r)]`, with the shared key, rotated.
    k: Tensor<B>,
    /// The values `[t, h·u]`.
    v: Tensor<B>,
}

/// The saved form of queries, keys and values.
#[derive(Debug)]
enum HeadsKept<B: Kernels> {
    /// Queries, keys and values are saved.
    All(QueriesKeysValues<B>),
    /// The tensors from which, together with the latents, queries, keys and values are recomputed.
    Again {
        /// Queries that are projected directly from the input. Such queries have no latent, so they are saved themselves.
        q: Option<Tensor<B>>,
        /// The shared key, `[t, r]`, not yet rotated.
        shared: Tensor<B>,
    },
}

impl<B: Kernels> HeadsKept<B> {
    /// Saves queries, keys and values if `all`, or else the tensors from which they are recomputed. With `queries`, these tensors include
    /// the queries, which then have no latent.
    fn of(heads: QueriesKeysValues<B>, shared: Tensor<B>, all: bool, queries: bool) -> Self {
        if all {
            return Self::All(heads);
        }
        Self::Again { q: queries.then_some(heads.q), shared }
    }
}

/// Saved activations of latent attention.
#[derive(Debug)]
pub struct LatentSaved<B: Kernels> {
    layer: String,
    /// The saved input of the three projections. All three share the same buffers unless their recipes differ.
    x: [Operand<B>; 3],
    q_up: Option<LatentUpSaved<B>>,
    kv_up: LatentUpSaved<B>,
    heads: HeadsKept<B>,
    out: Tensor<B>,
    lse: B::Buf<f32>,
    o: LinearSaved<B>,
}

impl<B: Kernels> Saved for LatentSaved<B> {
    fn ledger(&self, ledger: &mut Ledger) {
        self.x.iter().for_each(|x| ledger.operand(&self.layer, "x", x));
        if let Some(q_up) = &self.q_up {
            q_up.ledger(ledger);
        }
        self.kv_up.ledger(ledger);
        match &self.heads {
            HeadsKept::All(QueriesKeysValues { q, k, v }) => {
                for (kind, x) in [("q", q), ("k", k), ("v", v)] {
                    ledger.tensor(&self.layer, kind, x);
                }
            }
            HeadsKept::Again { q, shared } => {
                q.iter().for_each(|q| ledger.tensor(&self.layer, "q", q));
                ledger.tensor(&self.layer, "shared_key", shared);
            }
        }
        ledger.tensor(&self.layer, "out", &self.out);
        ledger.words::<B, f32>(&self.layer, "lse", &self.lse);
        self.o.ledger(ledger);
    }
}

/// Queries, keys and values of some tokens, and the activations that their computation saves.
struct Projected<B: Kernels> {
    x: [Operand<B>; 3],
    q_up: Option<LatentUpSaved<B>>,
    kv_up: LatentUpSaved<B>,
    shared: Tensor<B>,
    heads: QueriesKeysValues<B>,
}

impl<B: Kernels> Latent<B> {
    /// Creates the layer with random weights; `rope` has one row per position of a sequence.
    pub fn new(cx: &Cx<'_, B>, spec: &LatentSpec, rope: Tensor<B>) -> Result<Self> {
        let linear = |part: &Part| Linear::new(cx, part, cx.activations());
        let up = |up: &UpSpec| LatentUp::new(cx, up, spec.eps);
        let (q, q_up) = match &spec.q {
            QueriesSpec::Straight(part) => (linear(part)?.with_input_of(&spec.id), None),
            QueriesSpec::Latent { down, up: q_up } => {
                (linear(down)?.with_input_of(&spec.id), Some(up(q_up)?))
            }
        };
        Ok(Self {
            name: spec.id.clone(),
            shape: spec.shape,
            scale: spec.rope.latent_scale(spec.shape.head_dim()),
            q,
            q_up,
            kv: linear(&spec.kv)?.with_input_of(&spec.id),
            k_rope: linear(&spec.k_rope)?.with_input_of(&spec.id),
            kv_up: up(&spec.kv_up)?,
            o: linear(&spec.o)?,
            rope,
            keep_normed: false,
            keep_heads: true,
        })
    }

    /// Number of positions.
    fn positions(&self) -> usize {
        self.rope.rows
    }

    /// The rotation for a forward pass of `tokens` tokens, from this position on.
    fn rotation(&self, cx: &Cx<'_, B>, tokens: usize, first_position: usize) -> Rotation<'_, B> {
        let positions = cx.positions(self.positions().min(tokens), first_position);
        Rotation { table: &self.rope, positions }
    }

    /// The three projections of the layer's input.
    fn shared(&self) -> SharedProjections<'_, B, 3> {
        SharedProjections { name: &self.name, projections: [&self.q, &self.kv, &self.k_rope] }
    }

    /// Queries in which the last elements of each head are rotated forward or back.
    fn turned(
        &self,
        cx: &Cx<'_, B>,
        x: Tensor<B>,
        rotation: &Rotation<'_, B>,
        inverse: bool,
    ) -> Result<Tensor<B>> {
        let Rotation { table, positions } = rotation;
        let head_dim = self.shape.head_dim();
        Rope { x: &x, table, head_dim, positions, inverse }.run(cx.b)
    }

    /// Assembles the keys and values of all heads.
    fn assembled(
        &self,
        cx: &Cx<'_, B>,
        (up, shared): (Tensor<B>, &Tensor<B>),
        rotation: &Rotation<'_, B>,
    ) -> Result<AssembledKv<B>> {
        let LatentShape { nope_dim: key_dim, value_dim, .. } = self.shape;
        let Rotation { table, positions } = rotation;
        AssembleKv { up: &up, shared, table, key_dim, value_dim, positions }.run(cx.b)
    }

    /// Queries, keys and values of tokens from this position on, and the activations that their computation saves.
    fn projected(&self, cx: &Cx<'_, B>, x_td: &Tensor<B>, first_position: usize) -> Result<Projected<B>> {
        let rotation = self.rotation(cx, x_td.rows, first_position);
        let keep = self.keep_normed && self.keep_heads;
        let inputs = self.shared().inputs(cx, x_td)?;
        let product = |projection: &Linear<B>, i: usize| projection.product(cx, &inputs[i].0);
        let [q, latent, shared] = [product(&self.q, 0)?, product(&self.kv, 1)?, product(&self.k_rope, 2)?];
        let x = [0, 1, 2].map(|i| inputs[i].1.clone());
        drop(inputs);
        let (q, q_up) = match &self.q_up {
            None => (q, None),
            Some(up) => {
                let (q, saved) = up.forward(cx, q, keep)?;
                (q, Some(saved))
            }
        };
        let q = self.turned(cx, q, &rotation, false)?;
        let (up, kv_up) = self.kv_up.forward(cx, latent, keep)?;
        let AssembledKv { k, v } = self.assembled(cx, (up, &shared), &rotation)?;
        Ok(Projected { x, q_up, kv_up, shared, heads: QueriesKeysValues { q, k, v } })
    }

    /// The forward pass up to its last product. Returns the input of that product, and the saved activations.
    fn attended(&self, cx: &Cx<'_, B>, x_td: Tensor<B>) -> Result<(Operand<B>, LatentSaved<B>)> {
        let Projected { x, q_up, kv_up, shared, heads } = self.projected(cx, &x_td, 0)?;
        let seq_len = self.positions().min(x_td.rows);
        drop(x_td);
        let QueriesKeysValues { q, k, v } = &heads;
        let op = Attention::new([q, k, v], (self.shape.head_dim(), self.shape.value_dim), seq_len);
        let windows = cx.windows(self.shape.window, seq_len)?;
        let op = Attention { scale: self.scale, windows, ..op };
        let AttentionOut { out, lse } = op.run(cx.b)?;
        let heads = HeadsKept::of(heads, shared, self.keep_heads, self.q_up.is_none());
        let (o_input, o) = self.o.input(cx, &out)?;
        let layer = self.name.clone();
        Ok((o_input, LatentSaved { layer, x, q_up, kv_up, heads, out, lse, o }))
    }

    /// Returns queries, keys and values, which were saved or are recomputed.
    fn heads(
        &self,
        cx: &Cx<'_, B>,
        kept: HeadsKept<B>,
        (q_saved, kv_saved): (&mut Option<LatentUpSaved<B>>, &mut LatentUpSaved<B>),
    ) -> Result<QueriesKeysValues<B>> {
        let (q, shared) = match kept {
            HeadsKept::All(heads) => return Ok(heads),
            HeadsKept::Again { q, shared } => (q, shared),
        };
        let rotation = self.rotation(cx, shared.rows, 0);
        cx.again(|| {
            let q = match (q, &self.q_up, q_saved) {
                (Some(q), ..) => q,
                (None, Some(up), Some(saved)) => self.turned(cx, up.again(cx, saved)?, &rotation, false)?,
                (None, ..) => {
                    let what = "queries are neither kept nor made again";
                    return Err(Error::Defect { place: "latent attention", what });
                }
            };
            let up = self.kv_up.again(cx, kv_saved)?;
            let AssembledKv { k, v } = self.assembled(cx, (up, &shared), &rotation)?;
            Ok(QueriesKeysValues { q, k, v })
        })
    }

    /// The forward pass of a sequence's next tokens, which attend to the keys and values in the cache. The call adds the tokens' own
    /// keys and values to the cache. Several tokens at once are allowed only if the cache is empty.
    pub fn cached(&self, cx: &Cx<'_, B>, x_td: &Tensor<B>, cache: &mut KvCache<B>) -> Result<Tensor<B>> {
        let Projected { heads: QueriesKeysValues { q, k, v }, .. } = self.projected(cx, x_td, cache.len())?;
        let out = cache.attended(cx, [&q, &k, &v], None)?;
        self.o.product(cx, &self.o.input(cx, &out)?.0)
    }

    /// A cache of each head's keys and values: h·(n + r + u) values per token. A cache of the latent and the shared key would take only c +
    /// r values per token, but each generated token would require projecting all cached latents to all heads again.
    pub fn cache(&self, b: &B, activations: DType) -> Result<KvCache<B>> {
        let LatentShape { heads: kv_heads, value_dim, window, .. } = self.shape;
        let (head_dim, scale) = (self.shape.head_dim(), self.scale);
        let heads = CachedHeads { kv_heads, head_dim, value_dim, scale, window };
        KvCache::new(b, activations, self.positions(), heads)
    }
}

impl<B: Kernels> Layer<B> for Latent<B> {
    type In = Tensor<B>;
    type Out = Tensor<B>;
    type Saved = LatentSaved<B>;

    fn wanted(&self, cx: &Cx<'_, B>) -> Vec<Wanted<'_, B>> {
        let mut wanted: Vec<Wanted<'_, B>> =
            [&self.q, &self.kv, &self.k_rope].into_iter().flat_map(|linear| linear.wanted(cx)).collect();
        wanted.extend(self.q_up.iter().flat_map(|up| up.wanted(cx)));
        wanted.extend(self.kv_up.wanted(cx));
        wanted.extend(self.o.wanted(cx));
        wanted
    }

    fn params(&mut self) -> Vec<&mut Param<B>> {
        let mut params = vec![&mut self.q.weight];
        params.extend(self.q_up.iter_mut().flat_map(LatentUp::params));
        params.extend([&mut self.kv.weight, &mut self.k_rope.weight]);
        params.extend(self.kv_up.params());
        params.push(&mut self.o.weight);
        params
    }

    fn recompute(&mut self, scopes: &[Scope]) {
        let has = |scope| scopes.contains(&scope);
        self.keep_normed = !has(Scope::Norms);
        self.keep_heads = !has(Scope::MlaUp) || has(Scope::Attention) || has(Scope::Layers);
    }

    fn forward(&self, cx: &Cx<'_, B>, x_td: Tensor<B>) -> Result<(Tensor<B>, LatentSaved<B>)> {
        let (out, saved) = self.attended(cx, x_td)?;
        Ok((self.o.product(cx, &out)?, saved))
    }

    fn again(&self, cx: &Cx<'_, B>, x_td: Tensor<B>) -> Result<LatentSaved<B>> {
        Ok(self.attended(cx, x_td)?.1)
    }

    fn backward(&mut self, cx: &Cx<'_, B>, mut saved: LatentSaved<B>, dy_td: Tensor<B>) -> Result<Tensor<B>> {
        let LatentShape { nope_dim: key_dim, value_dim, .. } = self.shape;
        let (dims, seq_len) = ((self.shape.head_dim(), value_dim), self.positions());
        let dout = self.o.backward(cx, saved.o, dy_td)?;
        let QueriesKeysValues { q, k, v } =
            self.heads(cx, saved.heads, (&mut saved.q_up, &mut saved.kv_up))?;
        let made = (&saved.out, &saved.lse);
        let op = AttentionBackward::new([&q, &k, &v], made, &dout, dims, seq_len);
        let windows = cx.windows(self.shape.window, seq_len)?;
        let grads = AttentionBackward { scale: self.scale, windows, ..op }.run(cx.b)?;
        drop((q, k, v, dout, saved.out, saved.lse));
        let rotation = self.rotation(cx, seq_len, 0);
        let mut dq = self.turned(cx, grads.dq, &rotation, true)?;
        let (dk, dv, Rotation { table, positions }) = (&grads.dk, &grads.dv, &rotation);
        let made = AssembleKvBackward { dk, dv, table, key_dim, value_dim, positions }.run(cx.b)?;
        drop((grads.dk, grads.dv));
        if let (Some(up), Some(saved)) = (&mut self.q_up, saved.q_up) {
            dq = up.backward(cx, saved, dq)?;
        }
        let dlatent = self.kv_up.backward(cx, saved.kv_up, made.dup)?;
        let inputs = self.shared().wgrad_inputs(cx, saved.x)?;
        let of_q = self.q.gradients(cx, &inputs[0].0, &dq)?;
        let of_kv = self.kv.gradients(cx, &inputs[1].0, &dlatent)?;
        let of_shared = self.k_rope.gradients(cx, &inputs[2].0, &made.dshared)?;
        Add { a: &of_q, b: &of_kv, plus: Some(&of_shared) }.run(cx.b)
    }
}
