//! Memory on a GPU. Without one: a printed skip, or a failure under `NIBBLE_REQUIRE_GPU=1`.

use crate::gpu;

use gpu::device;
use nibble_core::{Backend, Plain, Traffic, ValueRun};
use nibble_cuda::Cuda;
use nibble_cuda::backend::Buf;
use nibble_testkit::assert_copies_lines;

#[test]
fn memory_is_counted() {
    let Some(device) = device("memory accounting") else { return };
    let first = device.upload(&[1.5f32, -2.0]).unwrap();
    assert_eq!(first.download().unwrap(), [1.5, -2.0]);
    let second = device.filled::<u8>(100, 7).unwrap();
    assert_eq!(device.memory().live_bytes, 108);
    drop(first);
    assert_eq!(second.download().unwrap(), [7; 100]);
    assert_eq!((device.memory().live_bytes, device.memory().peak_bytes), (100, 108));
    let mut shared = Buf::new(second);
    let kept = shared.clone();
    assert_eq!(Cuda::buffer_id(&shared), Cuda::buffer_id(&kept));
    let own = shared.make_mut().unwrap().address();
    assert_ne!(own, kept.get().address(), "a write through a shared handle makes a copy");
    assert_eq!(shared.make_mut().unwrap().address(), own, "and only then");
    assert_eq!(Cuda::on(device.clone()).download(&shared).unwrap(), [7; 100]);
    assert_ne!(Cuda::buffer_id(&shared), Cuda::buffer_id(&kept));
    assert_eq!(device.alloc::<f32>(0).unwrap().download().unwrap(), [0.0f32; 0]);
}

#[test]
fn the_same_work_within_an_arena_finds_the_same_addresses() {
    let Some(device) = device("arenas") else { return };
    let b = Cuda::on(device.clone());
    let arena = b.arena("step").unwrap();
    // More than one mapping; every value is read back.
    let work = || {
        let (mut ids, mut kept) = (Vec::new(), Vec::new());
        for i in 0..60u32 {
            let words = 1 + (i as usize * 977_773) % (4 << 20);
            let buf = b.upload(&vec![i; words])?;
            let bytes = device.filled::<u8>(words, 0xA5).map(Buf::new)?;
            ids.extend([Cuda::buffer_id(&buf), Cuda::buffer_id(&bytes)]);
            kept.push((i, buf));
            if i % 3 == 2 {
                kept.swap_remove(i as usize % kept.len());
            }
        }
        for (i, buf) in &kept {
            assert!(b.download(buf)?.iter().all(|word| word == i), "buffer {i} is its own");
        }
        Ok(ids)
    };
    let first = b.within(&arena, work).unwrap();
    assert_eq!(b.within(&arena, work).unwrap(), first);
    let memory = b.arena_memory(&arena);
    let total = memory.total_bytes.unwrap();
    println!("{total} bytes mapped, {} live at most", memory.peak_bytes);
    assert!(memory.live_bytes == 0 && memory.peak_bytes <= total && total > 64 << 20);
    assert!(b.memory().live_bytes == 0 && b.memory().peak_bytes == memory.peak_bytes);
}

#[test]
fn an_arena_gives_its_memory_back_and_says_when_there_is_none() {
    let Some(device) = device("memory of arenas") else { return };
    let b = Cuda::on(device.clone());
    let arena = b.arena("step").unwrap();
    let free = || {
        device.synchronize().unwrap();
        cudarc::driver::result::mem_get_info().unwrap().0
    };
    // Large beside what other tests take meanwhile.
    let (bytes, slack) = (24usize << 30, 8 << 30);
    let before = free();
    let (large, last) = b.within(&arena, || Ok((b.alloc::<u8>(bytes)?, b.upload(&[3u64, 4])?))).unwrap();
    drop((arena, large));
    assert!((free() + bytes).abs_diff(before) < slack, "a buffer keeps its arena");
    assert_eq!(b.download(&last).unwrap(), [3, 4]);
    drop(last);
    assert!(free().abs_diff(before) < slack, "the memory is given back");

    let arena = b.arena("small").unwrap();
    let error = b.within(&arena, || b.alloc::<u8>(1 << 40)).unwrap_err().to_string();
    for part in ["`small`", &(1u64 << 40).to_string(), "free"] {
        assert!(error.contains(part), "{part}: {error}");
    }
    let all = device.info().memory_bytes;
    let error = b.within(&arena, || b.alloc::<u8>(all - (1 << 20))).unwrap_err().to_string();
    assert!(error.contains("cuMemCreate") && error.contains("`small`"), "{error}");
    assert_eq!(b.within(&arena, || b.download(&b.upload(&[5u8])?)).unwrap(), [5], "as good as before");
}

