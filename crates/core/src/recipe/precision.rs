//! The representation of a tensor, and the precisions of one kind of layer.

use super::site::{From, LayerKind, Product, Site};
use super::transform::{Signs, Transform};
use crate::{DType, Result};
use nibble_formats::{BlockAxis, Codec, Correction, DelayedScaling, Format, Rounding, ScaleRule, Scaling};
use std::fmt;

/// How a tensor in one block format is converted to another block format or axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum By {
    /// Codes are converted one by one, without a plain tensor in between ([`crate::ops::Transcode`]).
    #[default]
    Transcode,
    /// The tensor is dequantized to the type of the activations, and quantized again with new scales.
    Requantize,
    /// The tensor is quantized by a kernel of its own, although no number needs it: a tensor with the numbers of its quantized source is
    /// dequantized and quantized again, and the kernel that computes a tensor leaves the quantization to another one. Such casts cost time
    /// and change no number, or only the roundings between.
    Cast,
}

/// The representation of a tensor: its format, block axis, scales, rounding and transform.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Precision {
    /// The format of elements and blocks.
    pub format: Format,
    /// The axis along which blocks run.
    pub axis: BlockAxis,
    /// How scales are chosen.
    pub scale: ScaleRule,
    /// Options of the scale rule.
    pub scaling: Scaling,
    /// The rule of delayed scaling, if scales are computed from the magnitudes of earlier steps instead of the values of the tensor itself.
    pub delayed: Option<DelayedScaling>,
    /// How elements are rounded.
    pub round: Rounding,
    /// The random Hadamard transform of the product that multiplies the tensor, if there is one. A saved tensor has the transform of wgrad
    /// if it is saved in the form that wgrad multiplies. The transform is chosen by a section ([`Section::transform`]), so a precision that
    /// belongs to no section has no transform.
    pub rht: Option<Transform>,
    /// How the tensor is converted if its source is quantized in another block format or axis.
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
    /// [`crate::Error::Format`] if format, scale rule, scaling and rounding cannot be combined.
    pub fn codec(&self) -> Result<Codec> {
        Ok(Codec::new(self.format, self.scale, self.round)?.with(self.scaling)?)
    }

    /// Whether this precision needs random bits, because it rounds values or corrected scales stochastically.
    pub fn draws(&self) -> bool {
        self.round.is_random() || self.scaling.draws()
    }

    /// Whether two precisions are the same representation if rounding is not compared.
    pub fn same_bits(&self, other: &Self) -> bool {
        let blocks = |p: &Self| p.format.is_block().then_some((p.axis, p.scale, p.scaling, p.delayed, p.rht));
        self.format == other.format && blocks(self) == blocks(other)
    }

    /// Whether one kernel can write both precisions from one read of a plain tensor: `self` along rows and `other` along columns.
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
            // A weight without 2-D blocks is quantized twice: untransposed for fprop, and transposed for dgrad.
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
            By::Cast => f.write_str(" cast"),
        }
    }
}

/// The value for delayed scaling, which replaces a scale rule in a recipe file.
pub(super) const DELAYED: &str = "delayed";

/// The value for no transform in a recipe file.
pub(super) const NO_TRANSFORM: &str = "none";

/// The value for 2-D blocks of weights in a recipe file.
pub(super) const SQUARE: &str = "square";
/// The value for row blocks of weights in a recipe file.
pub(super) const LINE: &str = "line";

/// The name of an axis in a recipe file.
pub(super) fn axis_name(axis: BlockAxis) -> &'static str {
    match axis {
        BlockAxis::Row => "row",
        BlockAxis::Col => "col",
        BlockAxis::Tile => "tile",
    }
}

/// The precision of every tensor (site) in one kind of layer, and the transforms of the layer's matrix products.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Section {
    sites: [Option<Precision>; Site::ALL.len()],
    transforms: [Option<Transform>; Product::ALL.len()],
}

/// One key of a section with its value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Setting {
    /// The precision of a site; `None` if the site falls back on another site, or its tensor is not saved.
    Site(Site, Option<Precision>),
    /// The transform of a product, if it has one.
    Transform(Product, Option<Transform>),
}

impl Setting {
    /// The setting's key in a section.
    pub fn key(&self) -> &'static str {
        match self {
            Self::Site(site, _) => site.key(),
            Self::Transform(product, _) => product.rht_key(),
        }
    }

    /// The part of the setting's key before the dot, such as `fprop`.
    pub fn product(&self) -> &'static str {
        match self {
            Self::Site(site, _) => site.product(),
            Self::Transform(product, _) => product.name(),
        }
    }

    /// The precision, if the setting sets the precision of a site.
    pub fn precision(&self) -> Option<&Precision> {
        match self {
            Self::Site(_, precision) => precision.as_ref(),
            Self::Transform(..) => None,
        }
    }
}

impl Section {
    /// A section that quantizes nothing, and recomputes the input `a` of an expert's down projection in the backward pass.
    pub fn plain(dtype: DType) -> Self {
        let plain = Some(Precision::plain(dtype));
        let sites = Site::ALL.map(|site| match site {
            Site::SavedA => None,
            _ if site.falls_back_on().is_some() => None,
            _ => plain,
        });
        Self { sites, transforms: [None; Product::ALL.len()] }
    }

