//! A backend that computes nothing. Its buffers have a type, a length and a place in an arena, and no bytes. Its ops return what the real
//! ones return, by the same function (`result()`), and take the temporaries that a real backend takes: those of a GPU, and their order,
//! are what `nibble-choice` tells both `nibble-cuda` and this crate. Whatever runs over a backend runs over this one, in the time it
//! takes to count.
//!
//! [`Backend::arena_memory`](nibble_core::Backend::arena_memory) says what the work needs, holes included: places are given by the same
//! arithmetic ([`nibble_core::Heap`], [`nibble_core::Segments`]).
//!
//! Downloads give zeros, so code that decides by computed values needs help. The all-to-all reads how many rows go where; [`DryComm`]
//! says so, and records how many bytes go to other ranks ([`Dry::sent`]).
//!
//! [`Dry::counted`] says what each op of some work must move and multiply ([`Work`]): the floor under its time.

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

/// A device of a kind, as large as it must be.
#[derive(Clone)]
pub struct Dry {
    inner: Arc<Inner>,
}

struct Inner {
    kind: DeviceKind,
    memory: Arc<Memory>,
    scope: Scope<Arena>,
    /// Of a GPU: words that counters are cut from.
    counters: Mutex<Option<Counters>>,
    /// The operations issued, while somebody counts.
    calls: Noted<Call>,
    /// What a GPU's ordinary cores are left with, while somebody asks.
    slow: Noted<Slow>,
    /// The products that a GPU is asked for, while somebody asks.
    products: Noted<Multiplied>,
    /// Bytes sent to other ranks, by collective.
    sent: Mutex<BTreeMap<&'static str, u64>>,
    room: Option<Room>,
}

impl Dry {
    /// The most bytes that may live at once: a pebibyte, which no device has. Sizes of mistakes stop here.
    pub const MOST_BYTES: usize = 1 << 50;

    /// A device of this kind.
    pub fn new(kind: DeviceKind) -> Self {
        Self::telling(kind, None)
    }

    /// A device of this kind that says it has so much memory. What is allocated on it has no end all the same.
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

    /// Temporaries, in this order, for as long as the caller keeps them.
    pub(crate) fn hold(&self, temporaries: impl IntoIterator<Item = Temporary>) -> Result<Vec<Buf<u8>>> {
        temporaries.into_iter().map(|temporary| self.buf(temporary.bytes)).collect()
    }

    /// Temporaries of a GPU for a moment.
    pub(crate) fn while_on_gpu(&self, temporaries: impl IntoIterator<Item = Temporary>) -> Result<()> {
        if self.is_gpu() { self.hold(temporaries).map(drop) } else { Ok(()) }
    }

    /// Whether it stands for a GPU.
    pub(crate) fn is_gpu(&self) -> bool {
        self.inner.kind == DeviceKind::Gpu
    }
}

/// The example of the README compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
