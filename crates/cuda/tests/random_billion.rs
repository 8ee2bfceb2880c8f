//! A billion random elements through every conversion of an expert layer, and an eighth of them through every other, on the GPU
//! and on the CPU, compared bit for bit.
//!
//! Runs where `NIBBLE_RANDOM_ELEMENTS` says how many; 1000000000 is meant, in release mode and on many cores, since the CPU does
//! as many. The values of a tile of 128 rows by 64 columns lie around one exponent, a few octaves below it more often than not;
//! some tiles hold any bits at all, NaN and infinities among them. F32 has the same values and random bits below them.

use crate::gpu;

use half::bf16;
use nibble_core::formats::{BlockAxis, Codec, Format, Purpose, Rounding, ScalePlane, ScaleRule, Stream};
use nibble_core::ops::{
    Cast, Dequantize, Emit, Emitted, Hadamard, Planes, Quantize, Swiglu, SwigluBackward, Transcode,
};
use nibble_core::{Backend, BlockScaled, DType, Data, Kernels, Operand, Plain, Result, Tensor};
use nibble_cpu::Cpu;
use nibble_cuda::{Cuda, env};
use nibble_testkit::assert::{Bits, compare_bits};
use nibble_testkit::skip;
use std::fmt;
use std::num::NonZero;
use std::thread;
use std::time::{Duration, Instant};

/// Columns of a chunk, and its rows at most: 2²⁷ elements.
const COLS: usize = 2048;
const MAX_ROWS: usize = 65536;
/// Chunks are of seeds below this.
const MOST_CHUNKS: u64 = 1 << 20;
/// Conversions that no expert layer runs take as many elements less.
const OTHERS_PART: usize = 8;

/// What is compared.
#[derive(Debug, Clone, Copy)]
enum Conversion {
    /// BF16 or F32 to blocks, after a random Hadamard transform of some length.
    Quantize { from: DType, codec: Codec, planes: Planes, transform: Option<usize> },
    /// BF16 or F32 to the other.
    Cast(DType),
    /// Rows of a block format to BF16.
    Dequantize(Format),
    /// MXFP4 to E4M3, along rows or columns, or to tiles both ways.
    Lift(BlockAxis),
    /// E4M3 rows to E4M3 columns, by exponents.
    Shift,
    /// E4M3 rows to MXFP4 rows.
    Narrow,
    /// SwiGLU of BF16 with weights; beside blocks along rows alone, h in MXFP4.
    Swiglu(Emit),
    /// Its backward pass from h in MXFP4 or BF16, to E4M3 rows and columns by a rule, or to BF16.
    SwigluBackward { saved: bool, rule: Option<ScaleRule> },
}

use Conversion::{Cast as Casting, Dequantize as Decoding, Lift, Narrow, Shift};
use Format::{E4m3, E5m2, Mxfp4};
use Rounding::{NearestAway, NearestEven, Stochastic};
use ScaleRule::{Amax, Ceil, Even, Floor, Rceil};

/// BF16 to blocks.
fn of_bf16(format: Format, rule: ScaleRule, rounding: Rounding, planes: Planes) -> Conversion {
    let codec = codec(format, rule, rounding);
    Conversion::Quantize { from: DType::Bf16, codec, planes, transform: None }
}

/// F32 to the nearest codes.
fn of_f32(format: Format, rule: ScaleRule, planes: Planes) -> Conversion {
    let codec = codec(format, rule, NearestEven);
    Conversion::Quantize { from: DType::F32, codec, planes, transform: None }
}

/// BF16 to blocks under powers of two, after a transform.
fn transformed(format: Format, rounding: Rounding, planes: Planes, len: usize) -> Conversion {
    let codec = codec(format, Rceil, rounding);
    Conversion::Quantize { from: DType::Bf16, codec, planes, transform: Some(len) }
}

