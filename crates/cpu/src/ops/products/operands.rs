//! Converts operands of GEMMs to slice views for the engine.

use crate::ops::convert::quantize::planes::scales_of;
use crate::{Cpu, gemm};
use nibble_core::formats::{BlockAxis, Element, ScaleKind};
use nibble_core::ops::Stored;
use nibble_core::{BlockScaled, Data, Error, Operand, Result, Tensor};

/// The element format, if the engine reads codes of this kind.
pub(in crate::ops) fn gemm_element(x: Stored) -> Option<Element> {
    let one_number = [ScaleKind::E8M0, ScaleKind::F32].contains(&x.format.scale_kind(x.rule));
    let blocks = x.format.record_len(x.axis).is_multiple_of(2);
    let element = x.format.spec().element.filter(|_| one_number && blocks);
    element.filter(|element| matches!(*element, Element::E2M1 | Element::E4M3 | Element::E5M2))
}

fn plain(x: &Tensor<Cpu>) -> gemm::Data<'_> {
    match &x.data {
        Data::F32(x) => gemm::Data::F32(x.as_slice()),
        Data::Bf16(x) => gemm::Data::Bf16(x.as_slice()),
    }
}

fn codes<'a>(op: &'static str, q: &'a BlockScaled<Cpu>) -> Result<gemm::Data<'a>> {
    let codes = q.codes.as_slice();
    match gemm_element(Stored::block(q)) {
        Some(Element::E4M3) => Ok(gemm::Data::E4m3(codes)),
        Some(Element::E5M2) => Ok(gemm::Data::E5m2(codes)),
        Some(Element::E2M1) => Ok(gemm::Data::E2m1(codes)),
        _ => Err(Error::unsupported(op, q.format, "the engine does not read its codes")),
    }
}

/// A view of an operand whose contraction runs along its rows, starting at row `first`: an activation, or one matrix of a stack.
pub(in crate::ops) fn view<'a>(
    op: &'static str,
    x: &'a Operand<Cpu>,
    first: usize,
) -> Result<gemm::OperandView<'a>> {
    let q = match x {
        Operand::Plain(x) => return Ok(gemm::OperandView::rows(plain(x), x.cols).at(first * x.cols)),
        Operand::Block(q) => q,
    };
    let block = q.format.spec().block;
    let stride = q.cols.div_ceil(block);
    let values = scales_of(q);
    let scales = match q.axis {
        BlockAxis::Tile => {
            let matrix_rows = q.rows / q.stack.max(1);
            let matrix = first / matrix_rows.max(1);
            gemm::OperandScales::tiles(values, block, stride)
                .at(matrix * matrix_rows.div_ceil(block) * stride)
        }
        _ => gemm::OperandScales::rows(values, block, stride).at(first * stride),
    };
    Ok(gemm::OperandView::rows(codes(op, q)?, q.cols).at(first * q.cols).scaled(scales))
}

/// A view of an operand whose contraction runs along its columns: plain and read transposed, or stored in column blocks.
pub(in crate::ops) fn down_rows<'a>(op: &'static str, x: &'a Operand<Cpu>) -> Result<gemm::OperandView<'a>> {
    let q = match x {
        Operand::Plain(x) => return Ok(gemm::OperandView::transposed(plain(x), x.cols)),
        Operand::Block(q) => q,
    };
    let block = q.format.column_step();
    let scales = gemm::OperandScales::rows(scales_of(q), block, q.rows.div_ceil(block));
    Ok(gemm::OperandView::rows(codes(op, q)?, q.rows).scaled(scales))
}
