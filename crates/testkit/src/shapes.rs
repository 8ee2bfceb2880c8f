//! Sizes of real models, scaled down so that the scalar specification can run them, and uneven distributions of rows over experts.

use crate::input;
use nibble_core::{Backend, Groups, Result, round_up};

/// The sizes of a model's expert layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MoeShape {
    /// The model's name.
    pub name: &'static str,
    /// Hidden size of the model.
    pub d: usize,
    /// Intermediate size of an expert.
    pub f: usize,
    /// Number of experts.
    pub experts: usize,
    /// Number of selected experts per token.
    pub top_k: usize,
}

impl MoeShape {
    /// DeepSeek-V3.
    pub const DEEPSEEK_V3: MoeShape =
        MoeShape { name: "deepseek-v3", d: 7168, f: 2048, experts: 256, top_k: 8 };
    /// DeepSeek-V2.
    pub const DEEPSEEK_V2: MoeShape =
        MoeShape { name: "deepseek-v2", d: 5120, f: 1536, experts: 160, top_k: 6 };
    /// Qwen3-30B-A3B.
    pub const QWEN3_30B: MoeShape = MoeShape { name: "qwen3-30b", d: 2048, f: 768, experts: 128, top_k: 8 };
    /// Llama 4 Scout.
    pub const SCOUT: MoeShape = MoeShape { name: "llama4-scout", d: 5120, f: 8192, experts: 16, top_k: 1 };
    /// A layer of many small experts, for which others have published figures of grouped GEMMs. The layer belongs to no particular model.
    pub const EXPERTS_128: MoeShape =
        MoeShape { name: "128-experts", d: 4096, f: 1024, experts: 128, top_k: 8 };

    /// The shapes of real models.
    pub const ALL: [MoeShape; 4] = [Self::DEEPSEEK_V3, Self::DEEPSEEK_V2, Self::QWEN3_30B, Self::SCOUT];

    /// The same shape with all sizes divided by `divisor` and rounded up to MX blocks of 32, with at most `max_experts` experts.
    ///
    /// Divided by 16, the sizes of V2 (320 and 96) and of Qwen3 (128 and 64) include sizes that end in the middle of a block of 128.
    pub fn scaled(self, divisor: usize, max_experts: usize) -> Self {
        let shrink = |n: usize| round_up(n / divisor.max(1), 32);
        let experts = self.experts.min(max_experts);
        Self { d: shrink(self.d), f: shrink(self.f), experts, top_k: self.top_k.min(experts), ..self }
    }
}

/// Widths of real models and of their experts' GEMMs, for tests with few rows. With these widths, a kernel has several segments, strips and
/// tiles side by side.
pub const WIDTHS: [usize; 4] = [7168, 5120, 4096, 2048];

/// How rows are distributed over groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spread {
    /// Groups are as equal as possible.
    Balanced,
    /// Group g gets a share proportional to 1 / (g + 1).
    Zipf,
    /// One group has all rows, except for one row in every other group.
    OneTakesMost,
    /// Every second group, including the first, is empty.
    EmptyGroups,
    /// One row per group, regardless of the requested number.
    OneRowEach,
    /// All rows are in the last group.
    AllEmptyButOne,
    /// No group has any rows.
    AllEmpty,
}

impl Spread {
    /// All spreads.
    pub const ALL: [Spread; 7] = [
        Spread::Balanced,
        Spread::Zipf,
        Spread::OneTakesMost,
        Spread::EmptyGroups,
        Spread::OneRowEach,
        Spread::AllEmptyButOne,
        Spread::AllEmpty,
    ];

