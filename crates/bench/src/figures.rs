//! Helpers of measurements: parsing of sizes, medians, and the width of tables.

/// Width of the GPU tables, in characters.
pub const WIDTH: usize = 140;

/// Parses positive sizes separated by x or ×. `expected` names the sizes and gives an example; error messages quote `expected`.
pub fn parse_sizes<const N: usize>(text: &str, expected: &str) -> std::result::Result<[usize; N], String> {
    let sizes: Option<Vec<usize>> =
        text.split(['x', '×']).map(|n| n.parse().ok().filter(|n| *n > 0)).collect();
    let sizes = sizes.and_then(|sizes| sizes.try_into().ok());
    sizes.ok_or_else(|| format!("`{text}` is not {expected} say"))
}

/// The median of these values: the mean of the middle two for an even number of values, and NaN without values.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[middle],
        _ => (values[middle - 1] + values[middle]) / 2.0,
    }
}
