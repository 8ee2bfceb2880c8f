//! Collectives through host memory. Ranks are threads of one process, or separate processes.
//!
//! A `World` stores each rank's data for a collective (its post), from which the other ranks of the communicator read. Ranks that are
//! threads share one world. A rank that is a process has its own world, and a [`Link`] sends its posts to the other worlds. Threads and
//! processes compute a collective with the same code and get the same bits.
//!
//! If a rank fails, panics or leaves, pending and later calls of all other ranks fail, along every axis, so that no rank waits forever.

mod world;

pub use world::{Arrivals, Link};

use nibble_core::{Axes, Backend, Comm, Error, MeshShape, Peers, Plain, Result, Transfer, TreeSum};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use world::{Post, Seat, Ticket};

/// A circle (a group of ranks that call collectives together), from the point of view of one member.
#[derive(Debug, Clone, Copy)]
struct CircleShape {
    /// Index of the circle.
    index: usize,
    /// This rank's number in the circle.
    rank: usize,
    /// Number of ranks in the circle.
    size: usize,
}

/// A rank's communicator through host memory, with ranks that are threads of this process or, by a [`Link`], ranks of other processes.
///
/// No rank waits forever. If a rank calls [`Comm::abort`], is dropped while its thread panics, or gets an error from a collective, all
/// pending and later calls of all ranks fail, along every axis of a mesh. Calls also fail on all ranks if a call needs a rank that was
/// dropped earlier. For this reason, the thread of a rank must own its communicators and transfers. An object that outlives the thread
/// cannot report that the thread has ended.
#[derive(Debug, Clone)]
pub struct HostComm {
    circle: CircleShape,
    seat: Arc<Seat>,
}

/// The circles of a mesh: all ranks; the ranks of each replica; and the ranks with the same experts.
fn circles(shape: MeshShape) -> Vec<Vec<usize>> {
    let all = (0..shape.ranks()).collect();
    let replicas = (0..shape.dp).map(|d| shape.replica(d));
    let same_experts = (0..shape.ep).map(|e| shape.same_experts(e));
    [all].into_iter().chain(replicas).chain(same_experts).collect()
}

/// A rank's communicators, one per circle of which the rank is a member.
fn axes(shape: MeshShape, seat: &Arc<Seat>) -> Axes<HostComm> {
    let MeshShape { dp, ep } = shape;
    let (d, e) = shape.place(seat.rank);
    let of = |index, (rank, size)| HostComm { circle: CircleShape { index, rank, size }, seat: seat.clone() };
    Axes { all: of(0, (seat.rank, shape.ranks())), ep: of(1 + d, (e, ep)), dp: of(1 + dp + e, (d, dp)) }
}

impl HostComm {
    /// Communicators of all ranks of a new world of threads, in rank order.
    pub fn world(size: usize) -> Vec<Self> {
        let seats = Seat::all(vec![(0..size).collect()], size);
        seats
            .map(|seat| Self { circle: CircleShape { index: 0, rank: seat.rank, size }, seat: seat.clone() })
            .collect()
    }

    /// Communicators of all ranks of a new mesh of threads, in rank order.
    pub fn mesh(shape: MeshShape) -> Vec<Axes<Self>> {
        Seat::all(circles(shape), shape.ranks()).map(|seat| axes(shape, &seat)).collect()
    }

    /// The communicators of this process's rank in a mesh with one rank per process, of which `host_ranks` run on this host, and the
    /// receiver of the other ranks' posts.
    pub fn of_process(
        shape: MeshShape,
        rank: usize,
        host_ranks: usize,
        link: Arc<dyn Link>,
    ) -> (Axes<Self>, Arrivals) {
        let (seat, arrivals) = Seat::linked(circles(shape), (rank, shape.ranks()), host_ranks, link);
        (axes(shape, &seat), arrivals)
    }

    fn error(&self, call: &'static str, why: String) -> Error {
        self.seat.error(call, why)
    }

