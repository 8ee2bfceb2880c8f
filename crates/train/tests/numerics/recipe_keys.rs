//! Every key of a recipe does what it says: changed, it changes weights within three steps, on one rank and on two alike; and
//! it changes them where it says so. Under every recipe, each field of each key by itself either decides or is refused, and so does a key of random recipes.

use crate::rig;

use nibble_core::Recipe;
use nibble_core::formats::{Format, ScaleKind};
use nibble_core::ops::Stored;
use nibble_core::recipe::{By, Layer, LayerKind, LayerPlan, Passes, Precision, Product, Site};
use nibble_cpu::Cpu;
use nibble_testkit::{Breadth, Dice};
use nibble_train::checks::{check_recipe, checked_recipe, for_run, notes};
use nibble_train::config::Config;
use nibble_train::one_layer::OneLayer;
use nibble_train::spec::ModelSpec;
use nibble_train::trainer::Trainer;
use rig::{LATENT, Outcome, SOLO, WIDE, WIDE_EXPERTS, recipes, small, state, train, with_recipe};
use std::cell::OnceCell;
use std::collections::BTreeSet;

fn run(config: &Config, ranks: usize) -> Outcome {
    train(config, ranks, 3, || Cpu::new(1).unwrap())
}

fn differ(a: &Outcome, b: &Outcome) -> bool {
    a.weights.iter().zip(&b.weights).any(|((_, a), (_, b))| a != b)
}

/// A change to a recipe trains to other weights, the same on two ranks.
#[track_caller]
fn assert_decides(recipe: &str, change: &str) {
    let base = run(&small(recipe, &[]), 1);
    let (config, _dir) = with_recipe(&format!("extends = \"{recipe}\"\n{change}"), &[]);
    let changed = run(&config, 1);
    assert!(differ(&base, &changed), "{recipe}: {change}");
    assert!(changed.losses.iter().all(|loss| loss.is_finite() && *loss < 6.0), "{:?}", changed.losses);
    changed.assert_same(&run(&config, 2), &format!("{recipe}, {change}: two ranks"));
}

/// One after the other, where the others leave it a choice.
#[test]
fn keys_of_every_product_decide() {
    let floor = "{ format = \"e4m3\", scale = \"floor\" }";
    let mxfp4 = "{ format = \"mxfp4\", scale = \"rceil\" }";
    let amax = "{ format = \"e4m3\", scale = \"amax\" }";
    for kind in ["linear", "expert"] {
        for (recipe, key, precision) in [
            ("fp8-block", "fprop.x", floor),
            ("fp8-flow", "fprop.w", amax),
            ("fp8-block", "dgrad.dy", floor),
            ("fp8-block", "wgrad.dy", floor),
            ("fp8-flow", "saved.x", mxfp4),
            ("fp8-flow", "saved.h", mxfp4),
        ] {
            assert_decides(recipe, &format!("[{kind}]\n{key} = {precision}"));
        }
    }
    for key in ["fprop.x", "fprop.w", "dgrad.dy", "wgrad.dy", "wgrad.x"] {
        assert_decides("mxfp4-hopper-head8", &format!("[head]\n{key} = {amax}"));
    }
    assert_decides("fp8-flow", &format!("[expert]\ndispatch.fwd = {mxfp4}"));
    assert_decides("fp8-flow", &format!("[expert]\ndispatch.bwd = {mxfp4}"));
    assert_decides("bf16", &format!("[expert]\ncombine.fwd = {floor}"));
    assert_decides("fp8-flow", &format!("[expert]\ncombine.bwd = {floor}"));
    assert_decides("f32", "[router]\nfprop.w = { format = \"bf16\" }");
}

