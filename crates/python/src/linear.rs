//! A linear layer under a recipe: `nibble_train::layers::Linear` on PyTorch's tensors.

use crate::copies::{Kept, WeightCopies};
use crate::dlpack::Foreign;
use crate::element::Element;
use crate::errors::or_raised;
use crate::home::Home;
use crate::layer::{Call, FLOATS, Operands, cast, clock, dims, gradient, place_gradient};
use crate::on;
use crate::place::{Tensors, exported, matrix, plain};
use crate::saved::{self, Shape};
use nibble_core::recipe::LayerKind;
use nibble_core::{Backend, DType, DeviceKind, Kernels, Operand, Result, SoloComm, Tensor};
use nibble_dry::Dry;
use nibble_train::cx::{CopiesFor, Cx};
use nibble_train::layers::{Layer, Linear, LinearSaved};
use nibble_train::param::{Param, Placement};
use nibble_train::shards::Shards;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Rows of the input (tokens), outputs, inputs.
type Sizes = (usize, usize, usize);

impl Call {
    /// A linear layer with this number of rows.
    fn linear(layer: (&str, &str, Element), seed: u64, rows: usize) -> PyResult<Self> {
        let call = Self::new(layer, LayerKind::Linear, seed)?;
        let align = call.plans.plan(&call.layer()).row_alignment;
        if !rows.is_multiple_of(align) {
            let why =
                format!("`x` has {rows} rows, expected a multiple of {align} under recipe `{}`", layer.0);
            return Err(PyValueError::new_err(why));
        }
        Ok(call)
    }

    /// The layer, without copies of its weight.
    fn of_linear<B: Kernels>(
        &self,
        cx: &Cx<'_, B>,
        weight: Tensor<B>,
        bias: Option<Tensor<B>>,
    ) -> Result<Linear<B>> {
        let param = |what: &str, x| Param::new(format!("{}.{what}", self.name), x, Placement::Replicated);
        let wide = |bias| cast(cx.b, bias, DType::F32);
        Ok(Linear {
            weight: param("weight", weight),
            bias: bias.map(wide).transpose()?.map(|bias| param("bias", bias)),
            layer: self.layer(),
            linear: self.name.clone(),
            out: cx.activations(),
        })
    }

    /// The layer with the copies of its weight that products read.
    fn prepared<B: Home>(
        &self,
        cx: &Cx<'_, B>,
        (weight, bias): (Tensor<B>, Option<Tensor<B>>),
        kept: Kept<'_, B>,
    ) -> Result<Linear<B>> {
        let mut linear = self.of_linear(cx, weight, bias)?;
        let plan = linear.plan(cx);
        kept.prepare(cx, (&mut linear, &plan), quantized, |linear| linear.prepare(cx))?;
        Ok(linear)
    }

    fn saved<B: Kernels>(&self, x: Operand<B>) -> LinearSaved<B> {
        LinearSaved::new(&self.name, x)
    }

    /// What the forward pass saves, found by running it on a backend without memory.
    fn saved_by_linear(&self, kind: DeviceKind, (rows, n, k): Sizes) -> PyResult<Operands> {
        let find = || -> Result<Vec<Option<Shape>>> {
            let dry = Dry::new(kind);
            let shards = Shards::new(&dry, 1, rows, 0)?;
            let cx = self.cx(&dry, &SoloComm, shards, (None, CopiesFor::Forward));
            let x = Tensor::unwritten(&dry, cx.activations(), rows, k)?;
            let linear = self.of_linear(&cx, Tensor::unwritten(&dry, DType::F32, n, k)?, None)?;
            let input = x.buffer_id();
            Ok(vec![Some(Shape::of(&linear.input(&cx, &x)?.1.x, input))])
        };
        self.saves(kind, &[rows, n, k], find)
    }
}

/// The weights of which products read copies.
fn quantized<B: Kernels>(linear: &mut Linear<B>) -> Vec<&mut Param<B>> {
    vec![&mut linear.weight]
}

/// Checks that a recipe's formats support a layer of these sizes, by running both passes on a backend without memory.
///
/// # Errors
/// `NotImplementedError` or `ValueError` with what they do not support.
#[pyfunction]
pub fn linear_supported(recipe: &str, name: &str, sizes: Sizes) -> PyResult<()> {
    let (rows, n, k) = sizes;
    let call = Call::linear((recipe, name, Element::Bf16), 0, rows)?;
    let tried = || -> Result<()> {
        let dry = Dry::new(DeviceKind::Gpu);
        let shards = Shards::new(&dry, 1, rows, 0)?;
        let cx = call.cx(&dry, &SoloComm, shards, (None, CopiesFor::AllPasses));
        let mut linear = call.of_linear(&cx, Tensor::unwritten(&dry, DType::F32, n, k)?, None)?;
        linear.prepare(&cx)?;
        let (_, saved) = linear.forward(&cx, Tensor::unwritten(&dry, DType::Bf16, rows, k)?)?;
        linear.backward(&cx, saved, Tensor::unwritten(&dry, DType::Bf16, rows, n)?).map(drop)
    };
    or_raised(tried())
}

