//! The CPU code of [`nibble_core::ops::AssignRanks`], [`nibble_core::ops::PackSlots`] and [`nibble_core::ops::UnpackSlots`].

use crate::ops::plain::elementwise::for_rows;
use crate::{Buf, Cpu};
use nibble_core::Result;
use nibble_core::ops::{AssignRanks, PackSlots, ReceivedSlots, SlotRanks, UnpackSlots, record_words};

/// This function is single-threaded, because it reads a few bytes per slot.
pub(crate) fn assign_ranks(cpu: &Cpu, op: AssignRanks<'_, Cpu>) -> Result<SlotRanks<Cpu>> {
    let mut out = op.result(cpu)?;
    let SlotRanks { rank, first, counts } = &mut out;
    let count = counts.as_mut_slice();
    let tokens = op.expert.as_slice().chunks_exact(op.top_k);
    let ranks = rank.as_mut_slice().chunks_exact_mut(op.top_k);
    let firsts = first.as_mut_slice().chunks_exact_mut(op.top_k);
    for ((experts, ranks), firsts) in tokens.zip(ranks).zip(firsts) {
        for slot in 0..op.top_k {
            let rank = usize::try_from(experts[slot]).map_or(op.world, |e| e / op.experts_each);
            (ranks[slot], firsts[slot]) = (-1, -1);
            if rank >= op.world {
                continue;
            }
            ranks[slot] = rank as i32;
            count[2 * rank + 1] += 1;
            if !ranks[..slot].contains(&(rank as i32)) {
                firsts[slot] = rank as i32;
                count[2 * rank] += 1;
            }
        }
    }
    Ok(out)
}

/// Packs slot records, which are independent of each other.
pub(crate) fn pack_slots(cpu: &Cpu, op: PackSlots<'_, Cpu>) -> Result<Buf<i32>> {
    let (words, k) = (record_words(op.top_k), op.top_k);
    let (slots, expert, weight) = (op.slot.as_slice(), op.expert.as_slice(), op.weight.as_slice());
    let token_id = op.token_id.as_slice();
    let rank_of = |e: i32| usize::try_from(e).ok().map(|e| e / op.experts_each);
    let mut out = op.result(cpu)?;
    for_rows(cpu, out.as_mut_slice(), words, |first, out| {
        for (record, &slot) in out.chunks_exact_mut(words).zip(&slots[first..]) {
            let (experts, weights) = record[1..].split_at_mut(k);
            let Some(slot) = usize::try_from(slot).ok().filter(|&slot| slot < expert.len()) else {
                record.fill(0);
                continue;
            };
            let (token, rank) = (slot / k, rank_of(expert[slot]));
            for (to, &e) in experts.iter_mut().zip(&expert[token * k..]) {
                let is_there = rank.is_some() && rank_of(e) == rank;
                *to = if is_there { (e as usize % op.experts_each) as i32 + 1 } else { 0 };
            }
            for (to, w) in weights.iter_mut().zip(&weight[token * k..]) {
                *to = w.to_bits() as i32;
            }
            record[0] = token_id[token].wrapping_add(1);
        }
    });
    Ok(out)
}

/// Unpacks slot records without checks.
pub(crate) fn unpack_slots(cpu: &Cpu, op: UnpackSlots<'_, Cpu>) -> Result<ReceivedSlots<Cpu>> {
    let (words, k) = (record_words(op.top_k), op.top_k);
    let (mut out, records) = (op.result(cpu)?, op.records.as_slice());
    for_rows(cpu, out.token_id.as_mut_slice(), 1, |first, out| {
        for (to, record) in out.iter_mut().zip(records[first * words..].chunks_exact(words)) {
            *to = record[0].wrapping_sub(1);
        }
    });
    for_rows(cpu, out.expert.as_mut_slice(), k, |first, out| {
        for (to, record) in out.chunks_exact_mut(k).zip(records[first * words..].chunks_exact(words)) {
            to.iter_mut().zip(&record[1..=k]).for_each(|(to, word)| *to = word.wrapping_sub(1));
        }
    });
    for_rows(cpu, out.weight.as_mut_slice(), k, |first, out| {
        for (to, record) in out.chunks_exact_mut(k).zip(records[first * words..].chunks_exact(words)) {
            for (to, &bits) in to.iter_mut().zip(&record[1 + k..]) {
                *to = f32::from_bits(bits as u32);
            }
        }
    });
    Ok(out)
}

#[cfg(test)]
mod tests;
