//! The state of collectives: every rank's post (its data) for each collective, and which ranks have failed or left.
//!
//! Ranks that are threads share one world. A rank that is a process has its own world: a [`Link`] sends the rank's posts to the worlds of
//! the other processes, and [`Arrivals`] receives the posts of other processes.

use super::CircleShape;
use nibble_core::{Error, Result};
use std::borrow::Cow;
use std::collections::VecDeque;
use std::fmt::{self, Debug};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Sends the posts of this process's rank to the ranks of other processes. The first failure must reach every rank before any later message
/// of a rank that knows of the failure. Otherwise a rank would report that later message as the cause.
pub trait Link: Debug + Send + Sync {
    /// Sends the bytes for world rank `to` in collective number `number` of a circle (a group of ranks). The call does not block.
    fn send(&self, to: usize, circle: usize, number: usize, call: &str, bytes: &[u8]);
    /// Tells all ranks that this rank has failed.
    fn fail(&self, why: &str);
    /// Tells all ranks that this rank will not post again.
    fn leave(&self);
}

/// All posts so far, from the point of view of one process.
pub(super) struct World {
    state: Mutex<State>,
    changed: Condvar,
    link: Option<Arc<dyn Link>>,
    /// Number of ranks on this host.
    pub host_ranks: usize,
}

impl Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("World")
    }
}

#[derive(Debug)]
pub(super) struct State {
    /// The groups of ranks that call collectives together.
    circles: Vec<Circle>,
    /// Whether each rank has left, that is, whether its communicators were dropped. Earlier posts of such a rank stay valid.
    left: Vec<bool>,
    /// The first failure of any rank, with the rank's number. The failure is never cleared.
    failure: Option<String>,
}

/// Ranks that call collectives together: all ranks of a world, or the ranks along an axis of a mesh.
#[derive(Debug)]
pub(super) struct Circle {
    /// World ranks of the members, in the circle's order.
    members: Vec<usize>,
    /// Number of members that read in this process: all members if ranks are threads, otherwise one.
    readers: usize,
    /// Collectives that at least one rank has not read yet, in order.
    pub rounds: VecDeque<Round>,
    /// Number of completed collectives that were removed before `rounds`.
    gone: usize,
    /// Number of collectives that each rank of this process has called.
    called: Vec<usize>,
}

/// The state of one collective.
#[derive(Debug)]
pub(super) struct Round {
    /// Each rank's post; `None` until the rank calls.
    pub posts: Vec<Option<Arc<Post>>>,
    /// Number of ranks that have finished this collective. Each of them has posted.
    done: usize,
}

impl Circle {
    /// Adds a rank's post to its collective.
    fn put(&mut self, rank: usize, number: usize, post: Arc<Post>) {
        // Every local reader has finished this collective, so the post is not needed.
        let Some(round) = number.checked_sub(self.gone) else { return };
        while self.rounds.len() <= round {
            self.rounds.push_back(Round { posts: vec![None; self.members.len()], done: 0 });
        }
        // A round that all local readers have finished has no posts, even while an earlier round is unfinished.
        if let Some(place) = self.rounds[round].posts.get_mut(rank) {
            *place = Some(post);
        }
    }

    /// Marks a collective as finished by one rank. A round is removed when every reader has finished it and all earlier rounds.
    fn done(&mut self, number: usize) {
        let readers = self.readers;
        let round = &mut self.rounds[number - self.gone];
        round.done += 1;
        if round.done == readers {
            round.posts.clear();
        }
        while self.rounds.front().is_some_and(|round| round.done == readers) {
            self.rounds.pop_front();
            self.gone += 1;
        }
    }
}

/// One rank's contribution to a collective (its post).
#[derive(Debug)]
pub(super) struct Post {
    call: Cow<'static, str>,
    /// Bytes for each rank. There is only one entry if all ranks get the same bytes, or if the post came from another process, which sends
    /// only this rank's bytes.
    parts: Vec<Vec<u8>>,
}

