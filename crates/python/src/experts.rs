//! Mixture-of-experts under a recipe: `nibble_train::moe::RoutedExperts` on PyTorch's tensors, for tokens whose experts PyTorch has chosen.

use crate::copies::{Kept, WeightCopies};
use crate::dlpack::{self, Foreign};
use crate::element::Element;
use crate::errors::or_raised;
use crate::home::Home;
use crate::layer::{Call, FLOATS, Operands, cast, clock, dims, gradient, place_gradient};
use crate::on;
use crate::place::{Tensors, exported, matrix, plain};
use crate::ranks::TorchRanks;
use crate::saved::{self, Shape};
use nibble_core::ops::Routing;
use nibble_core::recipe::LayerKind;
use nibble_core::{Backend, Comm, DType, DeviceKind, Kernels, Operand, Result, SoloComm, Tensor};
use nibble_dry::Dry;
use nibble_train::cx::{CopiesFor, Cx};
use nibble_train::moe::{Exchange, Experts, ExpertsSaved, RoutedExperts, RoutedSaved};
use nibble_train::param::{Param, Placement};
use nibble_train::shards::Shards;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::sync::Arc;

/// The sizes of a layer.
#[derive(Debug, Clone, Copy, Hash)]
struct Sizes {
    tokens: usize,
    d_model: usize,
    ffn: usize,
    /// Number of experts on this rank.
    experts: usize,
    top_k: usize,
}

/// The tensors of weights and of the routing, borrowed.
struct Inputs<B: Backend> {
    gate_up: Tensor<B>,
    down: Tensor<B>,
    expert: B::Buf<i32>,
    gate: B::Buf<f32>,
}

impl Call {
    fn of_experts<B: Kernels>(
        &self,
        cx: &Cx<'_, B>,
        sizes: Sizes,
        (gate_up, down): (Tensor<B>, Tensor<B>),
    ) -> RoutedExperts<B> {
        let param =
            |what, x| Param::new(format!("{}.{what}", self.name), x, Placement::Experts(sizes.experts));
        let experts = Experts {
            name: self.name.clone(),
            gate_up: param("gate_up_proj", gate_up),
            down: param("down_proj", down),
            keep_a: false,
            keep_h: true,
        };
        RoutedExperts::new(experts, sizes.experts * cx.mesh.ep.world(), sizes.top_k)
    }

    /// The routing that PyTorch has chosen. What only a router's backward pass reads is empty.
    fn routing<B: Kernels>(b: &B, expert: B::Buf<i32>, weight: B::Buf<f32>) -> Result<Routing<B>> {
        let kept = Tensor::zeros(b, DType::F32, 0, 0)?;
        Ok(Routing { expert, weight, kept, log_sum_exp: b.zeros(0)?, load: b.zeros(0)?, losses: b.zeros(0)? })
    }

    /// The operands that the forward pass saves besides the layer's input, found by running it on a backend without memory.
    fn saved_by_experts(&self, kind: DeviceKind, sizes: Sizes) -> PyResult<Operands> {
        let Sizes { tokens, d_model, ffn, experts, top_k } = sizes;
        let find = || -> Result<_> {
            let dry = Dry::new(kind);
            let shards = Shards::new(&dry, 1, tokens, 0)?;
            let cx = self.cx(&dry, &SoloComm, shards, (None, CopiesFor::Forward));
            let weights = (
                Tensor::unwritten(&dry, DType::F32, experts * 2 * ffn, d_model)?,
                Tensor::unwritten(&dry, DType::F32, experts * d_model, ffn)?,
            );
            let mut layer = self.of_experts(&cx, sizes, weights);
            layer.experts.prepare(&cx)?;
            let x = Tensor::unwritten(&dry, cx.activations(), tokens, d_model)?;
            let routing = Self::routing(&dry, dry.alloc(tokens * top_k)?, dry.alloc(tokens * top_k)?)?;
            let (_, saved, ()) = layer.forward_beside(&cx, x, &routing, || Ok(()))?;
            Ok(operands(saved.experts).map(|x| x.map(|x| Shape::of(&x, u64::MAX))).into())
        };
        self.saves(kind, &[tokens, d_model, ffn, experts, top_k], find)
    }
}

/// Shapes of the operands that a forward pass saved. Where experts are divided among ranks, they depend on the routing.
#[pyclass(frozen)]
pub struct SavedShapes(Operands);

/// The output of a forward pass, what it saves, and the shapes of that.
type Forward = (Py<PyAny>, Vec<Py<PyAny>>, Option<SavedShapes>);

fn operands<B: Kernels>(saved: ExpertsSaved<B>) -> [Option<Operand<B>>; 3] {
    [saved.x, saved.h, saved.a]
}

