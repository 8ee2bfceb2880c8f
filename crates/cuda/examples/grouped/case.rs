//! One grouped product: its operands on the host, its run on the device, and its exact result.

use half::bf16;
use nibble_core::DType;
use nibble_core::ops::Ragged;
use nibble_cuda::ops::products::tensor_cores::{
    GroupBuffers, Matrix, OperandKind, Order, ScaleValues, ScalesB, StridedScales, Target, TensorCoreConfig,
    TensorCoreLaunch, TensorCoreProduct,
};
use nibble_cuda::{Buffer, Device, Result};
use nibble_formats::philox::normal_from_bits;
use nibble_formats::{Element, ScaleLayout, layout::mn_major_stride};
use std::ops::Range;

/// Values of D that are drawn where it is added to.
const MOST_BEFORE: usize = 1 << 26;

/// SplitMix64: test data only.
pub struct Random(pub u64);

impl Random {
    /// Sixty-four random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// `table[random]`, for a table of 65536.
    pub fn draw<T: Copy>(&mut self, table: &[T], len: usize) -> Vec<T> {
        let mut out = Vec::with_capacity(len + 3);
        while out.len() < len {
            let bits = self.bits();
            out.extend((0..4).map(|i| table[(bits >> (16 * i)) as usize & 0xFFFF]));
        }
        out.truncate(len);
        out
    }
}

/// Normal values over all 65536 sixteen-bit draws.
fn normals() -> Vec<f32> {
    (0..1u32 << 16).map(|i| normal_from_bits(i << 16 | 0x8000)).collect()
}

/// What the operands hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Data {
    /// Codes -2 to 2, scales 1/2, 1, 2, 4: every partial and total sum is exact in F32.
    Integers,
    /// Normal values in FP8 as quantization leaves them, the largest of a block near the largest code.
    Normal,
    /// Cubed normal values: a few codes near the largest beside many small ones.
    HeavyTails,
    /// Normal values, and a few columns of the activations 64 times as large.
    OutlierColumns,
    /// Normal values, and a few rows of the activations 1024 times as large.
    MassiveTokens,
}

impl Data {
    /// Those whose sums are not exact.
    pub const RANDOM: [Data; 4] = [Data::Normal, Data::HeavyTails, Data::OutlierColumns, Data::MassiveTokens];

    /// What is large in A and B of a product. Activations are A, and both of a gradient, whose contraction is over tokens.
    fn large(self, ragged: Ragged) -> [Option<Large>; 2] {
        let of = |by_rows, first, gain| Some(Large { by_rows, first, gain });
        match (self, ragged) {
            (Self::OutlierColumns, Ragged::Rows) => [of(false, 0, 64.0), None],
            (Self::OutlierColumns, Ragged::Contraction) => [of(true, 0, 64.0); 2],
            (Self::MassiveTokens, Ragged::Rows) => [of(true, 0, 1024.0), None],
            // Not the same tokens of both, or nothing else would count.
            (Self::MassiveTokens, Ragged::Contraction) => {
                [of(false, 0, 1024.0), of(false, Large::EVERY / 2, 1024.0)]
            }
            _ => [None; 2],
        }
    }
}

/// Rows of an operand, or places of its contraction, that are larger than the rest.
#[derive(Debug, Clone, Copy)]
struct Large {
    by_rows: bool,
    first: usize,
    /// A power of two.
    gain: f32,
}

impl Large {
    /// From one to the next.
    const EVERY: usize = 257;

    fn is_row(&self, row: usize) -> bool {
        self.by_rows && row % Self::EVERY == self.first
    }