impl Post {
    /// The bytes for a rank of the circle.
    pub fn part(&self, rank: usize) -> &[u8] {
        let part = if self.parts.len() == 1 { self.parts.first() } else { self.parts.get(rank) };
        part.map_or(&[], Vec::as_slice)
    }
}

impl World {
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the world's first failure; later failures are ignored.
    fn failed(&self, why: impl FnOnce() -> String) {
        self.lock().failure.get_or_insert_with(why);
        self.changed.notify_all();
    }

    fn left(&self, rank: usize) {
        if let Some(left) = self.lock().left.get_mut(rank) {
            *left = true;
        }
        self.changed.notify_all();
    }
}

impl State {
    pub fn circle(&self, circle: usize) -> &Circle {
        &self.circles[circle]
    }
}

/// A rank's place in a world, shared by the rank's communicators and transfers.
#[derive(Debug)]
pub(super) struct Seat {
    /// The rank's number in the world.
    pub rank: usize,
    world: Arc<World>,
    /// Nanoseconds spent waiting for other ranks.
    waited: AtomicU64,
}

impl Seat {
    fn new(world: &Arc<World>, rank: usize) -> Arc<Self> {
        Arc::new(Self { rank, world: world.clone(), waited: AtomicU64::new(0) })
    }

    /// The places (`Seat`s) of all ranks in a new shared world with these circles.
    pub fn all(circles: Vec<Vec<usize>>, size: usize) -> impl Iterator<Item = Arc<Self>> {
        let readers = |members: &Vec<usize>| members.len();
        let world = world(circles, readers, (size, size), None);
        (0..size).map(move |rank| Seat::new(&world, rank))
    }

    /// The place (`Seat`) of this process's only rank, and the receiver of the other ranks' posts.
    pub fn linked(
        circles: Vec<Vec<usize>>,
        (rank, size): (usize, usize),
        host_ranks: usize,
        link: Arc<dyn Link>,
    ) -> (Arc<Self>, Arrivals) {
        let world = world(circles, |_| 1, (size, host_ranks), Some(link));
        (Seat::new(&world, rank), Arrivals { world })
    }

    pub fn world(&self) -> &World {
        &self.world
    }

    pub fn fail(&self, why: &str) {
        self.world.failed(|| format!("rank {} failed: {why}", self.rank));
        if let Some(link) = &self.world.link {
            link.fail(why);
        }
    }

    /// Time spent waiting for other ranks.
    pub fn waited(&self) -> Duration {
        Duration::from_nanos(self.waited.load(Ordering::Relaxed))
    }

    /// Fails if the world has failed.
    pub fn check(&self, call: &'static str) -> Result<()> {
        self.check_in(call, &self.world.lock())
    }

    fn check_in(&self, call: &'static str, state: &State) -> Result<()> {
        match &state.failure {
            Some(why) => Err(self.error(call, why.clone())),
            None => Ok(()),
        }
    }

    pub fn error(&self, call: &'static str, why: String) -> Error {
        Error::Comm { call, rank: self.rank, why }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.fail("its thread panicked");
        }
        self.world.left(self.rank);
        if let Some(link) = &self.world.link {
            link.leave();
        }
    }
}

fn world(
    circles: Vec<Vec<usize>>,
    readers: impl Fn(&Vec<usize>) -> usize,
    (size, host_ranks): (usize, usize),
    link: Option<Arc<dyn Link>>,
) -> Arc<World> {
    let circle = |members: Vec<usize>| Circle {
        readers: readers(&members),
        called: vec![0; members.len()],
        members,
        rounds: VecDeque::new(),
        gone: 0,
    };
    let circles = circles.into_iter().map(circle).collect();
    let state = State { circles, left: vec![false; size], failure: None };
    Arc::new(World { state: Mutex::new(state), changed: Condvar::new(), link, host_ranks })
}

