//! See [`nibble_core::ops::AssignParts`] and [`nibble_core::ops::JoinGroups`].

use super::elementwise::for_rows;
use crate::{Buf, Cpu};
use nibble_core::ops::{AssignParts, JoinGroups};
use nibble_core::{Groups, Result};

pub(crate) fn assign_parts(cpu: &Cpu, op: AssignParts<'_, Cpu>) -> Result<Buf<i32>> {
    let (expert, token_id) = (op.expert.as_slice(), op.token_id.as_slice());
    let mut out = cpu.scratch::<i32>(expert.len());
    let (parts, part_tokens) = (op.parts as u32, op.part_tokens as u32);
    for_rows(cpu, out.as_mut_slice(), op.top_k, |first, out| {
        let experts = expert[first * op.top_k..].chunks_exact(op.top_k);
        for ((to, from), &token) in out.chunks_exact_mut(op.top_k).zip(experts).zip(&token_id[first..]) {
            let part = token as u32 / part_tokens % parts;
            for (to, &expert) in to.iter_mut().zip(from) {
                *to = if expert < 0 { -1 } else { (expert as u32).wrapping_mul(parts).wrapping_add(part) as i32 };
            }
        }
    });
    Ok(out)
}

/// Their starts are among the others'.
pub(crate) fn join_groups(cpu: &Cpu, op: JoinGroups<'_, Cpu>) -> Result<Groups<Cpu>> {
    let Groups { num_groups, ref row_id, align, capacity, .. } = *op.groups;
    let (start, len) = (op.groups.start.as_slice(), op.groups.len.as_slice());
    let joined: Vec<i32> = start.iter().step_by(op.parts).copied().collect();
    let ends = (0..num_groups).skip(op.parts - 1).step_by(op.parts).map(|last| start[last] + len[last]);
    let len: Vec<i32> = ends.zip(&joined).map(|(end, start)| end - start).collect();
    Ok(Groups {
        start: cpu.computed(&joined),
        len: cpu.computed(&len),
        row_id: row_id.clone(),
        num_groups: num_groups / op.parts,
        align,
        capacity,
        rows_each: None,
    })
}
