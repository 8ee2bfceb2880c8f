//! Collectives through the host's memory: what the collectives compute, and that no failure of one rank leaves another waiting.

use nibble_core::{Axes, Backend, Comm, Error, MeshShape, Result, Transfer, TreeSum};
use nibble_cpu::{Arrivals, Buf, Cpu, HostComm, Link};
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::time::Duration;

/// Longer than anything here takes; a rank that is silent for so long hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// How ranks meet. Each test is of both.
#[derive(Debug, Clone, Copy)]
enum Kind {
    /// In one world, as threads of a process.
    Threads,
    /// Each in a world of its own, as processes: joined by links.
    Linked,
}

/// Joins ranks that have worlds of their own, as a hub does: what is told to all has reached all before anything else is told.
struct Wire {
    rank: usize,
    others: Arc<OnceLock<Vec<Arrivals>>>,
    turn: Arc<Mutex<()>>,
}

impl std::fmt::Debug for Wire {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Wire of rank {}", self.rank)
    }
}

impl Wire {
    fn tell(&self, what: impl Fn(&Arrivals)) {
        let _turn = self.turn.lock().unwrap();
        let all = self.others.get().unwrap().iter().enumerate();
        all.filter(|(rank, _)| *rank != self.rank).for_each(|(_, other)| what(other));
    }
}

impl Link for Wire {
    fn send(&self, to: usize, circle: usize, number: usize, call: &str, bytes: &[u8]) {
        self.others.get().unwrap()[to].rows(self.rank, circle, number, call.to_owned(), bytes.to_vec());
    }
    fn fail(&self, why: &str) {
        self.tell(|other| other.failed(&format!("rank {} failed: {why}", self.rank)));
    }
    fn leave(&self) {
        self.tell(|other| other.left(self.rank));
    }
}

/// The ranks of a new mesh.
fn mesh(kind: Kind, shape: MeshShape) -> Vec<Axes<HostComm>> {
    match kind {
        Kind::Threads => HostComm::mesh(shape),
        Kind::Linked => {
            let (others, turn) = (Arc::new(OnceLock::new()), Arc::new(Mutex::new(())));
            let link = |rank| Arc::new(Wire { rank, others: others.clone(), turn: turn.clone() });
            let ranks = (0..shape.ranks()).map(|rank| HostComm::of_process(shape, rank, 1, link(rank)));
            let (axes, arrivals) = ranks.unzip();
            others.set(arrivals).unwrap();
            axes
        }
    }
}

/// Runs each rank on a thread that owns its communicator. `None` for a rank that panicked.
///
/// # Panics
/// If a rank does not return.
fn ranks<R: Send + 'static>(
    kind: Kind,
    size: usize,
    body: impl Fn(&Cpu, HostComm) -> R + Clone + Send + 'static,
) -> Vec<Option<R>> {
    let comms = match kind {
        Kind::Threads => HostComm::world(size),
        Kind::Linked => mesh(kind, MeshShape { dp: 1, ep: size }).into_iter().map(|axes| axes.all).collect(),
    };
    spawned(comms, body)
}

fn spawned<C: Send + 'static, R: Send + 'static>(
    comms: Vec<C>,
    body: impl Fn(&Cpu, C) -> R + Clone + Send + 'static,
) -> Vec<Option<R>> {
    let size = comms.len();
    let (done, results) = mpsc::channel();
    for (rank, comm) in comms.into_iter().enumerate() {
        let (body, done) = (body.clone(), done.clone());
        std::thread::spawn(move || {
            let cpu = Cpu::new(1).unwrap();
            let body = std::panic::AssertUnwindSafe(|| body(&cpu, comm));
            let _ = done.send((rank, std::panic::catch_unwind(body).ok()));
        });
    }
    let mut all: Vec<Option<R>> = (0..size).map(|_| None).collect();
    for _ in 0..size {
        let (rank, result) = results.recv_timeout(PATIENCE).expect("a rank waits for ever");
        all[rank] = result;
    }
    all
}

