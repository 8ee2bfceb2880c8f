//! Plans made on the device, against plans made on the host from the routings of all ranks.

use super::*;
use crate::cx::Shards;
use nibble_core::formats::{Purpose, Stream};
use nibble_core::{Backend, Comm, DType, Mesh, Recipe};
use nibble_cpu::{Cpu, ThreadComm};

/// Experts of a rank.
const EACH: usize = 4;

/// Which experts tokens choose.
#[derive(Debug, Clone, Copy)]
enum Choice {
    /// Any.
    Random,
    /// Those of the last rank.
    AllOnOneRank,
    /// None of the first rank's, where there are others.
    NoneOnOneRank,
    /// Neighbours, so that several are of the same rank.
    Neighbours,
}

#[derive(Debug, Clone, Copy)]
struct Case {
    world: usize,
    /// On each rank.
    tokens: usize,
    top_k: usize,
    choice: Choice,
}

impl Case {
    fn all() -> Vec<Case> {
        use Choice::*;
        let mut all = Vec::new();
        for world in [1, 2, 4] {
            for top_k in 1..=4 {
                for choice in [Random, AllOnOneRank, NoneOnOneRank, Neighbours] {
                    for tokens in [0, 1, 130] {
                        all.push(Case { world, tokens, top_k, choice });
                    }
                }
            }
        }
        all
    }

    /// Different experts for each token of a rank, and weights.
    fn routing(&self, rank: usize) -> (Vec<i32>, Vec<f32>) {
        let stream = Stream::new(5, Purpose::Data, (rank * 8 + self.top_k) as u32, self.choice as u32);
        let experts = EACH * self.world;
        let (first, count) = match self.choice {
            Choice::AllOnOneRank => (experts - EACH, EACH),
            Choice::NoneOnOneRank if self.world > 1 => (EACH, experts - EACH),
            _ => (0, experts),
        };
        let mut expert = Vec::new();
        for token in 0..self.tokens {
            let start = stream.u32_at(token as u64) as usize;
            let step = if matches!(self.choice, Choice::Neighbours) { 1 } else { 1 + (start >> 16) };
            let mut chosen = Vec::new();
            for e in (0..count).map(|i| (start + i * step) % count).chain(0..count) {
                if !chosen.contains(&e) {
                    chosen.push(e);
                }
            }
            expert.extend(chosen[..self.top_k].iter().map(|e| (first + e) as i32));
        }
        let weight = (0..expert.len() as u64).map(|i| stream.normal_at(1000 + i)).collect();
        (expert, weight)
    }
}

/// What one rank sends, by its routing.
struct Outbox {
    /// Tokens for each rank, ascending.
    tokens: Vec<Vec<usize>>,
    /// For each (token, slot), its rank and its place among the slots of that rank.
    slot: Vec<(usize, usize)>,
    /// Slots on each rank.
    slots: Vec<usize>,
}

impl Outbox {
    fn new(expert: &[i32], top_k: usize, experts_each: usize, world: usize) -> Self {
        let mut outbox = Self { tokens: vec![Vec::new(); world], slot: Vec::new(), slots: vec![0; world] };
        for (token, experts) in expert.chunks(top_k).enumerate() {
            for &e in experts {
                let rank = e as usize / experts_each;
                if outbox.tokens[rank].last() != Some(&token) {
                    outbox.tokens[rank].push(token);
                }
                outbox.slot.push((rank, outbox.slots[rank]));
                outbox.slots[rank] += 1;
            }
        }
        outbox
    }

    /// Token of each row sent, by destination.
    fn send_token(&self) -> Vec<i32> {
        self.tokens.iter().flatten().map(|t| *t as i32).collect()
    }

    /// For each (token, slot), its place among the slot rows that come back, which arrive rank by rank.
    fn slot_place(&self) -> Vec<i32> {
        let first_of: Vec<usize> =
            self.slots.iter().scan(0, |sum, n| Some(std::mem::replace(sum, *sum + n))).collect();
        self.slot.iter().map(|(rank, i)| (first_of[*rank] + i) as i32).collect()
    }
}

/// A slot of an expert of this rank.
#[derive(Debug, Clone, Copy)]
struct Slot {
    expert: usize,
    /// Over all ranks.
    token: usize,
    slot: usize,
    /// Place of its token among those that arrived.
    received: usize,
    weight: f32,
}

