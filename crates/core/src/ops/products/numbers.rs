//! Determines which numbers a product multiplies. The two operands may have any two formats, with blocks of any lengths, or be plain.
//! [`Numbers::of`] chooses the narrowest numbers that both operands convert to. Every backend calls this function, so all backends multiply
//! the same numbers.
//!
//! * **FP8.** E4M3 and E5M2 codes with one scale per 128 or more values are multiplied as they are. FP8 codes are exact BF16 numbers, so
//!   the dot product within a block is a BF16 dot product; then `total = fma(dot, scale_a · scale_b, total)` in F32. MX blocks of FP4 and
//!   FP6 are *lifted*: four blocks of 32 become one E4M3 block of 128. `nibble_formats::lift` states when a lift is exact.
//! * **BF16.** Other quantized operands are converted to codes times the scales of their blocks, rounded to BF16. The rounding is exact for
//!   formats in which code times scale is a BF16 number (`Format::folds_into_bf16`): all formats except those with F32 scales per block or
//!   row. A tensor scale multiplies the sum.
//! * **F32.** If one operand is plain F32 (`activations = "f32"`), the other operand is converted to F32 numbers.
//!
//! A recipe may instead request the lift as a separate conversion (`transcode`). The tensor is then lifted once, before the product, and
//! inexact blocks are counted. A product does not count inexact blocks.
//!
//! A tensor that only products read need not be stored as codes. For such a tensor, a layer sets `Quantize::only_for` to the numbers that
//! its plan gives for these products, and a GPU then writes the form that the products multiply ([`Taken`]). The results of the products
//! keep the same bits. The CPU backend, which is the specification, always writes codes.

use crate::{Agreement, DType};
use nibble_formats::{BlockAxis, Codec, Element, Format, LIFTED_BLOCK, ScaleRule, WHOLE_LINE};
use std::fmt;

/// How closely two backends must agree in a product with F32 output whose operands have E4M3 or E5M2 elements and one scale per 128 or more
/// values. When Hopper's tensor cores add several products, they shift all products to the exponent of the largest product, and keep about
/// 13 bits below the leading bit of the largest product. An F32 sum keeps 23 bits below its leading bit. Kernels add partial sums to an F32
/// accumulator after every 128 values of the contraction. The resulting relative error is 1.6e-4 on random data and 3e-4 on heavy-tailed
/// data. If one product of a block is far larger than the others, as with outliers along the contraction, the relative error is up to 6e-4.
/// These errors were measured with E4M3. Because products are exact, the number of bits that are cut off depends only on the largest
/// product, and not on the element format. The product of two E4M3 elements has 8 significant bits, of an E4M3 and an E5M2 element 7 bits,
/// and of two E5M2 elements 6 bits.
pub const FP8_AGREEMENT: Agreement = Agreement::RelL2(7e-4);

/// How closely two backends must agree in a product of BF16 operands, or of quantized operands that are decoded to BF16. Tensor cores keep
/// more bits of BF16 products than of FP8 products. The bound also holds if an F32 operand is split into a sum of BF16 numbers. If the
/// other operand is BF16, there are three such numbers, which are exact for magnitudes from 2⁻¹¹⁰ on. If the result is BF16, there are two.
/// In a split operand, an infinity may become NaN.
pub const BF16_AGREEMENT: Agreement = Agreement::RelL2(3e-5);

/// The format, scale rule and block axis of an operand, which determine how a product multiplies the operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stored {
    /// The format, plain or quantized.
    pub format: Format,
    /// The rule by which scales were chosen. The rule has no meaning for a plain matrix.
    pub rule: ScaleRule,
    /// The direction of blocks. The axis has no meaning for a plain matrix.
    pub axis: BlockAxis,
}

impl Stored {
    /// The storage of a plain matrix.
    pub const fn plain(dtype: DType) -> Self {
        let format = match dtype {
            DType::F32 => Format::F32,
            DType::Bf16 => Format::Bf16,
        };
        Self { format, rule: ScaleRule::Amax, axis: BlockAxis::Row }
    }

    /// The storage of a matrix that `codec` quantizes along `axis`. If there is no codec, the matrix is plain and has the type `dtype`.
    pub fn made(codec: Option<Codec>, axis: BlockAxis, dtype: DType) -> Self {
        match codec {
            Some(codec) => Self { format: codec.format(), rule: codec.rule(), axis },
            None => Self::plain(dtype),
        }
    }

