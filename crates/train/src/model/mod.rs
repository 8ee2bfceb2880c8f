//! A decoder: RMSNorm → attention → RMSNorm → mixture of experts (Qwen3-MoE) or MLP (Qwen3, Llama), each added to the residual stream.
//! Legend: t tokens, d model, v vocabulary.

mod attention;
mod block;
mod feed;
mod kept;

pub use attention::{Attention, AttentionCache, AttentionSaved};
pub use block::{Block, BlockSaved};
pub use feed::{Feed, FeedSaved};

use crate::config::{Balance, ModelConfig};
use crate::cx::Cx;
use crate::family::{self, Family, Named};
use crate::layers::{
    Embedding, EmbeddingSaved, Head, HeadInput, HeadSaved, Layer, Norm, NormSaved, Residual, copy_rows,
    rope_table,
};
use crate::ledger::{Ledger, Saved};
use crate::moe::BatchLoad;
use crate::param::{Gathering, Param};
use crate::recompute::Recompute;
use crate::shards::Shards;
use crate::spec::ModelSpec;
use nibble_core::ops::{Collect, EmbedOut, Entry, EntrySource, Routing, verify_ids};
use nibble_core::{Kernels, Mesh, Recipe, Result, Tensor};

/// The whole decoder.
#[derive(Debug, Clone)]
pub struct Decoder<B: Kernels> {
    /// The sizes of the model.
    pub config: ModelConfig,
    /// The model family, which names the tensors in checkpoints. No value of a weight depends on the family.
    pub family: &'static dyn Family,
    /// The embedding, `[v, d]`.
    pub embed: Embedding<B>,
    /// The decoder layers.
    pub blocks: Vec<Block<B>>,
    /// The norm before the output head.
    pub norm: Norm<B>,
    /// The output head, with its own weight `[v, d]` or with the embedding's weight.
    pub head: Head<B>,
    /// The copies of weights for which the next forward pass waits.
    gathering: Gathering<B>,
}

/// The results of a forward pass over tokens, in device memory.
#[derive(Debug)]
pub struct DecoderOut<B: Kernels> {
    /// The loss of each shard in nats.
    pub shard_nats: B::Buf<f64>,
    /// Two counts of token ids outside the vocabulary: among the inputs, and among the targets.
    pub bad_ids: [B::Buf<u64>; 2],
}

impl<B: Kernels> DecoderOut<B> {
    /// Waits for the forward pass, and reads the two counts of invalid ids from the device.
    ///
    /// # Errors
    /// Returns [`nibble_core::Error::Shape`] if any id is not in the vocabulary. The error names `op`, and the inputs or else the targets.
    pub fn verify_ids(&self, b: &B, op: &'static str, vocab: usize) -> Result<()> {
        let mut counts = ["inputs", "targets"].into_iter().zip(&self.bad_ids);
        counts.try_for_each(|(argument, bad)| verify_ids(b, op, argument, bad, vocab))
    }
}

/// Saved activations of the decoder.
#[derive(Debug)]
pub struct DecoderSaved<B: Kernels> {
    embed: EmbeddingSaved<B>,
    /// The saved activations of each decoder layer.
    pub blocks: Vec<BlockSaved<B>>,
    norm: NormSaved<B>,
    head: HeadSaved<B>,
}

impl<B: Kernels> Saved for DecoderSaved<B> {
    fn ledger(&self, ledger: &mut Ledger) {
        self.embed.ledger(ledger);
        self.blocks.iter().for_each(|block| block.ledger(ledger));
        self.norm.ledger(ledger);
        self.head.ledger(ledger);
    }
}

impl<B: Kernels> Decoder<B> {
    /// Creates this rank's part of a decoder with random weights. The initial weights depend only on the seed.
    ///
    /// # Errors
    /// Passes on errors of the backend. This function does not check the configuration, because the configuration was checked when it was
    /// read.
    pub fn new(
        b: &B,
        mesh: Mesh<'_, B>,
        recipe: &Recipe,
        config: &ModelConfig,
        seq_len: usize,
        seed: u64,
    ) -> Result<Self> {
        let rope = rope_table(b, seq_len, ModelSpec::new(config).rope)?;
        Self::with_rope(b, mesh, recipe, config, rope, seed)
    }

    /// [`Decoder::new`] with the table of RoPE, `[positions, dim]`.
    pub(crate) fn with_rope(
        b: &B,
        mesh: Mesh<'_, B>,
        recipe: &Recipe,
        config: &ModelConfig,
        rope: Tensor<B>,
        seed: u64,
    ) -> Result<Self> {
        let mut cx = Cx::inference(b, mesh, recipe, Shards::new(b, 1, 1, mesh.all.rank())?, 0.0);
        cx.seed = seed;
        let spec = ModelSpec::new(config);
        let blocks = spec.blocks().map(|block| Block::new(&cx, &block, rope.clone()));
        Ok(Self {
            config: config.clone(),
            family: family::of(config),
            embed: Embedding::new(&cx, &spec.embed)?,
            blocks: blocks.collect::<Result<_>>()?,
            norm: Norm::new(&cx, &spec.norm, config.norm_eps as f32)?,
            head: Head::new(&cx, &spec.head)?,
            gathering: Gathering::default(),
        })
    }

