//! The block-scaled product against references on the host.

use half::bf16;
use nibble_cuda::ops::gemm_fp8_block::{Config, Desc, GemmFp8Block, scale_stride};
use nibble_cuda::{Device, Result};
use nibble_formats::Element;
use nibble_formats::philox::normal_from_bits;

/// Sizes around every edge of tiles, scale blocks and clusters, then one with full tiles.
pub const SHAPES: [Desc; 9] = [
    Desc { m: 1, n: 8, k: 16 },
    Desc { m: 5, n: 136, k: 272 },
    Desc { m: 128, n: 128, k: 128 },
    Desc { m: 129, n: 120, k: 640 },
    Desc { m: 257, n: 264, k: 1040 },
    Desc { m: 300, n: 1000, k: 400 },
    Desc { m: 2500, n: 392, k: 256 },
    Desc { m: 640, n: 4104, k: 896 },
    Desc { m: 4096, n: 4096, k: 7168 },
];

/// Outputs compared where there are too many for the host.
const SAMPLES: usize = 20_000;

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

/// Operands on the host.
pub struct Operands {
    pub desc: Desc,
    pub a: Vec<u8>,
    pub scale_a: Vec<f32>,
    pub b: Vec<u8>,
    pub scale_b: Vec<f32>,
}

impl Operands {
    /// Normal values in E4M3 as quantization leaves them, the largest of a block near 448; scales between 2^-9 and 2^-5
    /// with full mantissas.
    pub fn normal(desc: Desc, seed: u64) -> Self {
        let sigma = 160.0;
        let codes: Vec<u8> = normals().into_iter().map(|x| Element::E4m3.encode(x * sigma)).collect();
        let scales: Vec<f32> = (0..1 << 16).map(|i| f32::from_bits((118 << 23) + i * (4 << 7))).collect();
        Self::drawn(desc, seed, &codes, &scales)
    }

    /// Integers -2 to 2 and scales 1/2, 1, 2, 4: every partial and total sum is exact in F32.
    pub fn integers(desc: Desc, seed: u64) -> Self {
        let codes: Vec<u8> = (0..1 << 16).map(|i| Element::E4m3.encode((i % 5) as f32 - 2.0)).collect();
        let scales: Vec<f32> = (0..1 << 16).map(|i| 0.5 * (1 << (i % 4)) as f32).collect();
        Self::drawn(desc, seed, &codes, &scales)
    }

    fn drawn(desc: Desc, seed: u64, codes: &[u8], scales: &[f32]) -> Self {
        let mut random = Random(seed);
        let a = random.draw(codes, desc.m * desc.k);
        let b = random.draw(codes, desc.n * desc.k);
        let mut scale_a = random.draw(scales, desc.scales_a());
        let scale_b = random.draw(scales, desc.scales_b());
        // What lies past m must not matter.
        for row in scale_a.chunks_mut(scale_stride(desc.m)) {
            row[desc.m..].fill(f32::NAN);
        }
        Self { desc, a, scale_a, b, scale_b }
    }

    /// The product by the device, its output poisoned beforehand.
    pub fn run(&self, device: &Device, config: Config) -> Result<Vec<bf16>> {
        let mut d = device.filled(self.desc.m * self.desc.n, 0xFF)?;
        GemmFp8Block {
            desc: self.desc,
            a: &device.upload(&self.a)?,
            scale_a: &device.upload(&self.scale_a)?,
            b: &device.upload(&self.b)?,
            scale_b: &device.upload(&self.scale_b)?,
            d: &mut d,
        }
        .run_with(config)?;
        d.download()
    }

    /// One output in F64.
    fn exact(&self, row: usize, col: usize, decode: &[f64; 256]) -> f64 {
        let Desc { m, k, .. } = self.desc;
        let (a, b) = (&self.a[row * k..][..k], &self.b[col * k..][..k]);
        let blocks = a.chunks(128).zip(b.chunks(128)).enumerate();
        blocks.fold(0.0, |total, (block, (a, b))| {
            let dot: f64 = a.iter().zip(b).map(|(&a, &b)| decode[a as usize] * decode[b as usize]).sum();
            let scale_a = f64::from(self.scale_a[block * scale_stride(m) + row]);
            let scale_b = f64::from(self.scale_b[col / 128 * self.desc.blocks_k() + block]);
            total + dot * scale_a * scale_b
        })
    }