    /// Makes them so. A scale is of `share` rows; where it grows, the codes of the others shrink.
    fn apply(&self, plane: &mut Plane, scales: &mut [f32], (rows, k, share): (usize, usize, usize)) {
        let large = |len| (self.first..len).step_by(Self::EVERY);
        let is_large = |row, at| if self.by_rows { self.is_row(row) } else { at % Self::EVERY == self.first };
        let (lines, blocks): (Vec<_>, Vec<_>) = match self.by_rows {
            true => (large(rows).map(|row| row / share).collect(), (0..k.div_ceil(128)).collect()),
            false => ((0..rows.div_ceil(share)).collect(), large(k).map(|at| at / 128).collect()),
        };
        let shrunk: Vec<u8> = match plane {
            Plane::Codes(of) => {
                of.values.iter().map(|&value| of.element.encode(value as f32 / self.gain)).collect()
            }
            Plane::Bf16(_) => Vec::new(),
        };
        for line in lines {
            for &block in &blocks {
                if let Plane::Codes(_) = plane {
                    scales[line * k.div_ceil(128) + block] *= self.gain;
                }
                for row in line * share..(line * share + share).min(rows) {
                    for at in block * 128..(block * 128 + 128).min(k) {
                        match plane {
                            Plane::Codes(of) if !is_large(row, at) => {
                                of.codes[row * k + at] = shrunk[of.codes[row * k + at] as usize];
                            }
                            Plane::Bf16(values) if is_large(row, at) => {
                                let value = values[row * k + at].to_f32() * self.gain;
                                values[row * k + at] = bf16::from_f32(value);
                            }
                            _ => {}
                        }
                    }
                }
            }
        }
    }
}

/// The product and how its operands are stored.
#[derive(Debug, Clone)]
pub struct Case {
    pub ragged: Ragged,
    pub kind: OperandKind,
    pub out: DType,
    /// E8M0 scales rather than F32: of A, of B.
    pub e8m0: (bool, bool),
    pub accumulate: bool,
    /// Scales of A and B MN-major: [blocks][rows padded to 16 bytes].
    pub mn_major: bool,
    /// D holds the transposed product.
    pub transposed: bool,
    /// The order of tiles, if not the chosen instance's.
    pub order: Option<Order>,
    /// Rows of each group.
    pub lens: Vec<usize>,
    /// Rows after the last group's padding.
    pub slack: usize,
    /// Rows of a matrix of D ([`Ragged::Contraction`]).
    pub m: usize,
    pub n: usize,
    /// The contraction ([`Ragged::Rows`]).
    pub k: usize,
}

impl Case {
    /// First row of each group, and the end of the last.
    pub fn starts(&self) -> Vec<usize> {
        // Plain groups follow each other without padding; a single one needs none.
        let align = if self.kind.is_bf16() || self.is_dense() { 1 } else { 128 };
        let mut starts = vec![0];
        for &len in &self.lens {
            starts.push(starts.last().unwrap_or(&0) + len.next_multiple_of(align));
        }
        starts
    }

    /// One group of all rows.
    fn is_dense(&self) -> bool {
        self.ragged == Ragged::Rows && self.lens.len() == 1 && self.slack == 0
    }

    fn capacity(&self) -> usize {
        self.starts()[self.lens.len()] + self.slack
    }

    pub fn desc(&self) -> TensorCoreProduct {
        let (m, k) = match self.ragged {
            Ragged::Rows => (self.capacity(), self.k),
            Ragged::Contraction => (self.m, self.capacity()),
        };
        let powers = self.kind == OperandKind::e4m3(ScalesB::Floats) && self.e8m0.1;
        TensorCoreProduct {
            ragged: self.ragged,
            kind: if powers { OperandKind::e4m3(ScalesB::Powers) } else { self.kind },
            out: self.out,
            accumulate: self.accumulate,
            transposed: self.transposed,
            groups: self.lens.len(),
            m,
            n: self.n,
            k,
        }
    }

    pub fn name(&self) -> String {
        let kind = match self.ragged {
            Ragged::Rows => format!("rows  N {} K {}", self.n, self.k),
            Ragged::Contraction => format!("wgrad {} x {}", self.m, self.n),
        };
        let scale = |e8m0| if e8m0 { "e8" } else { "f32" };
        let operands = match self.desc().kind {
            OperandKind::Bf16 => "bf16".to_owned(),
            OperandKind::ScaledBf16 => "scaled bf16".to_owned(),
            OperandKind::Fp8(elements, scales_b) => {
                let layout = if self.mn_major { "mn" } else { "row" };
                let [a, b] = elements.map(Element::name);
                format!("{a} x {b} {}/{} {layout} {scales_b:?}", scale(self.e8m0.0), scale(self.e8m0.1))
            }
        };
        let (total, most) = (self.lens.iter().sum::<usize>(), self.lens.iter().max().unwrap_or(&0));
        let even = most * self.lens.len() == total;
        let most = if even { String::new() } else { format!(" max {most}") };
        let turned = if self.transposed { " turned" } else { "" };
        let how = if self.accumulate { " +=" } else { "" };
        let order = self.order.map_or_else(String::new, |order| format!(" {order:?}"));
        format!(
            "{kind} G {} rows {total}{most} {operands}{turned}{how} {:?}{order}",
            self.lens.len(),
            self.out
        )
    }
}