/// Receives the posts of ranks in other processes. No message causes an error here; messages for circles without this rank are ignored.
#[derive(Debug)]
pub struct Arrivals {
    world: Arc<World>,
}

impl Arrivals {
    /// Bytes that world rank `from` sent to this process's rank, for collective number `number` of a circle.
    pub fn rows(&self, from: usize, circle: usize, number: usize, call: String, bytes: Vec<u8>) {
        /// Limit on the number of collectives by which one rank can be ahead of another. Valid runs never reach the limit, which bounds
        /// memory.
        const MOST_AHEAD: usize = 1 << 16;
        let mut state = self.world.lock();
        let Some(circle) = state.circles.get_mut(circle) else { return };
        let Some(rank) = circle.members.iter().position(|member| *member == from) else { return };
        if number < circle.gone + MOST_AHEAD {
            circle.put(rank, number, Arc::new(Post { call: call.into(), parts: vec![bytes] }));
        }
        drop(state);
        self.world.changed.notify_all();
    }

    /// Records that a rank will not post again; its earlier posts have arrived.
    pub fn left(&self, rank: usize) {
        self.world.left(rank);
    }

    /// Records that the run has failed: pending and later calls return this error.
    pub fn failed(&self, why: &str) {
        self.world.failed(|| why.to_owned());
    }
}

/// A collective that a rank has called. Dropping the ticket marks the rank as finished with the collective, even if it has not read the
/// posts.
#[derive(Debug)]
pub(super) struct Ticket {
    seat: Arc<Seat>,
    circle: CircleShape,
    pub call: &'static str,
    number: usize,
}

impl Ticket {
    /// Posts a rank's data for its next collective, without blocking.
    pub fn new(
        seat: &Arc<Seat>,
        circle: CircleShape,
        call: &'static str,
        parts: Vec<Vec<u8>>,
    ) -> Result<Self> {
        let world = &seat.world;
        let mut state = world.lock();
        seat.check_in(call, &state)?;
        let of = &mut state.circles[circle.index];
        let number = of.called[circle.rank];
        of.called[circle.rank] += 1;
        let post = Arc::new(Post { call: call.into(), parts });
        of.put(circle.rank, number, post.clone());
        let members = world.link.as_ref().map(|link| (link, of.members.clone()));
        drop(state);
        world.changed.notify_all();
        if let Some((link, members)) = members {
            for (to, member) in members.into_iter().enumerate().filter(|(to, _)| *to != circle.rank) {
                link.send(member, circle.index, number, call, post.part(to));
            }
        }
        Ok(Self { seat: seat.clone(), circle, call, number })
    }

    /// Blocks until all ranks have posted; returns the posts in rank order.
    pub fn read(self) -> Result<Vec<Arc<Post>>> {
        let Self { seat, circle, call, number } = &self;
        let mut state = seat.world.lock();
        let mut began = None;
        let all: Vec<Arc<Post>> = loop {
            let Circle { members, rounds, gone, .. } = state.circle(circle.index);
            // A round stays in memory until this rank has finished it.
            let posts = &rounds[number - gone].posts;
            // All posts have arrived. If a rank has failed since then, its post stays valid; the next call reports the failure.
            if let Some(all) = posts.iter().cloned().collect() {
                break all;
            }
            seat.check_in(call, &state)?;
            let missed = members.iter().zip(posts).find(|(rank, post)| post.is_none() && state.left[**rank]);
            if let Some((rank, _)) = missed {
                return Err(seat.error(call, format!("rank {rank} has left, and this call needs it")));
            }
            began.get_or_insert_with(Instant::now);
            state = seat.world.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        };
        if let Some(began) = began {
            seat.waited.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
        }
        let other = state.circle(circle.index).members.iter().zip(&all).find(|(_, post)| post.call != *call);
        match other {
            Some((rank, post)) => {
                Err(seat.error(call, format!("rank {rank} called {} at the same time", post.call)))
            }
            None => Ok(all),
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.seat.world.lock().circles[self.circle.index].done(self.number);
    }
}
