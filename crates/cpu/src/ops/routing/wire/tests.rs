use super::*;
use crate::ops::plain::elementwise::tests::{below, bits, normals, same_everywhere};
use crate::ops::routing::permute::permute;
use crate::ops::routing::permute::tests::{CASES, any_blocks, scale_bytes};
use nibble_core::ops::{Permute, Planes, Quantize};
use nibble_core::{Backend, BlockScaled, Groups, Tensor};
use nibble_formats::{BlockAxis, Codec, Format, Rounding, ScaleLayout, ScaleRule};

/// Rows in a format: plain numbers, or arbitrary codes and scales.
fn rows_of(cpu: &Cpu, format: Format, rule: ScaleRule, rows: usize, cols: usize) -> Operand<Cpu> {
    let x = normals(1, rows * cols);
    match format {
        Format::F32 => Operand::Plain(Tensor::from_f32(cpu, &x, rows, cols).unwrap()),
        Format::Bf16 => {
            let x: Vec<bf16> = x.into_iter().map(bf16::from_f32).collect();
            Operand::Plain(Tensor::from_bf16(cpu, &x, rows, cols).unwrap())
        }
        _ => Operand::Block(any_blocks(cpu, format, rule, rows, cols)),
    }
}

/// All fields of an operand.
fn contents(x: &Operand<Cpu>) -> (Format, usize, usize, Vec<u32>, Vec<u8>) {
    let (elements, scales) = match x {
        Operand::Plain(t) => (bits(t), Vec::new()),
        Operand::Block(q) => (q.codes.as_slice().iter().map(|&c| c.into()).collect(), scale_bytes(q)),
    };
    (x.format(), x.rows(), x.cols(), elements, scales)
}

/// All formats with each of their rules.
fn every_kind() -> impl Iterator<Item = (Format, ScaleRule)> {
    Format::ALL.into_iter().flat_map(|format| {
        let rules = format.spec().rules;
        let rules = if rules.is_empty() { &[ScaleRule::Amax][..] } else { rules };
        rules.iter().map(move |&rule| (format, rule))
    })
}

#[test]
fn unpacking_undoes_packing_for_every_format() {
    for (format, rule) in every_kind() {
        for cols in [1, 3, 31, 32, 33, 127, 128, 130, 256, 300, 1024] {
            for rows in [0, 1, 7, 70] {
                same_everywhere(|cpu| {
                    let x = rows_of(cpu, format, rule, rows, cols);
                    let index = cpu.upload(&(0..rows as i32).collect::<Vec<_>>()).unwrap();
                    let packed = pack_rows(cpu, PackRows { rows: &x, index: &index }).unwrap();
                    let kind = x.row_kind();
                    assert_eq!(packed.as_slice().len(), rows * kind.row_bytes());
                    let back = unpack_rows(cpu, UnpackRows { bytes: &packed, kind }).unwrap();
                    assert!(contents(&back) == contents(&x), "{format} {rule} {rows} × {cols}");
                    packed.as_slice().to_vec()
                });
            }
        }
    }
}

#[test]
fn one_pass_unpacks_and_sorts_as_two_do() {
    for (format, rule) in every_kind() {
        for (case, cols) in CASES.iter().zip([1, 3, 31, 127, 130, 256, 300]) {
            same_everywhere(|cpu| {
                let (x, map) = (rows_of(cpu, format, rule, case.tokens, cols), case.plan(cpu));
                let index = cpu.upload(&(0..case.tokens as i32).collect::<Vec<_>>()).unwrap();
                let bytes = &pack_rows(cpu, PackRows { rows: &x, index: &index }).unwrap();
                let (kind, map) = (x.row_kind(), &map);
                let rows = &unpack_rows(cpu, UnpackRows { bytes, kind }).unwrap();
                let two = contents(&permute(cpu, Permute { rows, map }).unwrap());
                let one = contents(&unpack_permute(cpu, UnpackPermute { bytes, kind, map }).unwrap());
                assert!(one == two, "{format} {rule} {} × {cols}", case.tokens);
                one
            });
        }
    }
}

#[test]
fn a_record_is_codes_then_scales_then_zeros() {
    let cpu = Cpu::new(2).unwrap();
    for (format, rule) in every_kind() {
        let cols = 160;
        let x = rows_of(&cpu, format, rule, 50, cols);
        let index = below(5, 50, 400);
        let packed = pack_rows(&cpu, PackRows { rows: &x, index: &cpu.upload(&index).unwrap() }).unwrap();
        let (elements, scales) = match &x {
            Operand::Plain(t) => match &t.data {
                Data::F32(x) => (bytemuck::cast_slice(x.as_slice()).to_vec(), Vec::new()),
                Data::Bf16(x) => (bytemuck::cast_slice(x.as_slice()).to_vec(), Vec::new()),
            },
            Operand::Block(q) => (q.codes.as_slice().to_vec(), scale_bytes(q)),
        };
        let (c, s) = (elements.len() / 50, scales.len() / 50);
        // The tensor scales follow the scales of all blocks.
        let of_blocks = x.row_kind().scale_bytes();
        let (blocks, of_tensor) = scales.split_at(50 * of_blocks);
        let row_bytes = (c + s).div_ceil(16) * 16;
        assert_eq!(packed.as_slice().len(), 400 * row_bytes, "{format} {rule}");
        for (record, &row) in packed.as_slice().chunks(row_bytes).zip(&index) {
            let row = row as usize;
            assert_eq!(record[..c], elements[row * c..][..c], "{format} {rule}");
            assert_eq!(record[c..][..of_blocks], blocks[row * of_blocks..][..of_blocks], "{format} {rule}");
            let rest = s - of_blocks;
            assert_eq!(record[c + of_blocks..][..rest], of_tensor[row * rest..][..rest], "{format} {rule}");
            assert!(record[c + s..].iter().all(|&b| b == 0), "{format} {rule}");
        }
    }
}