    /// The element type, if FP8 tensor cores can multiply the codes without a conversion: E4M3 or E5M2 with one scale per [`LIFTED_BLOCK`]
    /// or more values.
    pub fn fp8(self) -> Option<Element> {
        let spec = self.format.spec();
        let is_long = spec.block.is_multiple_of(LIFTED_BLOCK) || spec.block == WHOLE_LINE;
        spec.element.filter(|element| is_long && [Element::E4M3, Element::E5M2].contains(element))
    }

    /// Whether a lift converts the operand to FP8 ([`Format::lift`]).
    fn is_lifted(self) -> bool {
        self.format.lift(self.rule, self.axis).is_some()
    }

    /// The storage after the conversion to E4M3 (lift), along the same axis.
    pub const fn lifted(self) -> Self {
        let (format, rule) = Format::LIFTED;
        Self { format, rule, axis: self.axis }
    }

    /// The storage after the conversion to E4M3 (lift) of the first or the second operand of a product. The conversion keeps the axis of
    /// blocks with one exception: row blocks of a second operand (a weight) become 2-D blocks of [`LIFTED_BLOCK`] × [`LIFTED_BLOCK`]
    /// values. 2-D blocks make the product faster, because a block of columns of D then shares one scale. 2-D blocks lose little precision,
    /// because the scales of a weight are close to each other.
    pub const fn lifted_as(self, is_second: bool) -> Self {
        let axis = match self.axis {
            BlockAxis::Row if is_second => BlockAxis::Tile,
            axis => axis,
        };
        Self { axis, ..self.lifted() }
    }
}

impl fmt::Display for Stored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.format.is_block() {
            true => write!(f, "{} {} {}", self.format, self.axis, self.rule),
            false => write!(f, "{}", self.format),
        }
    }
}

/// The type of the numbers that a product multiplies, which is the narrowest type to which both operands can be converted.
///
/// | | FP8, one scale per 128 or more | MX blocks of E2M1, E2M3, E3M2 | any other block format | BF16 | F32 |
/// |---|---|---|---|---|---|
/// | FP8, one scale per 128 or more | FP8 | FP8 | BF16 | BF16 | F32 |
/// | MX blocks of E2M1, E2M3, E3M2 | FP8 | FP8 | BF16 | BF16 | F32 |
/// | any other block format | BF16 | BF16 | BF16 | BF16 | F32 |
/// | BF16 | BF16 | BF16 | BF16 | BF16 | F32 |
/// | F32 | F32 | F32 | F32 | F32 | F32 |
///
/// The method [`Numbers::takes`] says how an operand is converted to this type. Products of FP8 and BF16 numbers are summed in F32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Numbers {
    /// Codes of E4M3 and E5M2. Scales multiply the dot product of a block, or the whole sum.
    Fp8,
    /// BF16 numbers. Tensor scales multiply the sum.
    Bf16,
    /// F32 numbers, which are used only if an operand is plain F32.
    F32,
}

/// The form to which an operand is converted before a product multiplies it. A product does not count the values that this conversion
/// rounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taken {
    /// The operand as stored: codes that FP8 units can multiply, or plain numbers.
    AsIs,
    /// E4M3 with one power-of-two scale per 128 values along the same axis ([`Stored::lifted`]), or per 128 × 128 block for the rows of a
    /// second operand ([`Stored::lifted_as`]). The conversion is exact if the powers of two spanned by the merged scales fit into the
    /// element ([`nibble_formats::Lift::octaves`]); otherwise it rounds to nearest even.
    Lifted,
    /// Plain numbers. A BF16 number is a code times the scales of its block, without the tensor scale, computed in F32 and rounded to
    /// nearest even. This rounding is exact if [`Format::folds_into_bf16`]. An F32 number is the value that the code represents.
    Decoded,
}

impl Numbers {
    /// The type of the numbers that a product of these two operands multiplies. The order of the operands does not matter.
    pub fn of(a: Stored, b: Stored) -> Self {
        match [a, b] {
            pair if pair.iter().any(|x| x.format == Format::F32) => Self::F32,
            pair if pair.iter().all(|x| x.fp8().is_some() || x.is_lifted()) => Self::Fp8,
            _ => Self::Bf16,
        }
    }

    /// The form to which the operand `x` is converted before a product multiplies it. A plain operand is not converted, because each BF16
    /// number is also an F32 number.
    pub fn takes(self, x: Stored) -> Taken {
        match self {
            _ if !x.format.is_block() => Taken::AsIs,
            Self::Fp8 if x.fp8().is_some() => Taken::AsIs,
            Self::Fp8 => Taken::Lifted,
            Self::Bf16 | Self::F32 => Taken::Decoded,
        }
    }

