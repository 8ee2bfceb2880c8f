//! Tests of the bytes and rows of exchanges among threads. Times are not tested.

use super::planned::{EXPERTS_EACH, Way};
use super::*;
use nibble_core::ops::{Dequantize, Quantize};
use nibble_core::{Comm, Mesh, Operand, Tensor, Transfer, TreeSum};
use nibble_cpu::{Buf, Cpu, HostComm};
use std::ops::Range;
use std::sync::Mutex;

type CoreResult<T> = nibble_core::Result<T>;

/// A communicator that records the number of bytes to each rank.
#[derive(Debug)]
struct Counting {
    comm: HostComm,
    sent: Mutex<Vec<Vec<usize>>>,
}

impl Counting {
    fn comm(&self) -> &dyn Comm<Cpu> {
        &self.comm
    }
}

impl Comm<Cpu> for Counting {
    fn rank(&self) -> usize {
        self.comm().rank()
    }

    fn world(&self) -> usize {
        self.comm().world()
    }

    fn counts(&self, b: &Cpu, send: &Buf<i32>) -> CoreResult<Buf<i32>> {
        self.comm().counts(b, send)
    }

    fn begin_all_to_all_v(
        &self,
        b: &Cpu,
        send: Buf<u8>,
        row_bytes: usize,
        to: &[usize],
        from: &[usize],
        into: Buf<u8>,
    ) -> CoreResult<Transfer<Cpu, Buf<u8>>> {
        self.sent.lock().unwrap().push(to.iter().map(|rows| rows * row_bytes).collect());
        self.comm().begin_all_to_all_v(b, send, row_bytes, to, from, into)
    }

    fn begin_reduce_scatter_tree(&self, b: &Cpu, sums: Vec<TreeSum<Cpu>>) -> CoreResult<Transfer<Cpu>> {
        self.comm().begin_reduce_scatter_tree(b, sums)
    }

    fn begin_all_gather_parts(
        &self,
        b: &Cpu,
        mine: Buf<u8>,
        parts: &[Vec<Range<usize>>],
        into: Buf<u8>,
    ) -> CoreResult<Transfer<Cpu, Buf<u8>>> {
        self.comm().begin_all_gather_parts(b, mine, parts, into)
    }

    fn all_gather(&self, b: &Cpu, values: &Buf<f32>) -> CoreResult<Buf<f32>> {
        self.comm().all_gather(b, values)
    }

    fn all_gather_f64(&self, b: &Cpu, values: &Buf<f64>) -> CoreResult<Buf<f64>> {
        self.comm().all_gather_f64(b, values)
    }

    fn barrier(&self) -> CoreResult<()> {
        self.comm().barrier()
    }

    fn abort(&self, why: &str) {
        self.comm().abort(why);
    }
}

