//! Collectives of ranks on GPUs, each rank a thread, against those of the CPU: the same bits. With one GPU there is one rank, with two there are
//! two, and a mesh of each shape.

use crate::gpu;

use nibble_core::{Axes, Backend, Comm, Error, Kernels, MeshShape, Peers, Result, TreeSum};
use nibble_cpu::{Cpu, HostComm};
use nibble_cuda::comm::{Sums, nccl_version};
use nibble_cuda::env::OF_NCCL;
use nibble_cuda::{Cuda, NcclComm};
use nibble_testkit::Dice;
use std::ops::Range;
use std::time::Duration;

/// Longer than any message here takes.
const PATIENCE: Duration = Duration::from_secs(120);

/// GPUs for ranks, at most four; none where there are none, or no NCCL. The test is begun again where what NCCL reads is not set: other tests of this
/// process read the environment too.
fn gpus(test: &str) -> Option<Vec<usize>> {
    gpu::device(test)?;
    if let Err(why) = nccl_version() {
        nibble_testkit::skip(&format!("{test}: {why}"));
        return None;
    }
    if OF_NCCL.iter().any(|(name, _)| std::env::var_os(name).is_none()) {
        let mut again = std::process::Command::new(std::env::current_exe().unwrap());
        let name = format!("nccl::{test}");
        let done = again.args(["--exact", "--nocapture", &name]).envs(OF_NCCL).status().unwrap();
        assert!(done.success(), "{test} with {OF_NCCL:?}");
        return None;
    }
    let all: Vec<usize> = nibble_cuda::probe().usable().map(|gpu| gpu.ordinal).collect();
    // Ranks are a power of two, as everywhere.
    let ranks = (1..=all.len().min(4)).rev().find(|n| n.is_power_of_two())?;
    Some(all[..ranks].to_vec())
}

/// Meshes of so many ranks, with every shape.
fn shapes(ranks: usize) -> Vec<MeshShape> {
    let mut shapes = vec![MeshShape::ONE];
    let mut n = 2;
    while n <= ranks {
        shapes.extend((0..=n.ilog2()).map(|log| MeshShape { dp: 1 << log, ep: n >> log }));
        n *= 2;
    }
    shapes
}

