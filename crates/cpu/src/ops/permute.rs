//! See [`nibble_core::ops::PlanPermute`], [`nibble_core::ops::Permute`], [`nibble_core::ops::Unpermute`],
//! [`nibble_core::ops::GatherScalars`] and [`nibble_core::ops::CombineSlots`].

use super::elementwise::{add, for_rows, round_bf16, round_f32};
use crate::gemm::Isa;
use crate::simd::{Real, per_isa};
use crate::{Buf, Cpu};
use half::bf16;
use nibble_core::ops::{Add, CombineSlots, GatherScalars, Permute, PlanPermute, Unpermute};
use nibble_core::{
    BlockScaled, Data, Error, Groups, Occupancy, Operand, PermuteMap, Plain, Result, Tensor, round_up,
};
use nibble_formats::{Scale, ScalePlaneMut};

/// A counting sort, in one thread: its order is the contract, and it touches a few bytes a slot.
pub(crate) fn plan_permute(cpu: &Cpu, op: PlanPermute<'_, Cpu>) -> Result<PermuteMap<Cpu>> {
    let (expert, token_id) = (op.expert.as_slice(), op.token_id.as_slice());
    let counts = count_slots(&op)?;
    let occupied: usize = counts.iter().sum();
    if occupied != op.num_slots {
        return Err(Error::shape(
            "plan_permute",
            "num_slots",
            op.num_slots,
            format!("{occupied} are occupied"),
        ));
    }
    let mut start = Vec::with_capacity(op.num_groups + 1);
    let mut end = 0;
    for &count in &counts {
        start.push(end);
        end += round_up(count, op.align);
    }
    start.push(end);
    if end > op.capacity {
        return Err(Error::Capacity { op: "plan_permute", needed: end, capacity: op.capacity });
    }
    let mut row_id = cpu.scratch::<i32>(op.capacity);
    let mut source_row = cpu.scratch::<i32>(op.capacity);
    let mut row_slot = cpu.scratch::<i32>(op.capacity);
    let mut slot_row = cpu.scratch::<i32>(occupied);
    for rows in [&mut row_id, &mut source_row, &mut row_slot] {
        rows.as_mut_slice().fill(-1);
    }
    let mut slots = slot_row.as_mut_slice().iter_mut();
    let mut next = start.clone();
    for (token, experts) in expert.chunks_exact(op.top_k).enumerate() {
        for (slot, &expert) in experts.iter().enumerate() {
            // `count_slots` saw every expert and every row id in range, and as many slots as there are places.
            let Ok(expert) = usize::try_from(expert) else { continue };
            let row = next[expert];
            next[expert] += 1;
            row_id.as_mut_slice()[row] = token_id[token] * op.top_k as i32 + slot as i32;
            source_row.as_mut_slice()[row] = token as i32;
            row_slot.as_mut_slice()[row] = (token * op.top_k + slot) as i32;
            if let Some(place) = slots.next() {
                *place = row as i32;
            }
        }
    }
    let as_i32 = |values: &[usize]| values.iter().map(|&v| v as i32).collect::<Vec<_>>();
    Ok(PermuteMap {
        groups: Groups {
            start: cpu.computed(&as_i32(&start)),
            len: cpu.computed(&as_i32(&counts)),
            row_id,
            num_groups: op.num_groups,
            align: op.align,
            capacity: op.capacity,
            rows_each: None,
        },
        source_row,
        row_slot,
        num_slots: occupied,
        slot_row,
        occupancy: Occupancy {
            found: cpu.computed(&as_i32(&[end, occupied])),
            num_slots: occupied,
            capacity: op.capacity,
        },
    })
}

