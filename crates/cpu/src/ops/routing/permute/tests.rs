use super::*;
use crate::ops::plain::elementwise::tests::{below, bits, every_cpu, normals, same_everywhere};
use nibble_core::ops::Taken;
use nibble_core::{Backend, Occupancy};
use nibble_formats::{BlockAxis, Format, ScaleLayout, ScalePlane, ScaleRule};
use std::collections::BTreeSet;

/// A received batch in which each slot is routed to this rank with some probability.
pub(in crate::ops) struct Case {
    pub tokens: usize,
    top_k: usize,
    groups: usize,
    align: usize,
}

pub(in crate::ops) const CASES: [Case; 7] = [
    Case { tokens: 0, top_k: 2, groups: 3, align: 128 },
    Case { tokens: 1, top_k: 1, groups: 1, align: 1 },
    Case { tokens: 9, top_k: 2, groups: 4, align: 1 },
    Case { tokens: 40, top_k: 3, groups: 5, align: 16 },
    Case { tokens: 200, top_k: 2, groups: 2, align: 128 },
    Case { tokens: 500, top_k: 8, groups: 16, align: 128 },
    Case { tokens: 64, top_k: 4, groups: 60, align: 32 },
];

impl Case {
    /// The expert of every slot, and token ids. A quarter of the slots belong to other ranks; if there are several experts, expert 0 gets
    /// no slot.
    fn batch(&self) -> (Vec<i32>, Vec<i32>) {
        let expert = below(1, 4 * self.groups, self.tokens * self.top_k)
            .into_iter()
            .map(|x| if x % 4 == 0 { -1 } else { (x / 4).max((self.groups > 1).into()) })
            .collect();
        let mut id = 3;
        let steps = below(2, 5, self.tokens);
        (
            expert,
            steps
                .into_iter()
                .map(|step| {
                    id += 1 + step;
                    id
                })
                .collect(),
        )
    }

    fn capacity(&self) -> usize {
        round_up(self.tokens * self.top_k + self.groups * (self.align - 1), self.align)
    }

    pub fn plan(&self, cpu: &Cpu) -> PermuteMap<Cpu> {
        let (expert, token_id) = self.batch();
        self.plan_of(cpu, &expert, &token_id, self.capacity()).unwrap()
    }

    fn plan_of(
        &self,
        cpu: &Cpu,
        expert: &[i32],
        token_id: &[i32],
        capacity: usize,
    ) -> Result<PermuteMap<Cpu>> {
        let (expert, token_id) = (&cpu.upload(expert)?, &cpu.upload(token_id)?);
        let (top_k, num_groups, align) = (self.top_k, self.groups, self.align);
        let num_slots = expert.as_slice().iter().filter(|e| **e >= 0).count();
        plan_permute(cpu, PlanPermute { expert, token_id, top_k, num_slots, num_groups, align, capacity })
    }
}

#[test]
fn the_order_is_expert_then_token_then_slot_and_groups_are_aligned() {
    let cpu = Cpu::new(2).unwrap();
    for case in CASES {
        let (expert, token_id) = case.batch();
        let map = case.plan(&cpu);
        // The expected order, computed by sorting.
        let mut slots: Vec<(i32, i32, usize, usize)> = Vec::new();
        for (i, &e) in expert.iter().enumerate().filter(|(_, e)| **e >= 0) {
            slots.push((e, token_id[i / case.top_k], i % case.top_k, i / case.top_k));
        }
        assert_eq!(map.num_slots, slots.len());
        slots.sort_unstable();
        let (start, len) = (map.groups.start.as_slice(), map.groups.len.as_slice());
        let mut row_id = vec![-1; case.capacity()];
        let mut source = row_id.clone();
        let mut row_slot = row_id.clone();
        for g in 0..case.groups {
            assert_eq!(start[g] as usize % case.align, 0);
            let of_group = slots.iter().filter(|s| s.0 as usize == g);
            assert_eq!(of_group.clone().count(), len[g] as usize);
            assert_eq!(start[g + 1] as usize, round_up((start[g] + len[g]) as usize, case.align));
            for (i, &(_, token, slot, received)) in of_group.enumerate() {
                let row = start[g] as usize + i;
                row_id[row] = token * case.top_k as i32 + slot as i32;
                source[row] = received as i32;
                row_slot[row] = (received * case.top_k + slot) as i32;
            }
        }
        assert_eq!(map.groups.row_id.as_slice(), row_id);
        assert_eq!(map.source_row.as_slice(), source);
        assert_eq!(map.row_slot.as_slice(), row_slot);
        // `slot_row` lists the rows of the occupied slots in the order in which the slots were received.
        let occupied = (0..expert.len()).filter(|&i| expert[i] >= 0);
        for (&row, slot) in map.slot_row.as_slice().iter().zip(occupied) {
            assert_eq!(row_slot[row as usize], slot as i32);
        }
        assert_eq!(map.slot_row.as_slice().iter().collect::<BTreeSet<_>>().len(), map.num_slots);
    }
}

