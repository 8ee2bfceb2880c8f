pub(super) mod adamw;

pub use adamw::*;

use crate::case::{Case, Outputs, Pads};
use crate::input::{Input, stream};
use crate::pair::Pair;
use nibble_core::formats::{AmaxOf, DelayedScaling};
use nibble_core::ops::{
    AmaxRecords, BalanceBias, BeginMicroBatch, BeginStep, Clock, Collect, Control, EndStep, Entry,
    EntrySource, InputLayout, PushAmax, REPORT_HEAD,
};
use nibble_core::{Agreement, Backend, Kernels, Occupancy, Result};

/// The ring buffer of inputs; each word encodes its own index.
fn ring<B: Backend>(b: &B, layout: InputLayout) -> Result<B::Buf<i32>> {
    let words: Vec<i32> = (0..2 * layout.slot_len()).map(|i| (1.0 + i as f32).to_bits() as i32).collect();
    b.upload(&words)
}

#[derive(Debug)]
struct Begun {
    layout: InputLayout,
    step: u32,
    told: usize,
}

impl<B: Kernels> Case<B> for Begun {
    fn agreement(&self) -> Agreement {
        BeginStep::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let inputs = ring(b, self.layout)?;
        let mut clock = b.upload(&[self.step, 7])?;
        let mut control = b.upload(&[-1.0f32; Control::LEN])?;
        let mut table = b.upload(&vec![f64::NAN; 300])?;
        let (clock, control, table) = (&mut clock, &mut control, &mut table);
        BeginStep { inputs: &inputs, layout: self.layout, clock, control, table, told: self.told }.run(b)?;
        let mut out = Outputs::default();
        out.values("clock", b.download(clock)?.into_iter().map(u64::from).collect());
        out.buf(b, "control", control, None)?;
        out.buf(b, "table", table, None)?;
        Ok(out)
    }
}

/// The conformance test of [`BeginStep`].
pub fn begin_step<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    for (step, told) in [(0, 0), (1, 254), (2, 256), (u32::MAX, 297)] {
        pair.check(&Begun { layout: InputLayout { tokens: 33, micro_batches: 2, apart: false }, step, told });
    }
}

#[derive(Debug)]
struct MicroBegun {
    layout: InputLayout,
    clock: [u32; Clock::LEN],
    rank: usize,
    ranks: usize,
}

impl<B: Kernels> Case<B> for MicroBegun {
    fn agreement(&self) -> Agreement {
        BeginMicroBatch::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let (inputs, mut clock) = (ring(b, self.layout)?, b.upload(&self.clock)?);
        let tokens = self.layout.tokens;
        let [mut ids, mut targets, mut row_id] = [b.zeros(tokens)?, b.zeros(tokens)?, b.zeros(tokens)?];
        let mut starts = b.zeros(self.layout.starts())?;
        BeginMicroBatch {
            inputs: &inputs,
            layout: self.layout,
            clock: &mut clock,
            ids: &mut ids,
            targets: &mut targets,
            starts: &mut starts,
            row_id: &mut row_id,
            rank: self.rank,
            ranks: self.ranks,
        }
        .run(b)?;
        let mut out = Outputs::default();
        out.values("clock", b.download(&clock)?.into_iter().map(u64::from).collect());
        for (name, buf) in [("ids", &ids), ("targets", &targets), ("starts", &starts), ("row_id", &row_id)] {
            out.buf(b, name, buf, None)?;
        }
        Ok(out)
    }
}

/// The conformance test of [`BeginMicroBatch`].
pub fn begin_micro_batch<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    for tokens in [1, 33, 1024] {
        for (clock, rank, ranks) in [([0, 0], 0, 1), ([3, 1], 0, 1), ([5, 2], 3, 4)] {
            for apart in [false, true] {
                let layout = InputLayout { tokens, micro_batches: 3, apart };
                pair.check(&MicroBegun { layout, clock, rank, ranks });
            }
        }
    }
}

#[derive(Debug)]
struct Collected {
    capacity: usize,
    found: [i32; 2],
}

