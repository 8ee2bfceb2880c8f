//! The number formats of Nibble, bit by bit: small floats, block scales, rounding, the lift of four-bit operands to eight-bit codes,
//! counter-based random numbers, the Hadamard transform, and elementary functions whose bits do not depend on the machine.
//!
//! The crate has no threads, devices or files. Every function is scalar, and is the specification that faster versions in other crates must
//! match bit for bit.
//!
//! A format is one [`FormatSpec`] and one codec for a block ([`BlockCodec`]), in one file, and a row of the table in `format.rs`. All other
//! code (buffer sizes, all-to-all records, quantization, decoding, the command line, tests) reads these and names no format.
//!
//! | part of a format | file | contents |
//! |---|---|---|
//! | facts | `spec.rs` | element, bits of a code, block length, scale rules, whether 2-D blocks may share a scale |
//! | element | `element.rs` | the number that a code represents, and encoding under every rounding |
//! | scales | `scale.rs` | [`ScaleKind`]: the hierarchy of scales that a block stores, and what its bytes mean |
//! | scale choice | `scaling.rs` | [`Scaling`]: how scales are chosen within a rule |
//! | arithmetic | `block.rs` | [`BlockCodec`]: a block's scale, the value that is rounded, and the multiplier of a code |
//! | entry | `codec.rs` | [`Codec`]: the type that callers use; format, rule and rounding, checked to be compatible |

pub mod block;
pub mod codec;
pub mod delayed;
pub mod double;
pub mod e8m0;
pub mod element;
pub mod error;
pub mod fold;
pub mod format;
mod fp8;
pub mod hadamard;
mod hif4;
pub mod layout;
pub mod lift;
pub mod math;
mod mx;
mod nvfp4;
pub mod packing;
pub mod philox;
pub mod rounding;
pub mod scale;
pub mod scaling;
mod scaling_support;
pub mod spec;
pub mod square;
pub mod square_codec;

pub use block::{BlockCodec, BlockParams, BlockScale, amax};
pub use codec::Codec;
pub use delayed::{AmaxOf, DelayedScaling};
pub use e8m0::ScaleRule;
pub use element::Element;
pub use error::{Error, Result};
pub use format::Format;
pub use half::bf16;
pub use layout::{BlockAxis, ScaleLayout, TILE_COLS, TILE_ROWS, tiled_128x4_offset};
pub use lift::{LIFTED_BLOCK, Lift, shift_code, shift_e4m3, shift_target};
pub use packing::{pack_codes, packed_bytes, packed_code, unpack_codes};
pub use philox::{Purpose, Stream, fnv1a32};
pub use rounding::Rounding;
pub use scale::{Scale, ScaleKind, ScaleLevel, ScaleNumber, ScalePlane, ScalePlaneMut};
pub use scaling::{BlockShape, Candidates, Correction, Headroom, Outer, Scaling, Thresholds};
pub use spec::{FormatSpec, WHOLE_LINE};
pub use square::Square;
pub use square_codec::SquareScales;