#[test]
fn too_many_rows_and_bad_indices_are_errors() {
    let cpu = Cpu::new(1).unwrap();
    let case = Case { tokens: 3, top_k: 2, groups: 2, align: 4 };
    let plan = |expert: [i32; 6], token_id: [i32; 3], capacity| {
        case.plan_of(&cpu, &expert, &token_id, capacity).map(|m| m.num_slots).map_err(|e| e.to_string())
    };
    let good = [0, 1, 0, 1, 0, -1];
    assert_eq!(plan(good, [1, 2, 5], 8), Ok(5));
    let e = plan(good, [1, 2, 5], 4).unwrap_err();
    assert!(e.starts_with("plan_permute: 8 routed rows do not fit a capacity of 4"), "{e}");
    let e = plan([0, 1, 2, 1, 0, -1], [1, 2, 5], 8).unwrap_err();
    assert_eq!(e, "plan_permute: `expert` is 2 at 2, expected -1 to 1");
    assert!(plan([0, 1, 0, 1, 0, -2], [1, 2, 5], 8).unwrap_err().contains("`expert` is -2 at 5"));
    assert!(plan(good, [1, 5, 2], 8).unwrap_err().contains("`token_id` is 5 before 2 at 2"));
    assert!(plan(good, [1, 1, 2], 8).unwrap_err().contains("ascending"));
    assert!(plan(good, [-1, 1, 2], 8).unwrap_err().contains("`token_id` is -1 at 0"));
    assert!(plan(good, [0, 1, i32::MAX], 8).unwrap_err().contains("below 2^31"));
    assert_eq!(plan(good, [0, 1, (i32::MAX - 1) / 2], 8), Ok(5), "the last row id that fits");
    assert_eq!(plan([0, 1, -1, -1, 0, 1], [1, -1, 2], 8), Ok(4), "a token without a slot has no number");
}

#[test]
fn what_a_plan_found_is_told_when_asked() {
    let cpu = Cpu::new(1).unwrap();
    let case = Case { tokens: 3, top_k: 2, groups: 2, align: 4 };
    let map = case.plan_of(&cpu, &[0, 1, 0, 1, 0, -1], &[1, 2, 5], 8).unwrap();
    assert_eq!(map.occupancy.found.as_slice(), [8, 5]);
    map.occupancy.verify(&cpu).unwrap();
    // `told` returns the map of an asynchronous backend, which checks nothing before the end of a step.
    let told = |found: [i32; 2]| {
        let found = cpu.upload(&found).unwrap();
        Occupancy { found, ..map.occupancy.clone() }.verify(&cpu).unwrap_err().to_string()
    };
    assert!(told([12, 5]).starts_with("plan_permute: 12 routed rows do not fit a capacity of 8"));
    assert_eq!(told([8, 4]), "plan_permute: `occupied slots` is 4, expected 5");
}

#[test]
fn fewer_slots_than_the_plan_was_told_of_leave_no_row() {
    let cpu = Cpu::new(1).unwrap();
    let [expert, token_id] = [&[0, 1, 0, 1, -1, -1][..], &[1, 2, 5]].map(|x| cpu.upload(x).unwrap());
    let plan = |num_slots| {
        let (expert, token_id) = (&expert, &token_id);
        let op = PlanPermute { expert, token_id, top_k: 2, num_slots, num_groups: 2, align: 4, capacity: 8 };
        op.run(&cpu)
    };
    let (exact, more) = (plan(4).unwrap(), plan(6).unwrap());
    assert_eq!(more.slot_row.as_slice(), [exact.slot_row.as_slice(), &[-1, -1]].concat());
    assert_eq!(more.groups.row_id.as_slice(), exact.groups.row_id.as_slice());
    assert!(more.occupancy.verify(&cpu).unwrap_err().to_string().contains("`occupied slots` is 4"));
    assert!(plan(3).unwrap_err().to_string().contains("4 are occupied"));
}

