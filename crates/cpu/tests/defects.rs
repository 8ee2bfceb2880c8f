//! The conformance suite notices defects: what it lets pass as another order of sums is no tile that is transposed, no line that is
//! shifted, no block under twice its scale and no quantization left out. Bits are compared where bits are owed; these are the operations
//! that owe a relative error.

use nibble_cpu::Cpu;
use nibble_testkit::Recorder;
use nibble_testkit::conformance::{Test, every_op};
use nibble_testkit::trial::{missed, owes_an_error};

fn cpu() -> Cpu {
    Cpu::new(2).expect("two threads")
}

/// Those that owe a relative error.
fn operations() -> Vec<Test<Cpu, Recorder<Cpu>>> {
    let (a, b) = (cpu(), Recorder::eager(cpu()));
    every_op().into_iter().filter(|(_, test)| owes_an_error(*test, &a, &b)).collect()
}

fn assert_noticed(wanted: impl Fn(&str) -> bool) {
    let mut ops = 0;
    for (op, test) in operations().into_iter().filter(|(op, _)| wanted(op)) {
        let verdict = missed(op, test, &cpu(), &Recorder::eager(cpu()));
        assert!(verdict.missed.is_empty(), "{op}: no case notices {:#?}", verdict.missed);
        assert!(verdict.tried > 0, "{op}: nothing was tried");
        ops += 1;
    }
    assert!(ops > 0, "no operation was tried");
}

const PRODUCTS: [&str; 3] = ["gemm", "grouped_gemm", "grouped_wgrad"];

#[test]
fn of_products() {
    assert_noticed(|op| PRODUCTS.contains(&op));
}

#[test]
fn of_attention() {
    assert_noticed(|op| op.starts_with("attention"));
}

#[test]
fn of_every_other_operation_that_owes_an_error() {
    assert_noticed(|op| !PRODUCTS.contains(&op) && !op.starts_with("attention"));
}
