//! Ranks on GPUs, one GPU per rank: collectives by NCCL's point-to-point messages.
//!
//! * Only point-to-point messages of NCCL are used, and all messages of a collective form one group. This crate itself sums over ranks,
//!   in the tree order that all backends share, unless a run requests NCCL's sums ([`Sums`]). So results do not depend on how NCCL
//!   divides a collective.
//! * NCCL's sums over the replicas of experts need a separate communicator (`ncclCommSplit`), because NCCL sums over all ranks of a
//!   communicator, while messages go from any rank to any other.
//! * A rank's communicators, along all axes, share one queue: a stream and one NCCL communicator of all ranks. So every rank sends its
//!   messages in the same order. Events order the queue after the device's work, and the device's work after the queue; the host waits
//!   for neither.
//! * Hosts synchronize, exchange values and report failures through [`Peers`]. Before NCCL starts, hosts exchange the first rank's id,
//!   the versions of NCCL and the UUIDs of the GPUs.
//! * A thread that waits for the device may be waiting for messages of ranks that have exited. So a second thread aborts the NCCL
//!   communicator if a rank has failed, or if messages take longer than the deadline (`NIBBLE_EXCHANGE_DEADLINE`).
//! * A rank's messages to itself are copies on the device's own stream.

mod nccl;
mod queue;

pub use nccl::Version;

use crate::backend::Buf;
use crate::{Buffer, Cuda};
use nccl::{Message, Nccl, Sum};
use nibble_core::ops::SumShards;
use nibble_core::{
    Axes, Backend, Comm, Data, Error, MeshShape, Peers, Plain, Result, Tensor, Transfer, TreeSum,
};
use queue::{Over, Queue, Sent};
use std::fmt::{self, Debug};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// The version of NCCL that this process has loaded, or an explanation why NCCL cannot be used. The first call searches for NCCL and loads
/// the library.
///
/// # Errors
/// The error is a sentence that says what is missing.
pub fn nccl_version() -> std::result::Result<Version, String> {
    Nccl::found().map(|nccl| nccl.version)
}

/// How gradients are summed over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sums {
    /// By this crate, in the tree order of every backend. Results have the CPU's bits, whatever the
    /// links between GPUs.
    #[default]
    Tree,
    /// By NCCL, in an order that depends on its version, the GPUs and the links between them. Bits are not
    /// reproducible.
    Nccl,
}

/// The communicator of a rank in a run with one GPU per rank.
pub struct NcclComm {
    queue: Arc<Queue>,
    /// The ranks over which NCCL sums; `None` if NCCL does not sum.
    sums: Option<Over>,
    /// The numbers of the communicator's ranks among all ranks.
    members: Vec<usize>,
    /// This rank's index in `members`.
    rank: usize,
    peers: Arc<dyn Peers>,
}

impl Debug for NcclComm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NcclComm(rank {} of {:?}, {:?})", self.rank, self.members, self.queue)
    }
}