#[test]
fn a_download_under_way_brings_the_values_of_its_moment() {
    let Some(device) = device("downloads that nobody waits for") else { return };
    let b = Cuda::on(device.clone());
    let arena = b.arena("step").unwrap();
    let words: Vec<u32> = (0..16 << 20).map(|i: u32| i.wrapping_mul(0x9E37_79B9)).collect();
    let check = |inside: bool| {
        let mut buf = b.upload(&words)?;
        let whole = b.begin_download(&buf, 0..words.len())?;
        let part = b.begin_download(&buf, 1000..3000)?;
        let none = b.begin_download(&buf, 7..7)?;
        // Overwritten, dropped, and its memory used again.
        b.write(&mut buf, 1500, &[7; 10])?;
        let after = b.begin_download(&buf, 1500..1511)?;
        drop(b.begin_download(&buf, 0..words.len())?);
        drop(buf);
        let others: Vec<_> =
            (0..4).map(|_| device.filled::<u32>(words.len(), 0xEE)).collect::<nibble_core::Result<_>>()?;
        assert_eq!(b.finish_download(after)?[8..], [7, 7, words[1510]], "{inside}");
        assert!(b.finish_download(whole)? == words, "{inside}: the whole");
        assert_eq!(b.finish_download(part)?, words[1000..3000], "{inside}");
        assert_eq!(b.finish_download(none)?, [0u32; 0]);
        assert!(others[3].download()?.iter().all(|word| *word == 0xEEEE_EEEE));
        Ok(())
    };
    for _ in 0..3 {
        check(false).unwrap();
        b.within(&arena, || check(true)).unwrap();
    }
    assert_eq!((b.memory().live_bytes, b.arena_memory(&arena).live_bytes), (0, 0));
    let buf = b.upload(&[1u8, 2, 3]).unwrap();
    for (range, says) in [(2..4, "2..4"), (4..4, "4..4")] {
        let error = b.begin_download(&buf, range).unwrap_err().to_string();
        assert!(error.contains("`range`") && error.contains(says) && error.contains("0..3"), "{error}");
    }
}

#[test]
fn values_come_out_beside_the_work() {
    let Some(device) = device("copies beside the work") else { return };
    let b = Cuda::on(device.clone());
    // Several pieces, and not a whole number of them.
    let words: Vec<u32> = (0..(5 << 20) + 77).map(|i: u32| i.wrapping_mul(0x9E37_79B9)).collect();
    let buf = b.upload(&words).unwrap();
    device.synchronize().unwrap();
    std::thread::scope(|threads| {
        let (b, copy, words) = (b.clone(), buf.clone(), &words);
        let copier = threads.spawn(move || {
            for at in [0, 1, 4 << 20, words.len() - 3, words.len()] {
                let mut to = vec![0; words.len() - at];
                b.copy_out(&[run(&copy, at..words.len())], &mut to).unwrap();
                assert!(to == words[at..], "from {at}");
            }
        });
        while !copier.is_finished() {
            assert!(device.filled::<u32>(1 << 20, 0xEE).unwrap().download().unwrap()[77] == 0xEEEE_EEEE);
        }
        copier.join().unwrap();
    });
    // To memory that the copy engine reaches by itself.
    let values: Vec<f32> = words.iter().map(|word| *word as f32).collect();
    let buf_f32 = b.upload(&values).unwrap();
    device.synchronize().unwrap();
    let mut host = b.host_values(values.len()).unwrap();
    assert!(host.as_ref().iter().all(|x| *x == 0.0));
    for at in [0, 1, 4 << 20, values.len()] {
        b.copy_out(&[run(&buf_f32, at..values.len())], &mut host.as_mut()[..values.len() - at]).unwrap();
        assert!(host.as_ref()[..values.len() - at] == values[at..], "pinned, from {at}");
    }
    let error =
        b.copy_out(&[run(&buf, words.len() - 1..words.len() + 1)], &mut [0, 0]).unwrap_err().to_string();
    assert!(error.contains("copy_out") && error.contains("`range`"), "{error}");
}

fn run<T: Plain>(buf: &<Cuda as Backend>::Buf<T>, range: std::ops::Range<usize>) -> ValueRun<'_, Cuda, T> {
    ValueRun { buf, range }
}

