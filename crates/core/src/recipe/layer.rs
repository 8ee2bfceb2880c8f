//! A layer as recipes see it.

use super::{LayerKind, Section, Setting, Site};

/// A layer as overrides see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    /// Its kind, and so its section.
    pub kind: LayerKind,
    /// Its name, `model.layers.3.self_attn.q_proj`.
    pub name: String,
    /// Whether SwiGLU follows it: then the input of SwiGLU is saved, in the precision of `saved.h`.
    pub gated: bool,
}

impl Layer {
    /// A layer without SwiGLU after it.
    pub fn new(kind: LayerKind, name: impl Into<String>) -> Self {
        Self { kind, name: name.into(), gated: false }
    }

    /// Whether the layer has this site of this kind.
    pub(super) fn has(&self, kind: LayerKind, site: Site) -> bool {
        self.kind == kind
            && kind.has(site)
            && (self.gated || kind != LayerKind::Linear || site != Site::SavedH)
    }

    /// Whether the layer has what the setting decides.
    pub(super) fn has_setting(&self, kind: LayerKind, setting: &Setting) -> bool {
        match setting {
            Setting::Site(site, _) => self.has(kind, *site),
            Setting::Transform(product, _) => self.kind == kind && kind.transformed().contains(product),
        }
    }

    /// Whether two sections decide the same for this layer.
    pub fn same(&self, a: &Section, b: &Section) -> bool {
        let mut sites = self.kind.sites().filter(|site| self.has(self.kind, *site));
        a.kept_a().is_some() == b.kept_a().is_some() && sites.all(|site| a.at(site) == b.at(site))
    }
}