impl NcclComm {
    /// Creates the communicators of a rank along the axes of a mesh. The host code of all ranks communicates through `peers`. The call
    /// waits for all ranks of the mesh. If a message takes longer than `deadline`, the run fails and the rank stops.
    ///
    /// # Errors
    /// [`Error::Device`] if NCCL cannot be used; [`Error::Comm`] if two ranks have the same GPU or different versions of NCCL, or if a rank
    /// fails.
    pub fn mesh<P: Peers + Clone + 'static>(
        cuda: &Cuda,
        shape: MeshShape,
        peers: &Axes<P>,
        (deadline, sums): (Duration, Sums),
    ) -> Result<Axes<Self>> {
        let all: Arc<dyn Peers> = Arc::new(peers.all.clone());
        let rank = all.rank();
        let (d, e) = shape.place(rank);
        let queue = Arc::new(Queue::new(cuda.device(), (all.clone(), shape), deadline, sums)?);
        let of = |members, rank, peers, over| {
            let sums = (sums == Sums::Nccl).then_some(over).flatten();
            Self { queue: queue.clone(), sums, members, rank, peers }
        };
        Ok(Axes {
            all: of((0..shape.ranks()).collect(), rank, all, Some(Over::All)),
            ep: of(shape.replica(d), e, Arc::new(peers.ep.clone()), None),
            dp: of(
                shape.same_experts(e),
                d,
                Arc::new(peers.dp.clone()),
                (shape.dp > 1).then_some(Over::Replicas),
            ),
        })
    }

    /// Leaves the mesh along all axes. Each rank calls this function when its work is done. A rank whose work has failed does not call
    /// `leave`. Dropping the communicator then aborts messages in flight, without waiting.
    ///
    /// # Errors
    /// [`Error::Comm`] if another rank fails in the meantime.
    pub fn leave(&self) -> Result<()> {
        self.queue.leave()
    }

    fn error(&self, call: &'static str, why: String) -> Error {
        Error::Comm { call, rank: self.rank, why }
    }

    /// Runs the function `work` of a collective. An error fails the whole run, so that no other
    /// rank waits for this rank.
    fn collective<T>(&self, b: &Cuda, call: &'static str, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let is_same = b.device().is_same(self.queue.device());
        let of_another = || {
            let why = format!("the communicator is of {:?}, and was called with {b:?}", self.queue.device());
            Err(self.error(call, why))
        };
        let done = self.peers.check().and_then(|()| if is_same { work() } else { of_another() });
        done.inspect_err(|error| self.peers.abort(&error.to_string()))
    }

    /// One message to or from each of these ranks. The messages are consecutive parts of a buffer, with
    /// `bytes(rank)` bytes each.
    fn in_order(&self, of: &Buffer<u8>, bytes: impl Fn(usize) -> usize) -> Vec<Message> {
        let mut address = of.address();
        let message = |(rank, peer): (usize, &usize)| {
            let message = Message { peer: *peer, address, bytes: bytes(rank) };
            address += message.bytes as u64;
            message
        };
        self.members.iter().enumerate().map(message).collect()
    }

    /// One message with the same bytes to each of these ranks.
    fn to_all(&self, address: u64, bytes: usize) -> Vec<Message> {
        self.members.iter().map(|peer| Message { peer: *peer, address, bytes }).collect()
    }

    /// Concatenates the values of all ranks.
    fn gathered<T: Plain>(&self, b: &Cuda, call: &'static str, values: &Buf<T>) -> Result<Buf<T>> {
        self.collective(b, call, || {
            let bytes = values.get().bytes();
            let len = values.get().len().checked_mul(self.members.len());
            let len = len.ok_or_else(|| self.error(call, "too many values".into()))?;
            let mut all: Buf<T> = b.alloc(len)?;
            let into = self.in_order(&all.in_place().reinterpreted()?, |_| bytes);
            let sent = self.to_all(values.get().address(), bytes);
            // SAFETY: `sent` lies within `values`, and `into` is one part of `all` for each rank; both buffers live until the messages are
            // joined in this function, and `all` is new.
            unsafe { self.queue.send(call, &sent, &into) }?.join()?;
            Ok(all)
        })
    }
}

/// Sums that are in flight. Fields are dropped in order, so the messages are joined before their
/// memory is freed.
struct SumsUnderWay {
    sent: Sent,
    /// Received values of each sum: this rank's part of every rank's values; empty if NCCL sums.
    came: Vec<Buf<f32>>,
    sums: Vec<TreeSum<Cuda>>,
}

impl SumsUnderWay {
    fn finish(self, b: &Cuda) -> Result<Vec<Buf<f32>>> {
        let Self { sent, came, sums } = self;
        sent.join()?;
        if came.is_empty() {
            return Ok(sums.into_iter().map(|sum| sum.into).collect());
        }
        sums.into_iter().zip(came).map(|(sum, came)| Self::sum(b, sum.into, came)).collect()
    }

    fn sum(b: &Cuda, into: Buf<f32>, came: Buf<f32>) -> Result<Buf<f32>> {
        let len = into.get().len();
        if len == 0 {
            return Ok(into);
        }
        let ranks = came.get().len() / len;
        let x = Tensor::new(Data::F32(came), ranks, len)?;
        let mut sum = Tensor::new(Data::F32(into), 1, len)?;
        SumShards { x: &x, stack: 1, shards: ranks, into: &mut sum }.run(b)?;
        sum.f32("reduce_scatter_tree", "the sum").cloned()
    }
}