impl Conversion {
    /// Those of expert layers, and along rows those with stochastic rounding and transforms: all elements.
    fn of_layers() -> Vec<Self> {
        use Planes::{Both, Cols, Rows, Tiles};
        let mut all = [NearestEven, Stochastic].map(|to| of_bf16(Mxfp4, Rceil, to, Rows)).to_vec();
        all.extend([64, 128].map(|len| transformed(Mxfp4, NearestEven, Rows, len)));
        all.extend([Mxfp4, E4m3].map(|to| transformed(to, Stochastic, Rows, 64)));
        all.extend([Decoding(Mxfp4), Decoding(E4m3)]);
        all.extend(BlockAxis::ALL.map(Lift));
        all.extend([Shift, Narrow]);
        for rule in [Amax, Rceil] {
            all.extend([Rows, Cols, Both].map(|planes| of_bf16(E4m3, rule, NearestEven, planes)));
            all.push(of_f32(E4m3, rule, Tiles));
            all.extend([Rows, Both].map(|planes| Self::Swiglu(emit(rule, planes))));
            all.extend([true, false].map(|saved| Self::SwigluBackward { saved, rule: Some(rule) }));
        }
        all.push(Self::Swiglu(Emit::Plain(DType::Bf16)));
        all.push(Self::SwigluBackward { saved: false, rule: None });
        all
    }

    /// What else there is: a part of them.
    fn others() -> Vec<Self> {
        use Planes::{Both, Cols, Rows, Tiles};
        let mut all = vec![Casting(DType::Bf16), Casting(DType::F32), Decoding(E5m2)];
        for rounding in [NearestEven, Stochastic] {
            all.extend([Cols, Both].map(|planes| of_bf16(Mxfp4, Rceil, rounding, planes)));
            all.extend([16, 64, 128].map(|len| transformed(Mxfp4, rounding, Cols, len)));
            all.push(transformed(E4m3, rounding, Cols, 64));
        }
        all.extend([16, 32].map(|len| transformed(Mxfp4, NearestEven, Rows, len)));
        all.extend([Rows, Cols, Both].map(|planes| of_bf16(E4m3, Rceil, Stochastic, planes)));
        for rule in [Floor, Ceil, Even] {
            all.extend([Mxfp4, E4m3].map(|to| of_bf16(to, rule, NearestEven, Both)));
        }
        all.extend([Rows, Cols, Both].map(|planes| of_f32(Mxfp4, Rceil, planes)));
        for rule in [Amax, Rceil] {
            all.extend([Rows, Cols, Both].map(|planes| of_f32(E4m3, rule, planes)));
            all.push(of_bf16(E4m3, rule, NearestEven, Tiles));
            all.extend([of_bf16(E5m2, rule, NearestEven, Both), of_f32(E5m2, rule, Tiles)]);
        }
        all.push(of_bf16(Mxfp4, Rceil, NearestAway, Both));
        all.push(of_bf16(E4m3, Amax, Rounding::Dither { delta_q16: 0x4000 }, Both));
        all.push(Self::SwigluBackward { saved: true, rule: None });
        all
    }

