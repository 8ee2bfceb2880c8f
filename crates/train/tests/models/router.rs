//! Routers as those of DeepSeek-V2 and -V3: groups of experts, sigmoids, a loss of each sequence, and biases that the load moves.

use crate::rig;

use nibble_core::ops::Scores;
use nibble_core::{DType, Mesh, MeshShape, Recipe, Tensor};
use nibble_cpu::Cpu;
use nibble_testkit::Recorder;
use nibble_train::checkpoint::{Store, latest_valid};
use nibble_train::config::{Balance, Config};
use nibble_train::layers::Layer;
use nibble_train::metrics::read_layers;
use nibble_train::moe::{Moe, MoeShape};
use nibble_train::recompute::{Recompute, Scope};
use nibble_train::spec::{MoeSpec, RouterOptions};
use nibble_train::trainer::{Options, Trainer, run};
use rig::{
    FOUR_PARTS, FOUR_RANKS, SOLO, mixed, on_mesh, small, state, state_on, train, train_alone, train_mesh,
};
use std::path::Path;

fn cpu() -> Cpu {
    Cpu::new(1).unwrap()
}

/// Two sequences a shard, two micro-batches a step.
const SIZES: [&str; 5] =
    ["model.experts=8", "model.top_k=3", "train.grad_accum=2", "train.batch_size=8", FOUR_PARTS];

/// Groups by their best expert; a factor instead of a sum of 1.
const V2: [&str; 6] = [
    "model.groups=4",
    "model.top_groups=2",
    "model.norm_topk_prob=false",
    "model.route_scale=4.0",
    "model.balance=sequence",
    "model.aux_loss_coef=0.1",
];

const V3: [&str; 9] = [
    "model.scores=sigmoid",
    "model.router_bias=true",
    "model.groups=4",
    "model.top_groups=2",
    "model.group_score=top2",
    "model.route_scale=2.5",
    "model.balance=sequence",
    "model.aux_loss_coef=0.1",
    "train.router_bias_rate=0.01",
];

fn with(recipe: &str, keys: &[&str]) -> Config {
    small(recipe, &[&SIZES, keys].concat())
}

/// A router with biases that are not zero, held to the plain one in F64: scores of X·Wᵀ; the k experts whose score and bias together are largest; weights of
/// the scores alone.
#[test]
fn biases_change_the_choice_and_not_the_weights() {
    let (cpu, recipe) = (cpu(), Recipe::builtin("f32").unwrap());
    let (tokens, d_model, experts, top_k) = (64, 16, 6, 2);
    for (scores, normalize, scale) in
        [(Scores::Softmax, true, 1.0f32), (Scores::Sigmoid, true, 2.5), (Scores::Sigmoid, false, 1.0)]
    {
        let cx = rig::cx(&cpu, &recipe, 1, tokens);
        let shape = MoeShape { d_model, ffn: 8, experts, top_k, normalize, aux_coef: 0.0, z_coef: 0.0 };
        let options = RouterOptions { scores, scale, has_bias: true, ..RouterOptions::default() };
        let mut layer = Moe::new(&cx, &MoeSpec::with_options("moe", shape, options, [0.5; 2])).unwrap();
        let bias: Vec<f32> = rig::normals("bias", experts).iter().map(|b| 0.3 * b).collect();
        layer.router.bias.as_mut().unwrap().master = Tensor::from_f32(&cpu, &bias, 1, experts).unwrap();
        let x = rig::matrix(&cpu, "x", (tokens, d_model), DType::F32);
        let weight = layer.router.weight.master.to_f32_vec(&cpu).unwrap();
        layer.prepare(&cx).unwrap();
        let routing = layer.router.forward(&cx, &x).unwrap().routing;
        let mut changed = 0;
        for (t, x) in x.to_f32_vec(&cpu).unwrap().chunks(d_model).enumerate() {
            let dot = |w: &[f32]| x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum::<f64>();
            let logits: Vec<f64> = weight.chunks(d_model).map(dot).collect();
            let sum: f64 = logits.iter().map(|logit| logit.exp()).sum();
            let scores: Vec<f64> = match scores {
                Scores::Softmax => logits.iter().map(|logit| logit.exp() / sum).collect(),
                Scores::Sigmoid => logits.iter().map(|logit| 1.0 / (1.0 + (-logit).exp())).collect(),
            };
            let best = |of: &dyn Fn(usize) -> f64| {
                let mut order: Vec<usize> = (0..experts).collect();
                order.sort_by(|a, b| of(*b).total_cmp(&of(*a)));
                let gap = of(order[top_k - 1]) - of(order[top_k]);
                (std::collections::BTreeSet::from_iter(order[..top_k].to_vec()), gap)
            };
            let (chosen, gap) = best(&|e| scores[e] + f64::from(bias[e]));
            if gap < 1e-5 {
                continue;
            }
            changed += usize::from(chosen != best(&|e| scores[e]).0);
            let slots = t * top_k..(t + 1) * top_k;
            let got = routing.expert.as_slice()[slots.clone()].iter().map(|e| *e as usize);
            assert_eq!(got.clone().collect::<std::collections::BTreeSet<_>>(), chosen, "token {t}");
            let of_chosen: f64 = if normalize { chosen.iter().map(|e| scores[*e]).sum() } else { 1.0 };
            for (e, weight) in got.zip(&routing.weight.as_slice()[slots]) {
                let want = f64::from(scale) * scores[e] / of_chosen;
                assert!(
                    (f64::from(*weight) - want).abs() < 1e-5,
                    "token {t}, expert {e}: {weight}, not {want}"
                );
            }
        }
        assert!(changed > tokens / 10, "{scores:?}: the biases changed {changed} of {tokens} choices");
    }
}

