//! The operations: each records its work if records are collected, and allocates its results.

use crate::{Call, Dry, op_work, ops};
use nibble_core::ops::*;
use nibble_core::{Groups, Kernels, Operand, PermuteMap, Result, Tensor, for_each_op};

macro_rules! methods {
    (() $($name:ident($args:ty) -> $out:ty { $($fields:tt)* })*) => {$(
        fn $name(&self, op: $args) -> Result<$out> {
            let counted = self.inner.calls.is_asked().then(|| op_work::$name(&op));
            let out = ops::$name(self, op)?;
            if let Some(counted) = counted {
                let work = counted.work.writes(counted.rows, &[&out]);
                self.inner.calls.note(Call { op: stringify!($name), work });
            }
            Ok(out)
        }
    )*};
}

impl Kernels for Dry {
    for_each_op! { [methods] () Self }
}
