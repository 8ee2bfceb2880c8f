//! Counts for a model: parameters by group, the configuration keys that determine their number, and the flops per token.

use super::{Group, LAYERS, ModelSpec, ParamSpec, Part, Run, Size};
use crate::config::Config;
use nibble_core::ops::mean_keys;
use std::collections::HashMap;

/// The parameters of one group of the model's parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameters {
    /// The group of parameters.
    pub group: Group,
    /// The group's name in messages.
    pub what: &'static str,
    /// The sizes whose product is the size of the group's largest tensors. The number of layers with these tensors comes first.
    pub sizes: Vec<Size>,
    /// Number of parameters over all ranks; `None` if the number exceeds 128 bits.
    pub count: Option<u128>,
}

impl ModelSpec {
    /// The parameters of every non-empty group of the model.
    #[must_use]
    pub fn parameters(&self) -> Vec<Parameters> {
        Group::ALL.into_iter().filter_map(|group| self.parameters_of(group)).collect()
    }

    /// Number of parameters of the model; `None` if the number exceeds 128 bits.
    #[must_use]
    pub fn num_parameters(&self) -> Option<u128> {
        self.parameters().iter().try_fold(0u128, |sum, group| sum.checked_add(group.count?))
    }

    /// The parameters of a group; `None` if the model has no parameters in the group.
    #[must_use]
    pub fn parameters_of(&self, group: Group) -> Option<Parameters> {
        let of_part = |part: &Part| match part.group == group {
            true => part.params().to_vec(),
            false => Vec::new(),
        };
        let of_run = |run: &Run| -> Vec<(usize, ParamSpec)> {
            let params = run.block.parts().into_iter().flat_map(of_part);
            params.map(|param| (run.layers.value, param)).collect()
        };
        let runs: Vec<(Size, Vec<(usize, ParamSpec)>)> =
            self.runs.iter().map(|run| (run.layers, of_run(run))).collect();
        // The layers with parameters in this group: the layers of one run, or all layers.
        let mut with = runs.iter().filter(|(_, params)| !params.is_empty()).map(|(layers, _)| *layers);
        let layers = match (with.next(), with.next()) {
            (Some(_), Some(_)) => Some(Size::new(LAYERS, self.num_blocks())),
            (one, _) => one,
        };
        let outside = [&self.embed, &self.norm, &self.head].into_iter().flat_map(of_part);
        let all: Vec<(usize, ParamSpec)> =
            outside.map(|param| (1, param)).chain(runs.into_iter().flat_map(|(_, params)| params)).collect();
        let counts = all.iter().map(|(times, param)| param.count()?.checked_mul(*times as u128));
        let counts: Vec<Option<u128>> = counts.collect();
        // `largest` is the first of the largest parameters. A count that overflows is larger than all others.
        let size = |at: &usize| counts[*at].unwrap_or(u128::MAX);
        let largest = (0..all.len()).reduce(|most, at| if size(&at) > size(&most) { at } else { most })?;
        let what = match group {
            Group::Tables if self.head.params().is_empty() => "the embedding",
            _ => group.name(),
        };
        Some(Parameters {
            group,
            what,
            sizes: layers.into_iter().chain(all[largest].1.sizes()).collect(),
            count: counts.into_iter().try_fold(0u128, |sum, count| sum.checked_add(count?)),
        })
    }

    /// The largest number of columns of an activation between the embedding and the head's logits; `None` if the number exceeds 128 bits.
    pub(crate) fn widest(&self) -> Option<u128> {
        let parts = self.runs.iter().flat_map(|run| run.block.parts());
        let weights = parts.flat_map(Part::weights);
        let extents = weights.flat_map(|weight| [&weight.rows, &weight.cols]);
        extents.map(|extent| extent.count()).try_fold(0, |widest, count| Some(widest.max(count?)))
    }

    /// Approximate number of values per token that a forward pass saves, regardless of the recipe.
    pub(crate) fn kept_values(&self) -> f64 {
        self.runs.iter().map(|run| run.layers.value as f64 * run.block.kept_values()).sum()
    }

    /// The group in which the saved activations of each layer are counted, by the layer's id.
    pub(crate) fn groups(&self) -> HashMap<String, Group> {
        let parts = self.parts().map(|part| (part.id, part.group));
        let nodes = self.blocks().flat_map(|block| {
            block.nodes().into_iter().map(|(id, group)| (id.to_owned(), group)).collect::<Vec<_>>()
        });
        parts.chain(nodes).collect()
    }

    /// Number of parameters of the matrices that multiply a token: attention, router, the token's experts, the shared expert, dense MLPs,
    /// the head.
    #[must_use]
    pub fn active_parameters(&self) -> u64 {
        let of_run = |run: &Run| {
            let parts = run.block.parts().into_iter().map(Part::active_parameters);
            run.layers.value * parts.sum::<usize>()
        };
        (self.runs.iter().map(of_run).sum::<usize>() + self.head.active_parameters()) as u64
    }

    /// Multiply-adds of attention's scores and values for each token of sequences of `seq_len` tokens, on average.
    fn attention_multiply_adds(&self, seq_len: usize) -> f64 {
        let [full, sliding] = [seq_len, self.config.sliding_window].map(|most| mean_keys(seq_len, most));
        let full = if self.config.causal { full } else { seq_len as f64 };
        let of_run = |run: &Run| {
            let keys = (run.layers.value - run.sliding) as f64 * full + run.sliding as f64 * sliding;
            run.block.attn.pair_multiply_adds() as f64 * keys
        };
        self.runs.iter().map(of_run).sum()
    }
}

