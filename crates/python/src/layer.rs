//! What the layers share: the context of a pass, and the checks of arguments.

use crate::dlpack::Foreign;
use crate::element::Element;
use crate::errors::or_raised;
use crate::home::Home;
use crate::recipes::{self, Plans};
use crate::saved::Shape;
use nibble_core::ops::Cast;
use nibble_core::recipe::{Layer as Name, LayerKind};
use nibble_core::{Comm, DType, DeviceKind, Error, Kernels, Mesh, Result, Tensor};
use nibble_train::cx::{CopiesFor, Cx};
use nibble_train::param::{GradientPlan, Param};
use nibble_train::shards::Shards;
use nibble_train::spec::Update;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// The types of inputs, weights and gradients.
pub const FLOATS: [Element; 2] = [Element::F32, Element::Bf16];

/// A layer under a recipe: what decides its bits besides its tensors.
pub struct Call {
    /// The plans of the recipe's layers.
    pub plans: Plans,
    /// The layer's name, by which overrides of the recipe select it, and on which random bits depend.
    pub name: String,
    kind: LayerKind,
    seed: u64,
}

impl Call {
    /// # Errors
    /// The errors of [`recipes::plans`] and [`recipes::check`].
    pub fn new(
        (recipe, name, activations): (&str, &str, Element),
        kind: LayerKind,
        seed: u64,
    ) -> PyResult<Self> {
        let plans = recipes::plans(recipe, activations)?;
        recipes::check(&plans)?;
        Ok(Self { plans, name: name.to_owned(), kind, seed })
    }

    /// The layer as recipes know it.
    pub fn layer(&self) -> Name {
        Name::new(self.kind, &self.name)
    }

    /// The key of a pass of the layer. `what` is what its allocations depend on besides the layer and its recipe.
    pub fn key(&self, what: impl Hash) -> u64 {
        let mut hasher = DefaultHasher::new();
        let plans = (Arc::as_ptr(&self.plans.layers) as usize, self.plans.progress.to_bits());
        (plans, &self.name, what).hash(&mut hasher);
        hasher.finish()
    }

    /// The context of a pass over the rows of one shard, with the ranks among which experts are divided. `clock` is the buffer of the step's
    /// number, on which random bits depend.
    pub fn cx<'a, B: Kernels>(
        &self,
        b: &'a B,
        ranks: &'a dyn Comm<B>,
        shards: Shards<B>,
        (clock, copies): (Option<B::Buf<u32>>, CopiesFor),
    ) -> Cx<'a, B> {
        let cx = Cx::under(b, Mesh::new(ranks), self.plans.layers.clone(), shards, self.plans.progress);
        Cx { training: true, seed: self.seed, clock, copies, ..cx }
    }
}

/// The operands that a layer saves, found once for each layer and its sizes.
pub type Operands = Arc<Vec<Option<Shape>>>;

/// The plans' address, which stands for the recipe, since plans are never dropped; the layer; whether it is on a GPU; its sizes.
type Key = (usize, String, bool, Vec<usize>);

static KNOWN: OnceLock<Mutex<HashMap<Key, Operands>>> = OnceLock::new();

impl Call {
    /// The operands that the forward pass saves: those that `find` finds by running it on a backend without memory, the first time.
    ///
    /// # Errors
    /// The errors of `find`.
    pub fn saves(
        &self,
        kind: DeviceKind,
        sizes: &[usize],
        find: impl FnOnce() -> Result<Vec<Option<Shape>>>,
    ) -> PyResult<Operands> {
        let key = (
            Arc::as_ptr(&self.plans.layers) as usize,
            self.name.clone(),
            kind == DeviceKind::Gpu,
            sizes.to_vec(),
        );
        let mut known = KNOWN.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = known.get(&key) {
            return Ok(found.clone());
        }
        let found = Arc::new(or_raised(find())?);
        known.insert(key, found.clone());
        Ok(found)
    }
}

/// The buffer of the step's number.
///
/// # Errors
/// The errors of [`Home::borrow`].
pub fn clock<B: Home>(b: &B, time: Option<Foreign>) -> Result<Option<B::Buf<u32>>> {
    time.map(|time| b.borrow(time.lent())).transpose()
}

/// The tensor in another type, or itself. A recipe may send rows in another type than that of activations.
///
/// # Errors
/// The errors of the backend.
pub fn cast<B: Kernels>(b: &B, x: Tensor<B>, dtype: DType) -> Result<Tensor<B>> {
    if x.dtype() == dtype { Ok(x) } else { Cast { x: &x, dtype }.run(b) }
}

/// The lengths of a tensor's `N` dimensions.
///
/// # Errors
/// `ValueError`, which names the argument, for another number of dimensions.
pub fn dims<const N: usize>(x: &Foreign, argument: &str) -> PyResult<[usize; N]> {
    let shape = x.shape();
    <[i64; N]>::try_from(shape).map(|dims| dims.map(|dim| dim as usize)).map_err(|_| {
        PyValueError::new_err(format!("`{argument}` has shape {shape:?}, expected {N} dimensions"))
    })
}

/// Places the gradient of a parameter in the parameter's type, or freezes the parameter.
///
/// # Errors
/// The errors of the backend.
pub fn place_gradient<B: Kernels>(b: &B, param: &mut Param<B>, is_needed: bool, dtype: DType) -> Result<()> {
    if !is_needed {
        param.update = Update::Never;
        return Ok(());
    }
    param.place_gradient(b, GradientPlan { dtype, at_once: false }, 1)
}

/// The gradient that a backward pass has written; `None` of a frozen parameter.
///
/// # Errors
/// [`Error::Defect`] if there is none.
pub fn gradient<B: Kernels>(param: &Param<B>) -> Result<Option<Tensor<B>>> {
    if !param.has_gradient() {
        return Ok(None);
    }
    let missing = Error::Defect { place: "layer", what: "a backward pass wrote no gradient" };
    param.grad().cloned().ok_or(missing).map(Some)
}
