//! Attention: which heads the tensor cores take.

use nibble_core::DType;

/// Elements of heads that the tensor cores' kernels are built for: of queries and keys, and of values.
pub const HEADS: [(usize, usize); 3] = [(64, 64), (128, 128), (192, 128)];

/// Why attention of such heads goes to the ordinary cores, in words; nothing where it does not.
pub fn obstacle(dtype: DType, heads: (usize, usize)) -> Option<String> {
    let of = |(head, value)| match head == value {
        true => format!("{head}"),
        false => format!("{head} with values of {value}"),
    };
    if dtype != DType::Bf16 {
        return Some(format!("heads in {dtype}, not bf16"));
    }
    (!HEADS.contains(&heads)).then(|| format!("heads of {}, not {}", of(heads), HEADS.map(of).join(" or ")))
}