/// The same of a mesh.
fn mesh_ranks<R: Send + 'static>(
    kind: Kind,
    shape: MeshShape,
    body: impl Fn(&Cpu, Axes<HostComm>) -> R + Clone + Send + 'static,
) -> Vec<Option<R>> {
    spawned(mesh(kind, shape), body)
}

/// The rank, whatever the backend.
fn rank_of(comm: &HostComm) -> usize {
    Comm::<Cpu>::rank(comm)
}

fn barrier(comm: &HostComm) -> Result<()> {
    Comm::<Cpu>::barrier(comm)
}

fn why<T>(result: Result<T>) -> String {
    match result {
        Ok(_) => "no error".to_owned(),
        Err(e @ Error::Comm { .. }) => e.to_string(),
        Err(other) => format!("not a communication error: {other}"),
    }
}

/// Begins sums of these values, each with its parts, of which this rank's go to zeros.
fn begin(cpu: &Cpu, comm: &HostComm, of: &[(&[f32], &[Range<usize>])]) -> Result<Transfer<Cpu>> {
    let sum = |(values, parts): &(&[f32], &[Range<usize>])| {
        let into = cpu.zeros(parts[rank_of(comm)].len())?;
        Ok(TreeSum { values: cpu.upload(values)?, parts: parts.to_vec(), into })
    };
    comm.begin_reduce_scatter_tree(cpu, of.iter().map(sum).collect::<Result<_>>()?)
}

/// A small generator, so that ranks arrive in ever new orders.
fn scrambled(x: usize) -> usize {
    (x.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (x << 7)).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 40
}

/// Rows from rank `from` to rank `to` in this round, none among them.
fn rows_sent(round: usize, from: usize, to: usize) -> usize {
    scrambled(round * 64 + from * 8 + to) % 4
}

/// The byte that fills a row.
fn filling(round: usize, from: usize, to: usize, row: usize) -> u8 {
    scrambled(round * 4096 + from * 512 + to * 64 + row) as u8
}

