//! Routes of a tensor to the representations that a section requires. Routes are the elements of a layer's plan ([`super::LayerPlan`]).
//!
//! SwiGLU's kernels of the expert layer write FP8 in blocks of 128 directly. A separate quantization writes any other format. This
//! quantization reads SwiGLU's output in the type of activations, because BF16 needs half of the memory traffic of F32. A separate
//! quantization also writes tensors that are transformed or stochastically rounded.
//!
//! Separate quantizations read F32 in two cases: with delayed scales, and for FP8 blocks of dh if dgrad and wgrad need different
//! quantizations.

use crate::ops::{Planes, Stored};
use crate::recipe::{By, LayerKind, Precision, Section, Site};
use crate::{DType, Result};
use nibble_formats::{BlockAxis, Codec, LIFTED_BLOCK};

/// The way in which a tensor is converted from one representation to another.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Route {
    /// The tensor already has the representation, and keeps its buffers.
    Same,
    /// The tensor becomes plain elements of this type: a block-scaled tensor is dequantized, and a plain tensor is cast unless it already
    /// has the type.
    Plain(DType),
    /// A plain tensor is quantized.
    Quantize(Precision),
    /// Codes are converted to other codes, without a plain tensor in between.
    Transcode(Precision),
    /// A block-scaled tensor is dequantized, and quantized again with new scales.
    Requantize {
        /// The plain type between the two conversions.
        through: DType,
        /// The target precision.
        to: Precision,
    },
}

impl Route {
    /// The way in which a plain tensor is converted to the precision `to`.
    pub fn of_plain(to: &Precision) -> Self {
        to.dtype().map_or(Self::Quantize(*to), Self::Plain)
    }

    /// The route from the precision of one site to the precision of another.
    fn between(origin: &Precision, to: &Precision, activations: DType) -> Self {
        if to.same_bits(origin) && to.by == By::Transcode {
            return Self::Same;
        }
        match (origin.format.is_block() && to.format.is_block(), to.by) {
            (false, _) => Self::of_plain(to),
            (true, By::Transcode) => Self::Transcode(*to),
            (true, By::Requantize | By::Cast) => Self::Requantize { through: activations, to: *to },
        }
    }

    /// The precision after the conversion; `None` if the tensor is not converted.
    pub fn to(&self) -> Option<Precision> {
        match self {
            Self::Same => None,
            Self::Plain(dtype) => Some(Precision::plain(*dtype)),
            Self::Quantize(to) | Self::Transcode(to) | Self::Requantize { to, .. } => Some(*to),
        }
    }

    /// Whether the result has one tensor scale for all rows.
    pub fn has_tensor_scale(&self) -> bool {
        self.to().is_some_and(|to| to.format.is_block() && to.format.scale_kind(to.scale).has_tensor_scale())
    }

    /// The codec of a kernel that takes a plain tensor along this route; `None` if the route does not quantize.
    fn codec(&self) -> Result<Option<Codec>> {
        match self {
            Self::Quantize(to) => to.codec().map(Some),
            _ => Ok(None),
        }
    }
}

/// The ways in which one tensor is converted to two representations: one that fprop or dgrad multiplies, and a second one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pair {
    /// One converted tensor serves as both representations.
    One(Route),
    /// One read of a plain tensor writes both row blocks and column blocks.
    OneRead(Precision),
    /// Two separate conversions write the two representations.
    Two(Route, Route),
    /// A block-scaled tensor is dequantized once, and both representations are quantized from the plain tensor ([`Pair::requantized`]).
    Again {
        /// The type of the plain tensor.
        through: DType,
        /// The precisions of both representations.
        to: [Precision; 2],
    },
}

impl Pair {
    /// How both representations of [`Pair::Again`] are made from the plain tensor between.
    pub fn requantized([first, second]: &[Precision; 2]) -> Self {
        Self::of_plain(first, second)
    }

    /// Whether the second representation is another quantization than the first, so that the backward pass counts it if it makes it again.
    pub fn quantizes_twice(&self) -> bool {
        match self {
            Self::One(_) | Self::OneRead(_) => false,
            Self::Two(..) => true,
            Self::Again { to, .. } => Self::requantized(to).quantizes_twice(),
        }
    }

