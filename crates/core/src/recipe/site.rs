//! The sites at which a recipe decides a precision, and the properties that follow from the site alone.

use nibble_formats::BlockAxis;

/// A tensor of a layer for which a recipe chooses a precision, such as an operand of a matrix product. The names of the sites are keys of a
/// recipe file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Site {
    /// The input X in Y = X·Wᵀ.
    FpropX,
    /// The weight W in Y = X·Wᵀ.
    FpropW,
    /// Input of an expert's second product; the default is [`Site::FpropX`].
    FpropA,
    /// The gradient dY in dX = dY·W.
    DgradDy,
    /// The gradient dH of the output of an expert's first product in dX = dH·W; the default is [`Site::DgradDy`].
    DgradDh,
    /// The weight W in dX = dY·W; the default is [`Site::FpropW`].
    DgradW,
    /// The gradient dY in dW = dYᵀ·X.
    WgradDy,
    /// The gradient dH of the output of an expert's first product in dW = dHᵀ·X; the default is [`Site::WgradDy`].
    WgradDh,
    /// The input X in dW = dYᵀ·X.
    WgradX,
    /// The input A of an expert's second product in dW = dYᵀ·A; the default is [`Site::WgradX`].
    WgradA,
    /// The saved input of a linear layer.
    SavedX,
    /// The saved output of a gated layer's first product: SwiGLU's input.
    SavedH,
    /// The saved input of an expert's second product; by default recomputed from h.
    SavedA,
    /// Dispatch of tokens to experts.
    DispatchFwd,
    /// Dispatch of gradients to experts.
    DispatchBwd,
    /// Combine of the experts' outputs, one row per slot. The default is the type of activations.
    CombineFwd,
    /// Combine of the gradients of the experts' inputs. The default is the type of activations.
    CombineBwd,
}

impl Site {
    /// Every site.
    pub const ALL: [Self; 17] = [
        Self::FpropX,
        Self::FpropW,
        Self::FpropA,
        Self::DgradDy,
        Self::DgradDh,
        Self::DgradW,
        Self::WgradDy,
        Self::WgradDh,
        Self::WgradX,
        Self::WgradA,
        Self::SavedX,
        Self::SavedH,
        Self::SavedA,
        Self::DispatchFwd,
        Self::DispatchBwd,
        Self::CombineFwd,
        Self::CombineBwd,
    ];

    /// The sites of the rows that the experts send back.
    pub const COMBINE: [Self; 2] = [Self::CombineFwd, Self::CombineBwd];

    /// The site's key in a recipe file.
    pub fn key(self) -> &'static str {
        match self {
            Self::FpropX => "fprop.x",
            Self::FpropW => "fprop.w",
            Self::FpropA => "fprop.a",
            Self::DgradDy => "dgrad.dy",
            Self::DgradDh => "dgrad.dh",
            Self::DgradW => "dgrad.w",
            Self::WgradDy => "wgrad.dy",
            Self::WgradDh => "wgrad.dh",
            Self::WgradX => "wgrad.x",
            Self::WgradA => "wgrad.a",
            Self::SavedX => "saved.x",
            Self::SavedH => "saved.h",
            Self::SavedA => "saved.a",
            Self::DispatchFwd => "dispatch.fwd",
            Self::DispatchBwd => "dispatch.bwd",
            Self::CombineFwd => "combine.fwd",
            Self::CombineBwd => "combine.bwd",
        }
    }

    /// The part of the site's key before the dot: the product, `saved`, `dispatch` or `combine`.
    pub fn product(self) -> &'static str {
        self.key().split_once('.').map_or("", |(product, _)| product)
    }

    /// The part of the site's key after the dot: the tensor, or the direction of an exchange.
    pub fn tensor(self) -> &'static str {
        self.key().split_once('.').map_or("", |(_, tensor)| tensor)
    }

    /// The site whose precision this site has if a recipe does not set it; `None` if every recipe must set this site.
    pub fn falls_back_on(self) -> Option<Self> {
        match self {
            Self::FpropA => Some(Self::FpropX),
            Self::DgradDh => Some(Self::DgradDy),
            Self::DgradW => Some(Self::FpropW),
            Self::WgradDh => Some(Self::WgradDy),
            Self::WgradA => Some(Self::WgradX),
            _ => None,
        }
    }

    /// The axis along which the blocks of the site's tensor run, which is the contraction of the product. The blocks of a saved tensor run
    /// along rows, unless the recipe saves the column blocks that wgrad multiplies.
    pub fn axis(self) -> BlockAxis {
        match self {
            Self::FpropW | Self::DgradW => BlockAxis::Tile,
            Self::WgradDy | Self::WgradDh | Self::WgradX | Self::WgradA => BlockAxis::Col,
            _ => BlockAxis::Row,
        }
    }

    /// Whether blocks may also run along the other axis. Only for such a site may a recipe choose the axis.
    pub fn chooses_axis(self) -> bool {
        matches!(self, Self::SavedX | Self::SavedA)
    }

    /// Whether the tensor of the site is a weight. The blocks of a weight are 2-D or run along rows.
    pub fn is_weight(self) -> bool {
        matches!(self, Self::FpropW | Self::DgradW)
    }

    /// The matrix product of which the site's tensor is an operand; `None` for tensors that are saved or sent.
    pub fn operand_of(self) -> Option<Product> {
        Product::ALL.into_iter().find(|product| product.name() == self.product())
    }
}

