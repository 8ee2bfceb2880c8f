//! Double quantizations: tensors that are quantized from quantized tensors.

use super::{LayerKind, Recipe, Section, Site};

impl Section {
    /// Every tensor of this kind of layer that is quantized from a quantized tensor.
    fn requantizations(&self, kind: LayerKind) -> Vec<String> {
        let mut found = Vec::new();
        for site in kind.sites() {
            let p = self.at(site);
            // Tensors that SwiGLU computes from the saved h.
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
    /// Every tensor that is quantized from a tensor that was already quantized. The method checks the recipe without overrides, and with
    /// each override alone.
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