    /// The precision of a site. If the recipe does not set the precision of this site, the method returns the precision of another site
    /// ([`Site::falls_back_on`]). If `a` (the input of the down projection) is not saved, the precision of the saved `a` is that of the
    /// operand of wgrad.
    pub fn at(&self, site: Site) -> Precision {
        let rht = match (site, site.operand_of()) {
            (_, Some(product)) => self.transform(product),
            (Site::SavedX, None) => self.kept_for(site, Site::WgradX),
            (Site::SavedA, None) => self.kept_for(site, Site::WgradA),
            _ => None,
        };
        let p = *self.untransformed(site);
        Precision { rht: rht.filter(|_| p.format.is_block()), by: self.by(site), ..p }
    }

    /// How the tensor of a site is converted. A cast is asked for by a site's own key, and not by the key that it falls back on.
    fn by(&self, site: Site) -> By {
        match self.untransformed(site).by {
            By::Cast if self.written(site).is_none() => By::Transcode,
            by => by,
        }
    }

    fn untransformed(&self, site: Site) -> &Precision {
        match (&self.sites[site as usize], site) {
            (Some(precision), _) => precision,
            (None, Site::SavedA) => self.untransformed(Site::WgradA),
            // A recipe always sets the sites without a fallback.
            (None, _) => self.untransformed(site.falls_back_on().unwrap_or(Site::FpropX)),
        }
    }

    /// The transform of a saved tensor, if it is saved in the form that wgrad takes.
    fn kept_for(&self, kept: Site, operand: Site) -> Option<Transform> {
        let by = self.by(operand);
        let is_it = self.untransformed(kept).same_bits(self.untransformed(operand)) && by == By::Transcode;
        self.transform(Product::Wgrad).filter(|_| is_it)
    }

    /// The transform of a product.
    pub fn transform(&self, product: Product) -> Option<Transform> {
        self.transforms[product as usize]
    }

    /// The precision that the recipe sets for a site, without the transform of the product; `None` if the recipe does not set it.
    pub fn written(&self, site: Site) -> Option<&Precision> {
        self.sites[site as usize].as_ref()
    }

    /// The precision in which an expert saves the input of the down projection; `None` if this input is recomputed from h.
    pub fn kept_a(&self) -> Option<Precision> {
        self.written(Site::SavedA).map(|_| self.at(Site::SavedA))
    }

    /// Applies a setting.
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

    /// Shortens the transform of a product that contracts this many numbers ([`Transform::fitted`]). Without a transform, its operands have no
    /// correction either.
    pub(super) fn fit(&mut self, product: Product, contracted: usize) {
        let Some(transform) = self.transform(product) else { return };
        let fitted = transform.fitted(contracted);
        self.transforms[product as usize] = fitted;
        let operands = Site::ALL.into_iter().filter(|site| site.operand_of() == Some(product));
        for site in operands.filter(|_| fitted.is_none()) {
            if let Some(precision) = &mut self.sites[site as usize] {
                precision.scaling.correction = Correction::None;
            }
        }
    }

    /// All settings for a kind of layer.
    pub fn settings(&self, kind: LayerKind) -> Vec<Setting> {
        let sites = kind.sites().map(|site| Setting::Site(site, self.written(site).copied()));
        let products = kind.transformed().iter();
        sites.chain(products.map(|&product| Setting::Transform(product, self.transform(product)))).collect()
    }

    /// The source from which the tensor of a site is converted.
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

    /// Whether the weight that dgrad reads is the transpose of the weight that fprop reads, both from one quantization. Plain weights and
    /// weights in 2-D blocks need only one quantization.
    pub fn has_one_weight(&self) -> bool {
        let (fprop, dgrad) = (self.at(Site::FpropW), self.at(Site::DgradW));
        fprop == dgrad && fprop.rht.is_none() && (fprop.axis == BlockAxis::Tile || !fprop.format.is_block())
    }

    /// The plain type of the weight that dgrad reads, if it is decoded from the codes that fprop reads; otherwise `None`. The decoded
    /// weight is computed in each micro-batch when it is needed, and is not stored in addition to the codes.
    pub fn decoded_for_dgrad(&self) -> Option<DType> {
        let (fprop, dgrad) = (self.at(Site::FpropW), self.at(Site::DgradW));
        dgrad.dtype().filter(|_| dgrad.by == By::Requantize && fprop.format.is_block())
    }

    /// Whether any tensor has blocks. If a tensor has blocks, each group of rows is aligned to 128 rows.
    pub fn has_blocks(&self) -> bool {
        self.sites.iter().flatten().any(|p| p.format.is_block())
    }

    /// Whether any tensor's bits depend on the number of the step: by stochastic rounding, or by random signs that change from step to step.
    pub fn depends_on_step(&self) -> bool {
        let depends =
            |p: &Precision| p.draws() || p.rht.is_some_and(|transform| transform.signs == Signs::Step);
        self.sites.iter().flatten().any(depends)
    }
}
