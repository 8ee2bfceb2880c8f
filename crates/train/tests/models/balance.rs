//! The load-balancing loss beside that of `transformers`, and the weight under which a checkpoint names it.

use crate::rig;

use nibble_core::Tensor;
use nibble_core::ops::{Route, RouteRule};
use nibble_cpu::Cpu;
use nibble_testkit::Recorder;
use nibble_train::config::{Balance, Config, ModelConfig};
use nibble_train::family;
use nibble_train::recompute::{Recompute, Scope};
use rig::{mixed, small, train, train_alone};
use std::path::Path;

const TOKENS: usize = 8;
const EXPERTS: usize = 4;

/// Logits of eight tokens for four experts.
fn logits() -> Vec<f32> {
    let at = |t: usize, e: usize| ((1.7 * t as f64 + 2.3 * (e * e) as f64).sin() * 2.0) as f32;
    (0..TOKENS * EXPERTS).map(|i| at(i / EXPERTS, i % EXPERTS)).collect()
}

/// The loss as `transformers` defines it, of all layers' logits: experts · Σ over slots and experts of (share of the tokens whose slot is the
/// expert) · (its mean probability).
fn theirs(layers: &[Vec<f32>], top_k: usize) -> f64 {
    let rows: Vec<&[f32]> = layers.iter().flat_map(|logits| logits.chunks(EXPERTS)).collect();
    let (mut chosen, mut probability) = (vec![[0.0; EXPERTS]; top_k], [0.0; EXPERTS]);
    for row in &rows {
        let exp = row.iter().map(|&x| f64::from(x).exp()).collect::<Vec<_>>();
        let sum: f64 = exp.iter().sum();
        probability.iter_mut().zip(&exp).for_each(|(p, exp)| *p += exp / sum);
        let mut order: Vec<usize> = (0..EXPERTS).collect();
        order.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
        chosen.iter_mut().zip(order).for_each(|(slot, expert)| slot[expert] += 1.0);
    }
    let n = rows.len() as f64;
    let products = chosen.iter().flat_map(|slot| slot.iter().zip(&probability).map(|(c, p)| c / n * (p / n)));
    EXPERTS as f64 * products.sum::<f64>()
}

/// Ours of one layer and one shard.
fn ours(logits: &[f32], top_k: usize) -> f64 {
    let cpu = Cpu::new(1).unwrap();
    let logits = Tensor::from_f32(&cpu, logits, TOKENS, EXPERTS).unwrap();
    let routing = Route {
        logits: &logits,
        bias: None,
        rule: RouteRule::softmax(top_k, true),
        shards: 1,
        documents: None,
    }
    .run(&cpu)
    .unwrap();
    f64::from(routing.losses.as_slice()[0])
}

#[test]
fn the_exported_weight_gives_their_loss_the_strength_of_ours() {
    // What `load_balancing_loss_func` of transformers 5.23 returns of the same logits in F32, for one layer and for three.
    for (top_k, published) in [(1, 1.022_599), (2, 1.980_863), (3, 2.898_015_5)] {
        for layers in [1, 3] {
            let changes = [
                format!("model.layers={}", layers + 1),
                "model.dense_layers=1".into(),
                "model.ffn=96".into(),
                format!("model.experts={EXPERTS}"),
                format!("model.top_k={top_k}"),
                "model.aux_loss_coef=0.01".into(),
            ];
            let model = Config::load("tiny", &changes).unwrap().model;
            let config = family::config_json(family::of(&model), &model, 128);
            let coef = config["router_aux_loss_coef"].as_f64().unwrap();

            let whole = theirs(&vec![logits(); layers], top_k);
            assert!((whole / published - 1.0).abs() < 1e-6, "top {top_k}: {whole}");
            // Ours is added up over the layers with experts.
            let want = 0.01 * layers as f64 * ours(&logits(), top_k);
            assert!((coef * whole / want - 1.0).abs() < 1e-6, "top {top_k} of {layers} layers: {coef}");
            assert!(config.get("nibble_balance").is_none(), "{config}");

            let model = ModelConfig { balance: Balance::Batch, ..model };
            let config = family::config_json(family::of(&model), &model, 128);
            assert_eq!(
                (&config["router_aux_loss_coef"], &config["nibble_balance"]),
                (&0.01.into(), &"batch".into())
            );
        }
    }
}

/// What trains under the loss of all layers, ranks and shards.
const BATCH: [&str; 3] = ["model.balance=batch", "model.aux_loss_coef=0.1", "train.grad_accum=2"];

fn cpu() -> Cpu {
    Cpu::new(1).unwrap()
}

#[test]
fn the_loss_of_a_batch_gives_the_same_bits_on_any_number_of_ranks_recorded_and_made_again() {
    for config in [small("mxfp4-hopper", &BATCH), mixed("bf16", &BATCH)] {
        let one = train(&config, 1, 4, cpu);
        for world in [2, 4] {
            one.assert_same(&train(&config, world, 4, cpu), &format!("{world} ranks"));
        }
        one.assert_same(&train_alone(&Recorder::new(cpu()), &config, 4), "recorded");
        for scope in Scope::ALL {
            let mut again = config.clone();
            again.train.recompute = Recompute::of(&[scope]);
            one.assert_same(&train(&again, 2, 4, cpu), scope.name());
        }
        let mut shards = config.clone();
        shards.model.balance = Balance::Shard;
        assert_ne!(one.losses, train(&shards, 1, 4, cpu).losses, "the losses are two");
    }
}

#[test]
fn stored_configurations_name_it_where_it_is_not_the_usual_one() {
    let stored = |config: &Config| toml::to_string(config).unwrap();
    assert!(!stored(&small("bf16", &[])).contains("balance"));
    assert!(stored(&small("bf16", &BATCH)).contains("balance = \"batch\""));
    let text = "[model]\nexperts = 0\nffn = 96\nbalance = \"batch\"";
    let dense = Config::from_text(text, Path::new("dense.toml"), &[]);
    let error = dense.unwrap_err().to_string();
    assert!(error.contains("`model.balance`: is \"batch\", but model.experts = 0"), "{error}");
}
