//! Lifts inside of products: a step that measures quantization counts what they round, at sites of their own. The counts are compared with ones
//! computed here from the operands' codes and scales, by the definition of E4M3 alone.

use crate::rig;

use nibble_core::formats::{BlockAxis, Format};
use nibble_core::ops::Cast;
use nibble_core::recipe::{self, LayerKind};
use nibble_core::{Backend, BlockScaled, DType, MeshShape, Operand, Recipe, Tensor};
use nibble_cpu::Cpu;
use nibble_train::config::Config;
use nibble_train::convert::LayerName;
use nibble_train::cx::Cx;
use nibble_train::layers::{Layer, Linear};
use nibble_train::metrics::{LayerMetrics, Metrics, SiteMetrics};
use nibble_train::param::{Param, Placement};
use nibble_train::record::{LayerSample, Layout};
use nibble_train::spec::ModelSpec;
use nibble_train::trainer::Trainer;
use rig::{SOLO, cx, normals, small, state, with_recipe};
use std::collections::BTreeMap;

/// Values of a block, of a lifted line, and lines of a lifted square.
const BLOCK: usize = 32;
const LIFTED: usize = 128;
/// A whole lifted block and a quarter of the next.
const WIDTH: usize = 160;
/// Two shards.
const TOKENS: usize = 256;

/// The magnitude of a code with two exponent bits of bias 1, and so many bits after the point.
fn magnitude(code: u32, mantissa_bits: u32) -> f64 {
    let (exponent, mantissa) = (code >> mantissa_bits & 3, code & ((1 << mantissa_bits) - 1));
    let fraction = f64::from(mantissa) / f64::from(1 << mantissa_bits);
    if exponent == 0 { fraction } else { (1.0 + fraction) * 2f64.powi(exponent as i32 - 1) }
}

/// Whether E4M3 has this magnitude.
fn is_e4m3(x: f64) -> bool {
    let finite = (0..16).flat_map(|e| (0..8).map(move |m| (e, m))).filter(|at| *at != (15, 7));
    let of = |(e, m): (i32, i32)| match e {
        0 => f64::from(m) / 8.0 * 2f64.powi(-6),
        e => (1.0 + f64::from(m) / 8.0) * 2f64.powi(e - 7),
    };
    finite.map(of).any(|y| y == x)
}

/// Of an operand: the blocks with a code other than zero, and those in which a value changes when `across` lines of 128 values share one scale.
/// The scale is the smallest power of two under which the largest number of the format fits into E4M3 beside the largest scale.
fn expected(cpu: &Cpu, x: &BlockScaled<Cpu>, across: usize) -> [u64; 2] {
    let (bits, mantissa_bits, largest) = match x.format {
        Format::Mxfp4 => (4, 1, 6.0),
        Format::Mxfp6E2m3 => (6, 3, 7.5),
        other => panic!("{other} is not lifted here"),
    };
    let (lines, len) = if x.axis == BlockAxis::Col { (x.cols, x.rows) } else { (x.rows, x.cols) };
    let (codes, line_bytes) = (cpu.download(&x.codes).unwrap(), (len * bits).div_ceil(8));
    let scales: Vec<i32> = x.records(cpu).unwrap().into_iter().map(|scale| scale.0 as i32 - 127).collect();
    let blocks = len.div_ceil(BLOCK);
    let value = |line: usize, i: usize| {
        let bit = |j: usize| codes[line * line_bytes + j / 8] >> (j % 8) & 1;
        let code = (0..bits).fold(0, |code, j| code | u32::from(bit(i * bits + j)) << j);
        magnitude(code & ((1 << (bits - 1)) - 1), mantissa_bits)
    };
    let headroom = (0..).take_while(|h| largest * 2f64.powi(*h) <= 448.0).last().unwrap();
    let mut found = [0; 2];
    for line in 0..lines {
        for block in 0..blocks {
            let beside = line / across * across..lines.min(line / across * across + across);
            let first = block / (LIFTED / BLOCK) * (LIFTED / BLOCK);
            let shared =
                beside.flat_map(|l| (first..blocks.min(first + LIFTED / BLOCK)).map(move |b| (l, b)));
            let most = shared.map(|(l, b)| scales[l * blocks + b]).max().unwrap();
            let shift = 2f64.powi(scales[line * blocks + block] - (most - headroom).max(-127));
            let values = (block * BLOCK..len.min((block + 1) * BLOCK)).map(|i| value(line, i));
            let values: Vec<f64> = values.collect();
            found[0] += u64::from(values.iter().any(|x| *x != 0.0));
            found[1] += u64::from(values.iter().any(|x| !is_e4m3(x * shift)));
        }
    }
    found
}

/// Normal numbers, of which each part of 64 × 32 (as many rows as a transform takes together) is by up to `octaves` powers of two smaller than others.
fn uneven(cpu: &Cpu, name: &str, (rows, cols): (usize, usize), octaves: usize) -> Tensor<Cpu> {
    let below = |i: usize| (i / cols / (2 * BLOCK) * 17 + i % cols / BLOCK * 7) % (octaves + 1);
    let values = normals(name, rows * cols).into_iter().enumerate();
    let values: Vec<f32> = values.map(|(i, x)| x * 2f32.powi(-(below(i) as i32))).collect();
    Tensor::from_f32(cpu, &values, rows, cols).unwrap()
}

