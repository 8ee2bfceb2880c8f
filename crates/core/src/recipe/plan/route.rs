//! How a tensor gets into the representations that a section asks for: the parts that a layer's plan is made of ([`super::LayerPlan`]).
//!
//! SwiGLU's kernels of the expert layer write FP8 in blocks of 128 themselves. Any other format is left to a separate quantization, which
//! reads SwiGLU's output in the type of activations: in BF16 that is half of the memory traffic of F32. Tensors with a transform, and
//! those that are stochastically rounded, are left to a separate quantization too.
//!
//! Two cases are quantized from F32: delayed scales, and FP8 blocks of dh that dgrad and wgrad want made in different ways.

use crate::ops::{Planes, Stored};
use crate::recipe::{By, LayerKind, Precision, Section, Site};
use crate::{DType, Result};
use nibble_formats::{BlockAxis, Codec, LIFTED_BLOCK};

/// How a tensor gets from the representation it is in to another.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Route {
    /// It is in it already: the same buffers.
    Same,
    /// To plain elements of a type: a block tensor is dequantized, a plain one cast unless it has the type.
    Plain(DType),
    /// A plain tensor is quantized.
    Quantize(Precision),
    /// Codes become other codes, without a plain tensor between.
    Transcode(Precision),
    /// A block tensor is dequantized, and quantized again with scales of its own.
    Requantize {
        /// The plain type between.
        through: DType,
        /// What it becomes.
        to: Precision,
    },
}

impl Route {
    /// From a plain tensor.
    pub fn of_plain(to: &Precision) -> Self {
        to.dtype().map_or(Self::Quantize(*to), Self::Plain)
    }

    /// From what one site has to what another wants.
    fn between(origin: &Precision, to: &Precision, activations: DType) -> Self {
        if to.same_bits(origin) && to.by == By::Transcode {
            return Self::Same;
        }
        match (origin.format.is_block() && to.format.is_block(), to.by) {
            (false, _) => Self::of_plain(to),
            (true, By::Transcode) => Self::Transcode(*to),
            (true, By::Requantize) => Self::Requantize { through: activations, to: *to },
        }
    }

    /// What it leads to; none where the tensor stays as it is.
    pub fn to(&self) -> Option<Precision> {
        match self {
            Self::Same => None,
            Self::Plain(dtype) => Some(Precision::plain(*dtype)),
            Self::Quantize(to) | Self::Transcode(to) | Self::Requantize { to, .. } => Some(*to),
        }
    }

    /// Whether a scale is that of the whole tensor: of all rows that are there.
    pub fn has_tensor_scale(&self) -> bool {
        self.to().is_some_and(|to| to.format.is_block() && to.format.scale_kind(to.scale).has_tensor_scale())
    }

    /// What a kernel quantizes with that takes a plain tensor along this route by itself.
    fn codec(&self) -> Result<Option<Codec>> {
        match self {
            Self::Quantize(to) => to.codec().map(Some),
            _ => Ok(None),
        }
    }
}

/// How one tensor gets into two representations: that of fprop or dgrad, and a second one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pair {
    /// One tensor is both.
    One(Route),
    /// One read of a plain tensor makes rows and columns.
    OneRead(Precision),
    /// Each by itself.
    Two(Route, Route),
}

impl Pair {
    /// From a plain tensor.
    fn of_plain(first: &Precision, second: &Precision) -> Self {
        if second.same_bits(first) && second.round == first.round {
            Self::One(Route::of_plain(first))
        } else if first.one_read(second) {
            Self::OneRead(*first)
        } else {
            Self::Two(Route::of_plain(first), Route::of_plain(second))
        }
    }

    /// The first by itself.
    pub const fn first(&self) -> Route {
        match self {
            Self::One(route) | Self::Two(route, _) => *route,
            Self::OneRead(to) => Route::Quantize(*to),
        }
    }

    /// The second by itself.
    pub const fn second(&self) -> Route {
        match self {
            Self::One(route) | Self::Two(_, route) => *route,
            Self::OneRead(to) => Route::Quantize(Precision { axis: BlockAxis::Col, ..*to }),
        }
    }

    /// What a kernel quantizes with that makes both by itself, none for a second one that is the first.
    pub(super) fn codecs(&self) -> Result<[Option<Codec>; 2]> {
        Ok(match self {
            Self::One(route) => [route.codec()?, None],
            Self::OneRead(to) => [Some(to.codec()?); 2],
            Self::Two(first, second) => [first.codec()?, second.codec()?],
        })
    }
}

/// How what a fused kernel computes gets into one representation or two.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Computed {
    /// The kernel writes it so.
    Fused {
        /// What it writes: plain, or blocks.
        to: Precision,
        /// Of blocks, which planes.
        planes: Planes,
    },
    /// The kernel writes plain elements, which are converted by themselves.
    Plain {
        /// What it writes.
        dtype: DType,
        /// What is made of that.
        then: Pair,
        /// Why the kernel does not do it.
        why: &'static str,
    },
}

impl Precision {
    /// Whether the kernel that computes a tensor can write it in both forms, this one for fprop. It measures what it writes.
    fn fused_with(&self, kept: &Self) -> bool {
        let made_of_one = (self.same_bits(kept) && self.round == kept.round) || self.one_read(kept);
        self.delayed.is_none() && made_of_one
    }