    /// Runs a collective. An error fails the whole world, so that no other rank waits for this rank.
    fn collective<T>(&self, body: impl FnOnce() -> Result<T>) -> Result<T> {
        body().inspect_err(|e| match e {
            Error::Comm { call, why, .. } => self.fail(&format!("{call}: {why}")),
            other => self.fail(&other.to_string()),
        })
    }

    /// Posts this rank's data for a collective, without blocking.
    fn post(&self, call: &'static str, parts: Vec<Vec<u8>>) -> Result<Ticket> {
        Ticket::new(&self.seat, self.circle, call, parts)
    }

    /// Posts this rank's data and returns the posts of all ranks, in rank order, after all have arrived.
    fn exchange(&self, call: &'static str, parts: Vec<Vec<u8>>) -> Result<Vec<Arc<Post>>> {
        self.post(call, parts)?.read()
    }

    fn fail(&self, why: &str) {
        self.seat.fail(why);
    }

    /// The element of `parts` for this rank; `parts` must have one element per rank.
    fn part<'p, P>(&self, call: &'static str, parts: &'p [P]) -> Result<&'p P> {
        match parts.get(self.circle.rank) {
            Some(mine) if parts.len() == self.circle.size => Ok(mine),
            _ => Err(self.error(call, format!("{} parts for {} ranks", parts.len(), self.circle.size))),
        }
    }

    /// The bytes for each rank: that rank's parts of all sums, concatenated.
    fn cut<B: Backend>(&self, call: &'static str, b: &B, sums: &[TreeSum<B>]) -> Result<Vec<Vec<u8>>> {
        let mut cut = vec![Vec::new(); self.circle.size];
        for TreeSum { values, parts, into } in sums {
            let (mine, room, values) = (self.part(call, parts)?.len(), B::len(into), b.download(values)?);
            let of_ranks: Option<Vec<&[f32]>> = parts.iter().map(|part| values.get(part.clone())).collect();
            let Some(of_ranks) = of_ranks.filter(|_| mine == room) else {
                let why = format!("{parts:?} of {} values, {room} of them for this rank", values.len());
                return Err(self.error(call, why));
            };
            cut.iter_mut()
                .zip(of_ranks)
                .for_each(|(cut, of)| cut.extend_from_slice(bytemuck::cast_slice(of)));
        }
        Ok(cut)
    }

    /// Adds the data that all ranks sent to this rank into buffers of the expected lengths.
    fn sum<B: Backend>(&self, b: &B, ticket: Ticket, into: &mut [B::Buf<f32>]) -> Result<()> {
        let call = ticket.call;
        let posts = ticket.read()?;
        let bytes = size_of::<f32>() * into.iter().map(B::len).sum::<usize>();
        let level = posts.iter().map(|post| post.part(self.circle.rank));
        if let Some((rank, came)) = level.clone().enumerate().find(|(_, came)| came.len() != bytes) {
            let why = format!("rank {rank} sent {} bytes, {bytes} were expected", came.len());
            return Err(self.error(call, why));
        }
        let sums = tree_sum(level.map(bytemuck::pod_collect_to_vec).collect());
        let mut rest = sums.as_slice();
        for into in into {
            // The total length was checked above.
            let (now, later) = rest.split_at(B::len(into));
            b.write(into, 0, now)?;
            rest = later;
        }
        Ok(())
    }

    /// The rows that all ranks sent to this rank; `recv_rows` is the number of rows from each.
    fn rows(&self, ticket: Ticket, row_bytes: usize, recv_rows: &[usize]) -> Result<Vec<u8>> {
        let call = ticket.call;
        let posts = ticket.read()?;
        let parts = || posts.iter().map(|post| post.part(self.circle.rank));
        for (from, (part, rows)) in parts().zip(recv_rows).enumerate() {
            // The capacity for these bytes was checked earlier.
            if rows * row_bytes != part.len() {
                let came = part.len();
                let why =
                    format!("{rows} rows of {row_bytes} bytes expected from rank {from}, {came} bytes came");
                return Err(self.error(call, why));
            }
        }
        Ok(parts().collect::<Vec<_>>().concat())
    }

