//! The recorder around a CPU: every operation gives the CPU's results when it is replayed; recorded work is not executed before a
//! replay; what is watched is what happened; a fault hits what it is meant for.

use nibble_core::ops::{Add, Cast, Gemm, SumShards};
use nibble_core::{Backend, DType, Data, Error, Operand, Result, Tensor, ValueRun};
use nibble_cpu::Cpu;
use nibble_testkit::recorder::{Event, Point, Struck};
use nibble_testkit::{Pair, Recorder, assert_copies_lines, conformance};

fn cpu() -> Cpu {
    Cpu::new(1).expect("one thread")
}

// Operations that run as they are issued go the same way, but for the last step; training holds them to the CPU.
// A replay passes arguments on, whatever they are: few cases of each kind do.
conformance!(replayed, Pair::strict(cpu(), Recorder::replaying(cpu())).one_of(100));

type Recorded = Recorder<Cpu>;

fn tensor(b: &Recorded, values: &[f32]) -> Tensor<Recorded> {
    Tensor::from_f32(b, values, 1, values.len()).unwrap()
}

/// into = into + x, twice, with a temporary in between.
fn work(b: &Recorded, x: &Tensor<Recorded>, into: &mut Tensor<Recorded>) -> Result<()> {
    for _ in 0..2 {
        let sum = Add::new(x, into).run(b)?;
        SumShards { x: &sum, stack: 1, shards: 1, into }.run(b)?;
    }
    Ok(())
}

fn values(b: &Recorded, x: &Tensor<Recorded>) -> Vec<f32> {
    x.to_f32_vec(b).unwrap()
}

#[test]
fn recorded_work_runs_when_it_is_replayed_on_what_its_buffers_hold_then() {
    let b = Recorder::new(cpu());
    let arena = b.arena("work").unwrap();
    let (mut x, mut into) = (tensor(&b, &[1.0, 2.0]), tensor(&b, &[10.0, 20.0]));
    let (live, id) = (b.memory().live_bytes, into.buffer_id());
    let recording = b.within(&arena, || b.record(&mut || work(&b, &x, &mut into))).unwrap();
    assert_eq!(values(&b, &into), [10.0, 20.0], "recording executes nothing");
    assert_eq!(b.memory().live_bytes, live, "temporaries are gone");

    let replay = || b.within(&arena, || b.replay(&recording)).unwrap();
    replay();
    assert_eq!(values(&b, &into), [12.0, 24.0]);
    let Data::F32(buf) = &mut x.data else { panic!("made of F32") };
    b.write(buf, 0, &[100.0]).unwrap();
    replay();
    assert_eq!(values(&b, &into), [212.0, 28.0]);
    assert_eq!((b.memory().live_bytes, into.buffer_id()), (live, id), "where they were");
    assert_eq!(b.traffic().copies_on_write, 0);
}

#[test]
fn a_replay_finds_the_addresses_of_the_work_itself() {
    let b = Recorder::new(cpu());
    let arena = b.arena("work").unwrap();
    let (x, mut into) = (tensor(&b, &[1.0; 500]), tensor(&b, &[2.0; 500]));
    b.watch();
    b.within(&arena, || work(&b, &x, &mut into)).unwrap();
    let issued = b.take_log();
    assert_eq!(issued.iter().map(|e| e.op).collect::<Vec<_>>(), ["add", "sum_shards", "add", "sum_shards"]);
    assert_eq!(issued[0].outputs[..], issued[1].inputs[..1], "the temporary");
    assert_eq!(issued[1].outputs, [into.buffer_id()]);
    assert!(issued[0].arguments.contains("500 × f32") && issued[1].arguments.contains("shards: 1"));
    let recording = b.within(&arena, || b.record(&mut || work(&b, &x, &mut into))).unwrap();
    assert!(b.take_log().is_empty(), "nothing was executed");
    for _ in 0..2 {
        b.within(&arena, || b.replay(&recording)).unwrap();
        assert_eq!(b.take_log(), issued);
    }
}

