//! Copies rows of bytes, with their scales, to other places (`csrc/kernels/routing/copy_rows.cuh`); permute, pack and
//! unpack share this code.

use crate::Cuda;
use crate::compile::jit::{KernelSpec, TemplateArg};
use crate::launch::{KernelArg, Launch};
use crate::ops::Instance;
use crate::{Buffer, Device};
use bytemuck::Pod;
use nibble_core::{Data, Error, Operand, Result, RowKind};
use std::ffi::c_void;

const THREADS: usize = 128;
/// Rows with fewer units than this are short, so more rows must be in flight at once.
const SHORT_ROW_UNITS: usize = 200;
/// Slots per group of lanes, if a source row has at least as many slots on average.
const SLOTS_EACH: usize = 4;

/// The rows of a code or scale buffer, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    address: u64,
    len: usize,
    stride: usize,
}

impl Span {
    /// Contiguous rows of `stride` bytes.
    pub(crate) fn of<T: Pod>(buffer: &Buffer<T>, stride: usize) -> Self {
        Self { address: buffer.address(), len: buffer.bytes(), stride }
    }

    /// The part of each row from `offset` on.
    pub(crate) fn skipping(self, offset: usize) -> Self {
        Self { address: self.address + offset as u64, len: self.len.saturating_sub(offset), ..self }
    }

    /// Whether `rows` rows of `bytes` bytes lie within the buffer.
    fn holds(&self, rows: usize, bytes: usize) -> bool {
        let last = rows.checked_sub(1).map(|last| last.checked_mul(self.stride));
        match last {
            None => true,
            Some(start) => {
                start.and_then(|start| start.checked_add(bytes)).is_some_and(|end| end <= self.len)
            }
        }
    }
}

/// One buffer of codes or scales to copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Plane {
    /// The source of the copy.
    pub from: Span,
    /// The destination of the copy.
    pub to: Span,
    /// Number of bytes per row.
    pub bytes: usize,
    /// The word that fills rows without a source.
    pub pad: u32,
}

impl Plane {
    /// The widest unit (16, 4 or 1 bytes) that divides addresses, strides and row lengths.
    fn unit(&self) -> u32 {
        let bits = self.from.address
            | self.to.address
            | [self.from.stride, self.to.stride, self.bytes]
                .map(|n| n as u64)
                .into_iter()
                .fold(0, |a, b| a | b);
        match bits % 16 {
            0 => 16,
            4 | 8 | 12 => 4,
            _ => 1,
        }
    }

    fn as_arg(&self) -> RowPlane {
        RowPlane {
            from: self.from.address,
            to: self.to.address,
            from_stride: self.from.stride as u64,
            to_stride: self.to.stride as u64,
            bytes: self.bytes as u32,
            pad: self.pad,
            unit: self.unit(),
            unused: 0,
        }
    }
}

/// Mirrors the device struct `RowPlane`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RowPlane {
    from: u64,
    to: u64,
    from_stride: u64,
    to_stride: u64,
    bytes: u32,
    pad: u32,
    unit: u32,
    unused: u32,
}

// SAFETY: the pointer and the size are those of the value itself; the field `unused` fills it up to
// its alignment, so that every byte is initialised.
unsafe impl KernelArg for RowPlane {
    fn pointer(&self) -> *const c_void {
        std::ptr::from_ref(self).cast()
    }
    fn bytes(&self) -> usize {
        size_of::<Self>()
    }
}

/// The source row of each result row; a source row that does not exist gives a padding row.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Order<'a> {
    /// Row i comes from row i.
    Same,
    /// Row i comes from row `index[i]`.
    Gather(&'a Buffer<i32>),
    /// Row i comes from row `source_row[i]`. `slot_row` lists the rows that have a source, grouped by source row, so
    /// that each source row is read once for all of its result rows. In the order of the result rows, a source row
    /// would have left the cache before its next use.
    Spread { source_row: &'a Buffer<i32>, slot_row: &'a Buffer<i32> },
}

/// A copy of rows in a given [`Order`].
#[derive(Debug)]
pub(crate) struct CopyRows<'a> {
    /// The operation's name, for errors.
    pub op: &'static str,
    /// The codes, which are the first part of a row.
    pub codes: Plane,
    /// The scales, if rows have any.
    pub scales: Option<Plane>,
    /// The source row of each result row.
    pub order: Order<'a>,
    /// The number of rows to write.
    pub rows: usize,
    /// The number of source rows.
    pub rows_in: usize,
}

