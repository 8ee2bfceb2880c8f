//! The CPU code of [`nibble_core::ops::PlanPermute`], [`nibble_core::ops::Permute`], [`nibble_core::ops::Unpermute`],
//! [`nibble_core::ops::GatherScalars`] and [`nibble_core::ops::CombineSlots`].

use crate::gemm::Isa;
use crate::ops::plain::elementwise::{add_to, for_rows, round_bf16, round_f32};
use crate::simd::{Real, per_isa};
use crate::{Buf, Cpu};
use half::bf16;
use nibble_core::ops::{CombineSlots, GatherScalars, Permute, PlanPermute, Unpermute};
use nibble_core::{BlockScaled, Data, Error, Operand, PermuteMap, Plain, Result, Tensor, round_up};
use nibble_formats::{Scale, ScaleKind, ScalePlaneMut};

/// A counting sort. The sort is single-threaded, because the operation's contract fixes the order and because the sort reads only a few
/// bytes per slot.
pub(crate) fn plan_permute(cpu: &Cpu, op: PlanPermute<'_, Cpu>) -> Result<PermuteMap<Cpu>> {
    let (expert, token_id) = (op.expert.as_slice(), op.token_id.as_slice());
    let counts = count_slots(&op)?;
    let occupied: usize = counts.iter().sum();
    // Fewer occupied slots are not an error, because the occupancy reports their number.
    if occupied > op.num_slots {
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
    let mut map = op.result(cpu)?;
    let PermuteMap { groups, source_row, row_slot, slot_row, occupancy, .. } = &mut map;
    let row_id = groups.row_id.as_mut_slice();
    let (source_row, row_slot) = (source_row.as_mut_slice(), row_slot.as_mut_slice());
    let slot_row = slot_row.as_mut_slice();
    for rows in [&mut *row_id, source_row, row_slot, &mut *slot_row] {
        rows.fill(-1);
    }
    let mut slots = slot_row.iter_mut();
    let mut next = start.clone();
    for (token, experts) in expert.chunks_exact(op.top_k).enumerate() {
        for (slot, &expert) in experts.iter().enumerate() {
            // `count_slots` checked that all expert and row ids are in range and that the slots fit the capacity.
            let Ok(expert) = usize::try_from(expert) else { continue };
            let row = next[expert];
            next[expert] += 1;
            row_id[row] = token_id[token] * op.top_k as i32 + slot as i32;
            source_row[row] = token as i32;
            row_slot[row] = (token * op.top_k + slot) as i32;
            if let Some(place) = slots.next() {
                *place = row as i32;
            }
        }
    }
    for (to, values) in [
        (&mut groups.start, &start[..]),
        (&mut groups.len, &counts),
        (&mut occupancy.found, &[end, occupied]),
    ] {
        to.as_mut_slice().iter_mut().zip(values).for_each(|(to, value)| *to = *value as i32);
    }
    Ok(map)
}

/// The number of slots of each expert. The function also checks that all indices are in range and fit an i32.
fn count_slots(op: &PlanPermute<'_, Cpu>) -> Result<Vec<usize>> {
    const OP: &str = "plan_permute";
    for (argument, got) in [("capacity", op.capacity), ("expert.len()", op.expert.as_slice().len())] {
        if i32::try_from(got).is_err() {
            return Err(Error::shape(OP, argument, got, "at most 2^31 − 1"));
        }
    }
    let (token_id, experts) = (op.token_id.as_slice(), op.expert.as_slice());
    let is_here = |i: &usize| experts[i * op.top_k..][..op.top_k].iter().any(|e| *e != -1);
    let mut before = -1;
    for i in (0..token_id.len()).filter(is_here) {
        let token = token_id[i];
        let last_row = (i64::from(token) + 1) * op.top_k as i64 - 1;
        if token < 0 || last_row > i64::from(i32::MAX) {
            let expected = format!("at least 0, and token · {} + slot below 2^31", op.top_k);
            return Err(Error::shape(OP, "token_id", format!("{token} at {i}"), expected));
        }
        if token <= before {
            let got = format!("{before} before {token} at {i}");
            return Err(Error::shape(OP, "token_id", got, "ascending, each token once"));
        }
        before = token;
    }
    let mut counts = vec![0; op.num_groups];
    for (i, &expert) in experts.iter().enumerate() {
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

/// Copies rows in permuted order. Codes and scales are copied as they are; nothing is decoded.
pub(crate) fn permute(cpu: &Cpu, op: Permute<'_, Cpu>) -> Result<Operand<Cpu>> {
    const OP: &str = "permute";
    let index = source_rows(OP, op.map, op.rows.rows())?;
    let mut out = op.result(cpu)?;
    gather(OP, cpu, (op.rows, index), &mut out)?;
    Ok(out)
}

/// The source row of each row of the permutation; every source is checked against `rows`, the number of source rows.
pub(in crate::ops) fn source_rows<'a>(
    op: &'static str,
    map: &'a PermuteMap<Cpu>,
    rows: usize,
) -> Result<&'a [i32]> {
    let (index, capacity) = (map.source_row.as_slice(), map.groups.capacity);
    if index.len() != capacity {
        let expected = format!("{capacity} (the capacity)");
        return Err(Error::shape(op, "map.source_row.len()", index.len(), expected));
    }
    check_index(op, "map.source_row", index, rows, Pads::Allowed)?;
    Ok(index)
}

/// Sets `out[i] = rows[index[i]]`, or padding where the index is negative. The caller has checked the indices.
fn gather(
    op: &'static str,
    cpu: &Cpu,
    (rows, index): (&Operand<Cpu>, &[i32]),
    out: &mut Operand<Cpu>,
) -> Result<()> {
    match (rows, out) {
        (Operand::Plain(x), Operand::Plain(out)) => match (&x.data, &mut out.data) {
            (Data::F32(x), Data::F32(out)) => gather_rows(cpu, (x, index), 0.0, out),
            (Data::Bf16(x), Data::Bf16(out)) => gather_rows(cpu, (x, index), bf16::ZERO, out),
            _ => return Err(Error::shape(op, "type of the result", out.dtype(), x.dtype())),
        },
        (Operand::Block(x), Operand::Block(out)) => {
            x.check_rows_travel(op, "rows")?;
            gather_rows(cpu, (&x.codes, index), 0, &mut out.codes);
            gather_scales(cpu, (x, index), out);
            if let (Some(x), Some(out)) = (&x.tensor_scale, &mut out.tensor_scale) {
                gather_rows(cpu, (x, index), 1.0, out);
            }
        }
        (rows, out) => return Err(Error::shape(op, "format of the result", out.format(), rows.format())),
    }
    Ok(())
}

/// Copies scale records unchanged; padding rows get the smallest scale.
fn gather_scales(cpu: &Cpu, (x, index): (&BlockScaled<Cpu>, &[i32]), out: &mut BlockScaled<Cpu>) {
    let (kind, width) = (x.scale_kind(), x.format.scales_per_row(x.cols));
    gather_rows(cpu, (&x.scales, index), 0, &mut out.scales);
    fill_padding(cpu, (kind, width * kind.bytes()), index, &mut out.scales);
}

/// Writes the smallest scale to the rows (of `width` bytes) whose index is negative. If the smallest scale is zero bytes, the buffer
/// already holds it.
pub(in crate::ops) fn fill_padding(
    cpu: &Cpu,
    (kind, width): (ScaleKind, usize),
    index: &[i32],
    scales: &mut Buf<u8>,
) {
    if kind.least() == Scale(0) {
        return;
    }
    for_rows(cpu, scales.as_mut_slice(), width, |first, scales| {
        for (bytes, &i) in scales.chunks_exact_mut(width).zip(&index[first..]) {
            if i < 0 {
                ScalePlaneMut { kind, bytes }.fill(kind.least());
            }
        }
    });
}

/// Whether a negative index, which marks padding, is allowed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::ops) enum Pads {
    Allowed,
    Refused,
}

