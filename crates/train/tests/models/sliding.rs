//! Sliding windows: plain attention in F64 under a mask written from the definition, which tokens reach which through a model's layers, and
//! which layers have a window.

use crate::rig;

use nibble_core::{DType, Recipe, Tensor};
use nibble_cpu::Cpu;
use nibble_testkit::Recorder;
use nibble_train::config::{LayerAttention, ModelConfig, QkNorm, RopeScaling};
use nibble_train::layers::{GroupedQuery, Layer, rope_table};
use nibble_train::model::{Attention, Decoder};
use nibble_train::shards::Sight;
use nibble_train::spec::{GroupedQueryShape, GroupedQuerySpec, Rope};
use nibble_train::trainer::Trainer;
use rig::documents::Packed;
use rig::{SOLO, cx, matrix, normals, small};

const THETA: f64 = 100.0;

/// Σ over columns of a row of x times each row of w.
fn times(x: &[f64], w: &[f64]) -> Vec<f64> {
    w.chunks(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
}

/// RoPE of a head at a position: elements i and i + half are turned together.
fn turned(head: &[f64], position: usize) -> Vec<f64> {
    let half = head.len() / 2;
    let angle = |i: usize| position as f64 * THETA.powf(-(i as f64) / half as f64);
    let of = |e: usize| {
        let (sin, cos) = angle(e % half).sin_cos();
        if e < half { head[e] * cos - head[e + half] * sin } else { head[e] * cos + head[e - half] * sin }
    };
    (0..head.len()).map(of).collect()
}

/// Whether query i sees key j of the same document.
type Sees<'a> = &'a dyn Fn(usize, usize) -> bool;

/// What the layer gives for one sequence, from the formula: q, k, v, o weights, and sinks or none.
fn reference(shape: &GroupedQueryShape, x: &[f64], weights: &[Vec<f64>], sees: Sees<'_>) -> Vec<f64> {
    let GroupedQueryShape { d_model, heads, kv_heads, head_dim, value_dim, .. } = *shape;
    let rows: Vec<&[f64]> = x.chunks(d_model).collect();
    let projected = |w: usize| -> Vec<Vec<f64>> { rows.iter().map(|row| times(row, &weights[w])).collect() };
    let (q, k, v) = (projected(0), projected(1), projected(2));
    let mut y = Vec::new();
    for i in 0..rows.len() {
        let mut out = vec![0.0; heads * value_dim];
        for head in 0..heads {
            let kv = head / (heads / kv_heads);
            let query = turned(&q[i][head * head_dim..][..head_dim], i);
            let score = |j: usize| {
                let key = turned(&k[j][kv * head_dim..][..head_dim], j);
                query.iter().zip(&key).map(|(q, k)| q * k).sum::<f64>() / (head_dim as f64).sqrt()
            };
            let seen: Vec<(usize, f64)> =
                (0..rows.len()).filter(|&j| sees(i, j)).map(|j| (j, score(j).exp())).collect();
            let sink = weights.get(4).map_or(0.0, |sinks| sinks[head].exp());
            let sum = seen.iter().map(|(_, weight)| weight).sum::<f64>() + sink;
            for (j, weight) in seen {
                let value = &v[j][kv * value_dim..][..value_dim];
                let to = out[head * value_dim..].iter_mut().zip(value);
                to.for_each(|(out, x)| *out += weight / sum * x);
            }
        }
        y.extend(times(&out, &weights[3]));
    }
    y
}

#[test]
fn a_layer_is_attention_under_the_mask_of_the_definition() {
    const TOKENS: usize = 37;
    let (cpu, recipe) = (Cpu::new(2).unwrap(), Recipe::builtin("f32").unwrap());
    // Beginnings of documents in a sequence.
    let apart: Vec<i32> =
        (0..TOKENS as i32).map(|i| [0, 11, 12][usize::from(i >= 11) + usize::from(i >= 12)]).collect();
    for (window, sinks, starts) in [
        (None, false, None),
        (Some(1), true, None),
        (Some(5), false, None),
        (Some(18), true, None),
        (Some(TOKENS), false, None),
        (Some(4), false, Some(&apart)),
        (None, true, Some(&apart)),
    ] {
        let what = format!("window {window:?}, sinks {sinks}, documents {}", starts.is_some());
        let shape = GroupedQueryShape {
            d_model: 16,
            heads: 4,
            kv_heads: 2,
            head_dim: 8,
            value_dim: 8,
            qk_norm: QkNorm::None,
            qkv_bias: false,
            o_bias: false,
            causal: true,
            sinks,
            window,
        };
        let model = ModelConfig { sliding_window: window.unwrap_or(0), ..ModelConfig::default() };
        let on_device = starts.map(|starts| nibble_core::Backend::upload(&cpu, starts).unwrap());
        let sight = Sight::find(&cpu, &model, on_device.as_ref(), (TOKENS, TOKENS)).unwrap();
        let cx = cx(&cpu, &recipe, 1, TOKENS).with_sight(sight);
        let rope = Rope { dim: 8, theta: THETA, scaling: RopeScaling::default() };
        let table = rope_table(&cpu, TOKENS, rope).unwrap();
        let spec = GroupedQuerySpec::new("attention", shape, 1e-5, [0.3; 2]);
        let mut layer = GroupedQuery::new(&cx, &spec, table).unwrap();
        if let Some(sinks) = &mut layer.sinks {
            sinks.master = Tensor::from_f32(&cpu, &normals("sinks", 4), 1, 4).unwrap();
        }
        let weights: Vec<Vec<f64>> = layer
            .params()
            .into_iter()
            .map(|param| param.master.to_f32_vec(&cpu).unwrap().into_iter().map(f64::from).collect())
            .collect();
        layer.prepare(&cx).unwrap();
        let x = matrix(&cpu, "x", (TOKENS, 16), DType::F32);
        let wide: Vec<f64> = x.to_f32_vec(&cpu).unwrap().into_iter().map(f64::from).collect();
        let (y, _) = layer.forward(&cx, x).unwrap();
        let sees = |i: usize, j: usize| {
            let same = starts.is_none_or(|starts| starts[i] == starts[j]);
            // Positions restart with a document; a difference of positions does not notice.
            j <= i && same && window.is_none_or(|window| i - j < window)
        };
        let want = reference(&shape, &wide, &weights, &sees);
        let got = y.to_f32_vec(&cpu).unwrap();
        let error: f64 = got.iter().zip(&want).map(|(got, want)| (f64::from(*got) - want).powi(2)).sum();
        let size: f64 = want.iter().map(|want| want * want).sum();
        assert!((error / size).sqrt() < 2e-6, "{what}: {:e}", (error / size).sqrt());
    }
}

/// A changed token changes the losses of the tokens that its layers' windows carry it to, and of no other.
#[test]
fn a_token_reaches_as_far_as_the_windows_of_all_layers() {
    const TOKENS: usize = 64;
    let (cpu, recipe) = (Cpu::new(2).unwrap(), Recipe::builtin("f32").unwrap());
    let packed = Packed::one(&[TOKENS]);
    let changed = TOKENS / 2;
    let pattern = |kinds: &str| format!("model.sliding_window_layers=[{kinds}]");
    let (even, odd) = (pattern("\"sliding\",\"full\""), pattern("\"full\",\"sliding\""));
    for (set, reach) in [
        (vec!["model.sliding_window=5"], Some(2 * 4)),
        (vec!["model.sliding_window=5", "model.layers=3"], Some(3 * 4)),
        (vec!["model.sliding_window=1"], Some(0)),
        (vec!["model.sliding_window=5", "model.layers=1"], Some(4)),
        (vec!["model.sliding_window=5", &even], None),
        (vec!["model.sliding_window=5", &odd], None),
        (vec!["model.sliding_window=64"], None),
        (vec![], None),
    ] {
        let model = packed.model(&small("f32", &set).model);
        let [before, after] =
            [packed.ids(), packed.changed(0)].map(|ids| packed.pass(&cpu, &recipe, &model, &ids).nats);
        // The changed token is the target of the one before it.
        let last = reach.map_or(TOKENS - 2, |reach| changed + reach);
        for i in 0..TOKENS - 1 {
            let differs = (changed - 1..=last).contains(&i);
            assert_eq!(before[i] != after[i], differs, "{set:?}: token {i} of one changed at {changed}");
        }
    }
}

/// A step finds the windows of each kind of layer that it has, once for all layers; without documents and windows, none.
#[test]
fn windows_are_found_once_for_each_kind_of_layer() {
    const BOTH: &str = "model.sliding_window_layers=[\"sliding\",\"full\"]";
    const LAYERS: &str = "model.layers=4";
    let apart = "data.document_mask=true";
    for (set, expected) in [
        (&[LAYERS][..], 0),
        (&[LAYERS, apart], 1),
        (&[LAYERS, "model.sliding_window=9"], 1),
        (&[LAYERS, "model.sliding_window=9", BOTH], 1),
        (&[LAYERS, "model.sliding_window=9", apart], 1),
        (&[LAYERS, "model.sliding_window=9", BOTH, apart], 2),
        // Windows of whole sequences hide nothing.
        (&[LAYERS, "model.sliding_window=128", BOTH], 0),
        (&[LAYERS, "model.sliding_window=128", apart], 1),
    ] {
        let b = Recorder::eager(Cpu::new(1).unwrap());
        let model =
            small("bf16", &set.iter().copied().filter(|change| *change != apart).collect::<Vec<_>>()).model;
        let starts = vec![0; 256];
        let starts = set.contains(&apart).then(|| nibble_core::Backend::upload(&b, &starts).unwrap());
        b.watch();
        Sight::find(&b, &model, starts.as_ref(), (256, 128)).unwrap();
        let found = b.take_log().iter().filter(|event| event.op == "find_windows").count();
        assert_eq!(found, expected, "{set:?}");
    }
}

/// Documents stay apart under windows, in layers of both kinds.
#[test]
fn documents_stay_apart_under_windows() {
    let (cpu, recipe) = (Cpu::new(2).unwrap(), Recipe::builtin("mxfp4-hopper").unwrap());
    let packed = Packed { lengths: vec![50, 78, 128, 1, 127], seq_len: 128 };
    for layers in ["", "\"full\",\"sliding\""] {
        let pattern = format!("model.sliding_window_layers=[{layers}]");
        let model = small("mxfp4-hopper", &["model.sliding_window=20", &pattern]).model;
        (0..packed.lengths.len()).for_each(|changed| packed.assert_apart(&cpu, &recipe, &model, changed));
    }
}

#[test]
fn layers_have_the_windows_of_the_pattern() {
    use LayerAttention::{Full, Sliding};
    let cpu = Cpu::new(1).unwrap();
    let set = ["model.layers=5", "model.sliding_window=7"];
    let base = small("f32", &set).model;
    for pattern in [&[][..], &[Sliding, Full], &[Full, Full, Sliding]] {
        let model = ModelConfig { sliding_window_layers: pattern.to_vec(), vocab_size: 16, ..base.clone() };
        let mesh = nibble_core::Mesh::new(&SOLO);
        let decoder = Decoder::new(&cpu, mesh, &Recipe::builtin("f32").unwrap(), &model, 8, 1).unwrap();
        let windows: Vec<Option<usize>> = decoder
            .blocks
            .iter()
            .map(|block| match &block.attn {
                Attention::GroupedQuery(layer) => layer.shape.window,
                Attention::Latent(layer) => layer.shape.window,
            })
            .collect();
        let slides = |layer: usize| pattern.is_empty() || pattern[layer % pattern.len()] == Sliding;
        let want: Vec<Option<usize>> = (0..5).map(|layer| slides(layer).then_some(7)).collect();
        assert_eq!(windows, want, "{pattern:?}");
    }
}

/// Past many tiles of keys, and from a prompt longer than the window: a cache's logits are those of all tokens at once, to the bit.
#[test]
fn a_cache_changes_no_bit_under_long_windows() {
    let cpu = Cpu::new(2).unwrap();
    for window in ["model.sliding_window=17", "model.sliding_window=33"] {
        let config = small("bf16", &[window, "model.sliding_window_layers=[\"sliding\",\"full\"]"]);
        let mut trainer = Trainer::new(&cpu, &SOLO, &config).unwrap();
        trainer.train_step().unwrap();
        let vocab = config.model.vocab_size.max(64) as i32;
        let text: Vec<i32> = (0..70).map(|i| (i * i * 7 + 3 * i) % vocab).collect();
        let bits = |logits: Vec<f32>| logits.into_iter().map(|x| (x + 0.0).to_bits()).collect::<Vec<_>>();
        let ends = || [3, 4, 40, 41, 42, 50, 51, 52, 53, 70].into_iter();
        let whole: Vec<_> = ends().map(|end| bits(trainer.next_logits(&text[..end]).unwrap())).collect();
        let mut decoding = trainer.decoding().unwrap();
        for (end, whole) in ends().zip(&whole) {
            assert!(bits(decoding.next_logits(&text[..end]).unwrap()) == *whole, "{window}: {end} tokens");
        }
    }
}