    /// (output, its F64 reference): all of them, or a sample with the corners.
    fn compared<'a>(&'a self, d: &'a [bf16]) -> impl Iterator<Item = (usize, f32, f64)> + 'a {
        let decode: [f64; 256] = std::array::from_fn(|code| f64::from(Element::E4m3.decode(code as u8)));
        let Desc { m, n, .. } = self.desc;
        let total = m * n;
        let every = total <= SAMPLES;
        let mut random = Random(7);
        let corners = [0, n - 1, total - n, total - 1];
        (0..total.min(SAMPLES)).map(move |i| {
            let at = match (every, corners.get(i)) {
                (true, _) => i,
                (false, Some(&corner)) => corner,
                (false, None) => random.bits() as usize % total,
            };
            (at, d[at].to_f32(), self.exact(at / n, at % n, &decode))
        })
    }
}

/// What random data showed.
#[derive(Debug, Clone, Copy)]
pub struct Errors {
    /// ‖D − exact‖ / ‖exact‖, BF16 rounding included.
    pub relative_l2: f64,
    /// The same with the exact result rounded to BF16: what the arithmetic alone did.
    pub against_rounded: f64,
    /// Share of outputs that differ from the exact result rounded to BF16.
    pub differing: f64,
}

/// Random operands: errors against F64. `Err` says which output was not finite.
pub fn random_errors(device: &Device, config: Config, desc: Desc) -> Result<Errors, String> {
    let operands = Operands::normal(desc, 42);
    let d = operands.run(device, config).map_err(|error| error.to_string())?;
    let (mut error, mut rounded_error, mut norm, mut differing, mut count) = (0.0, 0.0, 0.0, 0usize, 0usize);
    for (at, got, exact) in operands.compared(&d) {
        if !got.is_finite() {
            return Err(format!("{config:?} {desc:?}: output {at} is {got}, expected {exact}"));
        }
        let rounded = bf16::from_f64(exact).to_f64();
        error += (f64::from(got) - exact).powi(2);
        rounded_error += (f64::from(got) - rounded).powi(2);
        norm += exact * exact;
        differing += usize::from(f64::from(got) != rounded);
        count += 1;
    }
    Ok(Errors {
        relative_l2: (error / norm).sqrt(),
        against_rounded: (rounded_error / norm).sqrt(),
        differing: differing as f64 / count as f64,
    })
}

/// Integers: every compared output must have the bits of the exact result rounded to BF16.
pub fn integers_are_exact(device: &Device, config: Config, desc: Desc) -> Result<usize, String> {
    let operands = Operands::integers(desc, 43);
    let d = operands.run(device, config).map_err(|error| error.to_string())?;
    let mut compared = 0;
    for (at, got, exact) in operands.compared(&d) {
        let expected = bf16::from_f64(exact);
        if got.to_bits() != expected.to_f32().to_bits() && (got != 0.0 || exact != 0.0) {
            return Err(format!("{config:?} {desc:?}: output {at} is {got}, expected {expected}"));
        }
        compared += 1;
    }
    Ok(compared)
}

/// A NaN scale of A makes exactly its row NaN.
pub fn nan_scale_stays_in_its_row(device: &Device, config: Config) -> Result<(), String> {
    let desc = Desc { m: 300, n: 264, k: 400 };
    let mut operands = Operands::integers(desc, 44);
    let row = 201;
    operands.scale_a[2 * scale_stride(desc.m) + row] = f32::NAN;
    let d = operands.run(device, config).map_err(|error| error.to_string())?;
    match d.iter().enumerate().find(|(at, value)| value.is_nan() != (at / desc.n == row)) {
        None => Ok(()),
        Some((at, value)) => {
            Err(format!("{config:?}: output {at} is {value}; row {row} alone should be NaN"))
        }
    }
}

/// All instances give the same bits, twice.
pub fn instances_agree(device: &Device, desc: Desc) -> Result<(), String> {
    let operands = Operands::normal(desc, 45);
    let bits = |config| -> Result<Vec<u16>, String> {
        let d = operands.run(device, config).map_err(|error| error.to_string())?;
        Ok(d.into_iter().map(bf16::to_bits).collect())
    };
    let first = bits(Config::ALL[0])?;
    for config in Config::ALL {
        for round in 0..2 {
            if bits(config)? != first {
                return Err(format!("{config:?} {desc:?}: round {round} differs from {:?}", Config::ALL[0]));
            }
        }
    }
    Ok(())
}