    /// Writes the data of every rank to the ranges of that rank's part.
    fn lay<B: Backend>(
        &self,
        b: &B,
        ticket: Ticket,
        parts: &[Vec<Range<usize>>],
        into: &mut B::Buf<u8>,
    ) -> Result<()> {
        let call = ticket.call;
        for (rank, (post, part)) in ticket.read()?.iter().zip(parts).enumerate() {
            let mut rest = post.part(self.circle.rank);
            if rest.len() != bytes_of(part) {
                let why =
                    format!("rank {rank} sent {} bytes, and its part has {}", rest.len(), bytes_of(part));
                return Err(self.error(call, why));
            }
            for range in part {
                // The total length was checked above.
                let (now, later) = rest.split_at(range.len());
                b.write(into, range.start, now)?;
                rest = later;
            }
        }
        Ok(())
    }

    /// The values of all ranks, in rank order; every rank has the same number of values.
    fn gather_values<B: Backend, T: Plain>(
        &self,
        call: &'static str,
        b: &B,
        values: &B::Buf<T>,
    ) -> Result<Vec<Vec<T>>> {
        let bytes = bytemuck::cast_slice(&b.download(values)?).to_vec();
        let posts = self.exchange(call, vec![bytes])?;
        let all: Vec<Vec<T>> =
            posts.iter().map(|p| bytemuck::pod_collect_to_vec(p.part(self.circle.rank))).collect();
        match all.iter().enumerate().find(|(_, v)| v.len() != all[self.circle.rank].len()) {
            Some((rank, v)) => {
                let why =
                    format!("rank {rank} sent {} values, this rank {}", v.len(), all[self.circle.rank].len());
                Err(self.error(call, why))
            }
            None => Ok(all),
        }
    }
}

impl Peers for HostComm {
    fn rank(&self) -> usize {
        self.circle.rank
    }

    fn world(&self) -> usize {
        self.circle.size
    }

    fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.collective(|| {
            let posts = self.exchange("gather", vec![bytes.to_vec()])?;
            Ok(posts.iter().map(|post| post.part(self.circle.rank).to_vec()).collect())
        })
    }

    fn abort(&self, why: &str) {
        self.fail(why);
    }

    fn check(&self) -> Result<()> {
        self.seat.check("check")
    }

    fn waited(&self) -> Duration {
        self.seat.waited()
    }

    fn host_ranks(&self) -> usize {
        self.seat.world().host_ranks
    }
}

impl<B: Backend> Comm<B> for HostComm {
    fn rank(&self) -> usize {
        Peers::rank(self)
    }

    fn world(&self) -> usize {
        Peers::world(self)
    }

    fn counts(&self, b: &B, send: &B::Buf<i32>) -> Result<B::Buf<i32>> {
        const CALL: &str = "counts";
        self.collective(|| {
            let all = self.gather_values(CALL, b, send)?;
            if !all[self.circle.rank].len().is_multiple_of(self.circle.size) {
                let why = format!("{} counts for {} ranks", all[self.circle.rank].len(), self.circle.size);
                return Err(self.error(CALL, why));
            }
            b.upload(&all.concat())
        })
    }

