//! Where a recipe decides a precision, and what follows from the place alone.

use nibble_formats::BlockAxis;

/// A place in a layer where a precision is chosen. The names are the keys of a recipe file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Site {
    /// Input of Y = X·Wᵀ.
    FpropX,
    /// Weight of Y = X·Wᵀ.
    FpropW,
    /// Input of an expert's second product; as [`Site::FpropX`] where it is not written.
    FpropA,
    /// Gradient in dX = dY·W.
    DgradDy,
    /// Gradient of an expert's first product's output in dX = dH·W; as [`Site::DgradDy`] where it is not written.
    DgradDh,
    /// Weight of dX = dY·W; as [`Site::FpropW`] where it is not written.
    DgradW,
    /// Gradient in dW = dYᵀ·X.
    WgradDy,
    /// Gradient of an expert's first product's output in dW = dHᵀ·X; as [`Site::WgradDy`] where it is not written.
    WgradDh,
    /// Input in dW = dYᵀ·X.
    WgradX,
    /// Input of an expert's second product in dW = dYᵀ·A; as [`Site::WgradX`] where it is not written.
    WgradA,
    /// The input a linear layer keeps for its backward pass.
    SavedX,
    /// The first product's output that a gated layer keeps: SwiGLU's input.
    SavedH,
    /// The second product's input that an expert keeps; made again from h where it is not written.
    SavedA,
    /// Tokens on their way to the experts.
    DispatchFwd,
    /// Gradients on their way to the experts.
    DispatchBwd,
    /// Rows of what experts return, a slot each, on their way back to the tokens; as the activations are where it is not written.
    CombineFwd,
    /// Gradients of the experts' inputs on the same way; as the activations are where it is not written.
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

    /// Rows on their way back from the experts.
    pub const COMBINE: [Self; 2] = [Self::CombineFwd, Self::CombineBwd];

    /// Its key in a recipe file.
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

    /// The part of the key before the dot: the product, `saved`, `dispatch` or `combine`.
    pub fn product(self) -> &'static str {
        self.key().split_once('.').map_or("", |(product, _)| product)
    }

    /// The site whose precision this one has where it is not written; none for a site that must be.
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

    /// Along what its blocks run: along the contraction. What is kept runs by rows, unless a recipe says that the columns
    /// are kept which wgrad multiplies.
    pub fn axis(self) -> BlockAxis {
        match self {
            Self::FpropW | Self::DgradW => BlockAxis::Tile,
            Self::WgradDy | Self::WgradDh | Self::WgradX | Self::WgradA => BlockAxis::Col,
            _ => BlockAxis::Row,
        }
    }

    /// Whether blocks may run along the other axis too: the one place where the axis is a decision.
    pub fn chooses_axis(self) -> bool {
        matches!(self, Self::SavedX | Self::SavedA)
    }

    /// Whether it is a weight: its blocks are square, or run along its lines.
    pub fn is_weight(self) -> bool {
        matches!(self, Self::FpropW | Self::DgradW)
    }

    /// The matrix product of which it is an operand; none of what is kept or travels.
    pub fn operand_of(self) -> Option<Product> {
        Product::ALL.into_iter().find(|product| product.name() == self.product())
    }
}

/// One of the three matrix products of a linear layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Product {
    /// Y = X·Wᵀ.
    Fprop,
    /// dX = dY·W.
    Dgrad,
    /// dW = dYᵀ·X.
    Wgrad,
}

impl Product {
    /// Every product.
    pub const ALL: [Self; 3] = [Self::Fprop, Self::Dgrad, Self::Wgrad];

    /// The part of its operands' keys before the dot.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fprop => "fprop",
            Self::Dgrad => "dgrad",
            Self::Wgrad => "wgrad",
        }
    }

    /// The key of its transform.
    pub fn rht_key(self) -> &'static str {
        match self {
            Self::Fprop => "fprop.rht",
            Self::Dgrad => "dgrad.rht",
            Self::Wgrad => "wgrad.rht",
        }
    }
}

/// From what a tensor is made. It follows from the place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum From {
    /// From the plain tensor the layer computed or received.
    Source,
    /// From what was saved for the backward pass, as this site has it.
    Saved(Site),
    /// From what the exchange delivered, as this site has it.
    Dispatched(Site),
    /// From the operand of another product, as this site has it.
    Operand(Site),
}

impl From {
    /// Its name where a recipe is printed.
    pub fn name(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Saved(_) => "saved",
            Self::Dispatched(_) => "dispatched",
            Self::Operand(site) => site.key(),
        }
    }

    /// The site whose representation is converted; none for a plain source.
    pub fn site(self) -> Option<Site> {
        match self {
            Self::Source => None,
            Self::Saved(site) | Self::Dispatched(site) | Self::Operand(site) => Some(site),
        }
    }
}

/// Which kind of layer a section speaks of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerKind {
    /// Dense linear layers.
    Linear,
    /// Expert layers.
    Expert,
    /// The output head with its loss: its dY is the gradient of the logits.
    Head,
    /// The router's gate. Its products are F32; its weight may be BF16.
    Router,
}

impl LayerKind {
    /// Every kind.
    pub const ALL: [Self; 4] = [Self::Linear, Self::Expert, Self::Head, Self::Router];

    /// Its table's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Linear => "linear",
            Self::Expert => "expert",
            Self::Head => "head",
            Self::Router => "router",
        }
    }

    /// Whether there is such a site in it: only experts exchange rows and have two products with a name each, the head
    /// keeps no more than a gradient, and of the router's gate the weight alone has a choice.
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

    /// The sites that there are in it.
    pub fn sites(self) -> impl Iterator<Item = Site> + Clone {
        Site::ALL.into_iter().filter(move |site| self.has(*site))
    }

    /// The products that may have a transform: the head's fused loss applies none, and the router multiplies as it is.
    pub fn transformed(self) -> &'static [Product] {
        match self {
            Self::Linear | Self::Expert => &Product::ALL,
            Self::Head | Self::Router => &[],
        }
    }

    /// The parts of the keys of its sites before the dot.
    pub fn products(self) -> Vec<&'static str> {
        let mut products: Vec<_> = self.sites().map(Site::product).collect();
        products.dedup();
        products
    }
}
