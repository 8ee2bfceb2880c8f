//! What goes between host and device in a step of one rank: its inputs in one copy, its record in one copy, one wait.

mod rig;

use nibble_core::{Backend, Traffic};
use nibble_cpu::Cpu;
use nibble_testkit::Recorder;
use nibble_train::trainer::Trainer;
use rig::{SOLO, small};

#[test]
fn a_step_is_one_upload_one_download_and_one_wait() {
    for recipe in rig::recipes() {
        for accum in [1, 2] {
            let config = small(recipe, &[&format!("train.grad_accum={accum}")]);
            let cpu = Cpu::new(2).unwrap();
            let mut trainer = Trainer::new(&cpu, &SOLO, &config).unwrap();
            // The first step also makes the buffers of all of them.
            trainer.train_step().unwrap();
            for _ in 0..3 {
                let before = cpu.traffic();
                trainer.train_step().unwrap();
                let went = cpu.traffic() - before;
                let Traffic { upload_bytes, download_bytes, .. } = went;
                let want = Traffic {
                    uploads: 1,
                    upload_bytes,
                    downloads: 1,
                    download_bytes,
                    waits: 1,
                    copies_on_write: 0,
                };
                assert_eq!(went, want, "{recipe}, {accum} micro-batches");
                // Inputs and targets of every token, and four scalars.
                let tokens = config.tokens_per_step();
                assert_eq!(upload_bytes, 4 * (4 + 2 * tokens), "{recipe}");
                assert!(download_bytes > 0, "{recipe}");
            }
        }
    }
}

/// The host goes on while a step is under way: issuing waits for nothing.
#[test]
fn issuing_a_step_does_not_wait() {
    let config = small("mxfp4-hopper", &[]);
    let cpu = Cpu::new(2).unwrap();
    let mut trainer = Trainer::new(&cpu, &SOLO, &config).unwrap();
    trainer.train_step().unwrap();
    let before = cpu.traffic();
    trainer.issue_step().unwrap();
    trainer.issue_step().unwrap();
    assert_eq!((cpu.traffic() - before).waits, 0);
    trainer.settle().unwrap();
    assert_eq!((cpu.traffic() - before).waits, 1);
}

/// Replayed, it is the same copies, in this order, once each.
#[test]
fn a_replayed_step_copies_the_same() {
    for recipe in rig::recipes() {
        let b = Recorder::new(Cpu::new(2).unwrap());
        let mut trainer = Trainer::new(&b, &SOLO, &small(recipe, &["train.grad_accum=2"])).unwrap();
        trainer.train_step().unwrap();
        b.watch();
        let before = b.traffic();
        trainer.train_step().unwrap();
        let log = b.take_log();
        let transfers: Vec<_> =
            log.iter().filter(|event| event.is_transfer()).map(|event| event.op).collect();
        assert_eq!(transfers, ["write", "begin_download", "finish_download"], "{recipe}");
        assert_eq!((b.traffic() - before).copies_on_write, 0, "{recipe}");
    }
}
