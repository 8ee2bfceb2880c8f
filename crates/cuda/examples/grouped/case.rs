//! One grouped product: its operands on the host, its run on the device, and its exact result.

use half::bf16;
use nibble_cuda::ops::grouped_fp8_block::{
    Config, Desc, GroupBuffers, GroupedFp8Block, Out, Ragged, ScaleValues, Scales, ScalesB, Target,
};
use nibble_cuda::{Buffer, Device, Result};
use nibble_formats::philox::normal_from_bits;
use nibble_formats::{Element, ScaleLayout, layout::mn_major_stride};

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
pub fn normals() -> Vec<f32> {
    (0..1u32 << 16).map(|i| normal_from_bits(i << 16 | 0x8000)).collect()
}

/// What the operands hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Data {
    /// Codes -2 to 2, scales 1/2, 1, 2, 4: every partial and total sum is exact in F32.
    Integers,
    /// Normal values in E4M3 as quantization leaves them, the largest of a block near 448.
    Normal,
    /// Cubed normal values: a few codes near 448 beside many small ones.
    HeavyTails,
}

/// The product and how its operands are stored.
#[derive(Debug, Clone)]
pub struct Case {
    pub ragged: Ragged,
    pub scales_b: ScalesB,
    pub out: Out,
    /// E8M0 scales rather than F32: of A, of B.
    pub e8m0: (bool, bool),
    pub accumulate: bool,
    /// Scales of A and B MN-major: [blocks][rows padded to 16 bytes].
    pub mn_major: bool,
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
        let mut starts = vec![0];
        for &len in &self.lens {
            starts.push(starts.last().unwrap_or(&0) + len.next_multiple_of(128));
        }
        starts
    }

    pub fn capacity(&self) -> usize {
        self.starts()[self.lens.len()] + self.slack
    }

    pub fn desc(&self) -> Desc {
        let (m, k) = match self.ragged {
            Ragged::Rows => (self.capacity(), self.k),
            Ragged::Contraction => (self.m, self.capacity()),
        };
        Desc {
            ragged: self.ragged,
            scales_b: self.scales_b,
            out: self.out,
            accumulate: self.accumulate,
            groups: self.lens.len(),
            m,
            n: self.n,
            k,
        }
    }

    /// Floating-point operations that count.
    pub fn flop(&self) -> f64 {
        let rows: usize = self.lens.iter().sum();
        let (wide, deep) = match self.ragged {
            Ragged::Rows => (self.n, self.k),
            Ragged::Contraction => (self.m, self.n),
        };
        2.0 * rows as f64 * wide as f64 * deep as f64
    }

    pub fn name(&self) -> String {
        let kind = match self.ragged {
            Ragged::Rows => format!("rows  N {} K {}", self.n, self.k),
            Ragged::Contraction => format!("wgrad {} x {}", self.m, self.n),
        };
        let scale = |e8m0| if e8m0 { "e8" } else { "f32" };
        let total: usize = self.lens.iter().sum();
        let (a, b) = (scale(self.e8m0.0), scale(self.e8m0.1));
        let how = if self.accumulate { " +=" } else { "" };
        let layout = if self.mn_major { "mn" } else { "row" };
        format!(
            "{kind} G {} rows {total} {a}/{b} {layout} {:?}{how} {:?}",
            self.lens.len(),
            self.scales_b,
            self.out
        )
    }
}

/// Operands on the host.
pub struct Operands {
    pub case: Case,
    a: Vec<u8>,
    b: Vec<u8>,
    /// Row-major; as F32, and as bytes where the case says so.
    scales_a: Vec<f32>,
    scales_b: Vec<f32>,
    /// What D holds before.
    before: Vec<f32>,
}

fn e8m0_byte(scale: f32) -> u8 {
    (scale.to_bits() >> 23) as u8
}

impl Operands {
    pub fn new(case: Case, data: Data, seed: u64) -> Self {
        let desc = case.desc();
        let codes: Vec<u8> = match data {
            Data::Integers => (0..1 << 16).map(|i| Element::E4m3.encode((i % 5) as f32 - 2.0)).collect(),
            Data::Normal => normals().into_iter().map(|x| Element::E4m3.encode(x * 160.0)).collect(),
            Data::HeavyTails => {
                normals().into_iter().map(|x| Element::E4m3.encode(x * x * x * 8.0)).collect()
            }
        };
        let scales = |e8m0: bool| -> Vec<f32> {
            let value = |i: u32| match (data, e8m0) {
                (Data::Integers, _) => 0.5 * (1 << (i % 4)) as f32,
                (_, true) => f32::from_bits((118 + i % 8) << 23),
                (_, false) => f32::from_bits((118 << 23) + i * (8 << 7)),
            };
            (0..1 << 16).map(value).collect()
        };
        let mut random = Random(seed);
        let (rows_a, rows_b) = desc.scale_rows();
        let mut operands = Self {
            a: random.draw(&codes, desc.a()),
            b: random.draw(&codes, desc.b()),
            scales_a: random.draw(&scales(case.e8m0.0), rows_a * desc.blocks_k()),
            scales_b: random.draw(&scales(case.e8m0.1), rows_b * desc.blocks_k()),
            before: if case.accumulate { random.draw(&scales(true), desc.d()) } else { Vec::new() },
            case,
        };
        operands.fill_pads(desc);
        operands
    }

