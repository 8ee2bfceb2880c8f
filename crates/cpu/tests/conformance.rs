//! Every operation, vectorised and threaded, against the scalar specification: the same bits on every instruction set
//! and for every number of threads. The specification runs each case once for all of them.

use nibble_cpu::gemm::Isa;
use nibble_cpu::{CodePath, Cpu};
use nibble_testkit::testdata::skip;
use nibble_testkit::{Pair, conformance};

fn specification(threads: usize) -> Cpu {
    Cpu::scalar(threads).expect("a few threads")
}

/// The specification on one thread, against every instruction set of this machine, the best one first.
fn every_isa() -> Pair<Cpu, Cpu> {
    let simd = |isa, threads| Cpu::with(threads, isa, CodePath::Simd).expect("a few threads");
    let mut pair = Pair::strict(specification(1), Cpu::new(2).expect("two threads"));
    for (isa, threads) in [(Isa::Portable, 3), (Isa::Avx2, 2), (Isa::Avx512, 1)] {
        match isa.is_supported() {
            true if isa == Isa::best() => {}
            true => pair = pair.and(simd(isa, threads)),
            false => skip(&format!("{isa:?}: this machine lacks it")),
        }
    }
    pair
}

// The specification of conversions has code of its own, and divides it among threads.
conformance!(convert, every_isa().and(specification(3)), Convert);
// Products have one body for every instruction set: the specification is that of `Portable`.
conformance!(products, every_isa(), Products);
// Here the specification is code without threads, or the body that each instruction set has.
conformance!(model, every_isa(), Model);
