//! Operations on buffers shorter than their shapes say, or of another device, end in an error that names them. Without a GPU: a
//! printed skip, or a failure under `NIBBLE_REQUIRE_GPU=1`.

use crate::gpu;

use nibble_core::Lent;
use nibble_cuda::{Allocator, Device, Given};
use std::sync::Arc;

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

/// Memory of one device as that of another library.
#[derive(Debug)]
struct OfDevice(Device);

impl Allocator for OfDevice {
    fn alloc(&self, bytes: usize) -> Result<Lent> {
        let buffer = self.0.alloc::<u8>(bytes)?;
        // SAFETY: the buffer lives as long as the owner, nobody else knows of it, and only work on the given stream uses it.
        Ok(unsafe { Lent::writable(buffer.address(), bytes, Arc::new(buffer)) })
    }
}

#[test]
fn a_device_on_a_given_stream_takes_given_memory_and_gives_it_back() {
    let Some(owner) = gpu::device("a given stream and a given allocator") else { return };
    let before = owner.memory().live_bytes;
    // SAFETY: stream 0 is the default stream, which lives as long as the context.
    let given = unsafe { Given::new(0, Arc::new(OfDevice(owner.clone()))) };
    let (there, here) = (Cuda::on(owner.reopened_on(given).unwrap()), Cuda::on(owner.clone()));
    let codec = Codec::new(Format::Mxfp4, ScaleRule::Rceil, Rounding::NearestEven).unwrap();
    let values: Vec<f32> = (0..ROWS * 128).map(|i| (i as f32 * 0.37).sin()).collect();
    let codes = |cuda: &Cuda| {
        let x = Tensor::from_f32(cuda, &values, ROWS, 128).unwrap();
        let made = Quantize::new(&x, codec, Planes::Rows).run(cuda).unwrap();
        let counts = cuda.download(&made.counts.clone().unwrap().0).unwrap();
        (cuda.download(&made.take_rows("test").unwrap().block("test").unwrap().codes).unwrap(), counts)
    };
    assert_eq!(codes(&there), codes(&here));
    assert!(owner.memory().live_bytes > before, "its counters are the owner's memory");

    let lent = owner.upload(&[1.0f32, 2.0, 3.0]).unwrap();
    owner.synchronize().unwrap();
    let (address, lent) = (lent.address(), Arc::new(lent));
    for is_writable in [false, true] {
        let make = if is_writable { Lent::writable } else { Lent::new };
        // SAFETY: the buffer lives as long as the owner, and the device is drained before it is read.
        let mut x = there.borrow::<f32>(unsafe { make(address, 12, lent.clone()) }).unwrap();
        assert_eq!((Cuda::buffer_id(&x), there.download(&x).unwrap()), (address, vec![1.0, 2.0, 3.0]));
        there.write(&mut x, 1, &[7.0]).unwrap();
        there.device().synchronize().unwrap();
        assert_eq!(lent.download().unwrap()[1], if is_writable { 7.0 } else { 2.0 });
    }
    let unaligned = there.borrow::<f32>(
        // SAFETY: nothing is read.
        unsafe { Lent::new(address + 2, 8, lent.clone()) },
    );
    refused(unaligned, "borrow", "`address`");
    assert_eq!(Arc::strong_count(&lent), 1);
    drop((lent, there));
    assert_eq!(owner.memory().live_bytes, before);
}