/// Codes, and what each of 256 stands for.
struct Codes {
    codes: Vec<u8>,
    element: Element,
    values: Box<[f64; 256]>,
}

/// An operand's values, `[rows][k]`.
enum Plane {
    Codes(Codes),
    Bf16(Vec<bf16>),
}

impl Plane {
    /// Of an FP8 element, or none.
    fn draw(of: Option<Element>, data: Data, random: &mut Random, len: usize) -> Self {
        let value: Vec<f32> = match data {
            Data::Integers => (0..1 << 16).map(|i| (i % 5) as f32 - 2.0).collect(),
            Data::Normal | Data::OutlierColumns | Data::MassiveTokens => {
                normals().into_iter().map(|x| x * 160.0).collect()
            }
            Data::HeavyTails => normals().into_iter().map(|x| x * x * x * 8.0).collect(),
        };
        let Some(element) = of else {
            return Self::Bf16(random.draw(&value.into_iter().map(bf16::from_f32).collect::<Vec<_>>(), len));
        };
        // What is near E4M3's largest code is brought near this one's.
        let gain = if data == Data::Integers { 1.0 } else { element.max() / Element::E4M3.max() };
        let codes: Vec<u8> = value.into_iter().map(|x| element.encode(x * gain)).collect();
        let values = std::array::from_fn(|code| f64::from(element.decode(code as u8)));
        Self::Codes(Codes { codes: random.draw(&codes, len), element, values: Box::new(values) })
    }

    fn fill(&mut self, at: Range<usize>, nan: bool) {
        match self {
            // A NaN in either element.
            Self::Codes(of) => of.codes[at].fill(if nan { 0x7F } else { 0 }),
            Self::Bf16(values) => values[at].fill(if nan { bf16::NAN } else { bf16::ZERO }),
        }
    }

    fn value(&self, at: usize) -> f64 {
        match self {
            Self::Codes(of) => of.values[of.codes[at] as usize],
            Self::Bf16(values) => values[at].to_f64(),
        }
    }

    /// BF16 with the contraction down the rows if `down`.
    fn upload(&self, device: &Device, k: usize, down: bool) -> Result<OnDevicePlane> {
        match self {
            Self::Codes(of) => Ok(OnDevicePlane::Codes(of.element, device.upload(&of.codes)?)),
            Self::Bf16(values) if down => {
                let rows = values.len() / k;
                let down: Vec<bf16> = (0..values.len()).map(|i| values[i % rows * k + i / rows]).collect();
                Ok(OnDevicePlane::Bf16(device.upload(&down)?))
            }
            Self::Bf16(values) => Ok(OnDevicePlane::Bf16(device.upload(values)?)),
        }
    }
}

enum OnDevicePlane {
    Codes(Element, Buffer<u8>),
    Bf16(Buffer<bf16>),
}

impl OnDevicePlane {
    fn operand<'a>(&'a self, scales: StridedScales<'a>, of_tensor: &'a Option<Buffer<f32>>) -> Matrix<'a> {
        match self {
            Self::Codes(element, codes) => Matrix::codes(*element, codes, scales),
            Self::Bf16(values) => Matrix::bf16(values).times(of_tensor.as_ref()),
        }
    }
}

/// Operands on the host.
pub struct Operands {
    pub case: Case,
    a: Plane,
    b: Plane,
    /// Row-major; as F32, and as bytes where the case says so.
    scales_a: Vec<f32>,
    scales_b: Vec<f32>,
    /// Of the tensors, one a row; where the kind has such.
    tensor_scales: Option<[Vec<f32>; 2]>,
    /// What D holds before; zeros if empty.
    before: Vec<f32>,
    large: [Option<Large>; 2],
}

