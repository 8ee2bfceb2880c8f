//! What a recipe costs: multiply-adds beside those that a rehearsed step counts, techniques beside counts by hand, and the shares that a paper
//! prints.

use crate::rig;

use nibble_core::{DeviceKind, Recipe};
use nibble_train::checks::checked_recipe;
use nibble_train::config::Config;
use nibble_train::cost::{Cost, Engine, Technique};
use nibble_train::plan::{off_tensor_cores, work_of_step};
use rig::{LATENT, dense, mixed, small, wants_width, with_recipe};

fn cost(config: &Config) -> Cost {
    Cost::of(config, &checked_recipe(config).unwrap()).unwrap()
}

fn in_bits(cost: &Cost, bits: impl Fn(u32) -> bool) -> f64 {
    let all = cost.kinds.iter().flat_map(|kind| &kind.products);
    all.filter(|products| bits(products.bits)).map(|products| products.multiply_adds).sum()
}

/// Two flops a multiply-add, by the wider type: as operations count them that a rehearsed step issues.
#[test]
fn multiply_adds_are_those_of_a_rehearsed_step() {
    let none = "train.recompute=[]";
    // A cost is the mean over a run, and a rehearsed step its first.
    let is_one = |name: &&str| Recipe::builtin(name).unwrap().stretches().len() == 1;
    for recipe in Recipe::all_names().filter(is_one) {
        for config in [
            small(recipe, &[none]),
            small(recipe, &[none, "train.grad_accum=2"]),
            dense(recipe, &[none, "model.tie_embeddings=false"]),
            mixed(recipe, &[none]),
            mixed(recipe, &[&[none][..], &LATENT].concat()),
        ]
        .into_iter()
        .take(if wants_width(recipe) { 3 } else { 5 })
        {
            let cost = cost(&config);
            let calls = work_of_step(DeviceKind::Gpu, &config, &checked_recipe(&config).unwrap(), 1).unwrap();
            let of = |flops: fn(&nibble_train::plan::Flops) -> f64| -> f64 {
                let products = calls.iter().filter(|call| !call.op.starts_with("attention"));
                products.map(|call| flops(&call.work.flops)).sum()
            };
            let counted = [of(|flops| flops.f32), of(|flops| flops.bf16), of(|flops| flops.fp8)];
            let told = [in_bits(&cost, |b| b == 32), in_bits(&cost, |b| b == 16), in_bits(&cost, |b| b <= 8)];
            assert_eq!(told.map(|multiply_adds| 2.0 * multiply_adds), counted, "{recipe}");
        }
    }
}

/// The ordinary cores have something to do exactly where the prediction says so, for the same products.
#[test]
fn products_are_off_the_tensor_cores_where_a_dry_run_says_so() {
    for recipe in ["f32", "bf16", "mxfp4-hopper", "fp8-block", "mxfp8", "nvfp4", "hif4"] {
        for odd in [&[][..], &["model.expert_ffn=36"], &["model.vocab_size=257"], &["model.d_model=72"]] {
            let config = small(recipe, odd);
            let off = off_tensor_cores(&config, &checked_recipe(&config).unwrap()).unwrap();
            let has_products = off.iter().flat_map(|off| &off.ops).any(|op| !op.starts_with("attention"));
            let told: f64 = cost(&config).kinds.iter().map(|kind| kind.through(Engine::F32)).sum();
            assert_eq!(told > 0.0, has_products, "{recipe} {odd:?}: {off:?}");
        }
    }
}

#[test]
fn codes_that_the_tensor_cores_read_are_multiplied_as_they_are() {
    let engines = |recipe: &str| -> Vec<Engine> {
        let cost = cost(&small(recipe, &[]));
        let kind = cost.kinds.iter().find(|kind| kind.name == "experts gate, up").unwrap();
        Engine::ALL.into_iter().filter(|engine| kind.through(*engine) > 0.0).collect()
    };
    assert_eq!(
        ["bf16", "fp8-block", "mxfp4-hopper"].map(engines),
        [vec![Engine::Bf16], vec![Engine::Fp8], vec![Engine::Fp8]]
    );
    // Decoded first.
    assert_eq!(["mxfp8", "nvfp4", "hif4"].map(engines), [const { [Engine::Bf16] }; 3].map(Vec::from));
    assert_eq!(engines("f32"), [Engine::F32]);
}

/// The dense model: d 64, 2 query heads and 1 key-value head of 32, an MLP of 96; 512 tokens a step in two layers.
const TOKENS: f64 = 512.0;
const LAYERS: f64 = 2.0;