/// One collective of each kind, checked against what every rank can work out alone.
fn one_round(cpu: &Cpu, comm: &HostComm, world: usize, round: usize) {
    const ROW: usize = 16;
    let me = rank_of(comm);
    for _ in 0..scrambled(round * 8 + me) % 3 {
        std::thread::yield_now();
    }
    let send: Vec<i32> = (0..world).map(|to| rows_sent(round, me, to) as i32).collect();
    let counts = comm.counts(cpu, &cpu.upload(&send).unwrap()).unwrap();
    let recv: Vec<usize> = (0..world).map(|from| rows_sent(round, from, me)).collect();
    let lines = || (0..world).flat_map(|from| (0..world).map(move |to| rows_sent(round, from, to) as i32));
    assert_eq!(counts.as_slice(), lines().collect::<Vec<_>>());
    // Two counts for each rank.
    let both: Vec<i32> = send.iter().flat_map(|&n| [n, -n]).collect();
    let counts = comm.counts(cpu, &cpu.upload(&both).unwrap()).unwrap();
    assert_eq!(counts.as_slice(), lines().flat_map(|n| [n, -n]).collect::<Vec<_>>());

    let send: Vec<usize> = send.into_iter().map(|n| n as usize).collect();
    let rows_between = |from: usize, to: usize| {
        (0..rows_sent(round, from, to)).flat_map(move |row| [filling(round, from, to, row); ROW])
    };
    let bytes: Vec<u8> = (0..world).flat_map(|to| rows_between(me, to)).collect();
    let want: Vec<u8> = (0..world).flat_map(|from| rows_between(from, me)).collect();
    // Bytes behind the rows are not sent, and stay.
    let (send_more, room) = (round % 3, round % 5);
    let rows = cpu.upload(&[bytes, vec![91; send_more]].concat()).unwrap();
    let into = cpu.upload(&vec![92u8; want.len() + room]).unwrap();
    let address = Cpu::buffer_id(&into);
    let transfer = comm.begin_all_to_all_v(cpu, rows, ROW, &send, &recv, into).unwrap();
    let got = transfer.wait(cpu).unwrap();
    assert_eq!(Cpu::buffer_id(&got), address, "the rows lie in the caller's buffer");
    assert_eq!(got.as_slice(), [want, vec![92; room]].concat());

    let value = |rank: usize, i: usize| (1.0f32 + i as f32).powi(rank as i32 * 5 - 7) * (round as f32 + 0.3);
    let len = scrambled(round) % 5;
    let of = |rank: usize| (0..len).map(move |i| value(rank, i));
    let mine: Vec<f32> = of(me).collect();
    let parts = parts_of(len, world, round);
    let into = cpu.zeros::<f32>(parts[me].len()).unwrap();
    let address = Cpu::buffer_id(&into);
    let sum = TreeSum { values: cpu.upload(&mine).unwrap(), parts: parts.clone(), into };
    let [sums]: [Buf<f32>; 1] =
        comm.begin_reduce_scatter_tree(cpu, vec![sum]).unwrap().wait(cpu).unwrap().try_into().unwrap();
    assert_eq!(Cpu::buffer_id(&sums), address, "the sums lie in the caller's buffer");
    for (i, got) in parts[me].clone().zip(sums.as_slice()) {
        assert_eq!(got.to_bits(), tree((0..world).map(|rank| value(rank, i)).collect()).to_bits());
    }
    // And back, by bytes, in two ranges a rank: what the others have, laid behind each other with a byte between that is nobody's.
    let twice = |rank: usize| {
        let part = &parts[rank];
        let second = len * 4 + 1;
        vec![part.start * 4..part.end * 4, second + part.start * 4..second + part.end * 4]
    };
    let both: Vec<u8> =
        [sums.as_slice(), sums.as_slice()].concat().iter().flat_map(|x| x.to_le_bytes()).collect();
    let all = cpu.upload(&vec![0xAB; len * 8 + 1]).unwrap();
    let address = Cpu::buffer_id(&all);
    let ranges: Vec<_> = (0..world).map(twice).collect();
    let together = comm.begin_all_gather_parts(cpu, cpu.upload(&both).unwrap(), &ranges, all).unwrap();
    // Others may be under way beside it, and be dropped.
    let into = cpu.zeros(len * 8 + 1).unwrap();
    drop(comm.begin_all_gather_parts(cpu, cpu.upload(&both).unwrap(), &ranges, into).unwrap());
    let all = together.wait(cpu).unwrap();
    assert_eq!(Cpu::buffer_id(&all), address, "the parts lie in the caller's buffer");
    let sum = |i| tree((0..world).map(|rank| value(rank, i)).collect());
    let once: Vec<u8> = (0..len).flat_map(|i| sum(i).to_le_bytes()).collect();
    assert_eq!(all.as_slice(), [&once[..], &[0xAB], &once].concat());
    let gathered = comm.all_gather(cpu, &cpu.upload(&mine).unwrap()).unwrap();
    assert_eq!(gathered.as_slice(), (0..world).flat_map(of).collect::<Vec<_>>());
    // Numbers that F32 has no room for, and a NaN that says who sent it.
    let wide = |rank: usize| {
        let nan = f64::from_bits(0x7FF8_0000_0000_0001 + rank as u64);
        (0..len).map(move |i| f64::from(value(rank, i)).sqrt()).chain([nan])
    };
    let gathered = comm.all_gather_f64(cpu, &cpu.upload(&wide(me).collect::<Vec<_>>()).unwrap()).unwrap();
    let got: Vec<u64> = gathered.as_slice().iter().map(|v| v.to_bits()).collect();
    assert_eq!(got, (0..world).flat_map(wide).map(f64::to_bits).collect::<Vec<_>>());
    barrier(comm).unwrap();
}

/// ((0+1)+(2+3))…, a last one alone as it is.
fn tree(mut level: Vec<f32>) -> f32 {
    while level.len() > 1 {
        level = level.chunks(2).map(|pair| pair.iter().skip(1).fold(pair[0], |a, b| a + b)).collect();
    }
    level[0]
}