/// The tensors that the forward pass saves besides its input: name, element type and shape of each. The list is empty if the input itself
/// is saved. `gpu` says where the layer runs.
#[pyfunction]
pub fn linear_saved(
    recipe: &str,
    name: &str,
    sizes: Sizes,
    dtype: &str,
    gpu: bool,
) -> PyResult<Vec<(String, &'static str, Vec<usize>)>> {
    let element = FLOATS.into_iter().find(|element| element.name() == dtype).unwrap_or(Element::F32);
    let kind = if gpu { DeviceKind::Gpu } else { DeviceKind::Host };
    Ok(Call::linear((recipe, name, element), 0, sizes.0)?
        .saved_by_linear(kind, sizes)?
        .iter()
        .flatten()
        .flat_map(Shape::tensors)
        .collect())
}

/// The forward pass y = x·wᵀ + bias under a recipe, with x `[rows, k]`, w `[n, k]`, bias `[n]`. `time` is an int32 tensor of one value, the
/// number of the step: random bits depend on it, on `seed` and on `name`. `copies` are the weight's copies for products, which the first
/// pass makes. Returns y in the type of x, and the tensors that the backward
/// pass needs.
#[pyfunction]
#[pyo3(signature = (x, weight, bias, time, recipe, name, seed, copies=None))]
#[expect(clippy::too_many_arguments, reason = "the arguments of the Python function")]
pub fn linear_forward(
    py: Python<'_>,
    x: &Bound<'_, PyAny>,
    weight: &Bound<'_, PyAny>,
    bias: Option<&Bound<'_, PyAny>>,
    time: Option<&Bound<'_, PyAny>>,
    recipe: &str,
    name: &str,
    seed: u64,
    copies: Option<&Bound<'_, WeightCopies>>,
) -> PyResult<(Py<PyAny>, Vec<Py<PyAny>>)> {
    let (x, weight) = (Foreign::of(x, "x")?, Foreign::of(weight, "weight")?);
    let bias = bias.map(|bias| Foreign::of(bias, "bias")).transpose()?;
    let (tensors, place) = Tensors::beside(py, &x)?;
    let (of_x, of_weight) = (tensors.take(&x, "x", &FLOATS)?, tensors.take(&weight, "weight", &FLOATS)?);
    let of_bias = bias.as_ref().map(|bias| tensors.take(bias, "bias", &FLOATS)).transpose()?;
    let time = tensors.time(time)?;
    let ([rows, k], [n, k_of_weight]) = (dims(&x, "x")?, dims(&weight, "weight")?);
    if k != k_of_weight {
        let why = format!("`weight` has {k_of_weight} columns, expected the {k} of `x`");
        return Err(PyValueError::new_err(why));
    }
    let call = Call::linear((recipe, name, of_x), seed, rows)?;
    let copies = copies.map(Bound::get);
    on!(place, b => {
        let kept = Kept::find(&b, &call.plans.plan(&call.layer()), copies);
        let keeping = kept.keeping();
        let key = call.key(("linear", keeping, (rows, n, k), [of_x, of_weight], of_bias));
        let run = || -> Result<_> {
            let copies = (clock(&b, time)?, keeping.copies_for(CopiesFor::Forward));
            let cx = call.cx(&b, &SoloComm, b.shards(rows, 0)?, copies);
            let x = matrix(&b, x, of_x, (rows, k))?;
            let bias = bias.map(|bias| matrix(&b, bias, of_bias.unwrap_or(Element::F32), (1, n))).transpose()?;
            let linear = call.prepared(&cx, (matrix(&b, weight, of_weight, (n, k))?, bias), kept)?;
            let input = x.buffer_id();
            let (y, saved) = linear.forward(&cx, x)?;
            Ok((y, saved.x, input))
        };
        let done = py.detach(|| b.pass(key, run));
        let (y, saved, input) = or_raised(done)?;
        let mut list = Vec::new();
        saved::export(py, &b, (saved, input), &mut list)?;
        Ok((exported(py, &b, y, &[rows, n])?, list))
    })
}