fn technique(config: &Config, technique: Technique) -> f64 {
    cost(config).techniques.get(&technique).copied().unwrap_or(0.0)
}

/// M · log2 r · (N + K) a product, as Table 1 of the HiFloat4 study has it of Nvidia's recipe; queries, keys and values transform their input once.
#[test]
fn transforms_and_random_bits_by_hand() {
    let text = r#"
        extends = "hif4"
        [linear]
        saved.x = { format = "bf16" }
        wgrad.x = { format = "hif4", rht = 64 }
        wgrad.dy = { format = "hif4", rht = 64, round = "stochastic" }
        dgrad.dy = { format = "hif4" }
        fprop.x = { format = "hif4" }
        fprop.w = { format = "hif4" }
    "#;
    let (recipe, _dir) = with_recipe(text, &[]);
    let config = dense(&recipe.recipe, &[]);
    let (n_of, k_of) = ([64.0, 32.0, 32.0, 64.0, 192.0, 64.0], [64.0, 64.0, 64.0, 64.0, 64.0, 96.0]);
    let gradients: f64 = n_of.iter().sum();
    let inputs: f64 = k_of.iter().sum::<f64>() - 2.0 * 64.0;
    let values = |widths: f64| LAYERS * TOKENS * widths;
    assert_eq!(technique(&config, Technique::Hadamard), 6.0 * values(gradients + inputs));
    assert_eq!(technique(&config, Technique::RandomRounding), 16.0 * values(gradients));
    assert_eq!(technique(&config, Technique::Measuring), 0.0);
    // A weight without tiles is quantized by rows and by columns.
    let weights: f64 = n_of.iter().zip(k_of).map(|(n, k)| n * k).sum();
    let head = 64.0 * 64.0;
    assert_eq!(technique(&config, Technique::WeightQuantizations), LAYERS * 2.0 * weights + head);
    assert_eq!(technique(&config, Technique::WeightTransposes), head);
}

/// One cast each way of the tokens that travel and two planes of BF16 gradients; columns from rows.
#[test]
fn casts_and_conversions_of_experts_by_hand() {
    // 512 tokens, 2 experts each: d 64, ffn 32, in 2 layers. Dense layers are BF16.
    let text = |base: &str| {
        format!(
            "extends = \"{base}\"\n[[override]]\nkinds = [\"self_attn\", \"shared_expert\"]\nset.recipe = \"bf16\"\n"
        )
    };
    let of = |base: &str| {
        let (config, dir) = with_recipe(&text(base), &[]);
        let counts = [
            Technique::Casts,
            Technique::Transcodes,
            Technique::FusedQuantizations,
            Technique::Requantizations,
        ]
        .map(|what| technique(&config, what) / LAYERS);
        drop(dir);
        counts
    };
    let (tokens, rows) = (TOKENS * 64.0, 2.0 * TOKENS * 64.0);
    let (a, h) = (2.0 * TOKENS * 32.0, 2.0 * TOKENS * 64.0);
    // fp8-block: rows and columns of x and dy of the routed rows; a by rows; dh by both, a by columns.
    assert_eq!(of("fp8-block"), [4.0 * rows, 0.0, a + 2.0 * h + a, 0.0]);
    // fp8-flow: x and dy once, a token each; their columns are of their rows.
    assert_eq!(of("fp8-flow"), [2.0 * tokens, 2.0 * rows, a + 2.0 * h + a, 0.0]);
    // fp8-deepseek: columns of x and dy are dequantized and quantized again.
    assert_eq!(of("fp8-deepseek"), [2.0 * tokens + 4.0 * rows, 0.0, a + 2.0 * h + a, 2.0 * rows]);
}

/// Of experts in 4 bits dgrad's copy is decoded for each micro-batch; all other copies are made once a step.
#[test]
fn copies_of_weights_are_made_once_a_step_unless_they_are_decoded() {
    for what in [Technique::WeightTransposes, Technique::WeightQuantizations] {
        let of = |recipe: &str, grad_accum: usize| {
            technique(&small(recipe, &[&format!("train.grad_accum={grad_accum}")]), what)
        };
        let experts = small("bf16", &[]).model.experts as f64;
        // Gate and up together 64 x 64, down 64 x 32.
        let weights = LAYERS * experts * (64.0 * 64.0 + 64.0 * 32.0);
        assert_eq!(of("mxfp4-qat", 4) - of("mxfp4-qat", 1), 3.0 * weights, "{what:?}");
        assert_eq!(of("bf16", 4), of("bf16", 1), "{what:?}");
    }
}

