//! SwiGLU with threads over strips of rows; the compiler vectorises the work within a row.

use super::spec::{taken_block, uncounted};
use super::{PART, part_dot};
use crate::Cpu;
use crate::ops::convert::quantize::emit::{Sink, SinkWork, TILE_COLS, for_strips, has_cols, strip_rows};
use crate::ops::convert::quantize::encode::Tile;
use crate::ops::convert::quantize::shared::Shared;
use crate::ops::convert::quantize::source::{Lines, Scales, ValueSource};
use crate::ops::convert::quantize::spans::Spans;
use crate::simd::{LANES, per_isa};
use nibble_core::ops::{Emit, Swiglu, SwigluBackward, SwigluGrads, SwigluOut};
use nibble_core::{Operand, Result};
use nibble_formats::math::{sigmoid, silu};

#[inline(always)]
fn forward_row_body(gate: &[f32], up: &[f32], weight: f32, a: &mut [f32]) {
    for ((a, &gate), &up) in a.iter_mut().zip(gate).zip(up) {
        *a = silu(gate) * up * weight;
    }
}

per_isa! {
    fn forward_row = forward_row_body; (gate: &[f32], up: &[f32], weight: f32, a: &mut [f32])
}

pub(super) fn forward(
    cpu: &Cpu,
    op: &Swiglu<'_, Cpu>,
    saved: Option<Emit>,
    spans: &Spans,
) -> Result<SwigluOut<Cpu>> {
    let (isa, f, h) = (cpu.isa(), op.h.cols / 2, ValueSource::plain(op.h));
    let weights = op.weight.map(|w| w.as_slice());
    let SwigluOut { a, h: saved_h } = op.result(cpu)?;
    let sink_a = Sink::new(spans, f, (op.a, a), None);
    let sink_h = saved.zip(saved_h).map(|(saved, h)| Sink::new(spans, 2 * f, (saved, uncounted(h)), None));
    let height = strip_rows(has_cols(op.a), 2 * f);
    let scratch = || (vec![0.0; height * 2 * f], vec![0.0; height * f], SinkWork::default());
    for_strips(cpu, spans, (height, 2 * f), scratch, |(h_rows, a_rows, memory), strip| {
        for i in 0..strip.rows {
            let h_row = &mut h_rows[i * 2 * f..][..2 * f];
            h.load(isa, strip.row + i, 0, h_row);
            let (gate, up) = h_row.split_at(f);
            let weight = weights.map_or(1.0, |w| w[strip.row + i]);
            forward_row(isa, gate, up, weight, &mut a_rows[i * f..][..f]);
        }
        let a_tile = Tile { values: a_rows, rows: strip.rows, width: f, stride: f };
        sink_a.write(isa, memory, strip, a_tile, 0);
        if let Some(sink_h) = &sink_h {
            let h_tile = Tile { values: h_rows, rows: strip.rows, width: 2 * f, stride: 2 * f };
            sink_h.write(isa, memory, strip, h_tile, 0);
        }
    });
    let h = match sink_h {
        Some(sink_h) => taken_block(sink_h.finish(cpu)?)?,
        None => None,
    };
    Ok(SwigluOut { a: sink_a.finish(cpu)?, h })
}

/// The results for one element: dg, du, a, and silu(g)·u.
#[inline(always)]
fn element(gate: f32, up: f32, da: f32, weight: f32) -> [f32; 4] {
    let s = sigmoid(gate);
    let silu = gate * s;
    let dg = da * weight * up * (s * (1.0 + gate * (1.0 - s)));
    [dg, da * weight * silu, silu * up * weight, silu * up]
}

/// Adds the terms of the gate weight's gradient to `dweight`.
#[inline(always)]
fn backward_row_body(
    [gate, up, da]: [&[f32]; 3],
    weight: f32,
    [dg, du, a]: [&mut [f32]; 3],
    dweight: &mut f32,
) {
    let mut silu_up = [0.0; PART];
    for first in (0..a.len()).step_by(PART) {
        let len = PART.min(a.len() - first);
        let at =
            |x: &[f32], i: usize| -> [f32; LANES] { *x[first + i..].first_chunk().unwrap_or(&[0.0; LANES]) };
        let whole = len / LANES * LANES;
        for i in (0..whole).step_by(LANES) {
            let (gate, up, da) = (at(gate, i), at(up, i), at(da, i));
            let (mut dg16, mut du16, mut a16, mut silu_up16) =
                ([0.0; LANES], [0.0; LANES], [0.0; LANES], [0.0; LANES]);
            for l in 0..LANES {
                [dg16[l], du16[l], a16[l], silu_up16[l]] = element(gate[l], up[l], da[l], weight);
            }
            dg[first + i..][..LANES].copy_from_slice(&dg16);
            du[first + i..][..LANES].copy_from_slice(&du16);
            a[first + i..][..LANES].copy_from_slice(&a16);
            silu_up[i..][..LANES].copy_from_slice(&silu_up16);
        }
        for (i, silu_up) in silu_up.iter_mut().enumerate().take(len).skip(whole) {
            let at = first + i;
            [dg[at], du[at], a[at], *silu_up] = element(gate[at], up[at], da[at], weight);
        }
        *dweight += match da[first..].first_chunk() {
            Some(da) => part_dot(&silu_up, da),
            None => {
                let mut incoming = [0.0; PART];
                incoming[..len].copy_from_slice(&da[first..]);
                silu_up[len..].fill(0.0);
                part_dot(&silu_up, &incoming)
            }
        };
    }
}

