//! Errors of the elementary functions against double precision, in units of the last place, over a
//! dense sweep of all singles.

use nibble_formats::math;

/// Distance of `got` from `exact` in units of the last place of singles at `exact`.
fn ulps(got: f32, exact: f64) -> f64 {
    if exact.abs() > f64::from(f32::MAX) {
        // Halfway to the next binade rounds to infinity; just above the largest single may do either.
        return if got.is_infinite() { 0.0 } else { (f64::from(got) - exact).abs() / 2f64.powi(104) };
    }
    if got.is_infinite() {
        return (2f64.powi(128) - exact.abs()) / 2f64.powi(104);
    }
    let exponent = exact.abs().max(2f64.powi(-126)).log2().floor() as i32;
    (f64::from(got) - exact).abs() / 2f64.powi(exponent - 23)
}

/// Largest error over finite singles of both signs that satisfy `domain`, and where.
fn worst(f: impl Fn(f32) -> f32, exact: impl Fn(f64) -> f64, domain: impl Fn(f32) -> bool) -> (f64, f32) {
    let mut worst = (0.0, 0.0);
    for bits in (0..0x7F80_0000u32).step_by(1709) {
        for x in [f32::from_bits(bits), -f32::from_bits(bits)] {
            if domain(x) {
                let error = ulps(f(x), exact(f64::from(x)));
                assert!(!error.is_nan(), "NaN at {x:e}");
                if error > worst.0 {
                    worst = (error, x);
                }
            }
        }
    }
    worst
}

fn sweep(name: &str, worst: (f64, f32), bound: f64) {
    println!("{name}: at most {:.3} ulp, at {:e}", worst.0, worst.1);
    assert!(worst.0 <= bound, "{name}: {:.3} ulp at {:e}, promised {bound}", worst.0, worst.1);
}

#[test]
fn exp_is_within_one_ulp() {
    sweep("exp", worst(math::exp, f64::exp, |x| x.abs() < 200.0), 1.0);
}

#[test]
fn log_is_within_one_ulp() {
    sweep("log", worst(math::log, f64::ln, |x| x > 0.0), 1.0);
    let near_one = (0x3F70_0000..0x3F90_0000u32).map(f32::from_bits);
    let worst = near_one
        .map(|x| (ulps(math::log(x), f64::from(x).ln()), x))
        .fold((0.0, 0.0), |a, b| if b.0 > a.0 { b } else { a });
    sweep("log near 1", worst, 1.0);
}

#[test]
fn sigmoid_and_silu_are_as_exact_as_promised() {
    let exact = |x: f64| 1.0 / (1.0 + (-x).exp());
    sweep("sigmoid", worst(math::sigmoid, exact, |x| x.abs() < 200.0), 2.1);
    // Where sigmoid is subnormal, silu inherits its coarse step.
    let silu = worst(math::silu, |x| x * exact(x), |x| x > -87.0);
    sweep("silu", silu, 3.0);
}

