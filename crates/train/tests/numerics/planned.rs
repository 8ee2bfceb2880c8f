//! What the layers' plans say is what a step does: the sites that it counts, in their order, the scales of earlier steps that it takes, and what it
//! keeps; under random recipes and models, at every stretch of their runs.

use crate::numerics::recipe_plan::{followed, model};
use crate::rig;

use nibble_core::ops::Control;
use nibble_core::recipe::{Cols, Kept, LayerKind, Passes, Rows};
use nibble_core::{Backend, BlockScaled, DeviceKind, Mesh, Recipe};
use nibble_dry::Dry;
use nibble_testkit::{Breadth, Dice};
use nibble_train::checks::for_run;
use nibble_train::config::Config;
use nibble_train::cx::Cx;
use nibble_train::delayed::{DelayedRecords, DelayedSites};
use nibble_train::layer_plans::LayerPlans;
use nibble_train::ledger::{Entry, Ledger, Saved};
use nibble_train::model::Decoder;
use nibble_train::model_plan::{PlannedSite, lifts, sites};
use nibble_train::param::GradientPlan;
use nibble_train::recompute::{Recompute, Scope};
use nibble_train::record::{LayerSample, Layout};
use nibble_train::shards::{Shards, SpanCounts};
use nibble_train::spec::ModelSpec;
use rig::SOLO;
use std::collections::BTreeSet;

/// What a forward and a backward pass did.
struct Done {
    sites: Vec<String>,
    /// First cells of the spans whose magnitudes were found.
    found: BTreeSet<usize>,
    ledger: Ledger,
}

/// Of one rank, whose tokens are one shard.
fn spans(config: &Config) -> SpanCounts {
    SpanCounts { shards: 1, experts: config.model.experts, expert_parts: 1 }
}

/// A forward and a backward pass on a device that computes nothing, by whose record nobody has laid out anything.
fn done(
    config: &Config,
    recipe: &Recipe,
    planned: &[PlannedSite],
    (kind, progress): (DeviceKind, f64),
    measures: Option<LayerSample>,
) -> Done {
    let (b, mesh, seq_len) = (Dry::new(kind), Mesh::new(&SOLO), config.data.seq_len);
    let tokens = config.train.batch_size * seq_len;
    let delayed = DelayedSites::of(planned, spans(config));
    let cx = Cx {
        training: true,
        delayed: Some(DelayedRecords::new(&b, delayed).unwrap()),
        measures,
        ..Cx::inference(&b, mesh, recipe, Shards::new(&b, 1, tokens, 0).unwrap(), progress)
    };
    let mut model = Decoder::new(&b, mesh, recipe, &config.model, seq_len, 1).unwrap();
    model.recompute(&config.train.recompute);
    for param in model.params() {
        param.place_gradient(&b, GradientPlan::default(), param.placement.shards(&cx.shards)).unwrap();
    }
    model.prepare(&cx).unwrap();
    let ids = || b.zeros(tokens).unwrap();
    let control = b.zeros(Control::LEN).unwrap();
    let (_, saved) = model.forward(&cx, ids(), &ids(), &control).unwrap();
    let mut ledger = Ledger::default();
    saved.ledger(&mut ledger);
    model.backward(&cx, saved).unwrap();
    let mut counted = cx.counted.borrow_mut();
    let sites: Vec<String> = counted.sites().iter().map(ToString::to_string).collect();
    let layout = Layout { sites: sites.len(), ..Layout::of(&ModelSpec::new(&config.model)) };
    let found = counted.take(&layout).unwrap().into_iter().filter_map(|waiting| waiting.found);
    Done { sites, found: found.map(|(cells, _)| cells.first).collect(), ledger }
}

/// What the plans of a decoder layer's parts keep, under the names of the ledger: of each its format and bytes.
fn kept(
    config: &Config,
    plans: &LayerPlans,
    passes: Passes,
    (kind, progress): (DeviceKind, f64),
) -> Vec<Entry> {
    let (b, tokens) = (Dry::new(kind), config.train.batch_size * config.data.seq_len);
    let mut all = Vec::new();
    for block in ModelSpec::new(&config.model).blocks() {
        let of_input = block.attn.inputs().map(|part| part.id.clone());
        // Normed latents are made again.
        let again = block.attn.of_latents().into_iter().map(|part| part.id.clone()).collect::<Vec<_>>();
        for part in block.parts() {
            let Some(layer) = part.layer().filter(|_| !again.contains(&part.id)) else { continue };
            let plan = plans.plan(&layer, progress, passes);
            for Kept { tensor, precision, size } in &plan.kept {
                let layer = match *tensor {
                    "x" if of_input.contains(&part.id) => block.attn.id(),
                    "h" if layer.kind == LayerKind::Linear => part.id.rsplit_once('.').unwrap().0,
                    _ => &part.id,
                };
                let (outputs, inputs) = part.weights()[0].shape();
                let cols = match size.cols {
                    Cols::Inputs => inputs,
                    Cols::Outputs => outputs,
                    Cols::Hidden => outputs / 2,
                };
                let (experts, align) = (config.model.experts, plan.row_alignment);
                let rows = match size.rows {
                    Rows::Tokens => tokens,
                    // Room for whatever experts are chosen, each with rows that begin at a multiple.
                    Rows::Routed => {
                        (tokens * config.model.top_k + experts * (align - 1)).next_multiple_of(align)
                    }
                };
                let bytes = match precision.dtype() {
                    Some(dtype) => rows * cols * dtype.size_bytes(),
                    None => {
                        let stored = (precision.format, precision.scale);
                        BlockScaled::unwritten(&b, stored, precision.axis, (rows, cols, 1)).unwrap().bytes()
                    }
                };
                all.push(Entry {
                    layer: layer.to_owned(),
                    kind: tensor,
                    format: precision.format,
                    bytes,
                    buffer_id: 0,
                });
            }
        }
    }
    all
}