/// Slots of each expert, and proof that every index is in range and fits an i32.
fn count_slots(op: &PlanPermute<'_, Cpu>) -> Result<Vec<usize>> {
    const OP: &str = "plan_permute";
    for (argument, got) in [("capacity", op.capacity), ("expert.len()", op.expert.as_slice().len())] {
        if i32::try_from(got).is_err() {
            return Err(Error::shape(OP, argument, got, "at most 2^31 − 1"));
        }
    }
    let token_id = op.token_id.as_slice();
    for (i, &token) in token_id.iter().enumerate() {
        let last_row = (i64::from(token) + 1) * op.top_k as i64 - 1;
        if token < 0 || last_row > i64::from(i32::MAX) {
            let expected = format!("at least 0, and token · {} + slot below 2^31", op.top_k);
            return Err(Error::shape(OP, "token_id", format!("{token} at {i}"), expected));
        }
    }
    if let Some(i) = token_id.windows(2).position(|pair| pair[0] >= pair[1]) {
        let got = format!("{} before {} at {i}", token_id[i], token_id[i + 1]);
        return Err(Error::shape(OP, "token_id", got, "ascending, each token once"));
    }
    let mut counts = vec![0; op.num_groups];
    for (i, &expert) in op.expert.as_slice().iter().enumerate() {
        match usize::try_from(expert) {
            Ok(e) if e < op.num_groups => counts[e] += 1,
            Err(_) if expert == -1 => {}
            _ => {
                let expected = format!("-1 to {}", op.num_groups - 1);
                return Err(Error::shape(OP, "expert", format!("{expert} at {i}"), expected));
            }
        }
    }
    Ok(counts)
}

/// Codes and scales move; nothing is decoded.
pub(crate) fn permute(cpu: &Cpu, op: Permute<'_, Cpu>) -> Result<Operand<Cpu>> {
    const OP: &str = "permute";
    let capacity = op.map.groups.capacity;
    let index = op.map.source_row.as_slice();
    if index.len() != capacity {
        return Err(Error::shape(
            OP,
            "map.source_row.len()",
            index.len(),
            format!("{capacity} (the capacity)"),
        ));
    }
    check_index(OP, "map.source_row", index, op.rows.rows(), Pads::Allowed)?;
    gather(OP, cpu, op.rows, index)
}

/// `out[i] = rows[index[i]]`, padding where the index is negative. Indices were checked.
fn gather(op: &'static str, cpu: &Cpu, rows: &Operand<Cpu>, index: &[i32]) -> Result<Operand<Cpu>> {
    Ok(match rows {
        Operand::Plain(x) => Operand::Plain(gather_plain(cpu, x, index)?),
        Operand::Block(x) => {
            x.check_rows_travel(op, "rows")?;
            let codes = gather_rows(cpu, x.codes.as_slice(), x.format.row_code_bytes(x.cols), index, 0);
            let scales = gather_scales(cpu, x, index);
            let tensor_scale = x.tensor_scale.as_ref().map(|s| gather_rows(cpu, s.as_slice(), 1, index, 1.0));
            Operand::Block(BlockScaled {
                rows: index.len(),
                stack: 1,
                codes,
                scales,
                tensor_scale,
                ..x.clone()
            })
        }
    })
}

/// Records of scales move as they are; padding has the smallest.
fn gather_scales(cpu: &Cpu, x: &BlockScaled<Cpu>, index: &[i32]) -> Buf<u8> {
    let (kind, width) = (x.scale_kind(), x.format.scales_per_row(x.cols));
    let mut scales = gather_rows(cpu, x.scales.as_slice(), width * kind.bytes(), index, 0);
    // Where that is not zeros anyway.
    if kind.least() != Scale(0) {
        for_rows(cpu, scales.as_mut_slice(), width * kind.bytes(), |first, scales| {
            for (bytes, &i) in scales.chunks_exact_mut(width * kind.bytes()).zip(&index[first..]) {
                if i < 0 {
                    ScalePlaneMut { kind, bytes }.fill(kind.least());
                }
            }
        });
    }
    scales
}

/// Whether a negative index stands for padding.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Pads {
    Allowed,
    Refused,
}

/// Every index below `len`.
pub(super) fn check_index(
    op: &'static str,
    argument: &'static str,
    index: &[i32],
    len: usize,
    pads: Pads,
) -> Result<()> {
    let good = |&i: &i32| usize::try_from(i).map_or(pads == Pads::Allowed, |i| i < len);
    match index.iter().position(|i| !good(i)) {
        None => Ok(()),
        Some(at) => {
            let least = if pads == Pads::Allowed { "" } else { "at least 0 and " };
            Err(Error::shape(op, argument, format!("{} at {at}", index[at]), format!("{least}below {len}")))
        }
    }
}

/// `out[i] = rows[index[i]]`, `pad` throughout where the index is negative. Indices were checked.
pub(super) fn gather_rows<T: Plain>(cpu: &Cpu, rows: &[T], width: usize, index: &[i32], pad: T) -> Buf<T> {
    let mut out = cpu.scratch::<T>(index.len() * width);
    for_rows(cpu, out.as_mut_slice(), width, |first, out| {
        for (out, &i) in out.chunks_exact_mut(width).zip(&index[first..]) {
            match usize::try_from(i) {
                Ok(i) => out.copy_from_slice(&rows[i * width..][..width]),
                Err(_) => out.fill(pad),
            }
        }
    });
    out
}