/// The biases among a run's weights.
fn biases(weights: &[(String, Vec<f32>)]) -> Vec<&Vec<f32>> {
    weights
        .iter()
        .filter(|(name, _)| name.ends_with("e_score_correction_bias"))
        .map(|(_, values)| values)
        .collect()
}

#[test]
fn any_number_of_ranks_gives_the_same_bits_recorded_and_made_again() {
    let behind_dense = mixed("bf16", &[&SIZES[..], &V3].concat());
    for (config, layers) in [(with("bf16", &V2), 0), (with("mxfp4-hopper", &V3), 2), (behind_dense, 1)] {
        let one = train(&config, 1, 4, cpu);
        assert_eq!(biases(&one.weights).len(), layers);
        assert!(biases(&one.weights).iter().all(|bias| bias.iter().any(|b| *b != 0.0)), "they have moved");
        for mesh in FOUR_RANKS.into_iter().skip(1) {
            one.assert_same(&train_mesh(&config, mesh, 4, cpu), &format!("mesh {mesh}"));
        }
        one.assert_same(&train_alone(&Recorder::new(cpu()), &config, 4), "recorded");
        for scope in Scope::ALL {
            let mut again = config.clone();
            again.train.recompute = Recompute::of(&[scope]);
            one.assert_same(&train(&again, 2, 4, cpu), scope.name());
        }
    }
}

/// The rule itself, from the loads that a run tells of each of its steps: of all its micro-batches, and of all ranks.
#[test]
fn biases_move_against_the_loads_of_whole_steps() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = with("bf16", &[&V3[..], &["train.steps=6", "train.warmup_steps=1"]].concat());
    config.run.dir = dir.path().join("run").display().to_string();
    config.run.ranks = 2;
    let ranks = on_mesh(MeshShape { dp: 1, ep: 2 }, |mesh| {
        run(&cpu(), mesh, &config, Options::default(), &mut rig::Silent).unwrap();
    });
    assert_eq!(ranks.len(), 2);
    let mut expected = vec![vec![0.0f32; 8]; 2];
    let lines = read_layers(&Path::new(&config.run.dir).join("layers.jsonl")).unwrap().metrics;
    assert_eq!(lines.len(), 6);
    for line in lines {
        for (bias, load) in expected.iter_mut().zip(line.load) {
            let slots: u64 = load.iter().sum();
            assert_eq!(slots, 2 * 8 * 128 * 3, "micro-batches · sequences · tokens · top_k");
            for (bias, load) in bias.iter_mut().zip(load) {
                match (8 * load).cmp(&slots) {
                    std::cmp::Ordering::Less => *bias += 0.01,
                    std::cmp::Ordering::Greater => *bias -= 0.01,
                    std::cmp::Ordering::Equal => {}
                }
            }
        }
    }
    let b = cpu();
    let mut trainer = Trainer::new(&b, &SOLO, &config).unwrap();
    let checkpoint = latest_valid(Path::new(&config.run.dir)).unwrap().checkpoint.unwrap();
    trainer.load(&checkpoint).unwrap();
    let found: Vec<Vec<f32>> = trainer
        .model()
        .params()
        .into_iter()
        .filter(|param| !param.has_gradient())
        .map(|param| param.master.to_f32_vec(&b).unwrap())
        .collect();
    assert_eq!(found, expected);
}