    /// Sets what later backward passes recompute; until the first call, the setting is [`Recompute::default`].
    pub fn recompute(&mut self, recompute: &Recompute) {
        for (layer, block) in self.blocks.iter_mut().enumerate() {
            block.recompute(&recompute.of_layer(&self.config, layer));
        }
    }

    /// Creates the copies of all weights that this step's passes read.
    ///
    /// # Errors
    /// Passes on errors of the backend and of other ranks.
    pub fn prepare(&mut self, cx: &Cx<'_, B>) -> Result<()> {
        self.begin_prepare(cx)?;
        self.gathering.finish_next(cx, self.embed.params())?;
        // Each group is looked up only among the parameters of its own layer, because a deep model has thousands of parameters.
        self.blocks.iter_mut().try_for_each(|block| self.gathering.finish_next(cx, block.params()))?;
        self.gathering.finish_next(cx, self.norm.params())?;
        self.gathering.finish_next(cx, vec![self.head.weight_mut(&mut self.embed.weight)])
    }

    /// Starts to create the copies of all weights; [`Decoder::forward`] with the same context waits for these copies. The rows that other
    /// ranks store are transferred while earlier layers run.
    ///
    /// # Errors
    /// Passes on errors of the backend and of other ranks.
    pub fn begin_prepare(&mut self, cx: &Cx<'_, B>) -> Result<()> {
        // The groups are in the order in which the forward pass waits for them.
        let mut groups = vec![self.embed.wanted()];
        groups.extend(self.blocks.iter().map(|block| block.wanted(cx)));
        groups.extend([self.norm.wanted(cx), self.head.wanted(cx, &self.embed.weight)]);
        self.gathering = Gathering::begin(cx, groups)?;
        Ok(())
    }

    /// Whether any copies of weights are still missing.
    pub fn is_gathering(&self) -> bool {
        self.gathering.is_under_way()
    }

    /// Drops the copies of all weights.
    pub fn release(&mut self) {
        self.params().into_iter().for_each(Param::release);
    }

    /// Every parameter, in canonical order.
    pub fn params(&mut self) -> Vec<&mut Param<B>> {
        let mut params = self.embed.params();
        params.extend(self.blocks.iter_mut().flat_map(Block::params));
        params.extend(self.norm.params());
        params.extend(&mut self.head.own);
        params
    }

    /// The parameters that have gradients: all parameters except router biases.
    pub fn optimized(&mut self) -> Vec<&mut Param<B>> {
        self.params().into_iter().filter(|param| param.has_gradient()).collect()
    }

    /// The tensors of the decoder's checkpoints.
    pub fn named_tensors(&self) -> Vec<Named> {
        self.family.tensors(&ModelSpec::new(&self.config))
    }

    /// Drops every gradient.
    pub fn clear_gradients(&mut self) {
        self.params().into_iter().for_each(Param::clear_gradient);
    }

    /// Computes the losses of these tokens, and saves the activations that the backward pass needs. The forward pass also computes the
    /// gradients of the output head, because the logits exist only then. All gradients are those of the sum of the losses, multiplied by
    /// the factor in `control` ([`nibble_core::ops::Control`]). If the copies of weights were only [started](Decoder::begin_prepare), each
    /// layer waits for the copies of its own weights.
    pub fn forward(
        &mut self,
        cx: &Cx<'_, B>,
        ids: B::Buf<i32>,
        targets: &B::Buf<i32>,
        control: &B::Buf<f32>,
    ) -> Result<(DecoderOut<B>, DecoderSaved<B>)> {
        self.forward_seen(cx, ids, targets, control, |_| Ok(()))
    }