fn e8m0_byte(scale: f32) -> u8 {
    (scale.to_bits() >> 23) as u8
}

impl Operands {
    pub fn new(case: Case, data: Data, seed: u64) -> Self {
        let desc = case.desc();
        let scales = |e8m0: bool| -> Vec<f32> {
            let value = |i: u32| match (data, e8m0) {
                _ if desc.kind.is_bf16() => 1.0,
                (Data::Integers, _) => 0.5 * (1 << (i % 4)) as f32,
                (_, true) => f32::from_bits((118 + i % 8) << 23),
                (_, false) => f32::from_bits((118 << 23) + i * (8 << 7)),
            };
            (0..1 << 16).map(value).collect()
        };
        let mut random = Random(seed);
        let adds = case.accumulate && desc.d() < MOST_BEFORE;
        let (rows_a, rows_b) = desc.scale_rows();
        let [of_a, of_b] = match desc.kind {
            OperandKind::Fp8(elements, _) => elements.map(Some),
            OperandKind::Bf16 | OperandKind::ScaledBf16 => [None; 2],
        };
        let of_tensors: Vec<f32> = match data {
            Data::Integers => (0..1 << 16).map(|i| 0.5 * (1 << (i % 4)) as f32).collect(),
            _ => normals(),
        };
        let mut of_tensor = |len| random.draw(&of_tensors, len);
        let (len_a, len_b) = desc.tensor_scales();
        let is_scaled = desc.kind == OperandKind::ScaledBf16;
        let tensor_scales = is_scaled.then(|| [of_tensor(len_a), of_tensor(len_b)]);
        let mut operands = Self {
            a: Plane::draw(of_a, data, &mut random, desc.a()),
            b: Plane::draw(of_b, data, &mut random, desc.b()),
            scales_a: random.draw(&scales(case.e8m0.0), rows_a * desc.blocks_k()),
            scales_b: random.draw(&scales(case.e8m0.1), rows_b * desc.blocks_k()),
            tensor_scales,
            before: if adds { random.draw(&scales(true), desc.d()) } else { Vec::new() },
            large: data.large(desc.ragged),
            case,
        };
        let Self { a, b, scales_a, scales_b, large, .. } = &mut operands;
        if let Some(large) = &large[0] {
            large.apply(a, scales_a, (desc.m, desc.k, 1));
        }
        if let Some(large) = &large[1] {
            let share = desc.kind.scales_b().map_or(1, ScalesB::rows);
            large.apply(b, scales_b, (desc.n, desc.k, share));
        }
        operands.fill_pads(desc);
        operands
    }

    /// Rows that belong to no group: NaN where they must not matter, zeros where they are promised.
    fn fill_pads(&mut self, desc: TensorCoreProduct) {
        let starts = self.case.starts();
        let mut valid = vec![false; self.case.capacity()];
        for (start, len) in starts.iter().zip(&self.case.lens) {
            valid[*start..start + len].fill(true);
        }
        match self.case.ragged {
            Ragged::Rows => {
                for (row, _) in valid.iter().enumerate().filter(|(_, valid)| !**valid) {
                    self.a.fill(row * desc.k..(row + 1) * desc.k, true);
                    let blocks = desc.blocks_k();
                    // The byte that `e8m0_byte` makes of it is 0xFF.
                    self.scales_a[row * blocks..][..blocks].fill(f32::NAN);
                    self.tensor_scales.iter_mut().for_each(|[a, _]| a[row] = f32::NAN);
                }
            }
            Ragged::Contraction => {
                // BF16 rows outside the groups may hold anything.
                let nan = desc.kind.is_bf16();
                for (k, _) in valid.iter().enumerate().filter(|(_, valid)| !**valid) {
                    self.tensor_scales.iter_mut().flatten().for_each(|of_rows| of_rows[k] = f32::NAN);
                }
                for (plane, rows) in [(&mut self.a, desc.m), (&mut self.b, desc.n)] {
                    for row in 0..rows {
                        for (k, _) in valid.iter().enumerate().filter(|(_, valid)| !**valid) {
                            plane.fill(row * desc.k + k..row * desc.k + k + 1, nan);
                        }
                    }
                }
            }
        }
    }