impl CopyRows<'_> {
    fn check(&self) -> Result<()> {
        let op = self.op;
        for (argument, got) in [("rows", self.rows), ("rows_in", self.rows_in)] {
            if got > i32::MAX as usize {
                return Err(Error::shape(op, argument, got, "below 2^31"));
            }
        }
        match self.order {
            Order::Gather(index) | Order::Spread { source_row: index, .. } if index.len() != self.rows => {
                return Err(Error::shape(op, "index.len()", index.len(), self.rows));
            }
            Order::Spread { slot_row, .. } if slot_row.len() > self.rows => {
                let most = format!("at most {}, the rows", self.rows);
                return Err(Error::shape(op, "slot_row.len()", slot_row.len(), most));
            }
            _ => {}
        }
        for plane in [Some(&self.codes), self.scales.as_ref()].into_iter().flatten() {
            let fits = u32::try_from(plane.bytes).is_ok_and(|bytes| bytes <= u32::MAX - 8192);
            if !fits
                || !plane.from.holds(self.rows_in, plane.bytes)
                || !plane.to.holds(self.rows, plane.bytes)
            {
                let expected = format!("{} rows from {} of {} bytes", self.rows, self.rows_in, plane.bytes);
                return Err(Error::shape(op, "rows", format!("{plane:?}"), expected));
            }
        }
        Ok(())
    }

    /// The number of units per row, codes and scales together.
    fn units(&self) -> usize {
        let units = |plane: &Plane| plane.bytes / plane.unit() as usize;
        units(&self.codes) + self.scales.as_ref().map_or(0, units)
    }

    /// Checks the sizes and launches the kernel.
    ///
    /// # Safety
    /// Nothing else may use the buffers of the written spans meanwhile, and all spans must be of live
    /// buffers of this device.
    pub(crate) unsafe fn run(self, device: &Device) -> Result<()> {
        self.check()?;
        if self.rows == 0 {
            return Ok(());
        }
        let none = Plane { bytes: 0, ..self.codes };
        let (codes, scales) = (self.codes.as_arg(), self.scales.unwrap_or(none).as_arg());
        let each = match self.order {
            Order::Spread { slot_row, .. } => slots_each(slot_row.len(), self.rows_in),
            Order::Same | Order::Gather(_) => 1,
        };
        let config = CopyConfig::choose(self.rows, self.units(), each);
        let launch =
            Launch { ctas: config.ctas as u32, threads: THREADS as u32, cluster: 1, shared_bytes: 0 };
        let (source, row) = match self.order {
            Order::Same => (None, None),
            Order::Gather(index) => (Some(index), None),
            Order::Spread { source_row, slot_row } => (Some(source_row), Some(slot_row)),
        };
        let [rows, rows_in, num_slots] =
            [self.rows, self.rows_in, row.map_or(0, Buffer::len)].map(|n| n as u32);
        let kernel = device.kernel(&config.spec())?;
        // SAFETY: `check` compared the buffers with the rows, and the lists with their lengths. The kernel reads only rows
        // below `rows_in` and writes only rows below `rows`, whatever the lists contain. The caller guarantees the other
        // conditions.
        unsafe {
            kernel.launch(
                launch,
                &[&codes, &scales, &source, &row, &rows, &rows_in, &num_slots, &config.lanes_log2],
            )
        }
    }
}

/// How a copy is launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct CopyConfig {
    /// Number of units that a lane loads at once.
    units: usize,
    /// log2 of the lanes per row.
    lanes_log2: u32,
    /// Slots per group of lanes, which the group processes in sequence.
    each: usize,
    ctas: usize,
}

/// The number of slots per group of lanes. Slots of one source row are adjacent, so lanes that process several slots
/// read the source row once.
fn slots_each(slots: usize, sources: usize) -> usize {
    if slots >= SLOTS_EACH * sources { SLOTS_EACH } else { 1 }
}