    fn begin_all_to_all_v(
        &self,
        b: &B,
        send: B::Buf<u8>,
        row_bytes: usize,
        send_rows: &[usize],
        recv_rows: &[usize],
        mut into: B::Buf<u8>,
    ) -> Result<Transfer<B, B::Buf<u8>>> {
        const CALL: &str = "all_to_all_v";
        let ticket = self.collective(|| {
            let size = self.circle.size;
            if send_rows.len() != size || recv_rows.len() != size {
                let why = format!("{} and {} counts for {size} ranks", send_rows.len(), recv_rows.len());
                return Err(self.error(CALL, why));
            }
            let room = B::len(&into);
            let all = recv_rows.iter().try_fold(0usize, |all, rows| all.checked_add(*rows));
            if all.and_then(|all| all.checked_mul(row_bytes)).is_none_or(|bytes| bytes > room) {
                let why = format!(
                    "{recv_rows:?} rows of {row_bytes} bytes are to come, and there is room for {room} bytes"
                );
                return Err(self.error(CALL, why));
            }
            let bytes = b.download(&send)?;
            let Some(parts) = split_rows(&bytes, row_bytes, send_rows) else {
                let why =
                    format!("{} bytes given are fewer than {send_rows:?} rows of {row_bytes}", bytes.len());
                return Err(self.error(CALL, why));
            };
            self.post(CALL, parts)
        })?;
        let (comm, recv_rows) = (self.clone(), recv_rows.to_vec());
        Ok(Transfer::new(move |b: &B| {
            // The send buffer lives until here, because a device would read it up to this point.
            let _send = send;
            comm.collective(|| b.write(&mut into, 0, &comm.rows(ticket, row_bytes, &recv_rows)?))
                .map(|()| into)
        }))
    }

    fn begin_reduce_scatter_tree(&self, b: &B, sums: Vec<TreeSum<B>>) -> Result<Transfer<B>> {
        const CALL: &str = "reduce_scatter_tree";
        let ticket = self.collective(|| self.post(CALL, self.cut(CALL, b, &sums)?))?;
        let comm = self.clone();
        Ok(Transfer::new(move |b| {
            // The values live until here, because a device would read them up to this point.
            let mut into: Vec<_> = sums.into_iter().map(|sum| sum.into).collect();
            comm.collective(|| comm.sum(b, ticket, &mut into)).map(|()| into)
        }))
    }

    fn begin_all_gather_parts(
        &self,
        b: &B,
        mine: B::Buf<u8>,
        parts: &[Vec<Range<usize>>],
        mut into: B::Buf<u8>,
    ) -> Result<Transfer<B, B::Buf<u8>>> {
        const CALL: &str = "all_gather_parts";
        let ticket = self.collective(|| {
            let (held, expected) = (B::len(&mine), bytes_of(self.part(CALL, parts)?));
            if held != expected {
                return Err(
                    self.error(CALL, format!("{held} bytes given, and {expected} in this rank's part"))
                );
            }
            self.post(CALL, vec![b.download(&mine)?])
        })?;
        let (comm, parts) = (self.clone(), parts.to_vec());
        Ok(Transfer::new(move |b| {
            // The buffer lives until here, because a device would read it up to this point.
            drop(mine);
            comm.collective(|| comm.lay(b, ticket, &parts, &mut into)).map(|()| into)
        }))
    }

    fn all_gather(&self, b: &B, values: &B::Buf<f32>) -> Result<B::Buf<f32>> {
        self.collective(|| b.upload(&self.gather_values("all_gather", b, values)?.concat()))
    }

    fn all_gather_f64(&self, b: &B, values: &B::Buf<f64>) -> Result<B::Buf<f64>> {
        self.collective(|| b.upload(&self.gather_values("all_gather_f64", b, values)?.concat()))
    }

    fn barrier(&self) -> Result<()> {
        self.collective(|| self.exchange("barrier", vec![Vec::new()]).map(drop))
    }

    fn abort(&self, why: &str) {
        Peers::abort(self, why);
    }

    fn check(&self) -> Result<()> {
        Peers::check(self)
    }

    fn waited(&self) -> Duration {
        Peers::waited(self)
    }

    fn host_ranks(&self) -> usize {
        Peers::host_ranks(self)
    }
}

/// Splits each rank's rows off the beginning of `bytes`; `None` if `bytes` is too short.
fn split_rows(bytes: &[u8], row_bytes: usize, rows: &[usize]) -> Option<Vec<Vec<u8>>> {
    let mut rest = bytes;
    let mut parts = Vec::with_capacity(rows.len());
    for rows in rows {
        let (part, tail) = rest.split_at_checked(rows.checked_mul(row_bytes)?)?;
        parts.push(part.to_vec());
        rest = tail;
    }
    Some(parts)
}

