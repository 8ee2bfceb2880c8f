//! What a section's decisions amount to: every change of representation of a layer's activations and gradients, in the
//! order in which a layer issues them. Weights' copies are left out: they are made once a step.
//!
//! It is derived here from the recipe alone. A test holds it equal to what a backend sees of the layers.

use super::{By, LayerKind, Precision, Recipe, Section, Site};
use crate::DType;
use nibble_formats::{BlockAxis, Format};
use std::fmt;

/// Forward or backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pass {
    /// The forward pass.
    Forward,
    /// The backward pass.
    Backward,
}

impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(if *self == Self::Forward { "forward" } else { "backward" })
    }
}

/// A format, and along what its blocks run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Form {
    /// Of the elements.
    pub format: Format,
    /// Whether there is a plane by rows.
    pub rows: bool,
    /// Whether there is one by columns.
    pub cols: bool,
}

impl Form {
    /// Plain elements, or blocks along an axis (those of a square tile along both).
    pub fn new(format: Format, axis: BlockAxis) -> Self {
        let is_block = format.is_block();
        Self { format, rows: is_block && axis != BlockAxis::Col, cols: is_block && axis != BlockAxis::Row }
    }

    /// Rows and columns of one tensor, from one read.
    pub fn both(format: Format) -> Self {
        Self::new(format, BlockAxis::Tile)
    }
}

impl From<&Precision> for Form {
    fn from(p: &Precision) -> Self {
        Self::new(p.format, p.axis)
    }
}

impl From<DType> for Form {
    fn from(dtype: DType) -> Self {
        (&Precision::plain(dtype)).into()
    }
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.rows, self.cols) {
            (true, true) => write!(f, "{} rows and columns", self.format),
            (true, false) => write!(f, "{} rows", self.format),
            (false, true) => write!(f, "{} columns", self.format),
            (false, false) => write!(f, "{}", self.format),
        }
    }
}

/// One change of representation, or a move of rows between tokens and experts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// When.
    pub pass: Pass,
    /// The kernel: `quantize`, `transcode`, `swiglu+quantize`, `dispatch+permute`, …
    pub op: &'static str,
    /// The tensor.
    pub tensor: &'static str,
    /// From what representation.
    pub from: Form,
    /// To which.
    pub to: Form,
}

impl Change {
    /// Whether it is a cast by a kernel of its own: a plain tensor read only to be quantized, or made only for that.
    pub fn is_cast(&self) -> bool {
        matches!(self.op, "quantize" | "dequantize")
    }

    /// Whether rows move and stay as they are.
    pub fn is_move(&self) -> bool {
        matches!(self.op, "dispatch+permute" | "unpermute+combine")
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pass, op, tensor, from, to } = self;
        write!(f, "{pass:<9} {op:<25} {tensor:<7} {from} → {to}")
    }
}

/// The changes of a pass so far.
struct Flow<'a> {
    section: &'a Section,
    kind: LayerKind,
    plain: Form,
    pass: Pass,
    changes: Vec<Change>,
}

