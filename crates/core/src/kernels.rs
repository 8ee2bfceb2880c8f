use crate::ops::*;
use crate::{Backend, Groups, Operand, PermuteMap, Result, Tensor, for_each_op};

macro_rules! methods {
    (() $($name:ident($Op:ident $(<$l:lifetime, $B:ident>)?) -> $out:ty { $($fields:tt)* })*) => {$(
        #[doc = concat!("See [`", stringify!($Op), "`].")]
        fn $name(&self, op: $Op $(<$l, $B>)?) -> Result<$out>;
    )*};
}

/// The operations of a backend. The trait has one method per row of [`for_each_op!`]. No method has a default implementation, so a backend
/// that lacks an operation does not compile.
///
/// When a method runs, its arguments have already been checked. Callers do not call the method directly, but call `run` of the arguments,
/// which calls `check` and then the method.
pub trait Kernels: Backend {
    for_each_op! { [methods] () Self }
}