/// One of the three matrix products of a linear layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Product {
    /// The product Y = X·Wᵀ.
    Fprop,
    /// The product dX = dY·W.
    Dgrad,
    /// The product dW = dYᵀ·X.
    Wgrad,
}

impl Product {
    /// Every product.
    pub const ALL: [Self; 3] = [Self::Fprop, Self::Dgrad, Self::Wgrad];

    /// The name of the product, which is the part before the dot in the keys of its operands.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fprop => "fprop",
            Self::Dgrad => "dgrad",
            Self::Wgrad => "wgrad",
        }
    }

    /// The key of the product's transform.
    pub fn rht_key(self) -> &'static str {
        match self {
            Self::Fprop => "fprop.rht",
            Self::Dgrad => "dgrad.rht",
            Self::Wgrad => "wgrad.rht",
        }
    }
}

/// The source from which a tensor is converted, which follows from the site of the tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum From {
    /// The plain tensor that the layer computed or received.
    Source,
    /// The tensor saved for the backward pass, in this site's precision.
    Saved(Site),
    /// The tensor that dispatch delivered, in this site's precision.
    Dispatched(Site),
    /// The operand of another product, in this site's precision.
    Operand(Site),
}

impl From {
    /// The source's name in a printed recipe.
    pub fn name(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Saved(_) => "saved",
            Self::Dispatched(_) => "dispatched",
            Self::Operand(site) => site.key(),
        }
    }

    /// The site whose quantized tensor is the source; `None` if the source is plain.
    pub fn site(self) -> Option<Site> {
        match self {
            Self::Source => None,
            Self::Saved(site) | Self::Dispatched(site) | Self::Operand(site) => Some(site),
        }
    }
}

/// The kinds of layers for which a recipe has separate sections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerKind {
    /// Dense linear layers.
    Linear,
    /// Expert layers.
    Expert,
    /// The output head with its loss. The head's dY is the gradient of the logits.
    Head,
    /// The router weight. The router's products are F32, but the weight may be BF16.
    Router,
}

impl LayerKind {
    /// Every kind.
    pub const ALL: [Self; 4] = [Self::Linear, Self::Expert, Self::Head, Self::Router];

    /// The name of the section's table in a recipe file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Linear => "linear",
            Self::Expert => "expert",
            Self::Head => "head",
            Self::Router => "router",
        }
    }

    /// Whether this kind of layer has the site. Only expert layers have dispatch, combine and two weights. The head saves only a gradient.
    /// For a router, a recipe chooses only the precision of the weight.
    pub fn has(self, site: Site) -> bool {
        use Site::*;
        match self {
            Self::Linear => {
                matches!(site, FpropX | FpropW | DgradDy | DgradW | WgradDy | WgradX | SavedX | SavedH)
            }
            Self::Expert => true,
            Self::Head => matches!(site, FpropX | FpropW | DgradDy | DgradW | WgradDy | WgradX),
            Self::Router => site == FpropW,
        }
    }

    /// The sites of this kind of layer.
    pub fn sites(self) -> impl Iterator<Item = Site> + Clone {
        Site::ALL.into_iter().filter(move |site| self.has(*site))
    }

    /// The products of this kind of layer that may have a transform. The products of the router cannot have a transform.
    pub fn transformed(self) -> &'static [Product] {
        match self {
            Self::Linear | Self::Expert | Self::Head => &Product::ALL,
            Self::Router => &[],
        }
    }

    /// The parts before the dot in the keys of all sites of this kind of layer, such as `fprop`.
    pub fn products(self) -> Vec<&'static str> {
        let mut products: Vec<_> = self.sites().map(Site::product).collect();
        products.dedup();
        products
    }
}