/// Bytes that are in flight. Fields are dropped in order, so the messages are joined before their
/// memory is freed.
struct BytesUnderWay {
    sent: Sent,
    from: Buf<u8>,
    into: Buf<u8>,
}

impl BytesUnderWay {
    fn finish(self) -> Result<Buf<u8>> {
        let Self { sent, from, into } = self;
        sent.join()?;
        drop(from);
        Ok(into)
    }
}

impl Comm<Cuda> for NcclComm {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.members.len()
    }

    fn counts(&self, b: &Cuda, send: &Buf<i32>) -> Result<Buf<i32>> {
        self.gathered(b, "counts", send)
    }

    fn begin_all_to_all_v(
        &self,
        b: &Cuda,
        send: Buf<u8>,
        row_bytes: usize,
        send_rows: &[usize],
        recv_rows: &[usize],
        mut into: Buf<u8>,
    ) -> Result<Transfer<Cuda, Buf<u8>>> {
        const CALL: &str = "all_to_all_v";
        let sent = self.collective(b, CALL, || {
            for (rows, room, what) in
                [(send_rows, send.get().len(), "sent"), (recv_rows, into.get().len(), "received")]
            {
                let all = rows.iter().try_fold(0usize, |all, rows| all.checked_add(*rows));
                let bytes = all.and_then(|all| all.checked_mul(row_bytes)).filter(|bytes| *bytes <= room);
                if rows.len() != self.members.len() || bytes.is_none() {
                    let why = format!(
                        "{rows:?} rows of {row_bytes} bytes are {what}, and the buffer has {room} bytes"
                    );
                    return Err(self.error(CALL, why));
                }
            }
            if send_rows[self.rank] != recv_rows[self.rank] {
                let (to, from) = (send_rows[self.rank], recv_rows[self.rank]);
                return Err(
                    self.error(CALL, format!("{to} rows to this rank itself, and {from} from itself"))
                );
            }
            let received = self.in_order(into.make_mut()?, |rank| recv_rows[rank] * row_bytes);
            let sent = self.in_order(send.get(), |rank| send_rows[rank] * row_bytes);
            // SAFETY: all rows are within their buffers (checked above), and the received buffer has no other handle. The transfer owns
            // both buffers, and joins the messages before it returns either.
            unsafe { self.queue.send(CALL, &sent, &received) }
        })?;
        let rows = BytesUnderWay { sent, from: send, into };
        Ok(Transfer::new(move |_: &Cuda| rows.finish()))
    }

    fn begin_reduce_scatter_tree(&self, b: &Cuda, mut sums: Vec<TreeSum<Cuda>>) -> Result<Transfer<Cuda>> {
        const CALL: &str = "reduce_scatter_tree";
        const EACH: usize = size_of::<f32>();
        let ranks = self.members.len();
        let (sent, came) = self.collective(b, CALL, || {
            for TreeSum { values, parts, into } in &sums {
                let (len, room) = (values.get().len(), into.get().len());
                let fits = parts.len() == ranks
                    && parts.iter().all(|part| part.start <= part.end && part.end <= len);
                if !fits || parts[self.rank].len() != room {
                    let why = format!("{parts:?} of {len} values, {room} of them for this rank of {ranks}");
                    return Err(self.error(CALL, why));
                }
            }
            let from =
                |values: &Buf<f32>, part: &Range<usize>| values.get().address() + (part.start * EACH) as u64;
            let mut came: Vec<Buf<f32>> = Vec::new();
            if let Some(over) = self.sums {
                let mut of_ranks = Vec::new();
                for TreeSum { values, parts, into } in &mut sums {
                    let to = into.make_mut()?.address();
                    let sum = |(rank, part): (usize, &Range<usize>)| Sum {
                        from: from(values, part),
                        to,
                        values: part.len(),
                        rank,
                    };
                    of_ranks.extend(parts.iter().enumerate().map(sum));
                }
                // SAFETY: all parts are within their buffers (checked above), and the buffers written to have no other handle. The transfer
                // owns all buffers, and joins the sums before it returns any of them.
                return Ok((unsafe { self.queue.reduce(CALL, over, &of_ranks) }?, came));
            }
            let (mut sent, mut received) = (Vec::new(), Vec::new());
            for TreeSum { values, parts, into } in &sums {
                let room = into.get().len();
                let of_ranks: Buf<f32> = b.alloc(room * ranks)?;
                for (rank, (peer, part)) in self.members.iter().zip(parts).enumerate() {
                    let message = |address, len: usize| Message { peer: *peer, address, bytes: len * EACH };
                    sent.push(message(from(values, part), part.len()));
                    received.push(message(of_ranks.get().address() + (rank * room * EACH) as u64, room));
                }
                came.push(of_ranks);
            }
            // SAFETY: all parts are within their buffers (checked above), and the buffers for received parts are new. The transfer owns all
            // buffers, and joins the messages before it returns any of them.
            Ok((unsafe { self.queue.send(CALL, &sent, &received) }?, came))
        })?;
        let sums = SumsUnderWay { sent, came, sums };
        Ok(Transfer::new(move |b: &Cuda| sums.finish(b)))
    }

    fn begin_all_gather_parts(
        &self,
        b: &Cuda,
        mine: Buf<u8>,
        parts: &[Vec<Range<usize>>],
        mut into: Buf<u8>,
    ) -> Result<Transfer<Cuda, Buf<u8>>> {
        const CALL: &str = "all_gather_parts";
        let sent = self.collective(b, CALL, || {
            let (held, room) = (mine.get().len(), into.get().len());
            let fits = parts.len() == self.members.len()
                && parts.iter().flatten().all(|range| range.start <= range.end && range.end <= room)
                && parts[self.rank].iter().map(ExactSizeIterator::len).sum::<usize>() == held;
            if !fits {
                let why = format!("{parts:?} of {room} bytes, {held} of them this rank's");
                return Err(self.error(CALL, why));
            }
            let to = into.make_mut()?.address();
            let mut from = mine.get().address();
            let mut sent = Vec::new();
            for range in &parts[self.rank] {
                sent.extend(self.to_all(from, range.len()));
                from += range.len() as u64;
            }
            let message = |peer: usize, range: &Range<usize>| Message {
                peer,
                address: to + range.start as u64,
                bytes: range.len(),
            };
            let received = self.members.iter().zip(parts);
            let received: Vec<_> =
                received.flat_map(|(peer, part)| part.iter().map(|range| message(*peer, range))).collect();
            // SAFETY: all ranges are within their buffers (checked above), and the received buffer has no other handle. The transfer owns
            // both buffers, and joins the messages before it returns either. Ranges of two ranks do not overlap, because each place has one
            // owner.
            unsafe { self.queue.send(CALL, &sent, &received) }
        })?;
        let parts = BytesUnderWay { sent, from: mine, into };
        Ok(Transfer::new(move |_: &Cuda| parts.finish()))
    }

    fn all_gather(&self, b: &Cuda, values: &Buf<f32>) -> Result<Buf<f32>> {
        self.gathered(b, "all_gather", values)
    }

    fn all_gather_f64(&self, b: &Cuda, values: &Buf<f64>) -> Result<Buf<f64>> {
        self.gathered(b, "all_gather_f64", values)
    }

    /// This barrier synchronizes the hosts; the devices may still have work in flight.
    fn barrier(&self) -> Result<()> {
        self.peers.gather(&[]).map(drop)
    }

    fn abort(&self, why: &str) {
        self.peers.abort(why);
    }

    fn check(&self) -> Result<()> {
        self.peers.check()
    }

    /// The time that ranks wait includes the transfer time of the messages, because the device
    /// cannot distinguish it from waiting.
    fn waited(&self) -> Duration {
        self.peers.waited() + self.queue.busy()
    }

    fn host_ranks(&self) -> usize {
        self.peers.host_ranks()
    }
}