/// What the plan of one rank must hold, in the order of [`contents`].
fn want(case: &Case, rank: usize) -> (RowCounts, Vec<(&'static str, Vec<i32>)>) {
    let Case { world, tokens, top_k, .. } = *case;
    let routings: Vec<_> = (0..world).map(|r| case.routing(r)).collect();
    let boxes: Vec<_> = routings.iter().map(|(e, _)| Outbox::new(e, top_k, EACH, world)).collect();
    let (mut arrived, mut received) = (Vec::new(), 0);
    for (source, (expert, weight)) in routings.iter().enumerate() {
        for &t in &boxes[source].tokens[rank] {
            for slot in 0..top_k {
                let (e, weight) = (expert[t * top_k + slot] as usize, weight[t * top_k + slot]);
                if e / EACH == rank {
                    arrived.push(Slot {
                        expert: e % EACH,
                        token: source * tokens + t,
                        slot,
                        received,
                        weight,
                    });
                }
            }
            received += 1;
        }
    }
    let mut sorted = arrived.clone();
    sorted.sort_by_key(|s| (s.expert, s.token, s.slot));
    let place_of =
        |s: &Slot| sorted.iter().position(|o| (o.token, o.slot) == (s.token, s.slot)).unwrap() as i32;
    let ints = |of: &dyn Fn(&Slot) -> usize| sorted.iter().map(|s| of(s) as i32).collect();
    let counts = |of: &dyn Fn(usize) -> usize| (0..world).map(of).collect();
    let rows = RowCounts {
        tokens_to: counts(&|p| boxes[rank].tokens[p].len()),
        tokens_from: counts(&|p| boxes[p].tokens[rank].len()),
        slots_from: boxes[rank].slots.clone(),
        slots_to: counts(&|p| boxes[p].slots[rank]),
    };
    let lists = vec![
        ("row_id", ints(&|s| s.token * top_k + s.slot)),
        ("source_row", ints(&|s| s.received)),
        ("row_slot", ints(&|s| s.received * top_k + s.slot)),
        ("slot_row", arrived.iter().map(place_of).collect()),
        ("gate_r", ints(&|s| s.weight.to_bits() as usize)),
        ("send_token", boxes[rank].send_token()),
        ("slot_place", boxes[rank].slot_place()),
    ];
    (rows, lists)
}

/// What the plan of one rank holds. Without padding there is one more row than slots at most.
fn contents(cpu: &Cpu, plan: &Plan<Cpu>) -> Vec<(&'static str, Vec<i32>)> {
    let (map, rows) = (&plan.map, plan.map.num_slots);
    let mut lists = vec![
        ("row_id", map.groups.row_id.as_slice()[..rows].to_vec()),
        ("source_row", map.source_row.as_slice()[..rows].to_vec()),
        ("row_slot", map.row_slot.as_slice()[..rows].to_vec()),
        ("slot_row", map.slot_row.as_slice().to_vec()),
        ("gate_r", cpu.reinterpret::<f32, i32>(&plan.gate_r).unwrap().as_slice()[..rows].to_vec()),
    ];
    if let Some(wire) = &plan.wire {
        lists.push(("send_token", wire.send_token.as_slice().to_vec()));
        lists.push(("slot_place", wire.slot_place.as_slice().to_vec()));
    }
    lists
}

fn check(case: Case, comm: ThreadComm) {
    let (cpu, recipe) = (Cpu::new(1).unwrap(), Recipe::builtin("bf16").unwrap());
    let comm: &dyn Comm<Cpu> = &comm;
    let shards = Shards::new(&cpu, 1, case.tokens, comm.rank()).unwrap();
    let cx = Cx::inference(&cpu, Mesh::new(comm), &recipe, shards, 0.0);
    let (expert, weight) = case.routing(comm.rank());
    let routing = Routing {
        expert: cpu.upload(&expert).unwrap(),
        weight: cpu.upload(&weight).unwrap(),
        probs: Tensor::zeros(&cpu, DType::F32, 0, 0).unwrap(),
        log_sum_exp: cpu.zeros(0).unwrap(),
        load: cpu.zeros(0).unwrap(),
        losses: cpu.zeros(0).unwrap(),
    };
    let plan = Exchange::new(&cx, EACH * case.world, case.top_k).plan(&routing, 1).unwrap();
    plan.map.occupancy.verify(&cpu).unwrap();
    let (rows, want) = want(&case, comm.rank());
    assert_eq!(plan.wire.as_ref().map(|wire| &wire.rows), (case.world > 1).then_some(&rows), "{case:?}");
    assert_eq!(plan.map.num_slots, rows.slots_to.iter().sum::<usize>(), "{case:?}");
    for (got, want) in contents(&cpu, &plan).iter().zip(&want) {
        assert_eq!(got, want, "{case:?}, rank {}", comm.rank());
    }
}

#[test]
fn a_plan_made_on_the_device_is_the_one_a_host_makes_of_all_routings() {
    for case in Case::all() {
        std::thread::scope(|scope| {
            let spawn = |comm| scope.spawn(move || check(case, comm));
            let ranks: Vec<_> = ThreadComm::world(case.world).into_iter().map(spawn).collect();
            ranks.into_iter().for_each(|rank| rank.join().unwrap());
        });
    }
}

#[test]
fn the_cases_have_what_they_are_for() {
    let of = |choice, rank| Case { world: 4, tokens: 130, top_k: 4, choice }.routing(rank).0;
    let boxed = |expert: Vec<i32>| Outbox::new(&expert, 4, EACH, 4);
    let tokens = boxed(of(Choice::AllOnOneRank, 1)).tokens;
    assert_eq!(tokens.iter().map(Vec::len).collect::<Vec<_>>(), [0, 0, 0, 130]);
    assert_eq!(boxed(of(Choice::NoneOnOneRank, 2)).slots[0], 0);
    let neighbours = boxed(of(Choice::Neighbours, 0));
    assert!(neighbours.slots.iter().sum::<usize>() > neighbours.send_token().len() * 3 / 2);
    for token in of(Choice::Random, 3).chunks(4) {
        assert!((1..4).all(|i| !token[..i].contains(&token[i])), "{token:?}: an expert is chosen once");
    }
}

#[test]
fn counts_that_cannot_be_are_errors() {
    let of = |table: &[i32]| RowCounts::of(table, 1, 2).unwrap_err().to_string();
    assert_eq!(of(&[0; 7]), "rank 1: counts: 7 counts among 2 ranks");
    assert_eq!(of(&[1, 2, 3, 4, 5, -6, 7, 8]), "rank 1: counts: a negative number of rows: -6");
    let rows = RowCounts::of(&[1, 2, 3, 4, 5, 6, 7, 8], 1, 2).unwrap();
    assert_eq!((rows.tokens_to, rows.tokens_from), (vec![5, 7], vec![3, 7]));
    assert_eq!((rows.slots_from, rows.slots_to), (vec![6, 8], vec![4, 8]));
}