#[test]
fn keys_of_the_experts_second_product_decide() {
    let [e4m3, mxfp4] = ["e4m3", "mxfp4"].map(|f| format!("{{ format = \"{f}\", scale = \"rceil\" }}"));
    let floor = "{ format = \"e4m3\", scale = \"floor\" }";
    let stochastic = "{ format = \"e4m3\", scale = \"rceil\", round = \"stochastic\" }";
    for (recipe, change) in [
        ("fp8-flow", format!("[expert]\nfprop.a = {floor}")),
        ("fp8-flow", format!("[expert]\nwgrad.a = {floor}")),
        ("fp8-flow", format!("[expert]\ndgrad.dh = {floor}")),
        ("fp8-flow", format!("[expert]\nwgrad.dh = {stochastic}")),
        // Kept by rows as fprop has them, and columns of that; in FP4, and lifted; in BF16.
        ("fp8-flow", format!("[expert]\nsaved.a = {e4m3}")),
        ("mxfp4-hopper", format!("[expert]\nsaved.a = {mxfp4}")),
        ("mxfp4-hopper", "[expert]\nsaved.a = { format = \"bf16\" }".to_owned()),
    ] {
        assert_decides(recipe, &change);
    }
    // The columns that wgrad takes, from the read that makes the rows of fprop: what is otherwise made again from a plain h.
    let kept = "extends = \"fp8-flow\"\n[expert]\nsaved.a = { format = \"e4m3\", scale = \"rceil\", axis = \"col\" }";
    let (config, _dir) = with_recipe(kept, &[]);
    run(&small("fp8-flow", &[]), 1).assert_same(&run(&config, 1), "a kept by columns");
}

#[test]
fn conversions_decide() {
    let again = "scale = \"rceil\", by = \"requantize\" }";
    for (recipe, change) in [
        ("fp8-flow", format!("[linear]\nwgrad.x = {{ format = \"e4m3\", {again}")),
        ("fp8-flow", format!("[expert]\nwgrad.x = {{ format = \"e4m3\", {again}")),
        ("fp8-flow", format!("[expert]\nwgrad.dy = {{ format = \"e4m3\", {again}")),
        ("mxfp4-hopper", "[expert]\nfprop.x = { format = \"e4m3\", scale = \"amax\", by = \"requantize\" }".to_owned()),
        (
            "fp8-flow",
            "[expert]\nwgrad.dy = { format = \"e4m3\", scale = \"rceil\", by = \"requantize\", round = \"stochastic\" }"
                .to_owned(),
        ),
    ] {
        assert_decides(recipe, &change);
    }
}

