//! A layer as a recipe knows it.

use super::{LayerKind, Section, Setting, Site};

/// A layer as overrides know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    /// Which section speaks of it.
    pub kind: LayerKind,
    /// Its name, `model.layers.3.self_attn.q_proj`.
    pub name: String,
    /// Whether SwiGLU follows it: then it keeps that one's input, as `saved.h` says.
    pub gated: bool,
}

impl Layer {
    /// One that SwiGLU does not follow.
    pub fn new(kind: LayerKind, name: impl Into<String>) -> Self {
        Self { kind, name: name.into(), gated: false }
    }

    /// Whether a site of this kind is one of its own.
    pub(super) fn has(&self, kind: LayerKind, site: Site) -> bool {
        self.kind == kind
            && kind.has(site)
            && (self.gated || kind != LayerKind::Linear || site != Site::SavedH)
    }

    /// Whether it has what such a setting decides.
    pub(super) fn has_setting(&self, kind: LayerKind, setting: &Setting) -> bool {
        match setting {
            Setting::Site(site, _) => self.has(kind, *site),
            Setting::Transform(product, _) => self.kind == kind && kind.transformed().contains(product),
        }
    }

    /// Whether two sections decide the same for it.
    pub fn same(&self, a: &Section, b: &Section) -> bool {
        let mut sites = self.kind.sites().filter(|site| self.has(self.kind, *site));
        a.kept_a().is_some() == b.kept_a().is_some() && sites.all(|site| a.at(site) == b.at(site))
    }
}