    /// Rows that belong to no group: NaN where they must not matter, zeros where they are promised.
    fn fill_pads(&mut self, desc: Desc) {
        let starts = self.case.starts();
        let mut valid = vec![false; self.case.capacity()];
        for (start, len) in starts.iter().zip(&self.case.lens) {
            valid[*start..start + len].fill(true);
        }
        match self.case.ragged {
            Ragged::Rows => {
                for (row, _) in valid.iter().enumerate().filter(|(_, valid)| !**valid) {
                    self.a[row * desc.k..][..desc.k].fill(0x7F);
                    let blocks = desc.blocks_k();
                    // The byte that `e8m0_byte` makes of it is 0xFF.
                    self.scales_a[row * blocks..][..blocks].fill(f32::NAN);
                }
            }
            Ragged::Contraction => {
                for codes in [&mut self.a, &mut self.b] {
                    for row in codes.chunks_mut(desc.k) {
                        for (code, _) in row.iter_mut().zip(&valid).filter(|(_, valid)| !**valid) {
                            *code = 0;
                        }
                    }
                }
            }
        }
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
            a: device.upload(&self.a)?,
            b: device.upload(&self.b)?,
            scales_a: planes(&self.scales_a, rows_a)?,
            scales_b: planes(&self.scales_b, rows_b)?,
            start: device.upload(&ints(&self.case.starts()))?,
            len: device.upload(&ints(&self.case.lens))?,
            bf16: device.filled(if self.case.out == Out::Bf16 { desc.d() } else { 1 }, 0xFF)?,
            f32: match (self.case.out, self.case.accumulate) {
                (Out::F32, true) => device.upload(&self.before)?,
                (Out::F32, false) => device.filled(desc.d(), 0xFF)?,
                (Out::Bf16, _) => device.filled(1, 0)?,
            },
        })
    }

    /// One element of D in F64, before rounding.
    pub fn exact(&self, row: usize, col: usize, decode: &[f64; 256]) -> f64 {
        let desc = self.case.desc();
        let starts = self.case.starts();
        let blocks = desc.blocks_k();
        let (row_a, row_b, scale_row_b, from, to) = match self.case.ragged {
            Ragged::Rows => {
                let group = starts[1..].iter().position(|&end| row < end);
                let Some(group) = group.filter(|&g| row < starts[g] + self.case.lens[g]) else { return 0.0 };
                let row_b = group * desc.n + col;
                let scale_row = match desc.scales_b {
                    ScalesB::Tile => group * desc.n.div_ceil(128) + col / 128,
                    ScalesB::Vector => row_b,
                };
                (row, row_b, scale_row, 0, desc.k)
            }
            Ragged::Contraction => {
                let group = row / desc.m;
                (row % desc.m, col, col, starts[group], starts[group] + self.case.lens[group])
            }
        };
        let mut total = if self.case.accumulate { f64::from(self.before[row * desc.n + col]) } else { 0.0 };
        for block in from / 128..to.div_ceil(128) {
            let dot: f64 = (block * 128..(block * 128 + 128).min(to))
                .map(|k| {
                    decode[self.a[row_a * desc.k + k] as usize] * decode[self.b[row_b * desc.k + k] as usize]
                })
                .sum();
            let scale_a = f64::from(self.scales_a[row_a * blocks + block]);
            total += dot * scale_a * f64::from(self.scales_b[scale_row_b * blocks + block]);
        }
        total
    }
}

/// Operands and output on the device.
pub struct OnDevice {
    case: Case,
    a: Buffer<u8>,
    b: Buffer<u8>,
    scales_a: (Buffer<f32>, Buffer<u8>),
    scales_b: (Buffer<f32>, Buffer<u8>),
    start: Buffer<i32>,
    len: Buffer<i32>,
    bf16: Buffer<bf16>,
    f32: Buffer<f32>,
}

impl OnDevice {
    pub fn run(&mut self, config: Config) -> Result<()> {
        let desc = self.case.desc();
        let (rows_a, rows_b) = desc.scale_rows();
        GroupedFp8Block {
            desc,
            groups: Some(GroupBuffers { start: &self.start, len: &self.len }),
            a: &self.a,
            scales_a: self.case.scales(self.case.e8m0.0, &self.scales_a, rows_a),
            b: &self.b,
            scales_b: self.case.scales(self.case.e8m0.1, &self.scales_b, rows_b),
            d: match desc.out {
                Out::Bf16 => Target::Bf16(&mut self.bf16),
                Out::F32 => Target::F32 { values: &mut self.f32, accumulate: self.case.accumulate },
            },
        }
        .run_with(config)
    }

    /// D as F32.
    pub fn download(&self) -> Result<Vec<f32>> {
        match self.case.out {
            Out::Bf16 => Ok(self.bf16.download()?.into_iter().map(bf16::to_f32).collect()),
            Out::F32 => self.f32.download(),
        }
    }
}

impl Case {
    fn scales<'a>(&self, e8m0: bool, planes: &'a (Buffer<f32>, Buffer<u8>), rows: usize) -> Scales<'a> {
        let (values, bytes) = match e8m0 {
            true => (ScaleValues::E8m0(&planes.1), 1),
            false => (ScaleValues::F32(&planes.0), 4),
        };
        match self.mn_major {
            true => Scales { values, row_stride: 1, block_stride: mn_major_stride(rows, bytes) },
            false => Scales::row_major(values, self.desc().blocks_k()),
        }
    }
}
