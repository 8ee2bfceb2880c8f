//! The ranks of a process group of `torch.distributed`: what divided experts need of [`Comm`], by calls of `nibble.torch.ranks.Ranks`.

use crate::dlpack::{self, Foreign};
use crate::element::Element;
use crate::home::Home;
use nibble_core::{Comm, Error, Result, Transfer, TreeSum};
use pyo3::prelude::*;
use std::ops::Range;

/// A process group.
#[derive(Debug)]
pub struct TorchRanks {
    /// An object of `nibble.torch.ranks.Ranks`.
    ranks: Py<PyAny>,
    rank: usize,
    world: usize,
}

impl TorchRanks {
    /// # Errors
    /// The error that Python raised.
    pub fn of(ranks: &Bound<'_, PyAny>) -> PyResult<Self> {
        let number = |name| ranks.getattr(name)?.extract();
        Ok(Self { rank: number("rank")?, world: number("world")?, ranks: ranks.clone().unbind() })
    }

    fn absent<T>(&self, call: &'static str) -> Result<T> {
        let why = "the experts of a layer do not use this collective".into();
        Err(Error::Comm { call, rank: self.rank, why })
    }
}

/// An error that PyTorch raised.
fn failed(rank: usize, call: &'static str) -> impl Fn(PyErr) -> Error {
    move |error| Error::Comm { call, rank, why: error.to_string() }
}

impl<B: Home> Comm<B> for TorchRanks {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.world
    }

    fn counts(&self, b: &B, send: &B::Buf<i32>) -> Result<B::Buf<i32>> {
        let all = Python::attach(|py| {
            let send = dlpack::export::<B, i32>(py, (b, send.clone()), Element::I32, &[B::len(send)])?;
            Foreign::of(&self.ranks.bind(py).call_method1("gather", (send,))?, "counts")
        });
        b.borrow(all.map_err(failed(self.rank, "counts"))?.lent())
    }

    fn begin_all_to_all_v(
        &self,
        b: &B,
        send: B::Buf<u8>,
        row_bytes: usize,
        send_rows: &[usize],
        recv_rows: &[usize],
        into: B::Buf<u8>,
    ) -> Result<Transfer<B, B::Buf<u8>>> {
        let failed = failed(self.rank, "all_to_all");
        let begun = Python::attach(|py| {
            let tensor = |bytes: B::Buf<u8>| {
                let len = B::len(&bytes);
                dlpack::export::<B, u8>(py, (b, bytes), Element::U8, &[len])
            };
            let (send, into) = (tensor(send)?, tensor(into)?);
            let arguments = (send, into.clone_ref(py), row_bytes, send_rows.to_vec(), recv_rows.to_vec());
            Ok((self.ranks.bind(py).call_method1("exchange", arguments)?.unbind(), into))
        });
        let (wait, into) = begun.map_err(&failed)?;
        Ok(Transfer::new(move |b: &B| {
            let arrived = Python::attach(|py| {
                wait.call0(py)?;
                Foreign::of(into.bind(py), "into")
            });
            b.borrow(arrived.map_err(failed)?.lent_writable())
        }))
    }

    fn begin_reduce_scatter_tree(&self, _: &B, _: Vec<TreeSum<B>>) -> Result<Transfer<B>> {
        self.absent("reduce_scatter")
    }

    fn begin_all_gather_parts(
        &self,
        _: &B,
        _: B::Buf<u8>,
        _: &[Vec<Range<usize>>],
        _: B::Buf<u8>,
    ) -> Result<Transfer<B, B::Buf<u8>>> {
        self.absent("all_gather of parts")
    }

    fn all_gather(&self, _: &B, _: &B::Buf<f32>) -> Result<B::Buf<f32>> {
        self.absent("all_gather")
    }

    fn all_gather_f64(&self, _: &B, _: &B::Buf<f64>) -> Result<B::Buf<f64>> {
        self.absent("all_gather of F64")
    }

    fn barrier(&self) -> Result<()> {
        self.absent("barrier")
    }

    // Processes of PyTorch that wait for one that failed end by their group's timeout.
    fn abort(&self, _: &str) {}
}
