//! Ranks as threads.

use nibble_core::{Axes, Backend, Comm, Error, MeshShape, Plain, Result, Transfer, TreeSum};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// What all ranks of a world share.
#[derive(Debug)]
struct World {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Those who call collectives together.
    circles: Vec<Circle>,
    /// Ranks whose communicators are gone. What they posted before still counts.
    left: Vec<bool>,
    /// The first failure of any rank, with the rank that had it. It never goes away.
    failure: Option<(usize, String)>,
}

/// Ranks that call collectives together: all of a world, or those along an axis of a mesh.
#[derive(Debug)]
struct Circle {
    /// Its ranks by their numbers in the world, in the circle's order.
    members: Vec<usize>,
    /// The collectives that some rank has yet to read, in order.
    rounds: VecDeque<Round>,
    /// How many came before these.
    gone: usize,
    /// The number of collectives that each rank has called.
    called: Vec<usize>,
}

/// A collective.
#[derive(Debug)]
struct Round {
    /// What each rank posted for it; `None` until it calls.
    posts: Vec<Option<Arc<Post>>>,
    /// Ranks that are done with it. Each has posted before.
    done: usize,
}

impl Circle {
    fn of(members: Vec<usize>) -> Self {
        Self { called: vec![0; members.len()], members, rounds: VecDeque::new(), gone: 0 }
    }

    /// The next collective of a rank, to which it gives this; its number.
    fn post(&mut self, rank: usize, post: Post) -> usize {
        let number = self.called[rank];
        self.called[rank] += 1;
        let size = self.members.len();
        let round = number - self.gone;
        if round == self.rounds.len() {
            self.rounds.push_back(Round { posts: vec![None; size], done: 0 });
        }
        self.rounds[round].posts[rank] = Some(Arc::new(post));
        number
    }

    /// A rank needs nothing more of a collective. What every rank is done with goes, here or with the last one before it.
    fn done(&mut self, number: usize) {
        let size = self.members.len();
        let round = &mut self.rounds[number - self.gone];
        round.done += 1;
        if round.done == size {
            round.posts.clear();
        }
        while self.rounds.front().is_some_and(|round| round.done == size) {
            self.rounds.pop_front();
            self.gone += 1;
        }
    }
}

/// One rank's contribution to a collective.
#[derive(Debug)]
struct Post {
    call: &'static str,
    /// Bytes for each rank; one entry for all where everybody gets the same.
    parts: Vec<Vec<u8>>,
}

/// A collective that a rank has called. Dropped, it tells that the rank is done with it, whether it has read what the others gave or not.
#[derive(Debug)]
struct Ticket {
    comm: ThreadComm,
    call: &'static str,
    number: usize,
}

impl Ticket {
    /// What everybody posted, in rank order, once all have.
    fn read(self) -> Result<Vec<Arc<Post>>> {
        let Self { comm, call, number } = &self;
        let mut state = comm.lock();
        let all: Vec<Arc<Post>> = loop {
            let Circle { members, rounds, gone, .. } = &state.circles[comm.circle];
            // A round stays until this rank is done with it.
            let posts = &rounds[number - gone].posts;
            // Complete: a rank that has failed since does not change what it gave. The next call tells.
            if let Some(all) = posts.iter().cloned().collect() {
                break all;
            }
            comm.check(call, &state)?;
            let missed = members.iter().zip(posts).find(|(rank, post)| post.is_none() && state.left[**rank]);
            if let Some((rank, _)) = missed {
                return Err(comm.error(call, format!("rank {rank} has left, and this call needs it")));
            }
            state = comm.wait(state);
        };
        let other = state.circles[comm.circle].members.iter().zip(&all).find(|(_, post)| post.call != *call);
        match other {
            Some((rank, post)) => {
                Err(comm.error(call, format!("rank {rank} called {} at the same time", post.call)))
            }
            None => Ok(all),
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.comm.lock().circles[self.comm.circle].done(self.number);
    }
}

/// One rank of a world of threads that exchange through shared memory.
///
/// Nobody waits for a rank that will not come. A rank that calls [`Comm::abort`], that is dropped while its thread
/// panics, or that gets an error from a collective fails the pending and later calls of all, along every axis of a mesh; so does a call that
/// needs a rank dropped before. For that a rank's thread must own its communicators and transfers: those that outlive the thread cannot tell.
#[derive(Debug)]
pub struct ThreadComm {
    /// Number of the circle.
    circle: usize,
    /// This rank's number in it.
    rank: usize,
    /// How many ranks it has.
    size: usize,
    seat: Arc<Seat>,
}

/// A rank's place in a world, as long as it has a communicator or a transfer.
#[derive(Debug)]
struct Seat {
    rank: usize,
    world: Arc<World>,
}

impl ThreadComm {
    /// The ranks of a new world, in order.
    pub fn world(size: usize) -> Vec<Self> {
        let seats = Seat::all(vec![Circle::of((0..size).collect())], size);
        seats.map(|seat| Self { circle: 0, rank: seat.rank, size, seat }).collect()
    }

