//! Recorded work gives what issued work gives; copies larger than the staging memory. Without a GPU: a printed skip.

mod gpu;

use gpu::device;
use half::bf16;
use nibble_core::formats::{Codec, Format, Rounding, ScaleRule};
use nibble_core::ops::{Planes, Quantize};
use nibble_core::{Backend, Data, Tensor};
use nibble_cuda::Cuda;

fn values(seed: usize, len: usize) -> Vec<bf16> {
    (0..len).map(|i| bf16::from_f32(((i * 7919 + seed * 104_729) % 4093) as f32 - 2046.0)).collect()
}

#[test]
fn a_recording_gives_the_bits_of_its_first_run_and_follows_its_input() {
    let Some(device) = device("recorded work") else { return };
    let b = Cuda::on(device.clone());
    let (rows, cols) = (256, 384);
    let codec = Codec::new(Format::Mxfp4, ScaleRule::Rceil, Rounding::NearestEven).unwrap();
    let quantize = |x: &Tensor<Cuda>| {
        // Dropped within the recording, so that the second takes over its memory.
        Quantize::new(x, codec, Planes::Rows).run(&b)?;
        Quantize::new(x, codec, Planes::Rows).run(&b)?.take_rows("test")
    };
    let codes = |x: &nibble_core::Operand<Cuda>| b.download(&x.block("test").unwrap().codes).unwrap();

    let mut x = Tensor::from_bf16(&b, &values(0, rows * cols), rows, cols).unwrap();
    let graph = device.capture(|| quantize(&x)).unwrap();
    for seed in [1, 2] {
        let Data::Bf16(buf) = &mut x.data else { unreachable!("made as BF16") };
        buf.make_mut().unwrap().write(&values(seed, rows * cols)).unwrap();
        // SAFETY: `x` lives, at the address that was recorded: its handle is the only one.
        unsafe { graph.launch().unwrap() };
        assert_eq!(codes(&graph.outputs), codes(&quantize(&x).unwrap()));
    }
    let error = device.capture(|| b.upload(&[1.0f32]).map(drop)).expect_err("an upload cannot be recorded");
    assert!(error.to_string().contains("recorded"), "{error}");
    // The device is as good as before.
    assert_eq!(codes(&graph.outputs), codes(&quantize(&x).unwrap()));
}

#[test]
fn memory_dropped_while_recording_is_given_back_with_the_graph() {
    let Some(device) = device("memory of recorded work") else { return };
    let b = Cuda::on(device.clone());
    let before = device.memory().live_bytes;
    // One for the run that is real, one for the recording.
    let mut spare = vec![b.zeros::<u8>(1 << 20).unwrap(), b.zeros::<u8>(1 << 20).unwrap()];
    let graph = device
        .capture(|| {
            spare.pop();
            b.zeros::<u32>(1000)
        })
        .unwrap();
    assert!(spare.is_empty() && device.memory().live_bytes >= before + (1 << 20));
    drop(graph);
    assert_eq!(device.memory().live_bytes, before);

    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let mut runs = 0;
        device.capture(|| {
            runs += 1;
            assert!(runs < 2, "meant to fail while recording");
            Ok(())
        })
    }));
    assert!(panicked.is_err());
    assert_eq!(device.upload(&[7u8]).unwrap().download().unwrap(), [7], "the device is as good as before");
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
