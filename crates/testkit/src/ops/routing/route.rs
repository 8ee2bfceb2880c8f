use crate::case::{Case, Outputs, Pads};
use crate::documents::Documents;
use crate::input::{Input, stream};
use crate::pair::Pair;
use crate::shapes::MoeShape;
use nibble_core::ops::{ExpertGroups, GroupScore, Route, RouteBackward, RouteRule, Routing, Scores};
use nibble_core::{Agreement, Kernels, Result, Tensor};

#[derive(Debug, Clone, Copy)]
struct Tokens {
    tokens: usize,
    experts: usize,
    rule: RouteRule,
    /// Kind of values of the selection bias, if there is a bias.
    bias: Option<Input>,
    shards: usize,
    documents: Option<Documents>,
    input: Input,
}

impl Tokens {
    fn logits<B: Kernels>(&self, b: &B) -> Result<Tensor<B>> {
        let logits = self.input.values(&stream("router"), self.tokens * self.experts);
        Tensor::from_f32(b, &logits, self.tokens, self.experts)
    }

    fn forward<B: Kernels>(&self, b: &B, logits: &Tensor<B>) -> Result<Routing<B>> {
        let bias = self.bias.map(|input| b.upload(&input.values(&stream("router.bias"), self.experts)));
        let bias = bias.transpose()?;
        let documents = self.starts(b)?;
        let (rule, shards, documents) = (self.rule, self.shards, documents.as_ref());
        Route { logits, bias: bias.as_ref(), rule, shards, documents }.run(b)
    }

    fn starts<B: Kernels>(&self, b: &B) -> Result<Option<B::Buf<i32>>> {
        let of = |documents: Documents| b.upload(&documents.starts(self.shards, self.tokens / self.shards));
        self.documents.map(of).transpose()
    }

    /// The routers of real models at full size; [`Input::Zeros`] and [`Input::Integers`] have many ties.
    fn all() -> Vec<Tokens> {
        let mut all = Vec::new();
        for input in Input::ALL {
            let softmax = |tokens, experts, (top_k, normalize), shards| {
                let rule = RouteRule::softmax(top_k, normalize);
                Tokens { tokens, experts, rule, bias: None, shards, documents: None, input }
            };
            for (i, shape) in MoeShape::ALL.into_iter().enumerate() {
                let (normalize, shards) = (i % 2 == 0, [4, 1, 2, 8][i]);
                let MoeShape { experts, top_k, .. } = shape;
                all.push(softmax(96, experts, (top_k, normalize), shards));
            }
            // Each shard has several chunks of tokens, of which the last is short.
            all.push(softmax(2 * 1100, 40, (4, true), 2));
            all.push(softmax(70, 300, (10, true), 1));
            all.push(softmax(0, 8, (2, true), 2));
            all.push(softmax(12, 5, (5, true), 4));
            all.push(softmax(1, 1, (1, false), 1));
            all.extend(Self::of_other_rules(input));
        }
        // Each shape occurs with each kind of documents; the inputs rotate.
        let plain = all.len() / Input::ALL.len();
        let packed = all.iter().enumerate().map(|(i, tokens)| {
            let documents = Documents::ALL[1 + (i + i / plain) % (Documents::ALL.len() - 1)];
            Tokens { documents, ..*tokens }
        });
        let packed: Vec<_> = packed.collect();
        all.extend(packed);
        all
    }