    /// Makes one scale of A not a number.
    pub fn spoil_scale(&mut self, row: usize, block: usize) {
        self.scales_a[row * self.case.desc().blocks_k() + block] = f32::NAN;
    }

    pub fn upload(&self, device: &Device) -> Result<OnDevice> {
        let desc = self.case.desc();
        let layout = if self.case.mn_major { ScaleLayout::MnMajor } else { ScaleLayout::RowMajor };
        let (rows_a, rows_b) = desc.scale_rows();
        let planes = |scales: &[f32], rows: usize| -> Result<(Buffer<f32>, Buffer<u8>)> {
            let bytes: Vec<u8> = scales.iter().map(|&s| e8m0_byte(s)).collect();
            let arranged = layout.arrange(scales, rows, desc.blocks_k()).expect("as many as rows and blocks");
            let bytes = layout.arrange(&bytes, rows, desc.blocks_k()).expect("as many as rows and blocks");
            Ok((device.upload(&arranged)?, device.upload(&bytes)?))
        };
        let ints = |values: &[usize]| values.iter().map(|&v| v as i32).collect::<Vec<i32>>();
        Ok(OnDevice {
            case: self.case.clone(),
            a: self.a.upload(device, desc.k, desc.ragged == Ragged::Contraction)?,
            b: self.b.upload(device, desc.k, desc.ragged == Ragged::Contraction)?,
            scales_a: planes(&self.scales_a, rows_a)?,
            scales_b: planes(&self.scales_b, rows_b)?,
            tensor_scales: match &self.tensor_scales {
                Some([a, b]) => [Some(device.upload(a)?), Some(device.upload(b)?)],
                None => [None, None],
            },
            start: device.upload(&ints(&self.case.starts()))?,
            len: device.upload(&ints(&self.case.lens))?,
            d: self.unwritten(device)?,
        })
    }

    /// D as it is before.
    pub fn unwritten(&self, device: &Device) -> Result<Written> {
        let len = self.case.desc().d();
        Ok(match (self.case.out, self.case.accumulate) {
            (DType::Bf16, true) if self.before.is_empty() => Written::Bf16(device.filled(len, 0)?),
            (DType::Bf16, true) => Written::Bf16(
                device.upload(&self.before.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>())?,
            ),
            (DType::Bf16, false) => Written::Bf16(device.filled(len, 0xFF)?),
            (DType::F32, true) if self.before.is_empty() => Written::F32(device.filled(len, 0)?),
            (DType::F32, true) => Written::F32(device.upload(&self.before)?),
            (DType::F32, false) => Written::F32(device.filled(len, 0xFF)?),
        })
    }

    /// The rows of A and B whose product is an element of D, by its place in all of D, and from where to where of the contraction;
    /// `None` for padding.
    fn terms(&self, at: usize) -> Option<(usize, usize, Range<usize>)> {
        let (desc, starts) = (self.case.desc(), self.case.starts());
        let [_, rows_d, cols_d] = desc.shape_d();
        let (row, col) = (at / cols_d, at % cols_d);
        match self.case.ragged {
            Ragged::Rows => {
                let group = starts[1..].iter().position(|&end| row < end);
                let group = group.filter(|&group| row < starts[group] + self.case.lens[group])?;
                Some((row, group * desc.n + col, 0..desc.k))
            }
            Ragged::Contraction => {
                let (group, row) = (row / rows_d, row % rows_d);
                let (row_a, row_b) = if self.case.transposed { (col, row) } else { (row, col) };
                Some((row_a, row_b, starts[group]..starts[group] + self.case.lens[group]))
            }
        }
    }

    /// How many of the two rows are larger than the rest.
    pub fn num_large(&self, at: usize) -> usize {
        let Some((row_a, row_b, _)) = self.terms(at) else { return 0 };
        let rows = self.large.iter().zip([row_a, row_b]);
        rows.filter(|(large, row)| large.is_some_and(|large| large.is_row(*row))).count()
    }