impl Config {
    /// Flops of all products per token, forward and backward. A multiply-add counts as two flops, and each product of the forward pass
    /// counts three times (fprop, dgrad, wgrad). Attention counts only the query-key pairs that the causal mask and a sliding window leave
    /// ([`mean_keys`]). Experts count only their routed rows, without padding. Recomputation is not counted.
    #[must_use]
    pub fn flops_per_token(&self) -> f64 {
        let spec = ModelSpec::new(&self.model);
        6.0 * (spec.active_parameters() as f64 + spec.attention_multiply_adds(self.data.seq_len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flops_of_a_token_written_out() {
        let set = ["model.layers=1", "model.shared_ffn=32"].map(String::from);
        let config = Config::load("tiny", &set).unwrap();
        // The model has d 64, 4 heads and 2 key-value heads of 16, 8 experts of width 64, 2 experts per token, 64 symbols, and sequences of
        // 128 tokens.
        let multiply_adds = 64 * 64 + 2 * 64 * 32 + 64 * 64 // q, k and v, out
            + 2 * 64 * 128 / 2 // scores and values, half of the score matrix
            + 64 * 8 + 2 * 3 * 64 * 64 + 3 * 64 * 32 // router, experts, shared expert
            + 64 * 64; // head
        assert_eq!(config.flops_per_token(), (3 * 2 * multiply_adds) as f64);
        // Heads of values have width 8, which halves v, the input of the output projection, and the product of probabilities and values.
        let config = Config::load("tiny", &[&set[..], &["model.value_head_dim=8".into()]].concat()).unwrap();
        let fewer = 64 * 16 + 32 * 64 + 32 * 128 / 2;
        assert_eq!(config.flops_per_token(), (3 * 2 * (multiply_adds - fewer)) as f64);
    }

    /// Layers with a sliding window count the pairs of a query and a key that it leaves: all below the diagonal less those beyond it.
    #[test]
    fn flops_of_layers_with_a_sliding_window() {
        let flops = |set: &[&str]| {
            let set: Vec<String> = ["model.layers=5"].iter().chain(set).map(ToString::to_string).collect();
            Config::load("tiny", &set).unwrap().flops_per_token()
        };
        // Sequences of 128 tokens, windows of 32: triangles of 128² / 2 and of 96² / 2 pairs. 4 heads of 16 + 16.
        let hidden = 96.0 * 96.0 / 2.0 / 128.0 * 64.0 * 2.0;
        let window = "model.sliding_window=32";
        assert_eq!(flops(&[]) - flops(&[window]), 6.0 * 5.0 * hidden);
        let three = flops(&[window, "model.sliding_window_layers=[\"sliding\", \"full\"]"]);
        assert_eq!(flops(&[]) - three, 6.0 * 3.0 * hidden);
        let dense = ["model.dense_layers=2", "model.ffn=96"];
        let two = [&dense[..], &[window, "model.sliding_window_layers=[\"full\", \"sliding\"]"]].concat();
        assert_eq!(flops(&dense) - flops(&two), 6.0 * 2.0 * hidden);
        assert_eq!(flops(&["model.sliding_window=128"]), flops(&[]), "a window of all tokens hides nothing");
    }

    #[test]
    fn dense_layers_have_an_mlp_and_no_router() {
        let set = ["model.layers=3", "model.dense_layers=2", "model.ffn=96"].map(String::from);
        let spec = ModelSpec::new(&Config::load("tiny", &set).unwrap().model);
        let attention = 64 * 64 + 2 * 64 * 32 + 64 * 64;
        let routed = 64 * 8 + 2 * 3 * 64 * 64;
        assert_eq!(spec.active_parameters(), 3 * attention + 2 * 3 * 64 * 96 + routed + 64 * 64);
    }

    #[test]
    fn biases_of_routers_are_parameters_that_no_product_takes() {
        let of = |key: &str| ModelSpec::new(&Config::load("tiny", &[key.to_owned()]).unwrap().model);
        let (with, without) = (of("model.router_bias=true"), of("model.router_bias=false"));
        let routers = |spec: &ModelSpec| spec.parameters_of(Group::Routers).unwrap().count.unwrap();
        assert_eq!(routers(&with), routers(&without) + 2 * 8, "two layers of eight experts");
        assert_eq!(with.active_parameters(), without.active_parameters());
    }

    #[test]
    fn parameters_of_each_group_written_out() {
        let set = ["model.layers=3", "model.dense_layers=2", "model.ffn=96", "model.shared_ffn=32"];
        let spec = ModelSpec::new(&Config::load("tiny", &set.map(String::from)).unwrap().model);
        let told: Vec<_> = spec.parameters().into_iter().map(|p| (p.what, p.count.unwrap())).collect();
        let attention = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 2 * 16;
        assert_eq!(
            told,
            [
                ("the embedding", 64 * 64),
                ("attention", 3 * attention),
                ("the MLPs", 2 * 3 * 64 * 96),
                ("the shared experts", 3 * 64 * 32),
                ("the experts", 8 * 3 * 64 * 64),
                ("the routers", 64 * 8),
                ("the norms", 7 * 64),
            ]
        );
        let keys = |group| -> Vec<(&str, usize)> {
            let found = spec.parameters_of(group).unwrap();
            found.sizes.into_iter().map(|size| (size.key, size.value)).collect()
        };
        let d_model = ("model.d_model", 64);
        assert_eq!(keys(Group::Mlps), [("model.dense_layers", 2), d_model, ("model.ffn", 96)]);
        let layers = ("model.layers - model.dense_layers", 1);
        assert_eq!(keys(Group::Experts), [layers, ("model.experts", 8), d_model, ("model.expert_ffn", 64)]);
        let heads = [("model.heads", 4), ("model.head_dim", 16)];
        assert_eq!(keys(Group::Attention), [&[("model.layers", 3), d_model][..], &heads].concat());
    }
}
