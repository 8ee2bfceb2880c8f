/// How closely the result that a backend computes must agree with the result of the CPU backend, which is the specification.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Agreement {
    /// The same bits on every input (NaN compared as NaN).
    Bitwise,
    /// A relative L2 error of at most this value, and the same bits on inputs whose partial sums are exact.
    RelL2(f64),
}