    /// Number of rows of each group. The lengths sum to `rows`, except for [`Spread::OneRowEach`] and [`Spread::AllEmpty`].
    pub fn lengths(self, groups: usize, rows: usize) -> Vec<usize> {
        let weights: Vec<f64> = (0..groups)
            .map(|g| match self {
                Spread::Balanced => 1.0,
                Spread::Zipf => 1.0 / (g + 1) as f64,
                Spread::EmptyGroups => (g % 2) as f64,
                Spread::AllEmptyButOne => f64::from(u8::from(g + 1 == groups)),
                Spread::OneTakesMost | Spread::OneRowEach | Spread::AllEmpty => 0.0,
            })
            .collect();
        match self {
            Spread::OneRowEach => return vec![1; groups],
            Spread::AllEmpty => return vec![0; groups],
            Spread::OneTakesMost => {
                let mut lengths = vec![1; groups];
                lengths[groups / 2] = rows.saturating_sub(groups - 1);
                return lengths;
            }
            _ => {}
        }
        // Shares are computed from the running total of the weights, so that rounding loses no row.
        let total: f64 = weights.iter().sum();
        if total == 0.0 {
            return Spread::AllEmptyButOne.lengths(groups, rows);
        }
        let (mut sum, mut given) = (0.0, 0);
        weights
            .iter()
            .map(|w| {
                sum += w;
                let end = (rows as f64 * sum / total).round() as usize;
                let len = end - given;
                given = end;
                len
            })
            .collect()
    }
}

/// Ragged rows in host memory: the contents of a device's [`Groups`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RaggedRows {
    /// Index of the first row of each group, followed by the end of the last group's padding.
    pub start: Vec<i32>,
    /// Number of valid rows of each group.
    pub len: Vec<i32>,
    /// The id (token · k + slot) of each row; −1 for padding.
    pub row_id: Vec<i32>,
    /// The alignment of groups: the first row of every group is a multiple of this number.
    pub align: usize,
    /// Number of rows in the buffers, including padding.
    pub capacity: usize,
}

impl RaggedRows {
    /// Groups of these lengths, with the largest capacity that this number of rows could need in any division. So there are padding rows
    /// between groups and after the last group.
    pub fn new(lengths: &[usize], align: usize) -> Self {
        let rows: usize = lengths.iter().sum();
        let capacity = round_up(rows + lengths.len() * (align - 1), align);
        let mut start = vec![0];
        let mut row_id = vec![-1; capacity];
        let mut end = 0;
        for (g, &len) in lengths.iter().enumerate() {
            for i in 0..len {
                // Ids ascend within a group, differ between groups, and do not equal the row's index.
                row_id[end + i] = (i * lengths.len() + g) as i32 + 1000;
            }
            end += round_up(len, align);
            start.push(end as i32);
        }
        Self { start, len: lengths.iter().map(|&l| l as i32).collect(), row_id, align, capacity }
    }

    /// `rows` rows split among groups by `spread`, with starts at multiples of `align`.
    pub fn of(spread: Spread, groups: usize, rows: usize, align: usize) -> Self {
        Self::new(&spread.lengths(groups, rows), align)
    }

    /// Removes the padding rows after the last group.
    pub fn trim(&mut self) {
        self.capacity = self.start.last().map_or(0, |&end| end as usize);
        self.row_id.truncate(self.capacity);
    }

    /// Appends padding rows until a matrix has as many rows as the capacity.
    pub fn pad_to(&mut self, capacity: usize) {
        self.capacity = self.capacity.max(capacity);
        self.row_id.resize(self.capacity, -1);
    }

    /// Returns the number of groups.
    pub fn num_groups(&self) -> usize {
        self.len.len()
    }

    /// For each row, whether the row belongs to a group, as opposed to being padding.
    pub fn is_valid(&self) -> Vec<bool> {
        let mut valid = vec![false; self.capacity];
        for (&start, &len) in self.start.iter().zip(&self.len) {
            valid[start as usize..(start + len) as usize].fill(true);
        }
        valid
    }

    /// Overwrites the padding rows of a matrix that has `width` values per row.
    pub fn fill_pads<T: Copy>(&self, values: &mut [T], width: usize, pad: T) {
        for (row, valid) in values.chunks_exact_mut(width.max(1)).zip(self.is_valid()) {
            if !valid {
                row.fill(pad);
            }
        }
    }