    /// Like [`Decoder::forward`], but also passes intermediate results to `look`.
    pub fn forward_seen(
        &mut self,
        cx: &Cx<'_, B>,
        ids: B::Buf<i32>,
        targets: &B::Buf<i32>,
        control: &B::Buf<f32>,
        look: impl FnOnce(Inside<'_, B>) -> Result<()>,
    ) -> Result<(DecoderOut<B>, DecoderSaved<B>)> {
        self.gathering.finish_next(cx, self.embed.params())?;
        let embedded = self.embed.forward(cx, &ids)?;
        let blocks = self.blocks.iter_mut().map(|block| {
            self.gathering.finish_next(cx, block.params())?;
            Ok(&*block)
        });
        let layers = through(cx, embedded, blocks)?;
        self.gathering.finish_next(cx, self.norm.params())?;
        let Trunk { x_td, bad_ids, blocks, norm } = self.normed(cx, layers)?;
        self.gathering.finish_next(cx, vec![self.head.weight_mut(&mut self.embed.weight)])?;
        look(Inside { x_td: &x_td, blocks: &blocks, head: &self.head, table: &self.embed.weight })?;
        let input = HeadInput { x_td: &x_td, targets, shards: cx.shards.local };
        let table = &mut self.embed.weight;
        let (loss, head) = self.head.losses_and_gradients(cx, table, &input, control)?;
        let out = DecoderOut { shard_nats: loss.shard_nats, bad_ids: [bad_ids, loss.bad_ids] };
        Ok((out, DecoderSaved { embed: self.embed.saved(ids), blocks, norm, head }))
    }

    /// Computes the losses of these tokens: the tokens form `shards` equal consecutive runs, and the losses are summed within each run.
    pub fn losses(
        &self,
        cx: &Cx<'_, B>,
        ids: &B::Buf<i32>,
        targets: &B::Buf<i32>,
        shards: usize,
    ) -> Result<DecoderOut<B>> {
        Ok(self.losses_and_input(cx, ids, targets, shards)?.0)
    }

    /// Like [`Decoder::losses`], but also returns the head's input `[t, d]`, from which [`Decoder::logits`] computes logits.
    pub fn losses_and_input(
        &self,
        cx: &Cx<'_, B>,
        ids: &B::Buf<i32>,
        targets: &B::Buf<i32>,
        shards: usize,
    ) -> Result<(DecoderOut<B>, Tensor<B>)> {
        let Trunk { x_td, bad_ids, .. } = self.trunk(cx, ids)?;
        let input = HeadInput { x_td: &x_td, targets, shards };
        let loss = self.head.losses(cx, &self.embed.weight, &input)?;
        Ok((DecoderOut { shard_nats: loss.shard_nats, bad_ids: [bad_ids, loss.bad_ids] }, x_td))
    }

    /// Computes the logits that follow the last of these tokens, F32 `[1, v]`, and counts the tokens that are not in the vocabulary.
    pub fn last_logits(&self, cx: &Cx<'_, B>, ids: &B::Buf<i32>) -> Result<(Tensor<B>, B::Buf<u64>)> {
        let Trunk { x_td, bad_ids, .. } = self.trunk(cx, ids)?;
        Ok((self.logits(cx, &last_row(cx.b, &x_td)?)?, bad_ids))
    }

    /// Creates the KV caches for one sequence, one cache per decoder layer.
    pub fn caches(&self, cx: &Cx<'_, B>) -> Result<Vec<AttentionCache<B>>> {
        self.blocks.iter().map(|block| block.attn.cache(cx)).collect()
    }

    /// Like [`Decoder::last_logits`], but for tokens that follow the tokens in the caches; see [`Attention::cached`].
    pub fn cached_logits(
        &self,
        cx: &Cx<'_, B>,
        ids: &B::Buf<i32>,
        caches: &mut [AttentionCache<B>],
    ) -> Result<(Tensor<B>, B::Buf<u64>)> {
        let EmbedOut { x, bad_ids } = self.embed.forward(cx, ids)?;
        let mut residual = Residual::from(x);
        for (block, cache) in self.blocks.iter().zip(caches) {
            residual = block.cached(cx, residual, cache)?;
        }
        let plus = residual.plus.as_ref().map(|plus| last_row(cx.b, plus)).transpose()?;
        let (x_td, _) = self.norm.of(cx, Residual { x: last_row(cx.b, &residual.x)?, plus })?;
        Ok((self.logits(cx, &x_td)?, bad_ids))
    }

    /// Computes the logits, F32 `[t, v]`, from the head's input.
    pub fn logits(&self, cx: &Cx<'_, B>, x_td: &Tensor<B>) -> Result<Tensor<B>> {
        self.head.logits(cx, &self.embed.weight, x_td)
    }

    /// The forward pass of all layers except the head.
    fn trunk(&self, cx: &Cx<'_, B>, ids: &B::Buf<i32>) -> Result<Trunk<B>> {
        let embedded = self.embed.forward(cx, ids)?;
        self.normed(cx, through(cx, embedded, self.blocks.iter().map(Ok))?)
    }

    /// The forward pass from the last decoder layer up to the head.
    fn normed(&self, cx: &Cx<'_, B>, layers: Through<B>) -> Result<Trunk<B>> {
        let Through { residual, bad_ids, mut blocks } = layers;
        if cx.training && self.config.balance == Balance::Batch {
            self.balance_over_batch(cx, &mut blocks)?;
        }
        let (x_td, norm) = self.norm.of(cx, residual)?;
        Ok(Trunk { x_td, bad_ids, blocks, norm })
    }

    /// Adds up the loads of all expert layers on all ranks. Each layer's load-balancing loss is computed with these loads.
    fn balance_over_batch(&self, cx: &Cx<'_, B>, blocks: &mut [BlockSaved<B>]) -> Result<()> {
        let experts = self.config.experts;
        let routed = blocks.iter().filter_map(|block| block.routed.as_ref());
        let entry = |(at, source)| Entry { source, at: at * experts, cells: experts, stride: 1 };
        let loads: Vec<_> =
            routed.map(|routed| EntrySource::I32(&routed.load)).enumerate().map(entry).collect();
        let (mut of_layers, mut load) = (cx.b.zeros(loads.len() * experts)?, cx.b.zeros(experts)?);
        Collect { entries: &loads, table: &mut of_layers }.run(cx.b)?;
        // The loads are whole numbers, so their sum is the same in any order.
        let of_ranks = cx.mesh.all.all_gather_f64(cx.b, &of_layers)?;
        Collect { entries: &[entry((0, EntrySource::F64(&of_ranks)))], table: &mut load }.run(cx.b)?;
        let rows = self.config.num_routed() * cx.shards.tokens() * cx.mesh.all.world();
        for routed in blocks.iter_mut().filter_map(|block| block.routed.as_mut()) {
            routed.batch = Some(BatchLoad { load: load.clone(), rows });
        }
        Ok(())
    }

    /// Adds every parameter's gradient, except the gradient of the head's weight, which the forward pass has already added.
    pub fn backward(&mut self, cx: &Cx<'_, B>, saved: DecoderSaved<B>) -> Result<()> {
        let mut dx_td = self.norm.backward(cx, saved.norm, saved.head.dx)?;
        for (block, saved) in self.blocks.iter_mut().zip(saved.blocks).rev() {
            dx_td = block.backward(cx, saved, dx_td)?;
        }
        self.embed.backward(cx, saved.embed, &dx_td)
    }
}

/// The state of a forward pass after the last decoder layer.
#[derive(Debug)]
pub struct Inside<'a, B: Kernels> {
    x_td: &'a Tensor<B>,
    blocks: &'a [BlockSaved<B>],
    head: &'a Head<B>,
    table: &'a Param<B>,
}