    fn run<B: Kernels>(self, b: &B, inputs: &Inputs<B>) -> Result<Vec<Plane<B>>> {
        let Inputs { x, x_f32, da, weight, mxfp4, e4m3 } = inputs;
        let transcode = |x, to, axis| -> Result<Vec<Plane<B>>> {
            let made = Transcode { x, to, axis, rule: Rceil, groups: None }.run(b)?;
            let mut planes = blocks(made.out);
            planes.extend(made.transposed.into_iter().flat_map(blocks));
            planes.push(Plane::U64(made.counts.0));
            Ok(planes)
        };
        let plain_of = |dtype| if dtype == DType::F32 { x_f32 } else { x };
        match self {
            Self::Quantize { from, codec, planes, transform } => {
                let random =
                    codec.rounding().is_random().then(|| Stream::new(7, Purpose::Rounding, 0x5EED, 3).into());
                let hadamard = transform.map(|len| Hadamard { len, ..Hadamard::new(7, 0x5EED) });
                let op = Quantize { random, hadamard, ..Quantize::new(plain_of(from), codec, planes) };
                op.run(b).map(emitted)
            }
            Self::Cast(from) => {
                let dtype = if from == DType::F32 { DType::Bf16 } else { DType::F32 };
                Cast { x: plain_of(from), dtype }.run(b).map(|out| vec![plain(out)])
            }
            Self::Dequantize(format) => {
                let x = match format {
                    Mxfp4 => mxfp4.clone(),
                    E4m3 => e4m3.clone(),
                    _ => rows_of(b, x, format)?,
                };
                Dequantize { x: &x, dtype: DType::Bf16 }.run(b).map(|out| vec![plain(out)])
            }
            Self::Lift(axis) => transcode(mxfp4, E4m3, axis),
            Self::Shift => transcode(e4m3, E4m3, BlockAxis::Col),
            Self::Narrow => transcode(e4m3, Mxfp4, BlockAxis::Row),
            Self::Swiglu(a) => {
                let rows_alone = matches!(a, Emit::Block { planes: Planes::Rows, .. });
                let save_h = rows_alone.then(|| codec(Mxfp4, Rceil, NearestEven));
                let out = Swiglu { h: x, weight: Some(weight), groups: None, a, save_h }.run(b)?;
                Ok(out.h.into_iter().flat_map(blocks).chain(emitted(out.a)).collect())
            }
            Self::SwigluBackward { saved, rule } => {
                let h = if saved { Operand::Block(mxfp4.clone()) } else { Operand::Plain(x.clone()) };
                let to = |planes| rule.map_or(Emit::Plain(DType::Bf16), |rule| emit(rule, planes));
                let (dh, a) = (to(Planes::Both), to(Planes::Cols));
                let grads = SwigluBackward { h: &h, da, weight: Some(weight), groups: None, dh, a: Some(a) }
                    .run(b)?;
                let grad = std::iter::once(Plane::F32(grads.dweight));
                Ok(emitted(grads.dh)
                    .into_iter()
                    .chain(grads.a.into_iter().flat_map(emitted))
                    .chain(grad)
                    .collect())
            }
        }
    }
}

impl fmt::Display for Conversion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Quantize { from, codec, planes, transform } => {
                write!(f, "{from} to {}", Blocks(codec, planes))?;
                transform.map_or(Ok(()), |len| write!(f, ", transformed by {len}"))
            }
            Self::Swiglu(Emit::Plain(dtype)) => write!(f, "SwiGLU to {dtype}"),
            Self::Swiglu(Emit::Block { codec, planes, .. }) => {
                write!(f, "SwiGLU to {}", Blocks(codec, planes))
            }
            _ => write!(f, "{self:?}"),
        }
    }
}

/// A form of blocks, to be printed.
struct Blocks<'a>(&'a Codec, &'a Planes);

impl fmt::Display for Blocks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(codec, planes) = self;
        write!(f, "{} {planes:?}, {}, {}", codec.format(), codec.rule(), codec.rounding())
    }
}

fn codec(format: Format, rule: ScaleRule, rounding: Rounding) -> Codec {
    Codec::new(format, rule, rounding).expect("a codec there is")
}

fn emit(rule: ScaleRule, planes: Planes) -> Emit {
    Emit::block(codec(E4m3, rule, NearestEven), planes)
}

/// Rows under scales that are powers of two.
fn rows_of<B: Kernels>(b: &B, x: &Tensor<B>, format: Format) -> Result<BlockScaled<B>> {
    let made = Quantize::new(x, codec(format, Rceil, NearestEven), Planes::Rows).run(b)?;
    made.take_rows("quantize")?.block("quantize").cloned()
}

/// One result.
#[derive(Debug)]
enum Plane<B: Backend> {
    U8(B::Buf<u8>),
    F32(B::Buf<f32>),
    Bf16(B::Buf<bf16>),
    U64(B::Buf<u64>),
    /// The scales of blocks, in whatever order they lie.
    Scales(BlockScaled<B>),
}

