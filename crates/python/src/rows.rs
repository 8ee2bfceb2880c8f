//! A call's rows as one shard. Its lists on the device depend on nothing but the number of rows, so they are made once for each GPU, on a
//! stream of their own. A layer therefore copies nothing from the host, and a captured graph has no such copy.

use nibble_core::{Backend, Error, Groups, Lent, Result};
use nibble_cuda::Cuda;
use nibble_train::shards::Shards;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

type Indices = <Cuda as Backend>::Buf<i32>;

/// The lists of one GPU.
struct Kept {
    /// The GPU, on a stream of its own.
    owner: Cuda,
    /// The shards by their numbers of rows, and by the number of shards before them.
    of_rows: HashMap<(usize, usize), Shards<Cuda>>,
    /// The numbers 0, 1, 2, …, among them the ids of the rows of every shard so far.
    row_id: Indices,
}

static KEPT: OnceLock<Mutex<HashMap<usize, Kept>>> = OnceLock::new();

/// `rows` rows as one shard, behind `before` such shards.
///
/// # Errors
/// [`Error::Device`] if the stream's work is captured and this number of rows is new. The errors of the backend.
pub fn on_gpu(b: &Cuda, rows: usize, before: usize) -> Result<Shards<Cuda>> {
    let mut gpus = KEPT.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
    let ordinal = b.device().info().ordinal;
    let known = gpus.get(&ordinal).and_then(|kept| kept.of_rows.get(&(rows, before)));
    let shards = match known {
        Some(shards) => shards.clone(),
        None if b.device().is_captured()? => {
            let why =
                format!("{rows} rows are new: run the layer with them once before its work is captured");
            return Err(Error::Device { call: "capture of a layer".into(), why });
        }
        None => {
            let kept = match gpus.entry(ordinal) {
                Entry::Occupied(kept) => kept.into_mut(),
                Entry::Vacant(place) => {
                    let owner = Cuda::on(b.device().reopened()?);
                    let row_id = owner.upload::<i32>(&[])?;
                    place.insert(Kept { owner, of_rows: HashMap::new(), row_id })
                }
            };
            kept.add(rows, before)?
        }
    };
    let Groups { start, len, row_id, .. } = &shards.groups;
    let (start, len) = (lent(b, start, 0..2)?, lent(b, len, 0..1)?);
    let row_id = lent(b, row_id, before * rows..(before + 1) * rows)?;
    Ok(Shards { groups: Groups { start, len, row_id, ..shards.groups }, ..shards })
}

impl Kept {
    fn add(&mut self, rows: usize, before: usize) -> Result<Shards<Cuda>> {
        let (mut made, ids) = (Shards::new(&self.owner, 1, rows, before)?, (before + 1) * rows);
        if Cuda::len(&self.row_id) < ids {
            let numbers: Vec<i32> = (0..ids.next_power_of_two() as i32).collect();
            self.row_id = self.owner.upload(&numbers)?;
        }
        made.groups.row_id = self.row_id.clone();
        // The stream has no other work, and other streams may read the lists from now on.
        self.owner.device().synchronize()?;
        self.of_rows.insert((rows, before), made.clone());
        Ok(made)
    }
}

/// Some values of a buffer of another backend on the same GPU.
fn lent(b: &Cuda, of: &Indices, range: Range<usize>) -> Result<Indices> {
    let first = Cuda::buffer_id(of) + (range.start * size_of::<i32>()) as u64;
    // SAFETY: the buffer has these values and lives as long as its handle; nobody writes to it.
    b.borrow(unsafe { Lent::new(first, range.len() * size_of::<i32>(), Arc::new(of.clone())) })
}