impl<B: Kernels> Inside<'_, B> {
    /// The logits after each token, F32 `[t, v]`. In a training step, the head computes the same logits in chunks of tokens. Chunks do not
    /// change the logits, because every operand that the head quantizes has at least one scale per row.
    pub fn logits(&self, cx: &Cx<'_, B>) -> Result<Tensor<B>> {
        self.head.logits(cx, self.table, self.x_td)
    }

    /// The routers' choices of experts, each with the number of its layer, for the layers that saved their choice.
    pub fn routings(&self) -> impl Iterator<Item = (usize, &Routing<B>)> {
        self.blocks.iter().enumerate().filter_map(|(layer, block)| Some((layer, block.routing()?)))
    }
}

/// The result of all layers except the head, and the saved activations.
struct Trunk<B: Kernels> {
    /// The head's input, `[t, d]`.
    x_td: Tensor<B>,
    bad_ids: B::Buf<u64>,
    /// The saved activations of the decoder layers; empty if no backward pass follows.
    blocks: Vec<BlockSaved<B>>,
    norm: NormSaved<B>,
}

/// The result of the decoder layers, and their saved activations.
struct Through<B: Kernels> {
    residual: Residual<B>,
    bad_ids: B::Buf<u64>,
    /// The saved activations of the decoder layers; empty if no backward pass follows.
    blocks: Vec<BlockSaved<B>>,
}

/// Runs the layers' forward passes, one after the other.
fn through<'a, B: Kernels>(
    cx: &Cx<'_, B>,
    EmbedOut { x, bad_ids }: EmbedOut<B>,
    blocks: impl Iterator<Item = Result<&'a Block<B>>>,
) -> Result<Through<B>> {
    let (mut residual, mut kept) = (Residual::from(x), Vec::new());
    for block in blocks {
        let (next, saved) = block?.forward(cx, residual)?;
        residual = next;
        if cx.training {
            kept.push(saved);
        }
    }
    Ok(Through { residual, bad_ids, blocks: kept })
}

/// The last row of x.
fn last_row<B: Kernels>(b: &B, x: &Tensor<B>) -> Result<Tensor<B>> {
    let mut row = Tensor::zeros(b, x.dtype(), 1, x.cols)?;
    copy_rows(b, x, x.rows.saturating_sub(1)..x.rows, &mut row, 0)?;
    Ok(row)
}
