//! The head loss, whose quantizations happen inside of the operation.

use super::Recorder;
use super::call::{Taken, open};
use super::random::OwnedHeadRandom;
use crate::head_by_parts::head_by_parts;
use nibble_core::formats::{BlockAxis, Codec};
use nibble_core::ops::{HeadCodecs, HeadLoss, HeadLossGrad, HeadLossOut, HeadOperand};
use nibble_core::recipe::Form;
use nibble_core::{Backend, Kernels, Result};

/// Issues [`HeadLoss`]; skips one quantization if a defect asks for it.
pub(super) fn head_loss<B: Kernels>(
    recorder: &Recorder<B>,
    op: HeadLoss<'_, Recorder<B>>,
) -> Result<HeadLossOut<Recorder<B>>> {
    let mut call = recorder.call("head_loss", &op);
    call.makes_inside(head_forms(&op.operands()));
    let HeadLoss { x, w, codecs, random, targets, shards, chunk, grad } = op;
    let skipped = call.not_quantized(&head_arguments(&codecs));
    let (x, w, targets) = (call.reads(x)?, call.reads(w)?, call.reads(targets)?);
    let random = call.reads(&OwnedHeadRandom::new(&random))?;
    let grad = match grad {
        Some(HeadLossGrad { wt, control, dw, accumulate }) => {
            Some((call.reads(wt)?, call.reads(control)?, call.writes(dw)?, accumulate))
        }
        None => None,
    };
    call.issue(move |b: &B, run| {
        let (x, w, targets) = (open(b, &x)?, open(b, &w)?, open(b, &targets)?);
        let random = open(b, &random)?;
        let mut grad = match &grad {
            Some((wt, control, dw, accumulate)) => {
                Some((open(b, wt)?, open(b, control)?, Taken::new(b, dw, run)?, *accumulate))
            }
            None => None,
        };
        let grad = grad.as_mut().map(|(wt, control, dw, accumulate)| {
            let (wt, control, dw, accumulate) = (&*wt, &*control, &mut **dw, *accumulate);
            HeadLossGrad { wt, control, dw, accumulate }
        });
        let (random, targets) = (random.lent(), &targets);
        let op = HeadLoss { x: &x, w: &w, codecs, random, targets, shards, chunk, grad };
        match skipped {
            Some(argument) => head_by_parts(b, op, argument),
            None => b.head_loss(op),
        }
    })
}

/// The arguments that the head loss quantizes internally, each with the resulting form.
fn head_arguments(codecs: &HeadCodecs) -> Vec<(&'static str, Form)> {
    let form = |(argument, codec, columns): (_, Option<Codec>, bool)| {
        let axis = if columns { BlockAxis::Col } else { BlockAxis::Row };
        Some((argument, Form::new(codec?.format(), axis)))
    };
    codecs.arguments().into_iter().filter_map(form).collect()
}

/// The forms of the tensors that the head loss quantizes internally.
fn head_forms<B: Backend>([x, dlogits]: &[HeadOperand<'_, B>; 2]) -> Vec<(&'static str, Form)> {
    let mut forms = Vec::new();
    for (tensor, operand) in [("x", x), ("dlogits", dlogits)] {
        let [rows, cols] = operand.codecs();
        match rows.filter(|_| operand.is_one_read()) {
            Some(both) => forms.push((tensor, Form::both(both.format()))),
            None => {
                let axes = [(rows, BlockAxis::Row), (cols, BlockAxis::Col)];
                let made =
                    axes.into_iter().filter_map(|(codec, axis)| Some(Form::new(codec?.format(), axis)));
                forms.extend(made.map(|form| (tensor, form)));
            }
        }
    }
    forms
}
