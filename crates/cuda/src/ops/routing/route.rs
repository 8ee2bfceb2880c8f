//! Runs `route` and `route_backward` on a GPU: a few lanes share each token; then one cluster per shard computes the shard's
//! losses.

use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::{KernelArg, Launch, plain_args};
use crate::ops::buffer_check::BufferCheck;
use crate::ops::planes::plain_arg;
use crate::ops::{Instance, SharedSize};
use crate::{Buffer, Cuda, Device};
use nibble_choice::routing::RouteSums;
use nibble_core::ops::{ExpertGroups, GroupScore, Route, RouteBackward, RouteRule, Routing, Scores};
use nibble_core::{Error, Result, Tensor};

const SOURCE: &str = "kernels/routing/route.cuh";
/// Threads per CTA of the loss kernel; the next constant is the number of experts that a CTA sums.
const LOSS_THREADS: usize = 1024;
const LOSS_EXPERTS: usize = 64;

/// The sizes of a routing call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RouteDesc {
    tokens_per_shard: usize,
    shards: usize,
    experts: usize,
    top_k: usize,
    /// The number of expert groups; 0 if there are none.
    groups: usize,
}

impl RouteDesc {
    /// The sizes for `tokens` tokens over all shards.
    fn new((tokens, experts): (usize, usize), shards: usize, rule: &RouteRule) -> Self {
        let groups = rule.groups.map_or(0, |groups| groups.count);
        Self { tokens_per_shard: tokens / shards, shards, experts, top_k: rule.top_k, groups }
    }

    /// Checks the limits of the kernels: indices of tokens and slots are `i32` on the device, and the chunks of the
    /// forward and backward passes must fit in shared memory. So every routing that runs forward also has a backward
    /// pass.
    fn check(self, op: &'static str, config: &RouteConfig, shared_bytes: usize) -> Result<Self> {
        let Self { tokens_per_shard, shards, experts, top_k, .. } = self;
        let tokens = tokens_per_shard * shards;
        if tokens.max(shards).saturating_mul(top_k.max(experts)) >= 1 << 31 {
            let got = format!("{tokens} tokens in {shards} shards");
            let expected = format!("fewer than 2^31 logits (of {experts} experts) and slots ({top_k})");
            return Err(Error::shape(op, "logits", got, expected));
        }
        let needed = config.tokens(&self).shared_bytes.max(config.backward(&self).shared_bytes);
        if needed > shared_bytes {
            let got = format!("{top_k} of {experts} experts, for which a chunk takes {needed} bytes");
            return Err(Error::shape(op, "top_k", got, format!("at most {shared_bytes} bytes")));
        }
        Ok(self)
    }

    fn sums(&self) -> RouteSums {
        RouteSums::new::<Cuda>(self.tokens_per_shard * self.shards, self.shards, self.experts)
    }

    fn chunks_of_shard(&self) -> usize {
        self.sums().chunks_of_shard
    }
}

/// The number of lanes that share a token, and the most experts per lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RouteConfig {
    lanes: usize,
    per_lane: usize,
}

impl RouteConfig {
    /// The configurations are in order of preference, because fewer lanes need fewer instructions per token. Sixteen
    /// probabilities still fit a lane's registers.
    const ALL: [RouteConfig; 5] = [
        RouteConfig { lanes: 2, per_lane: 8 },
        RouteConfig { lanes: 4, per_lane: 16 },
        RouteConfig { lanes: 8, per_lane: 16 },
        RouteConfig { lanes: 16, per_lane: 16 },
        RouteConfig { lanes: 16, per_lane: 32 },
    ];

    fn choose(op: &'static str, experts: usize) -> Result<Self> {
        let fits = |config: &RouteConfig| experts <= config.lanes * config.per_lane;
        Self::ALL.into_iter().find(fits).ok_or_else(|| Error::Unsupported {
            op,
            format: format!("a router of {experts} experts"),
            why: "the largest kernel has 512".to_owned(),
        })
    }

