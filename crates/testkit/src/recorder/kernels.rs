//! Delegates every operation to the inner backend, after sealing its arguments as [`for_each_op!`] declares each field.

use super::call::{Run, Taken, open};
use super::{Recorder, by_hand};
use nibble_core::ops::*;
use nibble_core::{Groups, Kernels, Operand, PermuteMap, Result, Tensor, for_each_op};

/// Issues an operation: seals its arguments, and runs the inner backend's operation on the contents of their cells.
/// The macro lists all fields by name, so a new field does not compile until it is added.
macro_rules! issue {
    ($recorder:expr, $given:ident, $name:ident, $op:ident, {}) => { by_hand::$name($recorder, $given) };
    (
        $recorder:expr, $given:ident, $name:ident, $op:ident, {
            $(reads $($r:ident),+;)?
            $(may_read $($m:ident),+;)?
            $(writes $($w:ident),+;)?
            $(plain $($p:ident),+;)?
        }
    ) => {{
        #[allow(unused_mut)] // one operation has no buffers
        let mut call = $recorder.call(stringify!($name), &$given);
        let $op { $($($r,)+)? $($($m,)+)? $($($w,)+)? $($($p,)+)? } = $given;
        $($(let $r = call.reads($r)?;)+)?
        $($(let $m = $m.map(|m| call.reads(m)).transpose()?;)+)?
        $($(let $w = call.writes($w)?;)+)?
        call.issue(move |b: &B, _run: Run| {
            $($(let $r = open(b, &$r)?;)+)?
            $($(let $m = $m.as_ref().map(|m| open(b, m)).transpose()?;)+)?
            $($(let mut $w = Taken::new(b, &$w, _run)?;)+)?
            let op = $op {
                $($($r: &$r,)+)?
                $($($m: $m.as_ref(),)+)?
                $($($w: &mut *$w,)+)?
                $($($p: Clone::clone(&$p),)+)?
            };
            b.$name(op)
        })
    }};
}

macro_rules! methods {
    (() $($name:ident($Op:ident $(<$l:lifetime, $B:ident>)?) -> $out:ty { $($fields:tt)* })*) => {$(
        fn $name(&self, op: $Op $(<$l, $B>)?) -> Result<$out> {
            issue!(self, op, $name, $Op, { $($fields)* })
        }
    )*};
}

impl<B: Kernels> Kernels for Recorder<B> {
    for_each_op! { [methods] () Self }
}
