//! How a tensor is represented, and the precisions of one kind of layer.

use super::site::{From, LayerKind, Product, Site};
use super::transform::Transform;
use crate::{DType, Result};
use nibble_formats::{BlockAxis, Codec, DelayedScaling, Format, Rounding, ScaleRule, Scaling};
use std::fmt;

/// How a tensor in blocks becomes one in other blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum By {
    /// Code by code, without a plain tensor between ([`crate::ops::Transcode`]).
    #[default]
    Transcode,
    /// Dequantized to the type of the activations, and quantized again with scales of its own.
    Requantize,
}

/// How one tensor is represented.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Precision {
    /// Element format and block.
    pub format: Format,
    /// Along what blocks run.
    pub axis: BlockAxis,
    /// How scales are chosen.
    pub scale: ScaleRule,
    /// How they are chosen within the rule.
    pub scaling: Scaling,
    /// Of the magnitudes of earlier steps rather than of the tensor's own.
    pub delayed: Option<DelayedScaling>,
    /// How elements are rounded.
    pub round: Rounding,
    /// The transform of its product, if it has one. Of what is kept, that of wgrad where it is kept as that takes it. It is the section's
    /// decision ([`Section::transform`]): of a precision that is not in one it is none.
    pub rht: Option<Transform>,
    /// How it is made of a tensor in other blocks.
    pub by: By,
}

impl Precision {
    /// A plain tensor.
    pub fn plain(dtype: DType) -> Self {
        let format = match dtype {
            DType::F32 => Format::F32,
            DType::Bf16 => Format::Bf16,
        };
        Self {
            format,
            axis: BlockAxis::Row,
            scale: ScaleRule::Amax,
            scaling: Scaling::default(),
            delayed: None,
            round: Rounding::NearestEven,
            rht: None,
            by: By::Transcode,
        }
    }

    /// The plain type, if the format is plain.
    pub fn dtype(&self) -> Option<DType> {
        match self.format {
            Format::F32 => Some(DType::F32),
            Format::Bf16 => Some(DType::Bf16),
            _ => None,
        }
    }

    /// The codec of a block format.
    ///
    /// # Errors
    /// [`crate::Error::Format`] if the format, scale rule, scaling and rounding do not go together.
    pub fn codec(&self) -> Result<Codec> {
        Ok(Codec::new(self.format, self.scale, self.round)?.with(self.scaling)?)
    }

    /// Whether random bits are consumed: values are rounded at random, or scales that are corrected.
    pub fn draws(&self) -> bool {
        self.round.is_random() || self.scaling.draws()
    }

    /// Whether two precisions name the same representation (rounding aside).
    pub fn same_bits(&self, other: &Self) -> bool {
        let blocks = |p: &Self| p.format.is_block().then_some((p.axis, p.scale, p.scaling, p.delayed, p.rht));
        self.format == other.format && blocks(self) == blocks(other)
    }

    /// Whether one kernel can write both from one read of a plain tensor, one by rows and the other by columns.
    pub(super) fn one_read(&self, other: &Self) -> bool {
        let codec = |p: &Self| (p.format, p.scale, p.scaling, p.delayed, p.round, p.rht);
        let axes = [self.axis, other.axis];
        self.format.is_block()
            && self.rht.is_none()
            && codec(self) == codec(other)
            && axes == [BlockAxis::Row, BlockAxis::Col]
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.format)?;
        if self.format.is_block() {
            // A weight without square tiles is quantized twice: as it stands for fprop, and transposed for dgrad.
            let axis = match self.axis {
                BlockAxis::Tile if !self.format.spec().tiles => "row+col",
                axis => axis_name(axis),
            };
            write!(f, " {axis} ")?;
            match &self.delayed {
                None => write!(f, "{}", self.scale)?,
                Some(delayed) => write!(f, "({delayed})")?,
            }
            self.scaling.in_words().try_for_each(|words| write!(f, " {words}"))?;
            if self.round != Rounding::NearestEven {
                write!(f, " {}", self.round)?;
            }
        }
        if let Some(transform) = self.rht {
            write!(f, " {transform}")?;
        }
        match self.by {
            By::Transcode => Ok(()),
            By::Requantize => f.write_str(" requantized"),
        }
    }
}

/// In a recipe file, in place of a scale rule: the scale follows from earlier steps.
pub(super) const DELAYED: &str = "delayed";

/// In a recipe file, in place of a transform: there is none.
pub(super) const NO_TRANSFORM: &str = "none";

/// In a recipe file, blocks of weights: squares of the matrix, or along its lines.
pub(super) const SQUARE: &str = "square";
/// See [`SQUARE`].
pub(super) const LINE: &str = "line";

/// The name of an axis in a recipe file.
pub(super) fn axis_name(axis: BlockAxis) -> &'static str {
    match axis {
        BlockAxis::Row => "row",
        BlockAxis::Col => "col",
        BlockAxis::Tile => "tile",
    }
}

/// The precision of every site of one kind of layer, and the transforms of its products.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Section {
    sites: [Option<Precision>; Site::ALL.len()],
    transforms: [Option<Transform>; Product::ALL.len()],
}

/// One thing that a section decides.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Setting {
    /// The precision of a site; none for one that falls back on another, or is not kept.
    Site(Site, Option<Precision>),
    /// The transform of a product, if it has one.
    Transform(Product, Option<Transform>),
}

