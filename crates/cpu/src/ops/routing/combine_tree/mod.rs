//! The CPU code of [`nibble_core::ops::CombineTree`] and [`nibble_core::ops::FindSlots`].

use crate::gemm::Isa;
use crate::ops::plain::elementwise::{add_to, add_to_bf16, add_to_f32, for_rows};
use crate::simd::Real;
use crate::{Buf, Cpu};
use nibble_core::ops::{CombineTree, FindSlots};
use nibble_core::{Data, Error, Result, Tensor};

/// Number of columns summed at a time, in the L1 cache.
const CHUNK: usize = 256;

/// Sums the rows of a token's slots in tree order, then adds `plus`.
pub(crate) fn combine_tree(cpu: &Cpu, op: CombineTree<'_, Cpu>) -> Result<Tensor<Cpu>> {
    op.check()?;
    let mut out = op.result(cpu)?;
    match (&op.rows.data, &mut out.data) {
        (Data::F32(rows), Data::F32(out)) => combine(cpu, &op, (rows, out), add_to_f32),
        (Data::Bf16(rows), Data::Bf16(out)) => combine(cpu, &op, (rows, out), add_to_bf16),
        _ => return Err(Error::shape("combine_tree", "type of the result", out.dtype(), op.rows.dtype())),
    }
    add_to(cpu, op.plus, &mut out)?;
    Ok(out)
}

fn combine<T: Real>(
    cpu: &Cpu,
    op: &CombineTree<'_, Cpu>,
    (rows, out): (&Buf<T>, &mut Buf<T>),
    add_to: fn(Isa, &[T], &mut [T]),
) {
    let (cols, top_k) = (op.rows.cols, op.top_k);
    let (index, leaf) = (op.index.as_slice(), op.leaf.as_slice());
    let rows = rows.as_slice();
    let row_of = |row: i32| {
        let row = usize::try_from(row).ok()?;
        rows.get(row * cols..(row + 1) * cols)
    };
    for_rows(cpu, out.as_mut_slice(), cols, |first, out| {
        let mut scratch = vec![T::round(0.0); CHUNK * top_k];
        let mut slots = Vec::with_capacity(top_k);
        for (token, out) in (first..).zip(out.chunks_exact_mut(cols)) {
            slots.clear();
            for slot in token * top_k..(token + 1) * top_k {
                let leaf = usize::try_from(leaf[slot]).ok().filter(|leaf| *leaf < op.leaves);
                slots.extend(leaf.zip(row_of(index[slot])));
            }
            // The sort is stable, so that the slots of a leaf stay in order.
            slots.sort_by_key(|(leaf, _)| *leaf);
            for (at, out) in (0..).step_by(CHUNK).zip(out.chunks_mut(CHUNK)) {
                let root = Node { lo: 0, hi: op.leaves, slots: &slots };
                match slots.is_empty() {
                    true => out.fill(T::round(0.0)),
                    false => root.sum(at, out, &mut scratch, &|x, sum| add_to(cpu.isa(), x, sum)),
                }
            }
        }
    });
}

/// A node of the tree and the rows below it, sorted by leaf; a node has at least one row.
struct Node<'a, T> {
    lo: usize,
    hi: usize,
    slots: &'a [(usize, &'a [T])],
}

impl<T: Real> Node<'_, T> {
    /// The sum of `out.len()` columns, starting at column `at`. `add_to` adds one row to another and rounds each element. `scratch` holds
    /// one chunk fewer than there are rows.
    fn sum(&self, at: usize, out: &mut [T], scratch: &mut [T], add_to: &dyn Fn(&[T], &mut [T])) {
        let &Node { lo, hi, slots } = self;
        let (first, others) = slots.split_first().map_or((&[][..], slots), |((_, row), rest)| (*row, rest));
        if others.is_empty() || hi - lo == 1 {
            out.copy_from_slice(&first[at..][..out.len()]);
            for (_, row) in others {
                add_to(&row[at..][..out.len()], out);
            }
            return;
        }
        let mid = lo + (hi - lo) / 2;
        let (left, right) = slots.split_at(slots.partition_point(|(leaf, _)| *leaf < mid));
        let (left, right) = (Node { lo, hi: mid, slots: left }, Node { lo: mid, hi, slots: right });
        match (left.slots.is_empty(), right.slots.is_empty()) {
            (false, true) => left.sum(at, out, scratch, add_to),
            (true, _) => right.sum(at, out, scratch, add_to),
            (false, false) => {
                left.sum(at, out, scratch, add_to);
                let (sum, scratch) = scratch.split_at_mut(CHUNK);
                let sum = &mut sum[..out.len()];
                right.sum(at, sum, scratch, add_to);
                add_to(sum, out);
            }
        }
    }
}

/// This function is single-threaded, because it reads a few bytes per row.
pub(crate) fn find_slots(cpu: &Cpu, op: FindSlots<'_, Cpu>) -> Result<Buf<i32>> {
    op.check()?;
    let mut out = op.result(cpu)?;
    let found = out.as_mut_slice();
    found.fill(-1);
    for (row, &slot) in (0..).zip(op.row_slot.as_slice()) {
        if let Some(found) = usize::try_from(slot).ok().and_then(|slot| found.get_mut(slot)) {
            *found = row;
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests;