fn element_named(dtype: &str) -> Element {
    FLOATS.into_iter().find(|element| element.name() == dtype).unwrap_or(Element::F32)
}

/// The tensors that the forward pass saves besides its inputs: name, element type and shape of each. `sizes` is (tokens, d_model, ffn, experts,
/// top_k); `gpu` says where the layer runs.
#[pyfunction]
pub fn experts_saved(
    recipe: &str,
    name: &str,
    sizes: (usize, usize, usize, usize, usize),
    dtype: &str,
    gpu: bool,
) -> PyResult<Vec<(String, &'static str, Vec<usize>)>> {
    let (tokens, d_model, ffn, experts, top_k) = sizes;
    let call = Call::new((recipe, name, element_named(dtype)), LayerKind::Expert, 0)?;
    let kind = if gpu { DeviceKind::Gpu } else { DeviceKind::Host };
    let shapes = call.saved_by_experts(kind, Sizes { tokens, d_model, ffn, experts, top_k })?;
    Ok(shapes.iter().flatten().flat_map(Shape::tensors).collect())
}

/// The ranks among which experts are divided; without a process group, this one alone.
fn among<B: Home>(ranks: Option<&TorchRanks>) -> &dyn Comm<B> {
    match ranks {
        Some(ranks) => ranks,
        None => &SoloComm,
    }
}

/// Runs a pass. Among ranks, its allocations depend on the routing, so that it has no key.
fn among_ranks<B: Home, R>(
    b: &B,
    ranks: Option<&TorchRanks>,
    key: u64,
    run: impl FnOnce() -> Result<R>,
) -> Result<R> {
    if ranks.is_some() { run() } else { b.pass(key, run) }
}

impl Call {
    /// The layer with the copies of its weights.
    fn prepared_experts<B: Home>(
        &self,
        cx: &Cx<'_, B>,
        sizes: Sizes,
        weights: (Tensor<B>, Tensor<B>),
        kept: Kept<'_, B>,
    ) -> Result<RoutedExperts<B>> {
        let mut layer = self.of_experts(cx, sizes, weights);
        let plan = layer.experts.plan(cx);
        kept.prepare(cx, (&mut layer.experts, &plan), Experts::params, |experts| experts.prepare(cx))?;
        Ok(layer)
    }
}

/// The tensors of both passes, checked.
struct Checked {
    tensors: [Foreign; 4],
    elements: [Element; 2],
    sizes: Sizes,
}

