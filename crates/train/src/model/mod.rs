//! A decoder: RMSNorm → attention → RMSNorm → mixture of experts (Qwen3-MoE) or MLP (Qwen3, Llama), each added to the residual stream.
//! t tokens, d model, v vocabulary.

mod block;
mod feed;
mod names;
mod transformers;

pub use block::{Block, BlockSaved};
pub use feed::Feed;
pub use names::Named;
pub use transformers::transformers_config;

use crate::config::{Balance, ModelConfig};
use crate::cx::{Cx, Shards};
use crate::layers::{
    Attention, AttentionShape, HeadInput, HeadSaved, KvCache, Layer, Linear, Mlp, Norm, NormSaved, Residual,
    copy_rows, rope_table,
};
use crate::ledger::{Ledger, Saved};
use crate::moe::{BatchLoad, Moe, MoeShape};
use crate::param::{Param, Placement, Writes};
use crate::recompute::Scope;
use nibble_core::ops::{Collect, Embed, EmbedBackward, EmbedOut, Entry, Routing, Source, verify_ids};
use nibble_core::recipe::{self, LayerKind};
use nibble_core::{DType, Kernels, Mesh, Recipe, Result, Tensor};

/// Standard deviation of initial weights; projections back into the residual stream have it divided by √(2·layers).
const INIT_STD: f32 = 0.02;

/// The embedding; the head's name as well where it is tied to it.
const EMBED: &str = "model.embed_tokens";
/// The output head of its own.
const HEAD: &str = "lm_head";

/// The names by which a recipe's overrides know the layers of a model.
pub fn layer_names(config: &ModelConfig) -> Vec<recipe::Layer> {
    let named = |kind, name: String| recipe::Layer { kind, gated: name.ends_with("gate_up_proj"), name };
    let parts = |i: usize| {
        let linear = |part: &str| named(LayerKind::Linear, format!("model.layers.{i}.{part}"));
        let attention = ["q_proj", "k_proj", "v_proj", "o_proj"].map(|p| linear(&format!("self_attn.{p}")));
        let mut layers = attention.to_vec();
        let mlp = |name: &str| ["gate_up_proj", "down_proj"].map(|p| linear(&format!("{name}.{p}")));
        if i < config.num_dense() {
            layers.extend(mlp("mlp"));
            return layers;
        }
        layers.push(named(LayerKind::Router, format!("model.layers.{i}.mlp.gate")));
        layers.push(named(LayerKind::Expert, format!("model.layers.{i}.mlp.experts")));
        if config.shared_ffn > 0 {
            layers.extend(mlp("mlp.shared_expert"));
        }
        layers
    };
    let head = if config.tie_embeddings { EMBED } else { HEAD };
    (0..config.layers).flat_map(parts).chain([named(LayerKind::Head, head.to_owned())]).collect()
}

/// The whole decoder.
#[derive(Debug, Clone)]
pub struct Decoder<B: Kernels> {
    /// Sizes.
    pub config: ModelConfig,
    /// `[v, d]`; also the output head if there is no other.
    pub embed: Linear<B>,
    /// Decoder layers.
    pub blocks: Vec<Block<B>>,
    /// Before the head.
    pub norm: Norm<B>,
    /// `[v, d]`, unless tied to the embedding.
    pub head: Option<Linear<B>>,
}

/// What a pass over tokens gives, still on the device.
#[derive(Debug)]
pub struct DecoderOut<B: Kernels> {
    /// Nats of each shard.
    pub shard_nats: B::Buf<f64>,
    /// How many inputs, and how many targets, are no tokens of the vocabulary; one value each.
    pub bad_ids: [B::Buf<u64>; 2],
}

impl<B: Kernels> DecoderOut<B> {
    /// Reads the counts from the device, waiting for the pass.
    ///
    /// # Errors
    /// [`nibble_core::Error::Shape`] naming `op` and the first of inputs and targets that has a bad one.
    pub fn verify_ids(&self, b: &B, op: &'static str, vocab: usize) -> Result<()> {
        let mut counts = ["inputs", "targets"].into_iter().zip(&self.bad_ids);
        counts.try_for_each(|(argument, bad)| verify_ids(b, op, argument, bad, vocab))
    }
}

/// What the decoder keeps.
#[derive(Debug)]
pub struct DecoderSaved<B: Kernels> {
    ids: B::Buf<i32>,
    /// One a decoder layer.
    pub blocks: Vec<BlockSaved<B>>,
    norm: NormSaved<B>,
    head: HeadSaved<B>,
}

