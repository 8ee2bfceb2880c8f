//! Ranks as threads.

use nibble_core::{Backend, Comm, Error, Plain, Result};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// What all ranks of a world share.
#[derive(Debug)]
struct World {
    size: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// What each rank posted for the collective under way; `None` until it arrives.
    posts: Vec<Option<Arc<Post>>>,
    /// Ranks that have read the posts of this collective.
    readers: usize,
    /// The first failure, with the rank that had it.
    failure: Option<(usize, String)>,
}

/// One rank's contribution to a collective.
#[derive(Debug)]
struct Post {
    call: &'static str,
    /// Bytes for each rank; one entry for all where everybody gets the same.
    parts: Vec<Vec<u8>>,
}

/// One rank of a world of threads that exchange through shared memory.
///
/// A rank that is dropped while its thread panics, or that calls [`Comm::abort`], fails the pending and later calls of
/// all others with its error.
#[derive(Debug)]
pub struct ThreadComm {
    rank: usize,
    world: Arc<World>,
}

impl ThreadComm {
    /// The ranks of a new world, in order.
    pub fn world(size: usize) -> Vec<Self> {
        let state = State { posts: vec![None; size], ..State::default() };
        let world = Arc::new(World { size, state: Mutex::new(state), changed: Condvar::new() });
        (0..size).map(|rank| Self { rank, world: world.clone() }).collect()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.world.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.world.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    fn check(&self, call: &'static str, state: &State) -> Result<()> {
        match &state.failure {
            Some((rank, why)) => {
                Err(Error::Comm { call, rank: self.rank, why: format!("rank {rank} failed: {why}") })
            }
            None => Ok(()),
        }
    }

    /// Posts this rank's parts and returns everybody's, in rank order, once all have arrived.
    fn exchange(&self, call: &'static str, parts: Vec<Vec<u8>>) -> Result<Vec<Arc<Post>>> {
        let mut state = self.lock();
        // The previous collective must have been read by all before its places are used again.
        while state.posts[self.rank].is_some() {
            self.check(call, &state)?;
            state = self.wait(state);
        }
        self.check(call, &state)?;
        state.posts[self.rank] = Some(Arc::new(Post { call, parts }));
        self.world.changed.notify_all();
        while !state.posts.iter().all(Option::is_some) {
            self.check(call, &state)?;
            state = self.wait(state);
        }
        self.check(call, &state)?;
        let posts: Vec<Arc<Post>> = state.posts.iter().flatten().cloned().collect();
        state.readers += 1;
        if state.readers == self.world.size {
            state.readers = 0;
            state.posts.fill(None);
            self.world.changed.notify_all();
        }
        drop(state);
        if let Some((rank, other)) = posts.iter().enumerate().find(|(_, p)| p.call != call) {
            let why = format!("rank {rank} called {} at the same time", other.call);
            self.fail(&why);
            return Err(Error::Comm { call, rank: self.rank, why });
        }
        Ok(posts)
    }

    fn fail(&self, why: &str) {
        let mut state = self.lock();
        state.failure.get_or_insert_with(|| (self.rank, why.to_owned()));
        self.world.changed.notify_all();
    }

    /// Every rank's same-sized values, in rank order.
    fn gather<B: Backend, T: Plain>(&self, call: &'static str, b: &B, values: &B::Buf<T>) -> Result<Vec<Vec<T>>> {
        let bytes = bytemuck::cast_slice(&b.download(values)?).to_vec();
        let posts = self.exchange(call, vec![bytes])?;
        let all: Vec<Vec<T>> = posts.iter().map(|p| bytemuck::pod_collect_to_vec(&p.parts[0])).collect();
        match all.iter().enumerate().find(|(_, v)| v.len() != all[self.rank].len()) {
            Some((rank, v)) => {
                let why = format!("rank {rank} sent {} values, this rank {}", v.len(), all[self.rank].len());
                self.fail(&why);
                Err(Error::Comm { call, rank: self.rank, why })
            }
            None => Ok(all),
        }
    }
}

impl Drop for ThreadComm {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.fail("its thread panicked");
        }
    }
}

impl<B: Backend> Comm<B> for ThreadComm {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.world.size
    }

    fn counts(&self, b: &B, send: &B::Buf<i32>) -> Result<B::Buf<i32>> {
        let all = self.gather("counts", b, send)?;
        let mine: Vec<i32> = all.iter().filter_map(|from| from.get(self.rank).copied()).collect();
        if mine.len() != self.world.size {
            let why = format!("{} counts for {} ranks", all[self.rank].len(), self.world.size);
            return Err(Error::Comm { call: "counts", rank: self.rank, why });
        }
        b.upload(&mine)
    }

    fn all_to_all_v(
        &self,
        b: &B,
        send: &B::Buf<u8>,
        row_bytes: usize,
        send_rows: &[usize],
        recv_rows: &[usize],
    ) -> Result<B::Buf<u8>> {
        const CALL: &str = "all_to_all_v";
        let error = |why: String| Error::Comm { call: CALL, rank: self.rank, why };
        let bytes = b.download(send)?;
        let size = self.world.size;
        if send_rows.len() != size || recv_rows.len() != size {
            let why = format!("{} and {} counts for {size} ranks", send_rows.len(), recv_rows.len());
            return Err(error(why));
        }
        if send_rows.iter().sum::<usize>() * row_bytes != bytes.len() {
            let rows: usize = send_rows.iter().sum();
            return Err(error(format!("{rows} rows of {row_bytes} bytes announced, {} bytes given", bytes.len())));
        }
        let mut rest = bytes.as_slice();
        let mut parts = Vec::with_capacity(size);
        for rows in send_rows {
            let (part, tail) = rest.split_at(rows * row_bytes);
            parts.push(part.to_vec());
            rest = tail;
        }
        let posts = self.exchange(CALL, parts)?;
        let mut received = Vec::with_capacity(recv_rows.iter().sum::<usize>() * row_bytes);
        for (from, (post, rows)) in posts.iter().zip(recv_rows).enumerate() {
            let part = &post.parts[self.rank];
            if part.len() != rows * row_bytes {
                let why = format!("{rows} rows of {row_bytes} bytes expected from rank {from}, {} bytes came", part.len());
                self.fail(&why);
                return Err(error(why));
            }
            received.extend_from_slice(part);
        }
        b.upload(&received)
    }

    fn all_reduce_tree(&self, b: &B, values: &mut B::Buf<f32>) -> Result<()> {
        let mut level = self.gather("all_reduce_tree", b, values)?;
        while level.len() > 1 {
            level = level
                .chunks(2)
                .map(|pair| match pair {
                    [a, c] => a.iter().zip(c).map(|(x, y)| x + y).collect(),
                    alone => alone.concat(),
                })
                .collect();
        }
        *values = b.upload(&level.concat())?;
        Ok(())
    }

    fn all_gather(&self, b: &B, values: &B::Buf<f32>) -> Result<B::Buf<f32>> {
        b.upload(&self.gather("all_gather", b, values)?.concat())
    }

    fn barrier(&self) -> Result<()> {
        self.exchange("barrier", vec![Vec::new()]).map(drop)
    }

    fn abort(&self, why: &str) {
        self.fail(why);
    }
}