/// All experts have as many tokens in every step, so that ranks need no spare room, and held-out text is routed as ever.
#[test]
fn experts_take_turns_in_training_alone() {
    let mut config = with("mxfp4-hopper", &["train.force_load_balance=true"]);
    config.run.capacity_factor = 1.0;
    let routed = with("mxfp4-hopper", &[]);
    on_mesh(MeshShape { dp: 1, ep: 2 }, |mesh| {
        let b = cpu();
        let mut trainer = Trainer::new(&b, mesh, &config).unwrap();
        for _ in 0..2 {
            trainer.train_step().unwrap();
            for load in trainer.take_layers().unwrap().load {
                assert!(load.iter().all(|slots| *slots == load[0]), "{load:?}");
            }
        }
        assert_eq!(trainer.take_notes(), [""; 0], "no step was done again");
        let [forced, free] =
            [&config, &routed].map(|config| Trainer::new(&b, mesh, config).unwrap().evaluate(1).unwrap());
        assert_eq!(forced, free);
    });
    let one = train(&config, 1, 2, cpu);
    one.assert_same(&train(&config, 2, 2, cpu), "two ranks");
    assert!(one.weights != train(&routed, 1, 2, cpu).weights);
}

#[test]
fn a_run_goes_on_with_its_biases_on_other_ranks() {
    let config = with("bf16", &V3);
    let dir = tempfile::tempdir().unwrap();
    on_mesh(MeshShape { dp: 1, ep: 2 }, |mesh| {
        let b = cpu();
        let mut trainer = Trainer::new(&b, mesh, &config).unwrap();
        (0..2).for_each(|_| drop(trainer.train_step().unwrap()));
        let store = (mesh.all.rank() == 0).then(|| Store::open(dir.path()).unwrap());
        trainer.save(store.as_ref()).unwrap();
    });
    let checkpoint = latest_valid(dir.path()).unwrap().checkpoint.unwrap();
    let b = cpu();
    let mut through = Trainer::new(&b, &SOLO, &config).unwrap();
    (0..4).for_each(|_| drop(through.train_step().unwrap()));
    let mut resumed = Trainer::new(&b, &SOLO, &config).unwrap();
    resumed.load(&checkpoint).unwrap();
    (0..2).for_each(|_| drop(resumed.train_step().unwrap()));
    assert!(state(&b, &mut resumed) == state(&b, &mut through));
    assert_eq!(resumed.digest().unwrap(), through.digest().unwrap());
    let bits = on_mesh(MeshShape { dp: 2, ep: 2 }, |mesh| {
        let b = cpu();
        let mut trainer = Trainer::new(&b, mesh, &config).unwrap();
        trainer.load(&checkpoint).unwrap();
        (0..2).for_each(|_| drop(trainer.train_step().unwrap()));
        trainer.digest().unwrap()
    });
    assert_eq!(bits, vec![through.digest().unwrap(); 4]);
    // A tensor of its own among the weights, none among the moments.
    let names = |file: &str| {
        let bytes = std::fs::read(checkpoint.path().join(file)).unwrap();
        let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
        header.as_object().unwrap().clone()
    };
    let bias = &names("model.safetensors")["model.layers.1.mlp.gate.e_score_correction_bias"];
    assert_eq!((&bias["dtype"], &bias["shape"]), (&"F32".into(), &serde_json::json!([8])));
    assert!(names("optim.safetensors").keys().all(|name| !name.contains("bias")));
}

#[test]
fn a_step_that_does_not_count_moves_no_bias() {
    let mut config = with("bf16", &V3);
    let one = train(&config, 1, 3, cpu);
    // Too little room at first: such a step is done again.
    config.run.capacity_factor = 0.5;
    let ranks = on_mesh(MeshShape { dp: 1, ep: 4 }, |mesh: Mesh<'_, Cpu>| {
        let b = cpu();
        let mut trainer = Trainer::new(&b, mesh, &config).unwrap();
        (0..3).for_each(|_| drop(trainer.train_step().unwrap()));
        (trainer.take_notes(), state_on(&b, mesh, &mut trainer))
    });
    for (notes, state) in ranks {
        assert!(!notes.is_empty(), "the exchange was enlarged");
        let found = state.iter().filter(|(name, _)| name.ends_with("bias"));
        let found: Vec<Vec<f32>> =
            found.map(|(_, bits)| bits.iter().map(|b| f32::from_bits(*b)).collect()).collect();
        assert_eq!(found.iter().collect::<Vec<_>>(), biases(&one.weights));
    }
}