/// Φ of 1 to 10 by the error function's continued fraction, and of −1 to 1 by its series, both in F64.
fn normal_cdf_f64(x: f64) -> f64 {
    let z = x.abs() / std::f64::consts::SQRT_2;
    let tail = if z < 1.5 {
        let (mut term, mut sum) = (z, z);
        for n in 1..60 {
            term *= -z * z / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        0.5 - sum / std::f64::consts::PI.sqrt()
    } else {
        let fraction = (1..200).rev().fold(z, |below, n| z + f64::from(n) / 2.0 / below);
        (-z * z).exp() / fraction / std::f64::consts::PI.sqrt() / 2.0
    };
    if x < 0.0 { tail } else { 1.0 - tail }
}

#[test]
fn gelu_is_as_exact_as_promised() {
    let cdf = |x| math::normal_cdf(x).0;
    sweep("normal cdf from -1 on", worst(cdf, normal_cdf_f64, |x| (-1.0..20.0).contains(&x)), 7.0);
    sweep(
        "gelu from -1 on",
        worst(math::gelu, |x| x * normal_cdf_f64(x), |x| (-1.0..20.0).contains(&x)),
        8.0,
    );
    // The rounding of x² in the exponential grows as x².
    for x in (-4096..0).map(|i| i as f32 / 400.0) {
        let (got, want) = (f64::from(math::gelu(x)), f64::from(x) * normal_cdf_f64(f64::from(x)));
        let bound = 4e-7 + 6e-8 * f64::from(x).powi(2);
        assert!((got / want - 1.0).abs() < bound, "{x}: {got:e} for {want:e}");
        let density = (-f64::from(x).powi(2) / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
        assert!((f64::from(math::normal_cdf(x).1) / density - 1.0).abs() < bound, "{x}");
        let slope = normal_cdf_f64(f64::from(x)) + f64::from(x) * density;
        assert!((f64::from(math::gelu_derivative(x)) - slope).abs() < 3e-7, "{x}");
    }
    assert_eq!(math::gelu(f32::INFINITY), f32::INFINITY);
    assert_eq!((math::gelu(-15.0), math::gelu_derivative(-15.0)), (-0.0, 0.0));
    assert_eq!((math::gelu(15.0), math::gelu_derivative(15.0)), (15.0, 1.0));
    for x in [f32::NAN, f32::NEG_INFINITY] {
        assert!(math::gelu(x).is_nan());
    }
}

#[test]
fn rsqrt_is_within_its_two_roundings() {
    sweep("rsqrt", worst(math::rsqrt, |x| 1.0 / x.sqrt(), |x| x > 0.0), 1.5);
}

#[test]
fn ends_of_the_ranges() {
    use f32 as f;
    assert_eq!(math::exp(0.0), 1.0);
    assert_eq!(math::exp(-0.0), 1.0);
    assert_eq!(math::exp(f::INFINITY), f::INFINITY);
    assert_eq!(math::exp(f::NEG_INFINITY), 0.0);
    assert_eq!(math::exp(88.73), f::INFINITY);
    assert!(math::exp(88.72).is_finite());
    assert_eq!(math::exp(-104.0), 0.0);
    assert_eq!(math::exp(-103.9), f::from_bits(1)); // subnormals are not flushed
    assert_eq!(math::log(1.0), 0.0);
    assert_eq!(math::log(f::INFINITY), f::INFINITY);
    for zero in [0.0, -0.0] {
        assert_eq!(math::log(zero), f::NEG_INFINITY);
    }
    for x in [-1.0, f::NEG_INFINITY, -f::from_bits(1), f::NAN] {
        assert!(math::log(x).is_nan(), "{x}");
    }
    assert_eq!((math::sigmoid(f::INFINITY), math::sigmoid(f::NEG_INFINITY)), (1.0, 0.0));
    assert_eq!(math::sigmoid(0.0), 0.5);
    assert_eq!(math::silu(f::INFINITY), f::INFINITY);
    assert_eq!(math::silu(-200.0), 0.0);
    assert_eq!(math::silu(-0.0).to_bits(), (-0.0f32).to_bits());
    assert!(math::silu(f::NEG_INFINITY).is_nan());
    assert_eq!(math::rsqrt(4.0), 0.5);
    assert_eq!(math::rsqrt(0.0), f::INFINITY);
    for nan in [f::NAN, f::from_bits(0x7FBF_FFFF), -f::NAN, f::from_bits(0xFFFF_FFFF)] {
        for function in [math::exp, math::log, math::sigmoid, math::silu, math::rsqrt] {
            assert!(function(nan).is_nan());
        }
    }
}

/// A few bits written down, so that a change of the polynomials cannot pass unseen.
#[test]
fn bits_are_pinned() {
    let mut hash = 0xCBF2_9CE4_8422_2325u64;
    for bits in (0..=u32::MAX).step_by(65_537) {
        let x = f32::from_bits(bits);
        for function in [math::exp, math::log, math::sigmoid, math::silu, math::rsqrt] {
            let y = function(x);
            let y = if y.is_nan() { 0x7FC0_0000 } else { y.to_bits() }; // signs of NaNs are not owed
            hash = (hash ^ u64::from(y)).wrapping_mul(0x0000_0100_0000_01B3);
        }
    }
    assert_eq!(hash, PINNED, "{hash:#018x}");
}

const PINNED: u64 = 0xa3ea_1835_3d26_8a97;

#[cfg(target_arch = "x86_64")]
mod vectorised {
    use nibble_formats::math;

    /// The same source compiled for wider units, in a loop that the compiler vectorises.
    macro_rules! compiled_for {
        ($name:ident, $features:literal) => {
            #[target_feature(enable = $features)]
            fn $name(x: &[f32], y: &mut [[f32; 5]]) {
                for (x, y) in x.iter().zip(y) {
                    *y = [math::exp(*x), math::log(*x), math::sigmoid(*x), math::silu(*x), math::rsqrt(*x)];
                }
            }
        };
    }
    compiled_for!(avx2, "avx2,fma");
    compiled_for!(avx512, "avx512f,avx512bw,avx512vl,fma");

    #[test]
    fn wider_units_give_the_same_bits() {
        let x: Vec<f32> = (0..=u32::MAX).step_by(10_007).map(f32::from_bits).collect();
        let plain: Vec<[f32; 5]> = x
            .iter()
            .map(|&x| [math::exp(x), math::log(x), math::sigmoid(x), math::silu(x), math::rsqrt(x)])
            .collect();
        let check = |name: &str, wide: Vec<[f32; 5]>| {
            for ((x, plain), wide) in x.iter().zip(&plain).zip(&wide) {
                for (a, b) in plain.iter().zip(wide) {
                    assert!(a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()), "{name}: {x:e}");
                }
            }
        };
        let mut wide = vec![[0.0; 5]; x.len()];
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: the features were detected on this machine.
            unsafe { avx2(&x, &mut wide) };
            check("avx2", wide.clone());
        } else {
            println!("skipped: AVX2 (not on this machine)");
        }
        let avx512_detected = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl");
        if avx512_detected {
            // SAFETY: the features were detected on this machine (FMA is implied by AVX-512).
            unsafe { avx512(&x, &mut wide) };
            check("avx512", wide);
        } else {
            println!("skipped: AVX-512 (not on this machine)");
        }
    }
}
