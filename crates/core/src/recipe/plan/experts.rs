//! Plans of an expert layer: dispatch, two grouped products with SwiGLU in between, and combine.

use super::change::Form;
use super::compile::{Compiler, Passes};
use super::conversion::{Cols, Conversion, LayerTensor, Reader, Rows, TensorSize};
use super::route::{Computed, Route};
use super::steps::Steps;
use crate::recipe::{Precision, Product, Site};

/// Where wgrad of the down projection gets its operand `a`, the input of the down projection.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum WgradA {
    /// The forward pass saves the input.
    Kept(Conversion),
    /// SwiGLU's backward kernel recomputes the input from h.
    Again {
        /// The conversion of the recomputed input.
        a: Conversion<Computed>,
        /// Whether the quantization of the recomputed input is counted. The quantization is not counted if the forward pass has already
        /// quantized and counted the same values, with the same bits, in another form.
        counts: bool,
    },
}

/// The conversions of an expert layer, in the order in which the layer runs them.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertPlan {
    /// The precision in which the dispatch sends tokens to experts.
    pub x_sent: Precision,
    /// The conversion of received tokens to the form that fprop multiplies, and to the form that is saved.
    pub x: Conversion,
    /// The conversion of `a`, the input of the down projection, to the form that fprop multiplies, and to the form that is saved.
    pub a: Conversion<Computed>,
    /// Whether the forward pass saves `a`, the input of the down projection.
    pub keeps_a: bool,
    /// The precision in which the kernel of SwiGLU writes a copy of its input h for the backward pass; `None` if h is saved without a copy.
    pub h: Option<Precision>,
    /// The precision in which the combine sends the outputs of experts back. If the outputs are quantized, they are dequantized before the
    /// outputs of a token are summed.
    pub y_sent: Precision,
    /// The precision in which the gradients of expert outputs are sent to the experts.
    pub dy_sent: Precision,
    /// The conversion of received gradients to the forms that dgrad and wgrad multiply.
    pub dy: Conversion,
    /// The conversion of the gradient of h to the forms that dgrad and wgrad multiply.
    pub dh: Conversion<Computed>,
    /// Where wgrad of the down projection gets its operand `a`.
    pub wgrad_a: WgradA,
    /// The precision in which the gradients of expert inputs are sent back.
    pub dx_sent: Precision,
    /// The conversion of the saved tokens to the form that wgrad multiplies.
    pub wgrad_x: Conversion,
}

/// Indices of the weights, in the order of the products.
const GATE_UP: usize = 0;
const DOWN: usize = 1;

impl Compiler<'_> {
    pub(super) fn experts(&self) -> ExpertPlan {
        let plain: Form = self.activations.into();
        let [row, h, a] =
            [Cols::Inputs, Cols::Outputs, Cols::Hidden].map(|cols| TensorSize::new(Rows::Routed, cols));
        let at = |site| self.section.at(site);
        let kept_a = match self.passes {
            Passes::Forward => None,
            Passes::Both { keep_a } => self.section.second_a(keep_a),
        };
        let (fprop_a, wgrad_a) = (self.reader(DOWN, Product::Fprop), self.reader(DOWN, Product::Wgrad));
        let (dgrad_dh, wgrad_dh) =
            (self.reader(GATE_UP, Product::Dgrad), self.reader(GATE_UP, Product::Wgrad));
        let of_h = self.form(Site::SavedH);
        ExpertPlan {
            x_sent: at(Site::DispatchFwd),
            x: self.x(self.form(Site::DispatchFwd), row),
            a: Conversion {
                tensor: LayerTensor::forward("a", a),
                from: plain,
                to: self.section.a(kept_a, self.activations),
                readers: [fprop_a, if kept_a.is_some() { Reader::Backward } else { fprop_a }],
            },
            keeps_a: kept_a.is_some(),
            h: self.kept_h(),
            y_sent: at(Site::CombineFwd),
            dy_sent: at(Site::DispatchBwd),
            dy: Conversion {
                tensor: LayerTensor::backward("dy", row),
                from: self.form(Site::DispatchBwd),
                to: self.pair([Site::DgradDy, Site::WgradDy]),
                readers: [self.reader(DOWN, Product::Dgrad), wgrad_a],
            },
            dh: Conversion {
                tensor: LayerTensor::backward("dh", h),
                from: of_h,
                to: self.section.dh(self.activations),
                readers: [dgrad_dh, wgrad_dh],
            },
            wgrad_a: match kept_a {
                Some(kept) => {
                    let is_written = self.section.kept_a().is_some();
                    let route = if is_written { self.route(Site::WgradA) } else { Route::Same };
                    WgradA::Kept(Conversion::one(
                        LayerTensor::backward("a", a),
                        (&kept).into(),
                        route,
                        wgrad_a,
                    ))
                }
                None => WgradA::Again {
                    a: Conversion {
                        tensor: LayerTensor::backward("a", a),
                        from: of_h,
                        to: self.section.a_again(self.activations),
                        readers: [wgrad_a; 2],
                    },
                    counts: !self.section.makes_both_of_a(),
                },
            },
            dx_sent: at(Site::CombineBwd),
            wgrad_x: Conversion::one(
                LayerTensor::backward("x", row),
                self.form(Site::SavedX),
                self.route(Site::WgradX),
                wgrad_dh,
            ),
        }
    }
}