#[test]
fn what_a_gpu_cannot_record_is_refused() {
    let b = Recorder::new(cpu());
    let mut buf = b.upload(&[1.0f32]).unwrap();
    let recording = b.record(&mut || Ok(())).unwrap();
    let attempts: [&mut dyn FnMut() -> Result<()>; 6] = [
        &mut || b.upload(&[1u8]).map(drop),
        &mut || b.download(&buf.clone()).map(drop),
        &mut || b.begin_download(&buf.clone(), 0..1).map(drop),
        &mut || b.write(&mut buf.clone(), 0, &[2.0]),
        &mut || b.record(&mut || Ok(())).map(drop),
        &mut || b.replay(&recording),
    ];
    for attempt in attempts {
        let error = b.record(attempt).unwrap_err();
        assert!(matches!(error, Error::Device { .. }), "{error}");
    }
    b.write(&mut buf, 0, &[3.0]).unwrap();
    assert_eq!(b.download(&buf).unwrap(), [3.0], "afterwards it may");
    b.refuse_replay();
    assert!(b.replay(&recording).is_err());
    b.replay(&recording).unwrap();
    for refuses in [Recorder::eager(cpu()), Recorder::replaying(cpu())] {
        assert!(!refuses.can_record());
        assert!(refuses.record(&mut || Ok(())).is_err());
    }
}

#[test]
fn a_replay_that_needs_a_freed_buffer_says_so() {
    let b = Recorder::new(cpu());
    let (x, mut into) = (tensor(&b, &[1.0]), tensor(&b, &[2.0]));
    let recording = b.record(&mut || work(&b, &x, &mut into)).unwrap();
    drop(x);
    let error = b.replay(&recording).unwrap_err().to_string();
    assert!(error.contains("freed before"), "{error}");
}

#[test]
fn what_outlives_the_recording_is_made_by_every_replay() {
    let b = Recorder::new(cpu());
    let mut x = tensor(&b, &[1.0]);
    let mut y = None;
    let first = b
        .record(&mut || {
            y = Some(Add::new(&x, &x).run(&b)?);
            Ok(())
        })
        .unwrap();
    let made = y.unwrap();
    let mut z = tensor(&b, &[0.0]);
    // The second part takes over what the first one made, and drops it.
    let second = b
        .record(&mut || {
            let sum = Add::new(&made, &made).run(&b)?;
            SumShards { x: &sum, stack: 1, shards: 1, into: &mut z }.run(&b)
        })
        .unwrap();
    for value in [3.0, 5.0] {
        let Data::F32(buf) = &mut x.data else { panic!("made of F32") };
        b.write(buf, 0, &[value]).unwrap();
        b.replay(&first).unwrap();
        b.replay(&second).unwrap();
        assert_eq!((values(&b, &made), values(&b, &z)), (vec![2.0 * value], vec![4.0 * value]));
    }
}

#[test]
fn a_write_through_a_shared_handle_copies_also_where_it_is_recorded() {
    let b = Recorder::new(cpu());
    let (x, kept) = (tensor(&b, &[1.0]), tensor(&b, &[2.0]));
    let mut into = kept.clone();
    let recording = b.record(&mut || work(&b, &x, &mut into)).unwrap();
    b.replay(&recording).unwrap();
    assert_eq!((values(&b, &kept), values(&b, &into)), (vec![2.0], vec![4.0]));
    assert_ne!(kept.buffer_id(), into.buffer_id());
}

/// Of a CPU, and through a recorder, which passes them on: runs of several buffers, one behind the other.
#[test]
fn runs_of_values_are_copied_out_one_behind_the_other() {
    fn check<B: Backend>(b: &B) {
        let (first, second) = (b.upload(&[1i32, 2, 3, 4]).unwrap(), b.upload(&[5, 6, 7]).unwrap());
        let run = |buf, range| ValueRun { buf, range };
        let runs = [run(&second, 1..3), run(&first, 0..0), run(&first, 1..4), run(&second, 0..1)];
        let (mut to, before) = ([0; 6], b.traffic());
        b.copy_out(&runs, &mut to).unwrap();
        assert_eq!(to, [6, 7, 2, 3, 4, 5]);
        let moved = b.traffic() - before;
        assert_eq!((moved.downloads, moved.download_bytes), (1, 24));
        b.copy_out::<i32>(&[], &mut []).unwrap();
        let error = b.copy_out(&runs, &mut [0; 5]).unwrap_err().to_string();
        assert!(error.contains("copy_out") && error.contains("values of all runs"), "{error}");
        let error = b.copy_out(&[run(&second, 2..4)], &mut [0; 2]).unwrap_err().to_string();
        assert!(error.contains("`range`") && error.contains("2..4") && error.contains("0..3"), "{error}");
    }
    check(&cpu());
    check(&Recorded::new(cpu()));
}

