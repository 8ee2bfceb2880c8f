/// What a backend's result of an operation owes to the CPU specification.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Agreement {
    /// The same bits on every input (NaN compared as NaN).
    Bitwise,
    /// At most so large a relative L2 error; the same bits on inputs whose partial sums are exact.
    RelL2(f64),
}
