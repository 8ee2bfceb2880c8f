use crate::ops::*;
use crate::{Backend, Groups, Operand, PermuteMap, Result, Tensor, for_each_op};

macro_rules! methods {
    (() $($name:ident($Op:ident $(<$l:lifetime, $B:ident>)?) -> $out:ty { $($fields:tt)* })*) => {$(
        #[doc = concat!("See [`", stringify!($Op), "`].")]
        fn $name(&self, op: $Op $(<$l, $B>)?) -> Result<$out>;
    )*};
}

/// Every operation of a backend: one method per row of [`for_each_op!`]. No method has a default, so an incomplete backend does not
/// compile.
///
/// A kernel's arguments have already passed their `check`, because callers use the arguments' `run`.
pub trait Kernels: Backend {
    for_each_op! { [methods] () Self }
}
