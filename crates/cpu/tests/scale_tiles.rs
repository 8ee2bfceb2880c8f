//! Scales of ragged groups lie where torchao's reference lays them: `torchao_scale_tiles.txt`, made by `benchmarks/peers/scale_tiles.py`.

use nibble_core::Backend;
use nibble_core::ops::{CutScales, CutSide, TileScales, UntileScales};
use nibble_cpu::Cpu;

/// FNV-1a of 64 bits.
fn fnv(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xCBF2_9CE4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01B3))
}

#[test]
fn groups_lie_as_in_torchao() {
    let (b, mut splits) = (Cpu::new(1).unwrap(), 0);
    for line in include_str!("torchao_scale_tiles.txt").lines() {
        let [side, rows, cols, ends, expected] = line.split(' ').collect::<Vec<_>>()[..] else {
            panic!("{line:?} has no five columns")
        };
        let [rows, cols] = [rows, cols].map(|n| n.parse::<usize>().unwrap());
        let side = if side == "rows" { CutSide::Rows } else { CutSide::Cols };
        // Along columns starts count tokens, 32 to a scale.
        let per_scale = if side == CutSide::Rows { 1 } else { 32 };
        let ends = ends.split(',').map(|end| end.parse::<i32>().unwrap() * per_scale);
        let starts: Vec<i32> = [0].into_iter().chain(ends).collect();
        let matrix = CutScales { rows, cols, side, per_scale: per_scale as usize };
        let dense: Vec<u8> = (0..rows * cols).map(|i| 1 + ((7 * i + i / 251) % 255) as u8).collect();
        let (scales, starts) = (b.upload(&dense).unwrap(), b.upload(&starts).unwrap());
        let tiles = TileScales { scales: &scales, starts: &starts, matrix }.run(&b).unwrap();
        assert_eq!(format!("{:016x}", fnv(&b.download(&tiles).unwrap())), expected, "{line}");
        let back = UntileScales { tiles: &tiles, starts: &starts, matrix }.run(&b).unwrap();
        assert_eq!(b.download(&back).unwrap(), dense, "{line}");
        splits += 1;
    }
    assert_eq!(splits, 50);
}

#[test]
fn starts_out_of_order_or_range_are_named() {
    let b = Cpu::new(1).unwrap();
    let scales = b.upload(&[1u8; 8 * 4]).unwrap();
    let refused = |starts: &[i32], side, per_scale| {
        let starts = b.upload(starts).unwrap();
        let matrix = CutScales { rows: 8, cols: 4, side, per_scale };
        TileScales { scales: &scales, starts: &starts, matrix }.run(&b).unwrap_err().to_string()
    };
    for (starts, side, per_scale, expected) in [
        (&[0, 5, 3][..], CutSide::Rows, 1, "`starts` is 3 at 2, expected from 5 to 8"),
        (&[0, 9], CutSide::Rows, 1, "`starts` is 9 at 1, expected from 0 to 8"),
        (&[-1, 8], CutSide::Rows, 1, "`starts` is -1 at 0, expected from 0 to 8"),
        (&[0, 40], CutSide::Cols, 32, "`starts` is 40 at 1, expected a multiple of 32"),
        (&[], CutSide::Rows, 1, "`starts.len()` is 0, expected one more than there are groups"),
        (&[0, 8], CutSide::Rows, 0, "`per_scale` is 0, expected at least 1"),
    ] {
        assert_eq!(refused(starts, side, per_scale), format!("tile_scales: {expected}"));
    }
    let starts = b.upload(&[0i32, 8]).unwrap();
    let matrix = CutScales { rows: 8, cols: 4, side: CutSide::Rows, per_scale: 1 };
    let e = UntileScales { tiles: &scales, starts: &starts, matrix }.run(&b).unwrap_err().to_string();
    assert_eq!(e, "untile_scales: `tiles.len()` is 32, expected 544");
}