    fn spec(&self, name: &'static str) -> KernelSpec {
        let int = |value: usize| TemplateArg::Int(value as i64);
        let args = vec![("kLanes", int(self.lanes)), ("kPerLane", int(self.per_lane))];
        KernelSpec { source: SOURCE, name, args }
    }

    /// The forward kernel: the instance for any rule, or the fast instance for the largest softmax.
    fn tokens_spec(&self, any_rule: bool) -> KernelSpec {
        let mut spec = self.spec("nib::route_tokens");
        spec.args.push(("kAnyRule", TemplateArg::Bool(any_rule)));
        spec
    }

    /// The backward kernel.
    fn backward_spec(&self, loads: Loads, scores: Scores) -> KernelSpec {
        let mut spec = self.spec("nib::route_backward");
        spec.args.push(("Load", TemplateArg::Type(loads.type_name())));
        spec.args.push(("kSigmoid", TemplateArg::Bool(scores == Scores::Sigmoid)));
        spec
    }

    fn threads(&self) -> usize {
        256.min(Route::<Cuda>::CHUNK * self.lanes)
    }

    /// One CTA per chunk, with `words` words of shared memory.
    fn launch(&self, desc: &RouteDesc, words: usize) -> Launch {
        let (ctas, threads) = (desc.shards * desc.chunks_of_shard(), self.threads() as u32);
        Launch { ctas: ctas as u32, threads, cluster: 1, shared_bytes: 4 * words }
    }

    /// Shared memory for the chunk's probabilities, in rows that start half of the banks apart; for one count per
    /// expert; and for the slots and groups of the tokens in progress.
    fn tokens(&self, desc: &RouteDesc) -> Launch {
        let row = self.lanes * self.per_lane + 16 + 1;
        let at_once = self.threads() / self.lanes * (desc.top_k + desc.groups);
        self.launch(desc, Route::<Cuda>::CHUNK * row + desc.experts + at_once)
    }

    /// Shared memory for the chunk's probabilities, for one row of sums over all tokens, and for three numbers
    /// per slot.
    fn backward(&self, desc: &RouteDesc) -> Launch {
        let (chunk, row) = (Route::<Cuda>::CHUNK, self.lanes * self.per_lane);
        self.launch(desc, (chunk + 1) * row + 3 * chunk * desc.top_k)
    }
}

/// Which loads the backward pass uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Loads {
    /// One load-balancing loss per shard.
    Shards,
    /// One load-balancing loss over all shards, and the other losses.
    Batch,
    /// One load-balancing loss per document.
    Documents,
}

impl Loads {
    const ALL: [Loads; 3] = [Loads::Shards, Loads::Batch, Loads::Documents];

    fn of(op: &RouteBackward<'_, Cuda>) -> Self {
        match (op.batch_load, op.documents) {
            (Some(_), _) => Self::Batch,
            (None, Some(_)) => Self::Documents,
            (None, None) => Self::Shards,
        }
    }

    fn type_name(self) -> &'static str {
        match self {
            Self::Shards => "int",
            Self::Batch => "double",
            Self::Documents => "nib::RouteDocuments",
        }
    }
}

/// Mirrors the device struct `RouteDocuments`; null pointers without documents.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct DocumentsArg {
    starts: u64,
    slots: u64,
    lengths: u64,
}
plain_args!(DocumentsArg);

/// Inputs of the per-document load-balancing loss.
struct Documents<'a> {
    starts: &'a Buffer<i32>,
    slots: Buffer<i32>,
    lengths: Buffer<i32>,
}