impl CopyConfig {
    /// Enough lanes to hold a row in one pass (8 to 64 lanes), and enough CTAs for all rows.
    fn choose(rows: usize, row_units: usize, each: usize) -> Self {
        let units = if row_units < SHORT_ROW_UNITS { 6 } else { 8 };
        let lanes_log2 = row_units.div_ceil(units).next_power_of_two().ilog2().clamp(3, 6);
        Self { units, lanes_log2, each, ctas: rows.div_ceil(each * (THREADS >> lanes_log2)) }
    }

    fn spec(&self) -> KernelSpec {
        let [units, each] = [self.units, self.each].map(|n| TemplateArg::Int(n as i64));
        let args = vec![("kUnits", units), ("kEach", each)];
        KernelSpec { source: "kernels/routing/copy_rows.cuh", name: "nib::copy_rows", args }
    }
}

/// Every kernel instance of this module.
pub(crate) fn instances() -> Vec<Instance> {
    let each = [1, SLOTS_EACH];
    let specs = each
        .into_iter()
        .flat_map(|each| [0, SHORT_ROW_UNITS].map(|row_units| CopyConfig::choose(1, row_units, each).spec()));
    specs.map(|spec| Instance { spec, shared_bytes: 0 }).collect()
}

/// Where rows lie in memory: in separate buffers, or contiguous in all-to-all records.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowSpans {
    codes: Span,
    scales: Option<Span>,
    tensor_scale: Option<Span>,
    rows: usize,
}

impl RowSpans {
    /// The spans of an operand's buffers.
    pub(crate) fn of(rows: &Operand<Cuda>) -> Self {
        let kind = rows.row_kind();
        let (codes, scales, tensor_scale) = match rows {
            Operand::Plain(x) => match &x.data {
                Data::F32(x) => (Span::of(x.get(), kind.code_bytes()), None, None),
                Data::Bf16(x) => (Span::of(x.get(), kind.code_bytes()), None, None),
            },
            Operand::Block(x) => (
                Span::of(x.codes.get(), kind.code_bytes()),
                Some(Span::of(x.scales.get(), kind.scale_bytes())),
                x.tensor_scale.as_ref().map(|scale| Span::of(scale.get(), kind.tensor_scale_bytes())),
            ),
        };
        Self { codes, scales, tensor_scale, rows: rows.rows() }
    }

    /// The spans of `rows` contiguous all-to-all records.
    pub(crate) fn in_messages(bytes: &Buffer<u8>, kind: RowKind, rows: usize) -> Self {
        let codes = Span::of(bytes, kind.row_bytes());
        let scales = codes.skipping(kind.code_bytes());
        Self {
            codes,
            scales: kind.format.is_block().then_some(scales),
            tensor_scale: (kind.tensor_scale_bytes() > 0).then(|| scales.skipping(kind.scale_bytes())),
            rows,
        }
    }
}

/// The content of a row without a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PadRows {
    /// All bytes are zeros, as in unused all-to-all records.
    Zeros,
    /// Plain values, codes and scale bytes are 0; F32 scales are the smallest normal number; the tensor scale is 1.
    Rows,
}

/// Rows of one kind, copied in another order.
pub(crate) struct Reorder<'a> {
    pub op: &'static str,
    pub device: &'a Device,
    pub kind: RowKind,
    pub order: Order<'a>,
    pub pads: PadRows,
}