#[test]
fn tensors_with_a_scale_are_measured_unless_earlier_steps_say_it() {
    assert!(technique(&dense("fp8-tensor", &[]), Technique::Measuring) > 0.0);
    assert_eq!(technique(&dense("fp8-delayed", &[]), Technique::Measuring), 0.0);
    assert_eq!(technique(&dense("mxfp8", &[]), Technique::Measuring), 0.0);
}

/// Five of twenty steps in BF16, in the last of two layers: an eighth of each kind.
#[test]
fn costs_are_the_mean_over_steps_and_layers() {
    let text = "extends = \"fp8-block\"\n[[override]]\nlayers = \"last:1\"\nsteps = \"15.. steps\"\nset.recipe = \"bf16\"\n";
    let (config, _dir) = with_recipe(text, &[]);
    let cost = cost(&config);
    for kind in cost.kinds.iter().filter(|kind| !["router", "output layer"].contains(&kind.name)) {
        assert_eq!(kind.in_bits(16) / kind.total(), 0.125, "{}", kind.name);
        assert_eq!(kind.in_bits(8) / kind.total(), 0.875, "{}", kind.name);
    }
}

/// Shares of a step in percent, of the multiply-adds with 4-bit operands: those of each kind among all that `whole` counts.
fn shares(cost: &Cost, whole: f64) -> Vec<(&'static str, f64)> {
    let with = cost.kinds.iter().filter(|kind| kind.in_bits(4) > 0.0);
    with.map(|kind| (kind.name, 100.0 * kind.in_bits(4) / whole)).collect()
}

fn quantized(cost: &Cost) -> f64 {
    cost.kinds.iter().map(|kind| kind.in_bits(4)).sum()
}

/// Table 2 of the HiFloat4 study (4096 tokens a sequence, all linear layers but the output layer in four bits): attention's input and output
/// projections, the MLP's or the experts' two. What else a step is there is not published, so its totals (76.82, 95.90) cannot be had from a
/// model's sizes; how they divide among the layers can. OpenPangu-1B's total (79.58) can: it leaves attention out.
#[test]
fn the_layers_of_a_published_table_have_its_shares() {
    let model = |name: &str, changes: &[&str]| {
        let changes: Vec<String> = [&["recipe=hif4", "data.seq_len=4096"], changes]
            .concat()
            .iter()
            .map(|c| (*c).to_owned())
            .collect();
        cost(&Config::load(name, &changes).unwrap())
    };
    let rounded = |shares: Vec<(&str, f64)>| {
        shares.iter().map(|(_, share)| (share * 100.0).round() as i64).collect::<Vec<_>>()
    };
    let llama = model("llama-3-8b", &[]);
    let of_table = quantized(&llama) / 0.7682;
    // The table: 8.86, 5.91, 41.37, 20.68. Gate and up projections are 2 · 14336 / 6144 times as many as q, k and v, and so 41.36: the table's
    // four numbers are rounded so that they add up.
    assert_eq!(rounded(shares(&llama, of_table)), [886, 591, 4136, 2068]);
    // Of all that is multiplied here, output layer and half of attention's square included, it is 86.79 %; of all of the square 81.36 %.
    let whole = llama.total() + llama.attention;
    assert_eq!((1e4 * quantized(&llama) / whole).round(), 8679.0);
    assert_eq!((1e4 * quantized(&llama) / (whole + llama.attention)).round(), 8136.0);

    // The table: 3.13, 2.50, 60.18, 30.09. The published model has 8 experts a token. With 64, which the table's ratio asks for, each is within
    // 0.01, which is how far four rounded numbers that add up to 95.90 may be off.
    let qwen = |top_k: &str| model("qwen3-30b-a3b", &[top_k]);
    let published = qwen("model.top_k=8");
    let of_router = |cost: &Cost| cost.kinds.iter().find(|kind| kind.name == "router").unwrap().in_bits(4);
    assert_eq!(of_router(&published), 0.0);
    assert_eq!(rounded(shares(&published, quantized(&published) / 0.9590)), [1776, 1421, 4262, 2131]);
    let of_64 = qwen("model.top_k=64");
    assert_eq!(rounded(shares(&of_64, quantized(&of_64) / 0.9590)), [313, 251, 6017, 3009]);

    // The table: 10.61, 5.30, 42.45, 21.22. All linear layers and the output layer, without attention, give 0.01 more each; with half of
    // attention's square it would be 69.74 in all, not 79.58.
    let pangu = model("openpangu-1b", &[]);
    assert_eq!(rounded(shares(&pangu, pangu.total())), [1062, 531, 4246, 2123]);
    assert_eq!((1e4 * quantized(&pangu) / (pangu.total() + pangu.attention)).round(), 6974.0);
}