    /// The routes from a plain tensor.
    fn of_plain(first: &Precision, second: &Precision) -> Self {
        if second.same_bits(first) && second.round == first.round {
            Self::One(Route::of_plain(first))
        } else if first.one_read(second) {
            Self::OneRead(*first)
        } else {
            Self::Two(Route::of_plain(first), Route::of_plain(second))
        }
    }

    /// The first route alone.
    pub const fn first(&self) -> Route {
        match self {
            Self::One(route) | Self::Two(route, _) => *route,
            Self::OneRead(to) => Route::Quantize(*to),
            Self::Again { through, to: [to, _] } => Route::Requantize { through: *through, to: *to },
        }
    }

    /// The second route alone.
    pub const fn second(&self) -> Route {
        match self {
            Self::One(route) | Self::Two(_, route) => *route,
            Self::OneRead(to) => Route::Quantize(Precision { axis: BlockAxis::Col, ..*to }),
            Self::Again { through, to: [_, to] } => Route::Requantize { through: *through, to: *to },
        }
    }

    /// The codecs of a kernel that writes both representations from a plain tensor; `None` for a second representation that equals the
    /// first.
    pub(super) fn codecs(&self) -> Result<[Option<Codec>; 2]> {
        Ok(match self {
            Self::One(route) => [route.codec()?, None],
            Self::OneRead(to) => [Some(to.codec()?); 2],
            Self::Two(first, second) => [first.codec()?, second.codec()?],
            Self::Again { .. } => [None; 2],
        })
    }
}

/// The output of a fused kernel, and the ways in which it is converted to one or two representations.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Computed {
    /// The kernel writes the representation directly.
    Fused {
        /// The precision that the kernel writes, plain or block-scaled.
        to: Precision,
        /// For block formats, which block-scaled tensors the kernel writes.
        planes: Planes,
    },
    /// The kernel writes plain elements, which are converted by separate operations.
    Plain {
        /// The type that the kernel writes.
        dtype: DType,
        /// The conversions by separate operations.
        then: Pair,
        /// Why the kernel does not convert.
        why: &'static str,
    },
}

impl Precision {
    /// Whether the kernel that computes a tensor can write the tensor in both precisions, with `self` for fprop. A kernel that writes both
    /// precisions measures the scales itself.
    fn fused_with(&self, kept: &Self) -> bool {
        let made_of_one = (self.same_bits(kept) && self.round == kept.round) || self.one_read(kept);
        self.delayed.is_none() && made_of_one && self.is_cast() == kept.is_cast()
    }

    /// Whether the recipe asks for a quantization by a kernel of its own.
    fn is_cast(&self) -> bool {
        self.by == By::Cast && self.format.is_block()
    }

    /// Whether SwiGLU's kernels leave this precision to a separate operation, as they do for all block formats except FP8 in blocks of 128.
    /// The operation reads the type of activations; BF16 has half the bytes of the kernel's F32 values.
    fn is_left_by_swiglu(&self) -> bool {
        let stored = Stored { format: self.format, rule: self.scale, axis: self.axis };
        let is_written = stored.fp8().is_some() && self.format.spec().block == LIFTED_BLOCK;
        self.format.is_block() && !is_written
    }
}

impl Section {
    /// The route to the precision of a site.
    pub(super) fn route(&self, kind: LayerKind, site: Site, activations: DType) -> Route {
        let to = self.at(site);
        match self.origin(kind, site).site() {
            Some(origin) => Route::between(&self.at(origin), &to, activations),
            None => Route::of_plain(&to),
        }
    }

    /// The routes of two sites with the same source.
    pub(super) fn pair(&self, kind: LayerKind, [first, second]: [Site; 2], activations: DType) -> Pair {
        let origin = self.origin(kind, first).site().map(|site| self.at(site));
        match origin.is_some_and(|origin| origin.format.is_block()) {
            true => match [first, second].map(|site| self.route(kind, site, activations)) {
                [Route::Requantize { through, to: first }, Route::Requantize { to: second, .. }] => {
                    Pair::Again { through, to: [first, second] }
                }
                [first, second] => Pair::Two(first, second),
            },
            false => Pair::of_plain(&self.at(first), &self.at(second)),
        }
    }

    /// The form in which the second product's input is saved, if it is saved. With `if_there`, the input is also saved if only the forward
    /// pass, and not the recipe, provides the form that wgrad takes.
    pub(super) fn second_a(&self, if_there: bool) -> Option<Precision> {
        let has_it = if_there && self.makes_both_of_a();
        self.kept_a().or(has_it.then_some(self.at(Site::WgradA)))
    }

