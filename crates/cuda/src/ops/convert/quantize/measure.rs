//! Measurements before and after encoding, for formats with one scale per row, column or tensor
//! (`csrc/kernels/convert/whole_scales.cuh`).

use super::args::{MatrixArgs, Planned, Transform};
use super::config::{self, QuantizeDesc, TILE, input_type};
use crate::backend::Buf;
use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::{KernelArg, Launch, plain_args};
use crate::ops::buffer_check::BufferCheck;
use crate::{Buffer, Cuda, Device};
use nibble_core::formats::{Format, Outer, Scaling};
use nibble_core::ops::{Delayed, MeasureAmax, Planes, Quantize};
use nibble_core::{BlockScaled, DType, Result};

const THREADS: u32 = 256;

fn whole_spec(name: &'static str, args: Vec<(&'static str, TemplateArg)>) -> KernelSpec {
    KernelSpec { source: "kernels/convert/whole_scales.cuh", name, args }
}

fn maxima_spec(down: bool, input: DType) -> KernelSpec {
    let name = if down { "nib::column_maxima" } else { "nib::row_maxima" };
    whole_spec(name, vec![("In", input_type(input))])
}

fn transformed_maxima_spec(input: DType) -> KernelSpec {
    whole_spec("nib::hadamard_maxima", vec![("In", input_type(input))])
}

fn tensor_spec(format: Format, outer: Outer) -> KernelSpec {
    let args = [("kNvfp4", format == Format::Nvfp4), ("kPower", outer == Outer::Power)];
    whole_spec("nib::tensor_scales", args.map(|(name, value)| (name, TemplateArg::Bool(value))).to_vec())
}

/// Every kernel instance of this module.
pub(super) fn instances() -> impl Iterator<Item = KernelSpec> {
    let maxima =
        |input| [maxima_spec(false, input), maxima_spec(true, input), transformed_maxima_spec(input)];
    let maxima = [DType::Bf16, DType::F32].into_iter().flat_map(maxima);
    let tensor =
        [(Format::Nvfp4, Outer::Tensor), (Format::Nvfp4, Outer::Power), (Format::E4m3Tensor, Outer::Tensor)];
    let tensor = tensor.map(|(format, outer)| tensor_spec(format, outer));
    let others =
        ["nib::spans_of_rows", "nib::spread_scales", "nib::count_lines"].map(|name| whole_spec(name, vec![]));
    maxima.chain(tensor).chain(others)
}

/// Mirrors the device struct `EarlierArg`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct EarlierArg {
    expected: u64,
    stride: u64,
    spans: i32,
    pad: u32,
}
plain_args!(EarlierArg);

impl EarlierArg {
    /// The argument for an operation; `check` has ensured that there are as many records as spans.
    pub fn of(op: &Quantize<'_, Cuda>) -> Self {
        let Some(Delayed { records, first, stride }) = op.delayed else {
            return Self { expected: 0, stride: 0, spans: 0, pad: 0 };
        };
        let expected = records.get().address() + (first * size_of::<f32>()) as u64;
        Self { expected, stride: stride as u64, spans: op.spans() as i32, pad: 0 }
    }
}

/// Measurements of a matrix, taken before its values are encoded.
#[derive(Default)]
pub(super) struct Measured {
    /// For each row or column: bits of its largest magnitude, and whether it gets a non-zero code.
    pub rows: Option<(Buffer<u32>, Buffer<u8>)>,
    pub cols: Option<(Buffer<u32>, Buffer<u8>)>,
    /// For each tensor: the inverse scale.
    pub inverses: Option<Buffer<f32>>,
    pub span_of_row: Option<Buffer<i32>>,
    /// For each tensor: the scale, as stored.
    scales: Option<Buffer<f32>>,
}

/// A matrix or a stack of matrices as the kernels read it.
pub(super) struct Measure<'a> {
    pub device: &'a Device,
    pub desc: &'a QuantizeDesc,
    pub source: &'a MatrixArgs<'a>,
    pub earlier: EarlierArg,
    pub len: Option<&'a Buffer<i32>>,
    /// Largest magnitudes of the matrices, used instead of measured magnitudes.
    pub amax: Option<&'a Buf<f32>>,
}

/// Runs [`MeasureAmax`] on the GPU.
pub(crate) fn measure_amax(cuda: &Cuda, op: MeasureAmax<'_, Cuda>) -> Result<Buf<f32>> {
    op.check()?;
    BufferCheck::by("measure_amax", cuda).tensor("x", op.x)?;
    let out = op.result(cuda)?;
    if op.x.rows != 0 && op.x.cols != 0 {
        let op = Quantize { stack: op.stack, ..Quantize::new(op.x, op.codec, Planes::Tiles) };
        let desc = QuantizeDesc::of(&op);
        config::check(&desc)?;
        let (device, desc, source) = (cuda.device(), &desc, &MatrixArgs::of(&op));
        let measure = Measure { device, desc, source, earlier: EarlierArg::of(&op), len: None, amax: None };
        // The bits of magnitudes sort like the magnitudes themselves.
        measure.span_maxima(&out.get().reinterpreted()?, None)?;
    }
    Ok(out)
}

