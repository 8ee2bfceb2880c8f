//! A backend that computes nothing. The buffers of this backend have a type, a length and an offset in an arena, but no bytes. The ops of
//! this backend return the same results as the real ops, through the same function (`result()`), and allocate the same temporaries. For
//! GPUs, `nibble-choice` determines the temporaries and their order for both `nibble-cuda` and this crate. Any code that is generic over
//! the backend runs on this backend, in the time that the bookkeeping takes.
//!
//! [`Backend::arena_memory`](nibble_core::Backend::arena_memory) returns the memory that the work needs, including gaps from fragmentation,
//! because offsets are computed by the real allocators' code ([`nibble_core::Heap`], [`nibble_core::Segments`]).
//!
//! Downloads return zeros, so code that branches on computed values needs special support. The all-to-all reads row counts; [`DryComm`]
//! supplies these counts and records the bytes sent to other ranks ([`Dry::sent`]).
//!
//! [`Dry::counted`] returns the bytes that each op must move and the flops that it must compute ([`Work`]), which give a lower bound of its
//! time.

mod backend;
mod comm;
mod gpu;
mod host;
mod kernels;
mod memory;
mod noted;
mod op_work;
mod ops;
mod products;
mod work;

pub use comm::DryComm;
pub use memory::{Arena, Buf};
pub use products::{Multiplied, Slow};
pub use work::{Call, Flops, Work};

use memory::{Counters, Memory};
use nibble_choice::Temporary;
use nibble_core::{DeviceKind, Result, Room, Scope};
use noted::Noted;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// A simulated device with unlimited memory.
#[derive(Clone)]
pub struct Dry {
    inner: Arc<Inner>,
}

struct Inner {
    kind: DeviceKind,
    memory: Arc<Memory>,
    scope: Scope<Arena>,
    /// On a GPU: the zeroed words from which counters are allocated.
    counters: Mutex<Option<Counters>>,
    /// The operations issued, while calls are collected.
    calls: Noted<Call>,
    /// The products and attention that run on a GPU's CUDA cores, while these are collected.
    slow: Noted<Slow>,
    /// The GEMMs issued on a GPU, while these are collected.
    products: Noted<Multiplied>,
    /// Bytes sent to other ranks, by collective.
    sent: Mutex<BTreeMap<&'static str, u64>>,
    room: Option<Room>,
}

impl Dry {
    /// Limit of live bytes: one pebibyte, which no device has. The limit catches sizes that are mistakes.
    pub const MOST_BYTES: usize = 1 << 50;

    /// A device of this kind whose memory size is unknown.
    pub fn new(kind: DeviceKind) -> Self {
        Self::telling(kind, None)
    }

    /// A device of this kind that reports this much memory. The reported size does not limit allocations.
    pub fn with_room(kind: DeviceKind, room: Room) -> Self {
        Self::telling(kind, Some(room))
    }

    fn telling(kind: DeviceKind, room: Option<Room>) -> Self {
        let (memory, scope) = (Arc::default(), Scope::default());
        let (counters, sent) = (Mutex::default(), Mutex::default());
        let (calls, slow, products) = (Noted::default(), Noted::default(), Noted::default());
        let inner = Inner { kind, memory, scope, counters, calls, slow, products, sent, room };
        Self { inner: Arc::new(inner) }
    }

    /// Allocates these temporaries in order; the caller frees them.
    pub(crate) fn hold(&self, temporaries: impl IntoIterator<Item = Temporary>) -> Result<Vec<Buf<u8>>> {
        temporaries.into_iter().map(|temporary| self.buf(temporary.bytes)).collect()
    }

    /// Allocates the temporaries of a GPU operation, and frees them.
    pub(crate) fn while_on_gpu(&self, temporaries: impl IntoIterator<Item = Temporary>) -> Result<()> {
        if self.is_gpu() { self.hold(temporaries).map(drop) } else { Ok(()) }
    }

    /// Whether this device simulates a GPU.
    pub(crate) fn is_gpu(&self) -> bool {
        self.inner.kind == DeviceKind::Gpu
    }
}

/// The example of the README compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
