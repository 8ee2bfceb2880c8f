//! Times of collective work: all ranks start many back-to-back calls together, and the slowest rank's time counts.

use crate::figures::median;
use nibble_core::{Backend, Comm, Result};
use serde_json::{Value, json};
use std::time::Instant;

/// Number of timed windows.
pub const WINDOWS: usize = 5;
/// Maximum number of calls per window.
const MOST_CALLS: f64 = 20_000.0;

/// The time of one call on the slowest rank, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Times {
    /// Median over the windows of the time per call.
    pub median_us: f64,
    /// Time per call in the fastest window.
    pub min_us: f64,
    /// Time per call in the slowest window.
    pub max_us: f64,
}

impl Times {
    /// Summarises the times of the windows.
    fn of(windows: Vec<f64>) -> Self {
        let of = |pick: fn(f64, f64) -> f64| windows.iter().copied().reduce(pick).unwrap_or(f64::NAN);
        Self { min_us: of(f64::min), max_us: of(f64::max), median_us: median(windows) }
    }

    /// The times as JSON.
    pub fn figures(&self) -> Value {
        json!({ "median": self.median_us, "min": self.min_us, "max": self.max_us })
    }
}

/// A rank's stopwatch; all ranks must measure with their stopwatches at the same time.
pub struct Clock<'a, B: Backend> {
    b: &'a B,
    comm: &'a dyn Comm<B>,
    /// Length of a window in seconds.
    window: f64,
    /// A value that is downloaded to wait for the device.
    marker: B::Buf<f32>,
}

impl<'a, B: Backend> Clock<'a, B> {
    /// Creates a stopwatch that repeats a call for windows of `window` seconds.
    ///
    /// # Errors
    /// Returns the backend's errors.
    pub fn new(b: &'a B, comm: &'a dyn Comm<B>, window: f64) -> Result<Self> {
        Ok(Self { b, comm, window, marker: b.zeros(1)? })
    }

    /// Waits for all work that this rank has issued.
    fn settle(&self) -> Result<()> {
        self.b.download(&self.marker).map(drop)
    }

    /// Measures the time of a call; all ranks make the same number of calls. The call allocates its memory from an arena, as a training
    /// step does.
    ///
    /// # Errors
    /// Returns the errors of the call, of the backend and of other ranks.
    pub fn time(&self, mut call: impl FnMut() -> Result<()>) -> Result<Times> {
        let arena = self.b.arena("exchange")?;
        // `window` returns the seconds per call.
        let mut window = |calls: usize| -> Result<f64> {
            self.settle()?;
            self.comm.barrier()?;
            let start = Instant::now();
            self.b.within(&arena, || (0..calls).try_for_each(|_| call()))?;
            self.settle()?;
            let mine = self.b.upload(&[start.elapsed().as_secs_f64() / calls as f64])?;
            let all = self.b.download(&self.comm.all_gather_f64(self.b, &mine)?)?;
            Ok(all.into_iter().fold(0.0, f64::max))
        };
        // All ranks see the same number of seconds, so they make the same number of calls.
        let calls = |seconds: f64| (self.window / seconds).ceil().clamp(1.0, MOST_CALLS) as usize;
        // The first call compiles kernels, grows the arena and connects ranks.
        window(1)?;
        let once = window(1)?;
        let warm = window(calls(once))?;
        let windows = (0..WINDOWS).map(|_| Ok(1e6 * window(calls(warm))?)).collect::<Result<Vec<_>>>()?;
        Ok(Times::of(windows))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nibble_cpu::{Cpu, HostComm};
    use std::time::Duration;

    #[test]
    fn windows_have_a_middle_and_ends() {
        let times = Times::of(vec![5.0, 1.0, 3.0, 9.0, 2.0]);
        assert_eq!(times, Times { median_us: 3.0, min_us: 1.0, max_us: 9.0 });
    }

    #[test]
    fn all_ranks_make_as_many_calls_and_are_told_the_same_times() {
        let rank = |comm: HostComm| {
            let (cpu, mut calls) = (Cpu::new(1).unwrap(), 0);
            let comm: &dyn Comm<Cpu> = &comm;
            // The call takes longer on the second rank.
            let spins = if comm.rank() == 0 { 1 } else { 1000u64 };
            let call = || {
                calls += 1;
                std::hint::black_box((0..spins).fold(0, |sum: u64, i| std::hint::black_box(sum ^ i)));
                Ok(())
            };
            let window = Duration::from_micros(100).as_secs_f64();
            let times = Clock::new(&cpu, comm, window).unwrap().time(call).unwrap();
            (calls, times)
        };
        let told = std::thread::scope(|scope| {
            let ranks = HostComm::world(2).into_iter().map(|comm| scope.spawn(move || rank(comm)));
            let ranks: Vec<_> = ranks.collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
        });
        assert_eq!(told[0], told[1]);
        assert!(told[0].0 >= WINDOWS + 3);
    }
}