impl<B: Kernels> Saved for DecoderSaved<B> {
    fn ledger(&self, ledger: &mut Ledger) {
        ledger.words::<B, i32>(EMBED, "ids", &self.ids);
        self.blocks.iter().for_each(|block| block.ledger(ledger));
        self.norm.ledger(ledger);
        self.head.ledger(ledger);
    }
}

impl<B: Kernels> Decoder<B> {
    /// A decoder with random weights, this rank's part of it. The weights are a function of the seed alone.
    ///
    /// # Errors
    /// From the backend; the configuration is checked where it is read.
    pub fn new(
        b: &B,
        mesh: Mesh<'_, B>,
        recipe: &Recipe,
        config: &ModelConfig,
        seq_len: usize,
        seed: u64,
    ) -> Result<Self> {
        let rope = rope_table(b, seq_len, config.head_dim, config.rope_theta)?;
        Self::with_rope(b, mesh, recipe, config, rope, seed)
    }

    /// [`Decoder::new`] with RoPE's table, `[positions, head_dim]`.
    pub(crate) fn with_rope(
        b: &B,
        mesh: Mesh<'_, B>,
        recipe: &Recipe,
        config: &ModelConfig,
        rope: Tensor<B>,
        seed: u64,
    ) -> Result<Self> {
        let seq_len = rope.rows;
        let mut cx = Cx::inference(b, mesh, recipe, Shards::new(b, 1, 1, mesh.all.rank())?, 0.0);
        cx.seed = seed;
        let (v, d) = (config.vocab_size, config.d_model);
        let (eps, out_std) = (config.norm_eps as f32, INIT_STD / (2.0 * config.layers as f32).sqrt());
        let vocab_linear = |name: &str, std: f32| -> Result<Linear<B>> {
            let weight =
                Param::normal(b, seed, format!("{name}.weight"), (v, d), std, Placement::Replicated, 0)?;
            Ok(Linear { weight, name: name.to_owned(), out: DType::F32, kind: LayerKind::Head })
        };
        let attention = AttentionShape {
            d_model: d,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            value_dim: config.value_head_dim(),
            seq_len,
            qk_norm: config.qk_norm,
        };
        let moe = MoeShape {
            d_model: d,
            ffn: config.expert_ffn,
            experts: config.experts,
            top_k: config.top_k,
            normalize: config.norm_topk_prob,
            aux_coef: config.aux_loss_coef as f32,
            z_coef: config.z_loss_coef as f32,
        };
        let blocks = (0..config.layers).map(|i| {
            let name = format!("model.layers.{i}");
            let (attn, mlp) = (format!("{name}.self_attn"), format!("{name}.mlp"));
            let dense =
                |name: &str, ffn| Mlp::new(b, seed, name, (d, ffn), INIT_STD, out_std, recipe.activations);
            let feed = if i < config.num_dense() {
                Feed::Dense(dense(&mlp, config.ffn)?)
            } else {
                let shared = match config.shared_ffn {
                    0 => None,
                    ffn => Some(dense(&format!("{mlp}.shared_expert"), ffn)?),
                };
                Feed::Experts { moe: Moe::new(&cx, &mlp, moe, INIT_STD, out_std)?, shared }
            };
            Ok(Block {
                attn_norm: Norm::new(b, &format!("{name}.input_layernorm"), d, eps)?,
                attn: Attention::new(
                    b,
                    seed,
                    &attn,
                    attention,
                    eps,
                    INIT_STD,
                    out_std,
                    recipe.activations,
                    rope.clone(),
                )?,
                mlp_norm: Norm::new(b, &format!("{name}.post_attention_layernorm"), d, eps)?,
                feed,
                recompute: Scope::DEFAULT.to_vec(),
            })
        });
        Ok(Self {
            config: config.clone(),
            embed: vocab_linear(EMBED, INIT_STD)?,
            blocks: blocks.collect::<Result<_>>()?,
            norm: Norm::new(b, "model.norm", d, eps)?,
            head: if config.tie_embeddings { None } else { Some(vocab_linear(HEAD, INIT_STD)?) },
        })
    }

    /// Says what the backward passes to come make again; [`Scope::DEFAULT`] until then.
    pub fn recompute(&mut self, scopes: &[Scope]) {
        self.blocks.iter_mut().for_each(|block| block.recompute(scopes));
    }

    /// Makes all weights' copies for this step.
    pub fn prepare(&mut self, cx: &Cx<'_, B>) -> Result<()> {
        self.blocks.iter_mut().try_for_each(|block| block.prepare(cx))?;
        self.head.as_mut().unwrap_or(&mut self.embed).prepare(cx)
    }

    /// Drops all weights' copies.
    pub fn release(&mut self) {
        self.params().into_iter().for_each(Param::release);
    }

