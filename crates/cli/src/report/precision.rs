//! The formats of each layer's tensors: as saved for the backward pass, and as operands of GEMMs.

use nibble_core::Recipe;
use nibble_core::recipe::{Change, Layer, LayerKind, Site};
use nibble_train::checks::{first_step_at, steps_of_change};
use nibble_train::config::Config;
use nibble_train::ledger::Ledger;
use nibble_train::spec::{self, ModelSpec, PartKind};

/// Layers whose names differ only in one number: the name with `*` in place of the number, and the list of numbers.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Group {
    pub name: String,
    pub numbers: Vec<usize>,
}

/// Splits a layer's name into the name with `*` in place of its number, and the number.
pub fn without_number(layer: &str) -> (String, Option<usize>) {
    let number = layer.split('.').find_map(|part| part.parse::<usize>().ok());
    let part = |part: &str| if part.parse::<usize>().is_ok() { "*".to_owned() } else { part.to_owned() };
    (layer.split('.').map(part).collect::<Vec<_>>().join("."), number)
}

/// Formats layer numbers as ranges, for example `0–3, 7`; empty for a layer without a number.
pub fn ranges(numbers: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &n in numbers {
        match runs.last_mut() {
            Some(run) if run.1 + 1 == n => run.1 = n,
            _ => runs.push((n, n)),
        }
    }
    let text = |(first, last): (usize, usize)| match first == last {
        true => first.to_string(),
        false => format!("{first}–{last}"),
    };
    runs.into_iter().map(text).collect::<Vec<_>>().join(", ")
}

/// A saved activation, and the layers that save this activation in the same format.
pub struct Kept {
    pub layers: Group,
    pub tensor: &'static str,
    pub format: String,
    pub bytes: usize,
}

/// The saved activations in the order of a forward pass; each buffer occurs once.
pub fn kept(ledger: &Ledger) -> Vec<Kept> {
    let mut all: Vec<Kept> = Vec::new();
    for entry in ledger.unique() {
        let (name, number) = without_number(&entry.layer);
        let format = entry.format.to_string();
        let same = |k: &&mut Kept| k.layers.name == name && k.tensor == entry.kind && k.format == format;
        match all.iter_mut().find(same) {
            Some(kept) => {
                kept.bytes += entry.bytes;
                kept.layers.numbers.extend(number.filter(|n| kept.layers.numbers.last() != Some(n)));
            }
            None => all.push(Kept {
                layers: Group { name, numbers: number.into_iter().collect() },
                tensor: entry.kind,
                format,
                bytes: entry.bytes,
            }),
        }
    }
    all
}

/// A group of layers that have the same precisions, with these precisions.
pub struct Decided {
    /// The layers.
    pub layers: Vec<Group>,
    /// One row per site (a tensor that is quantized): its precision in each part of the run.
    pub sites: Vec<(Site, Vec<String>)>,
}

/// The recipe's precisions for every linear layer, in each part of the run.
pub fn decided(recipe: &Recipe, config: &Config) -> Vec<Decided> {
    let steps = config.train.steps;
    let parts = steps_of_change(recipe, steps);
    let starts = &parts[..parts.len().saturating_sub(1)];
    let mut all: Vec<Decided> = Vec::new();
    for layer in ModelSpec::new(&config.model).recipe_layers() {
        let sites = sites(recipe, &layer, starts, steps);
        let (name, number) = without_number(&layer.name);
        match all.iter_mut().find(|decided| decided.sites == sites) {
            Some(decided) => match decided.layers.iter_mut().find(|group| group.name == name) {
                Some(group) => group.numbers.extend(number),
                None => decided.layers.push(Group { name, numbers: number.into_iter().collect() }),
            },
            None => {
                let layers = vec![Group { name, numbers: number.into_iter().collect() }];
                all.push(Decided { layers, sites });
            }
        }
    }
    all
}

/// Describes the tensor of a site.
pub fn meaning(site: Site) -> &'static str {
    match site {
        Site::FpropX => "input, in the forward product",
        Site::FpropW => "weight",
        Site::FpropA => "input of an expert's second product",
        Site::DgradDy => "gradient of the output, for that of the input",
        Site::DgradDh => "the same between an expert's two products",
        Site::DgradW => "weight, in the gradient of the input",
        Site::WgradDy => "gradient of the output, for that of the weight",
        Site::WgradDh => "the same between an expert's two products",
        Site::WgradX => "input, for the gradient of the weight",
        Site::WgradA => "input of the second product, for the gradient of its weight",
        Site::SavedX => "input, saved for the backward pass",
        Site::SavedH => "input of SwiGLU, saved for the backward pass",
        Site::SavedA => "input of the second product, saved",
        Site::DispatchFwd => "tokens dispatched to the experts",
        Site::DispatchBwd => "gradients dispatched to the experts",
        Site::CombineFwd => "expert outputs, combined into the tokens",
        Site::CombineBwd => "gradients of the experts' inputs, combined into the tokens",
    }
}

fn sites(recipe: &Recipe, layer: &Layer, starts: &[u64], steps: u64) -> Vec<(Site, Vec<String>)> {
    let of_layer = |site: &Site| layer.gated || layer.kind != LayerKind::Linear || *site != Site::SavedH;
    let precision = |site: Site, start: u64| {
        let section = recipe.section(layer.kind, &layer.name, start as f64 / steps as f64);
        match site == Site::SavedA && section.kept_a().is_none() {
            true => "recomputed from h".to_owned(),
            false => section.at(site).to_string(),
        }
    };
    let row = |site: Site| (site, starts.iter().map(|start| precision(site, *start)).collect());
    layer.kind.sites().filter(of_layer).map(row).collect()
}

