//! Every operation, vectorised and threaded, against the scalar specification: the same bits on every instruction set
//! and for every number of threads.

use nibble_cpu::gemm::Isa;
use nibble_cpu::{CodePath, Cpu};
use nibble_testkit::{Pair, conformance};

/// The specification on one thread, against an instruction set; `None` where this machine lacks it.
fn against(isa: Isa, threads: usize) -> Option<Pair<Cpu, Cpu>> {
    let specification = Cpu::scalar(1).expect("one thread");
    let cpu = isa.is_supported().then(|| Cpu::with(threads, isa, CodePath::Simd).expect("a few threads"))?;
    Some(Pair::strict(specification, cpu))
}

// The best instruction set is the last of `Isa::ALL` this machine has; the others follow one by one.
conformance!(best, Pair::strict(Cpu::scalar(1).expect("one thread"), Cpu::new(2).expect("two threads")));
conformance!(portable, against(Isa::Portable, 3));
conformance!(avx2, against(Isa::Avx2, 2));
conformance!(avx512, against(Isa::Avx512, 1));
conformance!(
    threaded_specification,
    Pair::strict(Cpu::scalar(1).expect("one thread"), Cpu::scalar(3).expect("threads"))
);
