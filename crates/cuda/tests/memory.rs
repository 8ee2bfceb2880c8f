//! Predicted memory beside what a GPU takes: twenty random recipes, each on a random model that needs 10 GiB or more. Without a GPU they are
//! drawn and predicted, and that is all.

use crate::gpu;

use nibble_core::{DeviceKind, MeshShape, Recipe, SoloComm};
use nibble_cuda::Cuda;
use nibble_testkit::Dice;
use nibble_train::checks::check_recipe;
use nibble_train::config::Config;
use nibble_train::plan::{self, Prediction};
use nibble_train::spec::ModelSpec;
use nibble_train::trainer::Trainer;

const PAIRS: usize = 20;
const GIB: f64 = (1 << 30) as f64;

/// Every part of a recipe's schedule is met.
const STEPS: usize = 4;

/// A run that fits an 80 GB GPU and is worth predicting.
struct Drawn {
    config: Config,
    recipe: Recipe,
    text: String,
    predicted: Prediction,
}

/// A model with experts or without, its batch, and what is kept of it.
fn config(dice: &mut Dice) -> Config {
    let mut overrides = vec![
        format!("train.steps={STEPS}"),
        "train.warmup_steps=1".to_owned(),
        "model.vocab_size=16384".to_owned(),
        format!("model.d_model={}", dice.of(&[1024, 2048])),
        format!("model.layers={}", dice.of(&[2, 4, 6])),
        format!("model.head_dim={}", dice.of(&[64, 128])),
        format!("model.kv_heads={}", dice.of(&[4, 16])),
        format!("data.seq_len={}", dice.of(&[1024, 4096])),
        format!("train.batch_size={}", dice.of(&[4, 8, 16])),
        format!("train.shards={}", dice.of(&[1, 4])),
        format!("train.grad_accum={}", dice.of(&[1, 1, 2])),
        format!("train.grad_dtype={}", dice.of(&["f32", "bf16"])),
        format!("train.moment_dtype={}", dice.of(&["f32", "bf16"])),
        format!("model.tie_embeddings={}", dice.of(&[true, false])),
    ];
    let experts = [
        format!("model.experts={}", dice.of(&[8, 64])),
        format!("model.top_k={}", dice.of(&[2, 8])),
        format!("model.expert_ffn={}", dice.of(&[512, 768])),
        format!("model.shared_ffn={}", dice.of(&[0, 512])),
    ];
    let dense = ["experts=0", "top_k=0", "expert_ffn=0", "shared_ffn=0", "aux_loss_coef=0", "ffn=4096"];
    match dice.once_in(4) {
        true => overrides.extend(dense.map(|key| format!("model.{key}"))),
        false => overrides.extend(experts),
    }
    if dice.once_in(3) {
        let entries = ["norms", "attention", "experts", "mlp_up", "layers@first:1", "mlp_up@last:50%"];
        overrides.push(format!("train.recompute=[\"{}\"]", dice.of(&entries)));
    }
    Config::load("s", &overrides).unwrap_or_else(|e| panic!("{overrides:?}: {e}"))
}

/// The next pair that a recipe can be read of, that no ordinary core slows down, and that takes 10 to 60 GiB.
fn draw(dice: &mut Dice) -> Drawn {
    loop {
        let config = config(dice);
        let layers = ModelSpec::new(&config.model).recipe_layers();
        let text = dice.recipe(&layers);
        let Ok(recipe) = Recipe::parse("random", &text) else { continue };
        if check_recipe(&config, &recipe).is_err() {
            continue;
        }
        let Ok(predicted) = plan::predict(DeviceKind::Gpu, MeshShape::ONE, &config, &recipe) else {
            continue;
        };
        let gib = predicted.device_bytes() as f64 / GIB;
        let slow = plan::off_tensor_cores(&config, &recipe).unwrap();
        if (10.0..60.0).contains(&gib) && slow.iter().map(|slow| slow.share).sum::<f64>() < 0.01 {
            return Drawn { config, recipe, text, predicted };
        }
    }
}

/// Bytes of the GPU that are in use, by all.
fn in_use() -> usize {
    let (free, total) = cudarc::driver::result::mem_get_info().unwrap();
    total - free
}

/// Trains, and returns what arenas took and how much more of the GPU was in use at the end than before.
fn taken(cuda: &Cuda, drawn: &Drawn) -> (usize, usize) {
    let before = in_use();
    let mut trainer = Trainer::under(cuda, &SoloComm, &drawn.config, drawn.recipe.clone())
        .and_then(Trainer::with_data)
        .unwrap_or_else(|e| panic!("{e}\n{}", drawn.text));
    for _ in 0..STEPS {
        trainer.train_step().unwrap_or_else(|e| panic!("{e}\n{}", drawn.text));
    }
    let arenas = trainer.memory().arenas().iter().map(|(_, stats)| stats.total_bytes.unwrap()).sum();
    (arenas, in_use() - before)
}

#[test]
fn twenty_random_runs_take_what_was_predicted() {
    let mut dice = Dice::new(20);
    let drawn: Vec<Drawn> = (0..PAIRS).map(|_| draw(&mut dice)).collect();
    let Some(cuda) = gpu::device("memory").map(Cuda::on) else { return };
    println!("predicted GiB  taken GiB  ratio  in use GiB  model and recipe");
    let mut wrong = 0;
    for (i, drawn) in drawn.iter().enumerate() {
        // Arenas alone: the driver's number has kernels in it, and what the pool keeps from one run to the next.
        let predicted: usize = drawn.predicted.parts()[..4].iter().map(|(_, bytes)| bytes).sum();
        let (taken, more) = taken(&cuda, drawn);
        let ratio = predicted as f64 / taken as f64;
        let model = &drawn.config.model;
        println!(
            "{:>13.2}  {:>9.2}  {ratio:.3}  {:>10.2}  {i}: {} layers of {}, {} experts; {}",
            predicted as f64 / GIB,
            taken as f64 / GIB,
            more as f64 / GIB,
            model.layers,
            model.d_model,
            model.experts,
            drawn.text.replace('\n', " | ")
        );
        wrong += usize::from(!(0.97..=1.03).contains(&ratio));
    }
    assert_eq!(wrong, 0, "of {PAIRS} predictions are further than 3 % from what was taken");
}