/// What `work` gives on every rank.
fn on_ranks<T: Send>(shape: MeshShape, work: impl Fn(&Axes<HostComm>) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let run = |axes| {
            scope.spawn(|| {
                let axes = axes;
                work(&axes)
            })
        };
        let ranks: Vec<_> = HostComm::mesh(shape).into_iter().map(run).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Cuts `len` into a part for each rank, of random sizes, some of them empty.
fn cut(dice: &mut Dice, len: usize, ranks: usize) -> Vec<Range<usize>> {
    let mut ends: Vec<usize> = (1..ranks).map(|_| dice.below(len + 1)).collect();
    ends.push(len);
    ends.sort_unstable();
    let mut start = 0;
    ends.into_iter().map(|end| std::mem::replace(&mut start, end)..end).collect()
}

/// Everything that a communicator of one axis brings, as words.
fn collectives<B: Kernels>(b: &B, comm: &dyn Comm<B>, seed: u64) -> Result<Vec<Vec<u32>>> {
    let (rank, world) = (comm.rank(), comm.world());
    // What all ranks know, and what is this one's.
    let (mut all, mut own) = (Dice::new(seed), Dice::new(seed ^ (1 + rank as u64) << 32));
    let mut brought: Vec<Vec<u32>> = Vec::new();
    let words = |bytes: &[u8]| bytes.iter().map(|byte| u32::from(*byte)).collect::<Vec<_>>();

    let counts: Vec<i32> = (0..3 * world).map(|_| own.below(1 << 20) as i32).collect();
    let counts = b.download(&comm.counts(b, &b.upload(&counts)?)?)?;
    brought.push(counts.iter().map(|n| *n as u32).collect());

    for row_bytes in [1usize, 33, 1024] {
        let rows: Vec<Vec<usize>> = (0..world).map(|_| (0..world).map(|_| all.below(40)).collect()).collect();
        let to = &rows[rank];
        let from: Vec<usize> = rows.iter().map(|of| of[rank]).collect();
        // Longer than what is sent and what comes.
        let sent: Vec<u8> =
            (0..(to.iter().sum::<usize>() + 3) * row_bytes).map(|_| own.below(256) as u8).collect();
        let into = b.upload(&vec![0xaau8; (from.iter().sum::<usize>() + 5) * row_bytes])?;
        let transfer = comm.begin_all_to_all_v(b, b.upload(&sent)?, row_bytes, to, &from, into)?;
        // The device goes on beside it.
        brought.push(words(&b.download(&b.upload(&sent)?)?));
        brought.push(words(&b.download(&transfer.wait(b)?)?));
    }

    // Several under way at once, beside other collectives.
    let mut sums = |dice: &mut Dice, lens: &[usize]| -> Result<_> {
        let sum = |len: &usize| -> Result<TreeSum<B>> {
            let parts = cut(&mut all, *len, world);
            let values: Vec<f32> = (0..*len).map(|_| dice.below(1 << 24) as f32 * 1e-3 - 7.0).collect();
            let into = b.upload(&vec![f32::NAN; parts[rank].len()])?;
            Ok(TreeSum { values: b.upload(&values)?, parts, into })
        };
        comm.begin_reduce_scatter_tree(b, lens.iter().map(sum).collect::<Result<_>>()?)
    };
    let first = sums(&mut own, &[1000, 1, 0, 70_001])?;
    let second = sums(&mut own, &[4096])?;
    let third = sums(&mut own, &[77])?;
    let nats: Vec<f64> = (0..9).map(|_| own.below(1 << 30) as f64 / 3.0).collect();
    let nats = b.download(&comm.all_gather_f64(b, &b.upload(&nats)?)?)?;
    brought.push(nats.iter().flat_map(|x| [x.to_bits() as u32, (x.to_bits() >> 32) as u32]).collect());
    drop(third);
    for transfer in [second, first] {
        for sum in transfer.wait(b)? {
            brought.push(b.download(&sum)?.iter().map(|x| x.to_bits()).collect());
        }
    }
    let values: Vec<f32> = (0..17).map(|_| own.below(1 << 24) as f32).collect();
    let values = b.download(&comm.all_gather(b, &b.upload(&values)?)?)?;
    brought.push(values.iter().map(|x| x.to_bits()).collect());

    // Two ranges a rank, with bytes of nobody between.
    let parts: Vec<Vec<Range<usize>>> =
        (0..world).map(|p| vec![100 * p + 1..100 * p + 40, 100 * p + 60..100 * p + 60 + p]).collect();
    let mine: Vec<u8> = (0..39 + rank).map(|_| own.below(256) as u8).collect();
    let into = b.upload(&vec![0x55u8; 100 * world])?;
    let together = comm.begin_all_gather_parts(b, b.upload(&mine)?, &parts, into)?;
    // Another beside it, which nobody waits for.
    let into = b.alloc(100 * world)?;
    drop(comm.begin_all_gather_parts(b, b.upload(&mine)?, &parts, into)?);
    brought.push(words(&b.download(&together.wait(b)?)?));
    comm.barrier()?;
    comm.check()?;
    Ok(brought)
}

/// Of all three axes, twice.
fn along_axes<B: Kernels, C: Comm<B>>(b: &B, axes: &Axes<C>) -> Vec<Vec<u32>> {
    let comms: [&dyn Comm<B>; 3] = [&axes.all, &axes.ep, &axes.dp];
    let each = (0..2u64)
        .flat_map(|again| comms.iter().zip([3u64, 5, 8]).map(move |(comm, axis)| (comm, axis + again)));
    each.flat_map(|(comm, seed)| collectives(b, *comm, seed).unwrap()).collect()
}

#[test]
fn messages_bring_the_bits_of_the_cpu() {
    let Some(gpus) = gpus("messages_bring_the_bits_of_the_cpu") else { return };
    for shape in shapes(gpus.len()) {
        let expected = on_ranks(shape, |axes| along_axes(&Cpu::new(1).unwrap(), axes));
        let got = on_ranks(shape, |axes| {
            let cuda = Cuda::new(gpus[Comm::<Cpu>::rank(&axes.all)]).unwrap();
            let axes = NcclComm::mesh(&cuda, shape, axes, (PATIENCE, Sums::Tree)).unwrap();
            let brought = along_axes(&cuda, &axes);
            axes.all.leave().unwrap();
            brought
        });
        assert!(expected == got, "a mesh of {shape}");
        eprintln!("a mesh of {shape}: {} results a rank", expected[0].len());
    }
}

/// Sums of whole numbers, which any order of adding gives, of a communicator's ranks: twice, with what is under way when the second begins.
fn whole_sums<B: Kernels>(b: &B, comm: &dyn Comm<B>) -> Result<Vec<Vec<f32>>> {
    let (mut all, mut own) = (Dice::new(11), Dice::new(12 + comm.rank() as u64));
    let mut sum = |len: usize| -> Result<TreeSum<B>> {
        let parts = cut(&mut all, len, comm.world());
        let values: Vec<f32> = (0..len).map(|_| own.below(1000) as f32).collect();
        let into = b.upload(&vec![f32::NAN; parts[comm.rank()].len()])?;
        Ok(TreeSum { values: b.upload(&values)?, parts, into })
    };
    let first = comm.begin_reduce_scatter_tree(b, vec![sum(1000)?, sum(0)?, sum(70_001)?])?;
    let second = comm.begin_reduce_scatter_tree(b, vec![sum(5)?])?;
    let (first, second) = (first.wait(b)?, second.wait(b)?);
    first.iter().chain(&second).map(|sum| b.download(sum)).collect()
}

#[test]
fn sums_of_the_library_are_those_of_the_tree_where_the_order_does_not_matter() {
    let Some(gpus) = gpus("sums_of_the_library_are_those_of_the_tree_where_the_order_does_not_matter") else {
        return;
    };
    for shape in shapes(gpus.len()) {
        let of_axes = |sums: Sums| {
            on_ranks(shape, |axes| {
                let cuda = Cuda::new(gpus[Comm::<Cpu>::rank(&axes.all)]).unwrap();
                let axes = NcclComm::mesh(&cuda, shape, axes, (PATIENCE, sums)).unwrap();
                let comms: [&dyn Comm<Cuda>; 3] = [&axes.all, &axes.dp, &axes.ep];
                let brought = comms.map(|comm| whole_sums(&cuda, comm).unwrap());
                axes.all.leave().unwrap();
                brought
            })
        };
        assert!(of_axes(Sums::Tree) == of_axes(Sums::Nccl), "a mesh of {shape}");
    }
}

/// A message that is too large for its buffer fails the run and no more; what a rank does not send, others wait for no longer than they are told to.
#[test]
fn no_rank_waits_for_one_that_fails_or_does_not_come() {
    let Some(gpus) = gpus("no_rank_waits_for_one_that_fails_or_does_not_come") else { return };
    let shape = MeshShape { dp: 1, ep: gpus.len() };
    let wrong = on_ranks(shape, |axes| {
        let rank = Comm::<Cpu>::rank(&axes.all);
        let cuda = Cuda::new(gpus[rank]).unwrap();
        let axes = NcclComm::mesh(&cuda, shape, axes, (PATIENCE, Sums::Tree)).unwrap();
        let world = gpus.len();
        let (into, sent) = (cuda.zeros::<u8>(4).unwrap(), cuda.zeros::<u8>(4 * world).unwrap());
        // The last rank's own buffer is too small.
        let come = if rank + 1 == world { 5 } else { 1 };
        let rows = vec![1; world];
        let begun = axes.all.begin_all_to_all_v(&cuda, sent, 1, &rows, &vec![come; world], into);
        let read = begun.and_then(|rows| cuda.download(&rows.wait(&cuda)?));
        (read.and_then(|_| axes.all.check()), rank)
    });
    for (done, rank) in wrong {
        // The others may have gone on before they learn it: none of them waits.
        if rank + 1 == gpus.len() {
            let error = done.unwrap_err().to_string();
            assert!(error.contains("all_to_all_v") && error.contains("received"), "{error}");
        }
    }
    if gpus.len() < 2 {
        eprintln!("one GPU: nobody else to wait for");
        return;
    }
    let late = on_ranks(shape, |axes| {
        let rank = Comm::<Cpu>::rank(&axes.all);
        let cuda = Cuda::new(gpus[rank]).unwrap();
        // The deadline is of the first meeting too, which a slow machine may miss: that is told in the same words.
        let Ok(axes) = NcclComm::mesh(&cuda, shape, axes, (Duration::from_secs(2), Sums::Tree)) else {
            return Peers::check(&axes.all);
        };
        if rank == 0 {
            // Waits until it is told that the run has failed.
            while axes.all.check().is_ok() {
                std::thread::yield_now();
            }
            return Ok(());
        }
        let values = cuda.zeros::<f32>(8).unwrap();
        let all = axes.all.all_gather(&cuda, &values)?;
        cuda.download(&all)?;
        axes.all.check()
    });
    for done in &late[1..] {
        let error = done.as_ref().unwrap_err();
        assert!(matches!(error, Error::Comm { .. }), "{error}");
        assert!(error.to_string().contains("have not arrived within 2 s"), "{error}");
    }
}

/// Two ranks on one GPU are refused by its name.
#[test]
fn ranks_with_one_gpu_are_refused() {
    let Some(gpus) = gpus("ranks_with_one_gpu_are_refused") else { return };
    let shape = MeshShape { dp: 1, ep: 2 };
    for done in on_ranks(shape, |axes| {
        let cuda = Cuda::new(gpus[0]).unwrap();
        NcclComm::mesh(&cuda, shape, axes, (PATIENCE, Sums::Tree)).map(drop)
    }) {
        let error = done.unwrap_err().to_string();
        assert!(error.contains("ranks 0 and 1 compute on one GPU, GPU-"), "{error}");
    }
}
