//! Compares plans made on the device with plans made on the host from the routings of all ranks.

use super::*;
use crate::shards::Shards;
use nibble_core::formats::{Codec, Purpose, Rounding, ScaleRule, Stream};
use nibble_core::ops::{Planes, Quantize};
use nibble_core::{Backend, Comm, DType, Mesh, Recipe};
use nibble_cpu::{Cpu, HostComm};

/// Number of experts per rank.
const EACH: usize = 4;

/// How the tokens of a case choose experts.
#[derive(Debug, Clone, Copy)]
enum Choice {
    /// Tokens choose random experts.
    Random,
    /// All tokens choose experts of the last rank.
    AllOnOneRank,
    /// No token chooses an expert of the first rank, if there are other ranks.
    NoneOnOneRank,
    /// A token chooses neighbouring experts, so that several of them are on the same rank.
    Neighbours,
    /// Tokens choose the first experts most often, by Zipf's law.
    Skewed,
}

#[derive(Debug, Clone, Copy)]
struct Case {
    world: usize,
    /// Number of tokens on each rank.
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
                for choice in [Random, AllOnOneRank, NoneOnOneRank, Neighbours, Skewed] {
                    for tokens in [0, 1, 130] {
                        all.push(Case { world, tokens, top_k, choice });
                    }
                }
            }
        }
        all
    }

    /// For each token of a rank, different experts and their gate weights.
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
            if matches!(self.choice, Choice::Skewed) {
                // Expert e is chosen with a frequency of about 1 / (e + 1).
                let draws =
                    (0..40).map(|i| stream.u32_at((token * 40 + i) as u64 + 5000) as f32 / u32::MAX as f32);
                for e in draws.map(|u| ((count as f32 + 1.0).powf(u) - 1.0) as usize) {
                    if !chosen.contains(&e.min(count - 1)) {
                        chosen.push(e.min(count - 1));
                    }
                }
            }
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

/// The tokens and slots that one rank sends under its routing.
struct Outbox {
    /// The tokens sent to each rank, in ascending order.
    tokens: Vec<Vec<usize>>,
    /// For each (token, slot), the rank of its expert and its position among the slots of that rank.
    slot: Vec<(usize, usize)>,
    /// Number of slots on each rank.
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

    /// The token of each row that is sent, ordered by destination.
    fn send_token(&self) -> Vec<i32> {
        self.tokens.iter().flatten().map(|t| *t as i32).collect()
    }

    /// For each (token, slot), its position among the slot rows that combine returns, which arrive rank by rank.
    fn slot_place(&self) -> Vec<i32> {
        let first_of: Vec<usize> =
            self.slots.iter().scan(0, |sum, n| Some(std::mem::replace(sum, *sum + n))).collect();
        self.slot.iter().map(|(rank, i)| (first_of[*rank] + i) as i32).collect()
    }
}

/// A slot whose expert is on this rank.
#[derive(Debug, Clone, Copy)]
struct Slot {
    expert: usize,
    /// The token's number over all ranks.
    token: usize,
    slot: usize,
    /// The position of the slot's token among the received tokens.
    received: usize,
    weight: f32,
}

/// The expected contents of the plan of one rank, in the order of [`contents`].
fn want(case: &Case, rank: usize) -> Vec<(&'static str, Vec<i32>)> {
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
    vec![
        ("row_id", ints(&|s| s.token * top_k + s.slot)),
        ("source_row", ints(&|s| s.received)),
        ("row_slot", ints(&|s| s.received * top_k + s.slot)),
        ("slot_row", arrived.iter().map(place_of).collect()),
        ("gate_r", ints(&|s| s.weight.to_bits() as usize)),
        ("send_token", boxes[rank].send_token()),
        ("slot_place", boxes[rank].slot_place()),
    ]
}

/// The actual contents of the plan of one rank.
fn contents(cpu: &Cpu, plan: &ExchangePlan<Cpu>) -> Vec<(&'static str, Vec<i32>)> {
    let map = &plan.map;
    let mut lists = vec![
        ("row_id", map.groups.row_id.as_slice().to_vec()),
        ("source_row", map.source_row.as_slice().to_vec()),
        ("row_slot", map.row_slot.as_slice().to_vec()),
        ("slot_row", map.slot_row.as_slice().to_vec()),
        ("gate_r", cpu.reinterpret::<f32, i32>(&plan.gate_r).unwrap().as_slice().to_vec()),
    ];
    if let Some(wire) = &plan.wire {
        lists.push(("send_token", wire.sending.token.as_slice().to_vec()));
        lists.push(("slot_place", wire.slot_place.as_slice().to_vec()));
    }
    lists
}