    /// One element of D in F64, before rounding; by its place in all of D.
    pub fn exact(&self, at: usize) -> f64 {
        let desc = self.case.desc();
        let blocks = desc.blocks_k();
        let Some((row_a, row_b, Range { start: from, end: to })) = self.terms(at) else { return 0.0 };
        let share = desc.kind.scales_b().map_or(1, ScalesB::rows);
        let scale_row_b = row_b / desc.n * desc.n.div_ceil(share) + row_b % desc.n / share;
        let mut total = 0.0;
        for block in from / 128..to.div_ceil(128) {
            let dot: f64 = ((block * 128).max(from)..(block * 128 + 128).min(to))
                .map(|k| self.a.value(row_a * desc.k + k) * self.b.value(row_b * desc.k + k))
                .sum();
            let scale_a = f64::from(self.scales_a[row_a * blocks + block]);
            total += dot * scale_a * f64::from(self.scales_b[scale_row_b * blocks + block]);
        }
        if let Some([a, b]) = self.tensor_scales.as_ref().filter(|_| from < to) {
            // Where rows are the contraction, all of a group have one.
            let (of_a, of_b) = if desc.ragged == Ragged::Rows { (row_a, row_b) } else { (from, from) };
            total *= f64::from(a[of_a]) * f64::from(b[of_b]);
        }
        let before = self.before.get(at).filter(|_| self.case.accumulate);
        total + before.map_or(0.0, |&x| f64::from(x))
    }
}

/// Operands and output on the device.
pub struct OnDevice {
    case: Case,
    a: OnDevicePlane,
    b: OnDevicePlane,
    scales_a: (Buffer<f32>, Buffer<u8>),
    scales_b: (Buffer<f32>, Buffer<u8>),
    tensor_scales: [Option<Buffer<f32>>; 2],
    start: Buffer<i32>,
    len: Buffer<i32>,
    pub d: Written,
}

/// D on the device.
pub enum Written {
    Bf16(Buffer<bf16>),
    F32(Buffer<f32>),
}

impl Written {
    /// As F32.
    pub fn download(&self) -> Result<Vec<f32>> {
        match self {
            Self::Bf16(d) => Ok(d.download()?.into_iter().map(bf16::to_f32).collect()),
            Self::F32(d) => d.download(),
        }
    }
}

impl OnDevice {
    pub fn run(&mut self) -> Result<()> {
        let chosen = TensorCoreConfig::choose(&self.case.desc());
        self.run_with(TensorCoreConfig { order: self.case.order.unwrap_or(chosen.order), ..chosen })
    }

    /// By this instance.
    pub fn run_with(&mut self, config: TensorCoreConfig) -> Result<()> {
        let desc = self.case.desc();
        let ((rows_a, rows_b), [of_a, of_b]) = (desc.scale_rows(), &self.tensor_scales);
        TensorCoreLaunch {
            product: desc,
            groups: (!self.case.is_dense()).then_some(GroupBuffers { start: &self.start, len: &self.len }),
            a: self.a.operand(self.case.scales(self.case.e8m0.0, &self.scales_a, rows_a), of_a),
            b: self.b.operand(self.case.scales(self.case.e8m0.1, &self.scales_b, rows_b), of_b),
            d: match &mut self.d {
                Written::Bf16(values) => Target::bf16(values, self.case.accumulate),
                Written::F32(values) => Target::f32(values, self.case.accumulate),
            },
        }
        .run_with(config)
    }
}

impl Case {
    fn scales<'a>(
        &self,
        e8m0: bool,
        planes: &'a (Buffer<f32>, Buffer<u8>),
        rows: usize,
    ) -> StridedScales<'a> {
        let (values, bytes) = match e8m0 {
            true => (ScaleValues::e8m0(&planes.1), 1),
            false => (ScaleValues::f32(&planes.0), 4),
        };
        match self.mn_major {
            true => StridedScales { values, row_stride: 1, block_stride: mn_major_stride(rows, bytes) },
            false => StridedScales::row_major(values, self.desc().blocks_k()),
        }
    }
}
