//! Places in the model where blocks are counted.

use nibble_core::formats::{BlockAxis, Format};
use nibble_core::recipe::{LayerKind, LayerPlan, Product, ProductPlan, Site};
use std::fmt;

/// The kind of a tensor's conversion at a site.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ChangeKind {
    /// A plain tensor is quantized.
    Quantize,
    /// Codes of row blocks are transcoded: MXFP4 is lifted, or E4M3 is shifted to columns.
    Transcode {
        /// The format before the conversion.
        from: Format,
        /// The axis of the result's blocks.
        axis: BlockAxis,
    },
    /// A product lifts the codes of an operand to E4M3. Only steps that measure quantization count such lifts.
    Lift {
        /// The format before the lift.
        from: Format,
        /// The axis of the lifted blocks.
        axis: BlockAxis,
        /// The product.
        product: Product,
    },
}

/// Name of fprop's copy of a weight in counts and random bits.
pub(crate) const OF_FPROP: &str = "w";
/// Name of dgrad's copy of a weight in counts and random bits, if this copy is quantized separately.
pub(crate) const OF_DGRAD: &str = "wt";

/// A place in the model where blocks are counted.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CountSite {
    /// The layer's name.
    pub layer: String,
    /// The tensor's name.
    pub tensor: &'static str,
    /// The tensor's conversion.
    pub conversion: ChangeKind,
}

impl fmt::Display for CountSite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.layer, self.tensor)?;
        match self.conversion {
            ChangeKind::Quantize => Ok(()),
            ChangeKind::Transcode { from, axis } => write!(f, ".{from}→{axis}"),
            ChangeKind::Lift { from, axis, product } => write!(f, ".{from}→{axis}.{}", product.name()),
        }
    }
}

/// The name of a layer's tensor without the number of the decoder layer.
pub(super) fn in_any_layer(layer: &str, tensor: &str) -> String {
    let mut parts: Vec<&str> = layer.split('.').collect();
    if let Some(number) = parts.iter().position(|part| part.parse::<usize>().is_ok()) {
        parts.drain(..=number);
    }
    format!("{}.{tensor}", parts.join("."))
}

impl CountSite {
    /// The site that counts the lift of an operand of a product; `None` if the product does not lift the operand. The site of a weight has the
    /// weight's name, and other sites have the layer's name.
    pub(crate) fn of_lift(
        plan: &LayerPlan,
        product: &ProductPlan,
        operand: usize,
        (layer, weight): (&str, &str),
    ) -> Option<Self> {
        let (from, lifted) = (product.operands[operand].format, product.lifted()[operand]?);
        let (layer, tensor) = match (plan.layer.kind, product.sites[operand]) {
            (_, Site::FpropW) => (weight, OF_FPROP),
            (_, Site::DgradW) => (weight, OF_DGRAD),
            (LayerKind::Head, Site::DgradDy | Site::WgradDy) => (layer, "dlogits"),
            (_, site) => (layer, site.tensor()),
        };
        let conversion = ChangeKind::Lift { from, axis: lifted.axis, product: product.product };
        Some(Self { layer: layer.to_owned(), tensor, conversion })
    }

    /// The site's name without the decoder layer, which is the same for corresponding sites in all layers.
    pub fn in_any_layer(&self) -> String {
        in_any_layer(&self.layer, self.tensor)
    }

    /// The number of the site's decoder layer as text; `-` outside decoder layers.
    pub(super) fn layer_number(&self) -> String {
        self.decoder_layer().map_or("-".to_owned(), |number| number.to_string())
    }

    /// The number of the site's decoder layer; `None` outside decoder layers.
    pub(crate) fn decoder_layer(&self) -> Option<usize> {
        self.layer.split('.').find_map(|part| part.parse().ok())
    }
}
