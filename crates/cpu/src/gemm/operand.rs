use super::GemmError;
use half::bf16;
use nibble_formats::ScalePlane;

/// The elements of an operand.
#[derive(Debug, Clone, Copy)]
pub enum Data<'a> {
    /// F32; can be multiplied only with F32.
    F32(&'a [f32]),
    /// BF16; can be multiplied with all types except F32.
    Bf16(&'a [bf16]),
    /// FP8 E4M3 codes, one per byte (0x7F and 0xFF are NaN).
    E4m3(&'a [u8]),
    /// FP8 E5M2 codes, one per byte.
    E5m2(&'a [u8]),
    /// FP4 E2M1 codes, two per byte, with the even-indexed element in the low nibble.
    E2m1(&'a [u8]),
}

impl Data<'_> {
    fn num_elements(&self) -> usize {
        match self {
            Data::F32(x) => x.len(),
            Data::Bf16(x) => x.len(),
            Data::E4m3(x) | Data::E5m2(x) => x.len(),
            Data::E2m1(x) => 2 * x.len(),
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Data::F32(_) => "F32",
            Data::Bf16(_) => "BF16",
            Data::E4m3(_) => "E4M3",
            Data::E5m2(_) => "E5M2",
            Data::E2m1(_) => "E2M1",
        }
    }
}

/// A buffer of scales: the scale of (row, k) is `values[offset + (row / rows_per_scale)·stride + k / block]`.
#[derive(Debug, Clone, Copy)]
pub struct OperandScales<'a> {
    /// The scales, one number per block.
    pub values: ScalePlane<'a>,
    /// The number of elements along the contraction that share a scale, which is even and typically 128 or 32.
    pub block: usize,
    /// The number of rows that share a scale, which is 1, or 128 for 2-D blocks.
    pub rows_per_scale: usize,
    /// Index of the scale of element (0, 0).
    pub offset: usize,
    /// Distance, in scales, from one row of scales to the next.
    pub stride: usize,
}

impl<'a> OperandScales<'a> {
    /// Scales that each belong to `block` elements of a row. The scales of consecutive rows are `stride` scales apart.
    pub fn rows(values: ScalePlane<'a>, block: usize, stride: usize) -> Self {
        Self { values, block, rows_per_scale: 1, offset: 0, stride }
    }

    /// Scales that each belong to a 2-D block of `block` × `block` elements. The scales of consecutive rows of blocks are `stride` scales
    /// apart.
    pub fn tiles(values: ScalePlane<'a>, block: usize, stride: usize) -> Self {
        Self { values, block, rows_per_scale: block, offset: 0, stride }
    }

    /// The same scales, with the scale of element (0, 0) at index `offset`.
    pub fn at(self, offset: usize) -> Self {
        Self { offset, ..self }
    }

    /// The scale of a row and a block of the contraction.
    pub(super) fn value(&self, row: usize, block_idx: usize) -> f32 {
        let i = self.offset + row / self.rows_per_scale * self.stride + block_idx;
        self.values.value(i)
    }

    fn len(&self) -> usize {
        self.values.len()
    }
}

/// One operand of D = A·Bᵀ: a strided view of a matrix [rows, K], whose rows are those of A or of B (the columns of D). The GEMM call
/// determines the number of rows and K.
#[derive(Debug, Clone, Copy)]
pub struct OperandView<'a> {
    /// The elements.
    pub data: Data<'a>,
    /// Index of element (row 0, k 0), in elements.
    pub offset: usize,
    /// Distance, in elements, from one row to the next, or from one k to the next if `transposed`.
    pub stride: usize,
    /// Whether the source has the shape [K, rows] (only for F32 and BF16).
    pub transposed: bool,
    /// The scales of a block-scaled operand.
    pub scales: Option<OperandScales<'a>>,
}

impl<'a> OperandView<'a> {
    /// A view of a source [rows, K] with `stride` elements from row to row: the contraction is contiguous.
    pub fn rows(data: Data<'a>, stride: usize) -> Self {
        Self { data, offset: 0, stride, transposed: false, scales: None }
    }

    /// A view of a source [K, rows] with `stride` elements from one k to the next: the contraction runs along the columns of the source. A
    /// product A·B reads B through such a view, and a product Aᵀ·B reads both operands through such views.
    pub fn transposed(data: Data<'a>, stride: usize) -> Self {
        Self { data, offset: 0, stride, transposed: true, scales: None }
    }

    /// The same view, with element (0, 0) at index `offset`.
    pub fn at(self, offset: usize) -> Self {
        Self { offset, ..self }
    }

    /// The same view with scales.
    pub fn scaled(self, scales: OperandScales<'a>) -> Self {
        Self { scales: Some(scales), ..self }
    }

    /// The view that starts at row `row`.
    ///
    /// # Errors
    /// If `row` is not a multiple of the rows per scale, or out of range.
    pub(super) fn skip_rows(mut self, name: &'static str, row: usize) -> Result<Self, GemmError> {
        let step = if self.transposed { 1 } else { self.stride };
        self.offset = shifted(name, self.offset, row, step)?;
        if let Some(s) = &mut self.scales {
            if s.rows_per_scale == 0 || !row.is_multiple_of(s.rows_per_scale) {
                let expected = format!("a multiple of the {} rows under one scale", s.rows_per_scale);
                return Err(GemmError::new(name, format!("cut at row {row}"), expected));
            }
            s.offset = shifted(name, s.offset, row / s.rows_per_scale, s.stride)?;
        }
        Ok(self)
    }

    /// The view that starts at element `k` of the contraction.
    ///
    /// # Errors
    /// If `k` is not a multiple of the scale block, or out of range.
    pub(super) fn skip_contraction(mut self, name: &'static str, k: usize) -> Result<Self, GemmError> {
        let step = if self.transposed { self.stride } else { 1 };
        self.offset = shifted(name, self.offset, k, step)?;
        if let Some(s) = &mut self.scales {
            if s.block == 0 || !k.is_multiple_of(s.block) {
                let expected = format!("a start that is a multiple of its block of {}", s.block);
                return Err(GemmError::new(name, format!("cut at {k} of the contraction"), expected));
            }
            s.offset = shifted(name, s.offset, k / s.block, 1)?;
        }
        Ok(self)
    }

    /// Checks that every element and scale of [rows, k] is within its slice.
    pub(super) fn check(&self, name: &'static str, rows: usize, k: usize) -> Result<(), GemmError> {
        let is_even = self.offset.is_multiple_of(2) && (rows <= 1 || self.stride.is_multiple_of(2));
        if matches!(self.data, Data::E2m1(_)) && !is_even {
            let got = format!("an E2M1 view at element {} with stride {}", self.offset, self.stride);
            return Err(GemmError::new(name, got, "both even: two codes share a byte"));
        }
        if self.transposed && !matches!(self.data, Data::F32(_) | Data::Bf16(_)) {
            let got = format!("{} codes read across the contraction", self.data.name());
            return Err(GemmError::new(name, got, "codes contiguous along the contraction"));
        }
        if rows == 0 || k == 0 {
            return Ok(());
        }
        let (outer, inner) = if self.transposed { (k, rows) } else { (rows, k) };
        let needed = extent(self.offset, outer, self.stride, inner);
        if needed.is_none_or(|end| end > self.data.num_elements()) {
            let got = format!("{} {} elements", self.data.num_elements(), self.data.name());
            let expected = format!(
                "at least {} for {rows} rows of {k} (offset {}, stride {}, transposed {})",
                needed.map_or("more than memory holds".to_string(), |n| n.to_string()),
                self.offset,
                self.stride,
                self.transposed
            );
            return Err(GemmError::new(name, got, expected));
        }
        self.check_scales(name, rows, k)
    }

    fn check_scales(&self, name: &'static str, rows: usize, k: usize) -> Result<(), GemmError> {
        let Some(s) = &self.scales else { return Ok(()) };
        if matches!(self.data, Data::F32(_)) {
            return Err(GemmError::new(name, "F32 with scales", "codes or BF16 with scales, or F32 without"));
        }
        if s.block == 0 || !s.block.is_multiple_of(2) || s.rows_per_scale == 0 {
            let got = format!("scaled by blocks of {} × {}", s.rows_per_scale, s.block);
            return Err(GemmError::new(name, got, "at least one row and an even length"));
        }
        let needed = extent(s.offset, rows.div_ceil(s.rows_per_scale), s.stride, k.div_ceil(s.block));
        if needed.is_none_or(|end| end > s.len()) {
            let expected =
                format!("scales for {rows} rows of {k} (offset {}, stride {})", s.offset, s.stride);
            return Err(GemmError::new(name, format!("scaled by {} numbers", s.len()), expected));
        }
        Ok(())
    }
}

/// End index of the last of `outer` runs of `inner` elements, whose starts are `stride` apart.
pub(super) fn extent(offset: usize, outer: usize, stride: usize, inner: usize) -> Option<usize> {
    (outer - 1).checked_mul(stride)?.checked_add(inner)?.checked_add(offset)
}

/// The index that is `steps` strides after `offset`.
pub(super) fn shifted(
    name: &'static str,
    offset: usize,
    steps: usize,
    stride: usize,
) -> Result<usize, GemmError> {
    let at = steps.checked_mul(stride).and_then(|x| x.checked_add(offset));
    at.ok_or_else(|| {
        GemmError::new(name, format!("{steps} strides of {stride} on"), "an index within memory")
    })
}

/// The destination of a GEMM.
#[derive(Debug)]
pub enum OutputData<'a> {
    /// F32 results.
    F32(&'a mut [f32]),
    /// BF16 results: the F32 sums rounded to nearest, ties to even.
    Bf16(&'a mut [bf16]),
}

/// A strided output matrix.
#[derive(Debug)]
pub struct Output<'a> {
    /// The elements.
    pub data: OutputData<'a>,
    /// Index of element (0, 0).
    pub offset: usize,
    /// Distance, in elements, from one row to the next.
    pub stride: usize,
    /// Whether to add the GEMM's result to the existing values, with one F32 addition per element, instead of overwriting them.
    pub accumulate: bool,
    /// Whether sums start from the F32 values in the output instead of zero. A contraction that is computed in consecutive parts then has
    /// the same bits as one GEMM (for BF16, all parts but the last must have even length).
    pub resume: bool,
}

impl<'a> Output<'a> {
    /// An F32 matrix to be overwritten.
    pub fn f32(data: &'a mut [f32], stride: usize) -> Self {
        Self { data: OutputData::F32(data), offset: 0, stride, accumulate: false, resume: false }
    }

    /// A BF16 matrix to be overwritten.
    pub fn bf16(data: &'a mut [bf16], stride: usize) -> Self {
        Self { data: OutputData::Bf16(data), offset: 0, stride, accumulate: false, resume: false }
    }

    /// The same matrix, with element (0, 0) at index `offset`.
    pub fn at(self, offset: usize) -> Self {
        Self { offset, ..self }
    }

    /// The same matrix, with `accumulate` set.
    pub fn accumulate(self) -> Self {
        Self { accumulate: true, ..self }
    }

    /// The same matrix, with `resume` set.
    pub fn resume(self) -> Self {
        Self { resume: true, ..self }
    }

    /// Number of elements in the slice.
    pub(super) fn len(&self) -> usize {
        match &self.data {
            OutputData::F32(x) => x.len(),
            OutputData::Bf16(x) => x.len(),
        }
    }
}

/// The kind of dot product that a pair of operands uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DotKind {
    F32,
    Bf16,
}

/// The dot product for a pair of operands, and the block length of their scales if they have scales.
pub(super) fn pair(a: &OperandView, b: &OperandView) -> Result<(DotKind, Option<usize>), GemmError> {
    let dot = match (a.data, b.data) {
        (Data::F32(_), Data::F32(_)) => DotKind::F32,
        (Data::F32(_), other) => {
            return Err(GemmError::new("b", other.name(), "F32, as a is: nothing is rounded in silence"));
        }
        (other, Data::F32(_)) => {
            return Err(GemmError::new(
                "b",
                "F32",
                format!("BF16 or codes, as a is {}: nothing is rounded in silence", other.name()),
            ));
        }
        _ => DotKind::Bf16,
    };
    match (&a.scales, &b.scales) {
        (None, None) => Ok((dot, None)),
        (Some(x), Some(y)) if x.block == y.block => Ok((dot, Some(x.block))),
        (x, y) => {
            let show = |s: &Option<OperandScales>| s.map_or("none".to_string(), |s| s.block.to_string());
            Err(GemmError::new(
                "b",
                format!("scaled by blocks of {}", show(y)),
                format!("{}, as a is", show(x)),
            ))
        }
    }
}