/// A rank's part of a routing, on the device.
fn routing_of(cpu: &Cpu, case: &Case, rank: usize) -> Routing<Cpu> {
    let (expert, weight) = case.routing(rank);
    Routing {
        expert: cpu.upload(&expert).unwrap(),
        weight: cpu.upload(&weight).unwrap(),
        kept: Tensor::zeros(cpu, DType::F32, 0, 0).unwrap(),
        log_sum_exp: cpu.zeros(0).unwrap(),
        load: cpu.zeros(0).unwrap(),
        losses: cpu.zeros(0).unwrap(),
    }
}

/// The largest number of slots that a rank of a case receives, as a multiple of its share under uniform routing.
fn fullest(case: &Case) -> f64 {
    let slots = |rank| Outbox::new(&case.routing(rank).0, case.top_k, EACH, case.world).slots;
    let all: Vec<Vec<usize>> = (0..case.world).map(slots).collect();
    let most = (0..case.world).map(|to| all.iter().map(|slots| slots[to]).sum::<usize>()).max();
    most.unwrap() as f64 / (case.tokens * case.top_k).max(1) as f64
}

/// Checks plans with unlimited capacity, and with exactly the necessary capacity.
fn check(case: Case, capacity_factor: f64, comm: HostComm) {
    let (cpu, recipe) = (Cpu::new(1).unwrap(), Recipe::builtin("bf16").unwrap());
    let comm: &dyn Comm<Cpu> = &comm;
    let shards = Shards::new(&cpu, 1, case.tokens, comm.rank()).unwrap();
    let cx = Cx { capacity_factor, ..Cx::inference(&cpu, Mesh::new(comm), &recipe, shards, 0.0) };
    let routing = routing_of(&cpu, &case, comm.rank());
    let plan = Exchange::new(&cx, EACH * case.world, case.top_k).plan(&routing, 1).unwrap();
    match &plan.overflow {
        None => plan.map.occupancy.verify(&cpu).unwrap(),
        Some(overflow) => assert_eq!(overflow.as_slice(), [0.0], "{case:?}"),
    }
    assert_eq!(cx.overflow.get(), 0.0, "{case:?}");
    for ((name, got), (_, want)) in contents(&cpu, &plan).iter().zip(&want(&case, comm.rank())) {
        if *name == "gate_r" && case.world > 1 {
            assert_eq!(plan.map.num_slots, want.len().max(1), "{case:?}: what came, and no more");
        }
        let (rows, none) = got.split_at(want.len());
        assert_eq!(rows, want, "{case:?}, rank {}, {name}", comm.rank());
        let nothing = if *name == "gate_r" { 0 } else { -1 };
        assert!(none.iter().all(|x| *x == nothing), "{case:?}, {name} behind the last row: {none:?}");
    }
}

/// After an overflow no rows are sent, no rank waits, and every rank's record reports the overflow.
fn check_overflow(case: Case, comm: HostComm) {
    let (cpu, recipe) = (Cpu::new(1).unwrap(), Recipe::builtin("bf16").unwrap());
    let comm: &dyn Comm<Cpu> = &comm;
    let shards = Shards::new(&cpu, 1, case.tokens, comm.rank()).unwrap();
    for combine in [Combine::Slots, Combine::Tree] {
        let cx = Cx {
            // The capacity is one slot too small.
            capacity_factor: fullest(&case) - 1.5 / (case.tokens * case.top_k) as f64,
            combine,
            ..Cx::inference(&cpu, Mesh::new(comm), &recipe, shards.clone(), 0.0)
        };
        let exchange = Exchange::new(&cx, EACH * case.world, case.top_k);
        let plan = exchange.plan(&routing_of(&cpu, &case, comm.rank()), 128).unwrap();
        let needed = fullest(&case) as f32;
        assert_eq!(cx.overflow.get(), needed, "{case:?}");
        assert_eq!(plan.overflow.as_ref().unwrap().as_slice(), [needed], "{case:?}");
        assert!(plan.map.groups.len.as_slice().iter().all(|len| *len == 0), "{case:?}");
        let x = rows_of(&cpu, DType::Bf16, case.tokens, 8, made);
        let rows = exchange.dispatch(&plan, &Operand::Plain(x)).unwrap();
        let back = exchange.combine(&plan, &rows, None).unwrap();
        assert_eq!(back.shape(), (case.tokens, 8));
        let scalars = exchange.begin_return_scalars(&plan, plan.gate_r.clone()).unwrap();
        assert_eq!(scalars.wait(&cpu).unwrap().as_slice().len(), case.tokens * case.top_k);
    }
}