#[test]
fn unpermute_undoes_permute_and_pads_are_zero() {
    for case in CASES {
        for (cols, plain) in [(1, true), (5, false), (64, true), (300, false)] {
            let x = normals(6, case.tokens * cols);
            let (there, back) = same_everywhere(|cpu| {
                let map = case.plan(cpu);
                let half: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
                let rows = match plain {
                    true => Tensor::from_f32(cpu, &x, case.tokens, cols).unwrap(),
                    false => Tensor::from_bf16(cpu, &half, case.tokens, cols).unwrap(),
                };
                let there = permute(cpu, Permute { rows: &Operand::Plain(rows), map: &map }).unwrap();
                let back = unpermute(cpu, Unpermute { rows: &there, map: &map }).unwrap();
                let there = there.plain("test").unwrap();
                assert_eq!(there.shape(), (case.capacity(), cols));
                (bits(there), bits(back.plain("test").unwrap()))
            });
            let value = |i: usize| if plain { x[i].to_bits() } else { bf16::from_f32(x[i]).to_bits().into() };
            let occupied: Vec<usize> =
                (0..case.tokens * case.top_k).filter(|&i| case.batch().0[i] >= 0).collect();
            let want: Vec<u32> = occupied
                .iter()
                .flat_map(|i| (0..cols).map(move |c| i / case.top_k * cols + c))
                .map(value)
                .collect();
            assert!(back == want, "{} tokens of {cols}", case.tokens);
            let map = case.plan(&Cpu::new(1).unwrap());
            for (row, &source) in map.source_row.as_slice().iter().enumerate() {
                if source < 0 {
                    assert!(there[row * cols..][..cols].iter().all(|&b| b == 0), "padding row {row}");
                }
            }
        }
    }
}

/// A block-scaled tensor with arbitrary bytes, because a copy of rows must not depend on their meaning.
pub(in crate::ops) fn any_blocks(
    cpu: &Cpu,
    format: Format,
    rule: ScaleRule,
    rows: usize,
    cols: usize,
) -> BlockScaled<Cpu> {
    let (axis, count) = (BlockAxis::Row, rows * format.scales_per_row(cols));
    let bytes = |site, len| below(site, 256, len).into_iter().map(|b| b as u8).collect::<Vec<_>>();
    let kind = format.scale_kind(rule);
    let scales = cpu.upload(&bytes(12, count * kind.bytes())).unwrap();
    let tensor_scale = kind.has_tensor_scale().then(|| cpu.upload(&normals(13, rows)).unwrap());
    let codes = cpu.upload(&bytes(11, rows * format.row_code_bytes(cols))).unwrap();
    BlockScaled {
        format,
        axis,
        rule,
        rows,
        cols,
        stack: 1,
        codes,
        scales,
        tensor_scale,
        scale_layout: ScaleLayout::RowMajor,
        shared_cols: 1,
        taken: Taken::AsIs,
    }
}

/// All scales as bytes, with the tensor scales last.
pub(in crate::ops) fn scale_bytes(x: &BlockScaled<Cpu>) -> Vec<u8> {
    let tensor_scale = x.tensor_scale.as_ref().map_or(&[][..], |s| s.as_slice());
    [x.scales.as_slice(), bytemuck::cast_slice(tensor_scale)].concat()
}

