use crate::error::expect_eq;
use crate::ops::Control;
use crate::{Agreement, Backend, DType, Error, Result, Tensor};

/// One AdamW step of all parameters, in place and in F32, with decoupled weight decay (Loshchilov & Hutter 2019):
///
/// g = grad · grad_scale; m = β₁m + (1−β₁)g; v = β₂v + (1−β₂)g²;
/// w ← w − lr · weight_decay · w − lr · (m · bias1) / (sqrt(v · bias2) + eps).
///
/// BF16 moments are converted to F32 when they are read, and rounded to nearest even when they are written. The update of a weight uses the
/// new moments before they are rounded. If the flag [`Control::STOP`] is set, the op changes nothing.
#[derive(Debug)]
pub struct AdamW<'a, B: Backend> {
    /// The parameters. One call takes all parameters, so that a GPU needs only a few launches.
    pub tensors: Vec<AdamWTensor<'a, B>>,
    /// The buffer of [`Control`], from which the op reads the learning rate, the bias corrections, the clipping factor and the stop flag.
    pub control: &'a B::Buf<f32>,
    /// The decay rate β₁ of the first moment.
    pub beta1: f32,
    /// The decay rate β₂ of the second moment.
    pub beta2: f32,
    /// Epsilon, which is added to the denominator.
    pub eps: f32,
}

/// One parameter of [`AdamW`].
#[derive(Debug)]
pub struct AdamWTensor<'a, B: Backend> {
    /// F32 master weights.
    pub param: &'a mut Tensor<B>,
    /// F32 or BF16 gradient.
    pub grad: &'a Tensor<B>,
    /// First moment, F32 or BF16.
    pub exp_avg: &'a mut Tensor<B>,
    /// The second moment, of the same type as the first moment.
    pub exp_avg_sq: &'a mut Tensor<B>,
    /// The factor of the decoupled weight decay.
    pub weight_decay: f32,
}

const OP: &str = "adamw";

impl<B: Backend> AdamWTensor<'_, B> {
    fn check(&self) -> Result<()> {
        expect_eq(OP, "shape of grad", self.grad.shape(), self.param.shape())?;
        expect_eq(OP, "shape of exp_avg", self.exp_avg.shape(), self.param.shape())?;
        expect_eq(OP, "shape of exp_avg_sq", self.exp_avg_sq.shape(), self.param.shape())?;
        if self.param.dtype() != DType::F32 {
            return Err(Error::shape(OP, "type of param", self.param.dtype(), DType::F32));
        }
        expect_eq(OP, "type of exp_avg_sq", self.exp_avg_sq.dtype(), self.exp_avg.dtype())
    }
}

impl<B: Backend> AdamW<'_, B> {
    /// How closely the results of two backends must agree.
    pub const AGREEMENT: Agreement = Agreement::Bitwise;

    /// Checks shapes and types.
    pub fn check(&self) -> Result<()> {
        expect_eq(OP, "control.len()", B::len(self.control), Control::LEN)?;
        self.tensors.iter().try_for_each(AdamWTensor::check)
    }
}