/// Holds the plans of a recipe for a model to what a step does, at every stretch of the run.
#[track_caller]
fn assert_done(config: &Config, recipe: &Recipe, kind: DeviceKind, what: &str) {
    assert_done_in(config, recipe, kind, None, what);
    assert_done_in(config, recipe, kind, Some(LayerSample::ALL), what);
}

/// In a step that measures quantization, lifts inside of products count, too.
#[track_caller]
fn assert_done_in(
    config: &Config,
    recipe: &Recipe,
    kind: DeviceKind,
    measures: Option<LayerSample>,
    what: &str,
) {
    let (spec, plans) = (ModelSpec::new(&config.model), LayerPlans::new(recipe.clone()));
    let passes =
        Passes::Both { keep_a: !config.train.recompute.of_layer(&config.model, 0).contains(&Scope::Swiglu) };
    for (progress, _) in recipe.stretches() {
        let planned = sites(&spec, &plans, progress, |_| passes).unwrap();
        let done = done(config, recipe, &planned, (kind, progress), measures);
        let names: Vec<String> = planned.iter().map(|planned| planned.site.to_string()).collect();
        let lifted = lifts(&spec, &plans, progress).into_iter().filter(|_| measures.is_some());
        let lifted: BTreeSet<String> = lifted.map(|site| site.to_string()).collect();
        let (of_lifts, sites): (Vec<_>, Vec<_>) =
            done.sites.into_iter().partition(|site| lifted.contains(site));
        assert_eq!(sites, names, "at {progress}: {what}");
        assert_eq!(of_lifts.into_iter().collect::<BTreeSet<_>>(), lifted, "at {progress}: {what}");
        let delayed = DelayedSites::of(&planned, spans(config));
        let cells: BTreeSet<usize> = delayed.sites().iter().map(|site| site.cell).collect();
        assert_eq!(done.found, cells, "at {progress}: {what}");
        for entry in kept(config, &plans, passes, (kind, progress)) {
            let is_it = |found: &&Entry| {
                (&found.layer, found.kind, found.format, found.bytes)
                    == (&entry.layer, entry.kind, entry.format, entry.bytes)
            };
            let listed: Vec<_> = done.ledger.entries.iter().filter(|e| e.layer == entry.layer).collect();
            assert!(listed.iter().any(is_it), "{entry:?} at {progress} among {listed:?}: {what}");
        }
    }
}

#[test]
fn steps_do_what_is_planned_under_every_shipped_recipe() {
    for name in rig::recipes() {
        let wide: Vec<&str> = rig::WIDE.into_iter().chain(rig::WIDE_EXPERTS).collect();
        for config in [rig::small(name, &wide), rig::dense(name, &[])] {
            let recipe = for_run(&config, Recipe::builtin(name).unwrap());
            assert_done(&config, &recipe, DeviceKind::Host, name);
        }
    }
}

/// Models of [`model`], and of latent attention; on hosts and GPUs, which lay scales out otherwise.
#[test]
fn steps_do_what_is_planned_under_random_recipes() {
    let (mut dice, mut done) = (Dice::new(43), 0);
    let all = Breadth::of_tests().either(500, 150);
    while done < all {
        let mut config = match dice.below(4) {
            0 => rig::small("bf16", dice.of(&[&rig::LATENT[..], &rig::LATENT_STRAIGHT[..]])),
            _ => model(&mut dice),
        };
        if dice.below(2) == 0 {
            config.train.recompute = Recompute::of(&[Scope::Norms]);
        }
        let layers = ModelSpec::new(&config.model).recipe_layers();
        let text = dice.recipe(&layers);
        let Some(recipe) = followed(&config, &layers, &text) else { continue };
        assert_done(&config, &recipe, dice.of(&[DeviceKind::Host, DeviceKind::Gpu]), &text);
        done += 1;
    }
}