fn gather_plain(cpu: &Cpu, x: &Tensor<Cpu>, index: &[i32]) -> Result<Tensor<Cpu>> {
    let data = match &x.data {
        Data::F32(rows) => Data::F32(gather_rows(cpu, rows.as_slice(), x.cols, index, 0.0)),
        Data::Bf16(rows) => Data::Bf16(gather_rows(cpu, rows.as_slice(), x.cols, index, bf16::ZERO)),
    };
    Tensor::new(data, index.len(), x.cols)
}

/// The inverse of [`permute`] on the slots of this rank.
pub(crate) fn unpermute(cpu: &Cpu, op: Unpermute<'_, Cpu>) -> Result<Operand<Cpu>> {
    const OP: &str = "unpermute";
    let index = op.map.slot_row.as_slice();
    check_index(OP, "map.slot_row", index, op.rows.rows(), Pads::Refused)?;
    gather(OP, cpu, op.rows, index)
}

/// Scalars are rows of one.
pub(crate) fn gather_scalars(cpu: &Cpu, op: GatherScalars<'_, Cpu>) -> Result<Buf<f32>> {
    let (values, index) = (op.values.as_slice(), op.index.as_slice());
    check_index("gather_scalars", "index", index, values.len(), Pads::Allowed)?;
    Ok(gather_rows(cpu, values, 1, index, 0.0))
}

/// Columns summed while they lie in registers and the nearest cache.
const COMBINE_CHUNK: usize = 256;

/// Adds a row to the sums of a token's slots; the first one is the sum.
#[inline(always)]
fn add_row_body<T: Real>(row: &[T], first: bool, sums: &mut [f32]) {
    for (sum, x) in sums.iter_mut().zip(row) {
        *sum = if first { x.widen() } else { *sum + x.widen() };
    }
}
per_isa!(fn add_row_f32 = add_row_body::<f32>; (row: &[f32], first: bool, sums: &mut [f32]));
per_isa!(fn add_row_bf16 = add_row_body::<bf16>; (row: &[bf16], first: bool, sums: &mut [f32]));

/// Σ over slots, in slot order.
pub(crate) fn combine_slots(cpu: &Cpu, op: CombineSlots<'_, Cpu>) -> Result<Tensor<Cpu>> {
    op.check()?;
    let data = match &op.rows.data {
        Data::F32(rows) => combine(cpu, &op, rows.as_slice(), add_row_f32, round_f32),
        Data::Bf16(rows) => combine(cpu, &op, rows.as_slice(), add_row_bf16, round_bf16),
    };
    let sums = Tensor::new(data, op.tokens(), op.rows.cols)?;
    op.plus.map_or(Ok(sums.clone()), |b| add(cpu, Add::new(&sums, b)))
}

fn combine<T: Real>(
    cpu: &Cpu,
    op: &CombineSlots<'_, Cpu>,
    rows: &[T],
    add_row: fn(Isa, &[T], bool, &mut [f32]),
    round: fn(Isa, &[f32], &mut [T]),
) -> Data<Cpu> {
    let (cols, index) = (op.rows.cols, op.index.map(|index| index.as_slice()));
    let row_of = |slot: usize| {
        let row = index.map_or(Some(slot), |index| usize::try_from(index[slot]).ok())?;
        rows.get(row * cols..(row + 1) * cols)
    };
    let mut out = cpu.scratch::<T>(op.tokens() * cols);
    for_rows(cpu, out.as_mut_slice(), cols, |first, out| {
        for (token, out) in (first..).zip(out.chunks_exact_mut(cols)) {
            for (chunk, out) in out.chunks_mut(COMBINE_CHUNK).enumerate() {
                let at = chunk * COMBINE_CHUNK;
                let (zeros, mut sums) = ([T::round(0.0); COMBINE_CHUNK], [0.0f32; COMBINE_CHUNK]);
                let sums = &mut sums[..out.len()];
                for slot in 0..op.top_k {
                    let row = row_of(token * op.top_k + slot).map_or(&zeros[..], |row| &row[at..]);
                    add_row(cpu.isa(), &row[..out.len()], slot == 0, sums);
                }
                round(cpu.isa(), sums, out);
            }
        }
    });
    T::data(out)
}

#[cfg(test)]
pub(super) mod tests;