impl Checked {
    /// Checks weights and routing beside a tensor of tokens `[tokens, d_model]`.
    fn new(
        call: &Tensors,
        (tokens, d_model): (usize, usize),
        [gate_up, down, expert, gate]: [&Bound<'_, PyAny>; 4],
    ) -> PyResult<Self> {
        let gate_up = Foreign::of(gate_up, "gate_up")?;
        let down = Foreign::of(down, "down")?;
        let (expert, gate) = (Foreign::of(expert, "expert")?, Foreign::of(gate, "gate")?);
        let elements = [call.take(&gate_up, "gate_up", &FLOATS)?, call.take(&down, "down", &FLOATS)?];
        call.take(&expert, "expert", &[Element::I32])?;
        call.take(&gate, "gate", &[Element::F32])?;
        let [experts, two_ffn, d] = dims(&gate_up, "gate_up")?;
        let [experts_down, d_down, ffn] = dims(&down, "down")?;
        let [tokens_of_expert, top_k] = dims(&expert, "expert")?;
        let expected = [
            ("gate_up", [experts, two_ffn, d], [experts, 2 * ffn, d_model]),
            ("down", [experts_down, d_down, ffn], [experts, d_model, ffn]),
            ("expert", [tokens_of_expert, top_k, 1], [tokens, top_k, 1]),
        ];
        if let Some((name, got, expected)) = expected.into_iter().find(|(_, got, expected)| got != expected) {
            return Err(PyValueError::new_err(format!("`{name}` has shape {got:?}, expected {expected:?}")));
        }
        if gate.shape() != expert.shape() {
            let (got, expected) = (gate.shape(), expert.shape());
            return Err(PyValueError::new_err(format!("`gate` has shape {got:?}, expected {expected:?}")));
        }
        let sizes = Sizes { tokens, d_model, ffn, experts, top_k };
        Ok(Self { tensors: [gate_up, down, expert, gate], elements, sizes })
    }

    fn borrowed<B: Home>(self, b: &B) -> Result<Inputs<B>> {
        let Self { tensors: [gate_up, down, expert, gate], elements, sizes } = self;
        let Sizes { d_model, ffn, experts, .. } = sizes;
        Ok(Inputs {
            gate_up: matrix(b, gate_up, elements[0], (experts * 2 * ffn, d_model))?,
            down: matrix(b, down, elements[1], (experts * d_model, ffn))?,
            expert: b.borrow(expert.lent())?,
            gate: b.borrow(gate.lent())?,
        })
    }
}

/// The forward pass of the experts under a recipe. Each token of x `[tokens, d_model]` goes to the `top_k` experts of its row of `expert`
/// (int32), and their outputs are summed with the weights of `gate` (float32). `gate_up` is `[experts, 2·ffn, d_model]`, with the rows of
/// each expert's gate before those of its up projection; `down` is `[experts, d_model, ffn]`. With `ranks`, these are the experts of this
/// rank, and `expert` counts those of all ranks. `copies` are the weights' copies for products, which the first pass makes. Returns y, the
/// tensors that the backward pass needs besides the inputs, and with `ranks` their shapes.
#[pyfunction]
#[pyo3(signature = (x, gate_up, down, expert, gate, time, recipe, name, seed, ranks=None, copies=None))]
#[expect(clippy::too_many_arguments, reason = "the arguments of the Python function")]
pub fn experts_forward(
    py: Python<'_>,
    x: &Bound<'_, PyAny>,
    gate_up: &Bound<'_, PyAny>,
    down: &Bound<'_, PyAny>,
    expert: &Bound<'_, PyAny>,
    gate: &Bound<'_, PyAny>,
    time: Option<&Bound<'_, PyAny>>,
    recipe: &str,
    name: &str,
    seed: u64,
    ranks: Option<&Bound<'_, PyAny>>,
    copies: Option<&Bound<'_, WeightCopies>>,
) -> PyResult<Forward> {
    let x = Foreign::of(x, "x")?;
    let (tensors, place) = Tensors::beside(py, &x)?;
    let of_x = tensors.take(&x, "x", &FLOATS)?;
    let [tokens, d_model] = dims(&x, "x")?;
    let checked = Checked::new(&tensors, (tokens, d_model), [gate_up, down, expert, gate])?;
    let time = tensors.time(time)?;
    let call = Call::new((recipe, name, of_x), LayerKind::Expert, seed)?;
    let (sizes, elements) = (checked.sizes, checked.elements);
    let ranks = ranks.map(TorchRanks::of).transpose()?;
    let copies = copies.map(Bound::get);
    on!(place, b => {
        let kept = Kept::find(&b, &call.plans.plan(&call.layer()), copies);
        let keeping = kept.keeping();
        let key = call.key(("experts", keeping, sizes, of_x, elements));
        let run = || -> Result<_> {
            let mesh = among(ranks.as_ref());
            let copies = (clock(&b, time)?, keeping.copies_for(CopiesFor::Forward));
            let cx = call.cx(&b, mesh, b.shards(tokens, mesh.rank())?, copies);
            let Inputs { gate_up, down, expert, gate } = checked.borrowed(&b)?;
            let layer = call.prepared_experts(&cx, sizes, (gate_up, down), kept)?;
            let x = matrix(&b, x, of_x, (tokens, d_model))?;
            let (y, saved, ()) = layer.forward_beside(&cx, x, &Call::routing(&b, expert, gate)?, || Ok(()))?;
            Ok((cast(&b, y, plain(of_x))?, saved.experts))
        };
        let done = py.detach(|| among_ranks(&b, ranks.as_ref(), key, run));
        let (y, experts) = or_raised(done)?;
        let saved = operands(experts);
        let shapes = ranks.map(|_| {
            let shapes = saved.iter().map(|x| x.as_ref().map(|x| Shape::of(x, u64::MAX)));
            SavedShapes(Arc::new(shapes.collect()))
        });
        let mut list = Vec::new();
        for operand in saved.into_iter().flatten() {
            saved::export(py, &b, (operand, u64::MAX), &mut list)?;
        }
        Ok((exported(py, &b, y, &[tokens, d_model])?, list, shapes))
    })
}

/// The backward pass. `saved` and `shapes` are what the forward pass returned. `needed` says whether the gradients of gate_up and down are.
/// Returns the gradients of x, gate_up, down (in the types of the tensors; `None` where not needed), and gate.
#[pyfunction]
#[pyo3(signature = (saved, gate_up, down, expert, gate, dy, time, recipe, name, seed, needed, ranks=None, shapes=None, copies=None))]
#[expect(clippy::too_many_arguments, reason = "the arguments of the Python function")]
pub fn experts_backward(
    py: Python<'_>,
    saved: Vec<Bound<'_, PyAny>>,
    gate_up: &Bound<'_, PyAny>,
    down: &Bound<'_, PyAny>,
    expert: &Bound<'_, PyAny>,
    gate: &Bound<'_, PyAny>,
    dy: &Bound<'_, PyAny>,
    time: Option<&Bound<'_, PyAny>>,
    recipe: &str,
    name: &str,
    seed: u64,
    needed: [bool; 2],
    ranks: Option<&Bound<'_, PyAny>>,
    shapes: Option<PyRef<'_, SavedShapes>>,
    copies: Option<&Bound<'_, WeightCopies>>,
) -> PyResult<Vec<Option<Py<PyAny>>>> {
    let dy = Foreign::of(dy, "dy")?;
    let (tensors, place) = Tensors::beside(py, &dy)?;
    let of_dy = tensors.take(&dy, "dy", &FLOATS)?;
    let [tokens, d_model] = dims(&dy, "dy")?;
    let checked = Checked::new(&tensors, (tokens, d_model), [gate_up, down, expert, gate])?;
    let time = tensors.time(time)?;
    let call = Call::new((recipe, name, of_dy), LayerKind::Expert, seed)?;
    let saved = saved.iter().map(|x| Foreign::of(x, "saved")).collect::<PyResult<Vec<_>>>()?;
    let (sizes, elements) = (checked.sizes, checked.elements);
    let Sizes { ffn, experts, top_k, .. } = sizes;
    let ranks = ranks.map(TorchRanks::of).transpose()?;
    let copies = copies.map(Bound::get);
    on!(place, b => {
        let shapes = match shapes {
            Some(shapes) => shapes.0.clone(),
            None => call.saved_by_experts(Backend::kind(&b), sizes)?,
        };
        let mut saved = saved.into_iter();
        let mut operands = [None, None, None];
        for (operand, shape) in operands.iter_mut().zip(shapes.iter()) {
            let made = shape.as_ref().map(|shape| shape.operand((&b, &tensors), &mut saved, &mut None));
            *operand = made.transpose()?;
        }
        let kept = Kept::find(&b, &call.plans.plan(&call.layer()), copies);
        let keeping = kept.keeping();
        let key = call.key(("experts backward", keeping, sizes, of_dy, elements, needed));
        let run = || -> Result<_> {
            let mesh = among(ranks.as_ref());
            let copies = (clock(&b, time)?, keeping.copies_for(CopiesFor::Backward));
            let cx = call.cx(&b, mesh, b.shards(tokens, mesh.rank())?, copies);
            let Inputs { gate_up, down, expert, gate } = checked.borrowed(&b)?;
            let mut layer = call.prepared_experts(&cx, sizes, (gate_up, down), kept)?;
            let routing = Call::routing(&b, expert, gate)?;
            let alignment = layer.experts.plan(&cx).row_alignment;
            let plan = Exchange::new(&cx, layer.num_experts, top_k).plan(&routing, alignment)?;
            let [kept_x, h, a] = operands;
            let saved = RoutedSaved {
                // Only a router's backward pass would read it, because the experts' own input and output of gate and up are saved.
                x_td: Some(Tensor::zeros(&b, DType::F32, 0, 0)?),
                plan,
                experts: ExpertsSaved::new(&call.name, kept_x, h, a),
            };
            let places = [&mut layer.experts.gate_up, &mut layer.experts.down];
            for ((param, element), is_needed) in places.into_iter().zip(elements).zip(needed) {
                place_gradient(&b, param, is_needed, plain(element))?;
            }
            let mut dgate = None;
            let keep = |_: &Tensor<_>, of_slots| {
                dgate = Some(of_slots);
                Ok(None)
            };
            let dy = matrix(&b, dy, of_dy, (tokens, d_model))?;
            let (dx, ()) = layer.backward_beside(&cx, saved, dy, keep, || Ok(()))?;
            let dgate = match dgate {
                Some(dgate) => dgate,
                None => b.zeros(tokens * top_k)?,
            };
            Ok((cast(&b, dx, plain(of_dy))?, gradient(&layer.experts.gate_up)?, gradient(&layer.experts.down)?, dgate))
        };
        let done = py.detach(|| among_ranks(&b, ranks.as_ref(), key, run));
        let (dx, dgate_up, ddown, dgate) = or_raised(done)?;
        let of_weight = |grad: Option<_>, shape: &[usize]| grad.map(|x| exported(py, &b, x, shape)).transpose();
        Ok(vec![
            Some(exported(py, &b, dx, &[tokens, d_model])?),
            of_weight(dgate_up, &[experts, 2 * ffn, d_model])?,
            of_weight(ddown, &[experts, d_model, ffn])?,
            Some(dlpack::export::<_, f32>(py, (&b, dgate), Element::F32, &[tokens, top_k])?),
        ])
    })
}
