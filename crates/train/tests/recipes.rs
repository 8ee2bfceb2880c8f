mod rig;
use std::cell::RefCell;
use nibble_cpu::Cpu;
use nibble_train::trainer::Trainer;
use rig::{SOLO, small};
#[test]
fn print() {
    for recipe in rig::recipes() {
        println!("=== {recipe}");
        let cpu = Cpu::new(1).unwrap();
        let mut t = Trainer::new(&cpu, &SOLO, &small(recipe, &["model.layers=1"])).unwrap();
        let trace = RefCell::new(Vec::new());
        t.traced_step(Some(&trace)).unwrap();
        for e in trace.borrow().iter() { println!("{e:?}"); }
    }
}