    /// The number of rows to a multiple of which each group must be aligned, if the product sums over rows. With this alignment, a group
    /// consists of whole blocks of both operands, in the stored and in the converted form.
    pub fn column_step(a: Stored, b: Stored) -> usize {
        let numbers = Self::of(a, b);
        let step = |x: Stored| match numbers.takes(x) {
            Taken::Lifted => x.lifted().format.column_step(),
            Taken::AsIs | Taken::Decoded => x.format.column_step(),
        };
        step(a).max(step(b))
    }

    /// How closely two backends must agree in a product with a quantized operand, by the type of the numbers that the product multiplies.
    pub const fn agreement(self) -> Agreement {
        match self {
            Self::Fp8 => FP8_AGREEMENT,
            Self::Bf16 | Self::F32 => BF16_AGREEMENT,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nibble_formats::ScaleKind;

    /// Every format under every rule along every axis that it may have.
    fn all() -> Vec<Stored> {
        let mut all = vec![Stored::plain(DType::F32), Stored::plain(DType::Bf16)];
        for format in Format::ALL.into_iter().filter(|format| format.is_block()) {
            for &rule in format.spec().rules {
                let tile = format.spec().tiles.then_some(BlockAxis::Tile);
                let axes = [BlockAxis::Row, BlockAxis::Col].into_iter().chain(tile);
                all.extend(axes.map(|axis| Stored { format, rule, axis }));
            }
        }
        all
    }

    /// The column of the table for an operand, derived from its format alone.
    fn column(x: Stored) -> usize {
        let spec = x.format.spec();
        let of = |elements: &[Element]| spec.element.is_some_and(|element| elements.contains(&element));
        let is_mx = spec.block == 32 && x.format.scale_kind(x.rule) == ScaleKind::E8M0;
        match x.format {
            Format::F32 => 4,
            Format::Bf16 => 3,
            _ if of(&[Element::E4M3, Element::E5M2]) && spec.block >= 128 => 0,
            _ if of(&[Element::E2M1, Element::E2M3, Element::E3M2]) && is_mx => 1,
            _ => 2,
        }
    }

    #[test]
    fn every_pair_has_the_numbers_of_the_table() {
        use Numbers::{Bf16, F32, Fp8};
        const TABLE: [[Numbers; 5]; 5] = [
            [Fp8, Fp8, Bf16, Bf16, F32],
            [Fp8, Fp8, Bf16, Bf16, F32],
            [Bf16, Bf16, Bf16, Bf16, F32],
            [Bf16, Bf16, Bf16, Bf16, F32],
            [F32, F32, F32, F32, F32],
        ];
        let all = all();
        assert!((0..5).all(|c| all.iter().any(|x| column(*x) == c)), "each column has a format");
        for (a, b) in all.iter().flat_map(|a| all.iter().map(move |b| (*a, *b))) {
            assert_eq!(Numbers::of(a, b), TABLE[column(a)][column(b)], "{a:?} {b:?}");
        }
    }

    /// A converted operand has the same numbers as the product multiplies, and is not converted again.
    #[test]
    fn what_is_taken_is_what_is_multiplied() {
        let all = all();
        for (a, b) in all.iter().flat_map(|a| all.iter().map(move |b| (*a, *b))) {
            let numbers = Numbers::of(a, b);
            let [x, y] = [a, b].map(|x| match (numbers.takes(x), numbers) {
                (Taken::AsIs, _) => x,
                (Taken::Lifted, _) => x.lifted(),
                (Taken::Decoded, Numbers::F32) => Stored::plain(DType::F32),
                (Taken::Decoded, _) => Stored::plain(DType::Bf16),
            });
            assert_eq!(Numbers::of(x, y), numbers, "{a:?} {b:?}");
            assert!([x, y].iter().all(|x| numbers.takes(*x) == Taken::AsIs), "{a:?} {b:?}");
            if numbers.takes(b) == Taken::Lifted {
                let squares = b.lifted_as(true);
                assert_eq!((Numbers::of(x, squares), numbers.takes(squares)), (numbers, Taken::AsIs));
                let axis = if b.axis == BlockAxis::Row { BlockAxis::Tile } else { b.axis };
                assert_eq!((squares.format, squares.axis), (y.format, axis), "{b:?}");
            }
            let step = Numbers::column_step(a, b);
            for x in [a, b, x, y] {
                assert!(step.is_multiple_of(x.format.column_step()), "{a:?} {b:?}: {step}");
            }
        }
    }
}