impl<B: Kernels> Case<B> for Collected {
    fn agreement(&self) -> Agreement {
        Collect::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let counts = [b.upload(&[5u64, 3, 1])?, b.upload(&[1u64 << 40, 2, 0])?];
        let load = b.upload(&(0..24).collect::<Vec<i32>>())?;
        let losses = b.upload(&Input::HeavyTailed.values(&stream("collect"), 6))?;
        let sums = b.upload(&[0.1f64, -3.5])?;
        // Some values are below the present value, and some are above; a NaN persists.
        let amaxes = [b.upload(&[0.5f32, 9.25, f32::NAN])?, b.upload(&[1e3f32, 0.0, 4.0])?];
        let found = b.upload(&self.found)?;
        let occupancy = Occupancy { found, num_slots: 40, capacity: self.capacity };
        let entry = |source, at, cells, stride| Entry { source, at, cells, stride };
        let entries = [
            entry(EntrySource::U64(&counts[0]), 0, 3, 2),
            entry(EntrySource::U64(&counts[1]), 1, 3, 2),
            entry(EntrySource::U64(&counts[1]), 0, 3, 2),
            entry(EntrySource::I32(&load), 8, 8, 1),
            entry(EntrySource::F32(&losses), 16, 6, 1),
            entry(EntrySource::F64(&sums), 22, 2, 1),
            entry(EntrySource::Occupancy(&occupancy), 24, 3, 1),
            entry(EntrySource::Largest(&amaxes[0]), 28, 3, 1),
            entry(EntrySource::Largest(&amaxes[1]), 28, 3, 1),
        ];
        let mut table = b.upload(&(0..31).map(|i| f64::from(i) * 0.25).collect::<Vec<f64>>())?;
        Collect { entries: &entries, table: &mut table }.run(b)?;
        let mut out = Outputs::default();
        out.buf(b, "table", &table, None)?;
        Ok(out)
    }
}

/// The conformance test of [`Collect`].
pub fn collect<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    for (capacity, found) in [(64, [64, 40]), (64, [65, 40]), (128, [60, 39])] {
        pair.check(&Collected { capacity, found });
    }
    let outside = |e: &nibble_core::Error| e.to_string().contains("last cell of an entry");
    pair.check_refused(&TooFar, outside);
}

/// A case with an entry beyond the end of the table.
#[derive(Debug)]
struct TooFar;

impl<B: Kernels> Case<B> for TooFar {
    fn agreement(&self) -> Agreement {
        Collect::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let (counts, mut table) = (b.zeros(3)?, b.zeros(8)?);
        let entries = [Entry { source: EntrySource::U64(&counts), at: 0, cells: 3, stride: 4 }];
        Collect { entries: &entries, table: &mut table }.run(b)?;
        Ok(Outputs::default())
    }
}

/// The defect in the tables.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Wrong {
    Nothing,
    Alarm,
    NanAlarm,
    Loss,
    Norm,
    LeftOut,
    Earlier,
}

#[derive(Debug)]
struct Ended {
    ranks: usize,
    sums: usize,
    clip_norm: f64,
    step: u32,
    wrong: Wrong,
}

const CELLS: usize = 40;

impl<B: Kernels> Case<B> for Ended {
    fn agreement(&self) -> Agreement {
        EndStep::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let mut squares = Input::Normal.values(&stream("end.squares"), self.ranks * self.sums);
        squares.iter_mut().for_each(|x| *x = x.abs());
        let mut tables = vec![0.0f64; self.ranks * CELLS];
        let last = (self.ranks - 1) * CELLS;
        match self.wrong {
            Wrong::Nothing | Wrong::Earlier => {}
            Wrong::Alarm => tables[last + 13] = 2.0,
            Wrong::NanAlarm => tables[last + 10] = f64::NAN,
            Wrong::Loss => tables[last + 21] = f64::INFINITY,
            Wrong::Norm => squares[0] = f32::INFINITY,
            Wrong::LeftOut => *squares.last_mut().expect("at least one sum") = f32::NAN,
        }
        // `order` is a permutation of all sums, different from the order in which they are stored.
        let mut order: Vec<i32> =
            (0..squares.len()).map(|i| ((i * 7919 + 5) % squares.len()) as i32).collect();
        if self.wrong == Wrong::LeftOut {
            order.retain(|i| *i as usize + 1 < squares.len());
        }
        let mut clock = b.upload(&[self.step, 1])?;
        let stop = f32::from(u8::from(self.wrong == Wrong::Earlier));
        let mut control = b.upload(&[1.0, 2.0, 3.0, 4.0, 5.0, stop])?;
        let mut reports = b.upload(&vec![-1.0f64; 2 * (REPORT_HEAD + tables.len())])?;
        EndStep {
            squares: &b.upload(&squares)?,
            order: &b.upload(&order)?,
            tables: &b.upload(&tables)?,
            ranks: self.ranks,
            alarms: 10..20,
            finite: 20..22,
            clip_norm: self.clip_norm,
            clock: &mut clock,
            control: &mut control,
            reports: &mut reports,
        }
        .run(b)?;
        let stopped = b.download(&control)?[Control::STOP];
        assert_eq!(stopped, f32::from(u8::from(self.wrong != Wrong::Nothing)), "{self:?}: stop");
        let mut out = Outputs::default();
        out.values("clock", b.download(&clock)?.into_iter().map(u64::from).collect());
        out.buf(b, "control", &control, None)?;
        out.buf(b, "reports", &reports, None)?;
        Ok(out)
    }
}