impl<'a> Documents<'a> {
    /// Counts the slots per expert and document, over all tokens of the call.
    fn of(device: &Device, desc: &RouteDesc, starts: &'a Buffer<i32>, expert: &Buffer<i32>) -> Result<Self> {
        let tokens = desc.tokens_per_shard * desc.shards;
        let (slots, lengths) = (device.filled(desc.sums().document_slots(), 0)?, device.filled(tokens, 0)?);
        let tasks = tokens * (desc.top_k + 1);
        if tasks > 0 {
            const THREADS: usize = 256;
            let ctas = tasks.div_ceil(THREADS) as u32;
            let launch = Launch { ctas, threads: THREADS as u32, cluster: 1, shared_bytes: 0 };
            let [experts, top_k, per_shard] =
                [desc.experts, desc.top_k, desc.tokens_per_shard].map(|n| n as i32);
            let args: [&dyn KernelArg; 8] =
                [starts, expert, &slots, &lengths, &(tasks as u32), &experts, &top_k, &per_shard];
            // SAFETY: the caller checked that starts has one value per token and expert has `top_k` per token; slots and lengths are
            // allocated for these tokens. The kernel clamps starts to their shard and compares experts with the number of experts.
            unsafe { device.kernel(&documents_spec())?.launch(launch, &args) }?;
        }
        Ok(Self { starts, slots, lengths })
    }

    fn arg(&self) -> DocumentsArg {
        let [starts, slots, lengths] = [self.starts, &self.slots, &self.lengths].map(Buffer::address);
        DocumentsArg { starts, slots, lengths }
    }

    /// For each chunk of tokens, the sum of the tokens' contributions to their documents' losses.
    fn losses(
        &self,
        device: &Device,
        (config, desc, rule): (&RouteConfig, &RouteDesc, &RouteRule),
        (kept, log_sum_exp): (&Buffer<f32>, &Buffer<f32>),
    ) -> Result<Buffer<f32>> {
        let sums = device.alloc::<f32>(desc.sums().chunks)?;
        if desc.sums().chunks > 0 {
            let [experts, per_shard, chunks, is_sigmoid] = [
                desc.experts,
                desc.tokens_per_shard,
                desc.chunks_of_shard(),
                usize::from(rule.scores == Scores::Sigmoid),
            ]
            .map(|n| n as i32);
            let (documents, tiny) = (self.arg(), rule.tiny());
            let args: [&dyn KernelArg; 9] =
                [kept, log_sum_exp, &documents, &sums, &experts, &per_shard, &chunks, &is_sigmoid, &tiny];
            let kernel = device.kernel(&config.spec("nib::route_document_losses"))?;
            // SAFETY: `kept`, log_sum_exp and the documents are of the tokens of `desc`; there is one sum per chunk, and one CTA per
            // chunk.
            unsafe { kernel.launch(config.launch(desc, 0), &args) }?;
        }
        Ok(sums)
    }
}

fn documents_spec() -> KernelSpec {
    KernelSpec { source: SOURCE, name: "nib::route_documents", args: Vec::new() }
}

/// One cluster per shard.
fn losses_launch(desc: &RouteDesc) -> Launch {
    let cluster = desc.experts.div_ceil(LOSS_EXPERTS) as u32;
    Launch { ctas: desc.shards as u32 * cluster, threads: LOSS_THREADS as u32, cluster, shared_bytes: 0 }
}

fn losses_spec() -> KernelSpec {
    let args = vec![("kThreads", TemplateArg::Int(LOSS_THREADS as i64))];
    KernelSpec { source: SOURCE, name: "nib::route_losses", args }
}

/// Sums over each chunk of tokens.
struct Chunks {
    probs: Buffer<f32>,
    squares: Buffer<f32>,
    counts: Buffer<i32>,
}

impl Chunks {
    fn of(device: &Device, desc: &RouteDesc) -> Result<Self> {
        let (chunks, experts) = (desc.sums().chunks, desc.experts);
        Ok(Self {
            probs: device.alloc(chunks * experts)?,
            squares: device.alloc(chunks)?,
            counts: device.alloc(chunks * experts)?,
        })
    }

