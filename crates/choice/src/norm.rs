//! Norms of heads that are turned afterwards.

/// Columns of heads that are normed and turned in one pass; others by two operations.
pub const TURNED_HEADS: [usize; 3] = [64, 128, 256];