#[test]
fn what_does_not_fit_is_told_to_every_rank_and_is_not_sent() {
    for case in Case::all().into_iter().filter(|case| case.world > 1 && case.tokens > 0) {
        on_ranks(case.world, |comm| check_overflow(case, comm));
    }
}

/// Runs the check on every rank.
fn on_ranks(world: usize, work: impl Fn(HostComm) + Sync) {
    std::thread::scope(|scope| {
        let work = &work;
        let spawn = |comm| scope.spawn(move || work(comm));
        let ranks: Vec<_> = HostComm::world(world).into_iter().map(spawn).collect();
        ranks.into_iter().for_each(|rank| rank.join().unwrap());
    });
}

#[test]
fn a_plan_made_on_the_device_is_the_one_a_host_makes_of_all_routings() {
    for case in Case::all() {
        for capacity_factor in [f64::INFINITY, fullest(&case)] {
            on_ranks(case.world, |comm| check(case, capacity_factor, comm));
        }
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

/// The value that the expert of slot `id` (a (token, slot) counted over all ranks) returns in column `col`.
fn made(id: usize, col: usize) -> f32 {
    Stream::new(6, Purpose::Data, 0, 0).normal_at((id * 64 + col) as u64)
}

/// A matrix of expert outputs, whose rows are given by their (token, slot).
fn rows_of(
    cpu: &Cpu,
    dtype: DType,
    rows: usize,
    cols: usize,
    value: impl Fn(usize, usize) -> f32,
) -> Tensor<Cpu> {
    let x: Vec<f32> = (0..rows * cols).map(|i| value(i / cols, i % cols)).collect();
    let x = Tensor::from_f32(cpu, &x, rows, cols).unwrap();
    nibble_core::ops::Cast { x: &x, dtype }.run(cpu).unwrap()
}

/// Combines the experts' outputs for the tokens of one rank, and compares them with sums over all experts, as on a single rank.
fn check_sums(case: Case, way: Combine, (dtype, cols): (DType, usize), comm: HostComm) {
    let (cpu, recipe) = (Cpu::new(1).unwrap(), Recipe::builtin("bf16").unwrap());
    let comm: &dyn Comm<Cpu> = &comm;
    let (rank, experts, top_k) = (comm.rank(), EACH * case.world, case.top_k);
    let shards = Shards::new(&cpu, 1, case.tokens, rank).unwrap();
    let cx = Cx { combine: way, ..Cx::inference(&cpu, Mesh::new(comm), &recipe, shards, 0.0) };
    let routing = routing_of(&cpu, &case, rank);
    let exchange = Exchange::new(&cx, experts, top_k);
    let plan = exchange.plan(&routing, 4).unwrap();
    let row_id = plan.map.groups.row_id.as_slice();
    // Padding rows hold NaN, which must not be read.
    let made_here = |row: usize, col| usize::try_from(row_id[row]).map_or(f32::NAN, |id| made(id, col));
    let rows_rd = rows_of(&cpu, dtype, row_id.len(), cols, made_here);
    let first = rank * case.tokens;
    let plus = rows_of(&cpu, dtype, case.tokens, cols, |token, col| made(9_999_999 - first - token, col));
    for plus in [None, Some(&plus)] {
        let got = exchange.combine(&plan, &Operand::Plain(rows_rd.clone()), plus).unwrap();
        let rows = &rows_of(&cpu, dtype, case.tokens * top_k, cols, |id, col| made(first * top_k + id, col));
        let index = &cpu.upload(&(0..(case.tokens * top_k) as i32).collect::<Vec<_>>()).unwrap();
        let want = match way {
            Combine::Slots => CombineSlots { plus, ..CombineSlots::new(rows, top_k) }.run(&cpu),
            Combine::Tree => {
                let leaf = &routing.expert;
                CombineTree { rows, index, leaf, leaves: experts, plus, top_k }.run(&cpu)
            }
        };
        let bits =
            |x: &Tensor<Cpu>| x.to_f32_vec(&cpu).unwrap().into_iter().map(f32::to_bits).collect::<Vec<_>>();
        assert_eq!(got.dtype(), dtype);
        assert!(
            bits(&got) == bits(&want.unwrap()),
            "{case:?}, {way:?}, rank {rank}, {dtype} of {cols} columns"
        );
    }
    // The gradients of gate weights return as one number per slot, whether or not combine uses a tree.
    let gates: Vec<f32> =
        row_id.iter().map(|&id| usize::try_from(id).map_or(f32::NAN, |id| made(id, 63))).collect();
    let back = exchange.begin_return_scalars(&plan, cpu.upload(&gates).unwrap()).unwrap();
    let back = back.wait(&cpu).unwrap();
    let want: Vec<f32> = (0..case.tokens * top_k).map(|id| made(first * top_k + id, 63)).collect();
    assert_eq!(back.as_slice(), want, "{case:?}, {way:?}, rank {rank}");
}

#[test]
fn rows_come_back_and_add_up_as_on_one_rank() {
    // Some rows are multiples of 16 bytes, and others are not. Records of the other rows are padded if combine sends one row per slot.
    let kinds = [(DType::Bf16, 8), (DType::Bf16, 5), (DType::F32, 4), (DType::F32, 7)];
    for (i, case) in Case::all().into_iter().enumerate() {
        for (j, way) in [Combine::Slots, Combine::Tree].into_iter().enumerate() {
            on_ranks(case.world, |comm| check_sums(case, way, kinds[(i + 2 * j) % 4], comm));
        }
    }
}

/// Quantized rows are rounded slot by slot, so a token's sum is the sum of its dequantized rows, on whichever ranks the experts are.
fn check_blocks(case: Case, format: Format, comm: HostComm) {
    const COLS: usize = 160;
    let (cpu, recipe) = (Cpu::new(1).unwrap(), Recipe::builtin("bf16").unwrap());
    let comm: &dyn Comm<Cpu> = &comm;
    let (rank, top_k) = (comm.rank(), case.top_k);
    let shards = Shards::new(&cpu, 1, case.tokens, rank).unwrap();
    let cx = Cx::inference(&cpu, Mesh::new(comm), &recipe, shards, 0.0);
    let exchange = Exchange::new(&cx, EACH * case.world, top_k);
    let plan = exchange.plan(&routing_of(&cpu, &case, rank), 4).unwrap();
    let codec = Codec::new(format, format.spec().rules[0], Rounding::NearestEven).unwrap();
    let row_id = plan.map.groups.row_id.as_slice();
    let made_here = |row: usize, col| usize::try_from(row_id[row]).map_or(f32::NAN, |id| made(id, col));
    let rows_rd = rows_of(&cpu, DType::Bf16, row_id.len(), COLS, made_here);
    let groups = Some(&plan.map.groups);
    let rows_rd = Quantize { groups, ..Quantize::new(&rows_rd, codec, Planes::Rows) }.run(&cpu).unwrap();
    let rows_rd = rows_rd.take_rows("test").unwrap();

    let first = rank * case.tokens;
    let rows = rows_of(&cpu, DType::Bf16, case.tokens * top_k, COLS, |id, col| made(first * top_k + id, col));
    let rows = Quantize::new(&rows, codec, Planes::Rows).run(&cpu).unwrap().take_rows("test").unwrap();
    let Operand::Block(x) = &rows else { panic!("{format} has no blocks") };
    let rows = Dequantize { x, dtype: DType::Bf16 }.run(&cpu).unwrap();
    let plus = rows_of(&cpu, DType::Bf16, case.tokens, COLS, |token, col| made(9_999_999 - token, col));
    for plus in [None, Some(&plus)] {
        let got = exchange.combine(&plan, &rows_rd, plus).unwrap();
        let want = CombineSlots { plus, ..CombineSlots::new(&rows, top_k) }.run(&cpu).unwrap();
        let [got, want] = [got, want].map(|x| x.to_f32_vec(&cpu).unwrap());
        assert!(got.iter().map(|x| x.to_bits()).eq(want.iter().map(|x| x.to_bits())), "{case:?}, {format}");
    }
}

#[test]
fn rows_in_blocks_come_back_and_add_up_as_on_one_rank() {
    for (i, case) in Case::all().into_iter().enumerate() {
        let format = [Format::E4m3, Format::Mxfp8E4m3][i % 2];
        on_ranks(case.world, |comm| check_blocks(case, format, comm));
    }
}

/// Quantized rows with a tree are an error, because partial sums would be rounded at rank boundaries.
#[test]
fn rows_in_blocks_are_not_summed_up_a_tree() {
    let (cpu, recipe) = (Cpu::new(1).unwrap(), Recipe::builtin("bf16").unwrap());
    let case = Case { world: 1, tokens: 2, top_k: 1, choice: Choice::Random };
    let shards = Shards::new(&cpu, 1, 2, 0).unwrap();
    let comm = nibble_core::SoloComm;
    let cx = Cx { combine: Combine::Tree, ..Cx::inference(&cpu, Mesh::new(&comm), &recipe, shards, 0.0) };
    let exchange = Exchange::new(&cx, EACH, 1);
    let plan = exchange.plan(&routing_of(&cpu, &case, 0), 1).unwrap();
    let kind = RowKind { format: Format::E4m3, rule: ScaleRule::Amax, cols: 8 };
    let rows = kind.unwritten(&cpu, plan.map.groups.capacity).unwrap();
    let why = exchange.combine(&plan, &rows, None).unwrap_err().to_string();
    assert!(why.contains("e4m3") && why.contains("slot order"), "{why}");
}

/// A tree is an error if the number of ranks is not a power of two, because no rank's sum is then a node of the tree.
#[test]
fn a_tree_over_other_numbers_of_ranks_is_refused() {
    on_ranks(3, |comm| {
        let (cpu, recipe) = (Cpu::new(1).unwrap(), Recipe::builtin("bf16").unwrap());
        let shards = Shards::new(&cpu, 1, 2, 0).unwrap();
        let mesh = Mesh::new(&comm);
        let cx = Cx { combine: Combine::Tree, ..Cx::inference(&cpu, mesh, &recipe, shards, 0.0) };
        let case = Case { world: 3, tokens: 2, top_k: 1, choice: Choice::Random };
        let why = Exchange::new(&cx, 12, 1).plan(&routing_of(&cpu, &case, 0), 1).unwrap_err();
        assert!(why.to_string().contains("is 3, expected a power of two"), "{why}");
    });
}

#[test]
fn bytes_follow_from_the_routing() {
    // Each token has two slots, and each rank two experts. The three tokens go to one rank, two ranks, and one rank.
    let counts = SlotCounts::of(&[0, 1, 1, 2, 5, 4], 2, 2);
    assert_eq!(counts, SlotCounts { tokens: 4, slots: 6, top_k: 2 });
    // Rank 0 has two slots of the first token and one of the second.
    let leaving = |home| SlotCounts::leaving(&[0, 1, 1, 2, 5, 4], 2, 2, home);
    assert_eq!(leaving(0), SlotCounts { tokens: 2, slots: 3, top_k: 2 });
    assert_eq!(leaving(1), SlotCounts { tokens: 3, slots: 5, top_k: 2 });
    assert_eq!(leaving(3), counts);
    let row = |format| RowKind { format, rule: ScaleRule::Floor, cols: 512 };
    let (fp4, bf16) = (row(Format::Mxfp4), row(Format::Bf16));
    let of = |way| ExchangeBytes::of(counts, way, [fp4, bf16], [bf16; 2]);
    let tree = ExchangeBytes {
        records: 4 * 20,
        dispatch: 4 * 272,
        combine: 4 * 1024,
        dispatch_backward: 4 * 1024,
        combine_backward: 4 * 1024,
        scalars: 24,
    };
    assert_eq!(of(Combine::Tree), tree);
    assert_eq!(of(Combine::Slots), ExchangeBytes { combine: 6 * 1024, combine_backward: 6 * 1024, ..tree });
    assert_eq!(tree.total(), 4 * (20 + 272 + 3 * 1024) + 24);
    // MXFP8 has one byte per code and one scale byte per 32 codes. The 128-blocks have four scale bytes per 128 codes, and padding to 16
    // bytes.
    let mxfp8 = row(Format::Mxfp8E4m3);
    let e4m3 = RowKind { rule: ScaleRule::Amax, ..row(Format::E4m3) };
    let back = ExchangeBytes::of(counts, Combine::Slots, [fp4, bf16], [mxfp8, e4m3]);
    assert_eq!(back, ExchangeBytes { combine: 6 * (512 + 16), combine_backward: 6 * (512 + 16), ..tree });
}
