//! Multi-head latent attention: the numbers of `transformers`, the same bits whatever is made again and on any number of ranks, and what is kept.

use crate::rig;

use nibble_core::{Recipe, Tensor};
use nibble_cpu::Cpu;
use nibble_train::config::{Config, RopeScaling, RopeScalingKind};
use nibble_train::layers::{Latent, Layer, rope_table};
use nibble_train::ledger::{Ledger, Saved};
use nibble_train::param::Param;
use nibble_train::recompute::{Recompute, Scope};
use nibble_train::spec::{LatentShape, LatentSpec, Rope};
use nibble_train::trainer::Trainer;
use rig::{LATENT, LATENT_STRAIGHT, SOLO, cx, small, train};

/// Of a tensor its length and its products with two directions, as `benchmarks/peers/latent_attention.py` prints them: `transformers` 5.24 in F64.
type Told = (&'static str, f64, [f64; 2]);

/// `DeepseekV3Attention`.
const V3: [Told; 10] = [
    ("out", 7.287050577586508, [0.1699165906575878, 0.7986328320579006]),
    ("x", 4.833822580974558, [2.6056893545365263, 0.3912017181910794]),
    ("q_a_proj", 9.321721770872003, [-2.432172990350601, -5.535256978620995]),
    ("q_a_layernorm", 1.2366705933059527, [0.9867612267655689, -0.2517342208183138]),
    ("q_b_proj", 7.577630026538232, [3.824857227607781, 4.862837614668615]),
    ("kv_a_proj", 20.017228831118537, [20.481539171713894, -6.588521352944183]),
    ("k_rope_proj", 3.3097978891350848, [-0.2691897164987854, 0.4449873702010937]),
    ("kv_a_layernorm", 3.885635149939781, [2.017269291189359, -6.9498744664997805]),
    ("kv_b_proj", 27.717375711934814, [5.572258148333516, 21.740388126577695]),
    ("o_proj", 28.924815343755608, [-10.568415579457696, 17.2578207956977]),
];

/// `DeepseekV2Attention` without a latent of queries, as V2-Lite has it.
const V2: [Told; 8] = [
    ("out", 7.0540298590939905, [-1.000193713647601, 5.506815413776919]),
    ("x", 5.612948121823507, [3.412165025359568, -4.255827051194931]),
    ("q_proj", 4.097118019017502, [2.6475136598029883, 0.18642028378081776]),
    ("kv_a_proj", 23.72269366922026, [13.669796239162777, -9.74668242254873]),
    ("k_rope_proj", 1.5456406704807, [1.522282426289726, -0.39468351364363896]),
    ("kv_a_layernorm", 4.3750397063852855, [4.271112815323326, -1.9882916603517498]),
    ("kv_b_proj", 28.59657761721146, [-32.984547249531836, 7.384840048682781]),
    ("o_proj", 30.76732277257267, [8.395178626064167, -34.84082530340427]),
];

/// Numbers from -1 to 1 with twelve bits each, a function of their index; the script has the same.
fn values(tag: u32, len: usize) -> Vec<f32> {
    let one = |i: u32| {
        let mut x = i.wrapping_mul(2_654_435_761).wrapping_add(tag.wrapping_mul(0x9E37_79B1));
        x = (x ^ x >> 16).wrapping_mul(0x85EB_CA6B);
        x = (x ^ x >> 13).wrapping_mul(0xC2B2_AE35);
        x ^= x >> 16;
        ((x >> 20) as f32 - 2048.0) / 2048.0
    };
    (0..len as u32).map(one).collect()
}

/// Lengths and products are those of `transformers`, as exactly as single precision has them.
fn compare(got: &Tensor<Cpu>, cpu: &Cpu, (name, length, products): Told) {
    let got: Vec<f64> = got.to_f32_vec(cpu).unwrap().into_iter().map(f64::from).collect();
    let found = got.iter().map(|x| x * x).sum::<f64>().sqrt();
    assert!((found / length - 1.0).abs() < 2e-6, "{name}: length {found}, expected {length}");
    for (i, want) in products.into_iter().enumerate() {
        let direction = values(200 + i as u32, got.len());
        let found: f64 = got.iter().zip(direction).map(|(x, r)| x * f64::from(r)).sum();
        assert!((found - want).abs() < 3e-6 * length, "{name}: product {i} is {found}, expected {want}");
    }
}

fn as_transformers_has_it(q_rank: usize, mscale: [f64; 2], told: &[Told]) {
    const SEQ_LEN: usize = 7;
    const D: usize = 32;
    let (cpu, recipe) = (Cpu::new(1).unwrap(), Recipe::builtin("f32").unwrap());
    let cx = cx(&cpu, &recipe, 2, SEQ_LEN);
    let (heads, nope_dim, rope_dim, value_dim, kv_rank) = (2, 16, 8, 12, 24);
    let shape =
        LatentShape { d_model: D, heads, nope_dim, rope_dim, value_dim, q_rank, kv_rank, window: None };
    let scaling = RopeScaling {
        kind: RopeScalingKind::Yarn,
        factor: 4.0,
        original_positions: 64,
        beta_fast: 8.0,
        mscale: mscale[0],
        mscale_all_dim: mscale[1],
        ..RopeScaling::default()
    };
    let rope = Rope { dim: 8, theta: 100.0, scaling };
    let spec = LatentSpec::new("self_attn", shape, rope, [0.3; 2]);
    let mut layer = Latent::new(&cx, &spec, rope_table(&cpu, SEQ_LEN, rope).unwrap()).unwrap();
    for (tag, param) in (1..).zip(layer.params()) {
        let (rows, cols) = param.master.shape();
        let is_norm = param.name.contains("layernorm");
        let of = |x: f32| if is_norm { 1.0 + x / 4.0 } else { x / 4.0 };
        let values: Vec<f32> = values(tag, rows * cols).into_iter().map(of).collect();
        param.master = Tensor::from_f32(&cpu, &values, rows, cols).unwrap();
    }
    layer.prepare(&cx).unwrap();
    let tensor = |tag| Tensor::from_f32(&cpu, &values(tag, 2 * SEQ_LEN * D), 2 * SEQ_LEN, D).unwrap();
    let (out, saved) = layer.forward(&cx, tensor(100)).unwrap();
    let dx = layer.backward(&cx, saved, tensor(101)).unwrap();
    compare(&out, &cpu, told[0]);
    compare(&dx, &cpu, told[1]);
    let params: Vec<&mut Param<Cpu>> = layer.params();
    assert_eq!(params.len(), told.len() - 2);
    for (param, told) in params.into_iter().zip(&told[2..]) {
        assert_eq!(param.name, format!("self_attn.{}.weight", told.0));
        param.reduce_gradient(&cx).unwrap();
        compare(param.reduced().unwrap(), &cpu, *told);
    }
}

#[test]
fn outputs_and_gradients_are_those_of_deepseek_v3() {
    as_transformers_has_it(20, [1.0, 1.0], &V3);
}

#[test]
fn outputs_and_gradients_are_those_of_deepseek_v2_without_a_latent_of_queries() {
    as_transformers_has_it(0, [1.0, 0.707], &V2);
}

/// With and without a latent of queries.
const KINDS: [&[&str]; 2] = [&LATENT, &LATENT_STRAIGHT];

fn of(kind: &[&str], recipe: &str, changes: &[&str]) -> Config {
    small(recipe, &[kind, changes].concat())
}

fn cpu() -> Cpu {
    Cpu::new(1).unwrap()
}

/// One, two and four ranks, under every recipe, and whatever the backward pass makes again.
#[test]
fn ranks_and_recomputation_keep_the_bits_under_every_recipe() {
    use Scope::{Attention, MlaUp, MlpUp, Norms};
    let scopes: [&[Scope]; 6] = [&[], &[MlaUp], &[Norms, MlaUp], &[Attention], &[MlaUp, MlpUp], &Scope::ALL];
    for (i, recipe) in rig::some_recipes(0).into_iter().enumerate() {
        let both = ["bf16", "mxfp4-hopper"].contains(&recipe);
        for kind in KINDS.into_iter().enumerate().filter(|(k, _)| both || i % 2 == *k).map(|(_, kind)| kind) {
            let config = of(kind, recipe, &[]);
            let one = train(&config, 1, 2, cpu);
            assert!(one.losses.iter().all(|loss| loss.is_finite()));
            for world in [2, 4] {
                one.assert_same(&train(&config, world, 2, cpu), &format!("{recipe}, {world} ranks"));
            }
            for scopes in scopes {
                let mut config = config.clone();
                config.train.recompute = Recompute::of(scopes);
                one.assert_same(&train(&config, 1, 2, cpu), &format!("{recipe}, {scopes:?}"));
            }
        }
    }
}

/// What a forward pass keeps, of all layers.
fn kept(config: &Config) -> Ledger {
    let cpu = cpu();
    let mut trainer = Trainer::new(&cpu, &SOLO, config).unwrap();
    let (ledger, live) = trainer.ledger().unwrap();
    assert_eq!(ledger.bytes(), live, "{}", ledger.table());
    ledger
}

/// With a latent of queries Q, K and V go, and the shared key comes: h · (2 · (n + r) + u) − r numbers of BF16 a token. Without one Q stays.
#[test]
fn heads_that_are_made_again_take_no_memory() {
    const TOKENS: usize = 512;
    let default = "train.recompute=['norms', 'swiglu']";
    let with_heads = "train.recompute=['norms', 'swiglu', 'mla_up']";
    for recipe in ["bf16", "fp8-flow", "mxfp4-hopper"] {
        for kind in KINDS {
            let bytes = |scopes: &str| kept(&of(kind, recipe, &[scopes])).bytes();
            let model = of(kind, recipe, &[]).model;
            let (keys, values) = (model.heads * model.head_dim, model.heads * model.value_head_dim());
            let queries = if model.q_rank > 0 { keys } else { 0 };
            let numbers = queries + keys + values - model.rope_dim;
            assert_eq!(
                bytes(default) - bytes(with_heads),
                model.layers * TOKENS * numbers * 2,
                "{recipe}, {kind:?}"
            );
            // Normed latents are kept unless norms are made again.
            assert!(bytes("train.recompute=['swiglu']") > bytes(default));
        }
    }
}

/// What is listed of one layer, in BF16.
#[test]
fn the_ledger_has_latents_heads_and_what_products_read() {
    let (cpu, recipe) = (cpu(), Recipe::builtin("bf16").unwrap());
    let config = of(&LATENT, "bf16", &[]);
    let cx = cx(&cpu, &recipe, 4, 128);
    let spec = nibble_train::spec::ModelSpec::new(&config.model);
    let rope = rope_table(&cpu, 128, spec.rope).unwrap();
    let block = spec.blocks().next().unwrap();
    let mut attention = nibble_train::model::Attention::new(&cx, &block.attn, rope).unwrap();
    let mut listed = |scopes: &[Scope]| {
        attention.recompute(scopes);
        attention.prepare(&cx).unwrap();
        let x = rig::matrix(&cpu, "x", (512, config.model.d_model), recipe.activations);
        let (_, saved) = attention.forward(&cx, x).unwrap();
        let mut ledger = Ledger::default();
        saved.ledger(&mut ledger);
        let entries = ledger.entries.into_iter();
        let name = |layer: &str| layer.rsplit('.').next().unwrap_or_default().to_owned();
        entries.map(|entry| (name(&entry.layer), entry.kind, entry.bytes / 512)).collect::<Vec<_>>()
    };
    let at = |layer: &str, kind, bytes| (layer.to_owned(), kind, bytes);
    let (d, p, c, q, v) = (2 * 64, 2 * 40, 2 * 48, 2 * 64, 2 * 48);
    let input = vec![at("self_attn", "x", d); 3];
    let of_latent = |name: &str, rank, normed: bool| {
        let mut entries = vec![
            at(&format!("{name}_a_layernorm"), "x", rank),
            at(&format!("{name}_a_layernorm"), "inv_rms", 4),
        ];
        entries.extend(normed.then(|| at(&format!("{name}_b_proj"), "x", rank)));
        entries
    };
    let latents = |normed| [of_latent("q", p, normed), of_latent("kv", c, normed)].concat();
    let heads = ["q", "k"].map(|kind| at("self_attn", kind, q));
    let values = [at("self_attn", "v", v)];
    let out = [at("self_attn", "out", v), at("self_attn", "lse", 8), at("o_proj", "x", v)];
    let all = |normed| [&input[..], &latents(normed), &heads, &values, &out].concat();
    assert_eq!(listed(&[]), all(true));
    assert_eq!(listed(&[Scope::Norms]), all(false));
    let shared = [at("self_attn", "shared_key", 2 * 16)];
    assert_eq!(listed(&[Scope::MlaUp]), [&input[..], &latents(false), &shared, &out].concat());
}
