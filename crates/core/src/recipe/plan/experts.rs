//! What an expert layer does under its section: tokens travel, two grouped products with SwiGLU between, and rows that travel back.

use super::change::Form;
use super::compile::{Compiler, Passes};
use super::conversion::{Cols, Conversion, LayerTensor, Reader, Rows, TensorSize};
use super::route::{Computed, Route};
use super::steps::Steps;
use crate::recipe::{Precision, Product, Site};

/// Where the gradient of an expert's second product gets that product's input.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum WgradA {
    /// From what the forward pass kept.
    Kept(Conversion),
    /// SwiGLU's backward kernel makes it again from h.
    Again {
        /// What it makes.
        a: Conversion<Computed>,
        /// Whether that is a quantization of its own, and not the other form of what the forward pass has quantized and counted: its values or its bits
        /// are others.
        counts: bool,
    },
}

/// The conversions of an expert layer, in the order in which it makes them.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertPlan {
    /// Tokens, as they travel.
    pub x_sent: Precision,
    /// Tokens that arrived: for fprop, and as they are kept.
    pub x: Conversion,
    /// The second product's input: for fprop, and as it is kept.
    pub a: Conversion<Computed>,
    /// Whether the second form of `a` is kept.
    pub keeps_a: bool,
    /// The input of SwiGLU as SwiGLU's kernel writes it; none where it is kept as it is.
    pub h: Option<Precision>,
    /// What experts return, as it travels back. What arrives in blocks is dequantized before it is summed.
    pub y_sent: Precision,
    /// Gradients, as they travel.
    pub dy_sent: Precision,
    /// Gradients that arrived: for dgrad, and for wgrad.
    pub dy: Conversion,
    /// The gradient of h: for dgrad, and for wgrad.
    pub dh: Conversion<Computed>,
    /// The second product's input for wgrad.
    pub wgrad_a: WgradA,
    /// The gradient of their input, as it travels back.
    pub dx_sent: Precision,
    /// The tokens for wgrad, from what was kept.
    pub wgrad_x: Conversion,
}

/// Its weights, in the order of its products.
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
        // The kernel writes both before anything is made of a.
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
        // Rows set out before the gradients of weights are computed, and are summed after that.
        let dx = LayerTensor::backward("dx", row);
        steps.convert(&Conversion::sent(dx, steps.plain, &self.dx_sent));
        steps.convert(&self.wgrad_x);
        steps.summed(dx, &self.dx_sent);
    }

    /// What its fused kernels leave to operations of their own, and why.
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