fn plain<B: Backend>(x: Tensor<B>) -> Plane<B> {
    match x.data {
        Data::F32(x) => Plane::F32(x),
        Data::Bf16(x) => Plane::Bf16(x),
    }
}

fn blocks<B: Backend>(x: BlockScaled<B>) -> Vec<Plane<B>> {
    vec![Plane::U8(x.codes.clone()), Plane::Scales(x)]
}

fn emitted<B: Backend>(x: Emitted<B>) -> Vec<Plane<B>> {
    let planes = [x.rows, x.cols].into_iter().flatten().flat_map(|operand| match operand {
        Operand::Plain(x) => vec![plain(x)],
        Operand::Block(x) => blocks(x),
    });
    planes.chain(x.counts.map(|counts| Plane::U64(counts.0))).collect()
}

/// What conversions take, on one backend.
struct Inputs<B: Backend> {
    x: Tensor<B>,
    x_f32: Tensor<B>,
    da: Tensor<B>,
    weight: B::Buf<f32>,
    /// x in MXFP4, and in E4M3 under powers of two: by this backend, whose conversions to them are compared too.
    mxfp4: BlockScaled<B>,
    e4m3: BlockScaled<B>,
}

impl<B: Kernels> Inputs<B> {
    fn new(b: &B, values: &Values) -> Result<Self> {
        let x = Tensor::from_bf16(b, &values.x, values.rows, COLS)?;
        let x_f32 = Tensor::from_f32(b, &values.x_f32, values.rows, COLS)?;
        let (mxfp4, e4m3) = (rows_of(b, &x, Mxfp4)?, rows_of(b, &x, E4m3)?);
        let da = Tensor::from_bf16(b, &values.da, values.rows, COLS / 2)?;
        Ok(Self { x, x_f32, da, weight: b.upload(&values.weight)?, mxfp4, e4m3 })
    }
}

/// A chunk of random values.
struct Values {
    rows: usize,
    x: Vec<bf16>,
    /// x with 16 more bits of mantissa.
    x_f32: Vec<f32>,
    da: Vec<bf16>,
    weight: Vec<f32>,
}

impl Values {
    fn new(seed: u64, rows: usize) -> Self {
        let matrix = |seed, cols: usize| {
            let mut x = vec![bf16::ZERO; rows * cols];
            in_parallel(x.chunks_mut(128 * cols).enumerate(), |(band, x)| fill(seed, band as u64, cols, x));
            x
        };
        let weight = (0..rows as u64).map(|row| random(seed, row) as i16 as f32 / 16384.0).collect();
        let x = matrix(seed, COLS);
        let mut x_f32 = vec![0.0; x.len()];
        in_parallel(x_f32.chunks_mut(COLS).zip(x.chunks(COLS)).enumerate(), |(row, (wide, x))| {
            widen(seed + MOST_CHUNKS, row as u64, wide, x);
        });
        Self { rows, x, x_f32, da: matrix(seed + 1, COLS / 2), weight }
    }
}

/// The 64 random bits of a number (SplitMix64).
fn random(seed: u64, n: u64) -> u64 {
    let mut z = (seed << 40).wrapping_add(n).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ z >> 31
}

/// A band of up to 128 rows.
fn fill(seed: u64, band: u64, cols: usize, x: &mut [bf16]) {
    let tiles = cols as u64 / 64;
    for (row, x) in x.chunks_mut(cols).enumerate() {
        for (tile, x) in x.chunks_mut(64).enumerate() {
            let bits = random(seed, (band * tiles + tile as u64) | 1 << 39);
            let any_bits = bits.is_multiple_of(16);
            // One tile in four has an exponent out of the whole range.
            let exponent =
                if bits % 16 < 5 { (bits >> 8) as i32 & 0xFF } else { 112 + (bits >> 8) as i32 % 32 };
            let octaves = 1 + (bits >> 16) as i32 % 3;
            let first = ((band * 128 + row as u64) * tiles + tile as u64) * 16;
            for (four, x) in x.chunks_mut(4).enumerate() {
                let mut bits = random(seed, first + four as u64);
                for x in x {
                    *x = bf16::from_bits(if any_bits {
                        bits as u16
                    } else {
                        below(exponent, octaves, bits as u16)
                    });
                    bits >>= 16;
                }
            }
        }
    }
}