/// Along the tokens, in dense layers, in attention's shared input and in both products of experts.
#[test]
fn a_hadamard_transform_of_wgrad_decides() {
    for section in ["linear", "expert"] {
        assert_decides(
            "fp8-block",
            &format!(
                "[{section}]
                wgrad.dy = {{ format = \"e4m3\", rht = 64 }}
                wgrad.x = {{ format = \"e4m3\", rht = 64 }}
                saved.x = {{ format = \"e4m3\", axis = \"col\", rht = 64 }}"
            ),
        );
    }
    assert_decides(
        "fp8-flow",
        "[expert]
        wgrad.dy = { format = \"e4m3\", scale = \"rceil\", rht = 32, by = \"requantize\" }
        wgrad.x = { format = \"e4m3\", scale = \"rceil\", rht = 32, by = \"requantize\" }",
    );
}

/// Eight-bit weights in lines, and the transforms of all products.
const TRANSFORMED: &str = "extends = \"fp8-block\"
    [all]
    fprop.w = { format = \"e4m3\", scale = \"amax\", block = \"line\" }
    fprop.rht = { len = 16, signs = \"step\" }
    dgrad.rht = { len = 32, signs = 3 }
    wgrad.rht = { len = 64, signs = \"step\" }
    [head]
    fprop.x = { format = \"e4m3\" }
    fprop.w = { format = \"e4m3\", block = \"line\" }
    dgrad.dy = { format = \"e4m3\" }
    wgrad.dy = { format = \"e4m3\" }
    wgrad.x = { format = \"e4m3\" }
    fprop.rht = { len = 64, signs = \"step\" }
    dgrad.rht = { len = 16, signs = 3 }
    wgrad.rht = { len = 128, signs = \"run\" }";

/// Both operands have the same signs: in eight bits a model trains as it does without a transform. With others a product is of two rotated spaces.
#[test]
fn transformed_products_are_the_products() {
    let model: &[&str] = &["model.layers=2", "train.warmup_steps=2", "train.steps=30"];
    let plain = train(&small("fp8-block", model), 1, 30, || Cpu::new(2).unwrap());
    let (config, _dir) = with_recipe(TRANSFORMED, model);
    let transformed = train(&config, 1, 30, || Cpu::new(2).unwrap());
    let last = |outcome: &Outcome| *outcome.losses.last().unwrap();
    let (a, b) = (last(&plain), last(&transformed));
    assert!(differ(&plain, &transformed) && (a - b).abs() < 0.03, "{a} and {b}");
}

/// Where a transform's blocks do not divide what a product contracts, it is shorter or left out, which is said before a run begins.
#[test]
fn a_transform_that_a_layer_cannot_have_is_shortened_there() {
    let (config, _dir) = with_recipe(TRANSFORMED, &LATENT);
    let recipe = checked_recipe(&config).unwrap();
    let said = notes(&config, &recipe).join("\n");
    let parts =
        ["linear.dgrad.rht transforms 16 numbers", "instead of 32", "what dgrad contracts", "self_attn."];
    parts.iter().for_each(|part| assert!(said.contains(part), "no {part:?} in {said}"));
    let losses = train(&config, 1, 6, || Cpu::new(2).unwrap()).losses;
    assert!(losses.iter().all(|loss| loss.is_finite()) && losses[5] < losses[0], "{losses:?}");
}

/// Under the recipe of Quartet II, whose transforms of 128 divide none of the small model's widths, and in widths that no transform divides.
#[test]
fn narrow_models_train_under_long_transforms() {
    let text = std::fs::read_to_string(rig::recipe_file("nvfp4-quartet2")).unwrap();
    for widths in [&[][..], &LATENT, &["model.d_model=80", "model.expert_ffn=37", "model.shared_ffn=40"]] {
        let (config, _dir) = with_recipe(&text, widths);
        let recipe = checked_recipe(&config).unwrap();
        assert!(!notes(&config, &recipe).is_empty(), "{widths:?}");
        let one = train(&config, 1, 6, || Cpu::new(2).unwrap());
        assert!(
            one.losses.iter().all(|loss| loss.is_finite()) && one.losses[5] < one.losses[0],
            "{:?}",
            one.losses
        );
        one.assert_same(&train(&config, 2, 6, || Cpu::new(1).unwrap()), "two ranks");
    }
}

#[test]
fn transforms_of_every_product_decide() {
    let e4m3 = "{ format = \"e4m3\", scale = \"amax\", block = \"line\" }";
    for (recipe, section, products) in [
        ("fp8-block", "linear", &["fprop", "dgrad"][..]),
        ("fp8-block", "expert", &["fprop", "dgrad"]),
        ("mxfp4-hopper-head8", "head", &["fprop", "dgrad", "wgrad"]),
    ] {
        for product in products {
            for signs in ["\"run\"", "\"step\"", "7"] {
                let rht = format!("{product}.rht = {{ len = 32, signs = {signs} }}");
                assert_decides(recipe, &format!("[{section}]\nfprop.w = {e4m3}\n{rht}"));
            }
        }
    }
}

/// A weight that is quantized twice: dgrad's lines, its format, and what it is made of.
#[test]
fn a_weight_of_dgrads_own_decides() {
    for section in ["linear", "expert"] {
        for dgrad in [
            "{ format = \"e4m3\", scale = \"rceil\" }",
            "{ format = \"e4m3\", scale = \"amax\", block = \"line\" }",
            "{ format = \"e4m3\", scale = \"amax\", block = \"line\", by = \"requantize\" }",
        ] {
            assert_decides("fp8-block", &format!("[{section}]\ndgrad.w = {dgrad}"));
        }
    }
    assert_decides("mxfp4-hopper-head8", "[head]\ndgrad.w = { format = \"e4m3\", scale = \"amax\" }");
}

/// Nothing is rounded to nearest where a recipe says otherwise, weights included.
#[test]
fn every_operand_may_be_rounded_at_random() {
    for (section, key) in [
        ("linear", "fprop.x"),
        ("linear", "fprop.w"),
        ("linear", "dgrad.w"),
        ("linear", "saved.x"),
        ("expert", "fprop.w"),
        ("expert", "dgrad.w"),
        ("expert", "fprop.a"),
        ("expert", "wgrad.a"),
        ("expert", "dgrad.dh"),
        ("head", "fprop.w"),
        ("head", "fprop.x"),
        ("head", "dgrad.dy"),
        ("head", "wgrad.dy"),
        ("head", "wgrad.x"),
    ] {
        let recipe = if section == "head" { "mxfp4-hopper-head8" } else { "fp8-block" };
        let axis = if key == "saved.x" { ", axis = \"col\"" } else { "" };
        for round in ["stochastic", "dither:0.25"] {
            let p = format!("{{ format = \"e4m3\", scale = \"amax\", round = \"{round}\"{axis} }}");
            let more =
                if key == "saved.x" { format!("\nwgrad.x = {}", p.replace(axis, "")) } else { String::new() };
            assert_decides(recipe, &format!("[{section}]\n{key} = {p}{more}"));
        }
    }
}

/// Of every operand by itself; and scales are rounded alike wherever an expert lives.
#[test]
fn corrections_of_every_operand_decide() {
    let of = |more: &str, ranks| {
        let text = format!("extends = \"nvfp4-quartet2\"\n{more}");
        let (config, _dir) = with_recipe(&text, &[&WIDE[..], &WIDE_EXPERTS].concat());
        run(&config, ranks)
    };
    let base = of("", 1);
    base.assert_same(&of("", 2), "two ranks");
    for section in ["linear", "expert"] {
        for key in ["dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x"] {
            let more = match key {
                "dgrad.w" => ", block = \"line\", by = \"requantize\"",
                "wgrad.x" => ", by = \"requantize\"",
                _ => "",
            };
            let change = format!("[{section}]\n{key} = {{ format = \"nvfp4\"{more} }}");
            assert!(differ(&base, &of(&change, 1)), "{change}");
        }
    }
}

/// Every linear layer by its own name, the router and the head.
#[test]
fn overrides_reach_every_linear_layer() {
    for layer in ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj", "experts"] {
        let change = format!("[[override]]\nlayers = \"model.layers.1.*.{layer}\"\nset.recipe = \"bf16\"");
        assert_decides("mxfp4-hopper", &change);
    }
    assert_decides(
        "fp8-flow",
        "[[override]]\nlayers = \"*.gate\"\nset.router.fprop.w = { format = \"bf16\" }",
    );
    assert_decides(
        "mxfp4-hopper-head8",
        "[[override]]\nlayers = \"model.embed_tokens\"\nset.recipe = \"bf16\"",
    );
    // One of those that share an input, and a single key.
    let one =
        "[[override]]\nlayers = \"*.k_proj\"\nset.linear.saved.x = { format = \"e4m3\", scale = \"rceil\" }";
    assert_decides("mxfp4-hopper", one);
}

/// Weight gradients in high precision, whatever the other products take.
#[test]
fn wgrad_is_in_bf16_under_every_recipe_that_is_asked_to() {
    for recipe in recipes() {
        // What has plain operands already.
        let own = Recipe::builtin(recipe).unwrap();
        if !own.linear.at(Site::WgradX).format.is_block() {
            continue;
        }
        // What is kept transformed is for a product of transformed operands.
        if own.linear.at(Site::SavedX).rht.is_none() {
            assert_decides(recipe, "[[override]]\nproducts = \"wgrad\"\nset.recipe = \"bf16\"");
        }
        // The only override of this recipe is of what is saved: behind another of that it would decide nothing.
        if recipe != "mxfp4-hopper-mlp" {
            assert_decides(recipe, "[[override]]\nproducts = [\"wgrad\", \"saved\"]\nset.recipe = \"bf16\"");
        }
    }
}

/// What any key may be changed to.
const CHANGES: [&str; 15] = [
    "\"f32\" }",
    "\"bf16\" }",
    "\"e4m3\", scale = \"rceil\" }",
    "\"e4m3\", scale = \"floor\" }",
    "\"e4m3\", scale = \"amax\" }",
    "\"mxfp4\", scale = \"rceil\" }",
    "\"mxfp4\", scale = \"floor\" }",
    "\"e4m3\", scale = \"rceil\", round = \"stochastic\" }",
    "\"e4m3\", scale = \"amax\", round = \"stochastic\" }",
    "\"e4m3\", scale = \"rceil\", by = \"requantize\" }",
    "\"e4m3\", scale = \"amax\", by = \"requantize\" }",
    "\"e4m3\", scale = \"rceil\", axis = \"col\" }",
    "\"e4m3\", scale = \"amax\", axis = \"col\" }",
    "\"e4m3\", scale = \"rceil\", rht = 32 }",
    "\"e4m3-tensor\", scale = \"delayed\", history = 2 }",
];

/// How scales may be chosen, where the format has the choice.
const SCALING: [&str; 7] = [
    "headroom = 1.5",
    "thresholds = \"3.5,1.75\"",
    "candidates = \"4/6-mse\"",
    "candidates = \"4/6-mae\"",
    "outer = \"power\"",
    "outer = \"none\"",
    "correction = \"ms-eden\"",
];

/// Those, and of a block format each other one of the same blocks (any may stand there), and each field by itself.
fn changes(now: &Precision) -> Vec<String> {
    let mut all = CHANGES.map(str::to_owned).to_vec();
    if now.format.is_block() {
        let is_alike = |format: &Format| format.is_block() && format.spec().block == now.format.spec().block;
        let alike = Format::ALL.into_iter().filter(|format| is_alike(format) && *format != now.format);
        all.extend(alike.map(|format| format!("\"{format}\" }}")));
        let fields = [
            "round = \"stochastic\"",
            "round = \"dither:0.3\"",
            "rht = 32",
            "by = \"requantize\"",
            "by = \"cast\"",
            "axis = \"col\"",
            "block = \"line\"",
        ];
        // Under twice the power of two a code of eight bits is the same number, but for the smallest.
        let spec = now.format.spec();
        let is_shifted = spec.code_bits == 8 && (spec.scales)(spec.rules[0]) == ScaleKind::E8M0;
        let scaling = SCALING.iter().filter(|field| !(is_shifted && field.starts_with("headroom")));
        all.extend(fields.iter().chain(scaling).map(|field| format!("\"{}\", {field} }}", now.format)));
    }
    all
}

/// Runs to see a change by: the smallest that has every layer and whole blocks, after one step and after three; and one of four times the
/// blocks and a large vocabulary, for what rounds a block in a hundred.
const RUNS: [(&[&str], usize); 3] =
    [(SMALLEST, 1), (SMALLEST, 3), (&["train.warmup_steps=0", "train.lr=0.04", "model.vocab_size=2048"], 3)];
const SMALLEST: &[&str] = &["model.layers=1", "train.batch_size=1", "train.shards=1", "train.warmup_steps=0"];

/// Weights and moments, and what is kept, sent, converted and remembered.
type Ended = (Vec<(String, Vec<u32>)>, String);

/// Weights and moments of such a run; and what it keeps, sends, converts and remembers, which may be a decision of its own for the same numbers.
/// What is planned is what a backend sees (`recipe_plan.rs`). None of a run that ends at a gradient too small for the scales of its format.
fn after(recipe: &Recipe, (changes, steps): (&[&str], usize)) -> Option<Ended> {
    let (cpu, config) = (Cpu::new(1).unwrap(), small("bf16", changes));
    let mut trainer = Trainer::under(&cpu, &SOLO, &config, recipe.clone()).unwrap().with_data().unwrap();
    for _ in 0..steps {
        match trainer.train_step() {
            Ok(_) => {}
            Err(e) if e.to_string().contains("is not finite") => return None,
            Err(e) => panic!("{recipe}: {e}"),
        }
    }
    let plan = LayerKind::ALL.map(|kind| {
        let layer = Layer { kind, name: "layer".into(), gated: true };
        LayerPlan::new(recipe.of(kind), &layer, recipe.activations, Passes::TRAINING).changes()
    });
    let histories = trainer.histories().unwrap();
    let remembered: usize = histories.iter().flat_map(|history| &history.records).map(Vec::len).sum();
    let copies = LayerKind::ALL.map(|kind| recipe.of(kind).has_one_weight());
    let way = trainer.ledger().unwrap().0.table() + &format!("{plan:?} {remembered} {copies:?}");
    Some((state(&cpu, &mut trainer), way))
}

/// How the operands of all products are stored that a backend is asked for.
fn multiplied(recipe: &Recipe) -> Vec<(Product, [Stored; 2])> {
    let layers = ModelSpec::new(&small("bf16", &["model.layers=1"]).model).recipe_layers();
    let seen = layers.iter().flat_map(|layer| OneLayer { recipe, layer, progress: 0.0 }.products().unwrap());
    seen.map(|made| (made.product, made.operands())).collect()
}

/// Whether two recipes decide the same, written or not. How something is converted is no question where it is made of a plain tensor.
fn is_same(a: &Recipe, b: &Recipe) -> bool {
    LayerKind::ALL.into_iter().all(|kind| {
        let decided = |recipe: &Recipe| {
            let section = *recipe.of(kind);
            let precisions = kind.sites().map(move |site| {
                let origin = section.origin(kind, site).site().map(|site| section.at(site).format);
                match origin {
                    Some(origin) if origin.is_block() => section.at(site),
                    _ if section.at(site).by == By::Cast => section.at(site),
                    _ => Precision { by: By::Transcode, ..section.at(site) },
                }
            });
            (precisions.collect::<Vec<_>>(), section.kept_a())
        };
        decided(a) == decided(b)
    })
}

/// What the transform of a product may be changed to.
const TRANSFORMS: [&str; 4] =
    ["{ len = 32 }", "{ len = 16, signs = \"step\" }", "{ len = 16, signs = 5 }", "\"none\""];

/// Keys of a kind of layer, and under a recipe what each may be changed to.
fn keys(own: &Recipe, kind: LayerKind) -> Vec<(&'static str, Vec<String>)> {
    let of_site = |site: Site| {
        let to = |change| format!("{{ format = {change}");
        (site.key(), changes(&own.of(kind).at(site)).into_iter().map(to).collect())
    };
    let of_product = |product: &Product| (product.rht_key(), TRANSFORMS.map(str::to_owned).to_vec());
    kind.sites().map(of_site).chain(kind.transformed().iter().map(of_product)).collect()
}

/// A recipe by which changed ones are measured: runs of it are made when they are asked for.
struct Base {
    recipe: Recipe,
    runs: [OnceCell<Option<Ended>>; RUNS.len()],
}

impl Base {
    fn new(recipe: Recipe) -> Self {
        Self { recipe, runs: Default::default() }
    }

    /// Whether a recipe that differs in one key leads to other weights or moments; or, by a key of what is kept, sent or remembered, of how
    /// something is made, of what is made of codes, of the length of blocks or of a second copy of a weight, to another way to the same.
    fn decides(&self, changed: &Recipe, (kind, key): (LayerKind, &str), change: &str) -> bool {
        let section = self.recipe.of(kind);
        let of_key = |site: &Site| key.ends_with(&format!(".{}", site.key()));
        let site = kind.sites().find(of_key);
        let made_of = site.and_then(|site| section.origin(kind, site).site());
        let same_elements = site.is_some_and(|site| {
            let [ours, theirs] = [&self.recipe, changed].map(|recipe| recipe.of(kind).at(site).format);
            ours != theirs && ours.spec().element == theirs.spec().element
        });
        // Codes are lifted and decoded exactly, and the range of eight bits is so long that few values differ under a scale for more of them: the
        // same numbers come to products otherwise.
        let multiplies_others = (same_elements
            || made_of.is_some_and(|site| section.at(site).format.is_block()))
            && multiplied(&self.recipe) != multiplied(changed);
        // A history decides where magnitudes fall, which those of weights do later in a run.
        let is_way = ["saved", "dispatch", "combine", "dgrad.w"].iter().any(|product| key.contains(product))
            || change.contains("by =")
            || change.contains("history =");
        RUNS.into_iter().zip(&self.runs).any(|(run, base)| {
            let base = base.get_or_init(|| after(&self.recipe, run));
            match (base, after(changed, run)) {
                (Some((weights, way)), Some((changed, now))) => {
                    changed != *weights || is_way && now != *way || multiplies_others
                }
                (base, changed) => base.is_some() != changed.is_some(),
            }
        })
    }
}

/// Every key of the kinds of layers under every recipe, changed in one field (daily to one value): refused, or in three steps other weights. What is kept for
/// the backward pass, what is sent, what is remembered, and by which conversion something is made, may also be another way to the same numbers.
#[test]
fn every_key_under_every_recipe_decides_or_is_refused() {
    let (mut all, mut decided, mut ignored) = (BTreeSet::new(), BTreeSet::new(), Vec::new());
    // Daily one change of each key that is not refused, another under the next recipe.
    let most = Breadth::of_tests().either(usize::MAX, 1);
    // No shipped recipe has a head whose products may all be transformed.
    let lines = "extends = \"mxfp4-hopper-head8\"\nhead.fprop.w = { format = \"e4m3\", scale = \"rceil\", block = \"line\" }";
    let shipped = recipes().into_iter().map(|name| (format!("extends = \"{name}\""), &LayerKind::ALL[..]));
    for (turn, (base_text, kinds)) in shipped.chain([(lines.to_owned(), &[LayerKind::Head][..])]).enumerate()
    {
        let base = Base::new(Recipe::parse("base", &base_text).unwrap());
        let own = &base.recipe;
        let kinds = kinds.iter().map(|kind| (*kind, keys(own, *kind)));
        let of_kind =
            |(kind, keys): (LayerKind, Vec<_>)| keys.into_iter().map(move |(key, to)| (kind, key, to));
        for (kind, key, mut changes) in kinds.flat_map(of_kind) {
            let key = format!("{}.{key}", kind.name());
            all.insert(key.clone());
            let places = changes.len();
            changes.rotate_left(turn % places.max(1));
            let read = changes.into_iter().filter_map(|change| {
                let text = format!("{base_text}\n{key} = {change}");
                let recipe = Recipe::parse("changed", &text).ok()?;
                (!is_same(&recipe, own)).then_some((change, text, recipe))
            });
            for (change, text, recipe) in read.take(most) {
                match base.decides(&recipe, (kind, &key), &change) {
                    true => drop(decided.insert(key.clone())),
                    false => ignored.push(text),
                }
            }
        }
    }
    assert!(ignored.is_empty(), "have no effect: {ignored:#?}");
    let undecided: Vec<&String> = all.difference(&decided).collect();
    assert!(undecided.is_empty(), "refused whatever they say: {undecided:?}");
}

/// A recipe with one key as another recipe has it.
fn with_key(own: &Recipe, kind: LayerKind, key: &str, change: &str) -> Option<Recipe> {
    let head = format!("[{}]", kind.name());
    let line = |line: &str, table: &str| match table == head && line.starts_with(&format!("{key} = ")) {
        true => format!("{key} = {change}"),
        false => line.to_owned(),
    };
    let mut table = String::new();
    let text = own.to_toml();
    let lines = text.lines().map(|at| {
        if at.starts_with('[') {
            table = at.to_owned();
        }
        line(at, &table)
    });
    Recipe::parse("changed", &(lines.collect::<Vec<_>>().join("\n") + "\n")).ok()
}

/// The same of random recipes: two hundred, daily fifty, of one that reads and one that differs from it in a key.
#[test]
fn random_changes_of_random_recipes_decide() {
    let all = Breadth::of_tests().either(200, 50);
    let mut dice = Dice::new(43);
    let config = small("bf16", SMALLEST);
    let layers = ModelSpec::new(&config.model).recipe_layers();
    let (mut number, mut refused, mut same, mut ignored) = (0, 0, 0, Vec::new());
    while number < all {
        let text = dice.recipe(&layers);
        // A change to what an override says otherwise decides nothing; the overrides themselves are refused then.
        let Ok(own) = Recipe::parse("random", &text) else { continue };
        if !own.overrides.is_empty() || check_recipe(&config, &own).is_err() {
            continue;
        }
        let base = Base::new(own);
        let kind = dice.of(&LayerKind::ALL);
        let of_kind = keys(&base.recipe, kind);
        let (key, changes) = &of_kind[dice.below(of_kind.len())];
        let change = &changes[dice.below(changes.len())];
        let Some(changed) = with_key(&base.recipe, kind, key, change) else {
            refused += 1;
            continue;
        };
        if is_same(&changed, &base.recipe) {
            same += 1;
            continue;
        }
        if check_recipe(&config, &changed).is_err() {
            refused += 1;
            continue;
        }
        // Two lengths that no width is a multiple of are shortened to one.
        let is_shortened = |recipe: &Recipe| {
            let shortened = for_run(&config, recipe.clone()).shortened(&layers);
            shortened.iter().any(|shortened| shortened.kind == kind)
        };
        if key.ends_with("rht") && (is_shortened(&base.recipe) || is_shortened(&changed)) {
            same += 1;
            continue;
        }
        // A run that ends in its first step shows nothing.
        if base.runs[0].get_or_init(|| after(&base.recipe, RUNS[0])).is_none() {
            continue;
        }
        number += 1;
        if !base.decides(&changed, (kind, &format!("{}.{key}", kind.name())), change) {
            ignored.push(format!("[{}]\n{key} = {change}\nin {}", kind.name(), base.recipe.to_toml()));
        }
    }
    println!("{number} changes decide, {refused} were refused, {same} changed nothing that was not so");
    assert!(ignored.is_empty(), "{} have no effect: {}", ignored.len(), ignored.join("\n"));
}
