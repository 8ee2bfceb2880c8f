//! The memory that forward passes save for their backward passes, in bytes: the memory use of a recipe.
//!
//! Each `Saved` struct lists its buffers: layer, kind, format, bytes, and the identity of the allocation. A [`Ledger`] adds the buffers up
//! and counts a shared buffer once; in BF16, for example, attention's output is also the output projection's input. Copies of weights are
//! not in the ledger, because they belong to the weights. `nibble train` prints the table from the rehearsal of [`crate::plan`]. The CPU's
//! allocator counts its live bytes, so tests compare the ledger's sum with the actually allocated memory.

use nibble_core::formats::Format;
use nibble_core::{Backend, Operand, Tensor};
use std::collections::BTreeMap;

/// One buffer that one layer saves for the backward pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The layer's name.
    pub layer: String,
    /// The kind of the saved tensor: `x`, `h`, `q` and so on.
    pub kind: &'static str,
    /// The format in which the tensor is stored.
    pub format: Format,
    /// Number of bytes of the tensor's elements, or of its codes and scales if the tensor is quantized.
    pub bytes: usize,
    /// The id of the buffer's allocation; entries that share an allocation have equal ids.
    pub buffer_id: u64,
}

/// All saved buffers. A buffer that several layers save is listed once per layer, but its bytes are
/// counted once.
#[derive(Debug, Clone, Default)]
pub struct Ledger {
    /// The entries in the order of the forward pass.
    pub entries: Vec<Entry>,
}

impl Ledger {
    /// Adds an operand to the list.
    pub fn operand<B: Backend>(&mut self, layer: &str, kind: &'static str, x: &Operand<B>) {
        self.add(layer, kind, x.format(), x.bytes(), x.buffer_id());
    }

    /// Adds a plain tensor to the list.
    pub fn tensor<B: Backend>(&mut self, layer: &str, kind: &'static str, x: &Tensor<B>) {
        self.operand(layer, kind, &Operand::Plain(x.clone()));
    }

    /// Adds a buffer of plain values (for example indices, row scalars or sums) to the list.
    pub fn words<B: Backend, T: nibble_core::Plain>(
        &mut self,
        layer: &str,
        kind: &'static str,
        x: &B::Buf<T>,
    ) {
        self.add(layer, kind, Format::F32, B::len(x) * size_of::<T>(), B::buffer_id(x));
    }

    fn add(&mut self, layer: &str, kind: &'static str, format: Format, bytes: usize, buffer_id: u64) {
        self.entries.push(Entry { layer: layer.to_owned(), kind, format, bytes, buffer_id });
    }

    /// The entries without duplicates: one entry per allocation.
    pub fn unique(&self) -> Vec<&Entry> {
        let mut seen = std::collections::HashSet::new();
        self.entries.iter().filter(|e| e.bytes > 0 && seen.insert(e.buffer_id)).collect()
    }

    /// Total bytes of all allocations; each allocation is counted once.
    pub fn bytes(&self) -> usize {
        self.unique().iter().map(|e| e.bytes).sum()
    }

    /// Bytes of the allocations of one kind in layers whose name ends in `layer_suffix`.
    pub fn bytes_of(&self, layer_suffix: &str, kind: &str) -> usize {
        self.unique()
            .iter()
            .filter(|e| e.layer.ends_with(layer_suffix) && e.kind == kind)
            .map(|e| e.bytes)
            .sum()
    }

    /// A table of bytes by layer (without the layer's number), kind of tensor, and format.
    pub fn table(&self) -> String {
        let mut sums: BTreeMap<(String, &str, String), (usize, usize)> = BTreeMap::new();
        for e in self.unique() {
            let layer: Vec<&str> = e.layer.split('.').filter(|part| part.parse::<usize>().is_err()).collect();
            let sum = sums.entry((layer.join("."), e.kind, e.format.to_string())).or_default();
            *sum = (sum.0 + e.bytes, sum.1 + 1);
        }
        let mut out =
            format!("{:<34} {:<10} {:<7} {:>6} {:>14}\n", "layer", "kind", "format", "count", "bytes");
        for ((layer, kind, format), (bytes, count)) in &sums {
            out += &format!("{layer:<34} {kind:<10} {format:<7} {count:>6} {bytes:>14}\n");
        }
        out += &format!(
            "{:<34} {:<10} {:<7} {:>6} {:>14}\n",
            "total kept by a forward pass",
            "",
            "",
            "",
            self.bytes()
        );
        out
    }
}

/// A struct whose fields are the tensors that a forward pass saves.
pub trait Saved {
    /// Lists every buffer of the struct.
    fn ledger(&self, ledger: &mut Ledger);
}

/// Formats a size: 3 670 016 → `3.5 MiB`. No unit is larger than GiB, so that sizes are easy to compare.
pub(crate) fn in_words(bytes: usize) -> String {
    const UNITS: [(&str, u32); 3] = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match UNITS.into_iter().find(|(_, power)| bytes >> power > 0) {
        Some((unit, power)) => format!("{:.1} {unit}", bytes as f64 / (1u64 << power) as f64),
        None => format!("{bytes} B"),
    }
}