/// The conformance test of [`EndStep`].
pub fn end_step<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    use Wrong::*;
    for wrong in [Nothing, Alarm, NanAlarm, Loss, Norm, LeftOut, Earlier] {
        for (ranks, sums, clip_norm, step) in [(1, 1, 0.0, 0), (2, 300, 1.0, 1), (4, 2503, 1e9, 6)] {
            pair.check(&Ended { ranks, sums, clip_norm, step, wrong });
        }
    }
}

#[derive(Debug)]
struct Pushed {
    scaling: DelayedScaling,
    spans: usize,
    steps: usize,
    stop: bool,
}

impl<B: Kernels> Case<B> for Pushed {
    fn agreement(&self) -> Agreement {
        PushAmax::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        // There are two tensors in sequence; the second tensor has a separate, short history.
        let first = AmaxRecords { scaling: self.scaling, first: 3, spans: self.spans };
        let short = DelayedScaling { history: 2, amax: AmaxOf::Max, margin: 1 };
        let second = AmaxRecords { scaling: short, first: 3 + first.len(), spans: 2 };
        let words: Vec<u32> = first.words()?.chain(second.words()?).collect();
        let spans = b.upload(&words)?;
        let mut records = b.zeros(second.first + second.len() + 1)?;
        let control = b.upload(&[0.0, 0.0, 0.0, 0.0, 0.0, f32::from(u8::from(self.stop))])?;
        let at = 4;
        for step in 0..self.steps {
            let of_step = Input::HeavyTailed.values(&stream(&format!("push_amax.{step}")), self.spans + 2);
            let mut cells = vec![f64::NAN; at];
            cells.extend(of_step.iter().map(|x| f64::from(x.abs())));
            cells[at + step % self.spans] = [0.0, f64::NAN, 1e-45, f64::INFINITY][step % 4];
            let table = b.upload(&cells)?;
            let op = PushAmax { table: &table, at, spans: &spans, control: &control, records: &mut records };
            op.run(b)?;
        }
        let mut out = Outputs::default();
        out.buf(b, "records", &records, None)?;
        Ok(out)
    }
}

/// The conformance test of [`PushAmax`].
pub fn push_amax<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    for (history, amax, margin) in
        [(1, AmaxOf::Max, 0), (7, AmaxOf::Max, 3), (1024, AmaxOf::Max, 0), (5, AmaxOf::MostRecent, 16)]
    {
        let scaling = DelayedScaling { history, amax, margin };
        for (spans, steps, stop) in [(1, 3, false), (300, 12, false), (3, 2, true)] {
            pair.check(&Pushed { scaling, spans, steps, stop });
        }
    }
    pair.check(&WordsOutOfRange);
    pair.check_refused(&CellsTooFar, |e| e.to_string().contains("a cell for each of 1 spans"));
}

#[derive(Debug)]
struct Balanced {
    experts: usize,
    ranks: usize,
    steps: usize,
    stop: bool,
    input: Input,
}

