use nibble_formats::Format;
use std::ops::Range;

/// The result of every fallible function of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The errors of backends, operations and recipes. Every message names the argument, its value and the expected value.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A shape, length or alignment that the operation does not support.
    #[error("{op}: `{argument}` is {got}, expected {expected}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// The argument at fault.
        argument: &'static str,
        /// The argument's shape, length or alignment.
        got: String,
        /// The shape, length or alignment that the operation expects.
        expected: String,
    },
    /// An internal error that no input should cause.
    #[error("internal error, a defect of nibble: {place}: {what}")]
    Defect {
        /// The layer or the operation.
        place: &'static str,
        /// The condition that should be impossible.
        what: &'static str,
    },
    /// A combination of format, axis or type for which there is no kernel.
    #[error("{op}: {format} is not supported here: {why}")]
    Unsupported {
        /// The operation.
        op: &'static str,
        /// The requested format.
        format: String,
        /// Why the combination is unsupported, and what is supported instead.
        why: String,
    },
    /// More routed rows than the buffers hold.
    #[error(
        "{op}: {needed} routed rows do not fit a capacity of {capacity}; raise the capacity or lower the batch"
    )]
    Capacity {
        /// The operation.
        op: &'static str,
        /// Rows that arrived, padding included.
        needed: usize,
        /// Rows of the buffers.
        capacity: usize,
    },
    /// A kernel did not compile.
    #[error("compiling {kernel} failed:\n{log}")]
    Jit {
        /// The kernel instance.
        kernel: String,
        /// The compiler's log.
        log: String,
    },
    /// A device call failed.
    #[error("device call {call} failed: {why}")]
    Device {
        /// The call.
        call: String,
        /// The device's error message.
        why: String,
    },
    /// The device is out of memory.
    #[error("out of memory in {place}, which was asked for {bytes} bytes: {why}")]
    OutOfMemory {
        /// The arena, or the device's pool.
        place: String,
        /// Number of requested bytes.
        bytes: usize,
        /// Total and free memory, and the device's error message.
        why: String,
    },
    /// A collective failed, or another rank failed.
    #[error("rank {rank}: {call}: {why}")]
    Comm {
        /// The collective.
        call: &'static str,
        /// The rank that reports the error.
        rank: usize,
        /// A description of the failure.
        why: String,
    },
    /// A NaN or an infinity in a tensor that must be finite for training to continue.
    #[error("step {step}: {site} is not finite (layer {layer})")]
    NonFinite {
        /// The tensor.
        site: String,
        /// The layer, or `-`.
        layer: String,
        /// The training step.
        step: u64,
    },
    /// A recipe that cannot be read or is invalid.
    #[error("recipe {recipe}: {key}: {why}")]
    Recipe {
        /// The recipe's name.
        recipe: String,
        /// The key at fault.
        key: String,
        /// What is wrong with the key, with a suggestion if there is one.
        why: String,
    },
    /// An error of the crate `formats`.
    #[error(transparent)]
    Format(#[from] nibble_formats::Error),
}

impl Error {
    /// The error if the system does not start a thread, because there are too many threads or no memory for the stack of the thread.
    #[must_use]
    pub fn not_started(why: std::io::Error) -> Self {
        Self::Device {
            call: "starting a thread".into(),
            why: format!("{why}: no memory is left for its stack, or there are too many"),
        }
    }

    /// An [`Error::Shape`].
    pub fn shape(
        op: &'static str,
        argument: &'static str,
        got: impl ToString,
        expected: impl ToString,
    ) -> Self {
        Self::Shape { op, argument, got: got.to_string(), expected: expected.to_string() }
    }

    /// An [`Error::Unsupported`].
    pub fn unsupported(op: &'static str, format: Format, why: impl ToString) -> Self {
        Self::Unsupported { op, format: format.to_string(), why: why.to_string() }
    }
}

/// Returns [`Error::Shape`] unless `got == expected`.
pub(crate) fn expect_eq<T: PartialEq + std::fmt::Debug>(
    op: &'static str,
    argument: &'static str,
    got: T,
    expected: T,
) -> Result<()> {
    if got == expected {
        return Ok(());
    }
    Err(Error::shape(op, argument, format!("{got:?}"), format!("{expected:?}")))
}

/// Returns the range if it lies within `len` values.
///
/// # Errors
/// [`Error::Shape`] for the argument `range` if the range exceeds `len`.
pub fn check_range(op: &'static str, len: usize, range: Range<usize>) -> Result<Range<usize>> {
    if range.start > range.end || range.end > len {
        return Err(Error::shape(op, "range", format!("{range:?}"), format!("within 0..{len}")));
    }
    Ok(range)
}

/// Checks that every range lies within its own buffer, and that all ranges together have `room` values.
///
/// # Errors
/// [`Error::Shape`] that names `op`.
pub fn check_runs(
    op: &'static str,
    runs: impl IntoIterator<Item = (usize, Range<usize>)>,
    room: usize,
) -> Result<()> {
    let mut all = 0usize;
    for (len, range) in runs {
        all = all.saturating_add(check_range(op, len, range)?.len());
    }
    expect_eq(op, "values of all runs", all, room)
}
