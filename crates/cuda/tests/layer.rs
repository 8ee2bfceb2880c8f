//! The whole mixture-of-experts layer on the GPU, forward and backward: against the CPU, from run to run, recorded as one
//! graph (which holds no read and no upload by the host), and what it keeps. Without a GPU: a printed skip, or a failure
//! under `NIBBLE_REQUIRE_GPU=1`.

use crate::gpu;

use nibble_core::formats::{Purpose, Stream};
use nibble_core::ops::{Cast, InitNormal};
use nibble_core::{Backend, DType, DeviceKind, Kernels, MemoryStats, Mesh, Recipe, Result, SoloComm, Tensor};
use nibble_cpu::Cpu;
use nibble_cuda::Cuda;
use nibble_dry::Dry;
use nibble_train::cx::Cx;
use nibble_train::layers::Layer;
use nibble_train::ledger::{Ledger, Saved};
use nibble_train::moe::{Moe, MoeShape};
use nibble_train::param::{GradientPlan, Param};
use nibble_train::shards::Shards;
use nibble_train::spec::MoeSpec;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// Every recipe whose activations are BF16, and how far two backends may be apart (relative L2). A product's 1e-4 moves values across
/// the boundaries of the format they are rounded to next, which is 2⁻⁸, 2⁻⁴ or 2⁻² away: √(1e-4 · that) of the whole, a few
/// times over.
fn recipes() -> impl Iterator<Item = (&'static str, f64)> {
    let bf16 = Recipe::all_names().filter(|name| *name != "f32");
    bf16.map(|name| {
        let bound = match name {
            "bf16" => 1e-3,
            // FP4 in storage alone, and in the products.
            "mxfp4-hopper" | "mxfp4-hopper-head8" => 1.5e-2,
            "nvfp4" | "hif4" => 3e-2,
            _ => 1e-2,
        };
        (name, bound)
    })
}

const SHAPE: MoeShape =
    MoeShape { d_model: 256, ffn: 128, experts: 8, top_k: 2, normalize: true, aux_coef: 1e-2, z_coef: 1e-3 };
const SHARDS: usize = 2;
const TOKENS: usize = 512;
/// No token chooses it.
const EMPTY: usize = 3;
/// One token alone chooses it.
const LONELY: usize = 2;

/// One backend, whose kernels are loaded once, for one test at a time: what others issue meanwhile would be recorded too.
fn cuda() -> Option<(Cuda, MutexGuard<'static, ()>)> {
    static CUDA: OnceLock<Option<Cuda>> = OnceLock::new();
    static IN_USE: Mutex<()> = Mutex::new(());
    let guard = IN_USE.lock().unwrap_or_else(PoisonError::into_inner);
    let cuda = CUDA.get_or_init(|| gpu::device("layer").map(Cuda::on)).clone()?;
    Some((cuda, guard))
}

fn context<'a, B: Kernels>(b: &'a B, recipe: &'a Recipe, shards: usize, tokens: usize) -> Cx<'a, B> {
    let shards = Shards::new(b, shards, tokens / shards, 0).unwrap();
    Cx { training: true, seed: 3, ..Cx::inference(b, Mesh::new(&SoloComm), recipe, shards, 0.0) }
}

fn normals(site: u32, len: usize) -> Vec<f32> {
    let stream = Stream::new(11, Purpose::Data, site, 0);
    (0..len as u64).map(|i| stream.normal_at(i)).collect()
}

fn tensor<B: Kernels>(b: &B, values: &[f32], cols: usize, dtype: DType) -> Result<Tensor<B>> {
    Cast { x: &Tensor::from_f32(b, values, values.len() / cols, cols)?, dtype }.run(b)
}

/// A layer, its input and its output's gradient: one expert has no row, one has a single row.
struct Scene<B: Kernels> {
    moe: Moe<B>,
    x: Tensor<B>,
    dy: Tensor<B>,
}