impl<B: Kernels> Case<B> for Balanced {
    fn agreement(&self) -> Agreement {
        BalanceBias::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        const AT: usize = 3;
        let Self { experts, ranks, steps, stop, input } = *self;
        let mut bias = b.upload(&input.values(&stream("balance_bias"), experts))?;
        let control = b.upload(&[0.0, 0.0, 0.0, 0.0, 0.0, f32::from(u8::from(stop))])?;
        for step in 0..steps {
            // In the first steps, some loads equal the mean; later, loads are large.
            let load = |rank: usize, e: usize| match step {
                0 => [5.0, 5.0, 5.0, 4.0, 6.0][e % 5],
                _ => ((rank * 977 + e * 37 + step) % 101 * 30_000_001) as f64,
            };
            let table = |rank| {
                let loads = (0..experts).map(move |e| load(rank, e));
                [f64::NAN; AT].into_iter().chain(loads).chain([f64::NAN])
            };
            let tables = b.upload(&(0..ranks).flat_map(table).collect::<Vec<_>>())?;
            let (control, bias) = (&control, &mut bias);
            BalanceBias { tables: &tables, ranks, at: AT, rate: 0.001, control, bias }.run(b)?;
        }
        let mut out = Outputs::default();
        out.buf(b, "bias", &bias, None)?;
        Ok(out)
    }
}

/// The conformance test of [`BalanceBias`].
pub fn balance_bias<A: Kernels, B: Kernels>(pair: &Pair<A, B>) {
    for (experts, ranks, steps) in [(5, 1, 2), (1, 2, 1), (256, 8, 4), (300, 3, 3)] {
        for input in [Input::Zeros, Input::Normal, Input::SignedZeros, Input::Subnormals] {
            pair.check(&Balanced { experts, ranks, steps, stop: false, input });
        }
        pair.check(&Balanced { experts, ranks, steps, stop: true, input: Input::Normal });
    }
    pair.check_refused(&LoadsTooFar, |e| e.to_string().contains("4 loads before the last of 8 cells"));
}

/// A case in which the last load is in another rank's table.
#[derive(Debug)]
struct LoadsTooFar;

impl<B: Kernels> Case<B> for LoadsTooFar {
    fn agreement(&self) -> Agreement {
        BalanceBias::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let (tables, control, mut bias) = (b.zeros(16)?, b.zeros(Control::LEN)?, b.zeros(4)?);
        let (control, bias) = (&control, &mut bias);
        BalanceBias { tables: &tables, ranks: 2, at: 5, rate: 1.0, control, bias }.run(b)?;
        Ok(Outputs::default())
    }
}

/// A case of spans that no backend may access, between two spans that it must update.
#[derive(Debug)]
struct WordsOutOfRange;

impl<B: Kernels> Case<B> for WordsOutOfRange {
    fn agreement(&self) -> Agreement {
        PushAmax::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let (longest, widest) = (DelayedScaling::LONGEST, DelayedScaling::WIDEST);
        let len = longest + 100;
        let words = [
            [0, 3, 0, 1],
            [10, 0, 0, 0],
            [10, longest + 1, 0, 0],
            [10, u32::MAX, 0, 0],
            [10, 3, 0, widest + 1],
            [10, 3, 1, u32::MAX],
            [len - 4, 3, 0, 0],
            [u32::MAX, 3, 0, 0],
            [len - 5, 3, 7, widest],
        ];
        let spans = b.upload(words.as_flattened())?;
        let table = b.upload(&[2.5; 9])?;
        let (control, mut records) = (b.zeros(Control::LEN)?, b.zeros(len as usize)?);
        PushAmax { table: &table, at: 0, spans: &spans, control: &control, records: &mut records }.run(b)?;
        let mut out = Outputs::default();
        out.buf(b, "records", &records, None)?;
        Ok(out)
    }
}

/// A case in which the indices of cells overflow.
#[derive(Debug)]
struct CellsTooFar;

impl<B: Kernels> Case<B> for CellsTooFar {
    fn agreement(&self) -> Agreement {
        PushAmax::<B>::AGREEMENT
    }

    fn run(&self, b: &B, _: Pads) -> Result<Outputs> {
        let (table, spans, control) = (b.zeros(4)?, b.zeros(AmaxRecords::WORDS)?, b.zeros(Control::LEN)?);
        let (at, mut records) = (usize::MAX, b.zeros(4)?);
        PushAmax { table: &table, at, spans: &spans, control: &control, records: &mut records }.run(b)?;
        Ok(Outputs::default())
    }
}
