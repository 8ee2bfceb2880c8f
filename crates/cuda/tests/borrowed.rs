//! Operations on buffers shorter than their shapes say, or of another device, end in an error that names them. Without a GPU: a
//! printed skip, or a failure under `NIBBLE_REQUIRE_GPU=1`.

use crate::gpu;

use nibble_core::formats::{Codec, Format, Rounding, ScaleRule};
use nibble_core::ops::*;
use nibble_core::{Backend, BlockScaled, DType, Groups, Operand, Result, RowKind, Tensor};
use nibble_cuda::Cuda;

/// Rows of every matrix.
const ROWS: usize = 128;

fn refused<T>(result: Result<T>, op: &str, argument: &str) {
    let error = result.err().unwrap_or_else(|| panic!("{op} took `{argument}`")).to_string();
    assert!(error.contains(op) && error.contains(argument), "{op}, `{argument}`: {error}");
}

/// A matrix of zeros that says it has another row.
fn longer(cuda: &Cuda, dtype: DType, cols: usize) -> Tensor<Cuda> {
    Tensor { rows: ROWS, ..Tensor::zeros(cuda, dtype, ROWS - 1, cols).unwrap() }
}

fn e4m3(cuda: &Cuda, num_scales: usize) -> BlockScaled<Cuda> {
    let scales = cuda.zeros(num_scales).unwrap();
    let kind = RowKind { format: Format::E4m3, rule: ScaleRule::Rceil, cols: 128 };
    kind.block_rows(ROWS, cuda.zeros(ROWS * 128).unwrap(), scales, None)
}

#[test]
fn shapes_that_buffers_do_not_have_are_refused() {
    let Some(device) = gpu::device("shapes without their buffers") else { return };
    let cuda = &Cuda::on(device);
    let x = longer(cuda, DType::Bf16, 128);
    let (rows, blocks) = (Operand::Plain(x.clone()), Operand::Block(e4m3(cuda, ROWS - 1)));
    let index = cuda.zeros::<i32>(ROWS).unwrap();
    let codec = Codec::new(Format::E4m3, ScaleRule::Rceil, Rounding::NearestEven).unwrap();
    let emit = Emit::block(codec, Planes::Rows);
    refused(Quantize::new(&x, codec, Planes::Rows).run(cuda), "quantize", "`x`");
    let quantize = Quantize::new(&x, codec, Planes::Rows);
    let pack = QuantizePack { quantize, index: &index, place: &index, top_k: 1 };
    refused(pack.run(cuda), "quantize", "`x`");
    refused(Cast { x: &x, dtype: DType::F32 }.run(cuda), "cast", "`x`");
    refused(Transpose { x: &x, stack: 1 }.run(cuda), "transpose", "`x`");
    refused(PackRows { rows: &rows, index: &index }.run(cuda), "pack_rows", "`rows`");
    refused(PackRows { rows: &blocks, index: &index }.run(cuda), "pack_rows", "scales");
    refused(CombineSlots::new(&x, 2).run(cuda), "combine_slots", "`rows`");
    let swiglu = Swiglu { h: &x, weight: None, groups: None, a: emit, save_h: None };
    refused(swiglu.run(cuda), "swiglu", "`h`");
    let logits = longer(cuda, DType::F32, 8);
    let route =
        Route { logits: &logits, bias: None, rule: RouteRule::softmax(2, true), shards: 1, documents: None };
    refused(route.run(cuda), "route", "`logits`");

    let weight = Operand::Plain(Tensor::zeros(cuda, DType::F32, 8, 128).unwrap());
    let product = Gemm { a: &rows, b: &weight, out: DType::F32 };
    refused(product.run(cuda), "gemm", "`values of the operands`");

    let whole = Tensor::zeros(cuda, DType::Bf16, ROWS, 128).unwrap();
    let groups = Groups::uniform(cuda, 1, ROWS, 128, 0).unwrap();
    let short = Groups { row_id: cuda.zeros(ROWS - 1).unwrap(), ..groups };
    let swiglu = Swiglu { h: &whole, weight: None, groups: Some(&short), a: emit, save_h: None };
    refused(swiglu.run(cuda), "swiglu", "`groups.row_id`");
}

#[test]
fn buffers_of_another_device_are_refused() {
    let (Some(here), Some(there)) = (gpu::device("two devices"), gpu::device("two devices")) else { return };
    let (here, there) = (&Cuda::on(here), &Cuda::on(there));
    let x = Tensor::zeros(there, DType::F32, ROWS, 128).unwrap();
    refused(Cast { x: &x, dtype: DType::Bf16 }.run(here), "cast", "`x`");
    let blocks = e4m3(there, ROWS);
    refused(Dequantize { x: &blocks, dtype: DType::F32 }.run(here), "dequantize", "`x`");
    let (values, index) = (here.zeros(4).unwrap(), there.zeros(4).unwrap());
    refused(GatherScalars { values: &values, index: &index }.run(here), "gather_scalars", "`index`");
    let x = Tensor::zeros(here, DType::Bf16, 4, 128).unwrap();
    let codec = Codec::new(Format::E4m3, ScaleRule::Rceil, Rounding::NearestEven).unwrap();
    let own = here.zeros(4).unwrap();
    for (index, place, argument) in [(&index, &own, "`index`"), (&own, &index, "`place`")] {
        let quantize = Quantize::new(&x, codec, Planes::Rows);
        let pack = QuantizePack { quantize, index, place, top_k: 1 };
        refused(pack.run(here), "quantize_pack", argument);
    }
}

#[test]
fn a_plan_told_of_too_few_slots_leaves_all_groups_empty() {
    let Some(device) = gpu::device("a plan of too few slots") else { return };
    let cuda = &Cuda::on(device);
    let (expert, token_id) = (cuda.upload(&[0, 1, 1, 0]).unwrap(), cuda.upload(&[5, 6]).unwrap());
    let plan = PlanPermute {
        expert: &expert,
        token_id: &token_id,
        top_k: 2,
        num_slots: 3,
        num_groups: 2,
        align: 8,
        capacity: 32,
    };
    let map = plan.run(cuda).unwrap();
    assert_eq!(cuda.download(&map.groups.len).unwrap(), [0; 2]);
    assert_eq!(cuda.download(&map.groups.start).unwrap(), [0; 3]);
    for rows in [&map.groups.row_id, &map.source_row, &map.row_slot] {
        assert_eq!(cuda.download(rows).unwrap(), [-1; 32]);
    }
    assert_eq!(cuda.download(&map.slot_row).unwrap(), [-1; 3]);
    refused(map.occupancy.verify(cuda), "plan_permute", "occupied slots");
}
