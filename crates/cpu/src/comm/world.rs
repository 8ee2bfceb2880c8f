//! Where ranks meet: what each has given to which collective, and who has failed or left.
//!
//! Ranks that are threads share one world. A rank that is a process has one of its own; a [`Link`] carries what it gives to the others', and
//! [`Arrivals`] takes what theirs bring.

use super::CircleShape;
use nibble_core::{Error, Result};
use std::borrow::Cow;
use std::collections::VecDeque;
use std::fmt::{self, Debug};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Carries what the rank of this process gives to the ranks of others. The first failure is told to all of them before anything that a rank
/// says once it has heard of it: else they would take that for the cause.
pub trait Link: Debug + Send + Sync {
    /// Sends to a rank, by its number among all, what this one gives it in the `number`th collective of a circle of ranks. Waits for nobody.
    fn send(&self, to: usize, circle: usize, number: usize, call: &str, bytes: &[u8]);
    /// Tells all that this rank has failed.
    fn fail(&self, why: &str);
    /// This rank gives nothing more.
    fn leave(&self);
}

/// What ranks have given so far, as one process sees it.
pub(super) struct World {
    state: Mutex<State>,
    changed: Condvar,
    link: Option<Arc<dyn Link>>,
    /// How many ranks are on this host.
    pub host_ranks: usize,
}

impl Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("World")
    }
}

#[derive(Debug)]
pub(super) struct State {
    /// Those who call collectives together.
    circles: Vec<Circle>,
    /// Ranks whose communicators are gone. What they posted before still counts.
    left: Vec<bool>,
    /// The first failure of any rank, and which it was. It never goes away.
    failure: Option<String>,
}

/// Ranks that call collectives together: all of a world, or those along an axis of a mesh.
#[derive(Debug)]
pub(super) struct Circle {
    /// Its ranks by their numbers in the world, in the circle's order.
    members: Vec<usize>,
    /// How many of them read here: all, or the one of this process.
    readers: usize,
    /// The collectives that some rank has yet to read, in order.
    pub rounds: VecDeque<Round>,
    /// How many came before these.
    gone: usize,
    /// The number of collectives that each rank of this process has called.
    called: Vec<usize>,
}

/// A collective.
#[derive(Debug)]
pub(super) struct Round {
    /// What each rank posted for it; `None` until it calls.
    pub posts: Vec<Option<Arc<Post>>>,
    /// Ranks that are done with it. Each has posted before.
    done: usize,
}

impl Circle {
    /// Puts a rank's post to the others of the same collective.
    fn put(&mut self, rank: usize, number: usize, post: Arc<Post>) {
        // Of a collective that every reader here is done with: they asked for no answer.
        let Some(round) = number.checked_sub(self.gone) else { return };
        while self.rounds.len() <= round {
            self.rounds.push_back(Round { posts: vec![None; self.members.len()], done: 0 });
        }
        // A round that every reader here is done with, while an earlier one is not, has no places any more.
        if let Some(place) = self.rounds[round].posts.get_mut(rank) {
            *place = Some(post);
        }
    }

    /// A rank needs nothing more of a collective. What every reader is done with goes, here or with the last one before it.
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

/// One rank's contribution to a collective.
#[derive(Debug)]
pub(super) struct Post {
    call: Cow<'static, str>,
    /// Bytes for each rank; one entry for all where everybody gets the same, and of another process's rank, which sends no more than that.
    parts: Vec<Vec<u8>>,
}

impl Post {
    /// What a rank of the circle is given.
    pub fn part(&self, rank: usize) -> &[u8] {
        let part = if self.parts.len() == 1 { self.parts.first() } else { self.parts.get(rank) };
        part.map_or(&[], Vec::as_slice)
    }
}

impl World {
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The world's failure becomes this, if there is none yet.
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

/// A rank's place in a world, as long as it has a communicator or a transfer.
#[derive(Debug)]
pub(super) struct Seat {
    /// Its number among all.
    pub rank: usize,
    world: Arc<World>,
    /// Nanoseconds that it has waited for others.
    waited: AtomicU64,
}

impl Seat {
    fn new(world: &Arc<World>, rank: usize) -> Arc<Self> {
        Arc::new(Self { rank, world: world.clone(), waited: AtomicU64::new(0) })
    }

    /// Those of a new world that all ranks share, who meet in these circles.
    pub fn all(circles: Vec<Vec<usize>>, size: usize) -> impl Iterator<Item = Arc<Self>> {
        let readers = |members: &Vec<usize>| members.len();
        let world = world(circles, readers, (size, size), None);
        (0..size).map(move |rank| Seat::new(&world, rank))
    }

    /// That of the one rank of this process, and where the others' posts arrive.
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

    /// How long it has waited for others.
    pub fn waited(&self) -> Duration {
        Duration::from_nanos(self.waited.load(Ordering::Relaxed))
    }

    /// The world's failure, if there is one.
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

/// Takes what the ranks of other processes give. Nothing that they send can be wrong for it: what belongs to no circle of this rank is left.
#[derive(Debug)]
pub struct Arrivals {
    world: Arc<World>,
}

impl Arrivals {
    /// What the rank of this number among all gave to this process's rank, in the `number`th collective of a circle.
    pub fn rows(&self, from: usize, circle: usize, number: usize, call: String, bytes: Vec<u8>) {
        /// Collectives that a rank can be ahead of another; more is no rank's doing, and would only take memory.
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

    /// Another rank gives nothing more: what it gave before has arrived.
    pub fn left(&self, rank: usize) {
        self.world.left(rank);
    }

    /// The run has failed: pending and later calls return this error.
    pub fn failed(&self, why: &str) {
        self.world.failed(|| why.to_owned());
    }
}

/// A collective that a rank has called. Dropped, it tells that the rank is done with it, whether it has read what the others gave or not.
#[derive(Debug)]
pub(super) struct Ticket {
    seat: Arc<Seat>,
    circle: CircleShape,
    pub call: &'static str,
    number: usize,
}

impl Ticket {
    /// Posts a rank's parts of its next collective, and waits for nobody.
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

    /// What everybody posted, in rank order, once all have.
    pub fn read(self) -> Result<Vec<Arc<Post>>> {
        let Self { seat, circle, call, number } = &self;
        let mut state = seat.world.lock();
        let mut began = None;
        let all: Vec<Arc<Post>> = loop {
            let Circle { members, rounds, gone, .. } = state.circle(circle.index);
            // A round stays until this rank is done with it.
            let posts = &rounds[number - gone].posts;
            // Complete: a rank that has failed since does not change what it gave. The next call tells.
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