/// The gradients of x, of the weight in the weight's type, and of the bias in F32; `None` for one that is not needed.
type Gradients = (Py<PyAny>, Option<Py<PyAny>>, Option<Py<PyAny>>);

/// The backward pass. `saved` is what the forward pass returned, or x if it returned nothing. `needed` says whether the gradients of weight
/// and bias are.
#[pyfunction]
#[pyo3(signature = (saved, weight, bias, dy, time, recipe, name, seed, needed, copies=None))]
#[expect(clippy::too_many_arguments, reason = "the arguments of the Python function")]
pub fn linear_backward(
    py: Python<'_>,
    saved: Vec<Bound<'_, PyAny>>,
    weight: &Bound<'_, PyAny>,
    bias: Option<&Bound<'_, PyAny>>,
    dy: &Bound<'_, PyAny>,
    time: Option<&Bound<'_, PyAny>>,
    recipe: &str,
    name: &str,
    seed: u64,
    needed: [bool; 2],
    copies: Option<&Bound<'_, WeightCopies>>,
) -> PyResult<Gradients> {
    let (dy, weight) = (Foreign::of(dy, "dy")?, Foreign::of(weight, "weight")?);
    let bias = bias.map(|bias| Foreign::of(bias, "bias")).transpose()?;
    let (tensors, place) = Tensors::beside(py, &dy)?;
    let (of_dy, of_weight) = (tensors.take(&dy, "dy", &FLOATS)?, tensors.take(&weight, "weight", &FLOATS)?);
    let of_bias = bias.as_ref().map(|bias| tensors.take(bias, "bias", &FLOATS)).transpose()?;
    let time = tensors.time(time)?;
    let ([rows, n], [n_of_weight, k]) = (dims(&dy, "dy")?, dims(&weight, "weight")?);
    if n != n_of_weight {
        let why = format!("`dy` has {n} columns, expected the {n_of_weight} rows of `weight`");
        return Err(PyValueError::new_err(why));
    }
    let call = Call::linear((recipe, name, of_dy), seed, rows)?;
    let saved = saved.iter().map(|x| Foreign::of(x, "saved")).collect::<PyResult<Vec<_>>>()?;
    let copies = copies.map(Bound::get);
    on!(place, b => {
        let shapes = call.saved_by_linear(Backend::kind(&b), (rows, n, k))?;
        let missing = || PyValueError::new_err("`saved` is empty, expected the layer's input");
        let shape = shapes.iter().flatten().next().ok_or_else(missing)?;
        let mut saved = saved.into_iter();
        let mut input = None;
        if let Shape::Input = shape {
            let x = saved.next().ok_or_else(missing)?;
            let element = tensors.take(&x, "saved", &FLOATS)?;
            input = Some(Operand::Plain(or_raised(matrix(&b, x, element, (rows, k)))?));
        }
        let x = shape.operand((&b, &tensors), &mut saved, &mut input)?;
        let kept = Kept::find(&b, &call.plans.plan(&call.layer()), copies);
        let keeping = kept.keeping();
        let key = call.key(("linear backward", keeping, (rows, n, k), [of_dy, of_weight], of_bias, needed));
        let run = || -> Result<_> {
            let copies = (clock(&b, time)?, keeping.copies_for(CopiesFor::Backward));
            let cx = call.cx(&b, &SoloComm, b.shards(rows, 0)?, copies);
            let bias = bias.map(|bias| matrix(&b, bias, of_bias.unwrap_or(Element::F32), (1, n))).transpose()?;
            let mut linear = call.prepared(&cx, (matrix(&b, weight, of_weight, (n, k))?, bias), kept)?;
            place_gradient(&b, &mut linear.weight, needed[0], plain(of_weight))?;
            if let Some(bias) = &mut linear.bias {
                place_gradient(&b, bias, needed[1], DType::F32)?;
            }
            let dx = linear.backward(&cx, call.saved(x), matrix(&b, dy, of_dy, (rows, n))?)?;
            Ok((dx, gradient(&linear.weight)?, linear.bias.as_ref().map(gradient).transpose()?.flatten()))
        };
        let done = py.detach(|| b.pass(key, run));
        let (dx, dw, dbias) = or_raised(done)?;
        let dbias = dbias.map(|dbias| exported(py, &b, dbias, &[n])).transpose()?;
        let dw = dw.map(|dw| exported(py, &b, dw, &[n, k])).transpose()?;
        Ok((exported(py, &b, dx, &[rows, k])?, dw, dbias))
    })
}