/// Likewise lines at equal distances.
#[test]
fn lines_are_copied_from_one_distance_to_another() {
    assert_copies_lines(&cpu());
    assert_copies_lines(&Recorded::new(cpu()));
}

#[test]
fn transfers_are_watched_too() {
    let b = Recorder::eager(cpu());
    b.watch();
    let mut buf = b.upload(&[1u32, 2, 3]).unwrap();
    b.write(&mut buf, 1, &[7]).unwrap();
    b.clear(&mut buf).unwrap();
    let pending = b.begin_download(&buf, 0..2).unwrap();
    b.finish_download(pending).unwrap();
    let log = b.take_log();
    let ops: Vec<_> = log.iter().map(|event| (event.op, event.is_transfer())).collect();
    let want = [("upload", true), ("write", true), ("clear", false), ("begin_download", true)];
    assert_eq!(ops, [&want[..], &[("finish_download", true)]].concat());
    let id = Recorded::buffer_id(&buf);
    assert_eq!(
        log[1],
        Event {
            op: "write",
            arguments: "3 × u32 at 1..2".into(),
            inputs: vec![id],
            outputs: vec![id],
            ..Event::default()
        }
    );
}

#[test]
fn a_fault_hits_the_chosen_result_once() {
    let b = Recorder::new(cpu());
    let x = tensor(&b, &[1.0, 2.0]);
    let add = || values(&b, &Add::new(&x, &x).run(&b).unwrap());
    b.poison(Point::Named("add", 1));
    assert_eq!(b.struck(), None);
    assert_eq!(add(), [2.0, 4.0]);
    let cast = Cast { x: &x, dtype: DType::Bf16 };
    cast.run(&b).unwrap();
    let hit = add();
    assert!(hit[0].is_nan() && hit[1] == 4.0, "{hit:?}");
    assert_eq!(b.struck(), Some(Struck { op: "add", spoiled: true }));
    assert_eq!(add(), [2.0, 4.0]);
    assert_eq!(values(&b, &x), [1.0, 2.0]);

    // By number: of a BF16 result; and of one that cannot be NaN.
    b.poison(Point::Op(0));
    let hit = Cast { x: &x, dtype: DType::Bf16 }.run(&b).unwrap();
    assert!(values(&b, &hit)[0].is_nan());
    b.poison(Point::Op(0));
    assert_eq!(b.download(&b.zeros::<i32>(1).unwrap()).unwrap(), [0]);
    assert_eq!(b.struck(), Some(Struck { op: "zeros", spoiled: false }));

    // In a replay.
    let mut into = tensor(&b, &[0.0, 0.0]);
    let recording = b.record(&mut || work(&b, &x, &mut into)).unwrap();
    b.poison(Point::Named("add", 1));
    b.replay(&recording).unwrap();
    let hit = values(&b, &into);
    assert!(hit[0].is_nan() && hit[1] == 4.0, "{hit:?}");
}

#[test]
fn a_poisoned_scale_makes_its_block_nan() {
    use nibble_core::formats::{Codec, Format, Rounding, ScaleRule};
    use nibble_core::ops::{Planes, Quantize};
    let b = Recorder::new(cpu());
    let x = Tensor::from_f32(&b, &[1.0; 64], 1, 64).unwrap();
    let codec = Codec::new(Format::Mxfp4, ScaleRule::Rceil, Rounding::NearestEven).unwrap();
    b.poison(Point::Op(0));
    let rows = Quantize::new(&x, codec, Planes::Rows).run(&b).unwrap().take_rows("test").unwrap();
    let ones = Quantize::new(&x, codec, Planes::Rows).run(&b).unwrap().take_rows("test").unwrap();
    let Operand::Block(block) = &rows else { panic!("blocks were asked for") };
    assert_eq!(b.download(&block.scales).unwrap()[0], 0xFF);
    let y = Gemm { a: &rows, b: &ones, out: DType::F32 }.run(&b);
    if let Ok(y) = y {
        assert!(values(&b, &y)[0].is_nan());
    }
}