fn every_collective_is_right_over_many_rounds_and_orders_of_arrival(kind: Kind) {
    for world in [1, 2, 3, 4, 7] {
        let done = ranks(kind, world, move |cpu, comm| {
            (0..300).for_each(|round| one_round(cpu, &comm, world, round))
        });
        assert!(done.into_iter().all(|rank| rank.is_some()), "a rank of {world} saw something else");
    }
}

fn a_reduction_gives_each_rank_the_bits_of_the_tree_not_of_a_chain(kind: Kind) {
    let terms = [16_777_216.0f32, 1.0, 1.0, 1.0];
    let all = ranks(kind, 4, move |cpu, comm| {
        let x = [terms[rank_of(&comm)]; 4];
        let sums = begin(cpu, &comm, &[(&x, &[3..4, 0..1, 1..2, 2..3])]).unwrap().wait(cpu).unwrap();
        sums[0].as_slice()[0]
    });
    assert_eq!(all, [Some(16_777_218.0); 4]);
    assert_eq!(terms.iter().sum::<f32>(), 16_777_216.0);
}

/// Two transfers under way, of several sums each, with other collectives between, waited for in either order.
fn transfers_under_way_are_each_their_own(kind: Kind) {
    for world in [1, 2, 3, 4] {
        let done = ranks(kind, world, move |cpu, comm| {
            let me = rank_of(&comm);
            let value = |rank: usize, i: usize| 0.1 + (rank * 7 + i) as f32;
            for round in 0..100 {
                let lens = [0, 1, 2, 3].map(|i| scrambled(round * 4 + i) % 6);
                let mine: Vec<f32> = (0..6).map(|i| value(me, i)).collect();
                let parts = lens.map(|len| parts_of(len, world, round));
                let of = |i: usize| (&mine[..lens[i]], &parts[i][..]);
                let first = begin(cpu, &comm, &[of(0), of(1)]).unwrap();
                one_round(cpu, &comm, world, round);
                let second = begin(cpu, &comm, &[of(2), of(3)]).unwrap();
                // Which is waited for first is each rank's own affair.
                let (first, second) = if scrambled(round + me).is_multiple_of(2) {
                    let first = first.wait(cpu).unwrap();
                    barrier(&comm).unwrap();
                    (first, second.wait(cpu).unwrap())
                } else {
                    let second = second.wait(cpu).unwrap();
                    barrier(&comm).unwrap();
                    (first.wait(cpu).unwrap(), second)
                };
                for (sums, parts) in first.iter().chain(&second).zip(&parts) {
                    let want =
                        parts[me].clone().map(|i| tree((0..world).map(|rank| value(rank, i)).collect()));
                    assert_eq!(sums.as_slice(), want.collect::<Vec<_>>(), "round {round}");
                }
            }
        });
        assert!(done.into_iter().all(|rank| rank.is_some()), "a rank of {world} saw something else");
    }
}

/// A row of one byte to each rank, and one from each.
fn begin_rows(cpu: &Cpu, comm: &HostComm, world: usize, row: u8) -> Result<Transfer<Cpu, Buf<u8>>> {
    let (each, into) = (vec![1; world], cpu.zeros(world).unwrap());
    comm.begin_all_to_all_v(cpu, cpu.upload(&vec![row; world]).unwrap(), 1, &each, &each, into)
}

/// The others come only after three transfers have begun.
fn to_begin_a_transfer_waits_for_nobody(kind: Kind) {
    let begun = Arc::new(std::sync::Barrier::new(3));
    let all = ranks(kind, 3, move |cpu, comm| {
        if rank_of(&comm) > 0 {
            begun.wait();
        }
        let two = [[1.0], [2.0]].map(|x| begin(cpu, &comm, &[(&x, &[0..0, 0..1, 0..0])]).unwrap());
        let rows = begin_rows(cpu, &comm, 3, rank_of(&comm) as u8).unwrap();
        if rank_of(&comm) == 0 {
            begun.wait();
        }
        let rows = rows.wait(cpu).unwrap().as_slice().to_vec();
        (rows, two.map(|transfer| transfer.wait(cpu).unwrap()[0].as_slice().to_vec()))
    });
    let sums = [[vec![], vec![]], [vec![3.0], vec![6.0]], [vec![], vec![]]];
    assert_eq!(all, sums.map(|sums| Some((vec![0, 1, 2], sums))));
}

