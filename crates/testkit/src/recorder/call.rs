//! One operation in progress. The operation's arguments are sealed (replaced by non-owning handles), the operation runs now or is recorded,
//! and it is logged. A fault may be injected.

use super::buf::Buf;
use super::cell::{Elements, Output};
use super::fault::{Struck, spoil};
use super::mapping::{Open, Over, Returned, Seal, Store, Wrap};
use super::recording::{Entry, Op};
use super::{Event, Mode, Recorder};
use nibble_core::recipe::Form;
use nibble_core::{Backend, Data, Plain, Result, Tensor};
use std::fmt;
use std::ops::{Deref, DerefMut};

/// Whether an operation changes the buffers that it writes in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Run {
    /// The operation changes its in-place buffers.
    Real,
    /// The operation works on temporary copies, because only the shapes of its results are needed.
    Dry,
}

/// An operation whose arguments are being sealed (replaced by non-owning handles).
pub(super) struct Call<'a, B: Backend> {
    recorder: &'a Recorder<B>,
    op: Op<B>,
}

impl<B: Backend> Recorder<B> {
    /// Starts an operation with these arguments. The arguments' `Debug` output has everything except the contents of buffers.
    pub(super) fn call(&self, name: &'static str, arguments: &impl fmt::Debug) -> Call<'_, B> {
        let told = self.is_watched() || self.shared.is_recording();
        let arguments = if told { format!("{arguments:?}") } else { String::new() };
        let (reads, writes, made) = (Vec::new(), Vec::new(), Vec::new());
        let (tensors, inside) = (Default::default(), Vec::new());
        Call {
            recorder: self,
            op: Op { name, arguments, reads, writes, made, tensors, inside, computes: true },
        }
    }

    /// Executes recorded work.
    pub(super) fn execute(&self, entries: &[Entry<B>]) -> Result<()> {
        for entry in entries {
            match entry {
                Entry::Free(cell) => cell.free(),
                Entry::Op(op, run) => {
                    let inputs = self.inputs(op);
                    run(&self.inner)?;
                    self.executed(op, inputs)?;
                }
            }
        }
        Ok(())
    }

    /// The ids of the buffers that an operation will read, if a log is kept. The ids are read in advance, because a write may change a
    /// buffer's id.
    fn inputs(&self, op: &Op<B>) -> Vec<u64> {
        if self.is_watched() { op.reads.iter().map(|cell| cell.id()).collect() } else { Vec::new() }
    }

    /// Logs an operation, and injects the requested fault.
    fn executed(&self, op: &Op<B>, inputs: Vec<u64>) -> Result<()> {
        if !op.computes {
            return Ok(());
        }
        let outputs = [&op.made[..], &op.writes].concat();
        self.note(|| {
            let written: Vec<u64> = outputs.iter().map(|output| output.cell.id()).collect();
            let of = |ids: &[u64], tensors: &[(usize, Elements)]| {
                tensors.iter().filter_map(|(at, elements)| Some((*ids.get(*at)?, elements.form))).collect()
            };
            Event {
                op: op.name,
                arguments: op.arguments.clone(),
                tensors_read: of(&inputs, &op.tensors[0]),
                tensors_made: of(&written, &op.tensors[1]),
                made_inside: op.inside.clone(),
                inputs,
                outputs: written,
            }
        });
        let strikes = self.shared.lock().fault.as_mut().is_some_and(|fault| fault.strikes(op.name));
        if strikes {
            let spoiled = spoil(&self.inner, &outputs)?;
            let mut state = self.shared.lock();
            (state.fault, state.struck) = (None, Some(Struck { op: op.name, spoiled }));
        }
        Ok(())
    }

    /// Creates handles for the results of the inner backend.
    #[allow(clippy::type_complexity)] // the type is the final state of `Wrap`, and the wrapped result
    fn wrap<R: Returned<B>>(&self, inner: &R::Inner) -> Result<(R, Vec<Output<B>>, Vec<(usize, Elements)>)> {
        let mut wrap = Wrap { recorder: self, made: Vec::new(), tensors: Vec::new() };
        let wrapped = R::wrapped(inner, &mut wrap)?;
        Ok((wrapped, wrap.made, wrap.tensors))
    }
}

impl<B: Backend> Call<'_, B> {
    /// Marks the operation as one that only allocates or shares buffers.
    pub fn silent(mut self) -> Self {
        self.op.computes = false;
        self
    }