/// A row with random bits below those of BF16, but for one number in eight.
fn widen(seed: u64, row: u64, wide: &mut [f32], x: &[bf16]) {
    for (four, (wide, x)) in wide.chunks_mut(4).zip(x.chunks(4)).enumerate() {
        let mut bits = random(seed, row * (COLS as u64 / 4) + four as u64);
        for (wide, x) in wide.iter_mut().zip(x) {
            let low = if bits & 7 == 0 { 0 } else { bits as u32 & 0xFFFF };
            *wide = f32::from_bits(u32::from(x.to_bits()) << 16 | low);
            bits >>= 16;
        }
    }
}

/// The sign and mantissa of these bits, and an exponent the further below `exponent` the rarer; one in 256 is a zero.
fn below(exponent: i32, octaves: i32, bits: u16) -> u16 {
    let drop = (bits >> 7 & 0xFF).trailing_zeros() as i32;
    if drop > 7 {
        return bits & 0x8000;
    }
    let exponent = (exponent - drop * octaves).max(0) as u16;
    bits & 0x807F | exponent << 7
}

/// Runs the body on all items, among as many threads as there are cores.
fn in_parallel<I: Send>(items: impl Iterator<Item = I> + Send, body: impl Fn(I) + Sync) {
    let items = std::sync::Mutex::new(items);
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let next = items.lock().expect("no item panics").next();
                    match next {
                        Some(item) => body(item),
                        None => break,
                    }
                }
            });
        }
    });
}

/// Compares in parts, those first by bytes: NaNs of two backends may differ.
fn compare<T: Plain + Bits>(what: &str, got: &[T], want: &[T]) {
    const PART: usize = 1 << 20;
    assert_eq!(got.len(), want.len(), "{what}: values");
    let failures = std::sync::Mutex::new(Vec::new());
    in_parallel(got.chunks(PART).zip(want.chunks(PART)).enumerate(), |(part, (got, want))| {
        if bytemuck::cast_slice::<T, u8>(got) != bytemuck::cast_slice::<T, u8>(want)
            && let Err(mismatch) = compare_bits(got, want)
        {
            failures.lock().expect("no part panics").push((part, mismatch));
        }
    });
    let mut failures = failures.into_inner().expect("no part panics");
    failures.sort_by_key(|(part, _)| *part);
    if let Some((part, mismatch)) = failures.first() {
        let parts = failures.len();
        panic!("{what}: {parts} parts of {PART} values differ, the first from {}: {mismatch}", part * PART);
    }
}

/// Scales line by line, as the CPU has them.
fn in_order<B: Backend>(b: &B, x: &BlockScaled<B>) -> Vec<u8> {
    let records = x.records(b).expect("as many scales as there are blocks");
    records.iter().flat_map(|record| record.0.to_le_bytes()).collect()
}

fn compare_plane<B: Backend>(b: &B, what: &str, got: &Plane<B>, want: &Plane<Cpu>) {
    fn fetch<B: Backend, T: Plain + Bits>(b: &B, what: &str, got: &B::Buf<T>, want: &[T]) {
        compare(what, &b.download(got).expect("results of the backend under test"), want);
    }
    match (got, want) {
        (Plane::U8(got), Plane::U8(want)) => fetch(b, what, got, want.as_slice()),
        (Plane::F32(got), Plane::F32(want)) => fetch(b, what, got, want.as_slice()),
        (Plane::Bf16(got), Plane::Bf16(want)) => fetch(b, what, got, want.as_slice()),
        (Plane::U64(got), Plane::U64(want)) => fetch(b, what, got, want.as_slice()),
        (Plane::Scales(got), Plane::Scales(want)) => {
            // The CPU's scales lie line by line.
            let (kind, bytes) = (want.scale_kind(), want.scales.as_slice());
            let plane = ScalePlane { kind, bytes };
            let records = (0..plane.len()).map(|i| plane.get(i));
            let records = records.map(|record| if kind.is_nan(record) { kind.nan() } else { record });
            let want: Vec<u8> = records.flat_map(|record| record.0.to_le_bytes()).collect();
            compare(what, &in_order(b, got), &want);
        }
        (got, want) => panic!("{what}: {got:?}, expected {want:?}"),
    }
}

