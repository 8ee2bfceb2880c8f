//! What measurements have in common: the sizes that they are asked for, the middle of their figures, and the width of their tables.

/// Columns that the GPU's tables fit.
pub const WIDTH: usize = 140;

/// Positive sizes with an x or × between them. `expected`: their names and an example.
pub fn parse_sizes<const N: usize>(text: &str, expected: &str) -> std::result::Result<[usize; N], String> {
    let sizes: Option<Vec<usize>> =
        text.split(['x', '×']).map(|n| n.parse().ok().filter(|n| *n > 0)).collect();
    let sizes = sizes.and_then(|sizes| sizes.try_into().ok());
    sizes.ok_or_else(|| format!("`{text}` is not {expected} say"))
}

/// The middle value; the mean of the two middle ones of an even number, NaN of none.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[middle],
        _ => (values[middle - 1] + values[middle]) / 2.0,
    }
}