impl<B: Kernels> Scene<B> {
    fn new(cx: &Cx<'_, B>) -> Result<Self> {
        let d = SHAPE.d_model;
        let mut x = normals(1, TOKENS * d);
        // Two features decide about the two experts: every token has the first, one token alone the second.
        for (token, row) in x.chunks_mut(d).enumerate() {
            (row[0], row[1]) = (4.0, if token == 77 { 4.0 } else { 0.0 });
        }
        let mut moe = Moe::new(cx, &MoeSpec::new("mlp", SHAPE, [0.05; 2]))?;
        let mut router = moe.router.weight.master.to_f32_vec(cx.b)?;
        for expert in [EMPTY, LONELY] {
            router[expert * d] = -10.0;
        }
        router[LONELY * d + 1] = 20.0;
        moe.router.weight.master = Tensor::from_f32(cx.b, &router, SHAPE.experts, d)?;
        moe.prepare(cx)?;
        Ok(Self {
            moe,
            x: tensor(cx.b, &x, d, DType::Bf16)?,
            dy: tensor(cx.b, &normals(2, TOKENS * d), d, DType::Bf16)?,
        })
    }

    /// Output, gradient of the input, gradients of the weights.
    fn pass(&mut self, cx: &Cx<'_, B>) -> Result<Vec<Tensor<B>>> {
        self.moe.params().into_iter().for_each(Param::clear_gradient);
        let (y, saved) = self.moe.forward(cx, self.x.clone())?;
        let dx = self.moe.backward(cx, saved, self.dy.clone())?;
        let grads = self.moe.params().into_iter().flat_map(|param| param.grad().cloned());
        Ok([y, dx].into_iter().chain(grads).collect())
    }
}

const NAMES: [&str; 5] = ["y", "dx", "router", "gate_up", "down"];

fn host<B: Kernels>(b: &B, tensors: &[Tensor<B>]) -> Vec<Vec<f32>> {
    tensors.iter().map(|x| x.to_f32_vec(b).unwrap()).collect()
}

fn bits(values: &[Vec<f32>]) -> Vec<Vec<u32>> {
    values.iter().map(|x| x.iter().map(|v| v.to_bits()).collect()).collect()
}

fn rel_l2(got: &[f32], want: &[f32]) -> f64 {
    let sum = |of: &dyn Fn(usize) -> f64| (0..want.len()).map(of).map(|x| x * x).sum::<f64>();
    let error = sum(&|i| f64::from(got[i]) - f64::from(want[i]));
    (error / sum(&|i| f64::from(want[i]))).sqrt()
}

/// What a pass takes of an arena.
fn taken<B: Kernels>(b: &B, recipe: &Recipe, remake_x: bool) -> Result<MemoryStats> {
    let cx = context(b, recipe, SHARDS, TOKENS);
    let mut scene = Scene::new(&cx)?;
    scene.moe.routed.remake_x = remake_x;
    let arena = b.arena("layer")?;
    b.within(&arena, || scene.pass(&cx).map(drop))?;
    Ok(b.arena_memory(&arena))
}

#[test]
fn a_pass_takes_the_memory_that_shapes_predict() {
    let Some((cuda, _alone)) = cuda() else { return };
    for (name, _) in recipes() {
        let recipe = Recipe::builtin(name).unwrap();
        for remake_x in [false, true] {
            let predicted = taken(&Dry::new(DeviceKind::Gpu), &recipe, remake_x).unwrap();
            let there = taken(&cuda, &recipe, remake_x).unwrap();
            println!("{name}, remade {remake_x}: {predicted:?} predicted, {there:?} there");
            let off = predicted.peak_bytes as f64 / there.peak_bytes as f64 - 1.0;
            assert!(off.abs() < 0.02, "{name}: {predicted:?} predicted, {there:?} there");
        }
    }
}

#[test]
fn outputs_and_gradients_are_the_cpus() {
    let Some((cuda, _alone)) = cuda() else { return };
    let cpu = Cpu::new(0).unwrap();
    for (name, bound) in recipes() {
        let recipe = Recipe::builtin(name).unwrap();
        let on_cpu = context(&cpu, &recipe, SHARDS, TOKENS);
        let on_gpu = context(&cuda, &recipe, SHARDS, TOKENS);
        let mut scenes = (Scene::new(&on_cpu).unwrap(), Scene::new(&on_gpu).unwrap());
        let routing = scenes.0.moe.router.forward(&on_cpu, &scenes.0.x).unwrap().routing;
        let chosen = routing.expert.as_slice();
        let rows = |expert: usize| chosen.iter().filter(|e| **e as usize == expert).count();
        assert_eq!((rows(EMPTY), rows(LONELY)), (0, 1), "the scene is what it should be");
        let on_gpu_chosen = scenes.1.moe.router.forward(&on_gpu, &scenes.1.x).unwrap().routing.expert;
        assert_eq!(on_gpu_chosen.get().download().unwrap(), chosen, "{name}: the same experts");
        let want = host(&cpu, &scenes.0.pass(&on_cpu).unwrap());
        let got = host(&cuda, &scenes.1.pass(&on_gpu).unwrap());
        for ((what, got), want) in NAMES.into_iter().zip(&got).zip(&want) {
            let error = rel_l2(got, want);
            println!("{name}: {what}: {error:.1e}");
            assert!(error <= bound, "{name}: {what}: relative error {error:.1e}, at most {bound:.0e}");
        }
        let again = host(&cuda, &scenes.1.pass(&on_gpu).unwrap());
        assert!(bits(&again) == bits(&got), "{name}: the same bits in every run");
        scenes.1.moe.routed.remake_x = true;
        let remade = host(&cuda, &scenes.1.pass(&on_gpu).unwrap());
        assert!(bits(&remade) == bits(&got), "{name}: the same bits from an input that is made again");
    }
}

