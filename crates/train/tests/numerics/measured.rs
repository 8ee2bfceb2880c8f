//! Steps that measure what quantization makes of values: they say so in their record and change nothing, whether the others are replayed or not.

use crate::rig;

use nibble_core::formats::{Codec, Format, Rounding, ScaleRule};
use nibble_core::ops::{Dequantize, Planes, Quantize};
use nibble_core::{DType, Kernels, Recipe, Tensor};
use nibble_cpu::Cpu;
use nibble_testkit::{Breadth, Recorder};
use nibble_train::checks::measures_nothing;
use nibble_train::config::Config;
use nibble_train::metrics::Metrics;
use nibble_train::trainer::Trainer;
use rig::{SOLO, small, state, train, with_recipe};
use std::collections::{BTreeMap, BTreeSet};

const EVERY: &str = "train.quantization_every=2";

fn measured(metrics: &Metrics) -> BTreeMap<String, f64> {
    let of = metrics.other.iter().filter(|(key, _)| key.starts_with("quantization/"));
    of.map(|(key, share)| (key.clone(), *share)).collect()
}

/// What the record says of each of so many steps, and the weights after them.
fn run<B: Kernels>(b: &B, config: &Config, steps: usize) -> (Vec<Metrics>, Vec<(String, Vec<u32>)>) {
    let mut trainer = Trainer::new(b, &SOLO, config).unwrap();
    let metrics = (0..steps).map(|_| trainer.train_step().unwrap().without_times()).collect();
    (metrics, state(b, &mut trainer))
}

#[test]
fn every_second_step_measures_and_no_bit_changes() {
    let recipes = ["mxfp4-hopper", "fp8-delayed", "nvfp4", "mxfp4", "mxfp6", "fp8-block", "hif4"];
    // Daily four kinds: stored in four bits, with scales of earlier steps, rounded at random, lifted.
    for recipe in recipes.into_iter().take(Breadth::of_tests().either(usize::MAX, 4)) {
        let (off, on) =
            (small(recipe, &["train.grad_accum=2"]), small(recipe, &["train.grad_accum=2", EVERY]));
        let (eager, recorder) = (Cpu::new(2).unwrap(), Recorder::new(Cpu::new(2).unwrap()));
        let (plain, weights) = run(&eager, &off, 4);
        let (metrics, measured_weights) = run(&eager, &on, 4);
        // Where steps are recorded those that measure are issued, and the others replayed.
        let (recorded, recorded_weights) = run(&recorder, &on, 4);
        assert_eq!(recorded, metrics, "{recipe}");
        assert!(weights == measured_weights && weights == recorded_weights, "{recipe}: a bit changed");
        for (step, (metrics, plain)) in metrics.iter().zip(&plain).enumerate() {
            let shares = measured(metrics);
            assert_eq!(!shares.is_empty(), step % 2 == 1, "{recipe}: step {}", step + 1);
            assert_eq!((metrics.loss, metrics.grad_norm), (plain.loss, plain.grad_norm), "{recipe}");
            assert!(shares.values().all(|share| (0.0..=1.0).contains(share)), "{recipe}: {shares:#?}");
        }
        assert_eq!(recorder.recordings().made, 3, "{recipe}: replayed before and after a step that measures");
    }
}

/// Of a weight: what this step's copy of it keeps.
#[test]
fn shares_of_a_weight_are_those_of_its_values() {
    let b = Cpu::new(1).unwrap();
    let config = small("fp8-flow", &["train.quantization_every=1"]);
    let mut trainer = Trainer::new(&b, &SOLO, &config).unwrap();
    let codec = Codec::new(Format::E4m3, ScaleRule::Rceil, Rounding::NearestEven).unwrap();
    let (mut exact, mut underflowed, mut values) = (0u32, 0u32, 0u32);
    for param in trainer.model().params().into_iter().filter(|param| param.name.ends_with(".o_proj.weight")) {
        let w = Tensor::from_f32(&b, &param.master.to_f32_vec(&b).unwrap(), 64, 64).unwrap();
        let made = Quantize::new(&w, codec, Planes::Tiles).run(&b).unwrap().take_rows("test").unwrap();
        let back = Dequantize { x: made.block("test").unwrap(), dtype: DType::F32 }.run(&b).unwrap();
        for (x, q) in w.to_f32_vec(&b).unwrap().iter().zip(back.to_f32_vec(&b).unwrap()) {
            exact += u32::from(*x == q);
            underflowed += u32::from(*x != 0.0 && q == 0.0);
            values += 1;
        }
    }
    assert_eq!(values, 2 * 64 * 64);
    let shares = measured(&trainer.train_step().unwrap());
    let share = |name: &str| shares[&format!("quantization/self_attn.o_proj.weight.w/{name}")];
    assert_eq!(share("exact_fraction"), f64::from(exact) / f64::from(values));
    assert_eq!(share("underflow_fraction"), f64::from(underflowed) / f64::from(values));
    assert_eq!(share("saturation_fraction"), 0.0, "scales are rounded up");
}