    /// Cases of each part of a rule separately, the routers of DeepSeek-V2 and -V3, and expert counts for every instance of a GPU's kernel.
    fn of_other_rules(input: Input) -> Vec<Tokens> {
        use GroupScore::{Max, Top2};
        use Scores::{Sigmoid, Softmax};
        let groups = |count, top, score| Some(ExpertGroups { count, top, score });
        let of = |(tokens, experts, shards), (scores, groups), (top_k, normalize, scale), bias| {
            let rule = RouteRule { scores, top_k, normalize, groups, scale, in_turn: false };
            Tokens { tokens, experts, rule, bias, shards, documents: None, input }
        };
        let mut all = vec![
            of((96, 160, 4), (Softmax, groups(8, 3, Max)), (6, false, 16.0), None),
            of((200, 256, 2), (Sigmoid, groups(8, 4, Top2)), (8, true, 2.5), Some(Input::Normal)),
            of((70, 64, 1), (Softmax, None), (6, false, 1.0), Some(Input::Integers)),
            of((70, 64, 1), (Sigmoid, None), (6, true, 1.0), None),
            of((70, 64, 1), (Softmax, None), (6, true, 2.5), None),
            // The expert counts or group sizes are not multiples of four, or the rule selects the largest possible number of experts.
            of((130, 15, 2), (Sigmoid, groups(5, 2, Top2)), (6, true, 0.5), Some(Input::Integers)),
            of((130, 9, 1), (Softmax, groups(3, 2, Top2)), (5, true, 1.0), Some(Input::Normal)),
            of((65, 300, 1), (Sigmoid, groups(100, 10, Max)), (10, false, 1.0), Some(Input::Subnormals)),
            // There are as many groups as experts, or a single group.
            of((64, 16, 1), (Sigmoid, groups(16, 4, Max)), (3, true, 1.0), Some(Input::Zeros)),
            of((64, 128, 1), (Softmax, groups(1, 1, Top2)), (8, true, 1.0), None),
            of((0, 256, 2), (Sigmoid, groups(8, 4, Top2)), (8, true, 2.5), Some(Input::Normal)),
        ];
        // Experts are assigned in turn, with softmax and sigmoid, shards of several chunks, and expert counts that are not divisible by the
        // slots.
        let turns = [
            of((2 * 130, 128, 2), (Softmax, None), (8, true, 1.0), None),
            of((3 * 70, 15, 3), (Softmax, None), (4, false, 2.0), None),
            of((96, 256, 1), (Sigmoid, groups(8, 4, Top2)), (8, true, 2.5), Some(Input::Normal)),
        ];
        all.extend(turns.map(|t| Tokens { rule: RouteRule { in_turn: true, ..t.rule }, ..t }));
        // These cases have all kinds of bias values.
        let rule = (Sigmoid, groups(8, 4, Top2));
        all.extend(Input::ALL.map(|bias| of((64, 32, 1), rule, (6, true, 1.0), Some(bias))));
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
        out.tensor(b, "kept", &routing.kept)?;
        out.buf(b, "log_sum_exp", &routing.log_sum_exp, None)?;
        out.buf(b, "load", &routing.load, None)?;
        out.buf(b, "losses", &routing.losses, None)?;
        Ok(out)
    }
}

/// The conformance test of [`Route`].
pub fn route<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    Tokens::all().into_iter().for_each(|tokens| pair.check(&Forward(tokens)));
}

#[derive(Debug)]
struct Backward {
    tokens: Tokens,
    /// Whether the loss covers these rows together with as many other rows.
    one_loss: bool,
}

impl<B: Kernels> Case<B> for Backward {
    fn agreement(&self) -> Agreement {
        RouteBackward::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let Tokens { tokens, experts, rule, shards, .. } = self.tokens;
        let logits = self.tokens.logits(b)?;
        let routing = self.tokens.forward(b, &logits)?;
        // The loads are beyond the range of an `i32`.
        let load: Vec<f64> = (0..experts).map(|e| ((e * 37) % 101 * 30_000_001) as f64).collect();
        let load = b.upload(&load)?;
        let documents = self.tokens.starts(b)?.filter(|_| !self.one_loss);
        let dweight = b.upload(&Input::Normal.values(&stream("route.dweight"), tokens * rule.top_k))?;
        let dlogits = RouteBackward {
            routing: &routing,
            rule,
            shards,
            dweight: &dweight,
            aux_scale: 0.01,
            z_scale: 0.001,
            documents: documents.as_ref(),
            batch_load: self.one_loss.then_some(&load),
            batch_rows: 3_000_000_007,
        }
        .run(b)?;
        let mut out = Outputs::default();
        out.tensor(b, "dlogits", &dlogits)?;
        Ok(out)
    }
}

/// The conformance test of [`RouteBackward`].
pub fn route_backward<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    // Logits with a NaN are left out, because they have no routing to differentiate.
    let finite = Tokens::all().into_iter().filter(|t| t.input != Input::NonFinite);
    for tokens in finite {
        [false, true].into_iter().for_each(|one_loss| pair.check(&Backward { tokens, one_loss }));
    }
}
