//! A billion random elements through every conversion, on the GPU and on the CPU, compared bit for bit.
//!
//! Runs where `NIBBLE_RANDOM_ELEMENTS` says how many; 1000000000 is meant, in release mode and on many cores, since the CPU does
//! as many. The values of a tile of 128 rows by 64 columns lie around one exponent, a few octaves below it more often than not;
//! some tiles hold any bits at all, NaN and infinities among them.

mod gpu;

use half::bf16;
use nibble_core::formats::{BlockAxis, Codec, Format, Purpose, Rounding, ScaleRule, Stream};
use nibble_core::ops::{
    Dequantize, Emit, Emitted, Hadamard, Planes, Quantize, Swiglu, SwigluBackward, Transcode,
};
use nibble_core::{Backend, BlockScaled, Convert, DType, Data, Operand, Plain, Result, Scales, Tensor};
use nibble_cpu::Cpu;
use nibble_cuda::{Cuda, env};
use nibble_testkit::assert::{Bits, compare_bits};
use nibble_testkit::skip;
use std::fmt::Debug;
use std::num::NonZero;
use std::thread;
use std::time::{Duration, Instant};

/// Columns of a chunk, and its rows at most: 2²⁷ elements.
const COLS: usize = 2048;
const MAX_ROWS: usize = 65536;

/// What is compared.
#[derive(Debug, Clone, Copy)]
enum Conversion {
    /// BF16 to MXFP4 rows.
    ToMxfp4(Rounding),
    /// BF16 to rows after a random Hadamard transform of this length.
    Transformed(Format, Rounding, usize),
    /// BF16 to E4M3.
    ToE4m3(ScaleRule, Planes),
    /// A block format to BF16.
    Dequantize(Format),
    /// MXFP4 to E4M3, along rows or columns, or to tiles both ways.
    Lift(BlockAxis),
    /// E4M3 rows to E4M3 columns, by exponents.
    Shift,
    /// E4M3 rows to MXFP4 rows.
    Narrow,
    /// SwiGLU of BF16 with weights, to E4M3 rows; h saved in MXFP4.
    Swiglu(ScaleRule),
    /// Its backward pass from h in MXFP4, to E4M3 rows and columns.
    SwigluBackward(ScaleRule),
}

impl Conversion {
    fn all() -> Vec<Self> {
        use Conversion::*;
        let rules = [ScaleRule::Amax, ScaleRule::Rceil];
        let mut all = vec![ToMxfp4(Rounding::NearestEven), ToMxfp4(Rounding::Stochastic)];
        all.extend([64, 128].map(|len| Transformed(Format::Mxfp4, Rounding::NearestEven, len)));
        all.extend([Format::Mxfp4, Format::E4m3].map(|to| Transformed(to, Rounding::Stochastic, 64)));
        for rule in rules {
            all.extend([Planes::Rows, Planes::Cols, Planes::Both].map(|planes| ToE4m3(rule, planes)));
        }
        all.extend([Format::Mxfp4, Format::E4m3].map(Dequantize));
        all.extend(BlockAxis::ALL.map(Lift));
        all.extend([Shift, Narrow]);
        all.extend(rules.map(Swiglu));
        all.extend(rules.map(SwigluBackward));
        all
    }

    fn run<B: Convert>(self, b: &B, inputs: &Inputs<B>) -> Result<Vec<Plane<B>>> {
        let Inputs { x, da, weight, mxfp4, e4m3 } = inputs;
        let transcode = |x, to, axis| -> Result<Vec<Plane<B>>> {
            let made = Transcode { x, to, axis, rule: ScaleRule::Rceil, groups: None }.run(b)?;
            let mut planes = blocks(made.out);
            planes.extend(made.transposed.into_iter().flat_map(blocks));
            planes.push(Plane::U64(made.counts.0));
            Ok(planes)
        };
        match self {
            Self::ToMxfp4(rounding) => rounded(x, Format::Mxfp4, rounding, None).run(b).map(emitted),
            Self::Transformed(to, rounding, len) => {
                let hadamard = Hadamard { len, ..Hadamard::new(7, 0x5EED) };
                rounded(x, to, rounding, Some(hadamard)).run(b).map(emitted)
            }
            Self::ToE4m3(rule, planes) => {
                Quantize::new(x, codec(Format::E4m3, rule, Rounding::NearestEven), planes).run(b).map(emitted)
            }
            Self::Dequantize(format) => {
                let x = if format == Format::E4m3 { e4m3 } else { mxfp4 };
                Dequantize { x, dtype: DType::Bf16 }.run(b).map(|out| vec![plain(out)])
            }
            Self::Lift(axis) => transcode(mxfp4, Format::E4m3, axis),
            Self::Shift => transcode(e4m3, Format::E4m3, BlockAxis::Col),
            Self::Narrow => transcode(e4m3, Format::Mxfp4, BlockAxis::Row),
            Self::Swiglu(rule) => {
                let a = emit(rule, Planes::Rows);
                let save_h = Some(codec(Format::Mxfp4, ScaleRule::Rceil, Rounding::NearestEven));
                let out = Swiglu { h: x, weight: Some(weight), groups: None, a, save_h }.run(b)?;
                Ok(out.h.into_iter().flat_map(blocks).chain(emitted(out.a)).collect())
            }
            Self::SwigluBackward(rule) => {
                let h = Operand::Block(mxfp4.clone());
                let (dh, a) = (emit(rule, Planes::Both), emit(rule, Planes::Cols));
                let grads = SwigluBackward { h: &h, da, weight: Some(weight), groups: None, dh, a }.run(b)?;
                let grad = std::iter::once(Plane::F32(grads.dweight));
                Ok(emitted(grads.dh).into_iter().chain(emitted(grads.a)).chain(grad).collect())
            }
        }
    }
}