    /// Whether SwiGLU's kernels leave it to an operation of its own: blocks other than 128 FP8 codes under a scale. That operation reads
    /// the type of activations, in BF16 half the bytes of the kernel's F32 values.
    fn is_left_by_swiglu(&self) -> bool {
        let stored = Stored { format: self.format, rule: self.scale, axis: self.axis };
        let is_written = stored.fp8().is_some() && self.format.spec().block == LIFTED_BLOCK;
        self.format.is_block() && !is_written
    }
}

impl Section {
    /// How the tensor of a site is made.
    pub(super) fn route(&self, kind: LayerKind, site: Site, activations: DType) -> Route {
        let to = self.at(site);
        match self.origin(kind, site).site() {
            Some(origin) => Route::between(&self.at(origin), &to, activations),
            None => Route::of_plain(&to),
        }
    }

    /// The same for two sites that are made of one tensor.
    pub(super) fn pair(&self, kind: LayerKind, [first, second]: [Site; 2], activations: DType) -> Pair {
        let origin = self.origin(kind, first).site().map(|site| self.at(site));
        match origin.is_some_and(|origin| origin.format.is_block()) {
            true => {
                let [first, second] = [first, second].map(|site| self.route(kind, site, activations));
                Pair::Two(first, second)
            }
            false => Pair::of_plain(&self.at(first), &self.at(second)),
        }
    }

    /// In what form the second product's input is kept, if it is. `if_there`: also where the recipe does not say so, if the forward pass has it.
    pub(super) fn second_a(&self, if_there: bool) -> Option<Precision> {
        let has_it = if_there && self.makes_both_of_a();
        self.kept_a().or(has_it.then_some(self.at(Site::WgradA)))
    }

    /// Whether the forward pass has the very bits of the second product's input that wgrad takes.
    pub(super) fn makes_both_of_a(&self) -> bool {
        // Where h is kept in another format, wgrad's is made of that.
        let h_is_plain = !self.at(Site::SavedH).format.is_block();
        h_is_plain && self.at(Site::FpropA).fused_with(&self.at(Site::WgradA))
    }

    /// SwiGLU's output for fprop, and as it is kept.
    pub(super) fn a(&self, kept: Option<Precision>, activations: DType) -> Computed {
        let fprop = self.at(Site::FpropA);
        let then = kept.map_or(Pair::One(Route::of_plain(&fprop)), |kept| Pair::of_plain(&fprop, &kept));
        let apart = |dtype, why| Computed::Plain { dtype, then, why };
        match kept {
            _ if fprop.rht.is_some() => apart(activations, "fprop.a is transformed"),
            // Such scales are for values as wide as the kernel has them.
            _ if fprop.delayed.is_some() => apart(DType::F32, "fprop.a has a delayed scale"),
            _ if fprop.draws() => apart(activations, "fprop.a is rounded at random"),
            _ if fprop.is_left_by_swiglu() => apart(activations, "fprop.a is not in FP8 blocks of 128"),
            Some(kept) if !fprop.fused_with(&kept) => apart(activations, "saved.a is not made as fprop.a is"),
            Some(kept) if fprop.one_read(&kept) => Computed::Fused { to: fprop, planes: Planes::Both },
            _ => Computed::Fused { to: fprop, planes: Planes::Rows },
        }
    }

    /// The same made again in the backward pass, for wgrad.
    pub(super) fn a_again(&self, activations: DType) -> Computed {
        let wgrad = self.at(Site::WgradA);
        let then = Pair::One(Route::of_plain(&wgrad));
        let (dtype, why) = match wgrad {
            Precision { rht: Some(_), .. } => (activations, "wgrad.a is transformed"),
            Precision { delayed: Some(_), .. } => (DType::F32, "wgrad.a has a delayed scale"),
            _ if wgrad.draws() => (activations, "wgrad.a is rounded at random"),
            _ if wgrad.is_left_by_swiglu() => (activations, "wgrad.a is not in FP8 blocks of 128"),
            _ => return Computed::Fused { to: wgrad, planes: Planes::Cols },
        };
        Computed::Plain { dtype, then, why }
    }

    /// The gradient of SwiGLU's input, for dgrad and for wgrad.
    pub(super) fn dh(&self, activations: DType) -> Computed {
        let (dgrad, wgrad) = (self.at(Site::DgradDh), self.at(Site::WgradDh));
        // Scales of earlier steps are for values as wide as the kernel has them; so is what two kernels make of one tensor that one could make.
        let apart = if !dgrad.format.is_block() && !wgrad.format.is_block() {
            None
        } else if dgrad.delayed.is_some() || wgrad.delayed.is_some() {
            Some((DType::F32, "dgrad.dh or wgrad.dh has a delayed scale"))
        } else if dgrad.draws() {
            Some((activations, "dgrad.dh is rounded at random"))
        } else if dgrad.rht.is_some() {
            Some((activations, "dgrad.dh is transformed"))
        } else if wgrad.rht.is_some() {
            Some((activations, "wgrad.dh is transformed"))
        } else if dgrad.is_left_by_swiglu() || wgrad.is_left_by_swiglu() {
            Some((activations, "dgrad.dh and wgrad.dh are not both in FP8 blocks of 128"))
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