per_isa! {
    // Processes one row of a panel; the sum continues from panel to panel.
    fn backward_row = backward_row_body;
    (from: [&[f32]; 3], weight: f32, to: [&mut [f32]; 3], dweight: &mut f32)
}

/// Reusable scratch memory of [`backward`].
struct Work {
    gate: Vec<f32>,
    up: Vec<f32>,
    da: Vec<f32>,
    /// dg, followed by du: `[rows][2 · panel]`.
    dh: Vec<f32>,
    /// Values of a: `[rows][panel]`.
    a: Vec<f32>,
    dweight: Vec<f32>,
    memory: SinkWork,
}

pub(super) fn backward(cpu: &Cpu, op: &SwigluBackward<'_, Cpu>, spans: &Spans) -> Result<SwigluGrads<Cpu>> {
    let (isa, f, da) = (cpu.isa(), op.da.cols, ValueSource::plain(op.da));
    let h = match op.h {
        Operand::Plain(h) => ValueSource::plain(h),
        Operand::Block(h) => ValueSource::Lines(Lines::of(h, Scales::All)?),
    };
    let weights = op.weight.map(|w| w.as_slice());
    let SwigluGrads { dh, a, mut dweight } = op.result(cpu)?;
    let sink_dh = Sink::new(spans, 2 * f, (op.dh, dh), None);
    let sink_a = op.a.zip(a).map(|a| Sink::new(spans, f, a, None));
    let shared_dweight = Shared::of(&mut dweight);
    // A panel is a whole number of blocks in both halves of dh, or all columns if a block spans both halves.
    let panel = if f.is_multiple_of(TILE_COLS) { TILE_COLS } else { f };
    let height = strip_rows(has_cols(op.dh) || op.a.is_some_and(has_cols), 3 * panel);
    let scratch = || Work {
        gate: vec![0.0; panel],
        up: vec![0.0; panel],
        da: vec![0.0; panel],
        dh: vec![0.0; height * 2 * panel],
        a: vec![0.0; height * panel],
        dweight: vec![0.0; height],
        memory: SinkWork::default(),
    };
    for_strips(cpu, spans, (height, 2 * f), scratch, |work, strip| {
        work.dweight.fill(0.0);
        for col in (0..f).step_by(panel.max(1)) {
            for i in 0..strip.rows {
                let row = strip.row + i;
                h.load(isa, row, col, &mut work.gate);
                h.load(isa, row, f + col, &mut work.up);
                da.load(isa, row, col, &mut work.da);
                let (dg, du) = work.dh[i * 2 * panel..][..2 * panel].split_at_mut(panel);
                let to = [dg, du, &mut work.a[i * panel..][..panel]];
                let from = [&*work.gate, &*work.up, &*work.da];
                let weight = weights.map_or(1.0, |w| w[row]);
                backward_row(isa, from, weight, to, &mut work.dweight[i]);
            }
            let tile = |values, width, stride| Tile { values, rows: strip.rows, width, stride };
            if panel == TILE_COLS {
                let (dg, du) = (&work.dh[..], &work.dh[panel..]);
                sink_dh.write(isa, &mut work.memory, strip, tile(dg, panel, 2 * panel), col);
                sink_dh.write(isa, &mut work.memory, strip, tile(du, panel, 2 * panel), f + col);
            } else {
                sink_dh.write(isa, &mut work.memory, strip, tile(&work.dh, 2 * f, 2 * f), 0);
            }
            if let Some(sink_a) = &sink_a {
                sink_a.write(isa, &mut work.memory, strip, tile(&work.a, panel, panel), col);
            }
        }
        let plane_rows = strip.out_rows.min(spans.rows - strip.row.min(spans.rows));
        // SAFETY: strips have disjoint rows, and `dweight` is not accessed before all strips are done.
        let out = unsafe { shared_dweight.slice_mut(strip.row.min(spans.rows), plane_rows) };
        out.fill(0.0);
        for (out, &sum) in out.iter_mut().zip(&work.dweight).take(strip.rows) {
            *out = sum;
        }
    });
    let a = sink_a.map(|sink_a| sink_a.finish(cpu)).transpose()?;
    Ok(SwigluGrads { dh: sink_dh.finish(cpu)?, a, dweight })
}