#[test]
fn biases_stay_without_a_rate_and_choose_other_experts_with_one() {
    let run = |rate: &str| train(&with("bf16", &[&V3[..], &[rate]].concat()), 1, 3, cpu);
    let (still, moved) = (run("train.router_bias_rate=0"), run("train.router_bias_rate=0.1"));
    assert!(biases(&still.weights).iter().all(|bias| bias.iter().all(|b| b.to_bits() == 0)));
    assert_eq!(still.losses[0], moved.losses[0], "all are zero in the first step");
    assert_ne!(still.losses[1], moved.losses[1]);
}

/// Where each shard is a sequence both losses are one, to the last bit; where shards have several the sequences' is the same number.
#[test]
fn the_loss_of_sequences_is_that_of_shards_of_one_sequence() {
    for keys in [&V2[..], &V3[..]] {
        let config = |balance, shards| {
            let mut config = with("bf16", keys);
            (config.model.balance, config.train.shards, config.train.expert_shards) = (balance, shards, 1);
            config
        };
        let one = train(&config(Balance::Shard, 8), 1, 3, cpu);
        one.assert_same(&train(&config(Balance::Sequence, 8), 1, 3, cpu), "a sequence a shard");
        let aux_loss = |balance, shards| {
            let (b, config) = (cpu(), config(balance, shards));
            Trainer::new(&b, &SOLO, &config).unwrap().train_step().unwrap().aux_loss.unwrap()
        };
        let (sequences, shards) = (aux_loss(Balance::Sequence, 2), aux_loss(Balance::Shard, 8));
        assert!((sequences - shards).abs() < 1e-5 * shards, "{sequences}, {shards}");
        assert!((sequences - aux_loss(Balance::Shard, 2)).abs() > 1e-3 * shards, "{sequences}");
    }
}

#[test]
fn keys_that_do_not_fit_are_told_and_defaults_are_not_stored() {
    let read = |keys: &[&str]| {
        let keys: Vec<String> = keys.iter().map(ToString::to_string).collect();
        Config::from_text("", Path::new("keys.toml"), &keys)
    };
    let cases: [(&[&str], &str); 12] = [
        (&["model.groups=3"], "`model.groups`: is 3, not a divisor of model.experts = 8"),
        (&["model.groups=4"], "`model.top_groups`: is 0, expected 1 to model.groups = 4"),
        (&["model.top_groups=1"], "`model.top_groups`: is 1, but model.groups = 0"),
        (&["model.groups=8", "model.top_groups=1"], "`model.top_k`: is 2, more than the 1 experts"),
        (
            &["model.groups=8", "model.top_groups=4", "model.group_score=top2"],
            "`model.group_score`: is \"top2\"",
        ),
        (&["model.group_score=top2"], "`model.group_score`: is \"top2\", but has no effect"),
        (&["model.route_scale=0"], "`model.route_scale`: is 0.0, expected a number above 0"),
        (&["train.router_bias_rate=0.1"], "`train.router_bias_rate`: is 0.1, but has no effect"),
        (&["model.router_bias=true", "train.router_bias_rate=-1"], "`train.router_bias_rate`: is -1"),
        (
            &["model.experts=0", "model.ffn=96", "model.scores=sigmoid"],
            "`model.scores`: is \"sigmoid\", but model.experts = 0",
        ),
        (
            &["model.experts=0", "model.ffn=96", "train.force_load_balance=true"],
            "`train.force_load_balance`: is true, but has no effect",
        ),
        (
            &["model.experts=0", "model.ffn=96", "model.balance=sequence"],
            "`model.balance`: is \"sequence\", but",
        ),
    ];
    for (keys, told) in cases {
        let error = read(keys).unwrap_err().to_string();
        assert!(error.contains(told), "{error}");
    }
    let stored = |keys: &[&str]| toml::to_string(&read(keys).unwrap()).unwrap();
    let (usual, all) = (stored(&[]), stored(&V3));
    for key in
        ["scores", "router_bias", "groups", "top_groups", "group_score", "route_scale", "router_bias_rate"]
    {
        let line = format!("\n{key} = ");
        assert!(!usual.contains(&line) && all.contains(&line), "{key}");
    }
}