    /// The ranks of a new mesh, in order.
    pub fn mesh(shape: MeshShape) -> Vec<Axes<Self>> {
        let MeshShape { dp, ep } = shape;
        let all = (0..shape.ranks()).collect();
        let replica = |d| (0..ep).map(|e| d * ep + e).collect();
        let same_experts = |e| (0..dp).map(|d| d * ep + e).collect();
        let circles = [all].into_iter().chain((0..dp).map(replica)).chain((0..ep).map(same_experts));
        let seats = Seat::all(circles.map(Circle::of).collect(), shape.ranks());
        let axes = seats.map(|seat| {
            let (d, e) = shape.place(seat.rank);
            let of = |circle, (rank, size)| Self { circle, rank, size, seat: seat.clone() };
            Axes {
                all: of(0, (seat.rank, shape.ranks())),
                ep: of(1 + d, (e, ep)),
                dp: of(1 + dp + e, (d, dp)),
            }
        });
        axes.collect()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.seat.world.lock()
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.seat.world.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// The world's failure, if there is one.
    fn check(&self, call: &'static str, state: &State) -> Result<()> {
        match &state.failure {
            Some((rank, why)) => Err(self.error(call, format!("rank {rank} failed: {why}"))),
            None => Ok(()),
        }
    }

    fn error(&self, call: &'static str, why: String) -> Error {
        Error::Comm { call, rank: self.seat.rank, why }
    }

    /// Runs a collective. Its error fails the world, so that no other rank waits for this one.
    fn collective<T>(&self, body: impl FnOnce() -> Result<T>) -> Result<T> {
        body().inspect_err(|e| match e {
            Error::Comm { call, why, .. } => self.fail(&format!("{call}: {why}")),
            other => self.fail(&other.to_string()),
        })
    }

    /// The same rank, for what outlives a call.
    fn again(&self) -> Self {
        Self { seat: self.seat.clone(), ..*self }
    }

    /// Posts this rank's parts of a collective, and waits for nobody.
    fn post(&self, call: &'static str, parts: Vec<Vec<u8>>) -> Result<Ticket> {
        let mut state = self.lock();
        self.check(call, &state)?;
        let number = state.circles[self.circle].post(self.rank, Post { call, parts });
        self.seat.world.changed.notify_all();
        drop(state);
        Ok(Ticket { comm: self.again(), call, number })
    }

    /// Posts this rank's parts and returns everybody's, in rank order, once all have arrived.
    fn exchange(&self, call: &'static str, parts: Vec<Vec<u8>>) -> Result<Vec<Arc<Post>>> {
        self.post(call, parts)?.read()
    }

    fn fail(&self, why: &str) {
        self.seat.fail(why);
    }

    /// This rank's part, of as many as there are ranks.
    fn part<'p, P>(&self, call: &'static str, parts: &'p [P]) -> Result<&'p P> {
        match parts.get(self.rank) {
            Some(mine) if parts.len() == self.size => Ok(mine),
            _ => Err(self.error(call, format!("{} parts for {} ranks", parts.len(), self.size))),
        }
    }

    /// What goes to each rank of these sums, one behind the other.
    fn cut<B: Backend>(&self, call: &'static str, b: &B, sums: &[TreeSum<B>]) -> Result<Vec<Vec<u8>>> {
        let mut cut = vec![Vec::new(); self.size];
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

    /// The sums of what all ranks have sent to this one, each as long as it is to be.
    fn sum<B: Backend>(&self, b: &B, ticket: Ticket, into: &mut [B::Buf<f32>]) -> Result<()> {
        let call = ticket.call;
        let posts = ticket.read()?;
        let bytes = size_of::<f32>() * into.iter().map(B::len).sum::<usize>();
        let level = posts.iter().map(|post| post.parts[self.rank].as_slice());
        if let Some((rank, came)) = level.clone().enumerate().find(|(_, came)| came.len() != bytes) {
            let why = format!("rank {rank} sent {} bytes, {bytes} were expected", came.len());
            return Err(self.error(call, why));
        }
        let sums = tree_sum(level.map(bytemuck::pod_collect_to_vec).collect());
        let mut rest = sums.as_slice();
        for into in into {
            // As many as all of them together: checked above.
            let (now, later) = rest.split_at(B::len(into));
            b.write(into, 0, now)?;
            rest = later;
        }
        Ok(())
    }

    /// Every rank's same-sized values, in rank order.
    fn gather<B: Backend, T: Plain>(
        &self,
        call: &'static str,
        b: &B,
        values: &B::Buf<T>,
    ) -> Result<Vec<Vec<T>>> {
        let bytes = bytemuck::cast_slice(&b.download(values)?).to_vec();
        let posts = self.exchange(call, vec![bytes])?;
        let all: Vec<Vec<T>> = posts.iter().map(|p| bytemuck::pod_collect_to_vec(&p.parts[0])).collect();
        match all.iter().enumerate().find(|(_, v)| v.len() != all[self.rank].len()) {
            Some((rank, v)) => {
                let why = format!("rank {rank} sent {} values, this rank {}", v.len(), all[self.rank].len());
                Err(self.error(call, why))
            }
            None => Ok(all),
        }
    }
}

impl World {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Seat {
    /// Those of a new world of so many ranks, who meet in these circles.
    fn all(circles: Vec<Circle>, size: usize) -> impl Iterator<Item = Arc<Self>> {
        let state = State { circles, left: vec![false; size], failure: None };
        let world = Arc::new(World { state: Mutex::new(state), changed: Condvar::new() });
        (0..size).map(move |rank| Arc::new(Self { rank, world: world.clone() }))
    }

    fn fail(&self, why: &str) {
        let mut state = self.world.lock();
        state.failure.get_or_insert_with(|| (self.rank, why.to_owned()));
        self.world.changed.notify_all();
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.fail("its thread panicked");
        }
        self.world.lock().left[self.rank] = true;
        self.world.changed.notify_all();
    }
}

impl<B: Backend> Comm<B> for ThreadComm {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.size
    }

    fn counts(&self, b: &B, send: &B::Buf<i32>) -> Result<B::Buf<i32>> {
        const CALL: &str = "counts";
        self.collective(|| {
            let all = self.gather(CALL, b, send)?;
            if !all[self.rank].len().is_multiple_of(self.size) {
                let why = format!("{} counts for {} ranks", all[self.rank].len(), self.size);
                return Err(self.error(CALL, why));
            }
            b.upload(&all.concat())
        })
    }

    fn all_to_all_v(
        &self,
        b: &B,
        send: &B::Buf<u8>,
        row_bytes: usize,
        send_rows: &[usize],
        recv_rows: &[usize],
        into: &mut B::Buf<u8>,
    ) -> Result<()> {
        const CALL: &str = "all_to_all_v";
        self.collective(|| {
            let size = self.size;
            if send_rows.len() != size || recv_rows.len() != size {
                let why = format!("{} and {} counts for {size} ranks", send_rows.len(), recv_rows.len());
                return Err(self.error(CALL, why));
            }
            let bytes = b.download(send)?;
            let Some(parts) = split_rows(&bytes, row_bytes, send_rows) else {
                let why =
                    format!("{} bytes given are fewer than {send_rows:?} rows of {row_bytes}", bytes.len());
                return Err(self.error(CALL, why));
            };
            let posts = self.exchange(CALL, parts)?;
            for (from, (post, rows)) in posts.iter().zip(recv_rows).enumerate() {
                let came = post.parts[self.rank].len();
                if rows.checked_mul(row_bytes) != Some(came) {
                    let why = format!(
                        "{rows} rows of {row_bytes} bytes expected from rank {from}, {came} bytes came"
                    );
                    return Err(self.error(CALL, why));
                }
            }
            let received: Vec<&[u8]> = posts.iter().map(|post| post.parts[self.rank].as_slice()).collect();
            let received = received.concat();
            if received.len() > B::len(into) {
                let why = format!("{} bytes came, and there is room for {}", received.len(), B::len(into));
                return Err(self.error(CALL, why));
            }
            b.write(into, 0, &received)
        })
    }

    fn begin_reduce_scatter_tree(&self, b: &B, sums: Vec<TreeSum<B>>) -> Result<Transfer<B>> {
        const CALL: &str = "reduce_scatter_tree";
        let ticket = self.collective(|| self.post(CALL, self.cut(CALL, b, &sums)?))?;
        let comm = self.again();
        Ok(Transfer::new(move |b| {
            // The values are kept until here, where a device would read them up to now.
            let mut into: Vec<_> = sums.into_iter().map(|sum| sum.into).collect();
            comm.collective(|| comm.sum(b, ticket, &mut into)).map(|()| into)
        }))
    }

    fn all_gather_parts(
        &self,
        b: &B,
        mine: &B::Buf<u8>,
        parts: &[Vec<Range<usize>>],
        into: &mut B::Buf<u8>,
    ) -> Result<()> {
        const CALL: &str = "all_gather_parts";
        self.collective(|| {
            let bytes = |part: &[Range<usize>]| part.iter().map(ExactSizeIterator::len).sum::<usize>();
            let (held, expected) = (B::len(mine), bytes(self.part(CALL, parts)?));
            if held != expected {
                return Err(
                    self.error(CALL, format!("{held} bytes given, and {expected} in this rank's part"))
                );
            }
            let posts = self.exchange(CALL, vec![b.download(mine)?])?;
            for (rank, (post, part)) in posts.iter().zip(parts).enumerate() {
                let mut rest = post.parts[0].as_slice();
                if rest.len() != bytes(part) {
                    let why =
                        format!("rank {rank} sent {} bytes, and its part has {}", rest.len(), bytes(part));
                    return Err(self.error(CALL, why));
                }
                for range in part {
                    // As many as all ranges together: checked above.
                    let (now, later) = rest.split_at(range.len());
                    b.write(into, range.start, now)?;
                    rest = later;
                }
            }
            Ok(())
        })
    }

    fn all_gather(&self, b: &B, values: &B::Buf<f32>) -> Result<B::Buf<f32>> {
        self.collective(|| b.upload(&self.gather("all_gather", b, values)?.concat()))
    }

    fn all_gather_f64(&self, b: &B, values: &B::Buf<f64>) -> Result<B::Buf<f64>> {
        self.collective(|| b.upload(&self.gather("all_gather_f64", b, values)?.concat()))
    }

    fn barrier(&self) -> Result<()> {
        self.collective(|| self.exchange("barrier", vec![Vec::new()]).map(drop))
    }

    fn abort(&self, why: &str) {
        self.fail(why);
    }
}

/// The bytes of each rank's rows, the first of `bytes`; `None` if there are too few.
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

/// The sum over ranks by a balanced tree, one at least.
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

    /// Collectives whose posts some rank may still read.
    fn kept(comm: &ThreadComm) -> usize {
        comm.lock().circles[comm.circle].rounds.iter().filter(|round| !round.posts.is_empty()).count()
    }

    /// All ranks of one thread: nothing here waits for a rank that has not posted.
    #[test]
    fn a_collective_stays_until_every_rank_is_done_with_it() {
        let cpu = Cpu::new(1).unwrap();
        let comms = ThreadComm::world(2);
        let begin = |comm: &ThreadComm| {
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
        assert!(comms[0].lock().circles[0].rounds.is_empty());
        // One that is dropped before the other rank has come.
        drop(begin(&comms[0]));
        drop(begin(&comms[1]));
        assert!(comms[0].lock().circles[0].rounds.is_empty());
    }
}
