use crate::case::{Case, Outputs, Pads};
use crate::input::{Input, stream};
use crate::pair::Pair;
use crate::shapes::MoeShape;
use nibble_core::ops::{Route, RouteBackward, Routing};
use nibble_core::{Agreement, Kernels, Result, Tensor};

#[derive(Debug, Clone, Copy)]
struct Tokens {
    tokens: usize,
    experts: usize,
    top_k: usize,
    normalize: bool,
    shards: usize,
    input: Input,
}

impl Tokens {
    fn logits<B: Kernels>(&self, b: &B) -> Result<Tensor<B>> {
        let logits = self.input.values(&stream("router"), self.tokens * self.experts);
        Tensor::from_f32(b, &logits, self.tokens, self.experts)
    }

    fn forward<B: Kernels>(&self, b: &B, logits: &Tensor<B>) -> Result<Routing<B>> {
        Route { logits, top_k: self.top_k, normalize: self.normalize, shards: self.shards }.run(b)
    }

    /// The routers of real models, whole; [`Input::Zeros`] and [`Input::Integers`] are full of ties.
    fn all() -> Vec<Tokens> {
        let mut all = Vec::new();
        for input in Input::ALL {
            for (i, shape) in MoeShape::ALL.into_iter().enumerate() {
                let (normalize, shards) = (i % 2 == 0, [4, 1, 2, 8][i]);
                let MoeShape { experts, top_k, .. } = shape;
                all.push(Tokens { tokens: 96, experts, top_k, normalize, shards, input });
            }
            // Several chunks of tokens in a shard, the last one short.
            all.push(Tokens { tokens: 2 * 1100, experts: 40, top_k: 4, normalize: true, shards: 2, input });
            all.push(Tokens { tokens: 70, experts: 300, top_k: 10, normalize: true, shards: 1, input });
            all.push(Tokens { tokens: 0, experts: 8, top_k: 2, normalize: true, shards: 2, input });
            all.push(Tokens { tokens: 12, experts: 5, top_k: 5, normalize: true, shards: 4, input });
            all.push(Tokens { tokens: 1, experts: 1, top_k: 1, normalize: false, shards: 1, input });
        }
        all
    }
}

#[derive(Debug)]
struct Forward(Tokens);

impl<B: Kernels> Case<B> for Forward {
    fn agreement(&self) -> Agreement {
        Route::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let routing = self.0.forward(b, &self.0.logits(b)?)?;
        let mut out = Outputs::default();
        out.buf(b, "expert", &routing.expert, None)?;
        out.buf(b, "weight", &routing.weight, None)?;
        out.tensor(b, "probs", &routing.probs)?;
        out.buf(b, "log_sum_exp", &routing.log_sum_exp, None)?;
        out.buf(b, "load", &routing.load, None)?;
        out.buf(b, "losses", &routing.losses, None)?;
        Ok(out)
    }
}

/// Conformance of [`Route`].
pub fn route<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    Tokens::all().into_iter().for_each(|tokens| pair.check(&Forward(tokens)));
}

#[derive(Debug)]
struct Backward {
    tokens: Tokens,
    /// One loss for these rows and as many others.
    one_loss: bool,
}

impl<B: Kernels> Case<B> for Backward {
    fn agreement(&self) -> Agreement {
        RouteBackward::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let Tokens { tokens, experts, top_k, normalize, shards, .. } = self.tokens;
        let logits = self.tokens.logits(b)?;
        let routing = self.tokens.forward(b, &logits)?;
        // More than an `i32` holds in places.
        let load: Vec<f64> = (0..experts).map(|e| ((e * 37) % 101 * 30_000_001) as f64).collect();
        let load = b.upload(&load)?;
        let dweight = b.upload(&Input::Normal.values(&stream("route.dweight"), tokens * top_k))?;
        let dlogits = RouteBackward {
            routing: &routing,
            top_k,
            normalize,
            shards,
            dweight: &dweight,
            aux_scale: 0.01,
            z_scale: 0.001,
            batch_load: self.one_loss.then_some(&load),
            batch_rows: 3_000_000_007,
        }
        .run(b)?;
        let mut out = Outputs::default();
        out.tensor(b, "dlogits", &dlogits)?;
        Ok(out)
    }
}

/// Conformance of [`RouteBackward`].
pub fn route_backward<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    // Where the logits hold a NaN there is no routing to go back through.
    let finite = Tokens::all().into_iter().filter(|t| t.input != Input::NonFinite);
    for tokens in finite {
        [false, true].into_iter().for_each(|one_loss| pair.check(&Backward { tokens, one_loss }));
    }
}