    /// Computes the loads and losses of the shards; `documents` has, per chunk, the sum of contributions to
    /// documents' losses.
    fn close(
        &self,
        device: &Device,
        desc: &RouteDesc,
        documents: Option<&Buffer<f32>>,
        out: &Routing<Cuda>,
    ) -> Result<()> {
        let products = device.alloc::<f64>(desc.shards * desc.experts)?;
        let (load, losses) = (out.load.get(), out.losses.get());
        let [experts, top_k, tokens, chunks] =
            [desc.experts, desc.top_k, desc.tokens_per_shard, desc.chunks_of_shard()].map(|n| n as i32);
        let args: [&dyn KernelArg; 11] = [
            &self.probs,
            &self.squares,
            &self.counts,
            &documents,
            &products,
            load,
            losses,
            &experts,
            &top_k,
            &tokens,
            &chunks,
        ];
        // SAFETY: the sums have shards · chunks chunks; load and products have shards · experts values, losses has two values
        // per shard, and there is one cluster per shard. The kernel waits for earlier kernels before it reads or writes.
        unsafe { device.kernel(&losses_spec())?.launch_early(losses_launch(desc), &args) }
    }
}

/// Runs [`Route`] on the GPU.
pub(crate) fn route(cuda: &Cuda, op: Route<'_, Cuda>) -> Result<Routing<Cuda>> {
    const OP: &str = "route";
    op.check()?;
    let buffers = BufferCheck::by(OP, cuda);
    buffers.tensor("logits", op.logits)?;
    let ((tokens, experts), shards, rule) = (op.logits.shape(), op.shards, op.rule);
    if let Some(bias) = op.bias {
        buffers.values("bias", bias, experts)?;
    }
    let starts = op.documents.map(|starts| buffers.values("documents", starts, tokens)).transpose()?;
    let config = RouteConfig::choose(OP, experts)?;
    let shared_bytes = cuda.device().info().shared_bytes_per_cta;
    let desc = RouteDesc::new((tokens, experts), shards, &rule).check(OP, &config, shared_bytes)?;
    let logits = op.logits.f32(OP, "logits")?.get();
    let bias = op.bias.map(|bias| bias.get());
    let device = cuda.device();
    let out = op.result(cuda)?;
    let kept = out.kept.f32(OP, "kept")?.get();
    let (expert, weight, log_sum_exp) = (out.expert.get(), out.weight.get(), out.log_sum_exp.get());
    let sums = Chunks::of(device, &desc)?;
    let [experts_arg, top_k_arg, tokens_arg, chunks_arg] =
        [experts, rule.top_k, desc.tokens_per_shard, desc.chunks_of_shard()].map(|n| n as i32);
    if tokens > 0 {
        let is_sigmoid = rule.scores == Scores::Sigmoid;
        let any_rule = is_sigmoid || bias.is_some() || rule.groups.is_some() || rule.in_turn;
        let kernel = device.kernel(&config.tokens_spec(any_rule))?;
        let [groups, top_groups, two_largest] = match rule.groups {
            None => [0; 3],
            Some(ExpertGroups { count, top, score }) => {
                [count as i32, top as i32, i32::from(score == GroupScore::Top2)]
            }
        };
        // SAFETY: `BufferCheck` ensured that logits has tokens · experts values, as many as `kept`, and the bias `experts` values. Expert
        // and weight are allocated for tokens · top_k values, log_sum_exp for `tokens` values, and the sums for every chunk, as the kernel
        // indexes them; each CTA has one chunk. If `kept` is the logits themselves, as for sigmoids, the kernel does not write it.
        unsafe {
            kernel.launch(
                config.tokens(&desc),
                &[
                    logits,
                    &bias,
                    kept,
                    expert,
                    weight,
                    log_sum_exp,
                    &sums.probs,
                    &sums.squares,
                    &sums.counts,
                    &experts_arg,
                    &top_k_arg,
                    &i32::from(rule.normalize),
                    &tokens_arg,
                    &chunks_arg,
                    &i32::from(is_sigmoid),
                    &groups,
                    &top_groups,
                    &two_largest,
                    &i32::from(rule.in_turn),
                    &rule.tiny(),
                    &rule.scale,
                ],
            )?;
        }
    }
    let documents = starts.map(|starts| Documents::of(device, &desc, starts, expert)).transpose()?;
    let document_sums = documents
        .as_ref()
        .map(|documents| documents.losses(device, (&config, &desc, &rule), (kept, log_sum_exp)));
    let document_sums = document_sums.transpose()?;
    sums.close(device, &desc, document_sums.as_ref(), &out)?;
    Ok(out)
}