/// Messages of six rows: the second row is in no message, and the third row is in three; two messages hold no row.
const MESSAGES: [i32; 9] = [2, 0, -1, 5, 2, 3, -2, 4, 2];
const PLACES: [i32; 18] = [-1, 1, -1, -1, -1, -1, 0, 4, 8, 5, -1, -1, -3, -1, 7, 3, -1, -1];

fn quantize_of(x: &Tensor<Cpu>, (format, rule): (Format, ScaleRule)) -> Quantize<'_, Cpu> {
    Quantize::new(x, Codec::new(format, rule, Rounding::NearestEven).unwrap(), Planes::Rows)
}

#[test]
fn a_row_goes_into_each_of_its_messages() {
    for of in every_kind().filter(|(format, _)| format.is_block()) {
        for cols in [1, 3, 31, 96, 127, 130, 256, 300] {
            same_everywhere(|cpu| {
                let x = Tensor::from_f32(cpu, &normals(7, 6 * cols), 6, cols).unwrap();
                // The fifth row is padding.
                let groups = Groups {
                    row_id: cpu.upload(&[0, 1, 2, 3, -1, 5]).unwrap(),
                    ..Groups::uniform(cpu, 1, 6, 1, 0).unwrap()
                };
                let how = || Quantize { groups: Some(&groups), ..quantize_of(&x, of) };
                let (index, place) = (cpu.upload(&MESSAGES).unwrap(), cpu.upload(&PLACES).unwrap());
                let op = QuantizePack { quantize: how(), index: &index, place: &place, top_k: 3 };
                let kind = op.kind();
                let made = quantize_pack(cpu, op).unwrap();
                let arrived = unpack_rows(cpu, UnpackRows { bytes: &made.bytes, kind }).unwrap();
                let rows = quantize(cpu, how()).unwrap();
                assert_eq!(made.counts.0.as_slice(), rows.counts.unwrap().0.as_slice());
                let (_, _, _, codes, _) = contents(&arrived);
                let (_, _, _, want, _) = contents(&rows.rows.unwrap());
                let width = kind.code_bytes();
                for (codes, row) in codes.chunks(width).zip(MESSAGES).filter(|(_, row)| *row >= 0) {
                    assert_eq!(
                        codes,
                        &want[row as usize * width..][..width],
                        "{of:?}, {cols} columns: row {row}"
                    );
                }
                made.bytes.as_slice().to_vec()
            });
        }
    }
}

#[test]
fn lists_that_do_not_say_the_same_are_refused() {
    let cpu = Cpu::new(1).unwrap();
    let x = Tensor::from_f32(&cpu, &normals(7, 6 * 32), 6, 32).unwrap();
    let of = (Format::Mxfp4, ScaleRule::Rceil);
    let refused = |index: &[i32], place: &[i32], top_k| {
        let (index, place) = (cpu.upload(index).unwrap(), cpu.upload(place).unwrap());
        let op = QuantizePack { quantize: quantize_of(&x, of), index: &index, place: &place, top_k };
        quantize_pack(&cpu, op).map(|_| ()).unwrap_err().to_string()
    };
    let with = |list: &[i32], at: usize, value| {
        let mut list = list.to_vec();
        list[at] = value;
        list
    };
    let e = refused(&with(&MESSAGES, 1, 6), &PLACES, 3);
    assert_eq!(e, "quantize_pack: `index` is 6 at 1, expected below 6");
    let e = refused(&MESSAGES, &with(&PLACES, 1, 9), 3);
    assert_eq!(e, "quantize_pack: `place` is 9 at 1, expected below 9");
    let e = refused(&MESSAGES, &with(&PLACES, 2, 1), 3);
    assert_eq!(e, "quantize_pack: `place` is message 1 twice, expected each message once");
    let e = refused(&MESSAGES, &with(&PLACES, 1, -1), 3);
    assert_eq!(e, "quantize_pack: `place` is row -1 in message 1, expected row 0, as index says");
    let e = refused(&MESSAGES, &with(&PLACES, 0, 2), 3);
    assert_eq!(e, "quantize_pack: `place` is row 0 in message 2, expected row -1, as index says");
    let e = refused(&MESSAGES, &PLACES, 2);
    assert_eq!(e, "quantize_pack: `place.len()` is 18, expected 12");
    let (index, place) = (cpu.upload(&MESSAGES).unwrap(), cpu.upload(&PLACES).unwrap());
    let columns = Quantize { planes: Planes::Cols, ..quantize_of(&x, of) };
    let op = QuantizePack { quantize: columns, index: &index, place: &place, top_k: 3 };
    let e = quantize_pack(&cpu, op).map(|_| ()).unwrap_err().to_string();
    assert_eq!(e, "quantize_pack: `quantize.planes` is Cols, expected Rows: those are what travels");
}