/// A conversion, and what it took.
#[derive(Debug)]
struct Compared {
    conversion: Conversion,
    /// Elements to go through it, and those that have.
    wanted: usize,
    done: usize,
    cpu: Duration,
    all: Duration,
}

impl Compared {
    /// All conversions there are, and their numbers of elements.
    fn all(elements: usize) -> Vec<Self> {
        let new = |wanted| {
            move |conversion| Self { conversion, wanted, done: 0, cpu: Duration::ZERO, all: Duration::ZERO }
        };
        let layers = Conversion::of_layers().into_iter().map(new(elements));
        layers.chain(Conversion::others().into_iter().map(new(elements / OTHERS_PART))).collect()
    }

    fn chunk<B: Kernels>(&mut self, b: &B, cpu: &Cpu, of_b: &Inputs<B>, of_cpu: &Inputs<Cpu>) {
        let what = format!("{}, elements from {}", self.conversion, self.done);
        let started = Instant::now();
        // A GPU works while the CPU does.
        let got = self.conversion.run(b, of_b).unwrap_or_else(|error| panic!("{what}: {error}"));
        let issued = Instant::now();
        let want = self.conversion.run(cpu, of_cpu).unwrap_or_else(|error| panic!("{what}: {error}"));
        self.cpu += issued.elapsed();
        assert_eq!(got.len(), want.len(), "{what}: results");
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            compare_plane(b, &format!("{what}: result {i}"), got, want);
        }
        self.all += started.elapsed();
        self.done += of_cpu.x.rows * COLS;
    }
}

fn compare_backends<B: Kernels>(b: &B, cpu: &Cpu, elements: usize) {
    let mut all = Compared::all(elements);
    let (mut done, mut chunk) = (0, 0);
    while done < elements {
        let rows = (elements - done).div_ceil(COLS).next_multiple_of(128).min(MAX_ROWS);
        let values = Values::new(2 * chunk + 1, rows);
        let of_b = Inputs::new(b, &values).expect("inputs of the backend under test");
        let of_cpu = Inputs::new(cpu, &values).expect("inputs of the CPU");
        for compared in all.iter_mut().filter(|compared| done < compared.wanted) {
            compared.chunk(b, cpu, &of_b, &of_cpu);
        }
        done += rows * COLS;
        chunk += 1;
    }
    println!("millions of elements; seconds on {}, and in all:", cpu.name());
    for Compared { conversion, done, cpu, all, .. } in all {
        println!("{:>5} {:6.2} {:6.2} {conversion}", done / 1_000_000, cpu.as_secs_f32(), all.as_secs_f32());
    }
}

#[test]
fn a_billion_random_elements_convert_to_the_same_bits() {
    let Some(elements) = env::random_elements() else {
        return skip("random elements: NIBBLE_RANDOM_ELEMENTS does not say how many");
    };
    let Some(device) = gpu::device("random elements") else { return };
    let (cuda, cpu) = (Cuda::on(device), Cpu::new(0).expect("the CPU"));
    compare_backends(&cuda, &cpu, elements);
}

#[test]
fn the_cpus_two_paths_convert_some_of_them_to_the_same_bits() {
    let (scalar, cpu) = (Cpu::scalar(0).expect("the CPU"), Cpu::new(0).expect("the CPU"));
    compare_backends(&scalar, &cpu, 256 * COLS);
}