/// The first micro-batch writes the gradients, the next one adds to them: twice the same is twice as much.
#[test]
fn gradients_add_up_over_micro_batches() {
    let Some((cuda, _alone)) = cuda() else { return };
    for (name, _) in recipes() {
        let recipe = Recipe::builtin(name).unwrap();
        let cx = context(&cuda, &recipe, SHARDS, TOKENS);
        let mut scene = Scene::new(&cx).unwrap();
        let mut gradients = || -> Result<Vec<Vec<f32>>> {
            let (_, saved) = scene.moe.forward(&cx, scene.x.clone())?;
            scene.moe.backward(&cx, saved, scene.dy.clone())?;
            scene
                .moe
                .params()
                .into_iter()
                .flat_map(|param| param.grad())
                .map(|x| x.to_f32_vec(&cuda))
                .collect()
        };
        let (once, twice) = (gradients().unwrap(), gradients().unwrap());
        let doubled: Vec<Vec<f32>> = once.iter().map(|x| x.iter().map(|x| 2.0 * x).collect()).collect();
        assert!(bits(&twice) == bits(&doubled), "{name}");
    }
}

/// A recording refuses whatever waits for the host or copies from it: both passes have none. Its activations are those of the
/// pass as it is issued, in the same memory.
#[test]
fn both_passes_are_one_graph() {
    let Some((cuda, _alone)) = cuda() else { return };
    for (name, _) in recipes() {
        let recipe = Recipe::builtin(name).unwrap();
        let cx = context(&cuda, &recipe, SHARDS, TOKENS);
        let mut scene = Scene::new(&cx).unwrap();
        for param in scene.moe.params() {
            let shards = param.placement.shards(&cx.shards);
            param.place_gradient(&cuda, GradientPlan::default(), shards).unwrap();
        }
        let arena = cuda.arena("layer").unwrap();
        let mut pass = || {
            let outputs = scene.pass(&cx)?;
            cx.counted.borrow_mut().truncate(0);
            Ok(outputs)
        };
        let issued = cuda.within(&arena, &mut pass).unwrap();
        let (want, addresses) = (bits(&host(&cuda, &issued)), ids(&issued));
        drop(issued);
        let memory = cuda.arena_memory(&arena);
        let again = cuda.within(&arena, &mut pass).unwrap();
        assert_eq!(ids(&again), addresses, "{name}: the same addresses");
        drop(again);
        let mut outputs = Vec::new();
        let recording = cuda.within(&arena, || {
            cuda.record(&mut || {
                outputs = pass()?;
                Ok(())
            })
        });
        let recording = recording.unwrap();
        assert_eq!(ids(&outputs), addresses, "{name}: recorded at the addresses it is issued at");
        let MemoryStats { live_bytes, peak_bytes, total_bytes } = cuda.arena_memory(&arena);
        assert_eq!(
            (peak_bytes, total_bytes),
            (memory.peak_bytes, memory.total_bytes),
            "{name}: no more memory"
        );
        // The gradients have a place of their own.
        let bytes: usize = outputs[..2].iter().map(Tensor::bytes).sum();
        assert_eq!(live_bytes, bytes, "{name}: the outputs are live");
        println!("{name}: {peak_bytes} bytes live at most, {total_bytes:?} mapped");
        for launch in 1..=2 {
            cuda.replay(&recording).unwrap();
            assert!(bits(&host(&cuda, &outputs)) == want, "{name}: replay {launch}");
        }
    }
}

fn ids(tensors: &[Tensor<Cuda>]) -> Vec<u64> {
    tensors.iter().map(Tensor::buffer_id).collect()
}