impl Flow<'_> {
    fn add(&mut self, op: &'static str, tensor: &'static str, from: Form, to: Form) {
        self.changes.push(Change { pass: self.pass, op, tensor, from, to });
    }

    /// A plain tensor as a site wants it.
    fn quantize(&mut self, tensor: &'static str, from: Form, to: &Precision) {
        match to.format.is_block() {
            true => self.add("quantize", tensor, from, to.into()),
            false if from.format != to.format => self.add("cast", tensor, from, to.into()),
            false => {}
        }
    }

    /// A plain tensor by rows and in a second form: from one read where one kernel can.
    fn forms(&mut self, tensor: &'static str, from: Form, rows: &Precision, second: &Precision) {
        if rows.one_read(second) {
            self.add("quantize", tensor, from, Form::both(rows.format));
        } else {
            self.quantize(tensor, from, rows);
            self.quantize(tensor, from, second);
        }
    }

    /// What one site has, as another wants it.
    fn convert(&mut self, tensor: &'static str, site: Site) {
        let to = self.section.at(site);
        let Some(origin) = self.section.origin(self.kind, site).site().map(|site| self.section.at(site))
        else {
            return;
        };
        match (origin.format.is_block(), to.format.is_block(), to.by) {
            _ if to.same_bits(origin) && to.by == By::Transcode => {}
            (false, ..) => self.quantize(tensor, origin.into(), to),
            (true, false, _) => self.add("dequantize", tensor, origin.into(), to.into()),
            (true, true, By::Transcode) => self.add("transcode", tensor, origin.into(), to.into()),
            (true, true, By::Requantize) => {
                self.add("dequantize", tensor, origin.into(), self.plain);
                self.quantize(tensor, self.plain, to);
            }
        }
    }

    /// Rows of the tokens, at the experts.
    fn dispatched(&mut self, tensor: &'static str, wire: Site) {
        let to = self.section.at(wire);
        self.quantize(tensor, self.plain, to);
        self.add("dispatch+permute", tensor, to.into(), to.into());
    }

    /// A tensor that arrived or is plain, as fprop and the backward pass want it, or as dgrad and wgrad do.
    fn pair(&mut self, tensor: &'static str, rows: Site, second: Site) {
        let section = self.section;
        let origin = section.origin(self.kind, rows).site().map(|site| section.at(site));
        match origin.filter(|origin| origin.format.is_block()) {
            Some(_) => [rows, second].into_iter().for_each(|site| self.convert(tensor, site)),
            None => self.plain_pair(tensor, self.plain, rows, second),
        }
    }

    fn plain_pair(&mut self, tensor: &'static str, from: Form, rows: Site, second: Site) {
        let (rows, second) = (self.section.at(rows), self.section.at(second));
        match second.same_bits(rows) && second.round == rows.round {
            true => self.quantize(tensor, from, rows),
            false => self.forms(tensor, from, rows, second),
        }
    }

    fn dense(&mut self, gated: bool) {
        let section = self.section;
        let h = section.at(Site::SavedH);
        self.pair("x", Site::FpropX, Site::SavedX);
        let keeps_h = gated && h.format.is_block();
        if keeps_h {
            self.add("swiglu+quantize", "h", self.plain, h.into());
        }
        self.pass = Pass::Backward;
        if keeps_h {
            self.add("swiglu_backward", "dh", h.into(), self.plain);
        }
        let tensor = if gated { "dh" } else { "dy" };
        self.convert("x", Site::WgradX);
        self.pair(tensor, Site::DgradDy, Site::WgradDy);
    }

    fn head(&mut self) {
        for (tensor, rows, cols) in
            [("x", Site::FpropX, Site::WgradX), ("dlogits", Site::DgradDy, Site::WgradDy)]
        {
            let (rows, cols) = (self.section.at(rows), self.section.at(cols));
            let made = match rows.one_read(cols) {
                true => vec![Form::both(rows.format)],
                false => [rows, cols].into_iter().filter(|p| p.format.is_block()).map(Form::from).collect(),
            };
            made.into_iter().for_each(|to| self.add("head_loss+quantize", tensor, self.plain, to));
        }
    }

    fn experts(&mut self) {
        let section = self.section;
        let h = section.at(Site::SavedH);
        self.dispatched("x", Site::DispatchFwd);
        self.pair("x", Site::FpropX, Site::SavedX);
        self.swiglu();
        if h.format.is_block() {
            self.add("swiglu+quantize", "h", self.plain, h.into());
        }
        // The kernel writes both before anything is made of a.
        if self.a_is_written_plain() {
            // For a delayed scale as wide as the kernel has it.
            let fprop = section.at(Site::FpropA);
            let from = if fprop.delayed.is_some() { DType::F32.into() } else { self.plain };
            match section.kept_a() {
                Some(_) => self.plain_pair("a", from, Site::FpropA, Site::SavedA),
                None => self.quantize("a", from, fprop),
            }
        }
        self.add("unpermute+combine", "y", self.plain, self.plain);
        self.pass = Pass::Backward;
        self.dispatched("dy", Site::DispatchBwd);
        self.pair("dy", Site::DgradDy, Site::WgradDy);
        self.swiglu_backward();
        self.convert("x", Site::WgradX);
        self.add("unpermute+combine", "dx", self.plain, self.plain);
    }

    fn a_is_written_plain(&self) -> bool {
        let fprop = self.section.at(Site::FpropA);
        fprop.delayed.is_some() || self.section.kept_a().is_some_and(|kept| !fprop.fused_with(kept))
    }

    fn swiglu(&mut self) {
        let fprop = self.section.at(Site::FpropA);
        if self.a_is_written_plain() || !fprop.format.is_block() {
            return;
        }
        let both = self.section.kept_a().is_some_and(|kept| fprop.one_read(kept));
        let to = if both { Form::both(fprop.format) } else { fprop.into() };
        self.add("swiglu+quantize", "a", self.plain, to);
    }

    fn swiglu_backward(&mut self) {
        const OP: &str = "swiglu_backward+quantize";
        let (section, h) = (self.section, Form::from(self.section.at(Site::SavedH)));
        let [dgrad, wgrad] = [Site::DgradDh, Site::WgradDh].map(|site| section.at(site));
        let wgrad_a = section.at(Site::WgradA);
        let fused = dgrad.one_read(wgrad) && !dgrad.round.is_random() && dgrad.delayed.is_none();
        let f32 = Form::from(DType::F32);
        if fused {
            self.add(OP, "dh", h, Form::both(dgrad.format));
        } else if h.rows {
            let plain = if dgrad.format.is_block() || wgrad.format.is_block() { f32 } else { self.plain };
            self.add("swiglu_backward", "dh", h, plain);
        }
        let made_again = section.kept_a().is_none();
        let a_fused = wgrad_a.rht.is_none() && wgrad_a.delayed.is_none();
        match (made_again, wgrad_a.format.is_block()) {
            (true, true) if a_fused => self.add(OP, "a", h, wgrad_a.into()),
            (true, true) if h.rows => self.add("swiglu_backward", "a", h, f32),
            (true, false) if h.rows => self.add("swiglu_backward", "a", h, self.plain),
            _ => {}
        }
        if !fused && (dgrad.format.is_block() || wgrad.format.is_block()) {
            self.forms("dh", f32, dgrad, wgrad);
        }
        match (made_again, a_fused) {
            (true, false) => self.quantize("a", f32, wgrad_a),
            _ => self.convert("a", Site::WgradA),
        }
    }
}

