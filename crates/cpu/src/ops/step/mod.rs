//! The CPU code of [`nibble_core::ops::BeginStep`], [`nibble_core::ops::BeginMicroBatch`], [`nibble_core::ops::Collect`] and
//! [`nibble_core::ops::EndStep`]. Each handles only a few values, so one plain body is both specification and fast path.

pub mod adamw;

pub(crate) use adamw::*;

use crate::Cpu;
use crate::sums::sum_f64;
use nibble_core::ops::{
    AmaxRecords, BalanceBias, BeginMicroBatch, BeginStep, Clock, Collect, Control, EndStep, EntrySource,
    InputLayout, OCCUPANCY_VALUES, PushAmax, REPORT_HEAD,
};
use nibble_core::{Error, Occupancy, Result};
use nibble_formats::{AmaxOf, DelayedScaling};

/// The input slot of the step that the clock counts.
fn slot<'a>(inputs: &'a [i32], layout: &InputLayout, clock: &[u32]) -> &'a [i32] {
    let len = layout.slot_len();
    &inputs[clock[Clock::STEP] as usize % 2 * len..][..len]
}

/// Loads the slot's scalars, zeroes the table except for the values that this rank reports to other ranks, and resets the micro-batch
/// counter.
pub(crate) fn begin_step(_: &Cpu, op: BeginStep<'_, Cpu>) -> Result<()> {
    let clock = op.clock.as_mut_slice();
    clock[Clock::MICRO] = 0;
    let scalars = slot(op.inputs.as_slice(), &op.layout, clock);
    let control = &mut op.control.as_mut_slice()[..Control::FROM_HOST];
    for (control, &bits) in control.iter_mut().zip(scalars) {
        *control = f32::from_bits(bits as u32);
    }
    let table = op.table.as_mut_slice();
    table.fill(0.0);
    let told = &scalars[InputLayout::TOLD..][..InputLayout::TOLD_WORDS];
    table[op.told..].iter_mut().zip(told).for_each(|(cell, word)| *cell = f64::from(*word));
    Ok(())
}

/// Loads ids, targets, document starts and row numbers of the next micro-batch.
pub(crate) fn begin_micro_batch(_: &Cpu, op: BeginMicroBatch<'_, Cpu>) -> Result<()> {
    const OP: &str = "begin_micro_batch";
    let clock = op.clock.as_mut_slice();
    let micro = clock[Clock::MICRO] as usize;
    if micro >= op.layout.micro_batches {
        let expected = format!("below the step's {}", op.layout.micro_batches);
        return Err(Error::shape(OP, "micro-batch", micro, expected));
    }
    let slot = slot(op.inputs.as_slice(), &op.layout, clock);
    for (to, from) in [op.ids, op.targets, op.starts].into_iter().zip(op.layout.micro_batch(micro)) {
        to.as_mut_slice().copy_from_slice(&slot[from]);
    }
    let first = (micro * op.ranks + op.rank) * op.layout.tokens;
    for (row, id) in op.row_id.as_mut_slice().iter_mut().enumerate() {
        *id = (first + row) as i32;
    }
    clock[Clock::MICRO] += 1;
    Ok(())
}

/// Writes each collected value to its table cell.
pub(crate) fn collect(_: &Cpu, op: Collect<'_, Cpu>) -> Result<()> {
    let table = op.table.as_mut_slice();
    for entry in op.entries {
        let mut add = |i: usize, value: f64| table[entry.at + i % entry.cells * entry.stride] += value;
        match &entry.source {
            EntrySource::U64(x) => x.as_slice().iter().enumerate().for_each(|(i, x)| add(i, *x as f64)),
            EntrySource::I32(x) => x.as_slice().iter().enumerate().for_each(|(i, x)| add(i, f64::from(*x))),
            EntrySource::F32(x) => x.as_slice().iter().enumerate().for_each(|(i, x)| add(i, f64::from(*x))),
            EntrySource::F64(x) => x.as_slice().iter().enumerate().for_each(|(i, x)| add(i, *x)),
            EntrySource::Largest(x) => {
                for (i, amax) in x.as_slice().iter().enumerate() {
                    let cell = &mut table[entry.at + i % entry.cells * entry.stride];
                    // A NaN replaces any value.
                    if !(f64::from(*amax) <= *cell || cell.is_nan()) {
                        *cell = f64::from(*amax);
                    }
                }
            }
            EntrySource::Occupancy(x) => misplaced(x).into_iter().enumerate().for_each(|(i, x)| add(i, x)),
        }
    }
    Ok(())
}

