use super::*;
use crate::ops::plain::elementwise::tests::{below, normals, same_everywhere};
use nibble_core::Backend;

/// Numbers of tokens, slots per token, experts per rank, and ranks.
const CASES: [(usize, usize, usize, usize); 8] = [
    (0, 2, 4, 2),
    (1, 1, 1, 1),
    (40, 1, 3, 4),
    (33, 2, 1, 4),
    (50, 4, 2, 2),
    (50, 3, 8, 1),
    (500, 8, 16, 8),
    (9000, 4, 5, 3),
];

/// Expert ids. About one id of nine belongs to no rank, because the id is negative or past the last expert.
fn experts((tokens, top_k, each, world): (usize, usize, usize, usize)) -> Vec<i32> {
    let all = (each * world) as i32;
    let valid = below(1, each * world, tokens * top_k);
    valid
        .iter()
        .zip(below(2, 27, tokens * top_k))
        .map(|(&e, x)| [-1 - e, all + e, i32::MAX, e][x.min(3) as usize])
        .collect()
}

/// The rank whose range of experts contains this expert.
fn rank_of(expert: i32, each: usize, world: usize) -> Option<usize> {
    (0..world).find(|rank| ((rank * each) as i32..((rank + 1) * each) as i32).contains(&expert))
}

#[test]
fn a_slots_rank_is_the_one_in_whose_range_its_expert_lies() {
    for case in CASES {
        let ((tokens, top_k, each, world), expert) = (case, experts(case));
        let (rank, first, counts) = same_everywhere(|cpu| {
            let expert = cpu.upload(&expert).unwrap();
            let op = AssignRanks { expert: &expert, top_k, experts_each: each, world };
            let SlotRanks { rank, first, counts } = op.run(cpu).unwrap();
            (rank.as_slice().to_vec(), first.as_slice().to_vec(), counts.as_slice().to_vec())
        });
        let want: Vec<_> = expert.iter().map(|&e| rank_of(e, each, world)).collect();
        let as_i32 = |rank: &Option<usize>| rank.map_or(-1, |rank| rank as i32);
        assert_eq!(rank, want.iter().map(as_i32).collect::<Vec<_>>(), "{case:?}");
        for (slot, rank) in want.iter().enumerate() {
            let is_repeat = want[slot / top_k * top_k..slot].contains(rank);
            assert_eq!(first[slot], if is_repeat { -1 } else { as_i32(rank) }, "{case:?}, slot {slot}");
        }
        for p in 0..world {
            let goes = |slots: &&[Option<usize>]| slots.contains(&Some(p));
            let to_tokens = want.chunks(top_k).filter(goes).count();
            let to_slots = want.iter().filter(|rank| **rank == Some(p)).count();
            assert_eq!(counts[2 * p..][..2], [to_tokens as i32, to_slots as i32], "{case:?}, rank {p}");
        }
        assert_eq!((rank.len(), counts.len()), (tokens * top_k, 2 * world));
    }
}