#[test]
fn four_bits_travel_in_0_53_bytes_a_value() {
    let kind = RowKind { format: Format::Mxfp4, rule: ScaleRule::Rceil, cols: 7168 };
    assert_eq!(kind.row_bytes(), 7168 / 2 + 7168 / 32);
}

#[test]
fn what_lies_in_the_padding_does_not_matter() {
    let cpu = Cpu::new(1).unwrap();
    let x = rows_of(&cpu, Format::Mxfp4, ScaleRule::Rceil, 3, 32);
    let index = cpu.upload(&[0, 1, 2]).unwrap();
    let mut packed = pack_rows(&cpu, PackRows { rows: &x, index: &index }).unwrap();
    for record in packed.as_mut_slice().chunks_mut(32) {
        record[17..].fill(0xFF);
    }
    let back = unpack_rows(&cpu, UnpackRows { bytes: &packed, kind: x.row_kind() }).unwrap();
    assert_eq!(contents(&back), contents(&x));
}

#[test]
fn a_message_of_no_row_is_zeros() {
    let cpu = Cpu::new(1).unwrap();
    let rules = |format: Format| format.spec().rules.iter().map(move |rule| (format, *rule));
    for (format, rule) in Format::ALL.into_iter().flat_map(rules) {
        let x = rows_of(&cpu, format, rule, 3, 64);
        let pack = |index: &[i32]| {
            let index = cpu.upload(index).unwrap();
            pack_rows(&cpu, PackRows { rows: &x, index: &index }).unwrap().as_slice().to_vec()
        };
        let (two, row_bytes) = (pack(&[2, 0]), x.row_kind().row_bytes());
        let (last, first) = two.split_at(row_bytes);
        assert_eq!(pack(&[2, -1, 0, -7]), [last, &vec![0; row_bytes], first, &vec![0; row_bytes]].concat());
    }
}

#[test]
fn mistakes_are_errors() {
    let cpu = Cpu::new(1).unwrap();
    let x = rows_of(&cpu, Format::E4m3, ScaleRule::Amax, 3, 128);
    let index = cpu.upload(&[0, 3]).unwrap();
    let e = pack_rows(&cpu, PackRows { rows: &x, index: &index }).unwrap_err().to_string();
    assert_eq!(e, "pack_rows: `index` is 3 at 1, expected below 3");
    let index = cpu.upload(&[0]).unwrap();
    let Operand::Block(q) = x else { unreachable!("E4M3 is a block format") };
    let refused =
        |q| pack_rows(&cpu, PackRows { rows: &Operand::Block(q), index: &index }).unwrap_err().to_string();
    let e = refused(BlockScaled { axis: BlockAxis::Col, ..q.clone() });
    assert!(e.contains("blocks along col"), "{e}");
    let e = refused(BlockScaled { scale_layout: ScaleLayout::MnMajor, ..q.clone() });
    assert!(e.contains("mn-major"), "{e}");
    let e = refused(BlockScaled { rule: ScaleRule::Floor, ..q });
    assert_eq!(e, "pack_rows: `bytes of x.scales (against x.rule)` is 12, expected 3");
    let bytes = cpu.zeros::<u8>(64).unwrap();
    let unpack = |format, rule, cols| {
        let kind = RowKind { format, rule, cols };
        unpack_rows(&cpu, UnpackRows { bytes: &bytes, kind }).map(|_| ()).unwrap_err().to_string()
    };
    let case = &CASES[1];
    let (bytes_of_none, map) = (cpu.zeros::<u8>(0).unwrap(), case.plan(&cpu));
    let kind = RowKind { format: Format::Mxfp4, rule: ScaleRule::Rceil, cols: 32 };
    let sort = |bytes: &Buf<u8>| unpack_permute(&cpu, UnpackPermute { bytes, kind, map: &map }).map(|_| ());
    // A row of the plan has no message.
    let e = sort(&bytes_of_none).unwrap_err().to_string();
    assert!(e.starts_with("unpack_permute: `map.source_row` is 0 at 0"), "{e}");
    let short = cpu.zeros::<u8>(kind.row_bytes() + 16).unwrap();
    let e = sort(&short).unwrap_err().to_string();
    assert_eq!(e, "unpack_permute: `bytes modulo the record's length` is 16, expected 0");
    assert!(unpack(Format::Mxfp4, ScaleRule::Amax, 32).contains("no scale rule `amax`"));
    assert_eq!(
        unpack(Format::Bf16, ScaleRule::Amax, 0),
        "unpack_rows: `kind.cols` is 0, expected at least 1"
    );
}
