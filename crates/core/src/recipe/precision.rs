//! How a tensor is represented, and the precisions of one kind of layer.

use super::scaling;
use super::site::{From, LayerKind, Site};
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
    /// Length of the random Hadamard transform along the contraction, if any.
    pub rht: Option<usize>,
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
            scaling::in_words(f, &self.scaling)?;
            if self.round != Rounding::NearestEven {
                write!(f, " {}", self.round)?;
            }
        }
        if let Some(block) = self.rht {
            write!(f, " rht{block}")?;
        }
        match self.by {
            By::Transcode => Ok(()),
            By::Requantize => f.write_str(" requantized"),
        }
    }
}

/// In a recipe file, in place of a scale rule: the scale follows from earlier steps.
pub(super) const DELAYED: &str = "delayed";

/// The name of an axis in a recipe file.
pub(super) fn axis_name(axis: BlockAxis) -> &'static str {
    match axis {
        BlockAxis::Row => "row",
        BlockAxis::Col => "col",
        BlockAxis::Tile => "tile",
    }
}

/// The precision of every site of one kind of layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Section {
    sites: [Option<Precision>; Site::ALL.len()],
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
        Self { sites }
    }

    /// The precision of a site, that of the one it falls back on where it is not written. Of an `a` that is not kept, that
    /// in which wgrad takes it.
    pub fn at(&self, site: Site) -> &Precision {
        match (&self.sites[site as usize], site) {
            (Some(precision), _) => precision,
            (None, Site::SavedA) => self.at(Site::WgradA),
            // Sites that fall back on none are always written.
            (None, _) => self.at(site.falls_back_on().unwrap_or(Site::FpropX)),
        }
    }

    /// The precision of a site, if it is written.
    pub fn written(&self, site: Site) -> Option<&Precision> {
        self.sites[site as usize].as_ref()
    }

    /// The format in which an expert keeps the second product's input; none where it is made again from h.
    pub fn kept_a(&self) -> Option<&Precision> {
        self.written(Site::SavedA)
    }

    /// Sets the precision of a site; none for one that falls back on another, or is not kept.
    pub fn set(&mut self, site: Site, precision: Option<Precision>) {
        if precision.is_some() || site.falls_back_on().is_some() || site == Site::SavedA {
            self.sites[site as usize] = precision;
        }
    }

    /// From what the tensor of a site is made.
    pub fn origin(&self, kind: LayerKind, site: Site) -> From {
        match (kind, site) {
            (LayerKind::Linear | LayerKind::Expert, Site::WgradX) => From::Saved(Site::SavedX),
            (LayerKind::Expert, Site::FpropX | Site::SavedX) => From::Dispatched(Site::DispatchFwd),
            (LayerKind::Expert, Site::DgradDy | Site::WgradDy) => From::Dispatched(Site::DispatchBwd),
            (LayerKind::Expert, Site::WgradA) if self.kept_a().is_some() => From::Saved(Site::SavedA),
            _ => From::Source,
        }
    }

    /// Whether any tensor has blocks: then ragged rows are aligned to 128.
    pub fn has_blocks(&self) -> bool {
        self.sites.iter().flatten().any(|p| p.format.is_block())
    }
}
