//! Many tensors in one launch (`csrc/pieces/step/tensor_list.cuh`): the arguments contain a list of tensors, and
//! each tensor has its own CTAs.

use crate::launch::KernelArg;
use nibble_core::{Error, Result};
use std::ffi::c_void;

/// The most tensors per launch, limited by the size of its arguments. The kernels call this number
/// `kListedTensors`.
const LISTED: usize = 72;

/// A kernel's argument for one tensor, which consists of plain words without padding, so that every
/// byte is initialised.
///
/// # Safety
/// The type must be `repr(C)` and have no padding.
pub(super) unsafe trait Listed: Copy {
    /// Sets the index of the tensor's first CTA in the launch.
    fn begin_at(&mut self, cta: u32);
}

/// The device's list of tensors.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct List<T> {
    tensor: [T; LISTED],
    count: u64,
}

// SAFETY: the pointer and the size are those of the value itself. The list's tensors have no padding (`Listed`), and their total
// size is a multiple of the count's alignment (`LISTED` is even).
unsafe impl<T: Listed> KernelArg for List<T> {
    fn pointer(&self) -> *const c_void {
        std::ptr::from_ref(self).cast()
    }
    fn bytes(&self) -> usize {
        size_of::<Self>()
    }
}

/// Calls `launch` for every [`LISTED`] tensors. Each tensor comes with its number of CTAs, which is not 0; `launch`
/// receives the list and the total number of CTAs.
pub(super) fn each_list<T: Listed>(
    op: &'static str,
    tensors: &[(T, usize)],
    mut launch: impl FnMut(&List<T>, u32) -> Result<()>,
) -> Result<()> {
    for some in tensors.chunks(LISTED) {
        let mut list = List { tensor: [some[0].0; LISTED], count: some.len() as u64 };
        let mut all = 0u32;
        for (tensor, &(given, ctas)) in list.tensor.iter_mut().zip(some) {
            *tensor = given;
            tensor.begin_at(all);
            let sum = u32::try_from(ctas).ok().and_then(|ctas| all.checked_add(ctas));
            all = sum.filter(|sum| *sum < 1 << 31).ok_or_else(|| {
                Error::shape(op, "tensors", format!("{ctas} ctas after {all}"), "below 2^31 a launch")
            })?;
        }
        launch(&list, all)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    #[repr(C)]
    struct Number {
        number: u32,
        first: u32,
    }

    // SAFETY: the type has two words, without padding.
    unsafe impl Listed for Number {
        fn begin_at(&mut self, cta: u32) {
            self.first = cta;
        }
    }

    #[test]
    fn every_tensor_is_launched_once_behind_the_ctas_of_those_before_it() {
        let tensors: Vec<_> =
            (0..200).map(|number| (Number { number, first: 7 }, number as usize % 5 + 1)).collect();
        let mut seen = 0;
        each_list("test", &tensors, |list, ctas| {
            let mut first = 0;
            for got in &list.tensor[..list.count as usize] {
                let (given, ctas) = tensors[seen];
                assert_eq!(*got, Number { first, ..given });
                (first, seen) = (first + ctas as u32, seen + 1);
            }
            assert_eq!(first, ctas);
            Ok(())
        })
        .unwrap();
        assert_eq!(seen, 200);
        let many = [(Number { number: 0, first: 0 }, 1 << 30); 3];
        assert!(each_list("test", &many, |_, _| Ok(())).is_err());
    }
}