/// The values of [`EntrySource::Occupancy`].
fn misplaced(x: &Occupancy<Cpu>) -> [f64; OCCUPANCY_VALUES] {
    let found = x.found.as_slice();
    let [needed, occupied] = [0, 1].map(|i| found.get(i).map_or(0, |n| i64::from(*n)));
    let fits = needed <= x.capacity as i64;
    let [needed, capacity] = if fits { [0.0; 2] } else { [needed as f64, x.capacity as f64] };
    [needed, capacity, (occupied - x.num_slots as i64).abs() as f64]
}

/// Writes the step's largest magnitudes to the delayed-scaling records of their spans.
pub(crate) fn push_amax(_: &Cpu, op: PushAmax<'_, Cpu>) -> Result<()> {
    if op.control.as_slice()[Control::STOP] != 0.0 {
        return Ok(());
    }
    let found = &op.table.as_slice()[op.at..];
    let records = op.records.as_mut_slice();
    for (words, found) in op.spans.as_slice().chunks_exact(AmaxRecords::WORDS).zip(found) {
        let [first, history, recent, margin] = [0, 1, 2, 3].map(|i| words[i]);
        let amax = if recent == 0 { AmaxOf::Max } else { AmaxOf::MostRecent };
        let Ok(scaling) = DelayedScaling::new(history, amax, margin) else { continue };
        let place = first as usize..first as usize + scaling.record_len();
        if let Some(record) = records.get_mut(place) {
            scaling.push(record, *found as f32);
        }
    }
    Ok(())
}

/// Updates a router's biases from the experts' loads.
pub(crate) fn balance_bias(_: &Cpu, op: BalanceBias<'_, Cpu>) -> Result<()> {
    if op.control.as_slice()[Control::STOP] != 0.0 {
        return Ok(());
    }
    let (cells, bias) = (op.cells(), op.bias.as_mut_slice());
    let mut loads = vec![0.0; bias.len()];
    for table in op.tables.as_slice().chunks_exact(cells) {
        loads.iter_mut().zip(&table[op.at..]).for_each(|(load, of_rank)| *load += of_rank);
    }
    let (total, experts) = (loads.iter().sum::<f64>(), bias.len() as f64);
    for (bias, load) in bias.iter_mut().zip(loads) {
        if load * experts < total {
            *bias += op.rate;
        } else if load * experts > total {
            *bias -= op.rate;
        }
    }
    Ok(())
}

/// Computes the gradient norm, decides whether the step counts, and writes the report.
pub(crate) fn end_step(cpu: &Cpu, op: EndStep<'_, Cpu>) -> Result<()> {
    const OP: &str = "end_step";
    let squares = op.squares.as_slice();
    let square = |&i: &i32| usize::try_from(i).ok().and_then(|i| squares.get(i)).copied();
    let Some(ordered) = op.order.as_slice().iter().map(square).collect::<Option<Vec<f32>>>() else {
        return Err(Error::shape(OP, "order", "a place outside squares", format!("below {}", squares.len())));
    };
    let norm = sum_f64(cpu.isa(), &ordered).sqrt();

    let tables = op.tables.as_slice();
    let fails = |table: &[f64]| {
        table[op.alarms.clone()].iter().any(|x| *x != 0.0)
            || table[op.finite.clone()].iter().any(|x| !x.is_finite())
    };
    let failed = tables.chunks((tables.len() / op.ranks).max(1)).any(fails)
        || !norm.is_finite()
        || squares.iter().any(|x| !x.is_finite());
    let scale = if op.clip_norm > 0.0 && norm > op.clip_norm { (op.clip_norm / norm) as f32 } else { 1.0 };
    let control = op.control.as_mut_slice();
    control[Control::GRAD_SCALE] = scale;
    if failed {
        control[Control::STOP] = 1.0;
    }

    let clock = op.clock.as_mut_slice();
    let step = clock[Clock::STEP];
    let len = REPORT_HEAD + tables.len();
    let report = &mut op.reports.as_mut_slice()[step as usize % 2 * len..][..len];
    let (head, rest) = report.split_at_mut(REPORT_HEAD);
    head.copy_from_slice(&[f64::from(step), f64::from(control[Control::STOP]), norm, f64::from(scale)]);
    rest.copy_from_slice(tables);
    clock[Clock::STEP] = step.wrapping_add(1);
    Ok(())
}