    /// Whether the forward pass computes exactly the bits of the second product's input that wgrad takes.
    pub(super) fn makes_both_of_a(&self) -> bool {
        // If h is saved in another format, wgrad's input is recomputed from the saved h.
        let h_is_plain = !self.at(Site::SavedH).format.is_block();
        h_is_plain && self.at(Site::FpropA).fused_with(&self.at(Site::WgradA))
    }

    /// SwiGLU's output for fprop and, if `kept` is given, in the saved form.
    pub(super) fn a(&self, kept: Option<Precision>, activations: DType) -> Computed {
        let fprop = self.at(Site::FpropA);
        let then = kept.map_or(Pair::One(Route::of_plain(&fprop)), |kept| Pair::of_plain(&fprop, &kept));
        let apart = |dtype, why| Computed::Plain { dtype, then, why };
        match kept {
            _ if fprop.rht.is_some() => apart(activations, "fprop.a is transformed"),
            // Delayed scales apply to the kernel's F32 values.
            _ if fprop.delayed.is_some() => apart(DType::F32, "fprop.a has a delayed scale"),
            _ if fprop.draws() => apart(activations, "fprop.a is rounded stochastically"),
            _ if fprop.is_left_by_swiglu() => apart(activations, "fprop.a is not in FP8 blocks of 128"),
            _ if fprop.is_cast() => apart(activations, "fprop.a is cast"),
            Some(kept) if !fprop.fused_with(&kept) => apart(activations, "saved.a is not made as fprop.a is"),
            Some(kept) if fprop.one_read(&kept) => Computed::Fused { to: fprop, planes: Planes::Both },
            _ => Computed::Fused { to: fprop, planes: Planes::Rows },
        }
    }

    /// SwiGLU's output, recomputed in the backward pass, for wgrad.
    pub(super) fn a_again(&self, activations: DType) -> Computed {
        let wgrad = self.at(Site::WgradA);
        let then = Pair::One(Route::of_plain(&wgrad));
        let (dtype, why) = match wgrad {
            Precision { rht: Some(_), .. } => (activations, "wgrad.a is transformed"),
            Precision { delayed: Some(_), .. } => (DType::F32, "wgrad.a has a delayed scale"),
            _ if wgrad.draws() => (activations, "wgrad.a is rounded stochastically"),
            _ if wgrad.is_left_by_swiglu() => (activations, "wgrad.a is not in FP8 blocks of 128"),
            _ if wgrad.is_cast() => (activations, "wgrad.a is cast"),
            _ => return Computed::Fused { to: wgrad, planes: Planes::Cols },
        };
        Computed::Plain { dtype, then, why }
    }

    /// The gradient of SwiGLU's input, for dgrad and for wgrad.
    pub(super) fn dh(&self, activations: DType) -> Computed {
        let (dgrad, wgrad) = (self.at(Site::DgradDh), self.at(Site::WgradDh));
        // Delayed scales apply to the kernel's F32 values. FP8 blocks of 128 that need two reads are quantized from F32, too.
        let apart = if !dgrad.format.is_block() && !wgrad.format.is_block() {
            None
        } else if dgrad.delayed.is_some() || wgrad.delayed.is_some() {
            Some((DType::F32, "dgrad.dh or wgrad.dh has a delayed scale"))
        } else if dgrad.draws() {
            Some((activations, "dgrad.dh is rounded stochastically"))
        } else if dgrad.rht.is_some() {
            Some((activations, "dgrad.dh is transformed"))
        } else if wgrad.rht.is_some() {
            Some((activations, "wgrad.dh is transformed"))
        } else if dgrad.is_left_by_swiglu() || wgrad.is_left_by_swiglu() {
            Some((activations, "dgrad.dh and wgrad.dh are not both in FP8 blocks of 128"))
        } else if dgrad.is_cast() || wgrad.is_cast() {
            Some((activations, "dgrad.dh or wgrad.dh is cast"))
        } else if !dgrad.one_read(&wgrad) {
            Some((DType::F32, "dgrad.dh and wgrad.dh are not made alike"))
        } else {
            None
        };
        match apart {
            None => Computed::Fused { to: dgrad, planes: Planes::Both },
            Some((dtype, why)) => Computed::Plain { dtype, then: Pair::of_plain(&dgrad, &wgrad), why },
        }
    }
}