/// What a layer that measures counts of its lifts, by site.
fn counted(cpu: &Cpu, cx: &Cx<'_, Cpu>) -> BTreeMap<String, [u64; 2]> {
    let mut counted = cx.counted.borrow_mut();
    let sites: Vec<String> = counted.sites().iter().map(ToString::to_string).collect();
    let layout = Layout { sites: sites.len(), ..Layout::of(&ModelSpec::new(&small("bf16", &[]).model)) };
    let mut found = BTreeMap::new();
    for waiting in counted.take(&layout).unwrap() {
        let counts = cpu.download(&waiting.counts.0).unwrap();
        let name = &sites[waiting.site];
        if ["fprop", "dgrad", "wgrad"].iter().any(|product| name.ends_with(product)) {
            assert!(found.insert(name.clone(), [counts[0], counts[1]]).is_none(), "{name} counts once");
        }
    }
    found
}

#[test]
fn a_layer_counts_what_its_products_round() {
    let cpu = Cpu::new(1).unwrap();
    for (name, format) in [("mxfp4", "mxfp4"), ("mxfp6", "mxfp6-e2m3")] {
        for octaves in [0, 25] {
            let recipe = Recipe::builtin(name).unwrap();
            let cx = Cx { measures: Some(LayerSample::ALL), ..cx(&cpu, &recipe, 2, TOKENS / 2) };
            let weight = Param::new("w", uneven(&cpu, "w", (WIDTH, WIDTH), octaves), Placement::Replicated);
            let layer = recipe::Layer::new(LayerKind::Linear, "w");
            let mut layer = Linear { weight, bias: None, layer, linear: "w".into(), out: DType::Bf16 };
            layer.prepare(&cx).unwrap();
            let [x, dy] = ["x", "dy"].map(|name| {
                let x = uneven(&cpu, name, (TOKENS, WIDTH), octaves);
                Cast { x: &x, dtype: DType::Bf16 }.run(&cpu).unwrap()
            });
            let (_, saved) = layer.forward(&cx, x.clone()).unwrap();
            let x_cols = saved.x.clone();
            layer.backward(&cx, saved, dy.clone()).unwrap();
            let found = counted(&cpu, &cx);

            let plan = layer.plan(&cx);
            let (x_rows, _) = layer.input(&cx, &x).unwrap();
            let names = LayerName::new("w");
            let (dy_rows, dy_cols) = cx
                .convert(names, &Operand::Plain(dy), &plan.linear().unwrap().dy, Some(&cx.shards.groups))
                .unwrap();
            let block = |x: &Operand<Cpu>| x.block("test").unwrap().clone();
            let wt = layer.weight.wt(&cx).unwrap().into_owned();
            let operands = [
                ("x", "row.fprop", block(&x_rows), 1),
                ("w", "tile.fprop", block(layer.weight.w().unwrap()), LIFTED),
                ("dy", "row.dgrad", block(&dy_rows), 1),
                ("wt", "tile.dgrad", block(&wt), LIFTED),
                ("dy", "col.wgrad", block(&dy_cols), 1),
                ("x", "col.wgrad", block(&x_cols), 1),
            ];
            let want: BTreeMap<_, _> = operands
                .iter()
                .map(|(tensor, product, x, across)| {
                    (format!("w.{tensor}.{format}→{product}"), expected(&cpu, x, *across))
                })
                .collect();
            assert_eq!(found, want, "{name}");
            for (site, [non_zero, inexact]) in &found {
                assert!(*non_zero > 100 && inexact < non_zero, "{site}: {inexact} of {non_zero}");
                assert_eq!(*inexact > 0, octaves > 0, "{site}: {inexact} of {non_zero}");
            }
        }
    }
}

/// What each step says, also of its layers, and the weights at the end.
type Told = (Vec<(Metrics, LayerMetrics)>, Vec<(String, Vec<u32>)>);

/// A run of so many steps.
fn run(config: &Config, steps: usize) -> Told {
    let b = Cpu::new(2).unwrap();
    let mut trainer = Trainer::new(&b, &SOLO, config).unwrap();
    let said = (0..steps)
        .map(|_| {
            let metrics = trainer.train_step().unwrap().without_times();
            (metrics, trainer.take_layers().unwrap_or_default())
        })
        .collect();
    (said, state(&b, &mut trainer))
}