fn grid(threads: usize) -> Launch {
    Launch {
        ctas: threads.div_ceil(THREADS as usize).max(1) as u32,
        threads: THREADS,
        cluster: 1,
        shared_bytes: 0,
    }
}

impl Measure<'_> {
    /// The largest magnitude of each row, or of each span; the kernel's comment explains `by_span`.
    fn row_maxima(&self, out: &Buffer<u32>, spans: Option<&Buffer<i32>>, by_span: i32) -> Result<()> {
        let Self { device, desc, source, .. } = *self;
        let (rows, cols) = (desc.stack * desc.rows, desc.cols);
        if let Some(Transform { arg, input }) = &source.transform {
            let ctas = desc.rows.div_ceil(TILE) * desc.cols.div_ceil(TILE);
            let launch = Launch { ctas: ctas as u32, threads: THREADS, cluster: 1, shared_bytes: 0 };
            let (rows, cols) = (rows as i32, cols as i32);
            let args: [&dyn KernelArg; 8] =
                [source.x, out, &source.row_id, &spans, &by_span, &rows, &cols, arg];
            // SAFETY: the lengths were checked as for the launch below; x has the rows of the transform. Scales from
            // earlier steps are never used with a transform.
            return unsafe { device.kernel(&transformed_maxima_spec(*input))?.launch(launch, &args) };
        }
        let launch = Launch { ctas: rows.div_ceil(32) as u32, threads: THREADS, cluster: 1, shared_bytes: 0 };
        let (matrix_rows, rows, cols) = (desc.rows.max(1) as i32, rows as i32, cols as i32);
        let (id_mask, earlier) = (&source.id_mask, &self.earlier);
        let args: [&dyn KernelArg; 10] =
            [source.x, out, &source.row_id, id_mask, &spans, &matrix_rows, &by_span, &rows, &cols, earlier];
        // SAFETY: x has rows · cols values, and row_id and spans have one value per row (`BufferCheck`); out has one value per row or
        // span, and `check` ensured that there are as many records as spans.
        unsafe { device.kernel(&maxima_spec(false, desc.input))?.launch(launch, &args) }
    }

    /// The largest magnitude of each span, from which the span's scale is computed.
    fn span_maxima(&self, out: &Buffer<u32>, spans: Option<&Buffer<i32>>) -> Result<()> {
        // If blocks have no scale record that could be marked, a non-finite value marks the whole tensor.
        let marks_all = self.desc.codec.scale_kind().levels().is_empty();
        self.row_maxima(out, spans, if marks_all { 2 } else { 1 })
    }

    /// The largest magnitude of each column, or of each column within each span.
    fn column_maxima(&self, out: &Buffer<u32>, spans: Option<&Buffer<i32>>) -> Result<()> {
        let Self { device, desc, source, .. } = *self;
        let ctas = desc.stack * desc.rows.div_ceil(256) * desc.cols.div_ceil(256);
        let launch = Launch { ctas: ctas as u32, threads: THREADS, cluster: 1, shared_bytes: 0 };
        let (rows, cols) = (desc.rows as i32, desc.cols as i32);
        let lines = (desc.stack * desc.cols) as i32;
        let args: [&dyn KernelArg; 8] =
            [source.x, out, &source.row_id, &source.id_mask, &spans, &lines, &rows, &cols];
        // SAFETY: `BufferCheck` checked x, row_id and spans; out has one value for each column of
        // the stack and each span.
        unsafe { device.kernel(&maxima_spec(true, desc.input))?.launch(launch, &args) }
    }

    /// The scales of rows or columns; a column has one scale per span of rows.
    pub fn lines(&self) -> Result<Measured> {
        let Self { device, desc, source, .. } = *self;
        let span_of_row = if desc.planes == Planes::Rows { None } else { self.spans()? };
        let spans = if span_of_row.is_some() { source.num_groups as usize + 1 } else { 1 };
        let mut measured = Measured::default();
        if desc.planes != Planes::Cols {
            let lines = desc.stack * desc.rows;
            let (maxima, any) = (device.alloc(lines)?, device.filled(lines, 0)?);
            self.row_maxima(&maxima, None, 0)?;
            measured.rows = Some((maxima, any));
        }
        if desc.planes != Planes::Rows {
            let lines = spans * desc.stack * desc.cols;
            let (maxima, any) = (device.filled(lines, 0)?, device.filled(lines, 0)?);
            self.column_maxima(&maxima, span_of_row.as_ref())?;
            measured.cols = Some((maxima, any));
        }
        Ok(Measured { span_of_row, ..measured })
    }

    /// The span of each row, if there are groups: the number of the row's group, or the number of groups for a row outside all
    /// groups.
    fn spans(&self) -> Result<Option<Buffer<i32>>> {
        let Self { device, desc, source, .. } = *self;
        let Some(start) = source.start else { return Ok(None) };
        let spans = device.alloc::<i32>(desc.rows)?;
        let kernel = device.kernel(&whole_spec("nib::spans_of_rows", vec![]))?;
        let args: [&dyn KernelArg; 4] = [start, &source.num_groups, &spans, &(desc.rows as i32)];
        // SAFETY: `start` has one value more than there are groups (`BufferCheck`), and there are as many spans as rows.
        unsafe { kernel.launch(grid(desc.rows), &args) }?;
        Ok(Some(spans))
    }

    /// The scale of each span.
    pub fn tensor(&self, out: &Planned<'_>) -> Result<Measured> {
        let Self { device, desc, source, earlier, len, amax } = *self;
        let format = desc.codec.format();
        let span_of_row = self.spans()?;
        let count = if span_of_row.is_some() { source.num_groups as usize + 1 } else { desc.stack };
        let maxima = match amax {
            Some(amax) => amax.get().reinterpreted::<u32>()?.copied()?,
            None => {
                let maxima = device.filled::<u32>(count, 0)?;
                self.span_maxima(&maxima, span_of_row.as_ref())?;
                maxima
            }
        };
        let (inverses, scales) = (device.alloc::<f32>(2 * count)?, device.alloc::<f32>(count)?);
        let Scaling { headroom, outer, .. } = desc.codec.scaling();
        let (matrix_rows, cols) = (desc.rows as i32, desc.cols as i32);
        let counts = out.found.map(|found| found.counts.get());
        let args: [&dyn KernelArg; 11] = [
            &maxima,
            &(count as i32),
            &headroom.factor(),
            &desc.codec.tensor_most(),
            &inverses,
            &scales,
            &earlier,
            &len,
            &matrix_rows,
            &cols,
            &counts,
        ];
        // SAFETY: there are `count` maxima and scales, and two inverses for each; there is one length per group (`BufferCheck`), and there
        // are two counts if there are records.
        unsafe { device.kernel(&tensor_spec(format, outer))?.launch(grid(count), &args) }?;
        let (inverses, scales) = (Some(inverses), Some(scales));
        Ok(Measured { inverses, span_of_row, scales, ..Measured::default() })
    }

    /// Writes the scale of each output row from the span's scale: NaN if the span has a non-finite value.
    pub fn spread(&self, measured: &Measured, out: &Planned<'_>) -> Result<()> {
        let (desc, Some(scales)) = (self.desc, &measured.scales) else { return Ok(()) };
        let found = out.found.map(|found| found.amax.get());
        let found_spans = found.map_or(0, |found| found.len() as i32);
        let spread = |plane: Option<&BlockScaled<Cuda>>, matrix_rows: usize| -> Result<()> {
            let Some(of_rows) = plane.and_then(|plane| plane.tensor_scale.as_ref()) else { return Ok(()) };
            let rows = of_rows.get().len();
            let kernel = self.device.kernel(&whole_spec("nib::spread_scales", vec![]))?;
            let (span_of_row, matrix_rows) = (measured.span_of_row.as_ref(), matrix_rows.max(1) as i32);
            let args: [&dyn KernelArg; 7] =
                [scales, &span_of_row, &matrix_rows, of_rows.get(), &(rows as i32), &found, &found_spans];
            // SAFETY: the span of each row has a scale, because it is a matrix of the stack or was written by `spans_of_rows`; `found` has
            // `found_spans` values.
            unsafe { kernel.launch(grid(rows), &args) }
        };
        spread(out.rows, desc.rows)?;
        spread(out.cols, if desc.planes == Planes::Tiles { desc.cols } else { desc.capacity })
    }

    /// Adds the number of rows or columns with a non-zero code to the counts.
    pub fn count_lines(&self, measured: &Measured, counts: &Buffer<u64>) -> Result<()> {
        let Some((_, any)) = measured.rows.as_ref().or(measured.cols.as_ref()) else { return Ok(()) };
        let kernel = self.device.kernel(&whole_spec("nib::count_lines", vec![]))?;
        let args: [&dyn KernelArg; 3] = [any, &(any.len() as i32), counts];
        // SAFETY: there are as many flags as the number that is passed to the kernel, and three
        // counts.
        unsafe { kernel.launch(grid(any.len()), &args) }
    }
}