impl Setting {
    /// Its key in a section.
    pub fn key(&self) -> &'static str {
        match self {
            Self::Site(site, _) => site.key(),
            Self::Transform(product, _) => product.rht_key(),
        }
    }

    /// The part of the key before the dot.
    pub fn product(&self) -> &'static str {
        match self {
            Self::Site(site, _) => site.product(),
            Self::Transform(product, _) => product.name(),
        }
    }

    /// Its precision, if it is one.
    pub fn precision(&self) -> Option<&Precision> {
        match self {
            Self::Site(_, precision) => precision.as_ref(),
            Self::Transform(..) => None,
        }
    }
}

impl Section {
    /// Every site plain; an expert's `a` is made again.
    pub fn plain(dtype: DType) -> Self {
        let plain = Some(Precision::plain(dtype));
        let sites = Site::ALL.map(|site| match site {
            Site::SavedA => None,
            _ if site.falls_back_on().is_some() => None,
            _ => plain,
        });
        Self { sites, transforms: [None; Product::ALL.len()] }
    }

    /// The precision of a site, that of the one it falls back on where it is not written. Of an `a` that is not kept, that
    /// in which wgrad takes it.
    pub fn at(&self, site: Site) -> Precision {
        let rht = match (site, site.operand_of()) {
            (_, Some(product)) => self.transform(product),
            (Site::SavedX, None) => self.kept_for(site, Site::WgradX),
            (Site::SavedA, None) => self.kept_for(site, Site::WgradA),
            _ => None,
        };
        let p = *self.untransformed(site);
        Precision { rht: rht.filter(|_| p.format.is_block()), ..p }
    }

    fn untransformed(&self, site: Site) -> &Precision {
        match (&self.sites[site as usize], site) {
            (Some(precision), _) => precision,
            (None, Site::SavedA) => self.untransformed(Site::WgradA),
            // Sites that fall back on none are always written.
            (None, _) => self.untransformed(site.falls_back_on().unwrap_or(Site::FpropX)),
        }
    }

    /// The transform of what is kept, if it is kept as wgrad takes it.
    fn kept_for(&self, kept: Site, operand: Site) -> Option<Transform> {
        let (kept, operand) = (self.untransformed(kept), self.untransformed(operand));
        let is_it = kept.same_bits(operand) && operand.by == By::Transcode;
        self.transform(Product::Wgrad).filter(|_| is_it)
    }

    /// The transform of a product.
    pub fn transform(&self, product: Product) -> Option<Transform> {
        self.transforms[product as usize]
    }

    /// The precision of a site as it is written, if it is: without what its product decides.
    pub fn written(&self, site: Site) -> Option<&Precision> {
        self.sites[site as usize].as_ref()
    }

    /// The format in which an expert keeps the second product's input; none where it is made again from h.
    pub fn kept_a(&self) -> Option<Precision> {
        self.written(Site::SavedA).map(|_| self.at(Site::SavedA))
    }

    /// Decides one thing.
    pub fn set(&mut self, setting: Setting) {
        match setting {
            Setting::Site(site, precision) => {
                if precision.is_some() || site.falls_back_on().is_some() || site == Site::SavedA {
                    self.sites[site as usize] = precision;
                }
            }
            Setting::Transform(product, transform) => self.transforms[product as usize] = transform,
        }
    }

    /// All that it decides for a kind of layer.
    pub fn settings(&self, kind: LayerKind) -> Vec<Setting> {
        let sites = kind.sites().map(|site| Setting::Site(site, self.written(site).copied()));
        let products = kind.transformed().iter();
        sites.chain(products.map(|&product| Setting::Transform(product, self.transform(product)))).collect()
    }

    /// From what the tensor of a site is made.
    pub fn origin(&self, kind: LayerKind, site: Site) -> From {
        match (kind, site) {
            (LayerKind::Linear | LayerKind::Expert, Site::WgradX) => From::Saved(Site::SavedX),
            (LayerKind::Expert, Site::FpropX | Site::SavedX) => From::Dispatched(Site::DispatchFwd),
            (LayerKind::Expert, Site::DgradDy | Site::WgradDy) => From::Dispatched(Site::DispatchBwd),
            (LayerKind::Expert, Site::WgradA) if self.kept_a().is_some() => From::Saved(Site::SavedA),
            (_, Site::DgradW) if self.untransformed(site).by == By::Requantize => From::Operand(Site::FpropW),
            _ => From::Source,
        }
    }

    /// Whether dgrad's weight is that of fprop in the other order: of one quantization, where the format has square blocks.
    pub fn has_one_weight(&self) -> bool {
        let (fprop, dgrad) = (self.at(Site::FpropW), self.at(Site::DgradW));
        fprop == dgrad && fprop.rht.is_none() && (fprop.axis == BlockAxis::Tile || !fprop.format.is_block())
    }

    /// The plain type in which dgrad multiplies the values of fprop's codes; none where its weight is made otherwise. Such a copy is decoded wherever a
    /// backward pass asks, once a micro-batch, and not kept beside the codes.
    pub fn decoded_for_dgrad(&self) -> Option<DType> {
        let (fprop, dgrad) = (self.at(Site::FpropW), self.at(Site::DgradW));
        dgrad.dtype().filter(|_| dgrad.by == By::Requantize && fprop.format.is_block())
    }

    /// Whether any tensor has blocks: then ragged rows are aligned to 128.
    pub fn has_blocks(&self) -> bool {
        self.sites.iter().flatten().any(|p| p.format.is_block())
    }
}