    /// Every parameter, in canonical order.
    pub fn params(&mut self) -> Vec<&mut Param<B>> {
        let mut params = vec![&mut self.embed.weight];
        params.extend(self.blocks.iter_mut().flat_map(Block::params));
        params.push(&mut self.norm.weight);
        params.extend(self.head.iter_mut().map(|head| &mut head.weight));
        params
    }

    /// Forgets every gradient.
    pub fn clear_gradients(&mut self) {
        self.params().into_iter().for_each(Param::clear_gradient);
    }

    /// The losses of these tokens, and everything that the backward pass needs. The head's gradients are made here, while
    /// there are logits, of `scale` · the sum of the losses.
    pub fn forward(
        &mut self,
        cx: &Cx<'_, B>,
        ids: B::Buf<i32>,
        targets: &B::Buf<i32>,
        scale: f32,
    ) -> Result<(DecoderOut<B>, DecoderSaved<B>)> {
        self.forward_seen(cx, ids, targets, scale, |_| Ok(()))
    }

    /// [`Decoder::forward`], whose inside `look` sees.
    pub fn forward_seen(
        &mut self,
        cx: &Cx<'_, B>,
        ids: B::Buf<i32>,
        targets: &B::Buf<i32>,
        scale: f32,
        look: impl FnOnce(Inside<'_, B>) -> Result<()>,
    ) -> Result<(DecoderOut<B>, DecoderSaved<B>)> {
        let Trunk { x_td, bad_ids, blocks, norm } = self.trunk(cx, &ids)?;
        look(Inside { x_td: &x_td, blocks: &blocks, head: self.head.as_ref().unwrap_or(&self.embed) })?;
        let input = HeadInput { x_td: &x_td, targets, shards: cx.shards.local };
        let head = self.head.as_mut().unwrap_or(&mut self.embed);
        let (loss, head) = head.losses_and_gradients(cx, &input, scale)?;
        let out = DecoderOut { shard_nats: loss.shard_nats, bad_ids: [bad_ids, loss.bad_ids] };
        Ok((out, DecoderSaved { ids, blocks, norm, head }))
    }

    /// The losses of these tokens, summed over `shards` equal runs of them.
    pub fn losses(
        &self,
        cx: &Cx<'_, B>,
        ids: &B::Buf<i32>,
        targets: &B::Buf<i32>,
        shards: usize,
    ) -> Result<DecoderOut<B>> {
        let Trunk { x_td, bad_ids, .. } = self.trunk(cx, ids)?;
        let head = self.head.as_ref().unwrap_or(&self.embed);
        let loss = head.losses(cx, &HeadInput { x_td: &x_td, targets, shards })?;
        Ok(DecoderOut { shard_nats: loss.shard_nats, bad_ids: [bad_ids, loss.bad_ids] })
    }

    /// Logits after the last of these tokens, F32 `[1, v]`; and how many of them are no tokens of the vocabulary.
    pub fn last_logits(&self, cx: &Cx<'_, B>, ids: &B::Buf<i32>) -> Result<(Tensor<B>, B::Buf<u64>)> {
        let Trunk { x_td, bad_ids, .. } = self.trunk(cx, ids)?;
        let head = self.head.as_ref().unwrap_or(&self.embed);
        Ok((head.logits(cx, last_row(cx.b, &x_td)?)?, bad_ids))
    }

    /// Caches for one sequence, one a layer.
    pub fn caches(&self, cx: &Cx<'_, B>) -> Result<Vec<KvCache<B>>> {
        self.blocks.iter().map(|block| block.attn.cache(cx.b, cx.activations())).collect()
    }

    /// As [`Decoder::last_logits`], of tokens that follow those in the caches: see [`Attention::cached`].
    ///
    /// [`Attention::cached`]: crate::layers::Attention::cached
    pub fn cached_logits(
        &self,
        cx: &Cx<'_, B>,
        ids: &B::Buf<i32>,
        caches: &mut [KvCache<B>],
    ) -> Result<(Tensor<B>, B::Buf<u64>)> {
        let op = Embed { table: &self.embed.weight.master, ids, dtype: cx.activations() };
        let EmbedOut { x, bad_ids } = op.run(cx.b)?;
        let mut residual = Residual::from(x);
        for (block, cache) in self.blocks.iter().zip(caches) {
            residual = block.cached(cx, residual, cache)?;
        }
        let plus = residual.plus.as_ref().map(|plus| last_row(cx.b, plus)).transpose()?;
        let (x_td, _) = self.norm.of(cx, Residual { x: last_row(cx.b, &residual.x)?, plus })?;
        let head = self.head.as_ref().unwrap_or(&self.embed);
        Ok((head.logits(cx, x_td)?, bad_ids))
    }

    /// All but the head.
    fn trunk(&self, cx: &Cx<'_, B>, ids: &B::Buf<i32>) -> Result<Trunk<B>> {
        let op = Embed { table: &self.embed.weight.master, ids, dtype: cx.activations() };
        let EmbedOut { x: x_td, bad_ids } = op.run(cx.b)?;
        let mut residual = Residual::from(x_td);
        let mut blocks = Vec::with_capacity(self.blocks.len());
        for block in &self.blocks {
            let (next, saved) = block.forward(cx, residual)?;
            residual = next;
            if cx.training {
                blocks.push(saved);
            }
        }
        if cx.training && self.config.balance == Balance::Batch {
            self.balance_over_batch(cx, &mut blocks)?;
        }
        let (x_td, norm) = self.norm.of(cx, residual)?;
        Ok(Trunk { x_td, bad_ids, blocks, norm })
    }

    /// Adds up the loads of all layers with experts and of all ranks, over which each layer's load-balancing loss is taken.
    fn balance_over_batch(&self, cx: &Cx<'_, B>, blocks: &mut [BlockSaved<B>]) -> Result<()> {
        let experts = self.config.experts;
        let routed = blocks.iter().filter_map(|block| block.routed.as_ref());
        let entry = |(at, source)| Entry { source, at: at * experts, cells: experts, stride: 1 };
        let loads: Vec<_> = routed.map(|routed| Source::I32(&routed.load)).enumerate().map(entry).collect();
        let (mut of_layers, mut load) = (cx.b.zeros(loads.len() * experts)?, cx.b.zeros(experts)?);
        Collect { entries: &loads, table: &mut of_layers }.run(cx.b)?;
        // Whole numbers: their sum is the same in any order.
        let of_ranks = cx.mesh.all.all_gather_f64(cx.b, &of_layers)?;
        Collect { entries: &[entry((0, Source::F64(&of_ranks)))], table: &mut load }.run(cx.b)?;
        let rows = self.config.num_routed() * cx.shards.tokens() * cx.mesh.all.world();
        for routed in blocks.iter_mut().filter_map(|block| block.routed.as_mut()) {
            routed.batch = Some(BatchLoad { load: load.clone(), rows });
        }
        Ok(())
    }

    /// Adds every parameter's gradient but the head's, which has it since the forward pass.
    pub fn backward(&mut self, cx: &Cx<'_, B>, saved: DecoderSaved<B>) -> Result<()> {
        let mut dx_td = self.norm.backward(cx, saved.norm, saved.head.dx)?;
        for (block, saved) in self.blocks.iter_mut().zip(saved.blocks).rev() {
            dx_td = block.backward(cx, saved, dx_td)?;
        }
        let shards = cx.shards.local;
        self.embed.weight.add_gradient(cx, Writes::Adds, |grad, _| {
            EmbedBackward { ids: &saved.ids, dy: &dx_td, grad, shards }.run(cx.b)
        })
    }
}

/// A forward pass at the end of its layers.
#[derive(Debug)]
pub struct Inside<'a, B: Kernels> {
    x_td: &'a Tensor<B>,
    blocks: &'a [BlockSaved<B>],
    head: &'a Linear<B>,
}

