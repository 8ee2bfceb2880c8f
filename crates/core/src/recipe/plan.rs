//! What a section's decisions amount to: every change of representation of a layer's activations and gradients, in the
//! order in which a layer issues them. Weights' copies are left out: they are made once a step.
//!
//! It is read off the routes that the layers take ([`super::Route`]). A test holds it equal to what a backend sees of them.

use super::route::{Computed, ExpertRoutes, Pair, Route, WgradA};
use super::{LayerKind, Precision, Recipe, Section, Site};
use crate::DType;
use crate::ops::Planes;
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
    /// How many casts it is. A cast is a quantization of a plain tensor by a kernel of its own, along its rows or along its
    /// columns, or a dequantization. Rows and columns from one read are two: a flow free of casts quantizes the rows alone and
    /// transcodes them to columns. What a kernel writes quantized that computes it is none.
    pub fn casts(&self) -> usize {
        match self.op {
            "quantize" => usize::from(self.to.rows) + usize::from(self.to.cols),
            "dequantize" => 1,
            _ => 0,
        }
    }

    /// Whether rows move and stay as they are.
    pub fn is_move(&self) -> bool {
        matches!(self.op, "dispatch+permute" | "unpermute+combine")
    }

    /// Where the changes seen of a layer are others than those planned, in a sentence; none where they are the same.
    pub fn difference(seen: &[Self], planned: &[Self]) -> Option<String> {
        let at = (0..seen.len().max(planned.len())).find(|at| seen.get(*at) != planned.get(*at))?;
        let told = |changes: &[Self]| match changes.get(at) {
            Some(Self { pass, op, tensor, from, to }) => {
                format!("{op} of {tensor} from {from} to {to} ({pass})")
            }
            None => "nothing more".to_owned(),
        };
        let (found, expected) = (told(seen), told(planned));
        Some(format!("change {} of the layer is {found}, where its recipe means {expected}", at + 1))
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pass, op, tensor, from, to } = self;
        write!(f, "{pass:<9} {op:<25} {tensor:<7} {from} → {to}")
    }
}

/// The changes of a layer so far.
struct Flow {
    plain: Form,
    pass: Pass,
    changes: Vec<Change>,
}

impl Flow {
    fn add(&mut self, op: &'static str, tensor: &'static str, from: Form, to: Form) {
        self.changes.push(Change { pass: self.pass, op, tensor, from, to });
    }

    fn route(&mut self, tensor: &'static str, from: Form, route: &Route) {
        match route {
            Route::Same => {}
            Route::Plain(dtype) if from.format.is_block() => {
                self.add("dequantize", tensor, from, (*dtype).into());
            }
            Route::Plain(dtype) if from != Form::from(*dtype) => {
                self.add("cast", tensor, from, (*dtype).into());
            }
            Route::Plain(_) => {}
            Route::Quantize(to) => self.add("quantize", tensor, from, to.into()),
            Route::Transcode(to) => self.add("transcode", tensor, from, to.into()),
            Route::Requantize { through, to } => {
                self.add("dequantize", tensor, from, (*through).into());
                self.add("quantize", tensor, (*through).into(), to.into());
            }
        }
    }

    fn pair(&mut self, tensor: &'static str, from: Form, pair: &Pair) {
        match pair {
            Pair::One(route) => self.route(tensor, from, route),
            Pair::OneRead(to) => self.add("quantize", tensor, from, Form::both(to.format)),
            Pair::Two(first, second) => {
                [first, second].into_iter().for_each(|to| self.route(tensor, from, to))
            }
        }
    }