/// The fraction is there in the steps that measure, and is the one of the layers' counts.
#[test]
fn the_fraction_is_that_of_the_sites() {
    for recipe in ["mxfp4", "mxfp6"] {
        let config = small(recipe, &["train.quantization_every=2", "train.grad_accum=2"]);
        for (step, (metrics, layers)) in run(&config, 4).0.into_iter().enumerate() {
            let lifts = layers.sites.iter().filter(|site| site.conversion.contains(" in "));
            let sum = |of: fn(&SiteMetrics) -> u64| lifts.clone().map(of).sum::<u64>();
            let (blocks, inexact) = (sum(|site| site.non_zero), sum(|site| site.inexact.unwrap()));
            if step % 2 == 0 {
                assert_eq!((metrics.inexact_fraction, blocks), (None, 0), "{recipe}: step {}", step + 1);
                continue;
            }
            assert_eq!(metrics.inexact_fraction, Some(inexact as f64 / blocks as f64), "{recipe}");
            let of = |layer: &str, tensor: &str, conversion: &str| {
                let is_it = |site: &&SiteMetrics| {
                    site.layer.ends_with(layer)
                        && site.tensor == tensor
                        && site.conversion.ends_with(conversion)
                };
                lifts
                    .clone()
                    .filter(is_it)
                    .map(|site| [site.non_zero, site.inexact.unwrap()])
                    .collect::<Vec<_>>()
            };
            // Fresh weights are all of one size, so their lift is exact.
            let experts = of("experts.gate_up_proj", "w", "to tiles in fprop");
            assert!(
                experts.len() == 2 && experts.iter().all(|[n, inexact]| *n > 0 && *inexact == 0),
                "{recipe}"
            );
            for (layer, tensor, conversion) in [
                ("self_attn.q_proj", "x", "to rows in fprop"),
                ("self_attn.k_proj", "x", "to columns in wgrad"),
                ("self_attn.o_proj", "dy", "to rows in dgrad"),
                ("self_attn.o_proj.weight", "wt", "to tiles in dgrad"),
                ("mlp.experts", "a", "to rows in fprop"),
                ("mlp.experts", "dh", "to columns in wgrad"),
            ] {
                let found = of(layer, tensor, conversion);
                assert!(found.len() == 2 && found.iter().all(|[n, _]| *n > 0), "{recipe}: {layer}.{tensor}");
            }
        }
    }
}

/// Recomputation lifts again, but is not counted again.
#[test]
fn recomputed_products_do_not_count_twice() {
    let of = |recompute: &str| {
        let config = small("mxfp4", &["train.quantization_every=1", recompute]);
        run(&config, 1).0.remove(0)
    };
    let kept = of("train.recompute=[]");
    assert!(kept.0.inexact_fraction.is_some());
    for scopes in ["\"layers\"", "\"experts\"", "\"swiglu\", \"norms\""] {
        assert_eq!(kept, of(&format!("train.recompute=[{scopes}]")), "{scopes}");
    }
}

/// A weight that several ranks multiply counts once.
#[test]
fn ranks_count_what_one_rank_does() {
    let config = small("mxfp4", &["train.quantization_every=1", rig::FOUR_PARTS]);
    let of = |mesh: MeshShape| {
        let mut told = rig::on_mesh(mesh, |mesh| {
            let cpu = Cpu::new(1).unwrap();
            let mut trainer = Trainer::new(&cpu, mesh, &config).unwrap();
            [0, 1].map(|_| trainer.train_step().unwrap().inexact_fraction.unwrap())
        });
        assert!(told.iter().all(|other| *other == told[0]), "every rank tells the same");
        told.swap_remove(0)
    };
    let one = of(MeshShape { dp: 1, ep: 1 });
    for (dp, ep) in [(1, 2), (2, 1), (2, 2)] {
        assert_eq!(of(MeshShape { dp, ep }), one, "{dp} x {ep} ranks");
    }
}

/// The head's operands exist only inside of its operation, and its weight is lifted there, too.
#[test]
fn a_head_counts_all_of_its_tokens() {
    let text = r#"
        extends = "bf16"
        [head]
        fprop = { x = { format = "mxfp4" }, w = { format = "mxfp4" } }
        dgrad.dy = { format = "mxfp4" }
        wgrad = { x = { format = "mxfp4" }, dy = { format = "mxfp4" } }
    "#;
    let (config, _dir) = with_recipe(text, &["train.quantization_every=2"]);
    let (said, weights) = run(&config, 2);
    let (off, _dir) = with_recipe(text, &[]);
    assert!(weights == run(&off, 2).1, "measuring changes a bit");
    let (tokens, d) = (config.train.batch_size * config.data.seq_len, config.model.d_model);
    let lifts: Vec<_> = said[1].1.sites.iter().filter(|site| site.conversion.contains(" in ")).collect();
    let blocks = |tensor: &str, conversion: &str| {
        let found: Vec<_> =
            lifts.iter().filter(|s| s.tensor == tensor && s.conversion.ends_with(conversion)).collect();
        assert_eq!(found.len(), 1, "{tensor} {conversion}: {lifts:#?}");
        found[0].non_zero as usize
    };
    assert_eq!(lifts.len(), 6, "{lifts:#?}");
    assert_eq!(blocks("x", "rows in fprop"), tokens * d / BLOCK);
    assert_eq!(blocks("x", "columns in wgrad"), tokens * d / BLOCK);
    assert_eq!(blocks("dlogits", "rows in dgrad"), tokens * config.model.vocab_size.div_ceil(BLOCK));
    assert!(blocks("dlogits", "columns in wgrad") > 0);
    assert!(blocks("w", "tiles in fprop") > 0 && blocks("wt", "tiles in dgrad") > 0);
}