fn an_abort_reaches_a_transfer_under_way(kind: Kind) {
    let begun = Arc::new(std::sync::Barrier::new(2));
    let all = ranks(kind, 2, move |cpu, comm| {
        let of: (&[f32], &[Range<usize>]) = (&[1.0], &[0..1, 0..0]);
        let complete = begin(cpu, &comm, &[of]).unwrap();
        barrier(&comm).unwrap();
        if rank_of(&comm) == 1 {
            begun.wait();
            Comm::<Cpu>::abort(&comm, "the disk is full");
            return (why(complete.wait(cpu)), why(begin(cpu, &comm, &[of])));
        }
        let pending = begin(cpu, &comm, &[of]).unwrap();
        begun.wait();
        let error = why(pending.wait(cpu));
        // What all ranks gave before is there.
        (why(complete.wait(cpu)), error)
    });
    for (rank, got) in all.into_iter().enumerate() {
        let (complete, pending) = got.unwrap();
        assert_eq!(complete, "no error");
        assert_eq!(pending, format!("rank {rank}: reduce_scatter_tree: rank 1 failed: the disk is full"));
    }
}

fn a_rank_that_leaves_fails_transfers_that_need_it(kind: Kind) {
    let all = ranks(kind, 2, |cpu, comm| {
        let of: (&[f32], &[Range<usize>]) = (&[1.0], &[0..1, 0..0]);
        let first = begin(cpu, &comm, &[of]).unwrap();
        if rank_of(&comm) == 1 {
            return None;
        }
        let second = begin(cpu, &comm, &[of]).unwrap();
        Some((why(second.wait(cpu)), why(first.wait(cpu))))
    });
    let (second, first) = all[0].clone().unwrap().unwrap();
    assert!(second.contains("rank 1 has left"), "{second}");
    assert_eq!(first, "no error");
}

fn a_transfer_that_is_dropped_keeps_nobody_from_going_on(kind: Kind) {
    let all = ranks(kind, 3, |cpu, comm| {
        let mut sums = Vec::new();
        for round in 0..50 {
            let x = [round as f32];
            let transfer = begin(cpu, &comm, &[(&x, &[0..1, 0..1, 0..1])]).unwrap();
            let rows = begin_rows(cpu, &comm, 3, round as u8).unwrap();
            if rank_of(&comm) == round % 3 {
                drop((transfer, rows));
            } else {
                assert_eq!(rows.wait(cpu).unwrap().as_slice(), [round as u8; 3]);
                sums.push((round, transfer.wait(cpu).unwrap()[0].as_slice()[0]));
            }
        }
        barrier(&comm).unwrap();
        sums
    });
    for sums in all {
        assert!(sums.unwrap().iter().all(|(round, sum)| *sum == 3.0 * *round as f32));
    }
}

fn a_panic_fails_every_other_rank_now_and_later(kind: Kind) {
    let here = Arc::new(std::sync::Barrier::new(3));
    let all = ranks(kind, 3, move |_, comm| {
        barrier(&comm).unwrap();
        // A failure overtakes what is under way: each rank has its answer before rank 1 is gone.
        here.wait();
        if rank_of(&comm) == 1 {
            std::panic::resume_unwind(Box::new("silently"));
        }
        (why(barrier(&comm)), why(barrier(&comm)))
    });
    assert!(all[1].is_none());
    for rank in [0, 2] {
        let (first, later) = all[rank].as_ref().unwrap();
        assert_eq!(first, &format!("rank {rank}: barrier: rank 1 failed: its thread panicked"));
        assert_eq!(later, first);
    }
}

