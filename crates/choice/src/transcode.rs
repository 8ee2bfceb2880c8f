//! Conversions of codes: which go by way of whole blocks.

use nibble_core::formats::Format;

/// Columns up to the end of a block of MXFP4, where rows end inside one: its kernels take whole blocks, so that such rows are extended by zeros and
/// what is made of them is cut. None where the kernels take the rows as they are.
pub fn whole_cols(from: Format, to: Format, cols: usize) -> Option<usize> {
    let whole = cols.next_multiple_of(Format::Mxfp4.spec().block);
    ([from, to].contains(&Format::Mxfp4) && whole != cols).then_some(whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_end_inside_a_block_are_extended_and_others_are_not() {
        use Format::{E4m3, Mxfp4};
        assert_eq!(whole_cols(Mxfp4, E4m3, 33), Some(64));
        assert_eq!(whole_cols(E4m3, Mxfp4, 130), Some(160));
        assert_eq!(whole_cols(Mxfp4, E4m3, 96), None);
        assert_eq!(whole_cols(E4m3, E4m3, 33), None, "its kernel takes any columns");
    }
}
