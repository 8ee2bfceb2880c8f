use super::oracle::Oracle;
use nibble_formats::{Element, Lift, shift_code, shift_e4m3, shift_target};

fn same_value(code: u8, exact: f64) -> bool {
    f64::from(Element::E4M3.decode(code)) == exact
}

const LIFTS: [Element; 3] = [Element::E2M1, Element::E2M3, Element::E3M2];

#[test]
fn every_code_under_every_pair_of_scales() {
    let oracle = Oracle::new(Element::E4M3);
    for lift in LIFTS.map(|element| Lift::of(element).unwrap()) {
        let (element, codes) = (lift.element(), 1u8 << lift.element().code_bits());
        for source in 0..=254u8 {
            for target in 0..=254u8 {
                let factor = 2f64.powi(i32::from(source) - i32::from(target));
                let (table, mask) = lift.table(source, target);
                for code in 0..64u8 {
                    let exact = f64::from(element.decode(code % codes)) * factor;
                    let (got, changed) = lift.code(code, source, target);
                    assert_eq!(got, oracle.nearest_even(exact), "{code} {source} -> {target}");
                    assert_eq!(changed, !same_value(got, exact), "{code} {source} -> {target}");
                    assert_eq!((table[usize::from(code)], mask >> code & 1 == 1), (got, changed));
                }
            }
        }
    }
}

#[test]
fn lifts_are_exact_while_scales_lie_within_their_octaves() {
    for lift in LIFTS.map(|element| Lift::of(element).unwrap()) {
        let sign = 1usize << (lift.element().code_bits() - 1);
        for top in 0..=254u8 {
            let target = lift.target([top].into_iter());
            for octaves in 0..=top {
                let (table, changed) = lift.table(top - octaves, target);
                // With the target held at 0, small sources are nearer to it than the headroom.
                let headroom = i32::from(lift.headroom_log2());
                let below = i32::from(target) - i32::from(top - octaves) + headroom;
                assert_eq!(changed == 0, below <= i32::from(lift.octaves()), "{lift:?} {top} {octaves}");
                assert_eq!((table[0], table[sign]), (0x00, 0x80), "zeros keep their sign at any distance");
                let most = lift.element().max() * 2f32.powi(headroom);
                for (code, lifted) in table.into_iter().enumerate() {
                    assert_eq!(lifted & 0x80 != 0, code & sign != 0, "signs stay");
                    assert!(Element::E4M3.decode(lifted).abs() <= most && most <= 448.0);
                }
            }
        }
    }
}

#[test]
fn targets_ignore_nan_blocks_and_do_not_wrap() {
    let target = |bytes: &[u8]| Lift::E2M1.target(bytes.iter().copied());
    assert_eq!(target(&[120, 127, 0xFF, 94]), 121);
    assert_eq!(target(&[5, 3, 0, 1]), 0);
    assert_eq!(target(&[6]), 0);
    assert_eq!(target(&[7]), 1);
    assert_eq!(target(&[0xFF, 0xFF]), 0);
    assert_eq!(target(&[]), 0);
    assert_eq!(shift_target([120, 0xFF, 127].into_iter()), 127);
    assert_eq!(shift_target([0xFF].into_iter()), 0);
}

#[test]
fn nan_blocks_stay_nan_and_do_not_count_as_changed() {
    for code in 0..=255u8 {
        for scale in 0..=255u8 {
            assert_eq!(Lift::E2M1.code(code, 0xFF, scale), (0x7F, false));
            assert_eq!(shift_code(code, 0xFF, scale), (0x7F, false));
            assert_eq!(Lift::E2M1.code(code, scale, 0xFF), (0x7F, false));
            assert_eq!(shift_code(code, scale, 0xFF), (0x7F, false));
        }
    }
}

#[test]
fn every_e4m3_code_shifted_by_every_distance() {
    let oracle = Oracle::new(Element::E4M3);
    for octaves in 0..=300u32 {
        for code in 0..=255u8 {
            let (got, changed) = shift_e4m3(code, octaves);
            let value = Element::E4M3.decode(code);
            if value.is_nan() {
                assert_eq!((got, changed), (code, false), "NaN stays the same NaN");
                continue;
            }
            let exact = f64::from(value) * 2f64.powi(-(octaves as i32));
            assert_eq!(got, oracle.nearest_even(exact), "{code:#x} by {octaves}");
            assert_eq!(changed, !same_value(got, exact), "{code:#x} by {octaves}");
        }
    }
    assert_eq!(shift_e4m3(0x88, u32::MAX), (0x80, true));
}

#[test]
fn shift_code_agrees_with_the_distance_and_saturates_upwards() {
    for code in 0..=255u8 {
        for source in (0..=254u8).step_by(3) {
            for target in source..=254 {
                let octaves = u32::from(target - source);
                assert_eq!(shift_code(code, source, target), shift_e4m3(code, octaves));
            }
        }
    }
    assert_eq!(shift_code(0x38, 128, 127), (0x40, false)); // 1 -> 2
    assert_eq!(shift_code(0xFE, 128, 127), (0xFE, true)); // -448 stays there
}