/// The total number of bytes in these ranges.
fn bytes_of(part: &[Range<usize>]) -> usize {
    part.iter().map(ExactSizeIterator::len).sum()
}

/// The sum over ranks (at least one) by a balanced tree.
fn tree_sum(mut level: Vec<Vec<f32>>) -> Vec<f32> {
    while level.len() > 1 {
        level = level
            .chunks(2)
            .map(|pair| match pair {
                [a, c] => a.iter().zip(c).map(|(x, y)| x + y).collect(),
                alone => alone.concat(),
            })
            .collect();
    }
    level.concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cpu;

    /// The number of collectives whose posts a rank may still read.
    fn kept(comm: &HostComm) -> usize {
        comm.seat
            .world()
            .lock()
            .circle(comm.circle.index)
            .rounds
            .iter()
            .filter(|round| !round.posts.is_empty())
            .count()
    }

    /// All ranks are on one thread, so no call in this test may wait for a rank that has not posted.
    #[test]
    fn a_collective_stays_until_every_rank_is_done_with_it() {
        let cpu = Cpu::new(1).unwrap();
        let comms = HostComm::world(2);
        let begin = |comm: &HostComm| {
            let (values, into) = (cpu.upload(&[1.0f32]).unwrap(), cpu.zeros(1).unwrap());
            let sum = TreeSum { values, parts: vec![0..1, 0..1], into };
            comm.begin_reduce_scatter_tree(&cpu, vec![sum]).unwrap()
        };
        let [[a0, a1], [b0, b1]] = [0, 1].map(|rank| [begin(&comms[rank]), begin(&comms[rank])]);
        assert_eq!(kept(&comms[0]), 2);
        assert_eq!(a1.wait(&cpu).unwrap()[0].as_slice(), [2.0]);
        assert_eq!(kept(&comms[0]), 2);
        drop(b1);
        assert_eq!(kept(&comms[0]), 1, "the second is over before the first");
        drop(a0);
        assert_eq!(
            b0.wait(&cpu).unwrap()[0].as_slice(),
            [2.0],
            "what a rank gave stays when it drops its own"
        );
        assert!(comms[0].seat.world().lock().circle(0).rounds.is_empty());
        // One rank drops its transfer before the other rank has called.
        drop(begin(&comms[0]));
        drop(begin(&comms[1]));
        assert!(comms[0].seat.world().lock().circle(0).rounds.is_empty());
    }

    /// A link that sends nothing.
    #[derive(Debug)]
    struct Nowhere;

    impl Link for Nowhere {
        fn send(&self, _: usize, _: usize, _: usize, _: &str, _: &[u8]) {}
        fn fail(&self, _: &str) {}
        fn leave(&self) {}
    }

    /// A process's rank drops a transfer while an earlier transfer is pending, before the other process's rank has called either
    /// collective.
    #[test]
    fn what_comes_for_a_dropped_transfer_is_left() {
        let cpu = Cpu::new(1).unwrap();
        let (axes, arrivals) = HostComm::of_process(MeshShape { dp: 1, ep: 2 }, 0, 1, Arc::new(Nowhere));
        let begin = || {
            let parts = [0..1, 1..2].map(|part| Vec::from([part]));
            axes.all.begin_all_gather_parts(&cpu, cpu.upload(&[7u8]).unwrap(), &parts, cpu.zeros(2).unwrap())
        };
        let (first, second) = (begin().unwrap(), begin().unwrap());
        drop(second);
        for number in [1, 0] {
            arrivals.rows(1, 0, number, "all_gather_parts".into(), vec![8 + number as u8]);
        }
        assert_eq!(first.wait(&cpu).unwrap().as_slice(), [7, 8]);
        assert!(axes.all.seat.world().lock().circle(0).rounds.is_empty());
    }
}