/// Recording adds nothing to the gradients that are there, a replay adds once.
#[test]
fn a_recorded_micro_batch_adds_to_the_gradients_when_it_is_replayed() {
    let Some((cuda, _alone)) = cuda() else { return };
    for (name, _) in recipes() {
        let recipe = Recipe::builtin(name).unwrap();
        let cx = context(&cuda, &recipe, SHARDS, TOKENS);
        let mut scene = Scene::new(&cx).unwrap();
        let arena = cuda.arena("layer").unwrap();
        let (moe, x, dy) = (&mut scene.moe, &scene.x, &scene.dy);
        fn micro_batch(
            moe: &mut Moe<Cuda>,
            cx: &Cx<'_, Cuda>,
            x: &Tensor<Cuda>,
            dy: &Tensor<Cuda>,
        ) -> Result<()> {
            let (_, saved) = moe.forward(cx, x.clone())?;
            moe.backward(cx, saved, dy.clone())?;
            cx.counted.borrow_mut().truncate(0);
            Ok(())
        }
        let gradients = |moe: &mut Moe<Cuda>| -> Vec<Vec<f32>> {
            let grads = moe.params().into_iter().flat_map(|param| param.grad());
            grads.map(|x| x.to_f32_vec(&cuda).unwrap()).collect()
        };
        micro_batch(moe, &cx, x, dy).unwrap();
        let once = gradients(moe);
        let copies = cuda.traffic().copies_on_write;
        let recording = cuda.within(&arena, || cuda.record(&mut || micro_batch(moe, &cx, x, dy))).unwrap();
        assert!(bits(&gradients(moe)) == bits(&once), "{name}: recorded, and nothing has changed");
        cuda.replay(&recording).unwrap();
        let doubled: Vec<Vec<f32>> = once.iter().map(|x| x.iter().map(|x| 2.0 * x).collect()).collect();
        assert!(bits(&gradients(moe)) == bits(&doubled), "{name}: replayed once");
        assert_eq!(cuda.traffic().copies_on_write, copies, "{name}: gradients stay where they are");
    }
}

/// Bytes kept by a forward pass: as listed, and as the allocator counts them.
fn kept(cuda: &Cuda, recipe: &str, shape: MoeShape, tokens: usize, remake_x: bool) -> (usize, usize) {
    let recipe = Recipe::builtin(recipe).unwrap();
    let cx = context(cuda, &recipe, 1, tokens);
    let mut moe = Moe::new(&cx, &MoeSpec::new("mlp", shape, [0.02; 2])).unwrap();
    (moe.routed.keep_input, moe.routed.remake_x) = (false, remake_x);
    moe.prepare(&cx).unwrap();
    let stream = Stream::new(11, Purpose::Data, 1, 0);
    let x = InitNormal { stream, first: 0, rows: tokens, cols: shape.d_model, std: 1.0 }.run(cuda).unwrap();
    let x = Cast { x: &x, dtype: DType::Bf16 }.run(cuda).unwrap();
    let before = cuda.device().memory().live_bytes;
    let (y, saved) = moe.forward(&cx, x.clone()).unwrap();
    let live = cuda.device().memory().live_bytes - before - y.bytes();
    let mut ledger = Ledger::default();
    saved.ledger(&mut ledger);
    println!("{}: {} bytes kept\n{}", recipe.name, live, ledger.table());
    (ledger.bytes(), live)
}

#[test]
fn what_is_kept_is_what_is_listed() {
    // A device of its own: other tests allocate on theirs meanwhile.
    let Some(cuda) = gpu::device("layer: memory").map(Cuda::on) else { return };
    for (name, _) in recipes() {
        let (listed, live) = kept(&cuda, name, SHAPE, TOKENS, false);
        assert_eq!(listed, live, "{name}");
    }
    const MIB: usize = 1 << 20;
    let large = |d_model, ffn, experts, top_k| MoeShape { d_model, ffn, experts, top_k, ..SHAPE };
    let (listed, live) = kept(&cuda, "mxfp4-hopper", large(7168, 2048, 8, 1), 32768, false);
    assert!(listed == live && listed <= 250 * MIB, "8 experts: {listed} bytes listed, {live} live");
    let (listed, live) = kept(&cuda, "mxfp4-hopper", large(4096, 1024, 128, 8), 32768, true);
    let output = 32768 * 4096 * 2;
    assert!(
        listed == live && listed + output <= 600 * MIB,
        "128 experts: {listed} bytes listed, {live} live"
    );
}
