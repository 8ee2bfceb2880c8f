//! Plans of a dense linear layer and of the output head.

use super::change::Pass;
use super::compile::Compiler;
use super::conversion::{Cols, Conversion, LayerTensor, Reader, Rows, TensorSize};
use super::steps::Steps;
use crate::Result;
use crate::ops::HeadCodecs;
use crate::recipe::{Precision, Product, Site};

/// The conversions of a dense linear layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LinearPlan {
    /// The conversion of the layer's input to the form that fprop multiplies and, if there is a backward pass, to the form that is saved
    /// for it.
    pub x: Conversion,
    /// The precisions of the input: for fprop, as saved, and for wgrad. Projections of one input share its conversion if these precisions
    /// are equal.
    input: [Precision; 3],
    /// If SwiGLU follows the layer: the precision in which the kernel of SwiGLU writes a copy of its input for the backward pass; `None` if
    /// the input is saved without a copy.
    pub h: Option<Precision>,
    /// The conversion of the saved input to the form that wgrad multiplies.
    pub wgrad_x: Conversion,
    /// The conversion of the gradient of the output to the forms that dgrad and wgrad multiply.
    pub dy: Conversion,
}

/// The conversion of an input that several projections share, for one of these projections.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SharedInput {
    /// The conversion of the input.
    pub conversion: Conversion,
    /// The index of an earlier projection that converts the input in the same way. If there is such a projection, the conversion runs only
    /// once for both.
    pub like: Option<usize>,
    /// Whether all projections convert the input in the same way.
    pub of_all: bool,
}

impl SharedInput {
    /// The conversion of the shared input for each of these projections in one pass. The forward pass converts the input to the form that
    /// fprop multiplies and to the saved form. The backward pass converts the saved input to the form that wgrad multiplies.
    pub fn of(plans: &[&LinearPlan], pass: Pass) -> Vec<Self> {
        let is_forward = pass == Pass::Forward;
        let agreed = if is_forward { 2 } else { 3 };
        let agree = |i: usize, j: usize| plans[i].input[..agreed] == plans[j].input[..agreed];
        let made = |i: usize| if is_forward { &plans[i].x } else { &plans[i].wgrad_x };
        let all = 0..plans.len();
        let of = |i: usize| {
            let mut conversion = *made(i);
            // A shared conversion writes codes if its products multiply different numbers.
            if all.clone().any(|j| agree(i, j) && made(j).numbers() != made(i).numbers()) {
                conversion.readers = conversion.readers.map(|reader| match reader {
                    Reader::Product(_) => Reader::Several,
                    kept => kept,
                });
            }
            let like = (0..i).find(|j| agree(*j, i));
            Self { conversion, like, of_all: all.clone().all(|j| agree(0, j)) }
        };
        all.clone().map(of).collect()
    }
}

/// The conversions of the output head. The fused kernel of head and loss runs them chunk by chunk.
#[derive(Debug, Clone, PartialEq)]
pub struct HeadPlan {
    /// The conversion of the head's input to the forms that fprop and wgrad multiply. Both forms are needed in the forward pass, because
    /// the head computes gradients there.
    pub x: Conversion,
    /// The conversion of the gradient of the logits to the forms that dgrad and wgrad multiply.
    pub dlogits: Conversion,
}

impl HeadPlan {
    /// The codecs of the operands that the kernel of the head quantizes if only losses are needed. All other operands are not quantized.
    ///
    /// # Errors
    /// The same errors as [`Precision::codec`].
    pub fn losses(&self) -> Result<HeadCodecs> {
        let [fprop_x, _] = self.x.first().to.codecs()?;
        Ok(HeadCodecs { fprop_x, ..HeadCodecs::default() })
    }

    /// The codecs of the operands that the kernel of the head quantizes if losses and gradients are needed.
    ///
    /// # Errors
    /// The same errors as [`Precision::codec`].
    pub fn losses_and_gradients(&self) -> Result<HeadCodecs> {
        let [fprop_x, wgrad_x] = self.x.to.codecs()?;
        let [dgrad_dy, wgrad_dy] = self.dlogits.to.codecs()?;
        Ok(HeadCodecs { fprop_x, dgrad_dy, wgrad_dy, wgrad_x })
    }
}

impl Compiler<'_> {
    pub fn linear(&self) -> LinearPlan {
        let [x, y] = [Cols::Inputs, Cols::Outputs].map(|cols| TensorSize::new(Rows::Tokens, cols));
        let plain = self.activations.into();
        let wgrad = self.reader(0, Product::Wgrad);
        LinearPlan {
            input: [Site::FpropX, Site::SavedX, Site::WgradX].map(|site| self.section.at(site)),
            x: self.x(plain, x),
            h: self.kept_h().filter(|_| self.layer.gated),
            wgrad_x: Conversion::one(
                LayerTensor::backward("x", x),
                self.form(Site::SavedX),
                self.route(Site::WgradX),
                wgrad,
            ),
            dy: Conversion {
                tensor: LayerTensor::backward("dy", y),
                from: plain,
                to: self.pair([Site::DgradDy, Site::WgradDy]),
                readers: [self.reader(0, Product::Dgrad), wgrad],
            },
        }
    }

    pub fn head(&self) -> HeadPlan {
        let [x, y] = [Cols::Inputs, Cols::Outputs].map(|cols| TensorSize::new(Rows::Tokens, cols));
        let plain = self.activations.into();
        let wgrad = self.reader(0, Product::Wgrad);
        HeadPlan {
            x: Conversion {
                tensor: LayerTensor::forward("x", x),
                from: plain,
                to: self.pair([Site::FpropX, Site::WgradX]),
                readers: [self.reader(0, Product::Fprop), wgrad],
            },
            dlogits: Conversion {
                tensor: LayerTensor::forward("dlogits", y),
                from: plain,
                to: self.pair([Site::DgradDy, Site::WgradDy]),
                readers: [self.reader(0, Product::Dgrad), wgrad],
            },
        }
    }
}

impl LinearPlan {
    /// See [`super::LayerPlan::steps`].
    pub(super) fn steps(&self, steps: &mut Steps, gated: bool) {
        steps.convert(&self.x);
        let (plain, size) = (steps.plain, self.dy.tensor.size);
        if let Some(h) = &self.h {
            steps.add("swiglu+quantize", LayerTensor::forward("h", size), plain, h.into());
            steps.quantized(h);
            steps.add("swiglu_backward", LayerTensor::backward("dh", size), h.into(), plain);
        }
        steps.convert(&self.wgrad_x);
        // If SwiGLU follows the layer, the gradient of the layer's output is dh.
        let name = if gated { "dh" } else { self.dy.tensor.name };
        steps.convert(&Conversion { tensor: LayerTensor { name, ..self.dy.tensor }, ..self.dy });
    }
}
