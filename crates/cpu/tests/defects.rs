//! The conformance suite notices defects: what it lets pass as another order of sums is no tile that is transposed, no line that is
//! shifted, no block under twice its scale and no quantization left out. Bits are compared where bits are owed; these are the operations
//! that owe a relative error.

use nibble_core::Kernels;
use nibble_cpu::Cpu;
use nibble_testkit::trial::{missed, owes_an_error};
use nibble_testkit::{Pair, Recorder, conformance};

type Test<A, B> = (&'static str, fn(&Pair<A, B>));

fn all<A: Kernels, B: Kernels>() -> Vec<Test<A, B>> {
    [conformance!(Convert).to_vec(), conformance!(Products).to_vec(), conformance!(Model).to_vec()].concat()
}

fn cpu() -> Cpu {
    Cpu::new(2).expect("two threads")
}

/// Those that owe a relative error.
fn operations() -> Vec<Test<Cpu, Recorder<Cpu>>> {
    let (a, b) = (cpu(), Recorder::eager(cpu()));
    all().into_iter().filter(|(_, test)| owes_an_error(*test, &a, &b)).collect()
}

fn assert_noticed(wanted: impl Fn(&str) -> bool) {
    let mut tried = 0;
    for (op, test) in operations().into_iter().filter(|(op, _)| wanted(op)) {
        let verdict = missed(op, test, &cpu(), &Recorder::eager(cpu()));
        assert!(verdict.missed.is_empty(), "{op}: no case notices {:#?}", verdict.missed);
        tried += verdict.tried;
    }
    assert!(tried > 0, "nothing was tried");
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