impl Reorder<'_> {
    /// Codes and scales are copied in one launch, tensor scales in another.
    ///
    /// # Safety
    /// Nothing else may use the buffers of `to` meanwhile; all buffers must be live and on this
    /// device.
    pub(crate) unsafe fn run(&self, from: RowSpans, to: RowSpans) -> Result<()> {
        let (kind, is_zero) = (self.kind, self.pads == PadRows::Zeros);
        let plane = |(from, to): (Span, Span), bytes, pad| Plane {
            from,
            to,
            bytes,
            pad: if is_zero { 0 } else { pad },
        };
        let copy = |codes, scales| {
            let (op, order, rows, rows_in) = (self.op, self.order, to.rows, from.rows);
            // SAFETY: the caller guarantees the conditions.
            unsafe { CopyRows { op, codes, scales, order, rows, rows_in }.run(self.device) }
        };
        let scales = from.scales.zip(to.scales);
        // Scale records longer than a word are zeros in a row without a source.
        let scales = scales.map(|spans| plane(spans, kind.scale_bytes(), kind.scale_kind().least().0 as u32));
        copy(plane((from.codes, to.codes), kind.code_bytes(), 0), scales)?;
        match from.tensor_scale.zip(to.tensor_scale) {
            Some(spans) => copy(plane(spans, kind.tensor_scale_bytes(), 1.0f32.to_bits()), None),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nibble_core::formats::Format;

    fn span(address: u64, len: usize, stride: usize) -> Span {
        Span { address, len, stride }
    }

    fn copy(codes: Plane, rows: usize, rows_in: usize) -> CopyRows<'static> {
        CopyRows { op: "permute", codes, scales: None, order: Order::Same, rows, rows_in }
    }

    #[test]
    fn a_word_repeated_is_the_least_record_of_every_kind() {
        for format in Format::ALL {
            for kind in format.spec().rules.iter().map(|rule| format.scale_kind(*rule)) {
                let (record, bytes) = (kind.least().0, kind.bytes());
                let repeated = u64::from(record as u32) * 0x1_0000_0001;
                assert_eq!(repeated.to_le_bytes()[..bytes], record.to_le_bytes()[..bytes], "{format}");
            }
        }
    }

    #[test]
    fn the_unit_divides_addresses_strides_and_bytes() {
        let plane = |address, stride, bytes| Plane {
            from: span(address, 4096, stride),
            to: span(512, 4096, bytes),
            bytes,
            pad: 0,
        };
        assert_eq!(plane(256, 224, 224).unit(), 16);
        assert_eq!(plane(256, 240, 224).unit(), 16);
        assert_eq!(plane(256, 232, 224).unit(), 4);
        assert_eq!(plane(256, 20, 20).unit(), 4);
        assert_eq!(plane(256, 3, 3).unit(), 1);
        assert_eq!(plane(258, 32, 16).unit(), 1);
    }

    #[test]
    fn spans_hold_their_last_row_and_no_more() {
        let record = span(256, 96, 32);
        assert!(record.holds(3, 32) && !record.holds(3, 33) && !record.holds(4, 1));
        let scales = record.skipping(28);
        assert_eq!((scales.address, scales.len), (284, 68));
        assert!(scales.holds(3, 4) && !scales.holds(3, 5));
        assert!(span(256, 0, 32).holds(0, 32) && !span(256, usize::MAX, usize::MAX).holds(3, 1));
    }

    #[test]
    fn lanes_follow_the_length_of_a_row() {
        // The rows are MXFP4, E4M3 with F32 scales, and BF16, each with 2048, 5120 and 7168
        // columns.
        let chosen = [68, 170, 238, 132, 330, 462, 256, 640, 896].map(|row_units| {
            let config = CopyConfig::choose(32768, row_units, 1);
            assert_eq!(config.ctas << (7 - config.lanes_log2), 32768);
            let spread = CopyConfig::choose(32768, row_units, SLOTS_EACH);
            assert_eq!(spread.ctas * SLOTS_EACH, config.ctas);
            for config in [config, spread] {
                assert!(instances().iter().any(|instance| instance.spec == config.spec()));
            }
            (config.units, 1 << config.lanes_log2)
        });
        let expected = [(6, 16), (6, 32), (8, 32), (6, 32), (8, 64), (8, 64), (8, 32), (8, 64), (8, 64)];
        assert_eq!(chosen, expected);
        assert_eq!(CopyConfig::choose(1, 0, 4), CopyConfig { units: 6, lanes_log2: 3, each: 4, ctas: 1 });
        assert_eq!(
            [(8, 1), (7, 2), (64, 16), (0, 5)].map(|(slots, from)| slots_each(slots, from)),
            [4, 1, 4, 1]
        );
    }

    #[test]
    fn planes_that_do_not_hold_their_rows_are_refused() {
        let codes = Plane { from: span(256, 64, 16), to: span(512, 32, 16), bytes: 16, pad: 0 };
        copy(codes, 2, 4).check().unwrap();
        copy(codes, 0, 0).check().unwrap();
        for (rows, rows_in) in [(3, 4), (2, 5), (1 << 31, 1), (1, 1 << 31)] {
            assert!(copy(codes, rows, rows_in).check().is_err(), "{rows} rows of {rows_in}");
        }
        let scales = Some(Plane { bytes: 17, ..codes });
        assert!(CopyRows { scales, ..copy(codes, 2, 4) }.check().is_err());
    }
}