fn an_abort_reaches_ranks_that_wait_and_ranks_that_come_later(kind: Kind) {
    // Ranks 0 and 1 come when they will; rank 3 once the abort is over.
    let over = Arc::new(std::sync::Barrier::new(2));
    let all = ranks(kind, 4, move |cpu, comm| {
        if rank_of(&comm) == 2 {
            Comm::<Cpu>::abort(&comm, "the disk is full");
            Comm::<Cpu>::abort(&comm, "a second reason, which nobody hears");
            over.wait();
            return why(barrier(&comm));
        }
        if rank_of(&comm) == 3 {
            over.wait();
        }
        why(comm.all_gather(cpu, &cpu.zeros(3).unwrap()))
    });
    for (rank, got) in all.into_iter().enumerate() {
        let call = if rank == 2 { "barrier" } else { "all_gather" };
        assert_eq!(got.unwrap(), format!("rank {rank}: {call}: rank 2 failed: the disk is full"));
    }
}

fn a_rank_that_leaves_is_missed_only_by_calls_that_need_it(kind: Kind) {
    for _ in 0..200 {
        let all = ranks(kind, 3, |cpu, comm| {
            let me = rank_of(&comm);
            let sum = comm.all_gather(cpu, &cpu.upload(&[me as f32]).unwrap());
            // What rank 1 gave before it left counts, however late the others look at it.
            assert_eq!(sum.unwrap().as_slice(), [0.0, 1.0, 2.0]);
            if me == 1 { None } else { Some((why(barrier(&comm)), why(barrier(&comm)))) }
        });
        assert_eq!(all[1], Some(None));
        for rank in [0, 2] {
            let (first, later) = all[rank].clone().unwrap().unwrap();
            assert!(first.starts_with(&format!("rank {rank}: barrier: ")), "{first}");
            assert!(first.contains("rank 1 has left"), "{first}");
            assert!(later.contains("rank 1 has left"), "{later}");
        }
    }
}

/// Collectives along all axes in the same order, each with its own ranks; those of one axis go on while others wait along another.
fn each_axis_of_a_mesh_has_its_own_ranks(kind: Kind) {
    for shape in [(1, 1), (1, 3), (3, 1), (2, 2), (2, 3), (4, 2)].map(|(dp, ep)| MeshShape { dp, ep }) {
        let done = mesh_ranks(kind, shape, move |cpu, axes| {
            let (d, e) = shape.place(rank_of(&axes.all));
            assert_eq!((rank_of(&axes.dp), rank_of(&axes.ep)), (d, e));
            let mesh = axes.mesh::<Cpu>();
            assert_eq!(mesh.shape(), shape);
            for round in 0..100 {
                let mine = cpu.upload(&[(10 * d + e) as f32]).unwrap();
                let of = |comm: &dyn Comm<Cpu>| comm.all_gather(cpu, &mine).unwrap().as_slice().to_vec();
                let number = |d: usize, e: usize| (10 * d + e) as f32;
                assert_eq!(of(mesh.ep), (0..shape.ep).map(|e| number(d, e)).collect::<Vec<_>>());
                // Replicas are out of step with each other here.
                one_round(cpu, &axes.ep, shape.ep, round + d);
                assert_eq!(of(mesh.dp), (0..shape.dp).map(|d| number(d, e)).collect::<Vec<_>>());
                let everybody = (0..shape.dp).flat_map(|d| (0..shape.ep).map(move |e| number(d, e)));
                assert_eq!(of(mesh.all), everybody.collect::<Vec<_>>());
            }
        });
        assert!(done.iter().all(Option::is_some), "{shape}");
    }
}

/// Ranks that wait along one axis are told of a failure along another.
fn a_failure_along_one_axis_fails_all_ranks(kind: Kind) {
    let shape = MeshShape { dp: 2, ep: 2 };
    let failing: [fn(&Axes<HostComm>); 3] = [
        |axes| Comm::<Cpu>::abort(&axes.all, "the cable is unplugged"),
        |axes| Comm::<Cpu>::abort(&axes.dp, "the cable is unplugged"),
        |_| panic!("a planned panic"),
    ];
    for fail in failing {
        let all = mesh_ranks(kind, shape, move |_, axes| match rank_of(&axes.all) {
            0 => {
                fail(&axes);
                String::new()
            }
            // Of its axis, which needs rank 0; and one that does not, but for the next call.
            1 => why(barrier(&axes.ep)),
            2 => why(barrier(&axes.dp)),
            _ => why(barrier(&axes.all)),
        });
        for (rank, got) in all.into_iter().enumerate().skip(1) {
            let got = got.unwrap();
            assert!(got.contains("rank 0 failed: "), "rank {rank}: {got}");
        }
    }
}

