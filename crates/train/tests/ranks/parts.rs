//! What a process says of where it is, and the points that only several ranks pass. In a process of its own: all of it is one process's.
#![cfg(debug_assertions)]

use crate::rig;

use nibble_core::MeshShape;
use nibble_core::allocation::{step, with_phase};
use nibble_cpu::Cpu;
use nibble_testkit::alone;
use nibble_train::fault::arm;
use nibble_train::trainer::Trainer;
use rig::{on_mesh, small};
use std::sync::Barrier;

const RANKS: usize = 2;

/// Both ranks do steps until they fail, the third at the latest; the errors.
fn failing(faults: &[String]) -> Vec<String> {
    let (config, all_failed) = (small("fp8-flow", &[]), Barrier::new(RANKS));
    arm(&faults.iter().map(|fault| fault.parse().unwrap()).collect::<Vec<_>>());
    on_mesh(MeshShape { dp: 1, ep: RANKS }, |mesh| {
        let b = Cpu::new(1).unwrap();
        let mut trainer = Trainer::new(&b, mesh, &config).unwrap();
        let error = (0..3).find_map(|_| trainer.train_step().err()).unwrap().to_string();
        // Nobody leaves before: that would be the other one's error.
        all_failed.wait();
        error
    })
}

#[test]
fn a_rank_that_fails_says_in_which_part_of_which_step() {
    alone(module_path!(), "a_rank_that_fails_says_in_which_part_of_which_step", || {
        assert_eq!(step(), None);
        for (point, part) in [
            ("forward-exchange", "forward exchange"),
            ("backward-exchange", "backward exchange"),
            ("reduce", "reduce"),
        ] {
            // Of this count and the next: either rank meets one of them.
            for error in failing(&[1, 2].map(|count| format!("fail@{point}:{count}"))) {
                assert!(error.contains(&format!("fault point {point} failed")), "{error}");
            }
            with_phase(|phase, now| assert_eq!((phase, now), ("step 0", part)));
            assert_eq!(step(), Some(0));
        }
        // A learning rate that is none, on one rank: the record tells every rank.
        for error in failing(&["nan@step-begins:1".to_owned()]) {
            assert!(error.contains("learning rate"), "{error}");
        }
    });
}
