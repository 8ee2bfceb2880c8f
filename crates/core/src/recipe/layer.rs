//! The properties of a layer on which recipes depend.

use super::{LayerKind, Section, Setting, Site};

/// The properties of a layer by which the overrides of a recipe select layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    /// The kind of the layer, which determines the section of the recipe that applies to the layer.
    pub kind: LayerKind,
    /// The layer's name, for example `model.layers.3.self_attn.q_proj`.
    pub name: String,
    /// Whether SwiGLU follows the layer. If SwiGLU follows, its input is saved for the backward pass in the precision of `saved.h`.
    pub gated: bool,
}

impl Layer {
    /// A layer that SwiGLU does not follow.
    pub fn new(kind: LayerKind, name: impl Into<String>) -> Self {
        Self { kind, name: name.into(), gated: false }
    }

    /// Whether the layer has this site of this kind.
    pub(super) fn has(&self, kind: LayerKind, site: Site) -> bool {
        self.kind == kind
            && kind.has(site)
            && (self.gated || kind != LayerKind::Linear || site != Site::SavedH)
    }

    /// Whether the layer has the site or the product that the setting decides.
    pub(super) fn has_setting(&self, kind: LayerKind, setting: &Setting) -> bool {
        match setting {
            Setting::Site(site, _) => self.has(kind, *site),
            Setting::Transform(product, _) => self.kind == kind && kind.transformed().contains(product),
        }
    }

    /// Whether the sections `a` and `b` choose the same precisions for this layer.
    pub fn same(&self, a: &Section, b: &Section) -> bool {
        let mut sites = self.kind.sites().filter(|site| self.has(self.kind, *site));
        a.kept_a().is_some() == b.kept_a().is_some() && sites.all(|site| a.at(site) == b.at(site))
    }
}