/// Checks the buffers that [`RouteBackward`] borrows.
fn hold(cuda: &Cuda, op: &RouteBackward<'_, Cuda>) -> Result<()> {
    let (buffers, routing) = (BufferCheck::by("route_backward", cuda), op.routing);
    let (tokens, experts) = routing.kept.shape();
    let slots = tokens * op.rule.top_k;
    buffers.tensor("routing.kept", &routing.kept)?;
    buffers.values("routing.expert", &routing.expert, slots)?;
    buffers.values("routing.weight", &routing.weight, slots)?;
    buffers.values("routing.log_sum_exp", &routing.log_sum_exp, tokens)?;
    buffers.values("routing.load", &routing.load, op.shards * experts)?;
    if let Some(load) = op.batch_load {
        buffers.values("batch_load", load, experts)?;
    }
    if let Some(starts) = op.documents {
        buffers.values("documents", starts, tokens)?;
    }
    buffers.values("dweight", op.dweight, slots).map(drop)
}

/// Runs [`RouteBackward`] on the GPU. The kernel ignores an expert past the last one; [`Route`] never produces
/// such an index.
pub(crate) fn route_backward(cuda: &Cuda, op: RouteBackward<'_, Cuda>) -> Result<Tensor<Cuda>> {
    const OP: &str = "route_backward";
    op.check()?;
    let (tokens, experts) = op.routing.kept.shape();
    hold(cuda, &op)?;
    let config = RouteConfig::choose(OP, experts)?;
    let shared_bytes = cuda.device().info().shared_bytes_per_cta;
    let desc = RouteDesc::new((tokens, experts), op.shards, &op.rule).check(OP, &config, shared_bytes)?;
    let kept = op.routing.kept.f32(OP, "routing.kept")?.get();
    let device = cuda.device();
    let dlogits = op.result(cuda)?;
    if tokens > 0 {
        let per_shard = desc.tokens_per_shard;
        let (balance, z) = op.loss_factors();
        let [experts, top_k, normalize, per_shard, chunks] =
            [experts, desc.top_k, usize::from(op.rule.normalize), per_shard, desc.chunks_of_shard()]
                .map(|n| n as i32);
        let routing = op.routing;
        let documents =
            op.documents.map(|starts| Documents::of(device, &desc, starts.get(), routing.expert.get()));
        let documents = documents.transpose()?;
        let of_documents = documents.as_ref().map_or_else(DocumentsArg::default, Documents::arg);
        let loads = Loads::of(&op);
        let (load, load_stride): (&dyn KernelArg, i32) = match op.batch_load {
            Some(load) => (load.get(), 0),
            None => (routing.load.get(), experts),
        };
        let kernel = device.kernel(&config.backward_spec(loads, op.rule.scores))?;
        // SAFETY: `hold` ensured that `kept` has tokens · experts values, as many as dlogits; expert, weight and dweight
        // tokens · top_k; log_sum_exp `tokens`; load shards · experts; batch_load `experts` F64 values; and that documents are
        // of these tokens. The kernel compares experts with their number.
        unsafe {
            kernel.launch(
                config.backward(&desc),
                &[
                    kept,
                    routing.expert.get(),
                    routing.weight.get(),
                    routing.log_sum_exp.get(),
                    load,
                    op.dweight.get(),
                    plain_arg(&dlogits).0,
                    &experts,
                    &load_stride,
                    &top_k,
                    &normalize,
                    &per_shard,
                    &chunks,
                    &balance,
                    &z,
                    &op.rule.tiny(),
                    &op.rule.scale,
                    &of_documents,
                ],
            )?;
        }
    }
    Ok(dlogits)
}