#[test]
fn a_record_tells_a_rank_of_its_own_experts_and_of_all_weights() {
    const FIRST: usize = 1000;
    for case in CASES {
        let ((tokens, top_k, each, world), expert) = (case, experts(case));
        let slots = tokens * top_k;
        let mut weight = normals(3, slots);
        // A NaN's payload must survive the transfer.
        weight.iter_mut().step_by(7).for_each(|w| *w = f32::from_bits(0xFFC0_1234));
        // The slots are random, and three are out of range.
        let slot = [below(4, slots.max(1), 2 * slots), vec![-1, i32::MIN, slots as i32]].concat();
        let (records, back) = same_everywhere(|cpu| {
            let (slot, expert, weight) =
                (cpu.upload(&slot).unwrap(), cpu.upload(&expert).unwrap(), cpu.upload(&weight).unwrap());
            let ids: Vec<i32> = (0..tokens).map(|token| (FIRST + 3 * token) as i32).collect();
            let token_id = &cpu.upload(&ids).unwrap();
            let (slot, expert, weight) = (&slot, &expert, &weight);
            let op = PackSlots { slot, expert, weight, top_k, experts_each: each, token_id };
            let records = op.run(cpu).unwrap();
            let back = UnpackSlots { records: &records, top_k }.run(cpu).unwrap();
            let bits: Vec<u32> = back.weight.as_slice().iter().map(|w| w.to_bits()).collect();
            let back = (back.token_id.as_slice().to_vec(), back.expert.as_slice().to_vec(), bits);
            (records.as_slice().to_vec(), back)
        });
        let words = 1 + 2 * top_k;
        assert_eq!(records.len(), slot.len() * words);
        for (i, (&slot, record)) in slot.iter().zip(records.chunks(words)).enumerate() {
            let from = usize::try_from(slot).ok().filter(|slot| *slot < slots);
            let want: Vec<i32> = match from {
                None => vec![0; words],
                Some(from) => {
                    let token = from / top_k;
                    let of_token = token * top_k..(token + 1) * top_k;
                    // The packer does not know the number of ranks, so it continues past the last rank with ranks of the same size.
                    let rank = |e: i32| (e >= 0).then(|| e as usize / each);
                    let local = |&e: &i32| match rank(expert[from]) {
                        Some(r) if rank(e) == Some(r) => e - (r * each) as i32 + 1,
                        _ => 0,
                    };
                    let experts = expert[of_token.clone()].iter().map(local);
                    let weights = weight[of_token].iter().map(|w| w.to_bits() as i32);
                    std::iter::once((FIRST + 3 * token) as i32 + 1).chain(experts).chain(weights).collect()
                }
            };
            assert_eq!(record, want, "{case:?}, {world} ranks, record {i} of slot {slot}");
            assert_eq!(back.0[i], want[0] - 1);
            assert_eq!(
                back.1[i * top_k..][..top_k],
                want[1..=top_k].iter().map(|e| e - 1).collect::<Vec<_>>()
            );
            let bits: Vec<i32> = back.2[i * top_k..][..top_k].iter().map(|&w| w as i32).collect();
            assert_eq!(bits, want[1 + top_k..]);
        }
    }
}

#[test]
fn mistakes_are_errors() {
    let cpu = Cpu::new(1).unwrap();
    let expert = cpu.zeros::<i32>(6).unwrap();
    let assign = |top_k, experts_each, world| {
        AssignRanks { expert: &expert, top_k, experts_each, world }.run(&cpu).unwrap_err().to_string()
    };
    assert_eq!(assign(4, 1, 1), "assign_ranks: `expert.len() modulo top_k` is 2, expected 0");
    assert_eq!(assign(0, 1, 1), "assign_ranks: `top_k` is 0, expected 1 to 2^30 − 1");
    for (each, world) in [(0, 2), (2, 0), (1 << 16, 1 << 15), (usize::MAX, 2)] {
        let e = assign(2, each, world);
        assert!(e.starts_with(&format!("assign_ranks: `(experts_each, world)` is ({each}, {world})")), "{e}");
    }
    let pack = |weights: usize, experts_each, tokens| {
        let (weight, token_id) = (&cpu.zeros::<f32>(weights).unwrap(), &cpu.zeros(tokens).unwrap());
        let op = PackSlots { slot: &expert, expert: &expert, weight, top_k: 2, experts_each, token_id };
        op.run(&cpu).unwrap_err().to_string()
    };
    assert_eq!(pack(5, 1, 3), "pack_slots: `weight.len()` is 5, expected 6");
    assert_eq!(pack(6, 0, 3), "pack_slots: `experts_each` is 0, expected 1 to 2^31 − 1");
    assert_eq!(pack(6, 1, 2), "pack_slots: `token_id.len()` is 2, expected 3");
    let e = UnpackSlots { records: &expert, top_k: 2 }.run(&cpu).unwrap_err().to_string();
    assert_eq!(e, "unpack_slots: `records.len() modulo the record's words` is 1, expected 0");
}
