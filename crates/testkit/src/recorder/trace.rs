//! Records each change of a tensor's representation that a backend executed, by tensor name. The caller names a layer's input and the
//! gradient of the layer's output. A tensor that an operation derives from another tensor keeps that tensor's name.

use super::{Event, Recorder};
use nibble_core::Backend;
use nibble_core::recipe::{Change, Form, Pass};
use std::collections::HashMap;

/// Runs a layer on a recorder, and returns the changes of tensor formats in the layer. `work` must report the start of each pass, with the
/// name and the [`Backend::buffer_id`] of the pass's input tensor.
///
/// # Errors
/// Returns the error of `work`.
pub fn traced<B: Backend, E>(
    recorder: &Recorder<B>,
    work: impl FnOnce(&mut dyn FnMut(Pass, &'static str, u64)) -> Result<(), E>,
) -> Result<Vec<Change>, E> {
    let mut trace = Trace { pass: Pass::Forward, names: HashMap::new(), changes: Vec::new() };
    work(&mut |pass, tensor, id| {
        trace.see(&recorder.take_log());
        trace.pass = pass;
        trace.names.insert(id, tensor);
        recorder.watch();
    })?;
    trace.see(&recorder.take_log());
    Ok(trace.changes)
}

struct Trace {
    pass: Pass,
    /// Names of tensors, indexed by the buffer of their elements.
    names: HashMap<u64, &'static str>,
    changes: Vec<Change>,
}

impl Trace {
    fn see(&mut self, log: &[Event]) {
        log.iter().for_each(|event| self.see_one(event));
    }

    fn see_one(&mut self, event: &Event) {
        let first = event.tensors_read.first().map(|(id, form)| (self.names.get(id).copied(), *form));
        // A new buffer may reuse the id of a freed buffer.
        self.names.retain(|id, _| !event.outputs.contains(id));
        let Some((name, from)) = first else { return };
        let made = &event.tensors_made;
        match (event.op, name) {
            ("quantize" | "transcode" | "dequantize" | "cast", Some(tensor)) => {
                self.made(event.op, tensor, from, made);
            }
            ("permute", Some(tensor)) => self.made("dispatch+permute", tensor, from, made),
            ("combine_slots" | "combine_tree", _) => {
                let tensor = if self.pass == Pass::Forward { "y" } else { "dx" };
                self.made("unpermute+combine", tensor, from, made);
            }
            // An expert's second GEMM computes y; the gradient of its first GEMM's output gives dx.
            ("grouped_gemm", Some("a")) => self.named("y", made),
            ("grouped_gemm", Some("dh")) => self.named("dx", made),
            ("swiglu", _) => {
                // The results are one or both layouts of a, followed by h, which has only row blocks.
                let of_a = 1 + usize::from(made.get(1).is_some_and(|(_, form)| form.cols));
                self.fused(["swiglu", "swiglu+quantize"], "a", from, &made[..of_a]);
                self.fused(["swiglu", "swiglu+quantize"], "h", from, &made[of_a..]);
            }
            ("swiglu_backward", _) => {
                // The results are both layouts of dh or one plain tensor, followed by a.
                let of_dh = if made[0].1.rows { 2 } else { 1 };
                let ops = ["swiglu_backward", "swiglu_backward+quantize"];
                self.fused(ops, "dh", from, &made[..of_dh]);
                self.fused(ops, "a", from, &made[of_dh..]);
            }
            ("head_loss", _) => {
                let pass = self.pass;
                let change = |&(tensor, to)| Change { pass, op: "head_loss+quantize", tensor, from, to };
                self.changes.extend(event.made_inside.iter().map(change));
            }
            _ => {}
        }
    }

    fn named(&mut self, tensor: &'static str, made: &[(u64, Form)]) {
        self.names.extend(made.iter().map(|(id, _)| (*id, tensor)));
    }

    /// Records that an operation converted a tensor to one or two layouts.
    fn made(&mut self, op: &'static str, tensor: &'static str, from: Form, made: &[(u64, Form)]) {
        let Some((_, first)) = made.first() else { return };
        let (rows, cols) = (made.iter().any(|(_, f)| f.rows), made.iter().any(|(_, f)| f.cols));
        let to = Form { rows, cols, ..*first };
        self.named(tensor, made);
        self.changes.push(Change { pass: self.pass, op, tensor, from, to });
    }

    /// Like `made`, for an operation that computes the tensor and may write it quantized. A plain result of a plain tensor is not a change.
    fn fused(&mut self, ops: [&'static str; 2], tensor: &'static str, from: Form, made: &[(u64, Form)]) {
        let Some((id, to)) = made.first() else { return };
        match (from.format.is_block(), to.format.is_block()) {
            (_, true) => self.made(ops[1], tensor, from, made),
            (true, false) => self.made(ops[0], tensor, from, made),
            (false, false) => self.names.extend([(*id, tensor)]),
        }
    }
}
