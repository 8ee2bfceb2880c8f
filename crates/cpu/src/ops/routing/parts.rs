//! The CPU code of [`nibble_core::ops::AssignParts`] and [`nibble_core::ops::JoinGroups`].

use crate::ops::plain::elementwise::for_rows;
use crate::{Buf, Cpu};
use nibble_core::ops::{AssignParts, JoinGroups};
use nibble_core::{Groups, Result};

pub(crate) fn assign_parts(cpu: &Cpu, op: AssignParts<'_, Cpu>) -> Result<Buf<i32>> {
    let (expert, token_id) = (op.expert.as_slice(), op.token_id.as_slice());
    let mut out = op.result(cpu)?;
    let (parts, part_tokens) = (op.parts as u32, op.part_tokens as u32);
    for_rows(cpu, out.as_mut_slice(), op.top_k, |first, out| {
        let experts = expert[first * op.top_k..].chunks_exact(op.top_k);
        for ((to, from), &token) in out.chunks_exact_mut(op.top_k).zip(experts).zip(&token_id[first..]) {
            let part = token as u32 / part_tokens % parts;
            for (to, &expert) in to.iter_mut().zip(from) {
                *to = if expert < 0 {
                    -1
                } else {
                    (expert as u32).wrapping_mul(parts).wrapping_add(part) as i32
                };
            }
        }
    });
    Ok(out)
}

/// Joins consecutive groups; a joined group starts where its first part starts.
pub(crate) fn join_groups(cpu: &Cpu, op: JoinGroups<'_, Cpu>) -> Result<Groups<Cpu>> {
    let (start, len) = (op.groups.start.as_slice(), op.groups.len.as_slice());
    let mut out = op.result(cpu)?;
    let begins = start.iter().step_by(op.parts);
    out.start.as_mut_slice().iter_mut().zip(begins).for_each(|(to, start)| *to = *start);
    let last = (op.parts - 1..len.len()).step_by(op.parts);
    let ends = last.map(|last| start[last] + len[last]);
    let lens = ends.zip(out.start.as_slice()).map(|(end, start)| end - start);
    out.len.as_mut_slice().iter_mut().zip(lens).for_each(|(to, len)| *to = len);
    Ok(out)
}