    /// Uploads the groups.
    ///
    /// # Errors
    /// Returns the error of the backend.
    pub fn upload<B: Backend>(&self, b: &B) -> Result<Groups<B>> {
        Ok(Groups {
            start: b.upload(&self.start)?,
            len: b.upload(&self.len)?,
            row_id: b.upload(&self.row_id)?,
            num_groups: self.num_groups(),
            align: self.align,
            capacity: self.capacity,
            rows_each: None,
        })
    }
}

/// Creates the experts of `tokens · top_k` slots, distributed by `spread`, in pseudo-random order; a token may have the same expert twice.
/// The remaining slots have the value −1, which stands for an expert of another rank.
pub fn slots(spread: Spread, experts: usize, tokens: usize, top_k: usize) -> Vec<i32> {
    let total = tokens * top_k;
    let mut slots = Vec::with_capacity(total);
    // About one of five slots belongs to another rank.
    for (e, len) in spread.lengths(experts, total - total / 5).into_iter().enumerate() {
        slots.extend(std::iter::repeat_n(e as i32, len));
    }
    slots.resize(total, -1);
    let stream = input::stream("slots");
    for i in (1..slots.len()).rev() {
        slots.swap(i, stream.u32_at(i as u64) as usize % (i + 1));
    }
    slots
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scaled_shapes_keep_whole_mx_blocks() {
        let widths = MoeShape::ALL.map(|s| s.scaled(16, 8)).map(|s| (s.d, s.f, s.experts, s.top_k));
        assert_eq!(widths, [(448, 128, 8, 8), (320, 96, 8, 6), (128, 64, 8, 8), (320, 512, 8, 1)]);
    }

    #[test]
    fn spreads_are_what_they_say() {
        let of = |spread: Spread| spread.lengths(5, 100);
        assert_eq!(of(Spread::Balanced), [20; 5]);
        assert_eq!(of(Spread::Zipf), [44, 22, 14, 11, 9]);
        assert_eq!(of(Spread::OneTakesMost), [1, 1, 96, 1, 1]);
        assert_eq!(of(Spread::EmptyGroups), [0, 50, 0, 50, 0]);
        assert_eq!(of(Spread::OneRowEach), [1; 5]);
        assert_eq!(of(Spread::AllEmptyButOne), [0, 0, 0, 0, 100]);
        assert_eq!(of(Spread::AllEmpty), [0; 5]);
        assert_eq!(Spread::EmptyGroups.lengths(1, 7), [7], "a single group cannot be every second");
    }

    #[test]
    fn ragged_rows_are_aligned_and_within_capacity() {
        for spread in Spread::ALL {
            for align in [1, 128] {
                let r = RaggedRows::of(spread, 5, 300, align);
                assert!(r.start.iter().all(|s| (*s as usize).is_multiple_of(align)), "{spread:?}");
                assert!(*r.start.last().unwrap() as usize <= r.capacity);
                let valid = r.is_valid();
                assert_eq!(valid.iter().filter(|v| **v).count() as i32, r.len.iter().sum::<i32>());
                assert!(r.row_id.iter().zip(&valid).all(|(id, valid)| (*id >= 0) == *valid));
                let mut ids: Vec<i32> = r.row_id.iter().copied().filter(|id| *id >= 0).collect();
                ids.sort();
                ids.dedup();
                assert_eq!(ids.len() as i32, r.len.iter().sum::<i32>(), "row ids are unique");
            }
        }
    }

    #[test]
    fn slots_follow_the_spread() {
        let slots = slots(Spread::Balanced, 4, 50, 2);
        for e in 0..4 {
            assert_eq!(slots.iter().filter(|s| **s == e).count(), 20);
        }
        assert_eq!(slots.iter().filter(|s| **s == -1).count(), 20);
        assert!(slots.windows(2).any(|w| w[0] > w[1]), "shuffled");
    }
}
