//! Sums over a step's micro-batches, and what becomes of them over all ranks: the same for any number of ranks.

use crate::config::Config;
use crate::cx::{Cx, SiteCounts};
use crate::error::Result;
use crate::metrics::Metrics;
use crate::model::{DecoderOut, DecoderSaved};
use nibble_core::{Error as CoreError, Kernels, Occupancy};
use std::collections::BTreeMap;

/// What a step's micro-batches leave on the device. It is read once, at the end of the step: nothing waits in between.
#[derive(Debug)]
pub(super) struct Tally<B: Kernels> {
    micro_batches: Vec<MicroBatch<B>>,
}

/// Handles of what one micro-batch leaves.
#[derive(Debug)]
struct MicroBatch<B: Kernels> {
    out: DecoderOut<B>,
    layers: Vec<Layer<B>>,
}

/// Handles of what one expert layer leaves.
#[derive(Debug)]
struct Layer<B: Kernels> {
    /// The router's losses by shard.
    losses: B::Buf<f32>,
    /// Slots that chose each expert by shard.
    load: B::Buf<i32>,
    occupancy: Occupancy<B>,
}

impl<B: Kernels> Tally<B> {
    pub fn new() -> Self {
        Self { micro_batches: Vec::new() }
    }

    /// Keeps a micro-batch's losses and loads.
    pub fn keep(&mut self, out: DecoderOut<B>, saved: &DecoderSaved<B>) {
        let layers = saved.blocks.iter().map(|block| Layer {
            losses: block.moe.losses().clone(),
            load: block.moe.load().clone(),
            occupancy: block.moe.occupancy().clone(),
        });
        self.micro_batches.push(MicroBatch { out, layers: layers.collect() });
    }

    /// The step's metrics, over all ranks, the same for any number of them.
    ///
    /// # Errors
    /// [`CoreError::Shape`] if an input or a target lies outside the vocabulary; [`CoreError::Capacity`] if an expert layer had more rows than its buffers hold; [`CoreError::NonFinite`] naming the first tensor that held a NaN or an infinity, or the loss.
    pub fn metrics(self, cx: &Cx<'_, B>, config: &Config) -> Result<Metrics> {
        let mut sums = Sums { counts: cx.site_counts()?, ..Sums::default() };
        for micro_batch in &self.micro_batches {
            micro_batch.out.verify_ids(cx.b, "train_step", config.model.vocab_size)?;
            sums.add(cx, micro_batch)?;
        }
        sums.metrics(cx, config)
    }
}

/// Sums over the micro-batches of this rank.
#[derive(Debug, Default)]
struct Sums {
    /// Nats of each local shard.
    shard_nats: Vec<f64>,
    /// Load-balancing and z-loss of each local shard, summed over layers.
    router_losses: Vec<[f64; 2]>,
    /// For each layer, slots that chose each expert.
    load: Vec<Vec<f64>>,
    counts: BTreeMap<String, SiteCounts>,
}

impl Sums {
    fn add<B: Kernels>(&mut self, cx: &Cx<'_, B>, micro_batch: &MicroBatch<B>) -> Result<()> {
        let shards = cx.shards.local;
        let nats = cx.b.download(&micro_batch.out.shard_nats)?;
        self.shard_nats.resize(shards, 0.0);
        self.router_losses.resize(shards, [0.0; 2]);
        self.load.resize(micro_batch.layers.len(), Vec::new());
        self.shard_nats.iter_mut().zip(nats).for_each(|(sum, nats)| *sum += nats);
        for (left, layer) in micro_batch.layers.iter().zip(&mut self.load) {
            left.occupancy.verify(cx.b)?;
            let losses = cx.b.download(&left.losses)?;
            for (sum, pair) in self.router_losses.iter_mut().zip(losses.chunks(2)) {
                sum[0] += f64::from(pair[0]);
                sum[1] += f64::from(pair[1]);
            }
            let load = cx.b.download(&left.load)?;
            let experts = load.len() / shards;
            layer.resize(experts, 0.0);
            for shard in load.chunks(experts) {
                layer.iter_mut().zip(shard).for_each(|(sum, n)| *sum += f64::from(*n));
            }
        }
        Ok(())
    }

    fn metrics<B: Kernels>(self, cx: &Cx<'_, B>, config: &Config) -> Result<Metrics> {
        let gather = |values: Vec<f32>| -> Result<Vec<f64>> {
            let all = cx.comm.all_gather(cx.b, &cx.b.upload(&values)?)?;
            Ok(cx.b.download(&all)?.into_iter().map(f64::from).collect())
        };
        let nats = gather(self.shard_nats.iter().map(|n| *n as f32).collect())?;
        let loss = tree_sum(&nats) / config.tokens_per_step() as f64;
        let losses = gather(self.router_losses.iter().flatten().map(|l| *l as f32).collect())?;
        let shards = (config.train.shards * config.train.grad_accum) as f64;
        let router_loss = |i: usize| Some(losses.iter().skip(i).step_by(2).sum::<f64>() / shards);
        let mut load = self.load;
        for layer in &mut load {
            let all = gather(layer.iter().map(|n| *n as f32).collect())?;
            let experts = layer.len();
            *layer = (0..experts).map(|e| all.iter().skip(e).step_by(experts).sum()).collect();
        }
        if !loss.is_finite() {
            return Err(CoreError::NonFinite { site: "loss".into(), layer: "-".into(), step: cx.step }.into());
        }
        let inexact = |conversion: &str| {
            let counts = self.counts.iter().filter(|(site, _)| site.contains(conversion)).map(|(_, c)| c);
            let (blocks, inexact) = counts.fold((0, 0), |sum, c| (sum.0 + c.non_zero, sum.1 + c.inexact));
            (blocks > 0).then(|| inexact as f64 / blocks as f64)
        };
        let pairs: usize = load.iter().map(Vec::len).sum();
        let dead = load.iter().flatten().filter(|n| **n == 0.0).count();
        let fullest = load.iter().map(|layer| {
            let mean = layer.iter().sum::<f64>() / layer.len().max(1) as f64;
            layer.iter().fold(0.0, |a: f64, b| a.max(*b)) / mean
        });
        Ok(Metrics {
            loss: Some(loss),
            aux_loss: router_loss(0),
            z_loss: router_loss(1),
            load_max_over_mean: fullest.reduce(f64::max),
            dead_expert_fraction: (pairs > 0).then(|| dead as f64 / pairs as f64),
            inexact_fraction: inexact(".mxfp4→"),
            shift_inexact_fraction: inexact(".e4m3→"),
            ..Metrics::default()
        })
    }
}

/// ((0+1)+(2+3))…
fn tree_sum(values: &[f64]) -> f64 {
    match values {
        [] => 0.0,
        [one] => *one,
        _ => {
            let (left, right) = values.split_at(values.len().div_ceil(2));
            tree_sum(left) + tree_sum(right)
        }
    }
}