/// Every kernel instance of this module.
pub(crate) fn instances() -> Vec<Instance> {
    let sizes = |config: &RouteConfig| {
        let experts = config.lanes * config.per_lane;
        RouteDesc { tokens_per_shard: 1, shards: 1, experts, top_k: experts.min(8), groups: 0 }
    };
    let of = |config: &RouteConfig| {
        let desc = sizes(config);
        let instance = |spec, launch: Launch| Instance { spec, shared_bytes: launch.shared_bytes };
        let tokens =
            [false, true].map(|any_rule| instance(config.tokens_spec(any_rule), config.tokens(&desc)));
        let passes = [Scores::Softmax, Scores::Sigmoid].map(|scores| {
            Loads::ALL.map(|loads| instance(config.backward_spec(loads, scores), config.backward(&desc)))
        });
        let documents = instance(config.spec("nib::route_document_losses"), config.launch(&desc, 0));
        tokens.into_iter().chain(passes.into_iter().flatten()).chain([documents])
    };
    let largest = sizes(&RouteConfig::ALL[RouteConfig::ALL.len() - 1]);
    let losses = Instance { spec: losses_spec(), shared_bytes: losses_launch(&largest).shared_bytes };
    let documents = Instance { spec: documents_spec(), shared_bytes: 0 };
    RouteConfig::ALL.iter().flat_map(of).chain([losses, documents]).collect()
}

/// The shared-memory sizes of every instance, for few experts and for the most experts, with and without expert
/// groups.
pub(crate) fn shared_sizes() -> Vec<SharedSize> {
    let of = |config: RouteConfig| {
        let RouteConfig { lanes, per_lane } = config;
        let most = lanes * per_lane;
        let sizes = [(1, 1, 0), (most / 2 + 1, 2, 0), (most, most.min(8), 8)];
        sizes.into_iter().flat_map(move |(experts, top_k, groups)| {
            let desc = RouteDesc { tokens_per_shard: 1, shards: 1, experts, top_k, groups };
            let tokens =
                format!("nib::route_tokens_shared_bytes<{lanes}, {per_lane}>({experts}, {top_k}, {groups})");
            let backward = format!("nib::route_backward_shared_bytes<{lanes}, {per_lane}>({top_k})");
            [(tokens, config.tokens(&desc)), (backward, config.backward(&desc))].map(
                |(expression, launch)| SharedSize { source: SOURCE, expression, bytes: launch.shared_bytes },
            )
        })
    };
    RouteConfig::ALL.into_iter().flat_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_of_experts_gets_the_smallest_instance_that_holds_it() {
        let of = |experts| RouteConfig::choose("route", experts).map(|c| (c.lanes, c.per_lane));
        let expected = [(1, 2, 8), (17, 4, 16), (64, 4, 16), (128, 8, 16), (256, 16, 16), (512, 16, 32)];
        for (experts, lanes, per_lane) in expected {
            assert_eq!(of(experts).unwrap(), (lanes, per_lane), "{experts}");
        }
        assert!(of(513).unwrap_err().to_string().contains("513 experts"));
    }

    #[test]
    fn a_choice_that_overflows_shared_memory_is_an_error_that_names_it() {
        let check = |experts, top_k| {
            let desc = RouteDesc { tokens_per_shard: 64, shards: 1, experts, top_k, groups: 0 };
            desc.check("route", &RouteConfig::choose("route", experts).unwrap(), 232_448)
        };
        for (experts, top_k) in [(1, 1), (16, 16), (128, 128), (256, 216), (512, 129)] {
            check(experts, top_k).unwrap();
        }
        for (experts, top_k) in [(256, 217), (512, 130), (512, 512)] {
            let error = check(experts, top_k).unwrap_err().to_string();
            assert!(error.contains("`top_k`"), "{experts} {top_k}: {error}");
        }
        assert!(check(512, usize::MAX).is_err());
    }

    #[test]
    fn the_largest_instance_fits_shared_memory() {
        let desc = RouteDesc { tokens_per_shard: 8192, shards: 4, experts: 512, top_k: 100, groups: 512 };
        let config = RouteConfig::choose("route", 512).unwrap();
        assert_eq!(config.tokens(&desc).ctas, 512);
        let all = [config.tokens(&desc), config.backward(&desc), losses_launch(&desc)];
        assert!(all.iter().all(|launch| launch.shared_bytes <= 232_448), "{all:?}");
    }
}
