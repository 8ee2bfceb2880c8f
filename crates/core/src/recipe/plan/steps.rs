//! A plan as the sequence of changes of representation that a backend observes.

use super::change::{Change, Form};
use super::conversion::{Conversion, LayerTensor, TensorSize};
use super::route::{Computed, Pair, Route};
use crate::DType;
use crate::ops::Planes;
use crate::recipe::Precision;

/// A change of the representation of a tensor that a layer makes.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    /// The change of representation.
    pub change: Change,
    /// The precision after the change, if the change quantizes a plain tensor; otherwise `None`.
    pub quantized: Option<Precision>,
    /// The size of the tensor.
    pub size: TensorSize,
}

impl Conversion {
    /// The changes of representation of this conversion.
    pub fn steps(&self) -> Vec<Step> {
        let mut steps = Steps { plain: self.from, made: Vec::new() };
        steps.convert(self);
        steps.made
    }
}

/// The changes of representation of a layer, collected in order.
pub(super) struct Steps {
    /// The form of activations outside of matrix products.
    pub plain: Form,
    made: Vec<Step>,
}

impl Steps {
    pub fn new(activations: DType) -> Self {
        Self { plain: activations.into(), made: Vec::new() }
    }

    /// All changes of representation, in order.
    pub fn made(self) -> Vec<Step> {
        self.made
    }

    /// Attributes all changes of representation to one kernel.
    pub fn in_one_kernel(&mut self, op: &'static str) {
        self.made.iter_mut().for_each(|step| step.change.op = op);
    }

    /// Adds a change of representation by the operation `op`.
    pub fn add(&mut self, op: &'static str, tensor: LayerTensor, from: Form, to: Form) {
        let LayerTensor { name, pass, size } = tensor;
        self.made.push(Step { change: Change { pass, op, tensor: name, from, to }, quantized: None, size });
    }

    /// Notes that the change that was added last quantizes a plain tensor to the precision `to`.
    pub fn quantized(&mut self, to: &Precision) {
        if let Some(last) = self.made.last_mut() {
            last.quantized = Some(*to);
        }
    }

    /// Adds the conversion of an existing tensor.
    pub fn convert(&mut self, conversion: &Conversion) {
        self.pair(conversion, conversion.from, &conversion.to);
    }

    /// Adds the conversion of a tensor that a kernel has written in a plain type.
    pub fn then(&mut self, conversion: &Conversion<Computed>) {
        if let Computed::Plain { dtype, then, .. } = &conversion.to {
            self.pair(conversion, (*dtype).into(), then);
        }
    }

    fn pair<To>(&mut self, of: &Conversion<To>, from: Form, pair: &Pair) {
        match pair {
            Pair::One(route) => self.route(of, from, route),
            Pair::OneRead(to) => {
                self.add("quantize", of.tensor, from, Form::both(to.format));
                self.quantized(to);
            }
            Pair::Two(first, second) => [first, second].into_iter().for_each(|to| self.route(of, from, to)),
            Pair::Again { through, to } => {
                self.add("dequantize", of.tensor, from, (*through).into());
                self.pair(of, (*through).into(), &Pair::requantized(to));
            }
        }
    }

    fn route<To>(&mut self, of: &Conversion<To>, from: Form, route: &Route) {
        let tensor = of.tensor;
        match route {
            Route::Plain(dtype) if from.format.is_block() => {
                self.add("dequantize", tensor, from, (*dtype).into());
            }
            Route::Plain(dtype) if from != Form::from(*dtype) => {
                self.add("cast", tensor, from, (*dtype).into());
            }
            Route::Same | Route::Plain(_) => {}
            Route::Quantize(to) => {
                self.add("quantize", tensor, from, to.into());
                self.quantized(to);
            }
            Route::Transcode(to) => self.add("transcode", tensor, from, to.into()),
            Route::Requantize { through, to } => {
                self.add("dequantize", tensor, from, (*through).into());
                self.add("quantize", tensor, (*through).into(), to.into());
                self.quantized(to);
            }
        }
    }

    /// Adds the output of a fused kernel. If both the input and the output of the kernel are plain, there is no change to add.
    pub fn written(&mut self, [op, quantizing]: [&'static str; 2], of: &Conversion<Computed>) {
        let (to, precision) = match &of.to {
            Computed::Fused { to, planes: Planes::Both } if to.format.is_block() => {
                (Form::both(to.format), Some(to))
            }
            Computed::Fused { to, .. } => (to.into(), Some(to)),
            Computed::Plain { dtype, .. } => ((*dtype).into(), None),
        };
        let tensor = of.tensor;
        match (of.from.format.is_block(), to.format.is_block()) {
            (_, true) => {
                self.add(quantizing, tensor, of.from, to);
                precision.into_iter().for_each(|to| self.quantized(to));
            }
            (true, false) => self.add(op, tensor, of.from, to),
            (false, false) => {}
        }
    }

    /// Adds the dispatch of the tokens' rows.
    pub fn sent(&mut self, tensor: LayerTensor, wire: &Precision) {
        self.convert(&Conversion::sent(tensor, self.plain, wire));
        self.add("dispatch+permute", tensor, wire.into(), wire.into());
    }

    /// Adds the combine of the rows that the experts send back.
    pub fn summed(&mut self, tensor: LayerTensor, wire: &Precision) {
        if wire.format.is_block() {
            self.add("dequantize", tensor, wire.into(), self.plain);
        }
        self.add("unpermute+combine", tensor, self.plain, self.plain);
    }
}