/// Runs of several buffers lie one behind the other, in pinned memory and in other.
#[test]
fn many_runs_come_out_at_once() {
    let Some(device) = device("runs of several buffers") else { return };
    let b = Cuda::on(device.clone());
    let all: Vec<Vec<f32>> =
        (0..70).map(|i| (0..1000 + 77 * i).map(|j| (i * 10_000 + j) as f32).collect()).collect();
    let bufs: Vec<_> = all.iter().map(|values| b.upload(values).unwrap()).collect();
    device.synchronize().unwrap();
    let cut = |i: usize| i % 5..all[i].len() - 3 * (i % 2);
    let runs: Vec<_> = (0..70).rev().map(|i| run(&bufs[i], cut(i))).chain([run(&bufs[3], 4..4)]).collect();
    let want: Vec<f32> = (0..70).rev().flat_map(|i| all[i][cut(i)].to_vec()).collect();
    let mut plain = vec![0.0; want.len()];
    b.copy_out(&runs, &mut plain).unwrap();
    assert!(plain == want);
    let mut host = b.host_values(want.len() + 1).unwrap();
    let before = b.traffic();
    b.copy_out(&runs, &mut host.as_mut()[1..]).unwrap();
    assert!(host.as_ref()[1..] == want && host.as_ref()[0] == 0.0);
    assert_eq!((b.traffic() - before).downloads, 1);
    b.copy_out::<f32>(&[], &mut []).unwrap();
    let error = b.copy_out(&runs, &mut host.as_mut()[..10]).unwrap_err().to_string();
    assert!(error.contains("copy_out") && error.contains("values of all runs"), "{error}");
}

#[test]
fn what_goes_between_host_and_device_is_counted() {
    let Some(device) = device("traffic") else { return };
    let b = Cuda::on(device);
    let mut a = b.upload(&[1.0f32, 2.0, 3.0]).unwrap();
    b.write(&mut a, 1, &[5.0]).unwrap();
    let before = Traffic { uploads: 2, upload_bytes: 16, ..Traffic::default() };
    assert_eq!(b.traffic(), before);
    assert_eq!(b.download(&a).unwrap(), [1.0, 5.0, 3.0]);
    let pending = b.begin_download(&a, 1..3).unwrap();
    assert_eq!((b.traffic() - before).waits, 1, "a download begun waits for nothing");
    assert_eq!(b.finish_download(pending).unwrap(), [5.0, 3.0]);
    let mut shared = a.clone();
    b.write(&mut shared, 0, &[9.0]).unwrap();
    assert_eq!(
        (b.download(&a).unwrap(), b.download(&shared).unwrap()),
        (vec![1.0, 5.0, 3.0], vec![9.0, 5.0, 3.0])
    );
    let expected = Traffic {
        uploads: 1,
        upload_bytes: 4,
        downloads: 4,
        download_bytes: 44,
        waits: 4,
        copies_on_write: 1,
    };
    assert_eq!(b.traffic() - before, expected);
    assert!(b.write(&mut shared, 3, &[1.0]).unwrap_err().to_string().contains("3..4"));
    assert!(b.write(&mut a.clone(), usize::MAX, &[1.0]).is_err());

    let bits = b.reinterpret::<f32, u32>(&a).unwrap();
    assert_eq!(b.download(&bits).unwrap(), [1.0f32, 5.0, 3.0].map(f32::to_bits));
    assert_eq!(Cuda::buffer_id(&bits), Cuda::buffer_id(&a), "the same bytes");
    b.write(&mut a, 0, &[2.0]).unwrap();
    assert_eq!(b.download(&bits).unwrap()[0], 1.0f32.to_bits(), "shared: the writer made a copy");
    assert!(b.reinterpret::<f32, u64>(&a).unwrap_err().to_string().contains("multiple of 8"));
    drop((a, shared, bits));
    assert_eq!(b.memory().live_bytes, 0);
}

#[test]
fn events_time_what_lies_between_them() {
    let Some(device) = device("events") else { return };
    let first = device.event().unwrap();
    // No Hopper fills 7 TB/s.
    device.filled::<u8>(256 << 20, 1).unwrap();
    let second = device.event().unwrap();
    device.filled::<u8>(2 << 30, 2).unwrap();
    let third = device.event().unwrap();
    // The last first: it waits for all of them.
    let whole = third.elapsed_ms(&first).unwrap();
    let (short, long) = (second.elapsed_ms(&first).unwrap(), third.elapsed_ms(&second).unwrap());
    assert!(short > 0.03 && long > 0.3, "{short} ms, then {long} ms");
    assert!((whole - (short + long)).abs() < 0.01, "{whole} ms in all, of {short} and {long}");
}

#[test]
fn lines_are_copied_from_one_distance_to_another() {
    let Some(device) = device("copies of lines") else { return };
    assert_copies_lines(&Cuda::on(device.clone()));
}