impl<B: Kernels> Inside<'_, B> {
    /// Logits after each token, F32 `[t, v]`. The head has them a chunk at a time, quantized like these: what it quantizes for them has a
    /// scale of its own for each row at least.
    pub fn logits(&self, cx: &Cx<'_, B>) -> Result<Tensor<B>> {
        self.head.logits(cx, self.x_td.clone())
    }

    /// What routers chose, by the number of their layer; of layers that keep it.
    pub fn routings(&self) -> impl Iterator<Item = (usize, &Routing<B>)> {
        self.blocks.iter().enumerate().filter_map(|(layer, block)| Some((layer, block.routing()?)))
    }
}

/// What all but the head gives and keeps.
struct Trunk<B: Kernels> {
    /// The head's input, `[t, d]`.
    x_td: Tensor<B>,
    bad_ids: B::Buf<u64>,
    /// None where no backward pass follows.
    blocks: Vec<BlockSaved<B>>,
    norm: NormSaved<B>,
}

/// The last row.
fn last_row<B: Kernels>(b: &B, x: &Tensor<B>) -> Result<Tensor<B>> {
    let mut row = Tensor::zeros(b, x.dtype(), 1, x.cols)?;
    copy_rows(b, x, x.rows.saturating_sub(1)..x.rows, &mut row, 0)?;
    Ok(row)
}
