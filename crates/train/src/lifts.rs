//! Counts what the lifts of operands inside of products round. A product lifts MXFP4 and MXFP6 operands to E4M3 without counting what changes,
//! so the steps that measure quantization count the same lifts beforehand, at sites of their own.

use crate::cx::Cx;
use crate::param::Param;
use crate::record::CountSite;
use nibble_core::formats::BlockAxis;
use nibble_core::ops::{Counts, MeasureLift};
use nibble_core::recipe::{LayerPlan, Product};
use nibble_core::{Groups, Kernels, Operand, Result};
use std::sync::Arc;

/// A product of a layer.
#[derive(Debug, Clone, Copy)]
pub struct Lifting<'a, B: Kernels> {
    /// The layer's name.
    pub layer: &'a str,
    /// The weight of the product.
    pub weight: &'a Param<B>,
    /// The weight's number in the layer.
    pub number: usize,
    /// Which of the weight's products it is.
    pub product: Product,
}

impl<B: Kernels> Cx<'_, B> {
    /// In a step that measures the layer: counts what the lifts of a product's operands round. `plan` is the layer's plan, and `groups` are
    /// the groups of the rows of the first operand. The lift of a weight is counted on the first of the ranks that multiply the weight.
    ///
    /// # Errors
    /// From the backend.
    pub fn measure_lifts(
        &self,
        of: Lifting<'_, B>,
        plan: impl FnOnce() -> Arc<LayerPlan>,
        operands: [&Operand<B>; 2],
        groups: Option<&Groups<B>>,
    ) -> Result<()> {
        self.measure_parts(of, plan, operands.map(Some), groups)
    }

    /// [`Cx::measure_lifts`] of a part of a product: `None` is an operand that another part counts.
    pub(crate) fn measure_parts(
        &self,
        of: Lifting<'_, B>,
        plan: impl FnOnce() -> Arc<LayerPlan>,
        operands: [Option<&Operand<B>>; 2],
        groups: Option<&Groups<B>>,
    ) -> Result<()> {
        // An analysis of errors lists quantizations only.
        let Some(sample) = self.measures.filter(|_| self.training && self.errors.is_none()) else {
            return Ok(());
        };
        let plan = plan();
        let Some(product) = plan.product(of.number, of.product) else { return Ok(()) };
        for (i, x) in operands.into_iter().enumerate() {
            let Some(x) = x else { continue };
            let site = CountSite::of_lift(&plan, product, i, (of.layer, &of.weight.name));
            let Some(site) = site.filter(|site| sample.takes(site.decoder_layer())) else { continue };
            let is_weight = product.sites[i].is_weight();
            if is_weight && of.weight.replicas(self.mesh).rank() != 0 {
                continue;
            }
            let x = x.block("measure_lift")?;
            let stack = if is_weight { of.weight.stack() } else { 1 };
            let groups = groups.filter(|_| !is_weight && x.axis == BlockAxis::Row);
            let counts = MeasureLift { x, is_second: i == 1, stack, groups }.run(self.b)?;
            self.counted.borrow_mut().keep(site, Counts(counts), None);
        }
        Ok(())
    }
}