impl Precision {
    /// Whether the kernel that computes a tensor can write it in both forms, this one for fprop. It measures what it writes.
    pub fn fused_with(&self, kept: &Self) -> bool {
        let made_of_one = (self.same_bits(kept) && self.round == kept.round) || self.one_read(kept);
        self.delayed.is_none() && made_of_one
    }
}

impl Section {
    /// Every change of representation in one layer of this kind, forward and backward, on one rank, with nothing made
    /// again that the recipe keeps. `gated`: SwiGLU follows it (dense layers).
    pub fn plan(&self, kind: LayerKind, activations: DType, gated: bool) -> Vec<Change> {
        let mut flow =
            Flow { section: self, kind, plain: activations.into(), pass: Pass::Forward, changes: Vec::new() };
        match kind {
            LayerKind::Linear => flow.dense(gated),
            LayerKind::Expert => flow.experts(),
            LayerKind::Head => flow.head(),
            LayerKind::Router => {}
        }
        flow.changes
    }

    /// Every tensor of this kind of layer that is quantized from an already quantized one.
    fn requantizations(&self, kind: LayerKind) -> Vec<String> {
        let mut found = Vec::new();
        for site in kind.sites() {
            let p = self.at(site);
            // What SwiGLU makes of the h that was kept.
            let of_h = match site {
                Site::DgradDh | Site::WgradDh => true,
                Site::WgradA => self.kept_a().is_none(),
                Site::DgradDy | Site::WgradDy => kind == LayerKind::Linear,
                _ => false,
            };
            let origin = match self.origin(kind, site).site() {
                Some(origin) => self.at(origin),
                None if of_h => self.at(Site::SavedH),
                None => continue,
            };
            let skipped = site == Site::SavedA && self.kept_a().is_none();
            if !skipped && origin.format.is_block() && p.format.is_block() && !p.same_bits(origin) {
                let behind = if kind == LayerKind::Linear && of_h { " before SwiGLU" } else { "" };
                found.push(format!("{}.{}{behind}: {origin} → {p}", kind.name(), site.key()));
            }
        }
        found
    }
}

impl Recipe {
    /// Every tensor that is quantized from an already quantized one: the second quantizations of the recipe, and those of
    /// its overrides, each by itself.
    pub fn requantizations(&self) -> Vec<String> {
        let of = |sections: &dyn Fn(LayerKind) -> Section| -> Vec<String> {
            LayerKind::ALL.into_iter().flat_map(|kind| sections(kind).requantizations(kind)).collect()
        };
        let base = of(&|kind| *self.of(kind));
        let mut found = base.clone();
        for o in &self.overrides {
            let changed = of(&|kind| o.applied(kind, *self.of(kind)));
            let new = changed.into_iter().filter(|line| !base.contains(line));
            found.extend(new.map(|line| format!("override of {}: {line}", o.layers.join(", "))));
        }
        found
    }
}