fn different_collectives_at_the_same_time_fail_all_ranks(kind: Kind) {
    let all = ranks(kind, 3, |cpu, comm| match rank_of(&comm) {
        0 => why(barrier(&comm)),
        _ => why(comm.all_gather(cpu, &cpu.zeros(1).unwrap())),
    });
    for (rank, got) in all.into_iter().enumerate() {
        let got = got.unwrap();
        assert!(got.starts_with(&format!("rank {rank}: ")), "{got}");
        assert!(got.contains("at the same time"), "{got}");
    }
}

fn contributions_of_different_lengths_fail_all_ranks(kind: Kind) {
    let all = ranks(kind, 3, |cpu, comm| {
        let x = cpu.zeros::<f32>(if rank_of(&comm) == 1 { 4 } else { 5 }).unwrap();
        (why(comm.all_gather(cpu, &x)), why(barrier(&comm)))
    });
    for got in all {
        let (first, later) = got.unwrap();
        assert!(first.contains("values"), "{first}");
        assert!(later.contains("failed: all_gather: "), "{later}");
    }
}

fn parts_that_do_not_fit_fail_all_ranks(kind: Kind) {
    let sum_with = |parts: &[Range<usize>], room: usize, world: usize| {
        let parts = parts.to_vec();
        let all = ranks(kind, world, move |cpu, comm| {
            let (values, into) = (cpu.zeros(4).unwrap(), cpu.zeros(room).unwrap());
            let sum = TreeSum { values, parts: parts.clone(), into };
            (why(comm.begin_reduce_scatter_tree(cpu, vec![sum])), why(barrier(&comm)))
        });
        for got in all {
            let (first, later) = got.unwrap();
            assert!(first.contains("reduce_scatter_tree"), "{first}");
            assert!(later.contains("reduce_scatter_tree: "), "{later}");
        }
    };
    // Past the end; not as long as what it goes to; of other ranks than there are.
    sum_with(&[0..2, 2..5], 2, 2);
    sum_with(&[0..2, 2..4], 3, 2);
    sum_with(&[0..2, 2..4], 2, 3);
    let all = ranks(kind, 2, |cpu, comm| {
        // Rank 1 takes its part for one byte longer than rank 0 does.
        let parts = [0..1, 1..2 + rank_of(&comm)].map(|part| Vec::from([part]));
        let mine = cpu.upload(&vec![7u8; 1 + rank_of(&comm)]).unwrap();
        let begun = comm.begin_all_gather_parts(cpu, mine, &parts, cpu.zeros(3).unwrap());
        why(begun.and_then(|parts| parts.wait(cpu)))
    });
    let [first, _] = all.try_into().unwrap();
    assert!(first.unwrap().contains("rank 1 sent 2 bytes, and its part has 1"));
}

/// Parts of so many values, some of them empty, in an order that is not that of the ranks.
fn parts_of(len: usize, world: usize, round: usize) -> Vec<Range<usize>> {
    let cut = |i: usize| i * len / world;
    (0..world).map(|rank| (rank + round) % world).map(|i| cut(i)..cut(i + 1)).collect()
}

fn counts_need_as_many_numbers_for_each_rank(kind: Kind) {
    for len in [1, 3] {
        let all = ranks(kind, 2, move |cpu, comm| why(comm.counts(cpu, &cpu.zeros(len).unwrap())));
        for got in all {
            assert!(got.unwrap().contains(&format!("{len} counts for 2 ranks")));
        }
    }
}

/// The all-to-all that a rank makes instead of a right one.
type Mistake = fn(&Cpu, &HostComm) -> Result<()>;