/// Scales that are rounded down cut values off, and four bits lose more of them than eight.
#[test]
fn scales_and_widths_show_in_the_shares() {
    let of = |precision: &str| {
        let text = format!("extends = \"bf16\"\n[linear]\nsaved.x = {precision}");
        let (config, _dir) = with_recipe(&text, &["train.quantization_every=1"]);
        let shares = measured(&run(&Cpu::new(1).unwrap(), &config, 1).0[0]);
        ["exact", "underflow", "saturation"]
            .map(|name| shares[&format!("quantization/self_attn.x/{name}_fraction")])
    };
    let up = of("{ format = \"mxfp4\", scale = \"rceil\" }");
    let down = of("{ format = \"mxfp4\", scale = \"floor\" }");
    let eight = of("{ format = \"mxfp8-e4m3\", scale = \"rceil\" }");
    assert!(up[2] == 0.0 && down[2] > 0.0, "{up:?} {down:?}");
    assert!(eight[0] > up[0] && eight[1] < up[1], "{eight:?} {up:?}");
}

/// Each rank measures its tokens: the sums are those of one rank.
#[test]
fn ranks_measure_what_one_rank_does() {
    let config = small("mxfp4-hopper", &["train.quantization_every=1"]);
    let cpu = || Cpu::new(1).unwrap();
    train(&config, 1, 2, cpu).assert_same(&train(&config, 2, 2, cpu), "two ranks");
}

/// Of a deep model a step measures about four layers, the next such step others, and in turn all.
#[test]
fn layers_of_a_deep_model_take_turns() {
    let config = small("fp8-flow", &["model.layers=6", EVERY]);
    let b = Cpu::new(1).unwrap();
    let mut trainer = Trainer::new(&b, &SOLO, &config).unwrap();
    let mut layers_of = || {
        trainer.train_step().unwrap();
        let layers = trainer.take_layers().unwrap();
        let measured = layers.sites.iter().filter(|site| site.measured.is_some());
        measured.filter_map(|site| site.layer.split('.').nth(2)?.parse().ok()).collect::<BTreeSet<usize>>()
    };
    let seen: Vec<BTreeSet<usize>> = (0..6).map(|_| layers_of()).collect();
    let (even, odd, none) = (BTreeSet::from([0, 2, 4]), BTreeSet::from([1, 3, 5]), BTreeSet::new());
    assert_eq!(seen, [&none, &even, &none, &odd, &none, &even].map(BTreeSet::clone));
}

/// It is said, and no mistake: a configuration is used under several recipes, and a checkpoint opened under another one.
#[test]
fn a_recipe_that_quantizes_nothing_has_nothing_to_measure() {
    let told = |recipe: &str, changes: &[&str]| {
        measures_nothing(&small(recipe, changes), &Recipe::builtin(recipe).unwrap())
    };
    let said = told("bf16", &[EVERY]).unwrap();
    assert!(said.contains("quantization_every = 2") && said.contains("recipe bf16"), "{said}");
    assert_eq!([told("bf16", &[]), told("fp8-flow", &[EVERY]), told("fp8-flow", &[])], [None, None, None]);
    let b = Cpu::new(1).unwrap();
    assert!(run(&b, &small("bf16", &[EVERY]), 2).0.iter().all(|metrics| measured(metrics).is_empty()));
}
