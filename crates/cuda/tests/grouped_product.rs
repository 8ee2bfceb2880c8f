//! The tensor cores' products on a GPU. Without one: a printed skip, or a failure under `NIBBLE_REQUIRE_GPU=1`.

mod gpu;

#[path = "../examples/grouped/case.rs"]
mod case;
#[path = "../examples/grouped/check.rs"]
mod check;

use gpu::device;
use nibble_cuda::ops::grouped_product::{Config, Desc, GroupedProduct, Kind, Operand, Out, Ragged, Target};
use nibble_cuda::ops::grouped_product::{ScaleValues, Scales, ScalesB};

#[test]
fn right_at_every_edge() {
    let Some(device) = device("grouped products") else { return };
    for case in check::small() {
        let checked = check::check(&device, &case).unwrap_or_else(|why| panic!("{why}"));
        let (exact, normal, heavy) = (checked.exact, checked.normal, checked.heavy);
        println!("{}: {exact} exact, {normal:.2e}, heavy tails {heavy:.2e}", case.name());
    }
    for kind in [Kind::Fp8(ScalesB::Tile), Kind::Fp8(ScalesB::Floats)] {
        check::nan_stays_in_its_row(&device, kind).unwrap_or_else(|why| panic!("{why}"));
    }
}

#[test]
fn wrong_operands_are_named() {
    let Some(device) = device("argument checks on device buffers") else { return };
    let desc = Desc {
        ragged: Ragged::Rows,
        kind: Kind::Fp8(ScalesB::Tile),
        out: Out::F32,
        accumulate: false,
        transposed: false,
        groups: 1,
        m: 16,
        n: 16,
        k: 128,
    };
    let (codes, short) = (device.filled::<u8>(16 * 128, 0).unwrap(), device.filled::<u8>(16, 0).unwrap());
    let scales = device.filled::<f32>(16, 0).unwrap();
    let all = Scales::row_major(ScaleValues::F32(&scales), 1);
    let few = Scales::row_major(ScaleValues::E8m0(&short), 2);
    let plain = device.filled(16 * 128, 0).unwrap();
    let (good, mut d) = (Operand::Fp8(&codes, all), device.filled(16 * 16, 0).unwrap());
    for (a, b, argument) in [
        (good, Operand::Fp8(&short, all), "`b`"),
        (Operand::Fp8(&codes, few), good, "`a`"),
        (good, Operand::Bf16(&plain), "`b`"),
    ] {
        let target = Target::F32 { values: &mut d, accumulate: false };
        let error = GroupedProduct { desc, groups: None, a, b, d: target }.run().unwrap_err().to_string();
        assert!(error.contains(argument), "{argument}: {error}");
    }
    let target = Target::F32 { values: &mut d, accumulate: true };
    let product = GroupedProduct { desc, groups: None, a: good, b: good, d: target };
    let error = product.run_with(Config::choose(&desc, device.info())).unwrap_err().to_string();
    assert!(error.contains("accumulate"), "{error}");
}
