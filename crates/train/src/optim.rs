//! AdamW with F32 masters and global-norm clipping.

use crate::config::TrainConfig;
use crate::cx::Cx;
use crate::param::{Param, Placement};
use nibble_core::formats::double::power;
use nibble_core::ops::{AdamW, SumSquares};
use nibble_core::{Error, Kernels, Result, Tensor};

/// Norm of the gradient over all parameters and ranks, the same bits on every rank and for any number of them.
///
/// Each tensor's (each expert's) sum of squares is rounded to F32; the sums are added in F64 in canonical order.
fn grad_norm<B: Kernels>(cx: &Cx<'_, B>, params: &[&mut Param<B>]) -> Result<f64> {
    let mut total = 0.0;
    for param in params {
        let Some(grad) = &param.grad else { continue };
        let sums: Vec<f32> =
            SumSquares { x: grad, parts: param.stack() }.run(cx.b)?.into_iter().map(|s| s as f32).collect();
        let sums = match param.placement {
            Placement::Replicated => sums,
            Placement::Experts(_) => cx.b.download(&cx.comm.all_gather(cx.b, &cx.b.upload(&sums)?)?)?,
        };
        total += sums.into_iter().map(f64::from).sum::<f64>();
    }
    Ok(total.sqrt())
}

/// Reduces all gradients, clips them by their global norm and takes one AdamW step. Returns the norm before clipping.
///
/// # Errors
/// [`Error::NonFinite`] if the norm is not a number; no weight has changed then.
pub fn step<B: Kernels>(
    cx: &Cx<'_, B>,
    mut params: Vec<&mut Param<B>>,
    config: &TrainConfig,
    lr: f64,
) -> Result<f64> {
    for param in &mut params {
        param.reduce_grad(cx)?;
    }
    let norm = grad_norm(cx, &params)?;
    if !norm.is_finite() {
        return Err(Error::NonFinite { site: "gradient norm".into(), layer: "-".into(), step: cx.step });
    }
    let clip = config.clip_norm;
    let grad_scale = if clip > 0.0 && norm > clip { (clip / norm) as f32 } else { 1.0 };
    let bias = |beta: f64| (1.0 / (1.0 - power(beta, cx.step + 1))) as f32;
    for param in params {
        let Some(grad): Option<Tensor<B>> = param.grad.take() else { continue };
        AdamW {
            param: &mut param.master,
            grad: &grad,
            exp_avg: &mut param.exp_avg,
            exp_avg_sq: &mut param.exp_avg_sq,
            lr: lr as f32,
            beta1: config.beta1 as f32,
            beta2: config.beta2 as f32,
            bias1: bias(config.beta1),
            bias2: bias(config.beta2),
            eps: config.eps as f32,
            weight_decay: if param.decays { config.weight_decay as f32 } else { 0.0 },
            grad_scale,
        }
        .run(cx.b)?;
    }
    Ok(norm)
}
