//! Every operation, vectorised and threaded, against the scalar specification: the same bits on every instruction set
//! and for every number of threads. The specification runs each case once for all of them.

use nibble_cpu::gemm::Isa;
use nibble_cpu::{CodePath, Cpu};
use nibble_testkit::testdata::skip;
use nibble_testkit::{Pair, conformance};

fn specification(threads: usize) -> Cpu {
    Cpu::scalar(threads).expect("a few threads")
}

/// The specification on one thread, against every instruction set of this machine, the best one first, and against itself on three threads: where it has
/// code of its own, it divides that among threads as well.
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
    pair.and(specification(3))
}

conformance!(simd, every_isa());