#[test]
fn codes_and_scales_move_together_for_every_block_format_and_rule() {
    let case = &CASES[3];
    for format in Format::ALL.into_iter().filter(|f| f.is_block()) {
        for &rule in format.spec().rules {
            for cols in [32, 96, 129, 256] {
                let (width, scales) = (format.row_code_bytes(cols), format.scales_per_row(cols));
                let (codes, moved) = same_everywhere(|cpu| {
                    let rows = Operand::Block(any_blocks(cpu, format, rule, case.tokens, cols));
                    let out = permute(cpu, Permute { rows: &rows, map: &case.plan(cpu) }).unwrap();
                    let out = out.block("test").unwrap();
                    assert_eq!((out.rows, out.cols, out.rule), (case.capacity(), cols, rule));
                    (out.codes.as_slice().to_vec(), scale_bytes(out))
                });
                let cpu = Cpu::new(1).unwrap();
                let from = any_blocks(&cpu, format, rule, case.tokens, cols);
                let kind = format.scale_kind(rule);
                let one = kind.bytes();
                let from_scales = scale_bytes(&from);
                for (row, &source) in case.plan(&cpu).source_row.as_slice().iter().enumerate() {
                    let (codes, moved) =
                        (&codes[row * width..][..width], &moved[row * scales * one..][..scales * one]);
                    match usize::try_from(source) {
                        Ok(s) => {
                            assert_eq!(codes, &from.codes.as_slice()[s * width..][..width]);
                            assert_eq!(moved, &from_scales[s * scales * one..][..scales * one]);
                        }
                        Err(_) => {
                            assert!(codes.iter().all(|&c| c == 0));
                            let scales = ScalePlane { kind, bytes: moved };
                            assert!((0..scales.len()).all(|i| scales.get(i) == kind.least()));
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn only_rows_with_row_major_scales_travel() {
    let cpu = Cpu::new(1).unwrap();
    let map = CASES[2].plan(&cpu);
    let good = any_blocks(&cpu, Format::Mxfp4, ScaleRule::Rceil, 9, 64);
    let refused =
        |q: BlockScaled<Cpu>| permute(&cpu, Permute { rows: &Operand::Block(q), map: &map }).unwrap_err();
    let e = refused(BlockScaled { scale_layout: ScaleLayout::Tiled128x4, ..good.clone() }).to_string();
    assert!(e.contains("tiled-128x4") && e.contains("row-major"), "{e}");
    let e = refused(BlockScaled { axis: BlockAxis::Col, ..good.clone() }).to_string();
    assert!(e.contains("blocks along col"), "{e}");
    // The map was planned for more rows than the operand has.
    let few = Operand::Plain(Tensor::from_f32(&cpu, &[0.0; 10], 5, 2).unwrap());
    let e = permute(&cpu, Permute { rows: &few, map: &map }).unwrap_err().to_string();
    assert!(e.starts_with("permute: `map.source_row` is ") && e.contains("below 5"), "{e}");
    let short = Operand::Plain(Tensor::from_f32(&cpu, &[0.0; 4], 2, 2).unwrap());
    let e = unpermute(&cpu, Unpermute { rows: &short, map: &map }).unwrap_err().to_string();
    assert!(e.contains("map.slot_row"), "{e}");
}

#[test]
fn scalars_follow_their_index_and_padding_is_zero() {
    let values = normals(8, 1000);
    let index: Vec<i32> = below(9, 1001, 40_000).into_iter().map(|i| i - 1).collect();
    let got = same_everywhere(|cpu| {
        let (values, index) = (&cpu.upload(&values).unwrap(), &cpu.upload(&index).unwrap());
        gather_scalars(cpu, GatherScalars { values, index }).unwrap().as_slice().to_vec()
    });
    for (got, i) in got.iter().zip(&index) {
        assert_eq!(got.to_bits(), usize::try_from(*i).map_or(0, |i| values[i].to_bits()));
    }
    let cpu = Cpu::new(1).unwrap();
    let (values, index) = (&cpu.upload(&[1.0f32]).unwrap(), &cpu.upload(&[0, 1]).unwrap());
    let e = gather_scalars(&cpu, GatherScalars { values, index }).unwrap_err().to_string();
    assert_eq!(e, "gather_scalars: `index` is 1 at 1, expected below 1");
}

#[test]
fn slots_are_summed_in_order_in_single_precision_and_rounded_once() {
    for (tokens, top_k, cols) in [(0, 2, 4), (1, 1, 1), (3, 2, 17), (5, 8, 255), (7, 3, 257), (200, 2, 600)] {
        let x = normals(10, tokens * top_k * cols);
        let half: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
        let (single, rounded) = same_everywhere(|cpu| {
            let run = |rows: Tensor<Cpu>| combine_slots(cpu, CombineSlots::new(&rows, top_k)).unwrap();
            let single = run(Tensor::from_f32(cpu, &x, tokens * top_k, cols).unwrap());
            let rounded = run(Tensor::from_bf16(cpu, &half, tokens * top_k, cols).unwrap());
            assert_eq!((single.shape(), rounded.shape()), ((tokens, cols), (tokens, cols)));
            (bits(&single), bits(&rounded))
        });
        for i in 0..tokens * cols {
            let at = |slot: usize| (i / cols * top_k + slot) * cols + i % cols;
            let want = (1..top_k).fold(x[at(0)], |sum, s| sum + x[at(s)]);
            assert_eq!(single[i], want.to_bits());
            let want = (1..top_k).fold(half[at(0)].to_f32(), |sum, s| sum + half[at(s)].to_f32());
            assert_eq!(rounded[i], u32::from(bf16::from_f32(want).to_bits()));
        }
    }
    // 256 + 1 + 1 is 258 in F32; rounding to BF16 after each addition would give 256.
    let cpu = &every_cpu()[0];
    let rows = Tensor::from_bf16(cpu, &[256.0, 1.0, 1.0].map(bf16::from_f32), 3, 1).unwrap();
    let sum = combine_slots(cpu, CombineSlots::new(&rows, 3)).unwrap();
    assert_eq!(sum.to_f32_vec(cpu).unwrap(), [258.0]);
    // The slots are in any order; −1 and 3 are not rows.
    let index = cpu.upload(&[2, -1, 0, 3, 1, 1]).unwrap();
    let rows = Tensor::from_f32(cpu, &[1.0, 2.0, 4.0], 3, 1).unwrap();
    let sum =
        combine_slots(cpu, CombineSlots { index: Some(&index), ..CombineSlots::new(&rows, 3) }).unwrap();
    assert_eq!(sum.to_f32_vec(cpu).unwrap(), [5.0, 4.0]);
}
