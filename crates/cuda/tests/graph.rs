//! Recorded work gives what issued work gives, from memory that nobody else is given; copies larger than the staging memory.
//! Without a GPU: a printed skip.

use crate::gpu;

use gpu::device;
use half::bf16;
use nibble_core::formats::{Codec, Format, Purpose, Rounding, ScaleRule, Stream};
use nibble_core::ops::{Emitted, Planes, Quantize, Random};
use nibble_core::{Backend, Data, Result, Tensor};
use nibble_cuda::{Cuda, Recording};
use std::panic::{AssertUnwindSafe, catch_unwind};

fn values(seed: usize, len: usize) -> Vec<bf16> {
    (0..len).map(|i| bf16::from_f32(((i * 7919 + seed * 104_729) % 4093) as f32 - 2046.0)).collect()
}

/// Two conversions, of which the first is dropped, so that the second takes over its memory.
fn quantized(b: &Cuda, x: &Tensor<Cuda>) -> Result<Emitted<Cuda>> {
    let codec = Codec::new(Format::Mxfp4, ScaleRule::Rceil, Rounding::NearestEven).unwrap();
    Quantize::new(x, codec, Planes::Rows).run(b)?;
    Quantize::new(x, codec, Planes::Rows).run(b)
}

/// Codes and counts.
fn read(b: &Cuda, made: &Emitted<Cuda>) -> (Vec<u8>, Vec<u64>) {
    let rows = made.rows.as_ref().unwrap().block("test").unwrap();
    (b.download(&rows.codes).unwrap(), b.download(&made.counts.as_ref().unwrap().0).unwrap())
}

#[test]
fn a_recording_executes_nothing_and_its_replays_follow_its_input() {
    // A device of its own: no kernel is loaded when the recording begins.
    let Some(device) = device("recorded work") else { return };
    let b = Cuda::on(device);
    let (rows, cols) = (256, 384);
    let mut x = Tensor::from_bf16(&b, &values(0, rows * cols), rows, cols).unwrap();
    let arena = b.arena("recorded").unwrap();
    // A buffer in the arena, at whose place the recording's memory will not be.
    let (kept, mut made) = (b.within(&arena, || b.upload(&[1u8, 2, 3])).unwrap(), None);
    let recording = b.within(&arena, || {
        b.record(&mut || {
            made = Some(quantized(&b, &x)?);
            Ok(())
        })
    });
    let (recording, made) = (recording.unwrap(), made.unwrap());
    for seed in [1, 2] {
        let Data::Bf16(buf) = &mut x.data else { unreachable!("made as BF16") };
        let mut values = values(seed, rows * cols);
        // As many blocks without a scale as the seed says.
        (0..seed).for_each(|block| values[block * cols] = bf16::NAN);
        b.write(buf, 0, &values).unwrap();
        let counts = (0..3).map(|_| {
            b.replay(&recording).unwrap();
            read(&b, &made)
        });
        let want = read(&b, &quantized(&b, &x).unwrap());
        assert!(want.1.contains(&(seed as u64)), "{:?} counts {seed} blocks", want.1);
        assert!(counts.into_iter().all(|got| got == want), "every replay begins with counts of zero");
    }
    assert_eq!(b.traffic().copies_on_write, 0, "the input stayed at its address");
    assert_eq!(b.download(&kept).unwrap(), [1, 2, 3]);
}

/// What is traced is named by what ran: nothing while work is recorded, and all of it at every replay.
#[test]
fn kernels_of_a_recording_are_noted_as_often_as_they_run() {
    let Some(device) = device("recorded launches") else { return };
    let b = Cuda::on(device);
    let x = Tensor::from_bf16(&b, &values(0, 128 * 256), 128, 256).unwrap();
    let ((), once) = b.logged(|| quantized(&b, &x).map(drop)).unwrap();
    let arena = b.arena("recorded").unwrap();
    let mut recording = None;
    let ((), none) = b
        .logged(|| {
            recording = Some(b.within(&arena, || b.record(&mut || quantized(&b, &x).map(drop)))?);
            Ok(())
        })
        .unwrap();
    assert!(!once.is_empty() && none.is_empty(), "{once:?}, {none:?}");
    let recording = recording.unwrap();
    let ((), replayed) = b.logged(|| (0..3).try_for_each(|_| b.replay(&recording))).unwrap();
    assert_eq!(replayed, once.repeat(3));
}