    /// Registers an argument that the operation reads.
    pub fn reads<X: Over<A = Recorder<B>, On<Recorder<B>> = X>>(&mut self, x: &X) -> Result<X> {
        x.mapped(&mut Seal { cells: &mut self.op.reads, tensors: &mut self.op.tensors[0] })
    }

    /// Declares the forms of tensors that the operation computes internally but does not return.
    pub fn makes_inside(&mut self, forms: impl IntoIterator<Item = (&'static str, Form)>) {
        self.op.inside.extend(forms);
    }

    /// Declares the arguments that the operation quantizes internally. The result is the argument whose quantization the operation must
    /// skip, if there is one.
    pub fn not_quantized(&self, inside: &[(&'static str, Form)]) -> Option<&'static str> {
        self.recorder.shared.defects.not_quantized(self.op.name, inside)
    }

    /// Registers an argument that the operation writes in place. If another handle shares the buffer, the buffer is copied first.
    pub fn writes<W: Written<B>>(&mut self, x: &mut W) -> Result<W> {
        x.make_own(self.recorder)?;
        let output = x.output();
        self.op.reads.push(output.cell.clone());
        self.op.tensors[2].extend(x.elements().map(|elements| (self.op.writes.len(), elements)));
        self.op.writes.push(output);
        Ok(x.unowned())
    }

    /// Runs the operation now, or records it for replays.
    pub fn issue<R: Returned<B> + 'static>(
        self,
        run: impl Fn(&B, Run) -> Result<R::Inner> + Send + 'static,
    ) -> Result<R> {
        let Self { recorder, mut op } = self;
        let is_recording = recorder.shared.is_recording();
        if !is_recording && recorder.shared.mode != Mode::EachReplayed {
            let inputs = recorder.inputs(&op);
            let spoiled = recorder.spoil_read(&op)?;
            let ran = run(&recorder.inner, Run::Real);
            spoiled.into_iter().for_each(|(cell, original)| cell.put(original));
            let (wrapped, made, tensors) = recorder.wrap(&ran?)?;
            (op.made, op.tensors[1]) = (made, tensors);
            recorder.spoil_results(&op)?;
            recorder.executed(&op, inputs)?;
            return Ok(wrapped);
        }
        let (wrapped, made, tensors) = match R::nothing() {
            Some(nothing) => (nothing, Vec::new(), Vec::new()),
            None => recorder.wrap(&run(&recorder.inner, Run::Dry)?)?,
        };
        (op.made, op.tensors[1]) = (made.clone(), tensors);
        let replay = move |b: &B| {
            let inner = run(b, Run::Real)?;
            R::wrapped(&inner, &mut Store { b, cells: made.iter() }).map(drop)
        };
        let entry = Entry::Op(Box::new(op), Box::new(replay));
        if !is_recording {
            recorder.execute(&[entry])?;
        } else if let Some(recording) = &mut recorder.shared.lock().recording {
            recording.push(entry);
        }
        Ok(wrapped)
    }
}

/// The inner buffers of a sealed argument.
pub(super) fn open<B: Backend, X: Over<A = Recorder<B>>>(b: &B, x: &X) -> Result<X::On<B>> {
    x.mapped(&mut Open(b))
}

/// An argument that an operation writes in place.
pub(super) trait Written<B: Backend>: Sized {
    type Inner;
    fn make_own(&mut self, recorder: &Recorder<B>) -> Result<()>;
    fn output(&self) -> Output<B>;
    /// The elements of a tensor, if the argument is a tensor.
    fn elements(&self) -> Option<Elements>;
    fn unowned(&self) -> Self;
    /// Takes the inner buffer out of the cell, or copies it.
    fn take(&self, b: &B, run: Run) -> Result<Self::Inner>;
    fn put(&self, b: &B, inner: &Self::Inner) -> Result<()>;
}

impl<T: Plain, B: Backend> Written<B> for Buf<T, B> {
    type Inner = B::Buf<T>;

    fn make_own(&mut self, recorder: &Recorder<B>) -> Result<()> {
        if self.is_shared() {
            // The inner backend copies the bytes at the next write.
            let mut call = recorder.call("share", self).silent();
            let from = call.reads(&*self)?;
            *self = call.issue(move |b, _| open(b, &from))?;
        }
        Ok(())
    }

    fn output(&self) -> Output<B> {
        Buf::output(self)
    }

    fn elements(&self) -> Option<Elements> {
        None
    }

    fn unowned(&self) -> Self {
        Buf::unowned(self)
    }

    fn take(&self, b: &B, run: Run) -> Result<B::Buf<T>> {
        match run {
            Run::Real => Buf::take(self, b),
            Run::Dry => self.inner(b),
        }
    }

    fn put(&self, b: &B, inner: &B::Buf<T>) -> Result<()> {
        Buf::put(self, b, inner)
    }
}

impl<B: Backend> Written<B> for Tensor<Recorder<B>> {
    type Inner = Tensor<B>;

    fn make_own(&mut self, recorder: &Recorder<B>) -> Result<()> {
        match &mut self.data {
            Data::F32(buf) => buf.make_own(recorder),
            Data::Bf16(buf) => buf.make_own(recorder),
        }
    }

    fn output(&self) -> Output<B> {
        match &self.data {
            Data::F32(buf) => buf.output(),
            Data::Bf16(buf) => buf.output(),
        }
    }

    fn elements(&self) -> Option<Elements> {
        Some(Elements { form: self.dtype().into(), lines: self.rows, scales: None })
    }

    fn unowned(&self) -> Self {
        let data = match &self.data {
            Data::F32(buf) => Data::F32(buf.unowned()),
            Data::Bf16(buf) => Data::Bf16(buf.unowned()),
        };
        Self { data, ..*self }
    }

    fn take(&self, b: &B, run: Run) -> Result<Tensor<B>> {
        let data = match &self.data {
            Data::F32(buf) => Data::F32(Written::take(buf, b, run)?),
            Data::Bf16(buf) => Data::Bf16(Written::take(buf, b, run)?),
        };
        Ok(Tensor { data, rows: self.rows, cols: self.cols })
    }

    fn put(&self, b: &B, inner: &Tensor<B>) -> Result<()> {
        match (&self.data, &inner.data) {
            (Data::F32(buf), Data::F32(inner)) => buf.put(b, inner),
            (Data::Bf16(buf), Data::Bf16(inner)) => buf.put(b, inner),
            _ => Err(super::cell::device("an operation", "a tensor written in place has changed its type")),
        }
    }
}

/// An in-place argument that is out of its cell while the operation runs. Dropping this value puts it back, also after errors.
pub(super) struct Taken<'a, B: Backend, W: Written<B>> {
    of: &'a W,
    inner: W::Inner,
    b: &'a B,
    run: Run,
}

impl<'a, B: Backend, W: Written<B>> Taken<'a, B, W> {
    pub fn new(b: &'a B, of: &'a W, run: Run) -> Result<Self> {
        Ok(Self { of, inner: of.take(b, run)?, b, run })
    }
}

impl<B: Backend, W: Written<B>> Deref for Taken<'_, B, W> {
    type Target = W::Inner;
    fn deref(&self) -> &W::Inner {
        &self.inner
    }
}

impl<B: Backend, W: Written<B>> DerefMut for Taken<'_, B, W> {
    fn deref_mut(&mut self) -> &mut W::Inner {
        &mut self.inner
    }
}

impl<B: Backend, W: Written<B>> Drop for Taken<'_, B, W> {
    fn drop(&mut self) {
        if self.run == Run::Real {
            // If this fails, the cell stays empty, and the next operation that reads the cell gets an error.
            let _ = self.of.put(self.b, &self.inner);
        }
    }
}