/// Runs `work` on every rank of a size, for both splits and two numbers of ranks.
fn on_ranks(work: impl Fn(Size, &Cpu, &Counting) + Sync) {
    for (ranks, splits) in [(2, Splits::Equal), (2, Splits::Skewed), (4, Splits::Skewed)] {
        let size = Size { rows: 48, cols: 256, splits, ranks };
        std::thread::scope(|scope| {
            let work = &work;
            let start = |comm| {
                let counting = Counting { comm, sent: Mutex::default() };
                scope.spawn(move || work(size, &Cpu::new(1).unwrap(), &counting))
            };
            let threads: Vec<_> = HostComm::world(ranks).into_iter().map(start).collect();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
    }
}

/// Runs `work` for every trip of a size.
fn each_trip(
    size: Size,
    b: &Cpu,
    comm: &Counting,
    look: impl Fn(&Planned<'_, Cpu>, &Trip, &Stages<'_, '_, Cpu>),
) {
    let recipe = Recipe::builtin("bf16").unwrap();
    let planned = Planned::new(b, Mesh::new(comm), &recipe, size).unwrap();
    for trip in Trip::all().unwrap() {
        let stages = Stages::new(&planned, &trip).unwrap();
        comm.sent.lock().unwrap().clear();
        look(&planned, &trip, &stages);
    }
}

fn values(b: &Cpu, rows: &Operand<Cpu>) -> Vec<f32> {
    match rows {
        Operand::Plain(rows) => rows.to_f32_vec(b).unwrap(),
        Operand::Block(x) => {
            Dequantize { x, dtype: nibble_core::DType::F32 }.run(b).unwrap().to_f32_vec(b).unwrap()
        }
    }
}

/// The values of a rank's rows after conversion to the format in which they are sent.
fn as_sent(b: &Cpu, trip: &Trip, x: Tensor<Cpu>) -> Vec<f32> {
    let rows = match trip.to.format.is_block() {
        false => Operand::Plain(x),
        true => {
            let op = Quantize::new(&x, trip.to.codec().unwrap(), nibble_core::ops::Planes::Rows);
            op.run(b).unwrap().take_rows("test").unwrap()
        }
    };
    values(b, &rows)
}

#[test]
fn splits_are_of_all_rows() {
    let of = |rows, ranks, splits| Size { rows, cols: 128, splits, ranks };
    assert_eq!(of(4096, 2, Splits::Equal).rows_to(), [2048, 2048]);
    assert_eq!(of(4096, 2, Splits::Skewed).rows_to(), [3072, 1024]);
    assert_eq!(of(48, 4, Splits::Skewed).rows_to(), [18, 10, 10, 10]);
    assert_eq!(of(32, 4, Splits::Skewed).rows_to(), [12, 7, 7, 6]);
    // Each of three other ranks sends 18 rows; 48 − 18 rows leave.
    let size = of(48, 4, Splits::Skewed);
    assert_eq!(size.leaving_and_arriving(0), [30, 54]);
    assert_eq!(size.leaving_and_arriving(1), [38, 30]);
    assert_eq!((size.busiest(), size.fullest()), (54, 72));
}

#[test]
fn as_many_bytes_go_as_are_counted() {
    on_ranks(|size, b, comm| {
        each_trip(size, b, comm, |_, trip, stages| {
            // The bytes are computed by hand: codes, and a scale of one byte per 32 values or of four bytes per 128 values.
            let row = match trip.format {
                "bf16" => 2 * 256,
                "e4m3" => 256 + 2 * 4 + 8,
                "mxfp8" => 256 + 8 + 8,
                "mxfp4" => 128 + 8 + 8,
                other => panic!("{other}"),
            };
            assert_eq!(trip.row_kind(size.cols).row_bytes(), row, "{}", trip.format);
            let (rank, to) = (comm.rank(), size.rows_to());
            let messages: Vec<usize> = match trip.way {
                Way::Combine => vec![to[rank] * row; size.ranks],
                _ => to.iter().map(|rows| rows * row).collect(),
            };
            for stage in [Stage::Exchange, Stage::Whole] {
                stages.run(stage).unwrap();
                let sent = std::mem::take(&mut *comm.sent.lock().unwrap());
                assert_eq!(sent, std::slice::from_ref(&messages), "{size:?}, {trip:?}, {stage:?}");
                let leaving: usize = (0..size.ranks).filter(|to| *to != rank).map(|to| sent[0][to]).sum();
                let [leave, arrive] = size.leaving_and_arriving(rank);
                assert_eq!(leaving, row * if trip.way == Way::Combine { arrive } else { leave });
            }
            stages.run(Stage::Plain).unwrap();
            let plain = std::mem::take(&mut *comm.sent.lock().unwrap());
            assert_eq!(plain, [vec![48 / size.ranks * row; size.ranks]]);
            for stage in [Stage::Pack, Stage::Unpack] {
                stages.run(stage).unwrap();
            }
            assert!(comm.sent.lock().unwrap().is_empty(), "nothing travels in {trip:?}");
        });
    });
}

#[test]
fn rows_arrive_as_they_were_sent_in_expert_order() {
    on_ranks(|size, b, comm| {
        each_trip(size, b, comm, |planned, trip, stages| {
            let (whole, staged) = (stages.whole().unwrap(), stages.unpack().unwrap());
            let got = values(b, &whole);
            assert_eq!(got, values(b, &staged), "{size:?}, {trip:?}: stage by stage");
            let sent: Vec<Vec<f32>> = (0..size.ranks)
                .map(|rank| as_sent(b, trip, Planned::tokens(b, size, rank).unwrap()))
                .collect();
            if trip.way == Way::Combine {
                assert_eq!(got, sent[comm.rank()], "experts return what they are given");
                return;
            }
            let start = planned.plan.map.groups.start.as_slice();
            let mut arrived = 0;
            for (local, first) in start[..EXPERTS_EACH].iter().enumerate() {
                let expert = (comm.rank() * EXPERTS_EACH + local) as i32;
                let of_rank = |from: usize| {
                    let rows =
                        size.experts(from).into_iter().enumerate().filter(move |(_, of)| *of == expert);
                    rows.map(move |(row, _)| (from, row))
                };
                for (i, (from, row)) in (0..size.ranks).flat_map(of_rank).enumerate() {
                    let (at, want) = ((*first as usize + i) * size.cols, row * size.cols);
                    let want = &sent[from][want..want + size.cols];
                    assert_eq!(
                        &got[at..at + size.cols],
                        want,
                        "{size:?}, {trip:?}: row {row} of rank {from}"
                    );
                    arrived += 1;
                }
            }
            assert_eq!(arrived, size.ranks * size.rows_to()[comm.rank()]);
        });
    });
}