/// The step of stochastic rounding lies on the device: every replay draws the bits of the step it finds there.
#[test]
fn a_replay_draws_the_random_bits_of_the_step_it_finds() {
    let Some(device) = device("recorded random bits") else { return };
    let b = Cuda::on(device);
    let codec = Codec::new(Format::Mxfp4, ScaleRule::Rceil, Rounding::Stochastic).unwrap();
    let x = Tensor::from_bf16(&b, &values(3, 128 * 256), 128, 256).unwrap();
    let at = |step| Stream::new(7, Purpose::Rounding, 0x5EED, step);
    let op = |random| Quantize { random: Some(random), ..Quantize::new(&x, codec, Planes::Rows) };
    let mut step = b.upload(&[0u32]).unwrap();
    let arena = b.arena("recorded").unwrap();
    let mut made = None;
    let recording = b.within(&arena, || {
        b.record(&mut || {
            let random = Some(Random { step: Some(&step), ..at(99).into() });
            made = Some(Quantize { random, ..Quantize::new(&x, codec, Planes::Rows) }.run(&b)?);
            Ok(())
        })
    });
    let (recording, made) = (recording.unwrap(), made.unwrap());
    let mut all = Vec::new();
    for number in [1, 2, u32::MAX] {
        b.write(&mut step, 0, &[number]).unwrap();
        b.replay(&recording).unwrap();
        let got = read(&b, &made);
        assert_eq!(got, read(&b, &op(at(number).into()).run(&b).unwrap()), "step {number}");
        all.push(got.0);
    }
    assert!(all[0] != all[1] && all[1] != all[2], "the step decides");
}

#[test]
fn what_cannot_be_recorded_is_refused_and_the_device_is_as_good_as_before() {
    let Some(device) = device("what cannot be recorded") else { return };
    let b = Cuda::on(device.clone());
    let arena = b.arena("recorded").unwrap();
    let mut there = b.upload(&[1.0f32, 2.0]).unwrap();
    let refused = |what: &str, says: &str, work: &mut dyn FnMut() -> Result<()>| {
        let error = b.within(&arena, || b.record(work)).expect_err(what).to_string();
        assert!(error.contains(says), "{what}: {error}");
    };
    refused("an upload", "recorded", &mut || b.upload(&[1.0f32]).map(drop));
    refused("a write", "recorded", &mut || b.write(&mut there, 0, &[5.0]));
    refused("a download", "recorded", &mut || b.download(&there).map(drop));
    refused("a download begun", "recorded", &mut || b.begin_download(&there, 0..1).map(drop));
    refused("a wait", "recorded", &mut || device.synchronize());
    refused("a recording in a recording", "under way", &mut || b.record(&mut || Ok(())).map(drop));
    let empty = b.record(&mut || Ok(())).unwrap();
    refused("a replay", "recorded", &mut || b.replay(&empty));
    let outside = b.record(&mut || b.zeros::<u8>(10).map(drop)).expect_err("outside an arena").to_string();
    assert!(outside.contains("arena") && outside.contains("10 bytes"), "{outside}");
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        b.within(&arena, || b.record(&mut || panic!("meant to fail while recording")))
    }));
    assert!(panicked.is_err());
    assert_eq!(b.download(&b.upload(&[7u8]).unwrap()).unwrap(), [7]);
    assert_eq!(b.download(&there).unwrap(), [1.0, 2.0]);
    b.replay(&b.within(&arena, || b.record(&mut || b.zeros::<u8>(3).map(drop))).unwrap()).unwrap();
    device.synchronize().unwrap();
}

