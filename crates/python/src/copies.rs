//! Copies of a layer's weights for products, kept for several passes.

use crate::home::{AnyCopies, Copies, Home};
use nibble_core::Result;
use nibble_core::recipe::{LayerPlan, Precision, Signs};
use nibble_train::cx::{CopiesFor, Cx};
use nibble_train::param::Param;
use pyo3::prelude::*;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The copies of a layer's weights that its first pass makes, and that later passes read. Whoever has one uses it as long as the weights
/// do not change.
#[pyclass(frozen)]
#[derive(Default)]
pub struct WeightCopies(Mutex<AnyCopies>);

#[pymethods]
impl WeightCopies {
    #[new]
    fn new() -> Self {
        Self::default()
    }
}

impl WeightCopies {
    fn lock(&self) -> MutexGuard<'_, AnyCopies> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The copies, if there are any that this backend may read.
    pub fn get<B: Home>(&self, b: &B) -> Option<Copies<B>> {
        let mut kept = self.lock();
        B::copies(&mut kept).as_ref().filter(|(by, _)| b.shares_stream(by)).map(|(_, copies)| copies.clone())
    }

    fn put<B: Home>(&self, b: &B, copies: Copies<B>) {
        let mut kept = self.lock();
        let old = B::copies(&mut kept).replace((b.clone(), copies));
        // Only now, because dropping tensors of PyTorch may wait for the interpreter's lock, whose holder may wait for this one.
        drop(kept);
        drop(old);
    }
}

/// What a pass has to do with kept copies, on which its allocations depend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Keeping {
    /// It makes the copies that it needs for itself.
    Nothing,
    /// It makes all copies, and keeps them.
    Makes,
    /// It reads kept copies.
    Reads,
}

impl Keeping {
    /// The copies that a pass makes.
    pub fn copies_for(self, pass: CopiesFor) -> CopiesFor {
        if self == Self::Nothing { pass } else { CopiesFor::AllPasses }
    }
}

/// The kept copies of a layer's pass, if there are any.
pub struct Kept<'a, B: Home> {
    at: Option<&'a WeightCopies>,
    found: Option<Copies<B>>,
}

impl<'a, B: Home> Kept<'a, B> {
    /// Looks for copies. A layer whose plan transforms weights with other signs in each step keeps none.
    pub fn find(b: &B, plan: &LayerPlan, at: Option<&'a WeightCopies>) -> Self {
        let changes = |form: &Precision| form.rht.is_some_and(|transform| transform.signs == Signs::Step);
        let at = at.filter(|_| !changes(&plan.weights.w) && !changes(&plan.weights.wt));
        Self { found: at.and_then(|at| at.get(b)), at }
    }

    /// What the pass has to do.
    pub fn keeping(&self) -> Keeping {
        match (&self.at, &self.found) {
            (None, _) => Keeping::Nothing,
            (_, None) => Keeping::Makes,
            _ => Keeping::Reads,
        }
    }

    /// Gives a layer the copies of its weights: those that were kept, or new ones, which are kept if that is wanted.
    ///
    /// # Errors
    /// Those of `prepare`, which makes new ones.
    pub fn prepare<L>(
        self,
        cx: &Cx<'_, B>,
        (layer, plan): (&mut L, &LayerPlan),
        weights: impl Fn(&mut L) -> Vec<&mut Param<B>>,
        prepare: impl FnOnce(&mut L) -> Result<()>,
    ) -> Result<()> {
        if let Some(found) = self.found {
            weights(layer)
                .into_iter()
                .zip(found)
                .for_each(|(weight, of)| weight.take_copies(&plan.weights, of));
            return Ok(());
        }
        prepare(layer)?;
        if let Some(at) = self.at {
            at.put(cx.b, weights(layer).into_iter().map(|weight| weight.copies()).collect());
        }
        Ok(())
    }
}
