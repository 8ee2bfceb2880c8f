//! The valid rows of a matrix: all rows, or the first `len` rows of each group.

use crate::Cpu;
use nibble_core::{Error, Groups, Result};

/// Consecutive rows: the first `len` rows are valid, and the rest up to `end` are padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    pub start: usize,
    pub len: usize,
    pub end: usize,
    /// Index of the span's group or matrix; `None` for rows outside all groups.
    pub number: Option<usize>,
}

/// The spans of a matrix, which cover its rows without gaps.
#[derive(Debug)]
pub(crate) struct Spans<'a> {
    /// The spans in row order; the last span ends at the row capacity.
    pub spans: Vec<Span>,
    /// Number of rows of the plain matrix and of the codes in row blocks.
    pub rows: usize,
    /// Number of rows of the codes in column blocks: `rows`, rounded up to whole blocks.
    pub capacity: usize,
    row_id: Option<&'a [i32]>,
}

impl<'a> Spans<'a> {
    /// The spans of `rows` valid rows, or of `groups`. A column block has `block` rows (1 if no columns are written). Without groups, the
    /// capacity is rounded up to `block`; with groups, every start must be a multiple of `block`.
    ///
    /// # Errors
    /// [`Error::Shape`] for groups that overlap, exceed their capacity or start inside a block.
    pub fn new(op: &'static str, rows: usize, groups: Option<&'a Groups<Cpu>>, block: usize) -> Result<Self> {
        match groups {
            Some(groups) => Self::ragged(op, rows, groups, block),
            None => {
                let capacity = rows.next_multiple_of(block);
                let spans = vec![Span { start: 0, len: rows, end: capacity, number: Some(0) }];
                Ok(Self { spans, rows, capacity, row_id: None })
            }
        }
    }

    /// For each row of the column blocks, whether it is padding.
    pub fn padding(&self) -> Vec<bool> {
        let mut padding = vec![true; self.capacity];
        for span in &self.spans {
            padding[span.start..span.start + span.len].fill(false);
        }
        padding
    }

    /// The spans of `stack` matrices of `rows_each` rows: one per matrix.
    pub fn stacked(stack: usize, rows_each: usize) -> Self {
        let rows = stack * rows_each;
        let span =
            |i| Span { start: i * rows_each, len: rows_each, end: (i + 1) * rows_each, number: Some(i) };
        Self { spans: (0..stack).map(span).collect(), rows, capacity: rows, row_id: None }
    }

    fn ragged(op: &'static str, rows: usize, groups: &'a Groups<Cpu>, block: usize) -> Result<Self> {
        let (start, len, row_id) = (groups.start.as_slice(), groups.len.as_slice(), groups.row_id.as_slice());
        let expect = |argument, got: usize, expected: usize| {
            if got == expected { Ok(()) } else { Err(Error::shape(op, argument, got, expected)) }
        };
        expect("groups.start.len()", start.len(), groups.num_groups + 1)?;
        expect("groups.len.len()", len.len(), groups.num_groups)?;
        expect("groups.row_id.len()", row_id.len(), rows)?;
        let at = |i: i32| usize::try_from(i).ok().filter(|&row| row <= rows);
        let mut spans =
            vec![Span { start: 0, len: 0, end: at(start[0]).unwrap_or(usize::MAX), number: None }];
        for (group, (bounds, &len)) in start.windows(2).zip(len).enumerate() {
            // A value out of range gives a span that the check below refuses.
            let span = Span {
                start: at(bounds[0]).unwrap_or(usize::MAX),
                len: usize::try_from(len).unwrap_or(usize::MAX),
                end: at(bounds[1]).unwrap_or(0),
                number: Some(group),
            };
            spans.push(span);
        }
        // The list is not empty, because the span before the first group is always present.
        let last = spans[spans.len() - 1].end;
        spans.push(Span { start: last, len: 0, end: rows, number: None });
        for s in &spans {
            if s.start > s.end || s.len > s.end - s.start || s.end > rows {
                let got = format!("start {start:?}, len {len:?}");
                let expected = format!("rising starts of at most {rows}, each length within its group");
                return Err(Error::shape(op, "groups", got, expected));
            }
            if s.start % block != 0 && s.start < rows {
                return Err(Error::shape(op, "groups.start", s.start, format!("a multiple of {block}")));
            }
        }
        spans.retain(|s| s.start < s.end);
        Ok(Self { spans, rows, capacity: rows, row_id: Some(row_id) })
    }

    /// The same spans, with every length rounded up to a multiple of `block` rows. `block` divides the alignment of the starts. The plain
    /// matrix has `capacity` rows.
    pub fn in_whole(&self, block: usize) -> Self {
        let whole = |s: &Span| Span { len: s.len.next_multiple_of(block).min(s.end - s.start), ..*s };
        let spans = self.spans.iter().map(whole).collect();
        Self { spans, rows: self.capacity, capacity: self.capacity, row_id: self.row_id }
    }

    /// The row's index in the random stream: token · k + slot if rows have ids, otherwise its position.
    pub fn row_index(&self, row: usize) -> u64 {
        match self.row_id {
            // Valid rows have an id; the index of padding has no effect.
            Some(ids) => ids[row].max(0) as u64,
            None => row as u64,
        }
    }

    /// The indices of the valid rows.
    pub fn valid(&self) -> impl Iterator<Item = usize> {
        self.spans.iter().flat_map(|s| s.start..s.start + s.len)
    }
}