/// Rows of 16 bytes from this many bytes to as many.
fn all_to_all(cpu: &Cpu, comm: &HostComm, bytes: [usize; 2], send: &[usize], recv: &[usize]) -> Result<()> {
    let [rows, into] = bytes.map(|bytes| cpu.zeros(bytes).unwrap());
    comm.begin_all_to_all_v(cpu, rows, 16, send, recv, into)?.wait(cpu).map(drop)
}

fn a_mistake_in_the_arguments_of_one_rank_fails_all_ranks(kind: Kind) {
    let mistakes: [(&str, Mistake); 6] = [
        ("1 and 2 counts for 2 ranks", |cpu, comm| all_to_all(cpu, comm, [16, 32], &[1], &[1, 1])),
        ("17 bytes given are fewer than [1, 1] rows of 16", |cpu, comm| {
            all_to_all(cpu, comm, [17, 32], &[1, 1], &[1, 1])
        }),
        ("[1, 1] rows of 16 bytes are to come, and there is room for 31 bytes", |cpu, comm| {
            all_to_all(cpu, comm, [32, 31], &[1, 1], &[1, 1])
        }),
        ("32 bytes given are fewer than [1, 18446744073709551615] rows of 16", |cpu, comm| {
            all_to_all(cpu, comm, [32, 32], &[1, usize::MAX], &[1, 1])
        }),
        (
            "[1, 18446744073709551615] rows of 16 bytes are to come, and there is room for 32 bytes",
            |cpu, comm| all_to_all(cpu, comm, [32, 32], &[1, 1], &[1, usize::MAX]),
        ),
        ("2 rows of 16 bytes expected from rank 1, 16 bytes came", |cpu, comm| {
            all_to_all(cpu, comm, [32, 64], &[1, 1], &[1, 2])
        }),
    ];
    for (message, mistake) in mistakes {
        let all = ranks(kind, 2, move |cpu, comm| {
            if rank_of(&comm) == 0 {
                return why(mistake(cpu, &comm));
            }
            let right = all_to_all(cpu, &comm, [32, 32], &[1, 1], &[1, 1]);
            // The mistake may show only in what rank 0 makes of the answers: then the next call fails.
            why(right.and_then(|_| barrier(&comm)))
        });
        let of = |rank: usize| all[rank].clone().unwrap();
        assert_eq!(of(0), format!("rank 0: all_to_all_v: {message}"));
        assert!(of(1).ends_with(&format!("rank 0 failed: all_to_all_v: {message}")), "{}", of(1));
    }
}

/// Makes tests of functions: of each kind one.
macro_rules! of_both_kinds {
    ($($name:ident,)+) => {
        mod threads {
            $(#[test] fn $name() { super::$name(super::Kind::Threads) })+
        }
        mod linked {
            $(#[test] fn $name() { super::$name(super::Kind::Linked) })+
        }
    };
}

of_both_kinds! {
    every_collective_is_right_over_many_rounds_and_orders_of_arrival,
    a_reduction_gives_each_rank_the_bits_of_the_tree_not_of_a_chain,
    transfers_under_way_are_each_their_own,
    to_begin_a_transfer_waits_for_nobody,
    an_abort_reaches_a_transfer_under_way,
    a_rank_that_leaves_fails_transfers_that_need_it,
    a_transfer_that_is_dropped_keeps_nobody_from_going_on,
    a_panic_fails_every_other_rank_now_and_later,
    an_abort_reaches_ranks_that_wait_and_ranks_that_come_later,
    a_rank_that_leaves_is_missed_only_by_calls_that_need_it,
    each_axis_of_a_mesh_has_its_own_ranks,
    a_failure_along_one_axis_fails_all_ranks,
    different_collectives_at_the_same_time_fail_all_ranks,
    contributions_of_different_lengths_fail_all_ranks,
    parts_that_do_not_fit_fail_all_ranks,
    counts_need_as_many_numbers_for_each_rank,
    a_mistake_in_the_arguments_of_one_rank_fails_all_ranks,
}
