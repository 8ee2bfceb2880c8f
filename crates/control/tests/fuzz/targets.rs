//! What is fuzzed: each target takes any bytes, and panics where something that reads them does, or where what follows is not as it should be.
//! The tests drive them with random bytes, the fuzzer (`fuzz/` at the root) with bytes that it chooses.

use arbitrary::{Result, Unstructured};
use nibble_control::fuzz::{HubSide, RankSide, failure_in, handshake, hub_says, rank_of, rank_says};
use nibble_control::{Ears, Failure, Limits, Rows, Secret};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

/// The control plane's protocol: any bytes, and messages out of turn, on each side and in each state.
pub fn control(data: &[u8]) {
    // Out of bytes is the end.
    let _ = read(&mut Unstructured::new(data));
}

fn read(u: &mut Unstructured<'_>) -> Result<()> {
    match u.int_in_range(0..=2)? {
        0 => {
            static SECRET: OnceLock<Secret> = OnceLock::new();
            let secret = SECRET.get_or_init(|| Secret::random().unwrap());
            handshake(u.bytes(u.len())?, secret, &rank_of(0, 2));
            Ok(())
        }
        1 => read_at_hub(u),
        _ => read_at_rank(u),
    }
}

/// Any bytes, or a message, and perhaps some bytes after it.
fn frame(u: &mut Unstructured<'_>, says: fn(u8, usize, &str, u64) -> Vec<u8>) -> Result<Vec<u8>> {
    let tail = u.int_in_range(0..=3)?;
    let tail = u.bytes(tail)?.to_vec();
    if u.ratio(1, 8)? {
        return Ok(tail);
    }
    let bytes = if u.ratio(1, 8)? { u.arbitrary()? } else { tail.len() as u64 + u.int_in_range(0..=1)? };
    let mut frame = says(u.arbitrary()?, u.int_in_range(0..=3)?, u.choose(&["", "x"])?, bytes);
    if u.ratio(1, 8)? {
        let at = u.choose_index(frame.len())?;
        frame[at] = u.arbitrary()?;
    }
    Ok([frame, tail].concat())
}

fn read_at_hub(u: &mut Unstructured<'_>) -> Result<()> {
    let world = u.int_in_range(1..=3)?;
    let mut hub = HubSide::new(world, u.int_in_range(0..=world)?, Limits::default());
    let (mut first, mut told) = (None, [0; 3]);
    let result = (0..u.int_in_range(1..=24)?).try_for_each(|_| {
        let rank = u.int_in_range(0..=3)?;
        match u.int_in_range(0..=9)? {
            0 => hub.lost(rank),
            1 => hub.ended(rank, "how"),
            2 => hub.pass(1),
            3 => drop(hub.enter(rank_of(rank, world))),
            _ => hub.hear(rank, &frame(u, rank_says)?),
        }
        first = first.take().or(hub.failure().cloned());
        assert_eq!(first.as_ref(), hub.failure(), "the first failure is the run's");
        for (number, told) in told.iter_mut().enumerate() {
            *told += hub.told(number).iter().filter(|frame| failure_in(frame).is_some()).count();
        }
        Ok(())
    });
    // Nobody is told twice, nor of a failure that is none.
    assert!(told.iter().all(|told| *told <= usize::from(first.is_some())), "{told:?}");
    result
}

/// Counts failures, and what comes after one.
#[derive(Default)]
struct Count(AtomicU32);

impl Ears for Count {
    fn rows(&self, _: usize, _: Rows) {
        assert_eq!(self.0.load(Ordering::Relaxed), 0, "rows after a failure");
    }
    fn left(&self, _: usize) {
        assert_eq!(self.0.load(Ordering::Relaxed), 0, "a farewell after a failure");
    }
    fn failed(&self, _: &Failure) {
        assert_eq!(self.0.fetch_add(1, Ordering::Relaxed), 0, "two failures");
    }
    fn overdue(&self, _: &Failure) {}
}

fn read_at_rank(u: &mut Unstructured<'_>) -> Result<()> {
    let mut rank = RankSide::new(u.int_in_range(1..=3)?, u.arbitrary()?, Arc::new(Count::default()));
    for _ in 0..u.int_in_range(1..=24)? {
        let wrong = rank.hear(&frame(u, hub_says)?).is_err();
        assert!(!wrong || rank.failure().is_some(), "a hub that sends no message is given up");
    }
    Ok(())
}