fn codec(format: Format, rule: ScaleRule, rounding: Rounding) -> Codec {
    Codec::new(format, rule, rounding).expect("a codec there is")
}

/// Rows under scales that are powers of two.
fn rounded<B: Backend>(
    x: &Tensor<B>,
    to: Format,
    rounding: Rounding,
    hadamard: Option<Hadamard>,
) -> Quantize<'_, B> {
    let random = rounding.is_random().then(|| Stream::new(7, Purpose::Rounding, 0x5EED, 3));
    Quantize { random, hadamard, ..Quantize::new(x, codec(to, ScaleRule::Rceil, rounding), Planes::Rows) }
}

fn emit(rule: ScaleRule, planes: Planes) -> Emit {
    Emit::Block { codec: codec(Format::E4m3, rule, Rounding::NearestEven), planes }
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
    da: Tensor<B>,
    weight: B::Buf<f32>,
    /// x in MXFP4, and in E4M3 under powers of two: by this backend, whose conversions to them are compared too.
    mxfp4: BlockScaled<B>,
    e4m3: BlockScaled<B>,
}

impl<B: Convert> Inputs<B> {
    fn new(b: &B, values: &Values) -> Result<Self> {
        let x = Tensor::from_bf16(b, &values.x, values.rows, COLS)?;
        let rows = |format| {
            let codec = codec(format, ScaleRule::Rceil, Rounding::NearestEven);
            Quantize::new(&x, codec, Planes::Rows).run(b)?.take_rows("quantize")?.block("quantize").cloned()
        };
        let (mxfp4, e4m3) = (rows(Format::Mxfp4)?, rows(Format::E4m3)?);
        let da = Tensor::from_bf16(b, &values.da, values.rows, COLS / 2)?;
        Ok(Self { x, da, weight: b.upload(&values.weight)?, mxfp4, e4m3 })
    }
}

/// A chunk of random values.
struct Values {
    rows: usize,
    x: Vec<bf16>,
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
        Self { rows, x: matrix(seed, COLS), da: matrix(seed + 1, COLS / 2), weight }
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
fn in_order<B: Backend, T: Plain + Default>(b: &B, x: &BlockScaled<B>, scales: &B::Buf<T>) -> Vec<T> {
    let (lines, blocks) = x.shape_of_scales();
    let scales = b.download(scales).expect("results of the backend under test");
    x.scale_layout.restore(&scales, lines, blocks).expect("as many scales as there are blocks")
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
        (Plane::Scales(got), Plane::Scales(want)) => match (&got.scales, &want.scales) {
            (Scales::E8m0(g), Scales::E8m0(w)) => compare(what, &in_order(b, got, g), w.as_slice()),
            (Scales::F32(g), Scales::F32(w)) => compare(what, &in_order(b, got, g), w.as_slice()),
            _ => panic!("{what}: {got:?}, expected {want:?}"),
        },
        (got, want) => panic!("{what}: {got:?}, expected {want:?}"),
    }
}

/// What one conversion took.
#[derive(Debug, Default, Clone, Copy)]
struct Spent {
    cpu: Duration,
    all: Duration,
}

fn compare_backends<B: Convert>(b: &B, cpu: &Cpu, elements: usize) {
    let conversions = Conversion::all();
    let mut spent = vec![Spent::default(); conversions.len()];
    let (mut done, mut chunk) = (0, 0);
    while done < elements {
        let rows = (elements - done).div_ceil(COLS).next_multiple_of(128).min(MAX_ROWS);
        let values = Values::new(2 * chunk + 1, rows);
        let of_b = Inputs::new(b, &values).expect("inputs of the backend under test");
        let of_cpu = Inputs::new(cpu, &values).expect("inputs of the CPU");
        for (conversion, spent) in conversions.iter().zip(&mut spent) {
            let what = format!("{conversion:?}, elements from {done}");
            let started = Instant::now();
            // A GPU works while the CPU does.
            let got = conversion.run(b, &of_b).unwrap_or_else(|error| panic!("{what}: {error}"));
            let issued = Instant::now();
            let want = conversion.run(cpu, &of_cpu).unwrap_or_else(|error| panic!("{what}: {error}"));
            spent.cpu += issued.elapsed();
            assert_eq!(got.len(), want.len(), "{what}: results");
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                compare_plane(b, &format!("{what}: result {i}"), got, want);
            }
            spent.all += started.elapsed();
        }
        done += rows * COLS;
        chunk += 1;
    }
    println!("{done} elements each; seconds on {}, and in all:", cpu.name());
    for (conversion, Spent { cpu, all }) in conversions.iter().zip(spent) {
        println!("{conversion:?}: {:.2} {:.2}", cpu.as_secs_f32(), all.as_secs_f32());
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