/// Checks that every index is below `len`.
pub(in crate::ops) fn check_index(
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

/// Sets `out[i] = rows[index[i]]`, or `pad` where the index is negative. The caller has checked the indices.
fn gather_rows<T: Plain>(cpu: &Cpu, (rows, index): (&Buf<T>, &[i32]), pad: T, out: &mut Buf<T>) {
    let (rows, out) = (rows.as_slice(), out.as_mut_slice());
    let width = out.len() / index.len().max(1);
    for_rows(cpu, out, width, |first, out| {
        for (out, &i) in out.chunks_exact_mut(width).zip(&index[first..]) {
            match usize::try_from(i) {
                Ok(i) => out.copy_from_slice(&rows[i * width..][..width]),
                Err(_) => out.fill(pad),
            }
        }
    });
}

/// The inverse of [`permute`] on the slots of this rank.
pub(crate) fn unpermute(cpu: &Cpu, op: Unpermute<'_, Cpu>) -> Result<Operand<Cpu>> {
    const OP: &str = "unpermute";
    let index = op.map.slot_row.as_slice();
    check_index(OP, "map.slot_row", index, op.rows.rows(), Pads::Refused)?;
    let mut out = op.result(cpu)?;
    gather(OP, cpu, (op.rows, index), &mut out)?;
    Ok(out)
}

/// Gathers scalars as if they were rows of one element.
pub(crate) fn gather_scalars(cpu: &Cpu, op: GatherScalars<'_, Cpu>) -> Result<Buf<f32>> {
    let (values, index) = (op.values.as_slice(), op.index.as_slice());
    check_index("gather_scalars", "index", index, values.len(), Pads::Allowed)?;
    let mut out = op.result(cpu)?;
    gather_rows(cpu, (op.values, index), 0.0, &mut out);
    Ok(out)
}

/// Number of columns summed at a time, in registers and the L1 cache.
const COMBINE_CHUNK: usize = 256;

/// Adds a row to the sums of a token's slots; the first row initialises them.
#[inline(always)]
fn add_row_body<T: Real>(row: &[T], first: bool, sums: &mut [f32]) {
    for (sum, x) in sums.iter_mut().zip(row) {
        *sum = if first { x.widen() } else { *sum + x.widen() };
    }
}
per_isa!(fn add_row_f32 = add_row_body::<f32>; (row: &[f32], first: bool, sums: &mut [f32]));
per_isa!(fn add_row_bf16 = add_row_body::<bf16>; (row: &[bf16], first: bool, sums: &mut [f32]));

/// Sums the rows of a token's slots in slot order.
pub(crate) fn combine_slots(cpu: &Cpu, op: CombineSlots<'_, Cpu>) -> Result<Tensor<Cpu>> {
    op.check()?;
    let mut out = op.result(cpu)?;
    match (&op.rows.data, &mut out.data) {
        (Data::F32(rows), Data::F32(out)) => combine(cpu, &op, (rows, out), add_row_f32, round_f32),
        (Data::Bf16(rows), Data::Bf16(out)) => combine(cpu, &op, (rows, out), add_row_bf16, round_bf16),
        _ => return Err(Error::shape("combine_slots", "type of the result", out.dtype(), op.rows.dtype())),
    }
    add_to(cpu, op.plus, &mut out)?;
    Ok(out)
}

fn combine<T: Real>(
    cpu: &Cpu,
    op: &CombineSlots<'_, Cpu>,
    (rows, out): (&Buf<T>, &mut Buf<T>),
    add_row: fn(Isa, &[T], bool, &mut [f32]),
    round: fn(Isa, &[f32], &mut [T]),
) {
    let rows = rows.as_slice();
    let (cols, index) = (op.rows.cols, op.index.map(|index| index.as_slice()));
    let row_of = |slot: usize| {
        let row = index.map_or(Some(slot), |index| usize::try_from(index[slot]).ok())?;
        rows.get(row * cols..(row + 1) * cols)
    };
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
}

#[cfg(test)]
pub(in crate::ops) mod tests;