/// All changes of tensor formats in the first feed-forward layer of each kind, each with a description. There are three kinds: experts, and
/// each of the two projections of an MLP that is not a shared expert. If the changes differ from some step on, another list follows.
pub fn changes(recipe: &Recipe, config: &Config) -> Vec<(String, Vec<Change>)> {
    let parts: Vec<_> = ModelSpec::new(&config.model).parts().collect();
    let steps = config.train.steps;
    let of = |what: &'static str, group: spec::Group, is: fn(PartKind) -> bool| {
        let layer =
            parts.iter().find(|part| part.group == group && is(part.kind)).and_then(|part| part.layer());
        let plans = layer.map(|layer| recipe.plans(&layer));
        let met = plans
            .into_iter()
            .flatten()
            .map(move |((from, to), plan)| ([from, to].map(|progress| first_step_at(progress, steps)), plan));
        met.filter(|([first, end], _)| first < end).map(move |([first, _], plan)| {
            let from = if first > 0 { format!(" from step {} on", first + 1) } else { String::new() };
            (format!("{what}{from}"), plan.changes())
        })
    };
    let is_gated = |kind: PartKind| kind == PartKind::Linear { gated: true };
    of("an expert layer", spec::Group::Experts, |_| true)
        .chain(of("an MLP's first projection and its SwiGLU", spec::Group::Mlps, is_gated))
        .chain(of("an MLP's second projection", spec::Group::Mlps, |kind| {
            kind == PartKind::Linear { gated: false }
        }))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_named_without_their_number_and_numbers_as_ranges() {
        let parts = without_number("model.layers.12.mlp.experts");
        assert_eq!(parts, ("model.layers.*.mlp.experts".to_owned(), Some(12)));
        assert_eq!(without_number("lm_head"), ("lm_head".to_owned(), None));
        assert_eq!([ranges(&[0, 1, 2, 7, 9, 10]), ranges(&[])], ["0–2, 7, 9–10", ""]);
    }

    #[test]
    fn changes_are_those_of_the_layers_that_a_model_has() {
        let recipe = Recipe::builtin("mxfp4-hopper").unwrap();
        let of = |name: &str, set: &[&str]| -> Vec<(String, usize)> {
            let set: Vec<String> = set.iter().map(ToString::to_string).collect();
            let config = Config::load(name, &set).unwrap();
            changes(&recipe, &config).into_iter().map(|(what, changes)| (what, changes.len())).collect()
        };
        let count = |all: &[(String, usize)]| all.iter().filter(|(_, changes)| *changes > 0).count();
        let (routed, dense) = (of("tiny", &["model.shared_ffn=64"]), of("tiny-dense", &[]));
        assert_eq!(
            (routed.len(), count(&routed), routed[0].0.as_str()),
            (1, 1, "an expert layer"),
            "{routed:?}"
        );
        assert_eq!((dense.len(), count(&dense)), (2, 2), "{dense:?}");
        let mixed = of("tiny", &["model.dense_layers=1", "model.ffn=128"]);
        assert_eq!(mixed, [routed, dense].concat());
    }

    #[test]
    fn changes_of_a_schedule_are_listed_from_the_step_on_where_they_begin() {
        let late = "extends = \"fp8-flow\"\n[[override]]\nsteps = \"0.5..1\"\nset.recipe = \"fp8-block\"\n";
        let recipe = Recipe::parse("mine", late).unwrap();
        let config = Config::load("tiny", &["train.steps=100".to_owned()]).unwrap();
        let of_experts = changes(&recipe, &config);
        let [(first, before), (second, after)] = &of_experts[..] else { panic!("{of_experts:?}") };
        assert_eq!([first, second], ["an expert layer", "an expert layer from step 51 on"]);
        assert!(before.iter().any(|c| c.op == "transcode") && after.iter().all(|c| c.op != "transcode"));
    }

    #[test]
    fn an_override_of_some_layers_and_steps_shows_in_their_rows_alone() {
        let text = "extends = \"mxfp4-hopper\"\n[[override]]\nlayers = \"model.layers.1.*\"\nsteps = \"0.5..1\"\n\
                    set.recipe = \"bf16\"\n";
        let recipe = Recipe::parse("mine", text).unwrap();
        let config = Config::from_text("[model]\nlayers = 3", std::path::Path::new("c.toml"), &[]).unwrap();
        let all = decided(&recipe, &config);
        let experts: Vec<_> =
            all.iter().filter(|d| d.layers.iter().any(|g| g.name.ends_with("experts"))).collect();
        assert_eq!(experts.len(), 2, "layer 1 by itself");
        let saved = |d: &Decided| d.sites.iter().find(|(site, _)| *site == Site::SavedX).unwrap().1.clone();
        assert_eq!(ranges(&experts[0].layers[0].numbers), "0, 2");
        assert_eq!(saved(experts[0]), ["mxfp4 row rceil", "mxfp4 row rceil"]);
        assert_eq!(ranges(&experts[1].layers[0].numbers), "1");
        assert_eq!(saved(experts[1]), ["mxfp4 row rceil", "bf16"]);
    }
}
