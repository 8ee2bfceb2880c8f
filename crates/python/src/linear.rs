//! A linear layer under a recipe: `nibble_train::layers::Linear` on PyTorch's tensors.

use crate::dlpack::Foreign;
use crate::element::Element;
use crate::errors::or_raised;
use crate::home::Home;
use crate::layer::{Call, FLOATS, Operands, cast, clock, dims, gradient};
use crate::on;
use crate::place::{Tensors, exported, matrix, plain};
use crate::saved::{self, Shape};
use nibble_core::recipe::LayerKind;
use nibble_core::{Backend, DType, DeviceKind, Kernels, Operand, Result, SoloComm, Tensor};
use nibble_dry::Dry;
use nibble_train::cx::Cx;
use nibble_train::layers::{Layer, Linear, LinearSaved};
use nibble_train::param::{GradientPlan, Param, Placement};
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

    /// The layer, with the copies of its weight that products read.
    fn prepared<B: Kernels>(
        &self,
        cx: &Cx<'_, B>,
        weight: Tensor<B>,
        bias: Option<Tensor<B>>,
    ) -> Result<Linear<B>> {
        let param = |what: &str, x| Param::new(format!("{}.{what}", self.name), x, Placement::Replicated);
        let wide = |bias| cast(cx.b, bias, DType::F32);
        let mut linear = Linear {
            weight: param("weight", weight),
            bias: bias.map(wide).transpose()?.map(|bias| param("bias", bias)),
            layer: self.layer(),
            linear: self.name.clone(),
            out: cx.activations(),
        };
        linear.prepare(cx)?;
        Ok(linear)
    }

    fn saved<B: Kernels>(&self, x: Operand<B>) -> LinearSaved<B> {
        LinearSaved::new(&self.name, x)
    }

    /// What the forward pass saves, found by running it on a backend without memory.
    fn saved_by_linear(&self, kind: DeviceKind, (rows, n, k): Sizes) -> PyResult<Operands> {
        let find = || -> Result<Vec<Option<Shape>>> {
            let dry = Dry::new(kind);
            let cx = self.cx(&dry, &SoloComm, Shards::new(&dry, 1, rows, 0)?, None);
            let x = Tensor::unwritten(&dry, cx.activations(), rows, k)?;
            let linear = self.prepared(&cx, Tensor::unwritten(&dry, DType::F32, n, k)?, None)?;
            let input = x.buffer_id();
            Ok(vec![Some(Shape::of(&linear.input(&cx, &x)?.1.x, input))])
        };
        self.saves(kind, &[rows, n, k], find)
    }
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
        let cx = call.cx(&dry, &SoloComm, Shards::new(&dry, 1, rows, 0)?, None);
        let mut linear = call.prepared(&cx, Tensor::unwritten(&dry, DType::F32, n, k)?, None)?;
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
/// number of the step: random bits depend on it, on `seed` and on `name`. Returns y in the type of x, and the tensors that the backward
/// pass needs.
#[pyfunction]
#[pyo3(signature = (x, weight, bias, time, recipe, name, seed))]
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
    on!(place, b => {
        let done = py.detach(|| -> Result<_> {
            let cx = call.cx(&b, &SoloComm, b.shards(rows, 0)?, clock(&b, time)?);
            let x = matrix(&b, x, of_x, (rows, k))?;
            let bias = bias.map(|bias| matrix(&b, bias, of_bias.unwrap_or(Element::F32), (1, n))).transpose()?;
            let linear = call.prepared(&cx, matrix(&b, weight, of_weight, (n, k))?, bias)?;
            let input = x.buffer_id();
            let (y, saved) = linear.forward(&cx, x)?;
            Ok((y, saved.x, input))
        });
        let (y, saved, input) = or_raised(done)?;
        let mut list = Vec::new();
        saved::export(py, &b, (saved, input), &mut list)?;
        Ok((exported(py, &b, y, &[rows, n])?, list))
    })
}

/// The gradients of x, of the weight in the weight's type, and of the bias in F32 (`None` without a bias).
type Gradients = (Py<PyAny>, Py<PyAny>, Option<Py<PyAny>>);

/// The backward pass. `saved` is what the forward pass returned, or x if it returned nothing.
#[pyfunction]
#[pyo3(signature = (saved, weight, bias, dy, time, recipe, name, seed))]
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
        let done = py.detach(|| -> Result<_> {
            let cx = call.cx(&b, &SoloComm, b.shards(rows, 0)?, clock(&b, time)?);
            let bias = bias.map(|bias| matrix(&b, bias, of_bias.unwrap_or(Element::F32), (1, n))).transpose()?;
            let mut linear = call.prepared(&cx, matrix(&b, weight, of_weight, (n, k))?, bias)?;
            let plan = GradientPlan { dtype: plain(of_weight), at_once: false };
            linear.weight.place_gradient(&b, plan, 1)?;
            let dx = linear.backward(&cx, call.saved(x), matrix(&b, dy, of_dy, (rows, n))?)?;
            Ok((dx, gradient(&linear.weight)?, linear.bias.as_ref().map(gradient).transpose()?))
        });
        let (dx, dw, dbias) = or_raised(done)?;
        let dbias = dbias.map(|dbias| exported(py, &b, dbias, &[n])).transpose()?;
        Ok((exported(py, &b, dx, &[rows, k])?, exported(py, &b, dw, &[n, k])?, dbias))
    })
}