    /// What a fused kernel writes, of what it reads. Plain from plain is no change.
    fn written(
        &mut self,
        [op, quantizing]: [&'static str; 2],
        tensor: &'static str,
        from: Form,
        of: &Computed,
    ) {
        let to = match of {
            Computed::Fused { to, planes: Planes::Both } if to.format.is_block() => Form::both(to.format),
            Computed::Fused { to, .. } => to.into(),
            Computed::Plain { dtype, .. } => (*dtype).into(),
        };
        match (from.format.is_block(), to.format.is_block()) {
            (_, true) => self.add(quantizing, tensor, from, to),
            (true, false) => self.add(op, tensor, from, to),
            (false, false) => {}
        }
    }

    /// What is made of what a fused kernel has written plain.
    fn then(&mut self, tensor: &'static str, of: &Computed) {
        if let Computed::Plain { dtype, then, .. } = of {
            self.pair(tensor, (*dtype).into(), then);
        }
    }

    /// Rows of the tokens, as they travel.
    fn sent(&mut self, tensor: &'static str, wire: &Precision, route: &Route) {
        self.route(tensor, self.plain, route);
        self.add("dispatch+permute", tensor, wire.into(), wire.into());
    }

    /// Rows of the experts, back at the tokens.
    fn returned(&mut self, tensor: &'static str, route: &Route) {
        self.route(tensor, self.plain, route);
        self.summed(tensor, route);
    }

    /// What becomes of rows that have travelled back.
    fn summed(&mut self, tensor: &'static str, route: &Route) {
        if let Route::Quantize(wire) = route {
            self.add("dequantize", tensor, wire.into(), self.plain);
        }
        self.add("unpermute+combine", tensor, self.plain, self.plain);
    }

    fn dense(&mut self, section: &Section, activations: DType, gated: bool) {
        const KIND: LayerKind = LayerKind::Linear;
        self.pair("x", self.plain, &section.input(KIND, activations, true));
        let h = section.kept_h(true).filter(|_| gated);
        if let Some(h) = &h {
            self.add("swiglu+quantize", "h", self.plain, Form::from(h));
        }
        self.pass = Pass::Backward;
        if let Some(h) = h {
            self.add("swiglu_backward", "dh", Form::from(&h), self.plain);
        }
        let kept = Form::from(&section.at(Site::SavedX));
        self.route("x", kept, &section.route(KIND, Site::WgradX, activations));
        let tensor = if gated { "dh" } else { "dy" };
        self.pair(tensor, self.plain, &section.gradient(KIND, activations));
    }

    fn head(&mut self, section: &Section, activations: DType) {
        const KIND: LayerKind = LayerKind::Head;
        self.pair("x", self.plain, &section.input(KIND, activations, true));
        self.pair("dlogits", self.plain, &section.gradient(KIND, activations));
        // Its one kernel makes them, chunk by chunk.
        self.changes.iter_mut().for_each(|change| change.op = "head_loss+quantize");
    }

    fn experts(&mut self, section: &Section, routes: &ExpertRoutes) {
        const FORWARD: [&str; 2] = ["swiglu", "swiglu+quantize"];
        const BACKWARD: [&str; 2] = ["swiglu_backward", "swiglu_backward+quantize"];
        let at = |site| section.at(site);
        self.sent("x", &at(Site::DispatchFwd), &routes.x_sent);
        self.pair("x", Form::from(&at(Site::DispatchFwd)), &routes.x);
        // The kernel writes both before anything is made of a.
        self.written(FORWARD, "a", self.plain, &routes.a);
        if let Some(h) = &routes.h {
            self.add("swiglu+quantize", "h", self.plain, Form::from(h));
        }
        self.then("a", &routes.a);
        self.returned("y", &routes.y_sent);
        self.pass = Pass::Backward;
        self.sent("dy", &at(Site::DispatchBwd), &routes.dy_sent);
        self.pair("dy", Form::from(&at(Site::DispatchBwd)), &routes.dy);
        let h = Form::from(&at(Site::SavedH));
        self.written(BACKWARD, "dh", h, &routes.dh);
        match &routes.wgrad_a {
            WgradA::Again(a) => {
                self.written(BACKWARD, "a", h, a);
                self.then("dh", &routes.dh);
                self.then("a", a);
            }
            WgradA::Kept(route) => {
                self.then("dh", &routes.dh);
                self.route("a", Form::from(&at(Site::SavedA)), route);
            }
        }
        // Rows set out before the gradients of weights are computed, and are summed after that.
        self.route("dx", self.plain, &routes.dx_sent);
        self.route("x", Form::from(&at(Site::SavedX)), &routes.wgrad_x);
        self.summed("dx", &routes.dx_sent);
    }
}

impl Section {
    /// Every change of representation in one layer of this kind, forward and backward, on one rank, with nothing made
    /// again that the recipe keeps. `gated`: SwiGLU follows it (dense layers).
    pub fn plan(&self, kind: LayerKind, activations: DType, gated: bool) -> Vec<Change> {
        let mut flow = Flow { plain: activations.into(), pass: Pass::Forward, changes: Vec::new() };
        match kind {
            LayerKind::Linear => flow.dense(self, activations, gated),
            LayerKind::Expert => flow.experts(self, &self.expert_routes(activations, true, false)),
            LayerKind::Head => flow.head(self, activations),
            LayerKind::Router => {}
        }
        flow.changes
    }

    /// What the fused kernels of this kind of layer leave to operations of their own, and why.
    pub fn unfused(&self, kind: LayerKind, activations: DType) -> Vec<String> {
        match kind {
            LayerKind::Expert => self.expert_routes(activations, true, false).unfused(),
            _ => Vec::new(),
        }
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
            if !skipped
                && origin.format.is_block()
                && p.format.is_block()
                && (site == Site::DgradW || !p.same_bits(&origin))
            {
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
            found.extend(new.map(|line| format!("override of {}: {line}", o.whose())));
        }
        found
    }
}