/// A recording that allocates and drops so many bytes in an arena of its own.
fn recording(b: &Cuda, bytes: usize) -> Recording {
    let arena = b.arena("recorded").unwrap();
    b.within(&arena, || b.record(&mut || b.zeros::<u8>(bytes).map(drop))).unwrap()
}

#[test]
fn memory_that_a_recording_may_use_is_kept_for_as_long_as_it_lives() {
    let Some(device) = device("memory of recorded work") else { return };
    let b = Cuda::on(device.clone());
    let before = device.memory().live_bytes;
    const BYTES: usize = 1 << 20;
    let mut spare = Some(b.zeros::<u8>(BYTES).unwrap());
    let later = b.zeros::<u8>(BYTES).unwrap();
    let known = [spare.as_ref().unwrap(), &later].map(Cuda::buffer_id);
    let arena = b.arena("recorded").unwrap();
    let first = b.within(&arena, || {
        b.record(&mut || {
            spare = None;
            b.zeros::<u32>(1000).map(drop)
        })
    });
    let first = first.unwrap();
    assert!(spare.is_none());
    drop(later);
    assert_eq!(device.memory().live_bytes, before + 2 * BYTES, "dropped, and kept");
    let others: Vec<_> = (0..8).map(|_| b.zeros::<u8>(BYTES).unwrap()).collect();
    assert!(others.iter().all(|other| !known.contains(&Cuda::buffer_id(other))), "nobody else is given them");
    drop(others);
    assert_eq!(device.memory().live_bytes, before + 2 * BYTES, "what came later is not kept");
    let second = recording(&b, 100);
    drop(first);
    assert_eq!(device.memory().live_bytes, before, "the second recording cannot know them");
    drop(second);
    assert_eq!(device.memory().live_bytes, before);
}

#[test]
fn a_recording_keeps_its_arena_and_gives_it_back() {
    let Some(device) = device("an arena of recorded work") else { return };
    let b = Cuda::on(device.clone());
    let free = || {
        device.synchronize().unwrap();
        cudarc::driver::result::mem_get_info().unwrap().0
    };
    // Large beside what other tests take meanwhile.
    const BYTES: usize = 8 << 30;
    const SLACK: usize = 2 << 30;
    let before = free();
    let taken = |arenas: usize| (free() + arenas * BYTES).abs_diff(before) < SLACK;
    let recording = recording(&b, BYTES);
    assert!(taken(1), "the arena's last handle is gone, and its memory is there");
    b.replay(&recording).unwrap();
    let other = b.arena("other").unwrap();
    let buffer = b.within(&other, || b.zeros::<u8>(BYTES)).unwrap();
    // It may use what is there when it is made.
    let second = self::recording(&b, 1);
    drop((other, buffer));
    assert!(taken(2));
    drop(second);
    assert!(taken(1), "nobody may use the other one any more");
    drop(recording);
    assert!(taken(0), "{} bytes free, {before} before", free());
}

#[test]
fn copies_of_any_size_come_back() {
    let Some(device) = device("copies") else { return };
    for len in [0, 1, 1 << 20, (1 << 20) + 1, (5 << 20) + 77] {
        let values: Vec<u32> = (0..len).map(|i| i as u32 ^ 0x5A5A_1234).collect();
        assert_eq!(device.upload(&values).unwrap().download().unwrap(), values, "{len} words");
    }
    // Many small ones share the staging memory.
    let small: Vec<_> =
        (0..3000u32).map(|i| device.upload(&vec![i; 1 + i as usize % 900]).unwrap()).collect();
    for (i, buffer) in small.iter().enumerate().step_by(97) {
        assert!(buffer.download().unwrap().iter().all(|&word| word == i as u32), "upload {i}");
    }
}
