//! The OCP MX family: blocks of 32 with a power-of-two scale.

use crate::e8m0::ScaleRule::{Ceil, Even, Floor, Rceil};
use crate::element::Element;
use crate::spec::{FormatSpec, PLAIN};

const fn mx(name: &'static str, element: Element) -> FormatSpec {
    FormatSpec {
        name,
        element: Some(element),
        code_bits: element.code_bits(),
        block: 32,
        rules: &[Rceil, Floor, Ceil, Even],
        squares: true,
        ..PLAIN
    }
}

pub(crate) const MXFP4: FormatSpec = mx("mxfp4", Element::E2M1);
pub(crate) const MXFP6_E2M3: FormatSpec = mx("mxfp6-e2m3", Element::E2M3);
pub(crate) const MXFP6_E3M2: FormatSpec = mx("mxfp6-e3m2", Element::E3M2);
pub(crate) const MXFP8_E4M3: FormatSpec = mx("mxfp8-e4m3", Element::E4M3);
pub(crate) const MXFP8_E5M2: FormatSpec = mx("mxfp8-e5m2", Element::E5M2);
pub(crate) const MXINT8: FormatSpec = mx("mxint8", Element::INT8);
