//! Compares RoPE's frequencies with F32 results of `_compute_llama3_parameters`, `_compute_yarn_parameters` and `yarn_apply_mscale` of
//! transformers 5.24.

use super::*;
use nibble_cpu::Cpu;

const LLAMA3: RopeScaling = RopeScaling {
    kind: RopeScalingKind::Llama3,
    factor: 32.0,
    original_positions: 8192,
    low_freq_factor: 1.0,
    high_freq_factor: 4.0,
    beta_fast: 32.0,
    beta_slow: 1.0,
    mscale: 0.0,
    mscale_all_dim: 0.0,
};

const YARN: RopeScaling =
    RopeScaling { kind: RopeScalingKind::Yarn, factor: 40.0, original_positions: 4096, ..LLAMA3 };

fn close(got: f64, want: f64, what: &str) {
    assert!((got / want - 1.0).abs() < 1e-6, "{what}: {got} for {want}");
}

fn check(rope: Rope, want: &[(usize, f64)]) {
    let frequencies = rope.frequencies();
    assert_eq!(frequencies.len(), rope.dim / 2);
    for (i, want) in want {
        close(frequencies[*i], *want, &format!("{rope:?}, pair {i}"));
    }
}

#[test]
fn frequencies_of_llama3() {
    let of = |dim, factor| Rope { dim, theta: 5e5, scaling: RopeScaling { factor, ..LLAMA3 } };
    let narrow = [
        (0, 1.0),
        (1, 0.663_601_279),
        (8, 0.037_606_030_7),
        (13, 0.004_839_421_25),
        (16, 0.000_429_556_705),
        (20, 8.570_255_89e-6),
        (31, 9.418_306_49e-8),
    ];
    check(of(64, 32.0), &narrow);
    let wide = [
        (0, 1.0),
        (21, 0.013_490_419_8),
        (29, 0.002_166_570_63),
        (32, 0.000_524_846_022),
        (40, 3.428_102_35e-5),
        (63, 3.068_925_88e-7),
    ];
    check(of(128, 8.0), &wide);
    assert_eq!(of(128, 8.0).amplitude(), 1.0);
    close(f64::from(of(128, 8.0).latent_scale(192)), 192f64.powf(-0.5), "scale");
}

#[test]
fn frequencies_of_yarn() {
    let want = [
        (0, 1.0),
        (1, 0.749_894_202),
        (10, 0.056_234_128_8),
        (13, 0.018_378_144_1),
        (16, 0.005_500_000_44),
        (20, 0.000_790_569_407),
        (24, 2.499_999_94e-5),
        (31, 3.333_803_53e-6),
    ];
    check(Rope { dim: 64, theta: 1e4, scaling: YARN }, &want);
    // With these values, the first and the last pair of YaRN's ramp are the same pair.
    let step = RopeScaling { factor: 4.0, original_positions: 64, beta_fast: 2.0, beta_slow: 1.0, ..YARN };
    let want = [(0, 1.0), (1, 0.0625), (2, 0.002_499_999_94), (3, 0.000_250_000_012)];
    check(Rope { dim: 8, theta: 1e4, scaling: step }, &want);
}

#[test]
fn amplitude_and_scale_of_yarn() {
    for (mscale, mscale_all_dim, amplitude, scale) in [
        (0.707, 0.707, 1.0, 0.114_721_386_792_926_1),
        (1.0, 1.0, 1.0, 0.135_233_778_860_880_1),
        (1.0, 0.5, 1.155_721_990_196_260_8, 0.101_246_129_613_252_18),
        (0.0, 0.0, 1.368_887_945_411_393_6, 0.072_168_783_648_703_22),
        (0.707, 0.0, 1.368_887_945_411_393_6, 0.072_168_783_648_703_22),
    ] {
        let rope = Rope { dim: 64, theta: 1e4, scaling: RopeScaling { mscale, mscale_all_dim, ..YARN } };
        let what = format!("mscale {mscale} over {mscale_all_dim}");
        assert!((rope.amplitude() - amplitude).abs() < 1e-14, "{what}");
        close(f64::from(rope.latent_scale(192)), scale, &what);
    }
}

#[test]
fn the_table_has_cosines_before_sines_times_the_amplitude() {
    let cpu = Cpu::new(1).unwrap();
    for scaling in [RopeScaling::default(), LLAMA3, YARN] {
        let rope = Rope { dim: 16, theta: 1e4, scaling };
        let table = rope_table(&cpu, 50, rope).unwrap();
        assert_eq!(table.shape(), (50, 16));
        let values = table.to_f32_vec(&cpu).unwrap();
        for (at, got) in values.into_iter().enumerate() {
            let (position, i) = (at / 16, at % 16);
            let angle = position as f64 * rope.frequencies()[i % 8];
            let want = rope.amplitude() * if i < 8 { angle.cos() } else { angle.sin() };
            assert!((f64::from(got) - want).abs() < 1e-7, "{scaling:?}, position {position}, {i}");
        }
    }
}
