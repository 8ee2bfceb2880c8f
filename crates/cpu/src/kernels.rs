//! The implementation of `Kernels`: each operation calls the function of the same name in `ops`.

use crate::{Cpu, ops};
use nibble_core::ops::*;
use nibble_core::{Groups, Kernels, Operand, PermuteMap, Result, Tensor, for_each_op};

macro_rules! methods {
    (() $($name:ident($args:ty) -> $out:ty { $($fields:tt)* })*) => {$(
        fn $name(&self, op: $args) -> Result<$out> {
            self.timed(stringify!($name), || ops::$name(self, op))
        }
    )*};
}

impl Kernels for Cpu {
    for_each_op! { [methods] () Self }
}