impl ExpertPlan {
    /// See [`super::LayerPlan::steps`].
    pub(super) fn steps(&self, steps: &mut Steps) {
        let row = self.x.tensor.size;
        let token = TensorSize::new(Rows::Tokens, Cols::Inputs);

        const FORWARD: [&str; 2] = ["swiglu", "swiglu+quantize"];
        const BACKWARD: [&str; 2] = ["swiglu_backward", "swiglu_backward+quantize"];
        steps.sent(LayerTensor::forward("x", token), &self.x_sent);
        steps.convert(&self.x);
        // The kernel writes h and `a` before `a` is converted.
        steps.written(FORWARD, &self.a);
        if let Some(h) = &self.h {
            steps.add(FORWARD[1], LayerTensor::forward("h", self.dh.tensor.size), steps.plain, h.into());
            steps.quantized(h);
        }
        steps.then(&self.a);
        let y = LayerTensor::forward("y", row);
        steps.convert(&Conversion::sent(y, steps.plain, &self.y_sent));
        steps.summed(y, &self.y_sent);
        steps.sent(LayerTensor::backward("dy", token), &self.dy_sent);
        steps.convert(&self.dy);
        steps.written(BACKWARD, &self.dh);
        match &self.wgrad_a {
            WgradA::Again { a, .. } => {
                steps.written(BACKWARD, a);
                steps.then(&self.dh);
                steps.then(a);
            }
            WgradA::Kept(a) => {
                steps.then(&self.dh);
                steps.convert(a);
            }
        }
        // The rows of dx are sent before the weight gradients are computed, and summed after that.
        let dx = LayerTensor::backward("dx", row);
        steps.convert(&Conversion::sent(dx, steps.plain, &self.dx_sent));
        steps.convert(&self.wgrad_x);
        steps.summed(dx, &self.dx_sent);
    }

    /// The conversions that the layer's fused kernels leave to separate operations, and the reasons.
    pub(super) fn unfused(&self) -> Vec<String> {
        let again = match &self.wgrad_a {
            WgradA::Again { a, .. } => Some(("swiglu_backward", a)),
            WgradA::Kept(_) => None,
        };
        let all = [Some(("swiglu", &self.a)), Some(("swiglu_backward", &self.dh)), again];
        let lost = all.into_iter().flatten().filter_map(|(kernel, conversion)| match conversion.to {
            Computed::Plain { why, .. } => {
                Some(format!("{kernel} does not write {} as it is multiplied: {why}", conversion.tensor.name))
            }
            Computed::Fused { .. } => None,
        });
        lost.collect()
    }
}
